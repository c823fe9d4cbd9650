"""A frozen backbone: loading it, and what Transformers would misread is an error.

Transformers fails over a config that it cannot use with whatever exception comes
first, and passes over some things in silence: remote code where it has a class of its
own, quantisation that it does not know, tensors that the config has no place for.
"""

import contextlib
import dataclasses
import functools
import hashlib
import os
import re
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
from transformers.quantizers.auto import AutoHfQuantizer
from transformers.utils import CONFIG_NAME
from transformers.utils.hub import cached_file, extract_commit_hash
from transformers.utils.quantization_config import Mxfp4Config

from beatrice.extract.backbone.layout import Layout, find_layout
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
    given_name,
    own_device,
    unreachable_hub,
)
from beatrice.extract.records import Answer
from beatrice.extract.run.console import quiet, quietly
from beatrice.extract.run.files import (
    read_json,
    remembered,
    sha256_json,
    sha256_of_model,
    software,
)
from beatrice.extract.run.process import keep_freed_memory
from beatrice.extract.signals.batch import Halves
from beatrice.extract.signals.precision import (
    check_default_dtype,
    float32_precision,
    rounding_of,
)


def _switch_lengths(rope: Any) -> list[int]:
    """Return the lengths at which a config's rotary positions change, if they do."""
    if not isinstance(rope, dict):
        return []
    if rope.get("rope_type") == "longrope":
        return [int(rope["original_max_position_embeddings"])]
    # Nested where each layer type has its own.
    return [n for layer_type in rope.values() for n in _switch_lengths(layer_type)]


def layer_values(config: Any, *names: str) -> list[Any]:
    """Return the distinct values of some entries of a text model's config.

    Some configs keep entries per layer, and Transformers refuses to read such an entry
    from the whole. Entries that are absent or None are left out.
    """
    is_per_layer = getattr(config, "is_heterogeneous", False)
    configs = config.per_layer_config if is_per_layer else [config]
    values = (getattr(layer, name, None) for layer in configs for name in names)
    return list(dict.fromkeys(value for value in values if value is not None))


def n_heads_of(config: Any) -> int:
    """Return the query heads of an attention layer, which all layers share."""
    values = layer_values(config, "num_attention_heads")
    lists = [n if isinstance(n, list | tuple) else [n] for n in values]
    counts = sorted({n for heads in lists for n in heads})
    if len(counts) != 1:
        listed = ", ".join(map(str, counts)) or "none"
        raise ValueError(
            "unknown residual layout: expected the same number of attention heads in "
            f"every layer, found {listed} in the config; use another backbone"
        )
    return counts[0]


def window_of(config: Any) -> int | None:
    """Return the longest sequence in tokens, or None where there is no limit.

    Longrope (Phi-3's long models) has two sets of frequencies, and Transformers takes
    the long one for a whole batch as soon as its longest sequence is longer than
    `original_max_position_embeddings`: what is read of a short example would depend on
    the rest of its batch. So the window ends where the short set does. Dynamic rotary
    scaling changes only beyond `max_position_embeddings`, where nothing is read.
    """
    limits = [getattr(config, "max_position_embeddings", None)]
    limits += _switch_lengths(getattr(config, "rope_parameters", None))
    return min((n for n in limits if n is not None), default=None)


# Tensors that a text-only model leaves out (towers for images and sounds, heads that
# predict several tokens), and buffers that older versions saved.
_HARMLESS = re.compile(
    r"rotary_emb\.inv_freq$|\.attn\.bias$|\.masked_bias$|(^|\.)mtp[._]"
    r"|(^|\.)(visual|vision_tower|vision_model|audio_tower|multi_modal_projector"
    r"|embed_vision|embed_audio)\."
)
# What Transformers' configs call the number of layers.
_DEPTHS = "num_hidden_layers n_layer n_layers num_layers decoder_layers".split()
# Their messages say nothing by themselves: a KeyError's is the key.
_BARE_ERRORS = (KeyError, AttributeError, TypeError, IndexError, ArithmeticError)


