"""What lies in a GGUF file, as Transformers understands it: config, names, weights.

Transformers' own way through `from_pretrained(gguf_file=…)` reads the header three
times with the gguf package, which makes several views of NumPy for each of its words:
three quarters of the time for a vocabulary of 262,144. Here the header is read once
with `struct`, and Transformers is shown a header without vocabulary for the config.
"""

import contextlib
import dataclasses
import math
import re
import struct
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    TokenizersBackend,
)
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
    load_gguf_checkpoint,
)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.tokenization_auto import TOKENIZER_MAPPING

# Of a value in the header, by its type: see gguf.GGUFValueType.
_FORMATS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
_STRING, _ARRAY = 8, 9
# Longer arrays are the vocabulary's, which only the tokenizer needs.
_LONGEST_VALUE = 4096
# Values dequantised at once: what gguf makes on the way is about ten times as large.
_N_AT_ONCE = 1 << 20
# What llama.cpp takes for the end of a turn, whatever the file names (llama-vocab.cpp).
_ENDS_OF_TURN = (
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <end_of_turn> <turn|> "
    "<|endoftext|> <|eom_id|> <EOT> <_EOT> <|end_of_text|> <end_of_utterance>"
).split()


@dataclasses.dataclass(frozen=True)
class Entry:
    """Where one tensor lies: its shape in Torch's order, ggml type and bytes."""

    shape: tuple[int, ...]
    kind: gguf.GGMLQuantizationType
    start: int
    n_bytes: int


@dataclasses.dataclass(frozen=True)
class Header:
    """A GGUF file without its weights.

    Attributes:
      path: the file.
      types: type of each metadata value, and of an array's elements.
      values: metadata; an array of more than 4,096 entries is None.
      n_tokens: of the vocabulary.
      tensors: by their names in the file.
    """

    path: Path
    types: dict[str, tuple[int, int | None]]
    values: dict[str, Any]
    n_tokens: int
    tensors: dict[str, Entry]

    @property
    def architecture(self) -> str:
        """What the file calls the model's architecture."""
        return str(self.values["general.architecture"])


class _Cursor:
    """Reads the numbers and texts of a header one after the other."""

    def __init__(self, content: np.ndarray) -> None:
        self.content, self.at = memoryview(content), 0

    def take(self, form: str) -> Any:
        """Return the next value, or the next ones as a tuple."""
        found = struct.unpack_from(f"<{form}", self.content, self.at)
        self.at += struct.calcsize(f"<{form}")
        return found[0] if len(form) == 1 else found

    def text(self) -> str:
        n_bytes = self.take("Q")
        if n_bytes > len(self.content) - self.at:
            raise ValueError("a text reaches beyond the end of the file")
        self.at += n_bytes
        return bytes(self.content[self.at - n_bytes : self.at]).decode()

    def value(self, kind: int) -> tuple[Any, int | None, int]:
        """Return a value, what an array's elements are, and how many it has."""
        if kind == _STRING:
            return self.text(), None, 1
        if kind != _ARRAY:
            return self.take(_FORMATS[kind]), None, 1
        element, n_elements = self.take("IQ")
        is_short = n_elements <= _LONGEST_VALUE
        if element == _STRING:
            found = []
            for _ in range(n_elements):
                word = self.text()
                if is_short:
                    found.append(word)
            return found if is_short else None, element, n_elements
        form = _FORMATS[element]
        n_bytes = n_elements * struct.calcsize(f"<{form}")
        if n_bytes > len(self.content) - self.at:
            raise ValueError("an array reaches beyond the end of the file")
        found = list(self.take(f"{n_elements}{form}")) if is_short else None
        self.at += 0 if is_short else n_bytes
        return found, element, n_elements


class _Refusal(ValueError):
    """A sentence about a file that cannot be used."""

    def __init__(self, path: Path, text: str) -> None:
        super().__init__(f"backbone {str(path)!r}: {text}")


@contextlib.contextmanager
def _reading(path: Path, what: str) -> Iterator[None]:
    """Turn whatever a damaged or unknown file makes a library raise into a sentence."""
    try:
        yield
    except (OSError, _Refusal):
        raise  # says which file
    except Exception as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:200]
        raise _Refusal(path, f"{what} ({cause}); fetch the file again") from error


