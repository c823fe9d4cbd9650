"""A whole run whose encoders read the store in groups, beside one that holds it.

Both begin their encoders as regressions, on signals that are pooled by either way.
"""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file

from beatrice.extract.records import SETTINGS
from beatrice.extract.run.directory import RunDir
from beatrice.jaxprobe.train import run_outputs
from tests.process import call


def demo(path, *options):
    call("demo", path, "--preset", "smoke", "--linear-first", *options)
    return RunDir(path)


def logits_without_spans(run):
    """Return what the champions' encoders say that were trained without a span."""
    files = (run.path / "ablations").glob("*.without_*.safetensors")
    found = {path.name: load_file(path) for path in files}
    return {name: x["logits"] for name, x in found.items() if "logits" in x}


@pytest.mark.slow
def test_a_streamed_run_whose_store_is_one_group_is_the_run_that_holds_it(tmp_path):
    held, streamed = demo(tmp_path / "held"), demo(tmp_path / "streamed", "--streamed")
    manifest = json.loads((streamed.path / "manifest.json").read_text())
    assert manifest["sections"]["train"]["stream"] is not None
    for setting in SETTINGS:  # both are whole chunks of 64 rows: no step is padded
        one, other = (run_outputs(run, setting).logits for run in (held, streamed))
        np.testing.assert_allclose(one, other, atol=1e-3)
        assert np.ptp(one) > 0.1
    for run in (held, streamed):
        call("evaluate", run.path, "--ablations")
    one, other = map(logits_without_spans, (held, streamed))
    assert one.keys() == other.keys() and one
    for name in one:
        np.testing.assert_allclose(one[name], other[name], atol=1e-3)