def _message_of(error: Exception) -> str:
    """Return a library's message, for use inside a sentence."""
    lines = str(error).strip().splitlines() or [type(error).__name__]
    if isinstance(error, _BARE_ERRORS):
        message = f"{type(error).__name__}: {' '.join(lines)}"[:300]
        return (
            "a value in its config.json or tokenizer_config.json is not one that "
            f"Transformers can use ({message})"
        )
    # Some put the cause on the second line.
    return " ".join(line.strip() for line in lines[: 1 + lines[0].endswith(":")])


@contextlib.contextmanager
def _loading(name: str) -> Iterator[None]:
    """Turn whatever a library raises into one sentence about a checkpoint."""
    try:
        yield
    # All of them: a config's values reach every part of Transformers, which checks
    # few, so no list of its exceptions is complete.
    except Exception as error:
        raise ValueError(
            f"backbone {name!r}: could not be loaded: {_message_of(error)}"
        ) from error


def _check_remote_code(name: str, auto_maps: dict[str, Any]) -> None:
    """Check that a checkpoint does not name code of its own.

    Transformers ignores such a request in silence where it has its own class for the
    model type. That is an error too (Phi-3's, for one): the authors' code and
    Transformers' class need not be one model.
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
    with _loading(name):
        is_supported = AutoHfQuantizer.supports_quant_method(packing)
    if not is_supported:
        raise ValueError(
            f"backbone {name!r}: its weights are quantised by "
            f"{packing.get('quant_method')!r}, which Transformers does not know and "
            "would pass over; use the checkpoint that is not quantised"
        )
    # bitsandbytes' own default threshold is 6; at 0 no column is an outlier.
    if packing.get("load_in_8bit") and packing.get("llm_int8_threshold", 6.0):
        raise ValueError(
            f"backbone {name!r}: its weights are quantised by LLM.int8, which treats a "
            "column as an outlier if any token of the batch is large there, so that a "
            "token's signals would depend on its batch; use the checkpoint that is "
            "not quantised, or one of four bits"
        )


def _check_depth(name: str, config: Any) -> None:
    """Check that the config has no more layers than any model."""
    for key, value in entries_of(config):
        if key in _DEPTHS and isinstance(value, int) and value > MOST_LAYERS:
            raise ValueError(
                f"backbone {name!r}: its config.json says {key}={value}, expected at "
                f"most {MOST_LAYERS}; use the config that was saved with the weights"
            )


def _packing(quantization: Any) -> Any:
    """Return how packed weights are loaded: gpt-oss's four bits as floats.

    Multiplying them as they are needs kernels that are fetched from the Hub; unpacked
    they are the same numbers on every device, and four times as large.
    """
    method = (quantization or {}).get("quant_method")
    return Mxfp4Config(dequantize=True) if method == "mxfp4" else None


def _check_configs(name: str, commit: str | None = None) -> tuple[str | None, Any]:
    """Check a checkpoint's configs; return their commit, and `_packing` of the weights.

    From that commit all files are loaded, even if the repository moves on meanwhile.
    None takes that of the repository's main branch.
    """
    # Transformers asks a Hub that does not answer for half a minute.
    is_silent = not Path(name).exists() and unreachable_hub() is not None
    with _loading(name):
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
    return commit, _packing(config.get("quantization_config"))


def _load_tokenizer(name: str, commit: str | None) -> Any:
    return AutoTokenizer.from_pretrained(name, revision=commit, trust_remote_code=False)


def check_vocabulary(name: str, model: Any, tokenizer: Any) -> None:
    """Check that the model has an embedding of every token of its tokenizer."""
    n_rows = model.get_input_embeddings().weight.shape[0]
    # Fine-tuned models often have one more token for padding, which is never fed.
    padding = {tokenizer.pad_token_id} - {tokenizer.eos_token_id}
    last = max(set(tokenizer.get_vocab().values()) - padding, default=0)
    if last >= n_rows:
        raise ValueError(
            f"backbone {name!r}: its tokenizer has ids up to {last}, but the model has "
            f"embeddings of {n_rows} tokens (0 to {n_rows - 1}); put the tokenizer "
            "beside the weights that it was made for, or resize the embeddings"
        )


def _check_tensors(name: str, model: Any, report: dict[str, Any]) -> None:
    """Check that the weights are those of the model which the config describes."""
    kind = type(model).__name__
    missing = sorted(report["missing_keys"])
    if missing:
        raise ValueError(
            f"backbone {name!r}: its weights lack {len(missing)} tensors of {kind}, "
            f"first {missing[0]!r}; the checkpoint is incomplete or of another "
            "architecture"
        )
    for tensor, shape, expected in sorted(report["mismatched_keys"]):
        raise ValueError(
            f"backbone {name!r}: its weights hold {tensor!r} as {list(shape)}, but "
            f"{kind} of its config.json has it as {list(expected)}; use the config "
            "that was saved with these weights"
        )
    extra = [k for k in sorted(report["unexpected_keys"]) if not _HARMLESS.search(k)]
    if extra:
        raise ValueError(
            f"backbone {name!r}: its weights hold {len(extra)} tensors that {kind} of "
            f"its config.json has no place for, first {extra[0]!r}; use the config "
            "that was saved with these weights"
        )


def load_checkpoint(
    name: str, dtype: torch.dtype, commit: str | None = None
) -> tuple[Any, Any, str | None]:
    """Load model and tokenizer of a directory or Hub id, with the latter's commit."""
    commit, packing = _check_configs(name, commit)
    options = {} if packing is None else {"quantization_config": packing}
    with _loading(name), quietly():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            name,
            dtype=dtype,
            revision=commit,
            use_safetensors=True,
            trust_remote_code=False,
            ignore_mismatched_sizes=True,  # checked below, by name
            output_loading_info=True,
            **options,
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


