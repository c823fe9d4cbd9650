"""Loading a frozen backbone, refusing whatever Transformers would misread.

On a config that it cannot use, Transformers fails with any kind of exception. Some
things it silently ignores: remote code if it has a class of its own for the model,
unknown quantisation methods, and tensors that the config has no place for.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
import weakref
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, get_args

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationMixin,
    PreTrainedConfig,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.quantizers.auto import AutoHfQuantizer, AutoQuantizationConfig
from transformers.utils import CONFIG_NAME, SAFE_WEIGHTS_NAME, hub
from transformers.utils.hub import cached_file, extract_commit_hash

from beatrice.extract.backbone.layout import (
    Layout,
    find_layout,
    n_heads_of,
    plain_parts,
    window_of,
)
from beatrice.extract.backbone.names import (
    COMMIT,
    EMBEDDED,
    IN_MEMORY,
    MOST_LAYERS,
    WEIGHTS_INDEX,
    AttentionLayers,
    BackboneConfig,
    ModelDtype,
    ModelHashes,
    check_name,
    check_weights,
    entries_of,
    name_of_path,
    torch_device,
    unreachable_hub,
)
from beatrice.extract.records import Answer, check_choice
from beatrice.extract.run.console import silence_transformers, transformers_silenced
from beatrice.extract.run.files import (
    cached_result,
    read_json,
    sha256_json,
    sha256_once,
    software,
)
from beatrice.extract.run.process import keep_freed_memory
from beatrice.extract.signals.batch import BatchSplitter
from beatrice.extract.signals.precision import (
    check_default_dtype,
    float32_precision,
    loading_weights,
    rounding_of,
)

# Tensors that a text-only model does not use (towers for images and audio, heads that
# predict several tokens), and buffers that older versions saved.
_HARMLESS = re.compile(
    r"rotary_emb\.inv_freq$|\.attn\.bias$|\.masked_bias$|(^|\.)mtp[._]"
    r"|(^|\.)(visual|vision_tower|vision_model|audio_tower|multi_modal_projector"
    r"|embed_vision|embed_audio)\."
)
# Names for the number of layers in Transformers' configs.
_DEPTHS = "num_hidden_layers n_layer n_layers num_layers decoder_layers".split()
# Their messages mean nothing without the type: a KeyError's is only the key.
_BARE_ERRORS = (KeyError, AttributeError, TypeError, IndexError, ArithmeticError)


def _message_of(error: Exception) -> str:
    """Return an exception's message in a form that fits inside a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, _BARE_ERRORS):
        message = f"{type(error).__name__}: {' '.join(lines)}"[:300]
        return (
            "a value in its config.json or tokenizer_config.json is not one that "
            f"Transformers can use ({message})"
        )
    # Some messages give the cause on the second line.
    return " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])


@contextlib.contextmanager
def _checkpoint_errors(name: str) -> Iterator[None]:
    """Turn any exception of a library into a one-sentence error about a checkpoint."""
    try:
        yield
    # Catch everything: a config's values reach every part of Transformers, which checks
    # few of them, so no list of its exceptions could be complete.
    except Exception as error:
        raise ValueError(
            f"backbone {name!r}: could not be loaded: {_message_of(error)}"
        ) from error


def _check_remote_code(name: str, auto_maps: dict[str, Any]) -> None:
    """Check that a checkpoint requests no code of its own.

    Transformers silently ignores such a request if it has its own class for the model
    type. That is an error too (with Phi-3, for one), since the authors' code and
    Transformers' class need not be the same model.
    """
    for file, code in auto_maps.items():
        if code:
            names = code.values() if isinstance(code, dict) else [code]
            raise ValueError(
                f"backbone {name!r}: its {file} asks for {', '.join(map(str, names))} "
                "(auto_map), that is, code from the checkpoint, which is never run; "
                "use a model that Transformers implements"
            )


