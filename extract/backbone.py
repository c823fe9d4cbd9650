"""A frozen language model, loaded from a directory or the Hub.

Only safetensors weights are read and no code of a checkpoint is ever run. A
checkpoint that leaves weights unset is refused: Transformers would fill them with
random numbers.
"""

import dataclasses
import hashlib
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from safetensors import SafetensorError
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from extract.layout import Layout, find_layout
from extract.modelname import check_name

Dtype = Literal["float32", "bfloat16", "float16"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backbone:
    """A frozen causal language model and what the other rooms ask about it.

    Attributes:
      model: in evaluation mode, no parameter requires a gradient.
      tokenizer: or None for a model made in memory.
      name: the path or Hub id it was loaded from.
      revision: the Hub's commit hash; else the SHA-256 of its weights and config.
      n_layers: decoder layers; a resid axis has `n_layers + 1` entries.
      d_model: width of the residual stream.
      n_heads: query heads per attention layer.
      attention_layers: 0-based layers that have an attention matrix; hybrid models
        (Qwen3.5) have recurrent layers between.
      max_length: longest sequence in tokens, or None where the model sets no limit.
    """

    model: Any
    tokenizer: Any
    name: str
    revision: str
    n_layers: int
    d_model: int
    n_heads: int
    attention_layers: tuple[int, ...]
    max_length: int | None
    layout: Layout = dataclasses.field(repr=False, compare=False)

    @property
    def device(self) -> torch.device:
        """Return where the model computes."""
        return self.layout.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights and the stream."""
        return self.layout.head.weight.dtype

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any = None,
        *,
        name: str = "in memory",
        revision: str | None = None,
    ) -> "Backbone":
        """Freeze a model that already exists.

        Args:
          model: a Transformers causal LM; put in evaluation mode, gradients off.
          tokenizer: its tokenizer, where text is needed.
          name: what to call it in messages and manifests.
          revision: what identifies its weights; None hashes them.

        Raises:
          ValueError: its residual layout is unknown.
        """
        model.eval().requires_grad_(False)
        layout = find_layout(model)
        config = model.config.get_text_config()
        return cls(
            model=model,
            tokenizer=tokenizer,
            name=name,
            revision=_hash_model(model) if revision is None else revision,
            n_layers=len(layout.layers),
            d_model=layout.head.in_features,
            n_heads=config.num_attention_heads,
            attention_layers=layout.attention_layers,
            max_length=getattr(config, "max_position_embeddings", None),
            layout=layout,
        )


def _hash_model(model: Any) -> str:
    """Return the SHA-256 of a model in memory: config and every tensor."""
    digest = hashlib.sha256(model.config.to_json_string().encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()


def _hash_files(directory: Path) -> str:
    """Return the SHA-256 of a checkpoint's weight and config files."""
    digest = hashlib.sha256()
    for path in (directory / "config.json", *sorted(directory.glob("*.safetensors"))):
        digest.update(path.name.encode())
        with path.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def _first_line(error: Exception) -> str:
    """Return the first line of a message, for use inside a sentence."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _remote_code(config: dict[str, Any], tokenizer: dict[str, Any]) -> str | None:
    """Return what a checkpoint asks to run, for a message, or None.

    Read before anything is built: Transformers would pass over it in silence where
    it has its own class for the model type.
    """
    found = {"config.json": config, "tokenizer_config.json": tokenizer}
    for file, content in found.items():
        if "auto_map" in content:
            asked = content["auto_map"]
            names = asked.values() if isinstance(asked, dict) else [asked]
            return f"{file} asks for {', '.join(map(str, names))}"
    return None


def _load(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    """Load model and tokenizer; every failure is a ValueError of one sentence."""
    failures = (OSError, RuntimeError, ValueError, SafetensorError)
    try:
        config, _ = PreTrainedConfig.get_config_dict(name)
        # One commit for all files, even if the repository moves on meanwhile.
        commit = config.get("_commit_hash")
        asked = _remote_code(config, get_tokenizer_config(name, revision=commit))
        if asked is None:
            model, report = AutoModelForCausalLM.from_pretrained(
                name,
                dtype=dtype,
                revision=commit,
                use_safetensors=True,
                trust_remote_code=False,
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(
                name, revision=commit, trust_remote_code=False
            )
    except failures as error:
        raise ValueError(
            f"backbone {name!r}: could not be loaded: {_first_line(error)}"
        ) from error
    if asked is not None:
        raise ValueError(
            f"backbone {name!r}: its {asked} (auto_map), that is, code from the "
            "checkpoint, which is never run; use a model that Transformers implements"
        )
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"backbone {name!r}: its weights lack {len(missing)} tensors of "
            f"{type(model).__name__}, first {missing[0]!r}; the checkpoint is "
            "incomplete or of another architecture"
        )
    return model, tokenizer


def load_backbone(
    path: str | Path, *, dtype: Dtype = "float32", device: str = "cpu"
) -> Backbone:
    """Load a frozen backbone.

    Args:
      path: a directory written by `save_pretrained`, or a Hub id.
      dtype: of weights and residual stream; readings are float32 in any case.
      device: a Torch device, such as "cpu" or "cuda:0".

    Raises:
      ValueError: nothing usable is there; one sentence says what was expected.
    """
    if dtype not in get_args(Dtype):
        raise ValueError(
            f"dtype: expected one of {', '.join(get_args(Dtype))}, found {dtype!r}"
        )
    name = str(path)
    check_name(name)
    directory = Path(name).expanduser()
    source = str(directory) if directory.exists() else name
    model, tokenizer = _load(source, getattr(torch, dtype))
    if directory.exists():
        revision = _hash_files(directory)
    else:
        revision = model.config._commit_hash
    return Backbone.from_model(
        model.to(device), tokenizer, name=name, revision=revision
    )
