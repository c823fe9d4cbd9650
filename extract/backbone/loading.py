"""A frozen backbone: loading it, and whether it is the one that gave the answers."""

import dataclasses
import hashlib
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, get_args

import torch

from beatrice.extract.backbone.checkpoint import load_checkpoint, n_heads_of, window_of
from beatrice.extract.backbone.layout import Layout, find_layout
from beatrice.extract.backbone.names import (
    BackboneConfig,
    ModelDtype,
    check_name,
    own_device,
)
from beatrice.extract.records import Answer
from beatrice.extract.run.console import quiet
from beatrice.extract.run.files import read_json, sha256_file
from beatrice.extract.run.memory import keep_freed_memory

_COMMIT = re.compile("[0-9a-fA-F]{40}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backbone:
    """A frozen causal language model and what the other rooms ask about it.

    Attributes:
      model: in evaluation mode, no parameter requires a gradient.
      tokenizer: or None for a model made in memory.
      name: the path or Hub id it was loaded from.
      revision: the Hub's commit hash; else the SHA-256 of the GGUF file, or of weights
        and config.
      n_layers: decoder layers; a resid axis has `n_layers + 1` entries.
      d_model: width of the residual stream.
      n_heads: query heads per attention layer.
      attention_layers: 0-based layers that have an attention matrix; hybrid models
        (Qwen3.5) have recurrent layers between.
      max_length: longest sequence in tokens, see `window_of`, or None where the
        model sets no limit.
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
            n_heads=n_heads_of(config),
            attention_layers=layout.attention_layers,
            max_length=window_of(config),
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
    """Return the SHA-256 of a GGUF file, or of a checkpoint's weights and config."""
    if directory.is_file():
        return sha256_file(directory)
    digest = hashlib.sha256()
    for path in (directory / "config.json", *sorted(directory.glob("*.safetensors"))):
        digest.update(path.name.encode())
        with path.open("rb") as content:
            digest.update(hashlib.file_digest(content, "sha256").digest())
    return digest.hexdigest()


def check_device(device: str) -> None:
    """Refuse a device that Torch does not have here.

    Raises:
      ValueError: says what there is.
    """
    try:
        found = torch.device(device)
    except RuntimeError:
        raise ValueError(
            f"device {device!r}: expected a Torch device, such as cpu, cuda or cuda:0"
        ) from None
    if found.type == "cuda" and (found.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {device!r}: Torch {torch.__version__} sees "
            f"{torch.cuda.device_count() or 'no'} GPUs here; go on where it sees them "
            "(CUDA_VISIBLE_DEVICES, a CUDA build of Torch), or make the run without "
            "--device cuda"
        )


def load_backbone(
    path: str | Path, *, dtype: ModelDtype = "float32", device: str = "cpu"
) -> Backbone:
    """Load a frozen backbone; on a CPU, also `keep_freed_memory`.

    Args:
      path: a directory written by `save_pretrained`, a GGUF file, or a Hub id.
      dtype: of weights and residual stream; readings are float32 in any case.
      device: a Torch device, such as "cpu" or "cuda:0".

    Raises:
      ValueError: nothing usable is there; one sentence says what was expected.
    """
    if dtype not in get_args(ModelDtype):
        choices = ", ".join(get_args(ModelDtype))
        raise ValueError(f"dtype: expected one of {choices}, found {dtype!r}")
    name = str(path)
    check_name(name)
    check_device(device)
    if not device.startswith("cuda"):
        keep_freed_memory()
    place = Path(name).expanduser()
    is_local = place.exists()
    source = str(place) if is_local else name
    if place.is_file():  # GGUF, which few need: three files
        from beatrice.extract.backbone.unpacking import unpacked

        source = unpacked(name)
    model, tokenizer = load_checkpoint(source, getattr(torch, dtype))
    revision = _hash_files(place) if is_local else model.config._commit_hash
    return Backbone.from_model(
        model.to(device), tokenizer, name=name, revision=revision
    )


def require_answering_model(answers: Path, backbone: Backbone) -> None:
    """Refuse to read answers with weights that did not give them.

    The signals would be those of a model that never wrote these answers.

    Args:
      answers: the run's folder of answers. Its `backend.json` says who gave them;
        without that file (an earlier version's run) nothing can be compared.
      backbone: the model that is to read them.

    Raises:
      ValueError: another revision answered.
    """
    path = answers / "backend.json"
    if not path.exists():
        return
    found = read_json(path, dict[str, Any], f"delete {answers} to answer again")
    revision = str(found.get("revision"))
    # A server's user names its weights as they like: only commits can be compared.
    is_comparable = found.get("backend") == "transformers" or (
        _COMMIT.fullmatch(revision) and _COMMIT.fullmatch(backbone.revision)
    )
    if revision == backbone.revision or not is_comparable:
        return
    raise ValueError(
        f"{answers} was answered by revision {revision[:12]} of the backbone, but "
        f"{backbone.name} is now {backbone.revision[:12]}; put the weights that "
        f"answered back, or delete {answers} to answer again"
    )


def require_known_tokens(answers: Iterable[Answer], backbone: Backbone) -> None:
    """Refuse answers with token ids that the model has no embedding of.

    Raises:
      ValueError: names the first of them.
    """
    n_tokens = backbone.model.get_input_embeddings().weight.shape[0]
    for answer in answers:
        stop = () if answer.stop_id is None else (answer.stop_id,)
        for token in (*answer.prompt_ids, *answer.token_ids, *stop):
            if token >= n_tokens:
                raise ValueError(
                    f"the answer {answer.key} has the token id {token}, but "
                    f"{backbone.name} knows 0 to {n_tokens - 1}; run `beatrice answer` "
                    "again with this model"
                )


def open_backbone(config: BackboneConfig) -> Backbone:
    """Load a run's backbone with the run's number of threads."""
    quiet()
    torch.set_num_threads(config.n_threads)
    device = own_device(config.device, torch.cuda.device_count())
    return load_backbone(config.path, dtype=config.dtype, device=device)
