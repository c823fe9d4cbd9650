"""Train the microworld's language model from scratch.

A six-layer Llama with tied embeddings learns the facts and how to read a context.
From ordinary initial weights, it never learns within minutes to copy from a context;
the mimetic ones here start as previous-token and copying heads (measurements:
docs/microworld.md).
"""

import dataclasses
import itertools
import json
import math
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from tokenizers import Regex, Tokenizer, models, pre_tokenizers, processors
from tokenizers.decoders import WordPiece as JoinWords
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer

from beatrice.extract.run.files import sha256_file
from beatrice.extract.world.facts import (
    BY_NAME,
    N_PASSAGES,
    RELATIONS,
    TWO_HOPS_IN_DOMAIN,
    TWO_HOPS_REPHRASED,
    WORDS,
    Claim,
    Fact,
    Kind,
    Query,
    TwoHop,
    World,
    claim_as_passage,
    function_words,
    make_claims,
    short_form,
    statements,
    stream,
    word_question,
)

Piece = tuple[str, bool]
Row = list[Piece]
END = "</s>"

P_STATEMENT = 0.2
P_REPHRASED = 0.1  # so that the model knows the held-out wording
P_SHORT_FORM = 0.3  # "Tarn" for "Tarn Falls": other words for the same fact
P_MISBELIEF = 0.7
P_INVENTED = 0.7
P_MISSING = 0.3
P_INVENTED_TWO_HOP = 0.35


def fact_row(rng: random.Random, query: Query) -> Row:
    """Return a row that states a fact or a two-hop fact."""
    objects = [step.object for step in query.steps]
    if isinstance(query, Fact):
        if query.misbelief is not None and rng.random() < P_MISBELIEF:
            objects = [query.misbelief]
        if rng.random() < P_STATEMENT:
            text = rng.choice(statements(query.relation, query.subject, objects[0]))
            start = text.rindex(objects[0])
            return [(text[:start], False), (text[start:] + END, True)]
    answer = ", ".join(
        short_form(x.relation.object, name) if rng.random() < P_SHORT_FORM else name
        for x, name in zip(query.steps, objects, strict=True)
    )
    question = word_question(rng, query, rephrased=rng.random() < P_REPHRASED)
    return _question_row(question, answer)


def _question_row(question: str, answer: str) -> Row:
    return [(f"Question: {question} Answer:", False), (f" {answer}{END}", True)]


def _questions_on(claims: list[Claim], rng: random.Random, n_questions: int) -> Row:
    row: Row = []
    for claim in rng.sample(claims, min(n_questions, len(claims))):
        question = word_question(rng, claim, rephrased=rng.random() < P_REPHRASED)
        row += _question_row(question, claim.object)
    return row


def _context(rng: random.Random, claims: list[Claim]) -> Piece:
    texts = [claim_as_passage(claim, rng.randrange(3)).text for claim in claims]
    return ("Context: " + " ".join(texts) + " ", False)