def _check_quantization(name: str, config: dict[str, Any]) -> None:
    """Check that Transformers can unpack the weights."""
    packing = config.get("quantization_config")
    if packing is None:
        return
    with _checkpoint_errors(name):
        is_supported = AutoHfQuantizer.supports_quant_method(packing)
    if not is_supported:
        raise ValueError(
            f"backbone {name!r}: its weights are quantised by "
            f"{packing.get('quant_method')!r}, which Transformers does not know and "
            "would ignore; use the unquantised checkpoint"
        )
    # bitsandbytes' default threshold is 6; at 0 no column is an outlier.
    if packing.get("load_in_8bit") and packing.get("llm_int8_threshold", 6.0):
        raise ValueError(
            f"backbone {name!r}: its weights are quantised by LLM.int8, which treats "
            "a column as an outlier if any token of the batch is large there, so that "
            "a token's signals would depend on its batch; use the unquantised "
            "checkpoint or a four-bit one"
        )


def _check_depth(name: str, config: Any) -> None:
    """Check that the config's number of layers is plausible."""
    for key, value in entries_of(config):
        if key in _DEPTHS and isinstance(value, int) and value > MOST_LAYERS:
            raise ValueError(
                f"backbone {name!r}: its config.json has {key}={value}, expected at "
                f"most {MOST_LAYERS}; use the config that was saved with the weights"
            )


_UNPACKED = "mxfp4", "fp8", "compressed-tensors"


def _unpacking_config(quantization: Any) -> Any:
    """Return a config that unpacks weights of four or eight bits, else None.

    Multiplying them packed needs kernels from the Hub, and compressed tensors unpack in
    the first pass of a whole model only. Unpacked, all are the same numbers on every
    device, in two to four times the memory.
    """
    if (quantization or {}).get("quant_method") in _UNPACKED:
        with contextlib.suppress(ImportError):  # raised again by loading the weights
            return AutoQuantizationConfig.from_dict(quantization | {"dequantize": True})
    return None


def _check_configs(name: str, commit: str | None = None) -> tuple[str | None, Any]:
    """Check a checkpoint's configs; return their commit and `_unpacking_config`.

    All files are then loaded from that commit, even if the repository changes in the
    meantime. If `commit` is None, the head of the repository's main branch is used.
    """
    # For half a minute, Transformers keeps trying a Hub that does not answer.
    is_silent = not Path(name).exists() and unreachable_hub() is not None
    with _checkpoint_errors(name):
        here: dict[str, Any] = {"local_files_only": is_silent}
        file = str(cached_file(name, CONFIG_NAME, revision=commit, **here))
        commit = extract_commit_hash(file, None)
        config, _ = PreTrainedConfig.get_config_dict(name, revision=commit)
        index = str(config.get("transformers_weights") or WEIGHTS_INDEX)
        absent = {"_raise_exceptions_for_missing_entries": False, **here}
        for other in (index, "adapter_config.json"):  # for `check_weights`
            cached_file(name, other, revision=commit, **absent)
        tokenizer = get_tokenizer_config(name, revision=commit)
        auto_maps = {
            "config.json": config.get("auto_map"),
            "tokenizer_config.json": tokenizer.get("auto_map"),
        }
    _check_remote_code(name, auto_maps)
    _check_depth(name, config)
    check_weights(f"backbone {name!r}", Path(file).parent, config)
    _check_quantization(name, config)
    with _checkpoint_errors(name):
        return commit, _unpacking_config(config.get("quantization_config"))


def _load_tokenizer(name: str, commit: str | None) -> Any:
    return AutoTokenizer.from_pretrained(name, revision=commit, trust_remote_code=False)


def check_vocabulary(name: str, model: Any, tokenizer: Any) -> None:
    """Check that the model has an embedding for every token of its tokenizer."""
    n_rows = model.get_input_embeddings().weight.shape[0]
    # Fine-tuned models often have one more token for padding, which is never an input.
    padding = {tokenizer.pad_token_id} - {tokenizer.eos_token_id}
    last = max(set(tokenizer.get_vocab().values()) - padding, default=0)
    if last >= n_rows:
        raise ValueError(
            f"backbone {name!r}: its tokenizer has ids up to {last}, but the model has "
            f"embeddings for only {n_rows} tokens (0 to {n_rows - 1}); use the "
            "tokenizer that was made for these weights, or resize the embeddings"
        )


