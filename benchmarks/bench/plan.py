"""`beatrice bench plan`: the paper's training on a device that you do not have.

These are calculations, not measurements. The training step is planned as in `beatrice
train` and compiled by this machine's compiler, whose memory analysis and operation
counts are shown; it is then lowered for CUDA, and the products in that module
(StableHLO) are compared with the device's published peaks. The roofline time is that of
every product at the peak that limits it, plus that of all other bytes at the memory
bandwidth; their number depends on how this machine's compiler fuses loops, and a GPU's
may move fewer. Loop bodies count once: one microbatch of one batch.
"""

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

import click
import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from beatrice.benchmarks.bench import grid
from beatrice.benchmarks.bench.commands import Row, RowPrinter
from beatrice.extract.records import SETTINGS, Setting
from beatrice.extract.run.console import Progress, silence_transformers
from beatrice.extract.run.stages import bytes_in_words
from beatrice.extract.run.verbs import AS_JSON, option, options
from beatrice.extract.store.spec import Dtype, StoreConfig
from beatrice.jaxprobe.commands import DeviceOptions
from beatrice.jaxprobe.config import GridConfig, StreamConfig
from beatrice.jaxprobe.encoder import N_JOINED, N_WINDOW
from beatrice.jaxprobe.families import N_FAMILIES
from beatrice.jaxprobe.grid import grid_members
from beatrice.jaxprobe.memory import (
    Plan,
    Sizes,
    choose,
    compiled_step,
    step_flops,
    traced_steps,
)


class Tensor(NamedTuple):
    """Shape and type of an array."""

    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def n_bytes(self) -> int:
        """Number of bytes; a boolean takes one."""
        return self.size * max(8, int(re.findall(r"\d+", self.dtype)[-1])) // 8

    def __str__(self) -> str:
        """Return the shape as in `15x64x4096`."""
        return "x".join(map(str, self.shape))


class Product(NamedTuple):
    """A `dot_general`, which sums `depth` products for each element of the result."""

    left: Tensor
    right: Tensor
    result: Tensor
    depth: int

    @property
    def n_flops(self) -> int:
        """Number of multiplications and additions."""
        return 2 * self.result.size * self.depth

    @property
    def n_bytes(self) -> int:
        """Number of bytes moved if each array is read or written once."""
        return self.left.n_bytes + self.right.n_bytes + self.result.n_bytes


class Module(NamedTuple):
    """The operations of a lowered module."""

    products: Counter[Product]  # how often each is computed
    # Results of transposes that anything but a product uses, since a product can take
    # its operands in either order.
    transposes: Counter[Tensor]
    gathers: Counter[tuple[Tensor, Tensor]]  # source and result
    libraries: Counter[str]  # how often each library function is called


def _tensor(value: Any) -> Tensor:
    kind = ir.RankedTensorType(value.type)
    return Tensor(tuple(kind.shape), str(kind.element_type))


def _operations(function: Any, functions: dict[str, Any]) -> Iterator[Any]:
    """Yield a function's operations, and for every call those of the called one."""
    blocks = (block for region in function.regions for block in region.blocks)
    for operation in (view.operation for block in blocks for view in block.operations):
        yield operation
        yield from _operations(operation, functions)
        if operation.name == "func.call":
            callee = ir.FlatSymbolRefAttr(operation.attributes["callee"]).value
            yield from _operations(functions[callee], functions)


def read_module(lowered: Any) -> Module:
    """Count the operations of a module returned by `Lowered.compiler_ir`."""
    functions = {
        ir.StringAttr(x.operation.attributes["sym_name"]).value: x.operation
        for x in lowered.body.operations
    }
    module = Module(Counter(), Counter(), Counter(), Counter())
    for operation in _operations(functions["main"], functions):
        kind = operation.name.removeprefix("stablehlo.")
        if kind == "dot_general":
            left, right = map(_tensor, operation.operands)
            dimensions = operation.attributes["dot_dimension_numbers"]
            summed = stablehlo.DotDimensionNumbers(dimensions)
            axes = summed.lhs_contracting_dimensions
            depth = math.prod(left.shape[axis] for axis in axes)
            result = _tensor(operation.results[0])
            module.products[Product(left, right, result, depth)] += 1
        elif kind == "transpose":
            result = operation.results[0]
            readers = {use.owner.operation.name for use in result.uses}
            if readers != {"stablehlo.dot_general"}:
                module.transposes[_tensor(result)] += 1
        elif kind == "gather":
            source, result = operation.operands[0], operation.results[0]
            module.gathers[_tensor(source), _tensor(result)] += 1
        elif kind == "custom_call":
            target = operation.attributes["call_target_name"]
            module.libraries[ir.StringAttr(target).value] += 1
    return module


