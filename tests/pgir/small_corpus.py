"""A corpus of a few passages and a text encoder of random weights, on disk."""

import json

from transformers import BertConfig, BertModel, BertTokenizerFast

from beatrice.pgir.corpus import build_corpus
from beatrice.pgir.index import EncoderConfig

TOPICS = "river city painter novel king planet bridge opera engine island".split()


def text_of(i):
    """Return a passage that only itself resembles."""
    words = [TOPICS[i % 10], TOPICS[(i // 10) % 10], f"w{i % 97}", f"v{i % 89}"]
    return " ".join([*words, "is here", f"n{i}"])


def write_passages(path, numbers):
    """Write passages as Search-R1 and FlashRAG do."""
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


def save_encoder(folder, seed=0):
    """Save a small random BERT, as `save_pretrained` does; return its settings."""
    import torch

    torch.manual_seed(seed)
    folder.mkdir(parents=True)
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *TOPICS, "is", "here"]
    words += [*"abcdefghijklmnopqrstuvwxyz0123456789:"]
    words += [f"##{one}" for one in "abcdefghijklmnopqrstuvwxyz0123456789"]
    (folder / "vocab.txt").write_text("\n".join(words))
    BertTokenizerFast(str(folder / "vocab.txt")).save_pretrained(folder)
    config = BertConfig(
        vocab_size=len(words),
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=64,
        initializer_range=0.5,
    )
    BertModel(config).save_pretrained(folder)
    return EncoderConfig(path=folder, max_tokens=48)