def _check_tensors(name: str, model: Any, report: dict[str, Any]) -> None:
    """Check that the weights are exactly those that the config describes."""
    kind = type(model).__name__
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"backbone {name!r}: its weights lack tensors of {kind} ({len(missing)}, "
            f"first {missing[0]!r}); use a complete checkpoint of this model type"
        )
    for tensor, shape, expected in sorted(report["mismatched_keys"]):
        raise ValueError(
            f"backbone {name!r}: its weights hold {tensor!r} as {list(shape)}, but "
            f"{kind} with its config.json expects {list(expected)}; use the config "
            "that was saved with these weights"
        )
    extra = [k for k in sorted(report["unexpected_keys"]) if not _HARMLESS.search(k)]
    if extra:
        raise ValueError(
            f"backbone {name!r}: its weights hold tensors that {kind} with its "
            f"config.json has no place for ({len(extra)}, first {extra[0]!r}); use the "
            "config that was saved with these weights"
        )


def _fetch_weights(name: str, commit: str | None) -> None:
    """Fetch a model's weights from the Hub, as no thread computes while they load."""
    how: Any = {"revision": commit, "_raise_exceptions_for_missing_entries": False}
    if not Path(name).exists() and unreachable_hub() is None:
        if cached_file(name, SAFE_WEIGHTS_NAME, **how) is None:
            if index := cached_file(name, WEIGHTS_INDEX, **how):
                hub.get_checkpoint_shard_files(name, index, revision=commit)


def load_checkpoint(
    name: str, dtype: torch.dtype, commit: str | None = None
) -> tuple[Any, Any, str | None]:
    """Load model and tokenizer from a directory or Hub id; also return its commit."""
    commit, packing = _check_configs(name, commit)
    with _checkpoint_errors(name), transformers_silenced():
        _fetch_weights(name, commit)
        with loading_weights(dtype):
            loaded: Any = AutoModelForCausalLM.from_pretrained(
                name,
                dtype=dtype,
                revision=commit,
                use_safetensors=True,
                trust_remote_code=False,
                ignore_mismatched_sizes=True,  # checked below, by name
                output_loading_info=True,
                **({} if packing is None else {"quantization_config": packing}),
            )
        tokenizer = _load_tokenizer(name, commit)
    model, report = loaded
    _check_tensors(name, model, report)
    check_vocabulary(name, model, tokenizer)
    return model, tokenizer, commit


@dataclasses.dataclass(frozen=True)
class Outline:
    """A checkpoint without its weights."""

    model: Any  # on the device "meta": shapes, but no numbers
    config: Any  # of the text model
    tokenizer: Any
    quantization: Any | None  # how its weights are quantised, or None


def load_outline(name: str, commit: str | None = None) -> Outline:
    """Load a checkpoint without its weights, which takes seconds whatever its size.

    If `commit` is None, the head of the repository's main branch is used.
    """
    from beatrice.extract.backbone.gguf import outline_folder  # not needed for scoring

    check_name(name)
    with outline_folder(name) as source:
        commit, packing = _check_configs(source, commit)
        with _checkpoint_errors(source):
            config = AutoConfig.from_pretrained(
                source, revision=commit, trust_remote_code=False
            )
            packing = packing or getattr(config, "quantization_config", None)
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(
                    config, trust_remote_code=False
                )
            tokenizer = _load_tokenizer(source, commit)
        check_vocabulary(source, model, tokenizer)
    return Outline(model, model.config.get_text_config(), tokenizer, packing)


def check_quantization_support(name: str, outline: Outline) -> None:
    """Check that this machine can load a checkpoint's quantised weights."""
    if outline.quantization is not None:
        with _checkpoint_errors(name):
            AutoHfQuantizer.from_config(outline.quantization).validate_environment()


_WINDOWED = ("sliding_attention", "chunked_attention", "local")


def layers_read(
    layout: Layout, config: Any, choice: AttentionLayers
) -> tuple[int, ...]:
    """Return the layers, from 0, whose attention is read, given a text model's config.

    "full" leaves out layers with a window if a model has both kinds: like the paper
    (appendix K), it reads 7 of Gemma 4 E4B's 42; Qwen3.5-9B has 8, the rest recurrent.
    """
    layers = layout.attention_layers
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = getattr(config, "attention_layers", None)  # GPT-Neo
    if choice == "all" or kinds is None:
        return layers
    return tuple(i for i in layers if kinds[i] not in _WINDOWED) or layers