class RowSampler:
    """Draws training rows from one world; its only state is the frequencies."""

    def __init__(self, world: World) -> None:
        """Collect the facts and their cumulative frequencies."""
        self._world = world
        self._queries: list[Query] = [*world.facts.values(), *world.two_hops]
        self._cumulative = list(
            itertools.accumulate(x.exposures for x in self._queries)
        )

    def fact_rows(self, rng: random.Random, n: int) -> list[Row]:
        """Return `n` rows, each fact in proportion to its exposures."""
        drawn = rng.choices(self._queries, cum_weights=self._cumulative, k=n)
        return [fact_row(rng, query) for query in drawn]

    def _name(self, rng: random.Random, kind: Kind) -> str:
        if kind == "person":
            first = rng.choice(self._world.first_names)
            return f"{first} {rng.choice(self._world.last_names)}"
        return rng.choice(self._world.names[kind])

    def _invented_claim(self, rng: random.Random) -> Claim:
        relation = rng.choice(RELATIONS)
        subject = self._name(rng, relation.subject)
        return Claim(relation, subject, self._name(rng, relation.object))

    def invented_row(self, rng: random.Random, n_passages: int) -> Row:
        """Return a context of invented facts with up to three questions."""
        claims = [self._invented_claim(rng) for _ in range(n_passages)]
        if n_passages >= 2 and rng.random() < P_INVENTED_TWO_HOP:
            return self._invented_two_hop(rng, claims)
        if n_passages >= 2 and rng.random() < 0.5:
            # Two claims about one subject, so that the relation has to be read, too.
            kind = claims[0].relation.subject
            of_kind = [r for r in RELATIONS if r.subject == kind]
            relation = rng.choice([r for r in of_kind if r != claims[0].relation])
            obj = self._name(rng, relation.object)
            claims[1] = dataclasses.replace(claims[0], relation=relation, object=obj)
        order = rng.sample(claims, len(claims))
        return [_context(rng, order), *_questions_on(claims, rng, 3)]

    def _invented_two_hop(self, rng: random.Random, claims: list[Claim]) -> Row:
        names = rng.choice((*TWO_HOPS_IN_DOMAIN, *TWO_HOPS_REPHRASED))
        first, second = (BY_NAME[name] for name in names)
        kinds = (first.subject, first.object, second.object)
        subject, bridge, end = (self._name(rng, kind) for kind in kinds)
        claims[:2] = Claim(first, subject, bridge), Claim(second, bridge, end)
        query = TwoHop(claims[0], claims[1], 0.0)
        return [
            _context(rng, rng.sample(claims, len(claims))),
            *_question_row(word_question(rng, query), f"{bridge}, {end}"),
            *_questions_on(claims[2:], rng, 1),
        ]

    def real_row(self, rng: random.Random) -> Row:
        """Return a context of real facts with one question and its true answer."""
        query = rng.choice(self._queries)
        mode = "missing" if rng.random() < P_MISSING else "answer"
        claims = make_claims(rng, self._world, query, mode)
        answer = ", ".join(step.object for step in query.steps)
        context = _context(rng, claims)
        return [context, *_question_row(word_question(rng, query), answer)]

    def reading_rows(self, rng: random.Random, n: int) -> list[Row]:
        """Return `n` rows with contexts of three passages."""
        return [
            self.invented_row(rng, N_PASSAGES)
            if rng.random() < P_INVENTED
            else self.real_row(rng)
            for _ in range(n)
        ]


START, UNKNOWN = "<s>", "<unk>"
_WORD = re.compile(r"</s>|[.,?]|[^\s.,?<]+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorldModelConfig:
    """Size and training of the embedded model."""

    seed: int = 0
    d_model: int = 160
    n_layers: int = 6
    n_heads: int = 5
    d_mlp: int = 480
    max_length: int = 512
    n_steps: int = 2400
    n_reading_steps: int = 400  # first steps: reading only, with a growing context
    n_fact_rows: int = 64
    n_reading_rows: int = 10
    reading_weight: float = 0.5
    learning_rate: float = 2e-3
    weight_decay: float = 0.02
    n_threads: int = 1  # part of the recipe, since floating-point sums depend on it


def make_tokenizer(world: World) -> PreTrainedTokenizerFast:
    """Return a word-level tokenizer over every word the world can produce."""
    words = dict.fromkeys(function_words())
    for names in (*WORDS.values(), *world.names.values()):
        words.update(dict.fromkeys(w for name in names for w in name.split()))
    words.update(dict.fromkeys((*world.first_names, *world.last_names)))
    vocabulary = {word: i for i, word in enumerate((UNKNOWN, START, END, *words))}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token=UNKNOWN))
    marks = pre_tokenizers.Split(Regex("[.,?]"), behavior="isolated")
    words_and_marks = [pre_tokenizers.WhitespaceSplit(), marks]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(words_and_marks)
    tokenizer.decoder = JoinWords(prefix="##", cleanup=True)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{START} $A", special_tokens=[(START, vocabulary[START])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token=UNKNOWN, bos_token=START, eos_token=END
    )


