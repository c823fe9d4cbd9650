"""`beatrice bench plan`: the paper's training on a device that is not here.

Arithmetic, not a measurement. The training step is planned as `beatrice train` plans it
and compiled by this machine's compiler, whose memory analysis and counts of operations
are shown; it is lowered for CUDA, and the products of that module are held against the
device's published peaks. Time by roofline is that of every product at the peak that
binds it, and of all other bytes at memory's; how many these are follows from how this
machine's compiler fuses loops, and a GPU's may move fewer.

The lowered module is read as the text of StableHLO, in which a function of jitted code
stands once and is called from several places. Bodies of loops count once: one
microbatch of one batch.
"""

import dataclasses
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Literal

import click
import numpy as np

from beatrice.benchmarks.bench.commands import AS_JSON, RowPrinter
from beatrice.benchmarks.bench.grid import paper
from beatrice.extract.records import SETTINGS, Setting
from beatrice.extract.run.console import Progress, quiet
from beatrice.extract.run.stages import bytes_in_words
from beatrice.extract.run.verbs import options
from beatrice.extract.store.families import Dtype, StoreConfig
from beatrice.jaxprobe.commands import DeviceOptions
from beatrice.jaxprobe.config import GridConfig, StreamConfig, as_bytes
from beatrice.jaxprobe.families import N_FAMILIES
from beatrice.jaxprobe.kernels.masked import N_TAPS
from beatrice.jaxprobe.memory import (
    Plan,
    Sizes,
    Workload,
    choose,
    compiled_step,
    step_flops,
    traced_steps,
)

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
    functions: dict[str, list[str]] = defaultdict(list)
    name = ""
    for line in text.splitlines():
        if match := _FUNCTION.search(line):
            name = match[1]
        functions[name].append(line)
    return functions


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
    return bool(readers) and all(
        "stablehlo.dot_general" in reader for reader in readers
    )


def read_module(text: str) -> Module:
    """Read a module's text, as `Lowered.as_text` gives it."""
    functions = _functions(text)
    module = Module(Counter(), Counter(), Counter(), Counter())
    for name, n in _times(functions).items():
        lines = functions.get(name, [])
        body = "\n".join(lines)
        for line in _operations(lines):
            if "stablehlo.dot_general" in line:
                left, right, result = _tensors(line)
                axes = _PRODUCT.findall(line)[0].split(",")
                depth = math.prod(left.shape[int(axis)] for axis in axes if axis)
                module.products[Product(left, right, result, depth)] += n
            elif "stablehlo.transpose" in line:
                if not _is_read_by_products_alone(line, body):
                    module.transposes[_tensors(line)[-1]] += n
            elif 'stablehlo.gather"' in line:
                source, _, result = _tensors(line)
                module.gathers[source, result] += n
            elif match := _LIBRARY.search(line):
                module.libraries[match[1]] += n
    return module


def _operations(lines: list[str]) -> Iterator[str]:
    return (line for line in lines if "stablehlo." in line and " : " in line)


Name = Literal["h100", "h200"]
# Rows of training and validation: 30,000 and 3,000 questions (the paper, section 3),
# with context in two wordings.
N_ROWS: dict[Setting, tuple[int, int]] = {
    "closed_book": (30_000, 3_000),
    "with_context": (60_000, 6_000),
}
# Question and answer; with context the passages before them.
WIDTHS: dict[Setting, tuple[int, ...]] = {
    "closed_book": (40, 16),
    "with_context": (300, 40, 16),
}
STREAMED: tuple[Setting, ...] = ("with_context",)  # its rows take 236 GiB
_SHOWN = 8  # kinds of products, those that take longest


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """Published peaks of a device.

    Attributes:
      memory: bytes.
      flops: dense peak by the operands' type; XLA multiplies float32 as TF32.
      bandwidth: bytes a second.
    """

    memory: int
    flops: dict[str, float]
    bandwidth: float