# One per model in memory, however often it is wrapped: its lock guards the model.
_SPLITTERS = weakref.WeakKeyDictionary[torch.nn.Module, BatchSplitter]()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backbone:
    """A frozen causal language model, and how its signals are read."""

    model: Any  # passes put it into evaluation mode, and record no gradients
    tokenizer: Any  # None for a model in memory that came without one
    name: str  # as a user gives it: "embedded", "smollm2", a path or Hub id
    # The Hub's commit hash, or the SHA-256 of the GGUF file or of weights and config.
    revision: str
    n_layers: int  # decoder layers; a resid axis has `n_layers + 1` entries
    d_model: int  # width of the residual stream
    n_heads: int  # query heads per attention layer
    max_length: int | None  # longest sequence in tokens, see `window_of`
    layout: Layout = dataclasses.field(repr=False, compare=False)
    # Whether it computes as its files say; a model in memory may run other code.
    is_of_files: bool = False
    # Identifies the state of the weights in memory, see `require_unchanged`.
    mark: tuple[Any, ...] = dataclasses.field(default=(), repr=False, compare=False)
    attention: AttentionLayers = "all"  # layers whose attention is read
    splitter: BatchSplitter = dataclasses.field(
        default_factory=BatchSplitter, repr=False, compare=False
    )

    def check_once(self, what: str, about: Any, find: Callable[[], Any]) -> Any:
        """Return a check's result for this model, which an earlier process may know.

        `about` is JSON: what the result depends on besides model, device and software.
        A result of None is not remembered.
        """
        if not self.is_of_files:
            return find()
        is_gpu = self.device.type == "cuda"
        device = torch.cuda.get_device_name(self.device) if is_gpu else self.device.type
        key = {
            "revision": self.revision,
            "class": type(self.model).__name__,
            "generation": sha256_json(self.model.generation_config.to_dict()),
            "device": device,
            "dtype": str(self.dtype),
            "matmul": float32_precision(self.device),
            "about": about,
            **software(),
        }
        return cached_result(what, key, find)

    @functools.cached_property
    def hashes(self) -> ModelHashes:
        """SHA-256 of config, tokenizer and chat template."""
        config = sha256_json(_identifying(self.model.config))
        find = functools.partial(_hash_tokenizer, self.tokenizer)
        with self.splitter.lock:
            # The revision of a directory does not cover the tokenizer.
            if self.name == EMBEDDED or Path(self.name).is_dir():
                return ModelHashes(config=config, **find())
            return ModelHashes(config=config, **self.check_once("tokenizer", [], find))

    def identity(self) -> dict[str, Any]:
        """Return all hashes, by the fields of a detector's `Provenance`."""
        names = ("hashes", "files_sha256", "weights_sha256")
        return {name: getattr(self, name) for name in names}

    @property
    def attention_layers(self) -> tuple[int, ...]:
        """Return the layers whose attention is read, see `layers_read`."""
        config = self.model.config.get_text_config()
        return layers_read(self.layout, config, self.attention)

    @property
    def passed_over(self) -> tuple[int, ...]:
        """Return the layers that have attention which is not read."""
        read = self.attention_layers
        return tuple(i for i in self.layout.attention_layers if i not in read)

    @property
    def device(self) -> torch.device:
        """Return the device on which the model computes."""
        return self.layout.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights and the residual stream."""
        return self.layout.head.weight.dtype

    def rounding_in(self, dtype: torch.dtype) -> torch.dtype:
        """Return the type to which factors are rounded when states have this dtype.

        Packed weights are multiplied in half precision whatever the states' type.
        """
        is_packed = getattr(self.model, "is_quantized", False)
        return torch.bfloat16 if is_packed else rounding_of(dtype, self.device)

    def check_length(self, n_tokens: int) -> None:
        """Check that a sequence of `n_tokens` tokens can be read."""
        if self.max_length is not None and n_tokens > self.max_length:
            raise ValueError(
                f"a sequence has {n_tokens} tokens, but backbone {self.name!r} reads "
                f"at most {self.max_length}; shorten the prompt or use another backbone"
            )

    @classmethod
    def from_model(
        cls,
        model: Any,
        tokenizer: Any = None,
        *,
        name: str = IN_MEMORY,
        revision: str | None = None,
        is_of_files: bool = False,
    ) -> "Backbone":
        """Wrap an existing model, without changing it.

        It must be a Transformers causal LM, which `torch.compile` or PEFT may have
        wrapped. The tokenizer is needed only for text. The revision identifies the
        weights; None computes it by hashing them.
        """
        bare = _unwrapped(model)
        layout = find_layout(bare)
        dtype = str(layout.head.weight.dtype).removeprefix("torch.")
        if dtype not in get_args(ModelDtype):
            choices = ", ".join(get_args(ModelDtype))
            raise ValueError(
                f"cannot read model {name!r} in {dtype}: expected one of {choices}; "
                "convert it, for example with model.float()"
            )
        devices = sorted({str(parameter.device) for parameter in bare.parameters()})
        if devices == ["meta"] or len(devices) > 1:
            meta = " (meta means none, as after offloading)" * ("meta" in devices)
            raise ValueError(
                f"cannot read model {name!r}: its weights are on {', '.join(devices)}"
                f"{meta}; expected one device that has them all; load the model on one "
                "device, without another device_map"
            )
        check_default_dtype()
        _check_quantization(name, bare.config.to_dict())
        config = bare.config.get_text_config()
        return cls(
            model=bare,
            tokenizer=tokenizer,
            name=name,
            revision=_hash_model(bare) if revision is None else revision,
            n_layers=len(layout.layers),
            d_model=layout.head.in_features,
            n_heads=n_heads_of(config),
            max_length=window_of(config),
            layout=layout,
            is_of_files=is_of_files,
            mark=_weights_version(bare, is_of_files),
            splitter=_SPLITTERS.setdefault(bare, BatchSplitter()),
        )

    @functools.cached_property
    def weights_sha256(self) -> str:
        """SHA-256 of config and weights in memory, by which copies know each other."""
        if not self.is_of_files:
            return self.revision
        with self.splitter.lock:
            return self.check_once("weights", [], lambda: _hash_model(self.model))

    @functools.cached_property
    def files_sha256(self) -> str:
        """SHA-256 of the files it was loaded from; empty if they are not available."""
        if not self.is_of_files or not COMMIT.fullmatch(self.revision):
            return self.revision if self.is_of_files else ""
        here: dict[str, Any] = {"revision": self.revision, "local_files_only": True}
        for error in ("missing_entries", "connection_errors"):
            here[f"_raise_exceptions_for_{error}"] = False
        if (config := cached_file(self.name, CONFIG_NAME, **here)) is None:
            return ""
        return _hash_files(Path(config).parent, _sha256_cached)

    def require_unchanged(self) -> None:
        """Check that the weights are unchanged, or signals would mix two models."""
        if _weights_version(self.model, self.is_of_files) != self.mark:
            raise ValueError(
                f"the weights of {self.name!r} have changed, or another adapter is "
                "active, since its LanguageModel was made; make another one"
            )


_N_COMPARED = 8  # values of each weight at least, if it has them


def _weights_version(model: Any, is_of_files: bool) -> tuple[Any, ...]:
    """Return addresses and versions of weights in memory, and the state of adapters.

    For a user's model also some values of each weight, since fused optimizers, such as
    the usual one of Transformers' Trainer, and writes to `.data` change no version.
    """
    weights = [*model.parameters()]
    places = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in weights]
    values = [] if is_of_files else _some_values(weights)
    return (*places, *values, *_adapters_of(model))


def _some_values(weights: list[torch.Tensor]) -> list[bytes]:
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for part in [part for weight in weights for part in plain_parts(weight)]:
        # A step that divides no usual width, or all would be of one column.
        step = max(1, (part.numel() - 1) // (_N_COMPARED - 1))
        some = part.detach().reshape(-1)[::step]
        by_dtype.setdefault(part.dtype, []).append(some)
    # Together, since every copy from a GPU waits for it; and NaN equals NaN as bytes.
    joined = [torch.cat(some).view(torch.uint8) for some in by_dtype.values()]
    return [values.cpu().numpy().tobytes() for values in joined]


def _adapters_of(model: Any) -> list[str]:
    """Return the state of each PEFT layer: active and merged adapters, scaling."""
    names = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
    return [
        f"{path} {[str(getattr(module, name, None)) for name in names]}"
        for path, module in model.named_modules()
        if hasattr(module, "merged_adapters")
    ]


def _unwrapped(model: Any) -> Any:
    """Return the wrapped Transformers model, whose own forward is run to generate."""
    peft = getattr(model, "active_peft_config", None)
    if peft is not None and getattr(peft, "is_prompt_learning", False):
        raise ValueError(
            f"cannot read {type(model).__name__}: {peft.peft_type.value} puts trained "
            "states before every prompt, which belong to no span; use adapters in the "
            "weights, such as LoRA"
        )
    for module in model.modules():
        if isinstance(module, GenerationMixin):
            if "_original_forward" in vars(module):  # set by accelerate
                raise ValueError(
                    f"cannot read {type(module).__name__}: it still computes in mixed "
                    "precision, as in training; give what accelerator.unwrap_model("
                    "model, keep_fp32_wrapper=False) returns"
                )
            return module
    raise ValueError(
        "model: expected a Transformers causal language model, found "
        f"{type(model).__name__}"
    )


# Config entries that do not identify a model: added by Transformers, or how it is run.
_NOT_OF_CONFIG = {
    *("transformers_version", "_name_or_path", "architectures"),
    *("dtype", "torch_dtype", "use_cache", "pad_token_id"),
    *("output_attentions", "output_hidden_states", "return_dict"),
}
# Texts that tokenizers split differently: case, spaces, digits, accents, scripts, code.
_CUT = (
    "Who wrote Dracula? It's  BRAM\tStoker's,\n\npublished 26 May 1897 (3.50 £).",
    "na\u00efve cafe\u0301 \ufb01n \u0414\u0440\u0430\u043a\u0443\u043b\u0430 "
    "\u5fb7\u53e4\u62c9 \U0001f987",
    "def f(x):\n    return {'a': x[0] != 1}  # <b>&amp;</b> </s>",
)


def _hash_tokenizer(tokenizer: Any) -> dict[str, str]:
    """Return the SHA-256 of a tokenizer and of its chat template.

    It covers vocabulary, special tokens and how `_CUT` is tokenised rather than the
    file, since releases of the library write the same tokenizer differently.
    """
    if tokenizer is None:
        return {}
    special = (getattr(tokenizer, f"{n}_token_id", None) for n in ("bos", "eos", "unk"))
    cut = [tokenizer(text)["input_ids"] for text in _CUT]
    about = [sorted(tokenizer.get_vocab().items()), list(special), cut]
    template = getattr(tokenizer, "chat_template", None)
    return {
        "tokenizer": sha256_json(about),
        "chat_template": "" if template is None else sha256_json(template),
    }


def _identifying(config: Any) -> dict[str, Any]:
    """Return a config's entries that identify a model, without its class's defaults."""
    entries = config.to_diff_dict().items()
    return {name: x for name, x in entries if name not in _NOT_OF_CONFIG}


def _hash_model(model: Any) -> str:
    """Return the SHA-256 of a model in memory: config, adapters and every tensor."""
    about = [_identifying(model.config), _adapters_of(model)]
    digest = hashlib.sha256(sha256_json(about).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        for part in plain_parts(tensor):
            flat = part.detach().cpu().contiguous().reshape(-1)
            digest.update(flat.view(torch.uint8).numpy().data)
    return digest.hexdigest()


def _sha256_cached(path: Path) -> str:
    """Return the SHA-256 of a file in the Hub's cache, which names large files by it.

    Those are not read: whoever loads a commit relies on an intact cache.
    """
    name = path.resolve().name
    return name if re.fullmatch("[0-9a-f]{64}", name) else sha256_once(path)


def _hash_files(directory: Path, sha256_of: Callable[[Path], str] = sha256_once) -> str:
    """Return the SHA-256 of a GGUF file, or of a checkpoint's weights and config."""
    if directory.is_file():
        return sha256_once(directory)
    digest = hashlib.sha256()
    for path in (directory / "config.json", *sorted(directory.glob("*.safetensors"))):
        digest.update(path.name.encode())
        digest.update(bytes.fromhex(sha256_of(path)))
    return digest.hexdigest()