def read_header(path: Path) -> Header:
    """Read all of a GGUF file but its weights; a second for 262,144 words.

    Raises:
      ValueError: the file is damaged, cut short, or of another format or version.
    """
    content = np.memmap(path, mode="r", dtype=np.uint8)
    with _reading(path, "its header is damaged"):
        return _parsed(path, content)


def _parsed(path: Path, content: np.ndarray) -> Header:
    cursor = _Cursor(content)
    magic, version, n_tensors, n_values = cursor.take("IIQQ")
    if magic != gguf.GGUF_MAGIC or version not in (2, 3):
        raise _Refusal(path, "expected a GGUF file of version 2 or 3")
    types: dict[str, tuple[int, int | None]] = {}
    values: dict[str, Any] = {}
    n_tokens = 0
    for _ in range(n_values):
        key, kind = cursor.text(), cursor.take("I")
        values[key], element, n_elements = cursor.value(kind)
        types[key] = (kind, element)
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
        entry = Entry(
            shape, kind, begin + offset, math.prod(shape) // n_block * n_bytes
        )
        if entry.start + entry.n_bytes > len(content):
            raise _Refusal(
                path,
                f"it is cut short: {name!r} ends at byte {entry.start + entry.n_bytes},"
                f" the file at {len(content)}; fetch the file again",
            )
        tensors[name] = entry
    if "general.architecture" not in values:
        raise _Refusal(path, "expected a model, found no general.architecture in it")
    if not n_tokens:
        raise _Refusal(path, "expected a tokenizer in the file, found no words")
    return Header(path, types, values, n_tokens, tensors)


