"""Compare the P of an exported probe, without JAX, with the P of its run.

`python docs/probe_equality.py RUN FOLDER [N]` writes the run's probe, the signals of N
answers per setting (default 1,000), and the P of their scores from training. Then, in
any environment that can score, `python docs/probe_equality.py FOLDER` prints as JSON
each head's number of answers, its largest differences of score and of P, and which
training packages are loaded. A step of an isotonic map multiplies a difference of the
score by its slope, hundreds of times.
"""

import json
import sys
from pathlib import Path

import numpy as np

import beatrice


def write(run, folder, n):
    """Write the files that `compare` reads."""
    from beatrice.extract.run.directory import RunDir
    from beatrice.extract.store.store import open_store
    from beatrice.jaxprobe.calibrate import run_selection
    from beatrice.jaxprobe.detector import branch_setting
    from beatrice.jaxprobe.families import span_lengths, widths_of
    from beatrice.jaxprobe.rows import closed_book_rows
    from beatrice.jaxprobe.tokens import read_features

    opened, probe = RunDir(run), beatrice.load(run)
    probe.save(folder / "probe", untrustworthy=True)
    detector, arrays = probe.detector, {}
    stores = {s: open_store(opened.features(s)) for s in detector.banks}
    ids = {s: [key[0] for key in store.spec.keys] for s, store in stores.items()}
    for head in detector.heads:
        setting = branch_setting(head)
        where = np.arange(min(n, len(ids[setting])))
        by_seed = run_selection(opened, head)[0]["champion"]["scores"]
        raw = by_seed.mean(axis=0)[where]
        arrays[f"{head}/raw"] = raw
        arrays[f"{head}/p_correct"] = detector.heads[head].calibrator(raw)
        for name in detector.passes_of(head):
            rows = where
            if name != setting:
                rows = closed_book_rows(ids[setting], ids[name])[where]
            spans = detector.banks[name].spans
            widths = widths_of(span_lengths(stores[name].spec.spans[rows], spans))
            features = read_features(stores[name], probe.layer, rows, widths, spans)
            for kind, values in features._asdict().items():
                for span, x in enumerate(values):
                    arrays[f"{head}/{name}/{kind}/{span}"] = x
    np.savez(folder / "signals.npz", **arrays)


def compare(folder):
    """Return the number of answers and the largest differences of each head."""
    from beatrice.jaxprobe.detector import Scores
    from beatrice.jaxprobe.families import Features
    from beatrice.pgir.forward import TorchForward

    detector = beatrice.load(folder / "probe").detector
    forward, arrays = TorchForward(detector), np.load(folder / "signals.npz")
    result = {}
    for head in detector.heads:
        passes = {}
        for name in detector.passes_of(head):
            n_spans = len(detector.banks[name].spans)
            read = [
                tuple(arrays[f"{head}/{name}/{kind}/{i}"] for i in range(n_spans))
                for kind in Features._fields
            ]
            passes[name] = Features(*read)
        n, scores = len(arrays[f"{head}/raw"]), []
        for first in range(0, n, 64):
            some = slice(first, first + 64)
            batch = {name: features.take(some) for name, features in passes.items()}
            scores.append(forward.score(head, batch))
        joined = Scores.joined(scores)
        differences = [
            float(np.abs(getattr(joined, name) - arrays[f"{head}/{name}"]).max())
            for name in ("raw", "p_correct")
        ]
        result[head] = [n, *differences]
    return result


if __name__ == "__main__":
    if len(sys.argv) > 2:
        n = int(sys.argv[3]) if len(sys.argv) > 3 else 1000
        write(Path(sys.argv[1]), Path(sys.argv[2]), n)
    else:
        result = compare(Path(sys.argv[1]))
        heavy = {"jax", "flax", "tensorstore", "sklearn", "scipy", "pandas"}
        loaded = sorted(heavy & {name.split(".")[0] for name in sys.modules})
        print(json.dumps({**result, "loaded": loaded}))