Name = Literal["h100", "h200"]
# Training and validation rows: 10,000 and 500 questions from each of three sets (paper,
# appendix A), with context in two wordings.
N_ROWS: dict[Setting, tuple[int, int]] = {
    "closed_book": (30_000, 1_500),
    "with_context": (60_000, 3_000),
}
# Tokens of question and answer; with context, of the passages before them.
WIDTHS: dict[Setting, tuple[int, ...]] = {
    "closed_book": (40, 16),
    "with_context": (300, 40, 16),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Device:
    """Published peaks of a device."""

    memory: int  # bytes that programs may use, see `device_bytes`
    # Dense FLOP/s by the operands' type; XLA multiplies float32 as TF32.
    flops: dict[str, float]
    bandwidth: float  # bytes per second


# NVIDIA's data sheets "H100 Tensor Core GPU" (SXM) and "H200 Tensor Core GPU": 989 and
# 1,979 TFLOP/s for TF32 and bfloat16 with sparsity, half of that dense; 3.35 and 4.8
# TB/s; 80 and 141 GB, of which JAX takes three quarters.
_HOPPER = {"f32": 494.7e12, "bf16": 989.4e12}
DEVICES: dict[Name, Device] = {
    "h100": Device(memory=80 * 10**9 * 3 // 4, flops=_HOPPER, bandwidth=3.35e12),
    "h200": Device(memory=141 * 10**9 * 3 // 4, flops=_HOPPER, bandwidth=4.8e12),
}


def paper_sizes(setting: Setting, is_mixed: bool = False) -> Sizes:
    """Return the sizes of the paper's run on Qwen3.5-9B, all rows at full length."""
    n_train, n_valid = N_ROWS[setting]
    lengths = np.tile(WIDTHS[setting], (n_train + n_valid, 1))
    where = np.split(np.arange(len(lengths)), [n_train])
    is_streamed = setting == "with_context"  # its rows take 222 GiB
    config = GridConfig(stream=StreamConfig() if is_streamed else None)
    config = config.mixed() if is_mixed else config
    store_config = StoreConfig()  # accelerators hold rows in its types
    scalars: list[Dtype] = [store_config.scalars] * (N_FAMILIES - 1)
    device_dtypes = (store_config.dtype, *scalars)
    return Sizes.of(config, grid.WIDTHS["paper"].dims, lengths, where, device_dtypes)


def plan_row(setting: Setting, plan: Plan) -> Row:
    """Return a row on a setting's plan: block sizes and memory."""
    needed = plan.needed
    assert needed is not None and plan.limit is not None
    sizes = {
        "rows and weights": needed.arguments + needed.outputs,
        "temporaries": needed.temporaries,
        "other rows and members": plan.resident,
        "all": needed.total + plan.resident,
        "limit": plan.limit,
    }
    return {
        "setting": setting,
        "members": plan.n_subsets * plan.n_seeds,
        "rows": plan.n_rows,
        **{name: bytes_in_words(size) for name, size in sizes.items()},
    }


def planned(
    setting: Setting, memory: int, is_mixed: bool = False
) -> tuple[Sizes, Plan]:
    """Plan a setting of the paper's run for a device of `memory` bytes."""
    sizes = paper_sizes(setting, is_mixed)
    return sizes, choose(sizes, memory)


def cuda_module(sizes: Sizes, plan: Plan) -> Module:
    """Lower the planned training step for CUDA, and read it."""
    step = traced_steps(sizes, plan.n_subsets, plan.n_seeds, plan.n_rows)[0]
    return read_module(
        step.lower(lowering_platforms=("cuda",)).compiler_ir("stablehlo")
    )


def role_of(product: Product, sizes: Sizes) -> str:
    """Name the part of the encoder that a product belongs to, from its widths."""
    config = sizes.encoder
    shapes = {*product.left.shape, *product.right.shape, *product.result.shape}
    if sizes.dims.sizes[0] in shapes and product.n_flops > 1e9 * config.projection / 64:
        return "hidden states"
    windows = {N_JOINED * config.hidden, N_WINDOW * config.hidden}
    if windows <= shapes and config.hidden not in shapes:
        return "convolution"
    if N_FAMILIES * config.projection in shapes:
        return "entry"
    if product.depth <= config.hidden and config.n_groups in shapes:
        return "group statistics"
    return "other"


def product_rows(
    setting: Setting, sizes: Sizes, module: Module, device: Device
) -> list[Row]:
    """Return a row for the products of each shape, slowest first.

    Numbers are totals over a shape's products in one microbatch of the planned block.
    They assume that each array is read or written once; times are at the limiting peak.
    """
    rows = []
    for product, n in module.products.items():
        arithmetic = product.n_flops / device.flops[product.left.dtype]
        moving = product.n_bytes / device.bandwidth
        rows.append(
            {
                "setting": setting,
                "product": role_of(product, sizes),
                "times": n,
                "of what": f"{product.left} · {product.right} → {product.result}",
                "GFLOP": n * product.n_flops / 1e9,
                "MB": n * product.n_bytes / 1e6,
                "FLOP/byte": product.n_flops / product.n_bytes,
                "bound by": "memory" if moving > arithmetic else "products",
                "ms": 1e3 * n * max(arithmetic, moving),
            }
        )
    return sorted(rows, key=lambda row: -row["ms"])


def work_of(
    setting: Setting, sizes: Sizes, plan: Plan, products: list[Row], device: Device
) -> Row:
    """Sum up a batch over all microbatches and blocks.

    The roofline time has products at the peak that limits each, and other bytes at
    memory's. Members' own families are counted by `step_flops`.
    """
    members = grid_members(sizes.train.n_seeds, sizes.dims.n_subsets)
    own_flops = sum(
        sizes.train.batch_size * step_flops(sizes.encoder, sizes.dims, sizes.widths, m)
        for m in members
    )
    assert plan.n_rows is not None  # memory is limited
    n_members = plan.n_subsets * plan.n_seeds
    times = sizes.train.batch_size // plan.n_rows * len(members) / n_members
    _, cost = compiled_step(sizes, plan.n_subsets, plan.n_seeds, plan.n_rows)
    gflop, megabytes, product_ms = (
        sum(row[name] for row in products) for name in ("GFLOP", "MB", "ms")
    )
    bound_ms = sum(row["ms"] for row in products if row["bound by"] == "memory")
    others = max(cost["bytes accessed"] - 1e6 * megabytes, 0.0)
    n_batches = math.ceil(N_ROWS[setting][0] / sizes.train.batch_size)
    seconds = times * (product_ms / 1e3 + others / device.bandwidth)
    minutes = n_batches * sizes.train.max_epochs * seconds / 60
    return {
        "setting": setting,
        "GFLOP a batch in products": times * gflop,
        "share of members' own families": own_flops / (times * gflop * 1e9),
        "XLA counts GFLOP": times * cost["flops"] / 1e9,
        "roofline ms of a batch": 1e3 * seconds,
        f"minutes of {sizes.train.max_epochs} epochs": minutes,
        "share of products at peak": times * product_ms / 1e3 / seconds,
        "share of products bound by memory": bound_ms / product_ms,
    }


def moved_activations(module: Module, sizes: Sizes, n_rows: int) -> int:
    """Count the transposes of members' activations that no product can absorb.

    Leaves out those that order the tokens of windows, one per convolution.
    """
    positions = {n_rows * n for n in (*sizes.widths, sum(sizes.widths))}
    config = sizes.encoder
    widths = config.hidden, N_WINDOW * config.hidden, N_FAMILIES * config.projection
    return sum(
        n
        for x, n in module.transposes.items()
        if not positions.isdisjoint(x.shape)
        and not {*widths}.isdisjoint(x.shape)
        # With two axes: signals of a small family, shared by all members of a seed.
        and len(x.shape) > 2
    )


def gathers_of_states(module: Module, sizes: Sizes) -> Counter[tuple[int, ...]]:
    """Count the gathers of hidden states by the shape of the result."""
    width = sizes.dims.sizes[0]
    gathers: Counter[tuple[int, ...]] = Counter()
    for (source, result), n in module.gathers.items():
        if source.shape[-1:] == (width,):
            gathers[result.shape] += n
    return gathers


def in_words(setting: Setting, sizes: Sizes, plan: Plan, module: Module) -> str:
    """Summarise the module lowered for CUDA in a sentence."""
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
    assert plan.n_rows is not None  # memory is limited
    n_moved = moved_activations(module, sizes, plan.n_rows)
    return (
        f"{setting}, one microbatch lowered for CUDA: products {products}; gathers of "
        f"hidden states {gathered}; transposes of activations that no product absorbs "
        f"{n_moved}; library calls {calls or 'none'}."
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PlanOptions(DeviceOptions):
    """The device memory and precision to plan for."""

    mixed: bool = option("Plan for matrix products in bfloat16.", False, rare=True)


@click.command()
@click.option(
    "--device",
    type=click.Choice(list(DEVICES)),
    default="h100",
    help="Device whose published peaks to compare with.",
)
@options(planned_for=PlanOptions)
@AS_JSON
def plan(device: Name, planned_for: PlanOptions, as_json: bool) -> None:
    """Plan the paper's training for a device you do not have, by calculation.

    Example: beatrice bench plan --device h100
    """
    silence_transformers()
    on = DEVICES[device]
    n_bytes = planned_for.device_memory
    memory = n_bytes or on.memory
    printer, progress = RowPrinter(as_json), Progress()
    plans, works, shown, notes = [], [], [], []
    for setting in SETTINGS:
        progress.note(f"{setting}: compiling blocks")
        sizes, plan = planned(setting, memory, planned_for.mixed)
        module = cuda_module(sizes, plan)
        products = product_rows(setting, sizes, module, on)
        plans.append(plan_row(setting, plan))
        works.append(work_of(setting, sizes, plan, products, on))
        shown += products[:8]  # the slowest
        notes.append(in_words(setting, sizes, plan, module))
    printer.text(f"Calculated for one {device.upper()}, not measured.\n")
    for row in (*plans, *works, *shown):
        printer.row(row)
    printer.text("\n" + "\n".join(notes))