def _without_vocabulary(header: Header, path: Path) -> None:
    """Write a GGUF file of the same short values and names of tensors, and no more."""
    writer = gguf.GGUFWriter(path, header.architecture)
    for key, value in header.values.items():
        kind, element = header.types[key]
        if value is None or value == [] or key == "general.architecture":
            continue
        sub = None if element is None else gguf.GGUFValueType(element)
        writer.add_key_value(key, value, gguf.GGUFValueType(kind), sub)
    if f"{header.architecture}.vocab_size" not in header.values:
        writer.add_vocab_size(header.n_tokens)
    for name in header.tensors:
        writer.add_tensor(name, np.zeros(1, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _config_values(header: Header) -> dict[str, Any]:
    """Return the config that Transformers makes of a file's metadata."""
    with tempfile.TemporaryDirectory(prefix="beatrice-") as folder:
        short = Path(folder) / "header.gguf"
        _without_vocabulary(header, short)
        found = load_gguf_checkpoint(str(short))["config"]
    found.setdefault("vocab_size", header.n_tokens)
    return found


def config_of(header: Header) -> Any:
    """Return the model's config.

    Raises:
      ValueError: Transformers reads no GGUF file of this architecture.
    """
    what = f"Transformers reads no causal model from GGUF of {header.architecture!r}"
    with _reading(header.path, what):
        values = _config_values(header)
        return CONFIG_MAPPING[values["model_type"]].from_dict(values)


def tokenizer_of(header: Header, config: Any) -> Any:
    """Return the file's tokenizer with its chat template, as `AutoTokenizer` would."""
    kind = TOKENIZER_MAPPING.get(type(config), TokenizersBackend)
    if kind.__name__ == "MistralCommonBackend":  # reads files that are not in a GGUF
        kind = TokenizersBackend
    with (
        _reading(header.path, "its tokenizer cannot be used"),
        tempfile.TemporaryDirectory(prefix="beatrice-") as folder,
    ):
        # Alone: a template or tokenizer that lies beside the file is not the file's.
        (Path(folder) / "model.gguf").symlink_to(header.path.resolve())
        return kind.from_pretrained(folder, gguf_file="model.gguf")


def generation_of(header: Header, config: Any, tokenizer: Any) -> GenerationConfig:
    """Return how the model is asked: its stop tokens are those of the file.

    A chat model often ends its turn with another token than its text, and a GGUF file
    need not name it. So what llama.cpp stops at ends an answer here too.
    """
    found = [
        header.values.get(f"tokenizer.ggml.{name}_token_id")
        for name in ("eos", "eot", "eom")
    ]
    control = tokenizer.added_tokens_decoder.items()
    found += [i for i, t in control if t.special and t.content in _ENDS_OF_TURN]
    generation = GenerationConfig.from_model_config(config)
    stops = list(dict.fromkeys(i for i in found if i is not None))
    generation.eos_token_id = stops or generation.eos_token_id
    return generation


def _mapping_of(header: Header, config: Any, model: Any, processor: Any) -> Any:
    """Return Transformers' name of each tensor of the file, or refuse what has none."""
    kind = config.model_type
    # The names of all submodules are needed for a few models only (Bloom's), and take
    # most of the time: asked for when the whole model's names are not enough.
    alone = SimpleNamespace(
        config=config, state_dict=model.state_dict, named_children=lambda: ()
    )
    found = {}
    for source in (alone, model):
        found = get_gguf_hf_weights_map(source, processor, kind)
        unread = [name for name in header.tensors if _place(found, name) is None]
        if not unread:
            return found
    raise _Refusal(
        header.path,
        f"Transformers has no place for {len(unread)} of its tensors, first "
        f"{unread[0]!r}, and would pass over them in silence; use the model's "
        "safetensors",
    )


def _place(mapping: dict[str, str], name: str) -> str | None:
    """Return where a tensor goes; those of experts are listed without their ending."""
    return mapping.get(name) or mapping.get(re.sub(r"\.weight$", "", name))


class Weights:
    """The tensors of a file under Transformers' names, dequantised one after another.

    Attributes:
      shapes: of each tensor, by name.
      dtypes: "F16" and "BF16" where the file holds a matrix so, else "F32".
    """

    def __init__(self, header: Header, config: Any) -> None:
        """Match names and shapes; no weight is read.

        Raises:
          ValueError: a tensor is not one of this model, or the other way about.
        """
        self._header = header
        with _reading(header.path, "its tensors cannot be matched"):
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            make = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)
            self._processor = make(config=_config_values(header))
            self._mapping = _mapping_of(header, config, model, self._processor)
            places = {n: str(_place(self._mapping, n)) for n in header.tensors}
            shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
        self._sources = list(places.values())
        self.shapes = {name: shapes[name] for name in dict.fromkeys(self._sources)}
        self.dtypes = dict.fromkeys(self.shapes, "F32")
        for name, place in places.items():
            kind = header.tensors[name].kind.name
            # Vectors are changed by some processors (norms), matrices only turned.
            if kind in ("F16", "BF16") and len(self.shapes[place]) > 1:
                if self._sources.count(place) == 1:
                    self.dtypes[place] = kind

    def read(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield each tensor once as `[…]` float32, with its name; one is in memory.

        Raises:
          ValueError: a tensor is of a type that cannot be dequantised, or its shape is
            not the model's.
        """
        header, waiting = self._header, list(self._sources)
        content = np.memmap(header.path, mode="r", dtype=np.uint8)
        joined: dict[str, Any] = {}
        with ThreadPoolExecutor(2) as threads:
            for name, entry in header.tensors.items():
                place = waiting.pop(0)
                with _reading(header.path, f"{name!r} cannot be dequantised"):
                    done = self._processor.process(
                        weights=_values(content, entry, threads),
                        name=name,
                        tensor_key_mapping=self._mapping,
                        parsed_parameters={"tensors": joined},
                    )
                if done.name is not None:
                    yield place, self._checked(place, done.weights)
                elif place not in waiting:  # all its parts are there
                    yield place, self._checked(place, joined.pop(place).numpy())
                del done

    def _checked(self, name: str, values: np.ndarray) -> np.ndarray:
        if values.shape != self.shapes[name]:
            raise _Refusal(
                self._header.path,
                f"it holds {name!r} as {list(values.shape)}, but the model of its "
                f"metadata has it as {list(self.shapes[name])}",
            )
        return np.ascontiguousarray(values)


def _values(content: np.ndarray, entry: Entry, threads: ThreadPoolExecutor) -> Any:
    """Dequantise one tensor, some rows at a time."""
    n_columns = entry.shape[-1]
    rows = content[entry.start : entry.start + entry.n_bytes]
    rows = rows.reshape(math.prod(entry.shape[:-1]), -1)
    values = np.empty((len(rows), n_columns), np.float32)
    step = max(1, _N_AT_ONCE // n_columns)

    def fill(begin: int) -> None:
        part = rows[begin : begin + step]
        values[begin : begin + step] = gguf.dequantize(part, entry.kind)

    list(threads.map(fill, range(0, len(rows), step)))
    return values.reshape(entry.shape)
