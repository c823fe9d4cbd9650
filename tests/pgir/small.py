"""Small real objects: a detector, a corpus and its server, a runner of controllers."""

import contextlib
import dataclasses
import json
import threading

import jax
from transformers import BertConfig, BertModel, BertTokenizerFast

from beatrice.extract.records import Passage
from beatrice.jaxprobe.config import EncoderConfig
from beatrice.jaxprobe.detector import Detector, Provenance
from beatrice.jaxprobe.families import SPANS, paper_dims
from beatrice.pgir.bm25 import Bm25Retriever
from beatrice.pgir.controllers.loop import Reply
from beatrice.pgir.controllers.waves import AnswerService, CallJournal
from beatrice.pgir.corpus import build_corpus
from beatrice.pgir.index import PassageEncoderConfig
from beatrice.pgir.retrieval_server import RetrievalServer
from tests.jaxprobe.samples import identity_of, random_bank, random_head

LAYER = 3
QUESTION = "where was Skiband Rugrond born?"
PASSAGE = "Skiband Rugrond was born in Guzolt Falls."
CONFIG = EncoderConfig(projection=4, hidden=8, n_blocks=1, n_groups=2)
CORPUS = [Passage(title=f"T{i}", text=f"word{i} shared text") for i in range(12)]


def _bank(setting, dims):
    """Return a random encoder of all families, for signals as they are."""
    bank = random_bank(setting, dims, CONFIG, seed=0)
    at = bank.names.index("HPRA")
    return dataclasses.replace(
        bank,
        names=("HPRA",),
        params=jax.tree.map(lambda x: x[:, at : at + 1], bank.params),
        standardizer=identity_of(dims),
        lengths=(999,) * len(bank.spans),
    )


def make_detector(backbone):
    n_readings = 2 * 2 * len(backbone.attention_layers) * backbone.n_heads
    dims = paper_dims(
        hidden=backbone.d_model, prob=5, resid=4 * backbone.n_layers, attn=n_readings
    )
    closed, grounded = ("closed_book", "HPRA"), ("with_context", "HPRA")
    reads = {
        "closed_book": (closed,),
        "with_context": (grounded, closed),
        "single_pass": (grounded,),
    }
    return Detector(
        banks={setting: _bank(setting, dims) for setting in SPANS},
        heads={name: random_head(pairs, 2, CONFIG) for name, pairs in reads.items()},
        provenance=Provenance(
            model="embedded", revision=backbone.revision, layer=LAYER
        ),
    )


def retrained(detector, **changes):
    """Return a detector with some facts of its training changed."""
    trained = dataclasses.replace(detector.provenance, **changes)
    return dataclasses.replace(detector, provenance=trained)


def answering_of(probed, *texts, journal=None):
    """Return a service that answers with passages of these texts."""
    passages = [Passage(title="", text=text) for text in texts]
    return AnswerService(probed, passages, journal or CallJournal(None, ""))


TOPICS = "river city painter novel king planet bridge opera engine island".split()


def text_of(i):
    """Return a passage that resembles no other."""
    words = [TOPICS[i % 10], TOPICS[(i // 10) % 10], f"w{i % 97}", f"v{i % 89}"]
    return " ".join([*words, "is here", f"n{i}"])


def write_passages(path, numbers):
    """Write passages in the format of Search-R1 and FlashRAG."""
    lines = [
        json.dumps({"id": str(i), "contents": f'"Title {i}"\n{text_of(i)}'})
        for i in numbers
    ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def make_corpus(folder, n=60):
    """Build a corpus of `n` passages."""
    folder.mkdir(parents=True, exist_ok=True)
    source = write_passages(folder / "wiki.jsonl", range(n))
    return build_corpus(folder / "corpus", [source], lambda text: None)


def save_encoder(folder, seed=0, n_positions=64):
    """Save a small random BERT with `save_pretrained`; return its settings."""
    import torch

    torch.manual_seed(seed)
    folder.mkdir(parents=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *TOPICS, "is", "here"]
    words += [*"abcdefghijklmnopqrstuvwxyz0123456789:"]
    words += [f"##{item}" for item in "abcdefghijklmnopqrstuvwxyz0123456789"]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=n_positions,
        initializer_range=0.5,
    )
    BertModel(config).save_pretrained(folder)
    return PassageEncoderConfig(path=folder, max_tokens=48)


@contextlib.contextmanager
def input_shapes(backbone):
    """Yield the shapes of the ids that a model reads until the block ends."""
    shapes = []

    def add(module, args, kwargs):
        shapes.append(tuple(kwargs["input_ids"].shape))

    decoder = backbone.layout.decoder
    with decoder.register_forward_pre_hook(add, with_kwargs=True):
        yield shapes


class Ranked:
    """A retriever that returns the same ranking for every query."""

    def __init__(self, *ranking):
        self.ranking = ranking

    def search(self, queries, depth):
        return [self.ranking[:depth]] * len(queries)


def played(plan, serve):
    """Run a plan with replies from `serve`; return its result and its calls."""
    calls, value = [], None
    while True:
        try:
            call = plan.send(value)
        except StopIteration as end:
            return end.value, calls
        calls.append(call)
        value = serve(call)


def reply(text, log_prob=-0.5, n_prompt=10, n_shown=99):
    """An answer of one token and its stop token."""
    return Reply(
        text=text,
        token_ids=(7,),
        stop_id=2,
        log_probs=(log_prob, log_prob),
        n_prompt_tokens=n_prompt,
        n_shown=n_shown,
    )


@contextlib.contextmanager
def serving(server):
    """Run a server in a thread until the block ends."""
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.01}
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def corpus_server(**options):
    return RetrievalServer(Bm25Retriever(CORPUS), CORPUS, port=0, **options)
