"""The weights of a GGUF file under Transformers' names, dequantised one by one."""

import copy
import re
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, Protocol

import numpy as np
import torch
from transformers import AutoModelForCausalLM
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    rename_source_key,
)
from transformers.integrations.gguf import (
    get_gguf_conversion_mapping,
    is_gguf_arch_supported,
)
from transformers.modeling_gguf_pytorch_utils import (
    TENSOR_PROCESSORS,
    TensorProcessor,
    get_gguf_hf_weights_map,
)

from beatrice.extract.backbone.gguf import (
    Header,
    Refusal,
    config_values,
    dequantized,
    reading,
)


class _Route(Protocol):
    """How Transformers turns the tensors of an architecture into its own."""

    places: dict[str, str | None]  # by name in the file; None: it has no place

    def turned(self, name: str, values: np.ndarray, is_last: bool) -> Any:
        """Return the tensor as laid out here, or None while parts of it are missing."""


class _Processed:
    """By its older way: names from the gguf package, a processor for each tensor."""

    def __init__(self, header: Header, config: Any, model: Any) -> None:
        make = TENSOR_PROCESSORS.get(header.architecture, TensorProcessor)
        self._processor = make(config=config_values(header))
        # The names of all submodules are needed for a few models only (Bloom's), and
        # take most of the time: asked for if the whole model's names do not do.
        alone = SimpleNamespace(
            config=config, state_dict=model.state_dict, named_children=lambda: ()
        )
        for source in (alone, model):
            found = get_gguf_hf_weights_map(source, self._processor, config.model_type)
            self._mapping = found
            # Those of experts are listed without their ending.
            self.places = {
                name: found.get(name) or found.get(re.sub(r"\.weight$", "", name))
                for name in header.weights
            }
            if None not in self.places.values():
                break
        self._joined: dict[str, torch.Tensor] = {}

    def turned(self, name: str, values: np.ndarray, is_last: bool) -> Any:
        done = self._processor.process(
            weights=values,
            name=name,
            tensor_key_mapping=self._mapping,
            parsed_parameters={"tensors": self._joined},
        )
        if done.name is not None:
            return done.weights
        return self._joined.pop(str(self.places[name])).numpy() if is_last else None


class _Converted:
    """By its newer way (Qwen3.5, LFM2): renamings, and operations for some tensors."""

    def __init__(self, header: Header, config: Any, model: Any) -> None:
        mapping = get_gguf_conversion_mapping(header.architecture, config)
        renamings = [one for one in mapping if isinstance(one, WeightRenaming)]
        converters = [one for one in mapping if isinstance(one, WeightConverter)]
        self._converters = {p: one for one in converters for p in one.source_patterns}
        known = model.state_dict()
        found = {
            name: rename_source_key(name, renamings, converters)
            for name in header.weights
        }
        self._patterns = {name: pattern for name, (_, pattern) in found.items()}
        self.places = {n: p if p in known else None for n, (p, _) in found.items()}
        self._open: dict[str, WeightConverter] = {}

    def turned(self, name: str, values: np.ndarray, is_last: bool) -> Any:
        place, pattern = str(self.places[name]), self._patterns[name]
        if pattern is None:
            return values
        if place not in self._open:
            self._open[place] = copy.deepcopy(self._converters[pattern])
        self._open[place].add_tensor(place, name, pattern, torch.from_numpy(values))
        if not is_last:
            return None
        return self._open.pop(place).convert(place)[place].numpy()


class Weights:
    """The tensors of a file under Transformers' names.

    Attributes:
      shapes: of each tensor, by name.
      dtypes: "F16" and "BF16" where the file holds a matrix so, else "F32".
    """

    def __init__(self, header: Header, config: Any) -> None:
        """Match names; no weight is read.

        Raises:
          ValueError: a tensor of the file is none of this model's.
        """
        self._header = header
        with reading(header.path, "its tensors cannot be matched"):
            with torch.device("meta"):
                model = AutoModelForCausalLM.from_config(config)
            make = _Processed
            if is_gguf_arch_supported(header.architecture):
                make = _Converted
            self._route: _Route = make(header, config, model)
            shapes = {k: tuple(v.shape) for k, v in model.state_dict().items()}
        unread = [name for name, place in self._route.places.items() if place is None]
        if unread:
            raise Refusal(
                header.path,
                f"Transformers has no place for {len(unread)} of its tensors, first "
                f"{unread[0]!r}, and would pass over them in silence; use the model's "
                "safetensors",
            )
        self._places = {name: str(p) for name, p in self._route.places.items()}
        self._n_parts = Counter(self._places.values())
        self.shapes = {place: shapes[place] for place in self._n_parts}
        self.dtypes = dict.fromkeys(self.shapes, "F32")
        for name, place in self._places.items():
            kind = header.tensors[name].kind.name
            # Vectors are changed by some processors (norms), matrices only turned.
            is_matrix = len(self.shapes[place]) > 1 and self._n_parts[place] == 1
            if kind in ("F16", "BF16") and is_matrix:
                self.dtypes[place] = kind

    def read(self) -> Iterator[tuple[str, np.ndarray]]:
        """Yield each tensor once as `[…]` float32, with its name; one is in memory.

        Raises:
          ValueError: a tensor is of a type that cannot be dequantised, or its shape is
            not the model's.
        """
        path, waiting = self._header.path, self._n_parts.copy()
        content = np.memmap(path, mode="r", dtype=np.uint8)
        with ThreadPoolExecutor(2) as threads:
            for name, place in self._places.items():
                waiting[place] -= 1
                with reading(path, f"{name!r} cannot be dequantised"):
                    values = self._route.turned(
                        name,
                        dequantized(content, self._header.tensors[name], threads),
                        waiting[place] == 0,
                    )
                if values is None:
                    continue
                if values.shape != self.shapes[place]:
                    raise Refusal(
                        path,
                        f"it holds {place!r} as {list(values.shape)}, but the model of "
                        f"its metadata has it as {list(self.shapes[place])}",
                    )
                yield place, np.ascontiguousarray(values)
                del values