# NVIDIA's data sheets "H100 Tensor Core GPU" (SXM) and "H200 Tensor Core GPU": 989 and
# 1,979 TFLOP/s of TF32 and bfloat16 with sparsity, half of it dense; 3.35 and 4.8 TB/s.
_HOPPER = {"f32": 494.7e12, "bf16": 989.4e12}
DEVICES: dict[Name, Device] = {
    "h100": Device(memory=80 << 30, flops=_HOPPER, bandwidth=3.35e12),
    "h200": Device(memory=141 << 30, flops=_HOPPER, bandwidth=4.8e12),
}


def paper_config(setting: Setting, is_mixed: bool = False) -> GridConfig:
    """Return how the paper's encoders are trained."""
    config = GridConfig(stream=StreamConfig() if setting in STREAMED else None)
    return config.mixed() if is_mixed else config


def paper_sizes(setting: Setting, is_mixed: bool = False) -> Sizes:
    """Return the sizes of the paper's run on a Qwen3.5-9B, every row the longest.

    The store is of the default types, in which an accelerator holds it.
    """
    n_train, n_valid = N_ROWS[setting]
    lengths = np.tile(WIDTHS[setting], (n_train + n_valid, 1))
    where = np.split(np.arange(len(lengths)), [n_train])
    config = paper_config(setting, is_mixed)
    store_config = StoreConfig()
    scalars: list[Dtype] = [store_config.scalars] * (N_FAMILIES - 1)
    device_dtypes = (store_config.dtype, *scalars)
    return Sizes.of(config, paper(1).dims, lengths, where, device_dtypes)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Planned:
    """A setting's plan, in bytes."""

    setting: Setting
    plan: Plan

    def cells(self) -> dict[str, str]:
        """Return the row by its columns."""
        plan, needed = self.plan, self.plan.needed
        assert needed is not None and plan.limit is not None
        sizes = {
            "rows and weights": needed.arguments + needed.outputs,
            "temporaries": needed.temporaries,
            "other rows": plan.resident,
            "all": needed.total + plan.resident,
            "limit": plan.limit,
        }
        return {
            "setting": self.setting,
            "members": str(plan.n_subsets * plan.n_seeds),
            "rows": str(plan.n_rows),
            **{name: bytes_in_words(size) for name, size in sizes.items()},
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Operation:
    """Products of one shape in a microbatch of the planned block.

    Attributes:
      role: what is multiplied.
      shapes: of the operands and the result.
      n: how many.
      n_flops: of all of them.
      n_bytes: likewise, each array read or written once.
      seconds: likewise, at the peak that binds.
      is_memory_bound: whether that is memory's.
    """

    setting: Setting
    role: str
    shapes: str
    n: int
    n_flops: int
    n_bytes: int
    seconds: float
    is_memory_bound: bool

    def cells(self) -> dict[str, str]:
        """Return the row by its columns."""
        return {
            "setting": self.setting,
            "product": self.role,
            "times": str(self.n),
            "of what": self.shapes,
            "GFLOP": f"{self.n_flops / 1e9:.1f}",
            "MB": f"{self.n_bytes / 1e6:,.0f}",
            "FLOP/byte": f"{self.n_flops / self.n_bytes:.0f}",
            "bound by": "memory" if self.is_memory_bound else "products",
            "ms": f"{1e3 * self.seconds:.2f}",
        }


@dataclasses.dataclass(frozen=True, kw_only=True)
class Work:
    """The work of a batch of the planned block.

    Attributes:
      n_flops: in products.
      own_flops: in products of the families that members read, by `step_flops`.
      xla_flops: of all operations, by `cost_analysis` of what was compiled.
      product_seconds: of the products, each at the peak that binds it.
      other_seconds: of the other bytes that the compiled module moves, at memory's.
      memory_share: of the products' time, in those that memory binds.
      n_batches: in all epochs.
    """

    setting: Setting
    n_flops: int
    own_flops: int
    xla_flops: float
    product_seconds: float
    other_seconds: float
    memory_share: float
    n_batches: int

    @property
    def seconds(self) -> float:
        """The time of a batch by roofline."""
        return self.product_seconds + self.other_seconds

    def cells(self) -> dict[str, str]:
        """Return the row by its columns."""
        return {
            "setting": self.setting,
            "GFLOP a batch in products": f"{self.n_flops / 1e9:,.0f}",
            "of members' own families": f"{self.own_flops / self.n_flops:.0%}",
            "XLA counts": f"{self.xla_flops / 1e9:,.0f}",
            "roofline time of a batch": f"{1e3 * self.seconds:,.0f} ms",
            "of 60 epochs": f"{self.n_batches * self.seconds / 60:.0f} min",
            "products at peak": f"{self.product_seconds / self.seconds:.0%}",
            "bound by memory": f"{self.memory_share:.0%} of products",
        }


def planned(
    setting: Setting, memory: int, is_mixed: bool = False
) -> tuple[Sizes, Planned]:
    """Plan a setting of the paper's run.

    Args:
      setting: of the paper's run.
      memory: bytes of the device.
      is_mixed: with products of bfloat16.
    """
    sizes = paper_sizes(setting, is_mixed)
    return sizes, Planned(setting=setting, plan=choose(sizes, memory))


def cuda_module(sizes: Sizes, plan: Plan) -> Module:
    """Lower the planned training step for CUDA, and read it."""
    step = traced_steps(sizes, plan.n_subsets, plan.n_seeds, plan.n_rows)[0]
    return read_module(step.lower(lowering_platforms=("cuda",)).as_text())


def role_of(product: Product, sizes: Sizes) -> str:
    """Say what a product is part of, by its widths."""
    config = sizes.encoder
    shapes = {*product.left.shape, *product.right.shape, *product.result.shape}
    if sizes.dims.sizes[0] in shapes and product.n_flops > 1e9 * config.projection / 64:
        return "hidden states"
    if N_TAPS * config.hidden in shapes:
        return "convolution"
    if N_FAMILIES * config.projection in shapes:
        return "entry"
    if product.depth <= config.hidden and config.n_groups in shapes:
        return "group statistics"
    return "other"


def operations(
    setting: Setting, sizes: Sizes, module: Module, device: Device
) -> list[Operation]:
    """Return the products of a microbatch, those that take longest first."""
    products = []
    for product, n in module.products.items():
        arithmetic = product.n_flops / device.flops[product.left.dtype]
        moving = product.n_bytes / device.bandwidth
        texts = [x.text() for x in (product.left, product.right, product.result)]
        products.append(
            Operation(
                setting=setting,
                role=role_of(product, sizes),
                shapes="{} · {} → {}".format(*texts),
                n=n,
                n_flops=n * product.n_flops,
                n_bytes=n * product.n_bytes,
                seconds=n * max(arithmetic, moving),
                is_memory_bound=moving > arithmetic,
            )
        )
    return sorted(products, key=lambda operation: -operation.seconds)


def work_of(
    setting: Setting,
    sizes: Sizes,
    plan: Plan,
    products: list[Operation],
    device: Device,
) -> Work:
    """Sum up a batch: its microbatches of the planned block, and all other blocks."""
    work = Workload(
        encoder=sizes.encoder,
        dims=sizes.dims,
        spans=tuple((1, width) for width in sizes.widths),
        batch_size=sizes.train.batch_size,
        n_steps=1,
        n_seeds=sizes.train.n_seeds,
    )
    assert plan.n_rows is not None  # there is a limit
    n_members = plan.n_subsets * plan.n_seeds
    times = sizes.train.batch_size // plan.n_rows * len(work.members) / n_members
    _, cost = compiled_step(sizes, plan.n_subsets, plan.n_seeds, plan.n_rows)
    product_seconds = sum(operation.seconds for operation in products)
    bound = sum(
        operation.seconds for operation in products if operation.is_memory_bound
    )
    others = cost["bytes accessed"] - sum(operation.n_bytes for operation in products)
    n_epoch = math.ceil(N_ROWS[setting][0] / sizes.train.batch_size)
    return Work(
        setting=setting,
        n_flops=round(times * sum(operation.n_flops for operation in products)),
        own_flops=sum(step_flops(work, member) for member in work.members),
        xla_flops=times * cost["flops"],
        product_seconds=times * product_seconds,
        other_seconds=times * max(others, 0.0) / device.bandwidth,
        memory_share=bound / product_seconds,
        n_batches=n_epoch * sizes.train.max_epochs,
    )


def moved_activations(module: Module, sizes: Sizes, n_rows: int) -> int:
    """Count transposes of members' activations that no product takes as they are."""
    positions = {n_rows * n for n in (*sizes.widths, sum(sizes.widths))}
    config = sizes.encoder
    channels = {config.hidden, N_TAPS * config.hidden, N_FAMILIES * config.projection}
    return sum(
        n
        for x, n in module.transposes.items()
        if not positions.isdisjoint(x.shape)
        and not channels.isdisjoint(x.shape)
        # Two axes: the signals of a small family, which all members of a seed share.
        and len(x.shape) > 2
    )


def gathers_of_states(module: Module, sizes: Sizes) -> Counter[tuple[int, ...]]:
    """Count the gathers of hidden states, by the shape of what is gathered."""
    width = sizes.dims.sizes[0]
    gathers: Counter[tuple[int, ...]] = Counter()
    for (source, result), n in module.gathers.items():
        if source.shape[-1:] == (width,):
            gathers[result.shape] += n
    return gathers


def in_words(
    setting: Setting, sizes: Sizes, plan: Plan, module: Module
) -> Iterator[str]:
    """Say what else stands in the module that is lowered for CUDA."""
    types = Counter(
        f"{p.left.dtype} · {p.right.dtype} → {p.result.dtype}"
        for p in module.products.elements()
    )
    products = ", ".join(f"{n} of {name}" for name, n in types.most_common())
    gathered = ", ".join(
        f"{n} of {'x'.join(map(str, shape))}"
        for shape, n in gathers_of_states(module, sizes).items()
    )
    calls = ", ".join(f"{n} of {name}" for name, n in module.libraries.items())
    assert plan.n_rows is not None  # there is a limit
    n_moved = moved_activations(module, sizes, plan.n_rows)
    yield (
        f"{setting}, a microbatch as lowered for CUDA: products {products}; gathers of "
        f"hidden states {gathered}; transposes of activations that no product takes as "
        f"they are {n_moved}; calls of libraries {calls or 'none'}."
    )


@click.command()
@click.option(
    "--device",
    type=click.Choice(list(DEVICES)),
    default="h100",
    help="Whose published peaks.",
)
@options(planned_for=DeviceOptions)
@click.option("--mixed", "is_mixed", is_flag=True, help="Products of bfloat16.")
@AS_JSON
def plan(
    device: Name, planned_for: DeviceOptions, is_mixed: bool, as_json: bool
) -> None:
    """Plan the paper's training for a device that is not here. Arithmetic alone.

    Example: beatrice bench plan --device h100
    """
    quiet()
    on = DEVICES[device]
    n_bytes = planned_for.device_memory
    memory = as_bytes(n_bytes) if n_bytes else on.memory
    printer, progress = RowPrinter(as_json), Progress()
    rows, notes = [], []
    for setting in SETTINGS:
        progress.note(f"{setting}: compiling blocks")
        sizes, row = planned(setting, memory, is_mixed)
        module = cuda_module(sizes, row.plan)
        products = operations(setting, sizes, module, on)
        rows.append((row, products, work_of(setting, sizes, row.plan, products, on)))
        notes.extend(in_words(setting, sizes, row.plan, module))
    printer.text(f"Arithmetic for one {device.upper()}, not measured.\n")
    for row, _, _ in rows:
        printer.row(row)
    for _, _, work in rows:
        printer.row(work)
    for _, products, _ in rows:
        for operation in products[:_SHOWN]:
            printer.row(operation)
    printer.text("\n" + "\n".join(notes))