def load_outline(name: str) -> Outline:
    """Load what a checkpoint is, but not its weights; seconds, however large it is."""
    from beatrice.extract.backbone.gguf import outlined  # scoring has no need of it

    check_name(name)
    with outlined(name) as source:
        commit, packing = _check_configs(source)
        with _loading(source):
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
    """Check that this machine has what a checkpoint's quantised weights need."""
    if outline.quantization is not None:
        with _loading(name):
            AutoHfQuantizer.from_config(outline.quantization).validate_environment()


_WINDOWED = ("sliding_attention", "chunked_attention", "local")


def layers_read(
    layout: Layout, config: Any, choice: AttentionLayers
) -> tuple[int, ...]:
    """Return the layers whose attention is read, from 0, by the text model's config.

    "full" are those without a window where a model has both kinds: 7 of Gemma 4 E4B's
    42, which the paper reads (appendix K). Qwen3.5-9B has 8, the others are recurrent.
    """
    layers = layout.attention_layers
    kinds = getattr(config, "layer_types", None)
    if kinds is None:
        kinds = getattr(config, "attention_layers", None)  # GPT-Neo
    if choice == "all" or kinds is None:
        return layers
    return tuple(i for i in layers if kinds[i] not in _WINDOWED) or layers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Backbone:
    """A frozen causal language model and what the other rooms read of it."""

    model: Any  # passes put it into evaluation mode, and record no gradients
    tokenizer: Any  # None where a model in memory has no tokenizer
    name: str  # by which a person gives it: "embedded", "smollm2", a path or Hub id
    # The Hub's commit hash; else the SHA-256 of the GGUF file or of weights and config.
    revision: str
    n_layers: int  # decoder layers; a resid axis has `n_layers + 1` entries
    d_model: int  # width of the residual stream
    n_heads: int  # query heads per attention layer
    max_length: int | None  # longest sequence in tokens, see `window_of`
    layout: Layout = dataclasses.field(repr=False, compare=False)
    # Whether it is as its files have it; a model in memory may compute by other code.
    is_of_files: bool = False
    # Of the weights in memory, see `require_unchanged`.
    mark: tuple[Any, ...] = dataclasses.field(default=(), repr=False, compare=False)
    attention: AttentionLayers = "all"  # whose is read
    halves: Halves = dataclasses.field(
        default_factory=Halves, repr=False, compare=False
    )

    def check_once(self, what: str, about: Any, find: Callable[[], Any]) -> Any:
        """Return what a check of this model finds, from an earlier process if it can.

        `about` is JSON: what else than model, device and software decides it. A None is
        not remembered.
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
        return remembered(what, key, find)

    @functools.cached_property
    def hashes(self) -> ModelHashes:
        """SHA-256 of config, tokenizer and chat template."""
        # What the config says otherwise than its class does.
        entries = self.model.config.to_diff_dict().items()
        config = sha256_json({k: v for k, v in entries if k not in _NOT_OF_CONFIG})
        find = functools.partial(_hash_tokenizer, self.tokenizer)
        with self.halves.lock:
            # A directory's revision is not of the tokenizer.
            if self.name == EMBEDDED or Path(self.name).is_dir():
                return ModelHashes(config=config, **find())
            return ModelHashes(config=config, **self.check_once("tokenizer", [], find))

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
        """Return where the model computes."""
        return self.layout.head.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype of the weights and the stream."""
        return self.layout.head.weight.dtype

    def rounding_in(self, dtype: torch.dtype) -> torch.dtype:
        """Return to which type factors are rounded where states have a dtype.

        Packed weights are multiplied in half precision whatever the states are.
        """
        is_packed = getattr(self.model, "is_quantized", False)
        return torch.bfloat16 if is_packed else rounding_of(dtype, self.device)

    def check_length(self, n_tokens: int) -> None:
        """Check that a sequence of so many tokens can be read."""
        if self.max_length is not None and n_tokens > self.max_length:
            raise ValueError(
                f"a sequence has {n_tokens} tokens, backbone {self.name!r} reads at "
                f"most {self.max_length}; shorten its prompt, or use another backbone"
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
        """Take a model that already exists, and leave it as it is.

        It is a Transformers causal LM, bare or wrapped by `torch.compile` or PEFT. The
        tokenizer is needed for text alone; the revision identifies the weights, and
        None hashes them.
        """
        bare = _unwrapped(model)
        layout = find_layout(bare)
        dtype = str(layout.head.weight.dtype).removeprefix("torch.")
        if dtype not in get_args(ModelDtype):
            choices = ", ".join(get_args(ModelDtype))
            raise ValueError(
                f"cannot read {name} in {dtype}: expected one of {choices}; convert "
                "it, as model.float() does"
            )
        devices = sorted({str(parameter.device) for parameter in bare.parameters()})
        if devices == ["meta"] or len(devices) > 1:
            raise ValueError(
                f"cannot read {name}: its weights lie on {', '.join(devices)} (meta: "
                "on no device, as what is offloaded); expected one device that holds "
                "all of them; load it there, without another device_map"
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
            mark=_mark_of(bare),
        )

    def is_of_revision(self, revision: str) -> bool:
        """Return whether it is a model, by its own revision or as one in memory."""
        return revision in (self.revision, self._revision_in_memory)

    @functools.cached_property
    def _revision_in_memory(self) -> str:
        return _hash_model(self.model)

    @functools.cached_property
    def files_sha256(self) -> str:
        """SHA-256 of the files it is loaded from; empty where there are none now."""
        if not self.is_of_files or not COMMIT.fullmatch(self.revision):
            return self.revision if self.is_of_files else ""
        here: dict[str, Any] = {"revision": self.revision, "local_files_only": True}
        for error in ("missing_entries", "connection_errors"):
            here[f"_raise_exceptions_for_{error}"] = False
        if (config := cached_file(self.name, CONFIG_NAME, **here)) is None:
            return ""
        return _hash_files(Path(config).parent, _sha256_cached)

    def require_unchanged(self) -> None:
        """Check that nobody has changed the weights since: signals would mix both."""
        if _mark_of(self.model) != self.mark:
            raise ValueError(
                f"the weights of {self.name!r} have changed, or another adapter is "
                "active, since it was taken; make another LanguageModel of it"
            )


def _mark_of(model: Any) -> tuple[Any, ...]:
    """Return what changes with weights in memory, without reading them.

    Where each lies, how often it was written to, and which adapters are active.
    """
    weights = model.parameters()
    places = [(p.data_ptr(), 0 if p.is_inference() else p._version) for p in weights]
    return (*places, *_adapters_of(model))


def _adapters_of(model: Any) -> list[str]:
    """Return how each layer of PEFT's is set: active adapters, their scale, merged."""
    names = ("active_adapters", "disable_adapters", "merged_adapters", "scaling")
    return [
        f"{path} {[str(getattr(module, name, None)) for name in names]}"
        for path, module in model.named_modules()
        if hasattr(module, "merged_adapters")
    ]


def _unwrapped(model: Any) -> Any:
    """Return the Transformers model in a wrapper: its own forward runs to generate."""
    peft = getattr(model, "active_peft_config", None)
    if peft is not None and getattr(peft, "is_prompt_learning", False):
        raise ValueError(
            f"cannot read {type(model).__name__}: {peft.peft_type.value} puts trained "
            "states before every prompt, which are of no span; use adapters in the "
            "weights, such as LoRA's"
        )
    for module in model.modules():
        if isinstance(module, GenerationMixin):
            if "_original_forward" in vars(module):  # accelerate's
                raise ValueError(
                    f"cannot read {type(module).__name__}: it still computes in mixed "
                    "precision, as it was trained; give what accelerator.unwrap_model("
                    "model, keep_fp32_wrapper=False) returns"
                )
            return module
    raise ValueError(
        "model: expected a Transformers causal language model, found "
        f"{type(model).__name__}"
    )


# Of a config: what Transformers adds to it, and how this process computes.
_NOT_OF_CONFIG = ("transformers_version", "_name_or_path", "dtype", "torch_dtype")
_HOW_USED = (
    *("use_cache", "output_attentions", "output_hidden_states", "return_dict"),
    "architectures",  # which saving writes
)
# Texts that tokenizers cut differently: case, space, digits, accents, scripts, code.
_CUT = (
    "Who wrote Dracula? It's  BRAM\tStoker's,\n\npublished 26 May 1897 (3.50 £).",
    "na\u00efve cafe\u0301 \ufb01n \u0414\u0440\u0430\u043a\u0443\u043b\u0430 "
    "\u5fb7\u53e4\u62c9 \U0001f987",
    "def f(x):\n    return {'a': x[0] != 1}  # <b>&amp;</b> </s>",
)


def _hash_tokenizer(tokenizer: Any) -> dict[str, str]:
    """Return the SHA-256 of a tokenizer and of its chat template.

    Vocabulary, special tokens and how it cuts some texts, not its file: releases of
    the library write the same tokenizer differently.
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


def _hash_model(model: Any) -> str:
    """Return the SHA-256 of a model in memory: config, adapters and every tensor."""
    entries = model.config.to_diff_dict().items()
    config = {k: v for k, v in entries if k not in _NOT_OF_CONFIG + _HOW_USED}
    digest = hashlib.sha256(sha256_json([config, _adapters_of(model)]).encode())
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        digest.update(flat.view(torch.uint8).numpy())
    return digest.hexdigest()


def _sha256_cached(path: Path) -> str:
    """Return the SHA-256 of a file in the Hub's cache, whose large files it names.

    Whoever loads a commit takes for granted that the cache is whole.
    """
    name = path.resolve().name
    return name if re.fullmatch("[0-9a-f]{64}", name) else sha256_of_model(path)


def _hash_files(
    directory: Path, sha256_of: Callable[[Path], str] = sha256_of_model
) -> str:
    """Return the SHA-256 of a GGUF file, or of a checkpoint's weights and config."""
    if directory.is_file():
        return sha256_of_model(directory)
    digest = hashlib.sha256()
    for path in (directory / "config.json", *sorted(directory.glob("*.safetensors"))):
        digest.update(path.name.encode())
        digest.update(bytes.fromhex(sha256_of(path)))
    return digest.hexdigest()


def check_device(device: str) -> None:
    """Check that Torch has a device here."""
    try:
        parsed = torch.device(device)
        if parsed.type != "cuda":  # of a GPU there is more to say
            torch.empty(0, device=parsed)
    # Each kind of device has its own error where Torch was built without it.
    except (RuntimeError, AssertionError, ImportError):
        raise ValueError(
            f"device {device!r}: expected a Torch device that is here, such as cpu, "
            "cuda or cuda:0"
        ) from None
    if parsed.type == "cuda" and (parsed.index or 0) >= torch.cuda.device_count():
        raise ValueError(
            f"device {device!r}: Torch {torch.__version__} sees "
            f"{torch.cuda.device_count() or 'no'} GPUs here; go on where it sees them "
            "(CUDA_VISIBLE_DEVICES, a CUDA build of Torch), or choose the cpu (a run: "
            "make it without --device cuda)"
        )


def load_backbone(
    path: str | Path,
    *,
    dtype: ModelDtype = "float32",
    device: str = "cpu",
    revision: str | None = None,
) -> Backbone:
    """Load a frozen backbone; on a CPU, also `keep_freed_memory`.

    The path is a directory written by `save_pretrained`, a GGUF file, or a Hub id, the
    dtype of weights and residual stream. Readings are float32 in any case, on a GPU
    TF32 in products only where the process allows it, as it does not by itself. The
    revision is a commit of a Hub id; None takes that of its main branch.
    """
    if dtype not in get_args(ModelDtype):
        choices = ", ".join(get_args(ModelDtype))
        raise ValueError(f"dtype: expected one of {choices}, found {dtype!r}")
    local = Path(os.path.expanduser(path))
    name = str(local if local.exists() else path)
    check_name(name)
    if revision is not None and local.exists():
        raise ValueError(
            f"revision: {name!r} is a model on this machine, which has none to choose; "
            "leave revision out, or give the id of a model of the Hub"
        )
    check_device(device)
    if not device.startswith("cuda"):
        keep_freed_memory()
    source = name
    if local.is_file():  # GGUF, which few need
        from beatrice.extract.backbone.gguf import unpacked

        source = unpacked(name)
    model, tokenizer, commit = load_checkpoint(source, getattr(torch, dtype), revision)
    revision = _hash_files(local) if local.exists() else commit
    return Backbone.from_model(
        model.to(device).eval().requires_grad_(False),
        tokenizer,
        name=given_name(name),
        revision=revision,
        is_of_files=True,
    )


def require_answering_model(answers: Path, backbone: Backbone) -> None:
    """Check that answers are read with the weights that gave them.

    The signals would be those of a model that never wrote these answers. Who gave them,
    `backend.json` in the run's folder of answers says; without that file (an earlier
    version's run) nothing can be compared.
    """
    path = answers / "backend.json"
    if not path.exists():
        return
    backend = read_json(path, dict[str, Any], f"delete {answers} to answer again")
    revision = str(backend.get("revision"))
    # A server's user names its weights as they like: only commits can be compared.
    is_comparable = backend.get("backend") == "transformers" or (
        COMMIT.fullmatch(revision) and COMMIT.fullmatch(backbone.revision)
    )
    if revision == backbone.revision or not is_comparable:
        return
    raise ValueError(
        f"{answers} was answered by revision {revision[:12]} of the backbone, but "
        f"{backbone.name} is now {backbone.revision[:12]}; put the weights that "
        f"answered back, or delete {answers} to answer again"
    )


def require_known_tokens(answers: Iterable[Answer], backbone: Backbone) -> None:
    """Check that the model has an embedding of every token of the answers."""
    n_tokens = backbone.model.get_input_embeddings().weight.shape[0]
    for answer in answers:
        stop = () if answer.stop_id is None else (answer.stop_id,)
        for token in (*answer.prompt_ids, *answer.token_ids, *stop):
            if not 0 <= token < n_tokens:
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
    backbone = load_backbone(config.path, dtype=config.dtype, device=device)
    return dataclasses.replace(backbone, attention=config.attention_layers)