def check_device(device: str) -> None:
    """Check that Torch has this device on this machine."""
    try:
        parsed = torch.device(device)
        if parsed.type != "cuda":  # GPUs have a more detailed error below
            torch.empty(0, device=parsed)
    # If Torch was built without a kind of device, each kind raises its own error.
    except (RuntimeError, AssertionError, ImportError):
        raise ValueError(
            f"device {device!r}: expected a Torch device of this machine, such as cpu, "
            "cuda or cuda:0"
        ) from None
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {device!r}: no such GPU here (Torch {torch.__version__} sees "
            f"{torch.cuda.device_count() or 'none'}); run where Torch sees it "
            "(CUDA_VISIBLE_DEVICES, a CUDA build of Torch), or choose the cpu (for a "
            "run: make it without --device cuda)"
        )


def load_backbone(
    path: str | Path,
    *,
    dtype: ModelDtype = "float32",
    device: str = "cpu",
    revision: str | None = None,
) -> Backbone:
    """Load a frozen backbone; on a CPU, also call `keep_freed_memory`.

    `path` is a directory written by `save_pretrained`, a GGUF file, or a Hub id;
    `dtype` is that of the weights and residual stream. Readings are always float32; on
    a GPU, products use TF32 only if the process allows it, which is not the default.
    `revision` is a commit of a Hub id; None takes the head of its main branch.
    """
    check_choice("dtype", dtype, get_args(ModelDtype))
    local = Path(os.path.expanduser(path))
    name = str(local if local.exists() else path)
    check_name(name)
    if revision is not None and local.exists():
        raise ValueError(
            f"revision: {name!r} is a model on this machine, which has no revisions to "
            "choose from; leave revision out, or give the id of a model on the Hub"
        )
    check_device(device)
    if not device.startswith("cuda"):
        keep_freed_memory()
    source = name
    if local.is_file():  # a GGUF file, which few need
        from beatrice.extract.backbone.gguf import loadable_path

        source = loadable_path(name)
    model, tokenizer, commit = load_checkpoint(source, getattr(torch, dtype), revision)
    revision = _hash_files(local) if local.exists() else commit
    return Backbone.from_model(
        model.to(device).eval().requires_grad_(False),
        tokenizer,
        name=name_of_path(name),
        revision=revision,
        is_of_files=True,
    )


