"""Of which model a probe is, wherever that model lies, and what is another's."""

import dataclasses

import pytest

import beatrice
from beatrice.extract.backbone.names import ModelHashes
from beatrice.jaxprobe.detector import Detector
from beatrice.pgir.scorer import Scorer
from tests.pgir.small import LAYER, make_detector


@pytest.fixture(scope="module")
def model():
    return beatrice.LanguageModel("embedded")


def probe_of(model, strict=True, **changes):
    """Return a probe beside a model, as of a run; of its fit other things are said."""
    detector = make_detector(model.backbone)
    trained = dataclasses.replace(detector.provenance, **changes)
    detector = dataclasses.replace(detector, provenance=trained)
    scorer = Scorer(model, detector, strict=strict)
    return beatrice.Probe(detector, layer=LAYER, open_scorer=lambda: scorer)


def test_what_another_model_says_is_saved_with_no_probe(model, tmp_path):
    for revision, is_its in ((model.backbone.revision, True), ("f" * 64, False)):
        probe = probe_of(model, strict=False, revision=revision)
        assert probe.scorer is not None
        probe.save(tmp_path / "probe")
        stored = Detector.load(tmp_path / "probe").provenance.hashes
        assert stored == (model.backbone.hashes if is_its else ModelHashes())
    with pytest.raises(ValueError, match="examples: .*another model"):
        probe.save(tmp_path / "probe", examples=[("where was he born?", "Rome")])
