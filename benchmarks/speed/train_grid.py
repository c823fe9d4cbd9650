"""The training grid as a contestant of `beatrice bench train`."""

from collections.abc import Sequence
from pathlib import Path

import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

from benchmarks.forecasts.train_work import (
    Losses,
    Member,
    Workload,
    made_up_features,
    weights_file,
)
from jaxprobe.config import TrainConfig
from jaxprobe.features.families import Standardizer, split_families
from jaxprobe.features.subsets import SUBSETS
from jaxprobe.fit.grid import Block, Labelled, fit_blocks, labelled, member_keys
from jaxprobe.model.encoder import Encoder

N_VALID = 16  # examples behind an epoch, so few that validation costs nothing


def labelled_of(workload: Workload, n_examples: int, seed: int) -> Labelled:
    """Return made-up data as the grid trains on it."""
    dims = workload.dims
    identity = Standardizer(
        np.zeros(dims.total, np.float32), np.ones(dims.total, np.float32)
    )
    features, labels = made_up_features(workload, n_examples, seed)
    return labelled(split_families(features, dims, identity), labels)


class Grid:
    """Members trained by `jaxprobe.fit.grid`, each a block, as on a CPU in a run."""

    def __init__(self, workload: Workload, members: Sequence[Member], at_once: int):
        """Train `at_once` members side by side, as a run does on its cores."""
        self.workload = workload
        self.members = tuple(members)
        self.at_once = at_once

    def save_weights(self, folder: Path) -> None:
        """Write every member's initial weights, see `weights_file`."""
        encoder = Encoder(self.workload.encoder, self.workload.dims)
        features = labelled_of(self.workload, 1, seed=0).features
        start = jax.jit(lambda key, mask: encoder.init(key, features, mask))
        protocol = TrainConfig()
        for subset, seed in self.members:
            _, key, _ = member_keys(protocol, subset, seed)
            params = jax.device_get(start(key, jnp.asarray(SUBSETS[subset])))
            arrays = flax.traverse_util.flatten_dict(params["params"], sep="/")
            arrays = {name: np.ascontiguousarray(x) for name, x in arrays.items()}
            save_file(arrays, weights_file(folder, (subset, seed)))

    def _fit(
        self,
        members: Sequence[Member],
        workload: Workload,
        data: tuple[Labelled, Labelled],
        config: TrainConfig,
    ) -> Losses:
        trained = fit_blocks(
            [Block((subset,), (seed,)) for subset, seed in members],
            *data,
            encoder=Encoder(workload.encoder, workload.dims),
            config=config,
            n_threads=self.at_once,
        )
        return {
            member: one.info.train_loss[0].tolist()
            for member, one in zip(members, trained, strict=True)
        }

    def losses(self, workload: Workload, n_steps: int, n_microbatches: int) -> Losses:
        """Return the losses of steps on one batch: every epoch is one step."""
        config = TrainConfig(
            learning_rate=workload.learning_rate,
            weight_decay=workload.weight_decay,
            batch_size=workload.batch_size,
            max_epochs=n_steps,
            lr_patience=n_steps + 1,
            patience=n_steps + 1,
            n_microbatches=n_microbatches,
        )
        data = labelled_of(workload, workload.batch_size, seed=1)
        return self._fit(self.members, workload, (data, data), config)

    def prepare(self) -> None:
        """Make the data and compile; the same executable serves every member."""
        work = self.workload
        self._config = TrainConfig(
            learning_rate=work.learning_rate,
            weight_decay=work.weight_decay,
            batch_size=work.batch_size,
            max_epochs=1,
        )
        self._data = (
            labelled_of(work, work.n_examples, seed=2),
            labelled_of(work, N_VALID, seed=3),
        )
        self._fit(self.members[:1], work, self._data, self._config)

    def turn(self) -> None:
        """Train every member for one epoch of `n_steps` batches."""
        self._fit(self.members, self.workload, self._data, self._config)
