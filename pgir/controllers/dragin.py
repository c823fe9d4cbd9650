"""DRAGIN: retrieve when an uncertain word matters to what follows (Su et al., 2024).

After oneal2000/DRAGIN, `generate.py` (AttnWeightRAG), with the last layer's attention.
The value of a word is the attention that it gets, normalised over the sentence and
multiplied by the sentence's length in words, times the entropy with which it was
written. A value above theta triggers retrieval. The query consists of the words that
the triggering ones attend to, and the sentence is written again with the passages.

Departures: under the run's template an answer is one sentence, so there is at most one
trigger, and no forced answer after it. Question and answer are read without a BOS
token, which a tokenizer may add in the original. Words are split at white space,
whereas the original only knows the marks of Llama 2's tokenizer. Content words are
those that are not stop words (`content_words`). If all triggering words are function
words, the original divides by zero; here the query is what they attend to. Theta is
chosen on validation (published: 0.6 to 1.5, depending on model and set).
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from beatrice.extract.backbone.loading import Backbone
from beatrice.extract.generate.generator import decode_ids
from beatrice.extract.records import Example
from beatrice.extract.signals.attention import CallReading, run_decoder
from beatrice.extract.signals.batch import budget_for, pad_batch
from beatrice.extract.signals.sequence import batches_of
from beatrice.extract.signals.span_sums import AttentionCall, AttentionMap
from beatrice.pgir.bridge import emissions
from beatrice.pgir.controllers.loop import (
    AttentionToWords,
    Call,
    ControllerConfig,
    Cost,
    Plan,
    Reply,
    WordReading,
)
from beatrice.pgir.controllers.session import Session, rival
from beatrice.pgir.controllers.waves import ENTROPY, AnswerService, BatchedService

THETA = 1.0  # published for 2Wiki with Llama-2-7B-chat
MOST_QUERY_WORDS = 25  # retrieve_keep_top_k for the same
_SHARES = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)


@torch.no_grad()
def last_attention(
    backbone: Backbone,
    sequences: Sequence[Sequence[int]],
    tokens_per_batch: int,
    reduce: Callable[[np.ndarray], np.ndarray],
) -> list[np.ndarray]:
    """Return `reduce` of the last attention layer's weights for every sequence.

    The weights are `[n_heads, n_tokens, n_tokens]`; those of a batch are alive at once.
    """
    reduced: list[Any] = [None] * len(sequences)
    layers = backbone.layout.attention_layers

    def last_weights(layer: int, call: AttentionCall | AttentionMap) -> Any:
        """Return `[n_examples, n_heads, n_tokens, n_tokens]` for the last layer."""
        if layer < layers[-1]:
            return None
        return call.prepared().log_weights(0, call.shape[2]).exp().cpu()

    for batch in batches_of([len(ids) for ids in sequences], tokens_per_batch):
        rows = [np.array(sequences[i], np.int64) for i in batch]
        ids = pad_batch(rows, backbone.device)
        budget = budget_for(backbone.device).n_attention_weights
        reading = CallReading(ids.shape[1], layers, budget, see=last_weights)
        run_decoder(backbone.layout, ids, reading=reading)
        weights = reading.per_layer()[-1].numpy()
        for row, i in enumerate(batch):
            length = len(sequences[i])
            reduced[i] = reduce(weights[row, :, :length, :length])
    return reduced


def content_words(text: str) -> list[str]:
    """Return the words of a text that are not function words, in lower case.

    scikit-learn's stop words replace DRAGIN's tags by spaCy (noun, adjective, verb,
    proper noun, number): we depend on no tagger, and invented names have no tag.
    """
    from sklearn.feature_extraction.text import ENGLISH_STOP_WORDS

    words = re.findall(r"\w[\w'-]*", text.lower())
    return [word for word in words if word not in ENGLISH_STOP_WORDS]


def word_owners(ends: Sequence[int], text: str) -> tuple[list[str], np.ndarray]:
    """Return a text's words, and the index of each token's word, `[n_tokens]`.

    Args:
      ends: for each token, the index of the character after it in the decoded text.
      text: the text, whose words are split at white space.
    """
    # Bytes may decode to one sign each until their character is complete.
    stops = np.minimum.accumulate(ends[::-1])[::-1]
    words = list(re.finditer(r"\S+", text))
    starts = np.array([word.start() for word in words])
    owners = np.searchsorted(starts, stops, side="left") - 1
    return [word.group() for word in words], np.clip(owners, 0, None)


def word_values(words: WordReading) -> np.ndarray:
    """Return each word's value, to be compared with theta, `[n_words]`."""
    attention = np.array(words.attention)
    share = attention / max(attention.sum(), 1e-12)
    return share * np.array(words.entropy) * len(words.words)


def query_words(
    attended: AttentionToWords, hits: np.ndarray, most: int = MOST_QUERY_WORDS
) -> str:
    """Return the query: the words that the hits attend to most, in their order.

    Args:
      attended: question and answer, and what each word of the answer attends to.
      hits: triggering words, `[n_answer_words]` bool, at least one.
      most: most words of the query.
    """
    words, n_question = attended.words, len(attended.words) - len(attended.rows)
    is_content = np.array([bool(content_words(word)) for word in words])
    is_hit = np.zeros(len(words), bool)
    is_hit[n_question:] = hits[: len(attended.rows)]
    asking = is_hit & is_content if (is_hit & is_content).any() else is_hit
    rows = [attended.rows[i - n_question] for i in np.flatnonzero(asking)]
    weight = np.mean(rows, axis=0)
    others = np.flatnonzero(is_content & ~is_hit)
    top = others[np.argsort(-weight[others], kind="stable")[:most]]
    return " ".join(words[i] for i in sorted(top))


