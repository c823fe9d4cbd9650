"""A GGUF file as a checkpoint directory, which is created once and cached.

Transformers' own `from_pretrained(gguf_file=…)` holds the whole model in float32, and
ignores rotary scaling and tensors that it has no place for. Here Transformers gives
config, tokenizer and tensor names; tensors are dequantised and written one at a time.
"""

import contextlib
import copy
import dataclasses
import functools
import json
import math
import os
import re
import shutil
import struct
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import ml_dtypes
import numpy as np
import torch
from tokenizers import Regex, decoders, pre_tokenizers
from transformers import AutoModelForCausalLM, GenerationConfig, TokenizersBackend
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.integrations.gguf.gguf_config_mapping import (
    GGUF_CONFIG_ARCHS,
    get_gguf_config,
)
from transformers.integrations.gguf.gguf_tokenizer_mapping import (
    GGUF_PRE_TOKENIZER_SPLITS,
)
from transformers.integrations.gguf.utils import (
    get_gguf_conversion_mapping,
    is_gguf_arch_supported,
)
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

from beatrice.extract.backbone.names import MOST_LAYERS, locked_folder
from beatrice.extract.run.console import Progress, Update
from beatrice.extract.run.files import (
    replaced_folder,
    sha256_once,
    user_cache,
    verify_checksums,
)
from beatrice.extract.signals.precision import loading_weights

