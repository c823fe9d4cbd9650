"""Texts to vectors: an encoder by path, as E5 and the sentence transformers are run.

Mean (or first-token) pooling of the last hidden states, then L2 norm, so that an inner
product is a cosine. E5 was trained with "query: " and "passage: " before every text.
"""

import dataclasses
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from beatrice.extract.run.files import sha256_file, sha256_json

Pooling = Literal["mean", "cls"]
Kind = Literal["query", "passage"]
_E5 = re.compile(r"(?<![a-z0-9])e5(?![a-z0-9])", re.IGNORECASE)
_TOKENS_PER_BATCH = 8192  # padding included
# What an encoder's vectors depend on, beside its weights.
_FILES = ("config.json", "tokenizer.json", "vocab.txt", "tokenizer_config.json")


@dataclasses.dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """How an encoder is run.

    Attributes:
      path: a directory written by `save_pretrained`, weights as safetensors.
      query_prefix: put before a question.
      passage_prefix: put before a passage.
      pooling: what of the last hidden states is kept.
      max_tokens: of a text, special tokens included; the rest is cut. Passages of 100
        words have 130 to 180 tokens, so 256 lose nothing of them.
      dtype: of weights and hidden states; pooling is always in float32.
    """

    path: Path
    query_prefix: str = ""
    passage_prefix: str = ""
    pooling: Pooling = "mean"
    max_tokens: int = 256
    dtype: Literal["float32", "bfloat16"] = "float32"


def _json(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def encoder_config(path: Path, **given: Any) -> EncoderConfig:
    """Return how an encoder is run, as its own files say, or its name for E5.

    Args:
      path: its directory.
      **given: fields of `EncoderConfig` that a person chose; None leaves them open.

    Raises:
      ValueError: the directory holds no encoder, or says a pooling we do not know.
    """
    path = Path(path).expanduser().resolve()
    if not (path / "config.json").is_file():
        raise ValueError(
            f"{path} is no encoder: expected a directory with config.json and "
            "model.safetensors, as `save_pretrained` writes it"
        )
    own = _json(path / "config.json")
    prompts = _json(path / "config_sentence_transformers.json").get("prompts") or {}
    names = (path.name, str(own.get("_name_or_path", "")))
    is_e5 = any(_E5.search(name) for name in names)
    pooled = _json(path / "1_Pooling" / "config.json")
    if pooled.get("pooling_mode_cls_token"):
        pooling: Pooling = "cls"
    elif pooled.get("pooling_mode_mean_tokens", True):
        pooling = "mean"
    else:
        raise ValueError(
            f"{path}: its pooling is neither mean nor the first token's, and no other "
            "is known here"
        )
    passages = prompts.get("passage", prompts.get("document"))
    found = {
        "query_prefix": prompts.get("query", "query: " if is_e5 else ""),
        "passage_prefix": "passage: " if is_e5 and passages is None else passages or "",
        "pooling": pooling,
    }
    found |= {name: value for name, value in given.items() if value is not None}
    return EncoderConfig(path=path, **found)


def encoder_identity(config: EncoderConfig) -> str:
    """Return the SHA-256 of all that an encoder's vectors depend on, but its path."""
    files = [*sorted(config.path.glob("*.safetensors"))]
    if not files:
        raise ValueError(f"{config.path} has no weights as safetensors")
    files += [config.path / name for name in _FILES if (config.path / name).is_file()]
    settings = dataclasses.asdict(config)
    del settings["path"]
    return sha256_json([settings, {file.name: sha256_file(file) for file in files}])


class TextEncoder:
    """An encoder in memory.

    Attributes:
      config: how it is run.
      identity: see `encoder_identity`.
      d_model: width of its vectors.
    """

    def __init__(self, config: EncoderConfig, *, device: str = "cpu") -> None:
        """Load the weights."""
        import torch
        from transformers import AutoModel, AutoTokenizer

        self.config, self.identity = config, encoder_identity(config)
        self._tokenizer = AutoTokenizer.from_pretrained(config.path)
        model = AutoModel.from_pretrained(
            config.path, use_safetensors=True, dtype=getattr(torch, config.dtype)
        )
        self._model = model.to(device).eval()
        self._device = device
        self.d_model = int(model.config.hidden_size)

    def encode(self, texts: Sequence[str], kind: Kind) -> np.ndarray:
        """Return unit vectors `[n_texts, d_model]` float32.

        Texts of similar length share a batch; batches depend on the texts alone, so
        the same list gives the same bytes on the same machine.

        Args:
          texts: at least one.
          kind: which prefix they get.
        """
        config = self.config
        prefix = config.query_prefix if kind == "query" else config.passage_prefix
        ids = self._tokenizer(
            [prefix + text for text in texts],
            truncation=True,
            max_length=config.max_tokens,
            return_attention_mask=False,
        )["input_ids"]
        order = sorted(range(len(ids)), key=lambda i: (len(ids[i]), i))
        found = np.empty((len(ids), self.d_model), np.float32)
        start = 0
        while start < len(order):
            stop = start + 1
            while (
                stop < len(order)
                and (stop + 1 - start) * len(ids[order[stop]]) <= _TOKENS_PER_BATCH
            ):
                stop += 1
            batch = order[start:stop]
            found[batch] = self._encode([ids[i] for i in batch])
            start = stop
        return found

    def _encode(self, ids: Sequence[Sequence[int]]) -> np.ndarray:
        """Return the vectors of one batch."""
        import torch

        width = max(map(len, ids))
        padded = np.zeros((len(ids), width), np.int64)
        mask = np.zeros((len(ids), width), np.int64)
        for row, own in enumerate(ids):
            padded[row, : len(own)], mask[row, : len(own)] = own, 1
        keep = torch.from_numpy(mask).to(self._device)
        with torch.inference_mode():
            states = self._model(
                input_ids=torch.from_numpy(padded).to(self._device),
                attention_mask=keep,
            ).last_hidden_state.float()
            if self.config.pooling == "mean":
                weights = keep[..., None].float()
                vectors = (states * weights).sum(1) / weights.sum(1)
            else:
                vectors = states[:, 0]
            unit = torch.nn.functional.normalize(vectors, dim=-1)
        return unit.cpu().numpy()