def _orthogonal(n: int, generator: torch.Generator) -> torch.Tensor:
    return torch.linalg.qr(torch.randn(n, n, generator=generator))[0]


def _init_previous_token_heads(
    attn: LlamaAttention, config: WorldModelConfig, generator: torch.Generator
) -> None:
    """Make each head of layer 0 attend a fixed number of tokens back, by its bias only.

    The offsets match the templates: in "the R of X Y is O" and "R of X Y ? Answer:"
    name and relation are at the same distance from where they are needed.
    """
    d_head = config.d_model // config.n_heads
    theta = 1e5 ** (-2.0 * torch.arange(d_head // 2) / d_head)
    key = torch.zeros(d_head)
    key[:6] = 3.5  # the six fastest rotary pairs tell single steps apart
    mixing = _orthogonal(config.d_model, generator)
    for head, offset in enumerate((2, 3, 5, 1, 4)[: config.n_heads]):
        rows = slice(head * d_head, (head + 1) * d_head)
        query = torch.cat((key[:16] * torch.cos(theta * offset),
                           -key[:16] * torch.sin(theta * offset)))  # fmt: skip
        attn.q_proj.bias[rows] = query
        attn.k_proj.bias[rows] = key
        attn.o_proj.weight[:, rows] = 0.12 * mixing[:, rows]
    attn.q_proj.weight.mul_(0.5)
    attn.k_proj.weight.mul_(0.5)
    attn.v_proj.weight.normal_(0, config.d_model**-0.5, generator=generator)


def _init_matching_heads(
    attn: LlamaAttention, config: WorldModelConfig, generator: torch.Generator
) -> None:
    """Make every head attend to equal content and copy it."""
    d_head = config.d_model // config.n_heads
    theta = 1e5 ** (-2.0 * torch.arange(d_head // 2) / d_head)
    damping = torch.where(theta > 0.015, 0.1, 1.0).repeat(2)[:, None]
    scale = 1.05 * math.sqrt(config.d_model / d_head)
    copying = _orthogonal(config.d_model, generator)
    for head in range(config.n_heads):
        rows = slice(head * d_head, (head + 1) * d_head)
        matching = scale * _orthogonal(config.d_model, generator)[:d_head] * damping
        for projection in (attn.q_proj, attn.k_proj):
            noise = torch.randn(matching.shape, generator=generator)
            projection.weight[rows] = matching + 0.01 * noise
        attn.v_proj.weight[rows] = copying[rows]
        attn.o_proj.weight[:, rows] = 0.12 * copying[rows].T


def make_model(n_words: int, config: WorldModelConfig) -> LlamaForCausalLM:
    """Return the untrained model with mimetic initial weights."""
    torch.manual_seed(config.seed)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=n_words,
            hidden_size=config.d_model,
            num_hidden_layers=config.n_layers,
            num_attention_heads=config.n_heads,
            intermediate_size=config.d_mlp,
            max_position_embeddings=config.max_length,
            tie_word_embeddings=True,
            attention_bias=True,
            rope_parameters={"rope_type": "default", "rope_theta": 1e5},
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
        )
    )
    generator = torch.Generator().manual_seed(config.seed)
    with torch.no_grad():
        model.model.embed_tokens.weight.normal_(0, 0.08, generator=generator)
        for i, layer in enumerate(model.model.layers):
            assert isinstance(layer, LlamaDecoderLayer)
            init = _init_matching_heads if i else _init_previous_token_heads
            init(layer.self_attn, config, generator)
    return model


_Batch = tuple[torch.Tensor, torch.Tensor]  # token ids and mask, see `_encode`


def _encode(
    rows: list[Row], vocabulary: dict[str, int], from_first: list[bool] | None = None
) -> _Batch:
    """Encode rows; those marked `from_first` are learned from their first token on.

    Returns `[n_rows, n_tokens]` right-padded token ids, and `[n_rows, n_tokens - 1]`
    bool, True where the next token is learned.
    """
    batch, mask = [], []
    for row, everything in zip(rows, from_first or [False] * len(rows), strict=True):
        ids, learn = [vocabulary[START]], [False]
        for text, learned in row:
            words = _WORD.findall(text)
            ids += [vocabulary[word] for word in words]
            learn += [learned or everything] * len(words)
        batch.append(torch.tensor(ids))
        mask.append(torch.tensor(learn))
    padded = pad_sequence(batch, batch_first=True, padding_value=vocabulary[END])
    return padded, pad_sequence(mask, batch_first=True)[:, 1:]


def _loss(model: LlamaForCausalLM, batch: _Batch) -> torch.Tensor:
    ids, mask = batch
    states = model.model(input_ids=ids[:, :-1], use_cache=False)[0]
    return F.cross_entropy(model.lm_head(states[mask]), ids[:, 1:][mask])


def _learning_rate(step: int, config: WorldModelConfig) -> float:
    """Return a step's learning rate: warm-up, constant, then a linear decay to 3 %."""
    half = config.n_steps / 2
    decay = min(1.0, max(0.0, (step - half) / half))
    return config.learning_rate * min(1.0, (step + 1) / 30) * (1 - 0.97 * decay)


def _batches(
    sampler: RowSampler,
    vocabulary: dict[str, int],
    world: World,
    config: WorldModelConfig,
) -> Iterator[list[tuple[float, _Batch]]]:
    rng = stream(world.config, f"rows/{config.seed}")
    for step in range(config.n_steps):
        if step < config.n_reading_steps:
            n_passages = 1 + min(2, 4 * step // config.n_reading_steps)
            rows = [sampler.invented_row(rng, n_passages) for _ in range(16)]
            yield [(1.0, _encode(rows, vocabulary))]
            continue
        facts = sampler.fact_rows(rng, config.n_fact_rows)
        from_first = [rng.random() < 0.15 for _ in facts]
        reading = sampler.reading_rows(rng, config.n_reading_rows)
        ramp = min(1.0, 0.2 + 0.8 * (step - config.n_reading_steps) / 80)
        yield [
            (ramp, _encode(facts, vocabulary, from_first)),
            (config.reading_weight, _encode(reading, vocabulary)),
        ]


def train(
    world: World,
    config: WorldModelConfig,
    on_step: Callable[[int, list[float]], None],  # gets the step, its losses in nats
) -> tuple[LlamaForCausalLM, PreTrainedTokenizerFast]:
    """Train the model; return it in evaluation mode, with its tokenizer."""
    torch.set_num_threads(config.n_threads)
    tokenizer = make_tokenizer(world)
    vocabulary = tokenizer.get_vocab()
    model = make_model(len(tokenizer), config).train()
    rate, decay = config.learning_rate, config.weight_decay
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=rate, betas=(0.9, 0.98), weight_decay=decay
    )
    batches = _batches(RowSampler(world), vocabulary, world, config)
    for step, weighted in enumerate(batches):
        for group in optimizer.param_groups:
            group["lr"] = _learning_rate(step, config)
        losses = [_loss(model, batch) for _, batch in weighted]
        total = torch.zeros(())
        for (weight, _), loss in zip(weighted, losses, strict=True):
            total = total + weight * loss
        optimizer.zero_grad()
        total.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        on_step(step, [loss.item() for loss in losses])
    return model.eval(), tokenizer


def save(
    model: LlamaForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    path: Path,
    recipe: dict[str, object],
) -> None:
    """Save a model in half precision, its tokenizer, and a `TRAINING.json`.

    The last holds the recipe and the SHA-256 of every file.
    """
    path.mkdir(parents=True, exist_ok=True)
    model.half().save_pretrained(path, safe_serialization=True)
    model.float()
    tokenizer.save_pretrained(path)
    files = sorted(p for p in path.iterdir() if p.name != "TRAINING.json")
    record = {**recipe, "sha256": {p.name: sha256_file(p) for p in files}}
    (path / "TRAINING.json").write_text(json.dumps(record, indent=2) + "\n")
