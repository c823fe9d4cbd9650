"""What reading published files will take, from ten records of each."""

import itertools
import time
from collections.abc import Sequence

from benchmarks.stages.forecast import N_PROBED, Forecast
from extract.datasets.config import BuildConfig, Source
from extract.datasets.loading import Loaded
from extract.datasets.pools import is_usable, open_source
from extract.records import to_json

_N_READS = 2  # once to draw, once to write what was drawn


def forecast_data(sources: Sequence[Source], build: BuildConfig) -> Forecast:
    """Return what making a run of these files needs; nothing is written.

    Args:
      sources: at least one file.
      build: what is drawn from them.

    Raises:
      ValueError: a file is refused.
    """
    n_rows, n_bytes, seconds = 0, 0.0, 0.0
    for source in sources:
        began = time.monotonic()
        file = open_source(source, build)
        opened = time.monotonic() - began
        found = list(itertools.islice(file.read(), N_PROBED))
        took = time.monotonic() - began - opened
        rows = [one.question for one in found if isinstance(one, Loaded)
                and is_usable(one, build.context_of(source.dataset))]  # fmt: skip
        lines = [to_json(q.as_example("train", q.passages)) for q in rows]
        size = sum(build.splits.sizes(source.dataset, source.role).values())
        mean = sum(map(len, lines)) / max(1, len(lines))
        n_rows += size
        n_bytes += 2 * size * mean  # examples, and their passages once more
        n_records = source.path.stat().st_size / max(1.0, mean)
        seconds += _N_READS * (opened + took * n_records / max(1, len(found)))
    return Forecast(
        stage="data",
        n_rows=n_rows,
        disk_bytes=round(n_bytes),
        seconds=seconds,
        basis=(
            f"rows are the sizes of the splits that are asked for; time from up to "
            f"{N_PROBED} records of each of {len(sources)} files, whose number of "
            "records is taken from their size"
        ),
    )
