"""Small real objects: a detector, a corpus and its server, a runner of controllers."""

import contextlib
import json
import threading

import jax
import jax.numpy as jnp
import numpy as np
from transformers import BertConfig, BertModel, BertTokenizerFast

from beatrice.extract.records import Passage
from beatrice.jaxprobe.calibration import fit_calibrator
from beatrice.jaxprobe.config import EncoderConfig, FusionConfig
from beatrice.jaxprobe.detector import Detector, EncoderBank, Provenance, SettingHead
from beatrice.jaxprobe.encoder import Encoder
from beatrice.jaxprobe.families import paper_dims
from beatrice.jaxprobe.fusion import FusionHead, head_inputs
from beatrice.jaxprobe.tokens import FamilyTokens
from beatrice.pgir.bm25 import Bm25Retriever
from beatrice.pgir.controllers.loop import Reply
from beatrice.pgir.corpus import build_corpus
from beatrice.pgir.index import PassageEncoderConfig
from beatrice.pgir.retrieval_server import RetrievalServer
from tests.jaxprobe.samples import KNOWN, identity_of, wide_scope

LAYER = 3
QUESTION = "where was Skiband Rugrond born?"
PASSAGE = "Skiband Rugrond was born in Guzolt Falls."
CONFIG = EncoderConfig(projection=4, hidden=8, n_blocks=1, n_groups=2)
FUSION = FusionConfig(hidden=8, n_slots=2)
CORPUS = [Passage(title=f"T{i}", text=f"word{i} shared text") for i in range(12)]


def _bank(dims, n_spans):
    tokens = tuple(jnp.zeros((2 * n_spans, 1, size)) for size in dims.sizes)
    masks = tuple(jnp.ones((2, 1), bool) for _ in range(n_spans))
    families = FamilyTokens(tokens, masks)
    init = jax.jit(Encoder(CONFIG, dims).init)
    params = init(jax.random.key(0), families, jnp.ones(4, bool))
    return EncoderBank(
        dims=dims,
        config=CONFIG,
        standardizer=identity_of(dims),
        names=("HPRA",),
        spans=tuple(range(3 - n_spans, 3)),
        params=jax.tree.map(lambda x: np.asarray(x)[None, None], params),
        lengths=(999,) * n_spans,
        scope=wide_scope(dims.total),
    )


def _head(reads):
    params = jax.jit(FusionHead(FUSION).init)(
        jax.random.key(1),
        head_inputs(jnp.zeros((2, 1, CONFIG.d_pooled)), jnp.zeros((2, 1))),
        jnp.arange(2),
        jnp.arange(2) < len(reads),
    )
    scores = np.linspace(0, 1, 20)
    return SettingHead(
        reads=reads,
        config=FUSION,
        params=jax.tree.map(lambda x: np.asarray(x)[None], params),
        calibrator=fit_calibrator(scores, scores > 0.5),
        **KNOWN,
    )


def make_detector(backbone):
    n_readings = 2 * 2 * len(backbone.attention_layers) * backbone.n_heads
    dims = paper_dims(
        hidden=backbone.d_model, prob=5, resid=4 * backbone.n_layers, attn=n_readings
    )
    closed, grounded = ("closed_book", "HPRA"), ("with_context", "HPRA")
    return Detector(
        banks={"closed_book": _bank(dims, 2), "with_context": _bank(dims, 3)},
        heads={
            "closed_book": _head((closed,)),
            "with_context": _head((grounded, closed)),
            "single_pass": _head((grounded,)),
        },
        provenance=Provenance(
            model="embedded", revision=backbone.revision, layer=LAYER
        ),
    )


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
