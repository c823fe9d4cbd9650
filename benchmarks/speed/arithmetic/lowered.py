"""Read a lowered module: its products, transposes, gathers and calls of libraries.

The text of StableHLO, in which a function of jitted code stands once and is called from
several places. Bodies of loops count once: one microbatch of one batch.
"""

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator

_BYTES = {"f32": 4, "bf16": 2, "f16": 2, "f64": 8, "i1": 1, "i8": 1, "i32": 4,
          "ui16": 2, "ui32": 4, "i64": 8, "ui64": 8}  # fmt: skip
_FUNCTION = re.compile(r"func\.func (?:public |private )?@([\w.]+)")
_CALL = re.compile(r"\bcall @([\w.]+)\(")
_TENSOR = re.compile(r"tensor<((?:\d+x)*)(\w+)>")
_PRODUCT = re.compile(r"contracting_dims = \[([\d, ]*)\] x")
_LIBRARY = re.compile(r"custom_call @(\w+)")


@dataclasses.dataclass(frozen=True)
class Tensor:
    """Shape and type of an array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Bytes."""
        return self.size * _BYTES[self.dtype]

    def text(self) -> str:
        """Return the shape as in `15x64x4096`."""
        return "x".join(map(str, self.shape))


@dataclasses.dataclass(frozen=True)
class Product:
    """A `dot_general`; `depth` elements are summed for each of the result."""

    left: Tensor
    right: Tensor
    result: Tensor
    depth: int

    @property
    def n_flops(self) -> int:
        """Multiplications and additions."""
        return 2 * self.result.size * self.depth

    @property
    def n_bytes(self) -> int:
        """Read and written, each array once."""
        return self.left.n_bytes + self.right.n_bytes + self.result.n_bytes


@dataclasses.dataclass(frozen=True)
class Module:
    """What stands in a module.

    Attributes:
      products: how often each is done.
      transposes: results of those that something else than a product reads; a product
        reads its operands in either order.
      gathers: what is read from, and the result.
      libraries: how often each is called.
    """

    products: Counter[Product]
    transposes: Counter[Tensor]
    gathers: Counter[tuple[Tensor, Tensor]]
    libraries: Counter[str]


def _functions(text: str) -> dict[str, list[str]]:
    """Lines of every function."""
    found: dict[str, list[str]] = defaultdict(list)
    name = ""
    for line in text.splitlines():
        if match := _FUNCTION.search(line):
            name = match[1]
        found[name].append(line)
    return found


def _times(functions: dict[str, list[str]]) -> Counter[str]:
    """How often every function is called, from `main`."""
    calls = {
        name: Counter(match[1] for line in lines for match in _CALL.finditer(line))
        for name, lines in functions.items()
    }
    times: Counter[str] = Counter()

    def visit(name: str, n: int) -> None:
        times[name] += n
        for other, count in calls.get(name, {}).items():
            visit(other, n * count)

    visit("main", 1)
    return times


def _tensors(line: str) -> list[Tensor]:
    """Operands and results of an operation, from its signature."""
    signature = line[line.rindex(" : ") :]
    return [
        Tensor(tuple(int(n) for n in shape.split("x") if n), dtype)
        for shape, dtype in _TENSOR.findall(signature)
    ]


def _is_read_by_products_alone(line: str, body: str) -> bool:
    """Tell whether only products read a result, directly."""
    name = line.split("=")[0].strip()
    readers = [
        other
        for other in re.findall(rf"^.*{re.escape(name)}\b.*$", body, re.MULTILINE)
        if other.strip() != line.strip()
    ]
    return bool(readers) and all("stablehlo.dot_general" in one for one in readers)


def read_module(text: str) -> Module:
    """Read a module's text, as `Lowered.as_text` gives it."""
    functions = _functions(text)
    found = Module(Counter(), Counter(), Counter(), Counter())
    for name, n in _times(functions).items():
        lines = functions.get(name, [])
        body = "\n".join(lines)
        for line in _operations(lines):
            if "stablehlo.dot_general" in line:
                left, right, result = _tensors(line)
                axes = _PRODUCT.search(line)[1].split(",")
                depth = math.prod(left.shape[int(axis)] for axis in axes if axis)
                found.products[Product(left, right, result, depth)] += n
            elif "stablehlo.transpose" in line:
                if not _is_read_by_products_alone(line, body):
                    found.transposes[_tensors(line)[-1]] += n
            elif 'stablehlo.gather"' in line:
                source, _, result = _tensors(line)
                found.gathers[source, result] += n
            elif match := _LIBRARY.search(line):
                found.libraries[match[1]] += n
    return found


def _operations(lines: list[str]) -> Iterator[str]:
    return (line for line in lines if "stablehlo." in line and " : " in line)
