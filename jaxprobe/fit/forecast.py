"""What training needs, counted from shapes."""

from extract.records import SETTINGS
from extract.run.directory import RunDir
from extract.run.forecast import Forecast
from jaxprobe.features.reading import family_dims, longest_spans
from jaxprobe.features.rows import load_rows
from jaxprobe.features.subsets import N_SUBSETS
from jaxprobe.fit.work import Workload, turn_flops
from jaxprobe.settings import GridConfig

_FLOAT = 4  # bytes


def forecast_train(run: RunDir, config: GridConfig) -> Forecast:
    """Return what training takes if no member stops early.

    Operations are those of matrix products over all positions of the batches, padded
    ones included; memory is that of the tokens in memory, or of two groups of a stream.
    """
    n_flops = in_memory = outputs = 0
    for setting in SETTINGS:
        store, rows = load_rows(run, setting)
        widths, dims = longest_spans(store.spec.spans, setting), family_dims(store)
        n_train = len(rows.where("train"))
        workload = Workload(
            encoder=config.encoder,
            dims=dims,
            spans=tuple((1, width) for width in widths),
            batch_size=config.train.batch_size,
            n_steps=-(-n_train // config.train.batch_size) * config.train.max_epochs,
            n_seeds=config.train.n_seeds,
        )
        control = [(N_SUBSETS - 1, seed) for seed in range(config.train.n_seeds)]
        n_flops += turn_flops(workload, [*workload.members, *control])
        row_bytes = sum(widths) * dims.total * _FLOAT
        n_rows = n_train + len(rows.where("validation"))
        if config.stream is not None:
            n_rows = 2 * config.stream.n_chunk * config.stream.n_mixed
        in_memory += n_rows * row_bytes
        pooled = 1 + config.encoder.d_pooled
        outputs += len(workload.members) * len(rows.ids) * pooled * _FLOAT
    n_members = (N_SUBSETS + 1) * config.train.n_seeds
    return Forecast(
        stage="train",
        n_flops=n_flops,
        memory_bytes=in_memory,
        disk_bytes=outputs,
        basis=(
            f"{n_members} members in each of {len(SETTINGS)} settings, at most "
            f"{config.train.max_epochs} epochs each (early stopping makes them fewer); "
            "disk is that of their outputs, weights come on top"
        ),
    )