class WordService(BatchedService):
    """Serves "words" and "attended", each with a pass over bare text."""

    def __init__(self, answering: AnswerService) -> None:
        """Take the service that made the answers."""
        self._answering = answering
        self._backbone = answering.probed.backbone

    def cost(self, call: Call, value: Any) -> Cost:
        """Return the cost: one pass, and another if entropies have to be read again."""
        is_second = call.kind == "words" and not self._answering.is_read_at_once
        return Cost(forwards=1 + is_second)

    def values(self, calls: Sequence[Call]) -> Sequence[WordReading | AttentionToWords]:
        """Return the attention read for each answer."""
        replies = [self._answering.journal.value(call.answer) for call in calls]
        read = {"words": self._words, "attended": self._attended}[calls[0].kind]
        with self._answering.probed.lock:
            return read(calls, replies)

    def _attention(
        self,
        sequences: Sequence[Sequence[int]],
        reduce: Callable[[np.ndarray], np.ndarray],
    ) -> list[np.ndarray]:
        size = self._answering.generator.tokens_per_batch
        return last_attention(self._backbone, sequences, size, reduce)

    def _words(
        self, calls: Sequence[Call], replies: Sequence[Any]
    ) -> list[WordReading]:
        tokenizer = self._backbone.tokenizer
        words_of = [WordReading((), (), ()) for _ in calls]
        texts = self._texts(replies)
        written = [i for i, text in enumerate(texts) if text.strip()]
        if not written:
            return words_of
        token_ids = [replies[i].token_ids for i in written]
        # What each token gets at most, in the mean over heads.
        received = self._attention(token_ids, lambda x: x.max(axis=1).mean(axis=0))
        for i, looked_at in zip(written, received, strict=True):
            ids = replies[i].token_ids
            ends = [len(decode_ids(tokenizer, ids[: n + 1])) for n in range(len(ids))]
            words, owners = word_owners(ends, texts[i])
            entropy = np.array(self._entropies(calls[i], replies[i]))
            counts = np.bincount(owners, minlength=len(words))
            sums = np.bincount(owners, looked_at, len(words))
            means = np.bincount(owners, entropy, len(words)) / np.maximum(counts, 1)
            columns = tuple(sums.tolist()), tuple(means.tolist())
            words_of[i] = WordReading(tuple(words), *columns)
        return words_of

    def _texts(self, replies: Sequence[Reply]) -> list[str]:
        """Decode the answers' ids; `Reply.text` may end with part of a stop token."""
        tokenizer = self._backbone.tokenizer
        return [decode_ids(tokenizer, reply.token_ids) for reply in replies]

    def _entropies(self, call: Call, reply: Reply) -> Sequence[float]:
        """Return the entropies with which an answer's tokens were written, in nats."""
        if reply.entropies is not None:
            return reply.entropies
        answer = self._answering.answer_of(call, reply)
        (signals,) = self._answering.probed.read([answer]).signals
        lengths = len(answer.prompt_ids), len(reply.token_ids)
        return emissions(signals, *lengths)[:, ENTROPY].tolist()

    def _attended(
        self, calls: Sequence[Call], replies: Sequence[Any]
    ) -> list[AttentionToWords]:
        pairs = zip(calls, self._texts(replies), strict=True)
        texts = [f"{call.text} {text.strip()}" for call, text in pairs]
        encoded = self._backbone.tokenizer(
            texts, add_special_tokens=False, return_offsets_mapping=True
        )
        attended = []
        means = self._attention(encoded["input_ids"], lambda x: x.mean(axis=0))
        places = zip(calls, texts, encoded["offset_mapping"], means, strict=True)
        for call, text, offsets, weights in places:
            words, owners = word_owners([stop for _, stop in offsets], text)
            n_question = len(call.text.split())
            rows = []
            for word in range(n_question, len(words)):
                tokens = np.flatnonzero(owners == word)
                row = np.zeros(len(words))
                for token in tokens[tokens > 0]:
                    earlier = weights[token - 1, : tokens[0]]
                    share = earlier / max(earlier.sum(), 1e-12)
                    row += np.bincount(owners[: tokens[0]], share, len(words)) / len(
                        tokens
                    )
                rows.append(tuple(row.tolist()))
            attended.append(AttentionToWords(tuple(words), tuple(rows)))
        return attended


def dragin(question: str, theta: float, config: ControllerConfig) -> Plan[str]:
    """Answer, and answer again with passages if a word triggers retrieval."""
    draft = yield Call("answer", question)
    words = yield Call("words", question)
    hits = word_values(words) > theta
    if not hits.any():
        return draft.text
    attended = yield Call("attended", question)
    query = query_words(attended, hits)
    ranking = yield Call("search", query or question, n=config.depth)
    if not ranking:
        return draft.text
    reply = yield Call("answer", question, tuple(ranking[: config.n_passages]))
    return reply.text


@rival("dragin")
def run_dragin(session: Session) -> None:
    """Choose theta among quantiles of the validation answers' values, and run."""
    wording = WordService(session.answering)
    session.waves.services |= {"words": wording, "attended": wording}
    shared = session.config

    def strongest(example: Example) -> Plan[float]:
        yield Call("answer", example.question)
        words = yield Call("words", example.question)
        return float(word_values(words).max(initial=0.0))

    results = session.run("dragin:draft", session.validation, strongest)
    values = np.array([done.value for done in results])
    grid = [THETA, -1.0, *np.quantile(values, _SHARES).tolist()]
    session.tune("dragin", grid, lambda theta, e: dragin(e.question, theta, shared))