def _answering_backend(answers: Path) -> dict[str, Any]:
    """Return who wrote a run's answers; empty if an earlier version did not say so."""
    path = answers / "backend.json"
    if not path.exists():
        return {}
    return read_json(path, dict[str, Any], f"delete {answers} to answer again")


def require_answering_model(answers: Path, backbone: Backbone) -> None:
    """Check that answers are read with the weights that wrote them."""
    backend = _answering_backend(answers)
    revision = str(backend.get("revision", "unknown"))
    # The revision of a server is what its user calls it: only commits can be compared.
    is_comparable = backend.get("backend") == "transformers" or (
        COMMIT.fullmatch(revision) and COMMIT.fullmatch(backbone.revision)
    )
    if revision == backbone.revision or not is_comparable:
        return
    raise ValueError(
        f"{answers} was written by revision {revision[:12]} of the backbone, but "
        f"{backbone.name} is now {backbone.revision[:12]}; restore the weights that "
        f"answered, or delete {answers} to answer again"
    )


def require_known_tokens(answers: Iterable[Answer], backbone: Backbone) -> None:
    """Check that the model has an embedding for every token of the answers."""
    n_tokens = backbone.model.get_input_embeddings().weight.shape[0]
    for answer in answers:
        stop = () if answer.stop_id is None else (answer.stop_id,)
        for token in (*answer.prompt_ids, *answer.token_ids, *stop):
            if not 0 <= token < n_tokens:
                raise ValueError(
                    f"answer {answer.key} has the token id {token}, but "
                    f"backbone {backbone.name!r} knows only 0 to {n_tokens - 1}; run "
                    "`beatrice answer` again with this model"
                )


def commit_of(config: BackboneConfig, answers: Path) -> str | None:
    """Return the commit of a Hub model that wrote a run's answers, if there are any.

    The model's main branch may have moved since. None for a model on this machine.
    """
    revision = str(_answering_backend(answers).get("revision"))
    is_here = Path(os.path.expanduser(config.path)).exists()
    return None if is_here or not COMMIT.fullmatch(revision) else revision


def open_backbone(config: BackboneConfig, answers: Path | None = None) -> Backbone:
    """Load a model with the run's number of threads, as it wrote the run's answers."""
    silence_transformers()
    torch.set_num_threads(config.n_threads)
    device = torch_device(config.device, torch.cuda.device_count())
    commit = None if answers is None else commit_of(config, answers)
    backbone = load_backbone(
        config.path, dtype=config.dtype, device=device, revision=commit
    )
    return dataclasses.replace(backbone, attention=config.attention_layers)
