"""Members on disk: finished ones, one file each, and what all say of all rows.

A member's file tells nothing of the block in which it was trained, nor of the process:
another plan of blocks and another number of processes find it again.
"""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import flax.traverse_util
import jax

from jaxprobe import checkpoint
from jaxprobe.checkpoint import load_cache, save_cache
from jaxprobe.fit.grid import Block, Member, Trained
from jaxprobe.fit.loop import FitInfo
from jaxprobe.model.encoder import MemberOutputs


def _file(folder: Path, member: Member) -> Path:
    return folder / f"{member.subset}-{member.seed}.safetensors"


def load_members(folder: Path, members: Iterable[Member], key: str) -> list[Trained]:
    """Return those of some members that are saved under a key, one by one."""
    found = []
    for member in members:
        arrays = load_cache(_file(folder, member), key)
        if arrays is None:
            continue
        own = {name: arrays.pop(f"info.{name}") for name in FitInfo._fields}
        tree = flax.traverse_util.unflatten_dict(arrays, sep="/")
        found.append(Trained((member,), tree, FitInfo(**own)))
    return found


def save_members(folder: Path, trained: Trained, key: str) -> None:
    """Write every member of a block into its file."""
    for i, member in enumerate(trained.members):
        params, info = jax.tree.map(
            lambda x, i=i: x[i : i + 1], (trained.params, trained.info)
        )
        arrays: dict[str, Any] = flax.traverse_util.flatten_dict(params, sep="/")
        own = {f"info.{name}": value for name, value in info._asdict().items()}
        save_cache(_file(folder, member), {**arrays, **own}, key)


def cut(block: Block, members: Collection[Member]) -> list[Block]:
    """Return blocks of those of a block's members that are among others.

    A block has every subset with every seed, so subsets that lack different seeds are
    in different ones.
    """
    by_seeds: dict[tuple[int, ...], list[int]] = {}
    for subset in block.subsets:
        seeds = tuple(s for s in block.seeds if Member(subset, s) in members)
        by_seeds.setdefault(seeds, []).append(subset)
    return [Block(tuple(own), seeds) for seeds, own in by_seeds.items() if seeds]


def read_member_outputs(path: Path) -> MemberOutputs:
    """Return the outputs of every trained encoder on all rows of its setting."""
    tree, _ = checkpoint.restore(path)
    return MemberOutputs(**tree["outputs"])