# Formats of header values, for struct and NumPy, by their type (gguf.GGUFValueType).
_FORMATS = dict(zip([0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12], "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
_ROPE_FREQS = "rope_freqs.weight"  # replaces scaling parameters in the metadata
# Tokens that llama.cpp takes for the end of a turn in any file (llama-vocab.cpp).
_ENDS_OF_TURN = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <turn|> "
    "<|endoftext|> <|eom_id|> <EOT> <_EOT> <|end_of_text|> <end_of_utterance>"
).split()
# How texts are split into words, by llama.cpp's names (same file). For every name that
# it does not know, Transformers splits like GPT-2.
_LIKE_GPT2 = frozenset("gpt-2 mpt olmo trillion mellum a.x-4.0".split())
_LIKE_SMOLLM = frozenset("smollm starcoder refact minerva-7b".split())
_LIKE_QWEN2 = frozenset("qwen2 stablelm2".split())
# Defaults for older files, which have no such name.
_UNNAMED = {"qwen2": "qwen2", "qwen2moe": "qwen2", "starcoder2": "starcoder"}
_KNOWN = _LIKE_GPT2 | _LIKE_SMOLLM | _LIKE_QWEN2 | GGUF_PRE_TOKENIZER_SPLITS.keys()
# For these, texts begin with a BOS token even if the file does not request it, and
# words in the vocabulary are taken whole before merges are applied.
_LIKE_LLAMA3 = frozenset(
    "llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 tekken".split()
)


@dataclasses.dataclass(frozen=True)
class TensorEntry:
    """Where one tensor is stored: its shape in Torch's order, ggml type and bytes."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    start: int
    n_bytes: int


@dataclasses.dataclass(frozen=True)
class Header:
    """A GGUF file without its weights."""

    path: Path  # the file
    values: dict[str, Any]  # metadata; arrays of more than 4,096 entries are None
    n_tokens: int  # size of the vocabulary
    tensors: dict[str, TensorEntry]  # by their names in the file

    @property
    def architecture(self) -> str:
        """The file's name for the model's architecture."""
        return str(self.values["general.architecture"])

    @functools.cached_property
    def config_values(self) -> dict[str, Any]:
        """The config that Transformers derives from the metadata."""
        if self.architecture in GGUF_CONFIG_ARCHS:
            metadata = self.values | {"tokenizer.ggml.tokens": self.n_tokens}
            return get_gguf_config(metadata, tuple(self.tensors))
        values = load_gguf_checkpoint(str(self.path))["config"]
        return {"vocab_size": self.n_tokens, **values}

    @property
    def weights(self) -> dict[str, TensorEntry]:
        """The tensors that are weights of the model."""
        return {k: v for k, v in self.tensors.items() if k != _ROPE_FREQS}


class _Cursor:
    """Reads the numbers and texts of a header; an error if the file ends before."""

    def __init__(self, content: np.ndarray) -> None:
        self.content, self.at = content.data, 0

    def take(self, form: str) -> Any:
        """Return the next value, or the next ones as a tuple."""
        values = struct.unpack_from(f"<{form}", self.content, self.at)
        self.at += struct.calcsize(f"<{form}")
        return values[0] if len(values) == 1 else values

    def text(self) -> str:
        return self.take(f"{self.take('Q')}s").decode()

    def value(self, kind: int) -> tuple[Any, int]:
        """Return a value and its number of elements, 1 unless it is an array."""
        if kind == _STRING:
            return self.text(), 1
        if kind != _ARRAY:
            return self.take(_FORMATS[kind]), 1
        element, n_elements = self.take("IQ")
        # Longer arrays belong to the vocabulary, which only the tokenizer needs.
        is_short = n_elements <= 4096
        if element == _STRING:
            words = [self.text() for _ in range(n_elements)]
            return words if is_short else None, n_elements
        form = np.dtype(f"<{_FORMATS[element]}")
        values = np.frombuffer(self.content, form, n_elements, self.at)
        self.at += values.nbytes
        return values.tolist() if is_short else None, n_elements


class GgufError(ValueError):
    """An error about a file that cannot be used, in one sentence."""

    def __init__(self, path: Path, text: str) -> None:
        """Format the sentence: the file, what is wrong with it, and what to do."""
        super().__init__(f"backbone {str(path)!r}: {text}")


_USE_ANOTHER = "use the model's safetensors"


@contextlib.contextmanager
def damage_errors(
    path: Path, what: str, remedy: str = "fetch the file again"
) -> Iterator[None]:
    """Turn any library error over a damaged or unknown file into one sentence."""
    try:
        yield
    except (OSError, GgufError):
        raise  # already names the file
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise GgufError(path, f"{what} ({cause}); {remedy}") from error


def read_header(path: Path) -> Header:
    """Read a GGUF file except its weights; takes a second for 262,144 tokens."""
    content = np.memmap(path, mode="r", dtype=np.uint8)
    with damage_errors(path, "its header is damaged"):
        return _parsed(path, content)


def _parsed(path: Path, content: np.ndarray) -> Header:
    cursor = _Cursor(content)
    magic, version, n_tensors, n_values = cursor.take("IIQQ")
    if magic != gguf.GGUF_MAGIC or version not in (2, 3):
        raise GgufError(path, "expected a GGUF file of version 2 or 3")
    values: dict[str, Any] = {}
    n_tokens = 0
    for _ in range(n_values):
        key, kind = cursor.text(), cursor.take("I")
        values[key], n_elements = cursor.value(kind)
        if key == "tokenizer.ggml.tokens":
            n_tokens = n_elements
    listed = []
    for _ in range(n_tensors):
        name, n_dims = cursor.text(), cursor.take("I")
        shape = tuple(cursor.take("Q") for _ in range(n_dims))[::-1]
        listed.append((name, shape, *cursor.take("IQ")))
    alignment = values.get("general.alignment", gguf.GGUF_DEFAULT_ALIGNMENT)
    begin = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, number, offset in listed:
        kind = gguf.GGMLQuantizationType(number)
        n_block, n_bytes = gguf.GGML_QUANT_SIZES[kind]
        start, n_bytes = begin + offset, math.prod(shape) // n_block * n_bytes
        if start + n_bytes > len(content):
            raise GgufError(
                path,
                f"it is cut short: {name!r} ends at byte {start + n_bytes}, but the "
                f"file ends at {len(content)}; fetch the file again",
            )
        tensors[name] = TensorEntry(shape, kind, start, n_bytes)
    if "general.architecture" not in values:
        raise GgufError(path, "expected a model, found no general.architecture in it")
    n_layers = values.get(f"{values['general.architecture']}.block_count")
    if isinstance(n_layers, int) and n_layers > MOST_LAYERS:
        raise GgufError(
            path,
            f"its header has {n_layers} layers, expected at most {MOST_LAYERS}; fetch "
            "the file again",
        )
    if not n_tokens:
        raise GgufError(path, "expected a tokenizer in the file, found no vocabulary")
    return Header(path, values, n_tokens, tensors)


def config_of(header: Header) -> Any:
    """Return the model's config."""
    what = f"Transformers reads no causal model from GGUF of {header.architecture!r}"
    with damage_errors(header.path, what, _USE_ANOTHER):
        values = header.config_values
        config = CONFIG_MAPPING[values["model_type"]].from_dict(values)
        # No key of a file marks the largest Gemma 2 and 3 (llama-model.cpp).
        kind = header.architecture, config.num_hidden_layers
        if kind in (("gemma2", 46), ("gemma3", 62)):
            scalar = config.hidden_size // config.num_attention_heads
            config.query_pre_attn_scalar = scalar
        _set_rotary_scaling(header, config)
    return config


def _set_rotary_scaling(header: Header, config: Any) -> None:
    """Set the base and scaling of rotary frequencies in a config.

    Transformers ignores them: it would compute wrong positions for Llama 3.1 and later,
    Gemma 3 from 4B on, and StarCoder 2. A file that gives only a factor, under another
    name if it is old, is scaled linearly (llama-model.cpp).
    """
    values, prefix = header.values, f"{header.architecture}.rope"
    older = values.get(f"{prefix}.scale_linear")
    factor = values.get(f"{prefix}.scaling.factor", older)
    kind = values.get(f"{prefix}.scaling.type", "linear" if factor else "none")
    rope = config.rope_parameters or {}
    rope = rope.get("full_attention", rope)  # Gemma's sliding layers are not scaled
    if "rope_theta" in rope:
        rope["rope_theta"] = values.get(f"{prefix}.freq_base", rope["rope_theta"])
    if kind == "linear":
        rope |= {"rope_type": "linear", "factor": factor or 1.0}
    elif kind != "none" and rope.get("rope_type") != kind:
        raise GgufError(
            header.path,
            f"its rotary positions are scaled by {kind!r}, which Transformers does not "
            "read from GGUF; use the model's safetensors",
        )
    if _ROPE_FREQS in header.tensors:
        _set_llama3_scaling(header, config, rope)


def _set_llama3_scaling(header: Header, config: Any, rope: dict[str, Any]) -> None:
    """Set Llama 3.1's scaling with a file's largest factor; refuse other factors."""
    content = np.memmap(header.path, mode="r", dtype=np.uint8)
    factors = dequantized(content, header.tensors[_ROPE_FREQS])
    if (factors == 1).all():
        return
    plain = torch.arange(0, 2 * len(factors), 2) / (2 * len(factors))
    rope |= {
        "rope_type": "llama3",
        "factor": float(factors.max()),
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    read, _ = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")
    expected = 1 / (rope["rope_theta"] ** plain * torch.from_numpy(factors))
    if read.shape != expected.shape or not torch.allclose(read, expected, rtol=1e-4):
        raise GgufError(
            header.path,
            "its rotary factors (rope_freqs.weight) are not those of Llama 3, and "
            "Transformers reads no others from GGUF; use the model's safetensors",
        )


def tokenizer_of(header: Header, config: Any) -> Any:
    """Return the file's tokenizer with its chat template, as `AutoTokenizer` would."""
    kind: Any = TOKENIZER_MAPPING.get(type(config), TokenizersBackend)
    if kind.__name__ == "MistralCommonBackend":  # reads files that are not in a GGUF
        kind = TokenizersBackend
    with (
        damage_errors(header.path, "its tokenizer cannot be used", _USE_ANOTHER),
        tempfile.TemporaryDirectory(prefix="beatrice-") as folder,
    ):
        # In its own folder: a template or tokenizer next to the file is not the file's.
        (Path(folder) / "model.gguf").symlink_to(header.path.resolve())
        tokenizer: Any = kind.from_pretrained(folder, gguf_file="model.gguf")
        if header.values["tokenizer.ggml.model"] == "gpt2":
            _set_word_splitting(header, tokenizer)
        elif header.values.get("tokenizer.ggml.add_space_prefix") is False:
            _remove_first_space(header, tokenizer.backend_tokenizer)
    return tokenizer


def _set_word_splitting(header: Header, tokenizer: Any) -> None:
    """Make a byte-level tokenizer split texts, and begin them, as llama.cpp does."""
    values, backend = header.values, tokenizer.backend_tokenizer
    pre = values.get("tokenizer.ggml.pre", _UNNAMED.get(header.architecture))
    if pre not in _KNOWN:
        raise GgufError(
            header.path,
            f"its rule for splitting texts (tokenizer.ggml.pre) is {pre!r}, which is "
            "not known here; use the model's safetensors, or a newer GGUF file of it",
        )
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False)
    pieces = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if pre in _LIKE_SMOLLM:
        digits = pre_tokenizers.Digits(individual_digits=True)
        backend.pre_tokenizer = pre_tokenizers.Sequence([digits, as_bytes])
    elif pre in _LIKE_QWEN2:
        rule = Regex(GGUF_PRE_TOKENIZER_SPLITS["qwen2"])
        split = pre_tokenizers.Split(rule, "isolated")
        backend.pre_tokenizer = pre_tokenizers.Sequence([split, pieces])
    if pre in _LIKE_LLAMA3:
        backend.model.ignore_merges = True
        if "tokenizer.ggml.add_bos_token" not in values:
            tokenizer.add_bos_token = True


def _remove_first_space(header: Header, backend: Any) -> None:
    """Make a sentencepiece tokenizer add no space before a text; Gemma's adds none."""
    if not header.architecture.startswith("gemma"):
        backend.normalizer = None  # Phi-3's adds the space
        backend.pre_tokenizer = pre_tokenizers.Metaspace(
            prepend_scheme="never", split=False
        )
        steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
        backend.decoder = decoders.Sequence(steps)


def generation_of(header: Header, config: Any, tokenizer: Any) -> GenerationConfig:
    """Return the generation config, with stop tokens from the file.

    A chat model often ends its turn with another token than its text, which a GGUF file
    need not name, so every token at which llama.cpp stops ends an answer here too.
    """
    names = (f"tokenizer.ggml.{name}_token_id" for name in ("eos", "eot", "eom"))
    candidates = [header.values.get(name) for name in names]
    control = tokenizer.added_tokens_decoder.items()
    ends = {t.content: i for i, t in control if t.special}
    candidates += [i for text, i in ends.items() if text in _ENDS_OF_TURN]
    # With these two, <|end|> ends a message (gpt-oss's analysis), not the answer.
    is_messages = {"<|return|>", "<|call|>"} <= ends.keys()
    no_end = (None, ends.get("<|end|>") if is_messages else None)
    generation = GenerationConfig.from_model_config(config)
    in_vocabulary = (i for i in candidates if i not in no_end and i < header.n_tokens)
    stops = list(dict.fromkeys(in_vocabulary))
    generation.eos_token_id = stops or generation.eos_token_id
    return generation


def dequantized(
    content: np.ndarray, entry: TensorEntry, each: Callable[..., Any] = map
) -> np.ndarray:
    """Return one tensor as float32, dequantising some rows at a time.

    `content` is the file as uint8, `[n_bytes]`, and `entry` locates the tensor in it.
    Pass an executor's `map` as `each` to dequantise several pieces at once.
    """
    n_columns = entry.shape[-1]
    rows = content[entry.start : entry.start + entry.n_bytes]
    rows = rows.reshape(math.prod(entry.shape[:-1]), -1)
    values = np.empty((len(rows), n_columns), np.float32)
    # gguf's intermediate results are about ten times as large.
    step = max(1, (1 << 20) // n_columns)

    def fill(begin: int) -> None:
        some = slice(begin, begin + step)
        values[some] = gguf.dequantize(rows[some], entry.kind)

    list(each(fill, range(0, len(rows), step)))
    return values.reshape(entry.shape)


class _ProcessorRoute:
    """Transformers' older route: the gguf package's names, and a tensor processor."""

    targets: dict[str, str | None]  # by name in the file; None: not in the model

    def __init__(self, header: Header, config: Any, model: Any) -> None:
        make = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)
        self._processor = make(config=header.config_values)
        # Only a few models (Bloom's) need the names of all submodules, which take most
        # of the time, so these are requested only if the whole model's do not suffice.
        alone = SimpleNamespace(
            config=config, state_dict=model.state_dict, named_children=lambda: ()
        )
        for source in (alone, model):
            names = get_gguf_hf_weights_map(source, self._processor, config.model_type)
            self._mapping = names
            # Names of experts are listed without their suffix.
            self.targets = {
                name: names.get(name) or names.get(re.sub(r"\.weight$", "", name))
                for name in header.weights
            }
            if None not in self.targets.values():
                break
        self._joined: dict[str, torch.Tensor] = {}

    def convert(self, name: str, values: np.ndarray, is_last: bool) -> Any:
        """Return a tensor in Transformers' layout, or None until it is complete."""
        about = {"name": name, "tensor_key_mapping": self._mapping}
        joined = {"parsed_parameters": {"tensors": self._joined}}
        done = self._processor.process(weights=values, **about, **joined)
        if done.name is not None:
            return done.weights
        return self._joined.pop(str(self.targets[name])).numpy() if is_last else None


class _ConverterRoute:
    """The newer route (Qwen3.5, LFM2): renamings, and operations on some tensors."""

    targets: dict[str, str | None]

    def __init__(self, header: Header, config: Any, model: Any) -> None:
        mapping = get_gguf_conversion_mapping(header.architecture, config)
        renamings = [rule for rule in mapping if isinstance(rule, WeightRenaming)]
        rules = [rule for rule in mapping if isinstance(rule, WeightConverter)]
        self._converters = {p: rule for rule in rules for p in rule.source_patterns}
        tensors, names = model.state_dict(), header.weights
        renamed = {name: rename_source_key(name, renamings, rules) for name in names}
        self._patterns = {name: pattern for name, (_, pattern) in renamed.items()}
        self.targets = {n: t if t in tensors else None for n, (t, _) in renamed.items()}
        self._open: dict[str, Any] = {}  # copies of converters

    def convert(self, name: str, values: np.ndarray, is_last: bool) -> Any:
        target, pattern = str(self.targets[name]), self._patterns[name]
        if pattern is None:
            return values
        if target not in self._open:
            self._open[target] = copy.deepcopy(self._converters[pattern])
        self._open[target].add_tensor(target, name, pattern, torch.from_numpy(values))
        if not is_last:
            return None
        return self._open.pop(target).convert(target)[target].numpy()


class Weights:
    """The tensors of a file under the names that Transformers gives them."""

    def __init__(self, header: Header, config: Any) -> None:
        """Match names, without reading any weight."""
        self._header = header
        with damage_errors(header.path, "its tensors cannot be matched", _USE_ANOTHER):
            dtype = torch.float32  # which leaves the process's default as it is
            with loading_weights(dtype), torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config, dtype=dtype)
            is_new = is_gguf_arch_supported(header.architecture)
            route = _ConverterRoute if is_new else _ProcessorRoute
            self._route = route(header, config, model)
            shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
        unread = [name for name, t in self._route.targets.items() if t is None]
        if unread:
            raise GgufError(
                header.path,
                f"Transformers has no place for some of its tensors ({len(unread)}, "
                f"first {unread[0]!r}), and would silently ignore them; use the "
                "model's safetensors",
            )
        self._targets = {name: str(t) for name, t in self._route.targets.items()}
        self._n_sources = Counter(self._targets.values())
        self.shapes = {target: shapes[target] for target in self._n_sources}
        # "F16" and "BF16" for matrices that the file holds in that type.
        self.dtypes = dict.fromkeys(self.shapes, "F32")
        for name, target in self._targets.items():
            kind = header.tensors[name].kind.name
            # Some processors change vectors (norms), but they only permute matrices.
            is_matrix = len(self.shapes[target]) > 1 and self._n_sources[target] == 1
            if kind in ("F16", "BF16") and is_matrix:
                self.dtypes[target] = kind

    def read(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield each name and tensor (float32) once, with one tensor in memory."""
        path, n_missing = self._header.path, self._n_sources.copy()
        content = np.memmap(path, mode="r", dtype=np.uint8)
        with ThreadPoolExecutor(2) as threads:
            for name, target in self._targets.items():
                n_missing[target] -= 1
                with damage_errors(path, f"{name!r} cannot be dequantised"):
                    entry = self._header.tensors[name]
                    values = dequantized(content, entry, threads.map)
                    values = self._route.convert(name, values, n_missing[target] == 0)
                if values is None:
                    continue
                if values.shape != self.shapes[target]:
                    raise GgufError(
                        path,
                        f"it holds {target!r} as {list(values.shape)}, but the model "
                        f"of its metadata expects {list(self.shapes[target])}",
                    )
                yield target, np.ascontiguousarray(values)
                del values


# Part of the folder's name; increase it when files would be unpacked differently.
_RECIPE = 3
_DTYPES = {"F32": np.float32, "F16": np.float16, "BF16": ml_dtypes.bfloat16}


def _model_folder(path: Path) -> Path:
    """Return the folder for a file's model, which may not exist yet."""
    return user_cache("gguf") / f"{sha256_once(path)}-{_RECIPE}"


def _write_outline(header: Header, folder: Path) -> Any:
    """Write config, tokenizer and stop tokens; return the config."""
    config = config_of(header)
    tokenizer = tokenizer_of(header, config)
    config.save_pretrained(folder)
    _write_tokenizer(tokenizer, folder, header.n_tokens)
    generation_of(header, config, tokenizer).save_pretrained(folder)
    return config


def _write_tokenizer(tokenizer: Any, folder: Path, n_tokens: int) -> None:
    """Write a tokenizer so that it is loaded unchanged.

    Transformers' classes add tokens of their own (`<|endoftext|>`, `<mask>`) to a
    vocabulary that lacks them, for which the model has no embedding.
    """
    tokenizer.save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    values = json.loads(path.read_bytes()) | {"tokenizer_class": "TokenizersBackend"}
    if len(tokenizer) > n_tokens:
        content = json.loads((folder / "tokenizer.json").read_bytes())
        tokens = content["added_tokens"]
        content["added_tokens"] = [t for t in tokens if t["id"] < n_tokens]
        (folder / "tokenizer.json").write_text(json.dumps(content))
        added = [t["content"] for t in tokens if t["id"] >= n_tokens]
        values = {k: v for k, v in values.items() if v not in added}
    path.write_text(json.dumps(values, indent=2))


def _write_weights(weights: Weights, path: Path, update: Update) -> None:
    """Write tensors as safetensors one by one, so that only one is held at a time."""
    heads, end = {}, 0
    for name, shape in weights.shapes.items():
        kind = weights.dtypes[name]
        begin, end = end, end + math.prod(shape) * np.dtype(_DTYPES[kind]).itemsize
        edges = {"data_offsets": [begin, end]}
        heads[name] = {"dtype": kind, "shape": list(shape), **edges}
    text = json.dumps({"__metadata__": {"format": "pt"}, **heads}).encode()
    text += b" " * (-len(text) % 8)
    free = shutil.disk_usage(path.parent).free
    if end > free:
        raise ValueError(
            f"unpacking needs {end / 1e9:.1f} GB in {user_cache('gguf')}, but only "
            f"{free / 1e9:.1f} GB are free; make room, or set XDG_CACHE_HOME"
        )
    with path.open("wb") as stream:
        stream.write(len(text).to_bytes(8, "little") + text)
        done = 0
        for name, values in weights.read():
            begin, _ = heads[name]["data_offsets"]
            stream.seek(8 + len(text) + begin)
            stored = values.astype(_DTYPES[weights.dtypes[name]], copy=False)
            stream.write(stored.view(np.uint8).data)
            update(done := done + stored.nbytes, end)
        stream.flush()
        os.fsync(stream.fileno())


def _is_intact(folder: Path) -> bool:
    """Return whether an unpacked model exists as it was written."""
    try:
        verify_checksums(folder, sha256_once)
    except ValueError:
        return False
    return True


def loadable_path(name: str) -> str:
    """Return what Transformers loads for a name, unpacking a GGUF file if needed.

    One process unpacks at a time; the others wait and then read what it wrote.
    """
    path = Path(os.path.expanduser(name))
    if not path.is_file():
        return str(path) if path.exists() else name
    folder = _model_folder(path)
    if _is_intact(folder):
        return str(folder)
    header = read_header(path)
    weights = Weights(header, config_of(header))
    with locked_folder(folder.parent):
        if not _is_intact(folder):
            _unpack(weights, header, folder)
    return str(folder)


def _unpack(weights: Weights, header: Header, target: Path) -> None:
    """Write a model's folder next to its target, then move it there."""
    with (
        Progress().stage(f"unpack {header.path.name}") as update,
        replaced_folder(target) as folder,
    ):
        _write_outline(header, folder)
        _write_weights(weights, folder / "model.safetensors", update)


@contextlib.contextmanager
def outline_folder(name: str) -> Iterator[str]:
    """Yield a folder with config and tokenizer; no weight of a GGUF file is read."""
    path = Path(os.path.expanduser(name))
    if not path.is_file():
        yield loadable_path(name)
    elif (folder := _model_folder(path)).is_dir():
        yield str(folder)
    else:
        header = read_header(path)
        with tempfile.TemporaryDirectory(prefix="beatrice-") as beside:
            Weights(header, _write_outline(header, Path(beside)))
            yield beside
