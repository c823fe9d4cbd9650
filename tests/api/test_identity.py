"""Which model a probe belongs to, wherever that model is, and which it does not."""

import dataclasses
import shutil
import sys
import threading
import warnings

import pytest
import torch
from safetensors.numpy import load_file as load_arrays
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

import beatrice
from beatrice.extract.backbone.loading import load_backbone
from beatrice.extract.backbone.names import IN_MEMORY, WEIGHTS, ModelHashes
from beatrice.extract.signals.extract import ExtractConfig
from beatrice.jaxprobe.detector import Detector
from beatrice.pgir.scorer import Scorer
from tests.pgir.small import LAYER, make_detector
from tests.process import run_python


def probe_of(here, **changes):
    """Return a probe like a run's for a model, with changes to its provenance."""
    detector = make_detector(here.backbone)
    trained = dataclasses.replace(detector.provenance, **changes)
    detector = dataclasses.replace(detector, provenance=trained)
    scorer = Scorer(here, detector, strict=False)
    return beatrice.Probe(detector, layer=LAYER, open_scorer=lambda: scorer)


def test_a_thread_that_holds_a_models_lock_scores_while_another_opens_a_probe(model):
    first, second = (beatrice.load("embedded", model=model) for _ in range(2))
    opening = threading.Thread(target=first.load_scorer, daemon=True)

    def hold():
        with model.lock:
            opening.start()
            opening.join(0.2)  # it waits for the lock
            second.load_scorer()

    holding = threading.Thread(target=hold, daemon=True)
    holding.start()
    for thread in (holding, opening):
        thread.join(20)
        assert not thread.is_alive()


def test_hashes_and_examples_of_another_model_are_not_saved(model, tmp_path):
    for revision, is_its in ((model.backbone.revision, True), ("f" * 64, False)):
        probe = probe_of(model, revision=revision)
        assert probe.scorer is not None
        probe.save(tmp_path / "probe")
        stored = Detector.load(tmp_path / "probe").provenance.hashes
        assert stored == (model.backbone.hashes if is_its else ModelHashes())
    with pytest.raises(ValueError, match="examples: .*another model"):
        probe.save(tmp_path / "probe", examples=[("where was he born?", "Rome")])


def test_a_probe_knows_its_model_when_another_program_loaded_the_same_weights(
    model, changed, tmp_path
):
    probe = probe_of(model)
    assert probe.scorer is not None
    probe.save(tmp_path / "probe")
    answer = "where was he born?", "Guzolt Falls"
    (same, other), (rounded, _) = (
        [
            beatrice.LanguageModel(
                AutoModelForCausalLM.from_pretrained(folder, dtype=dtype),
                model.backbone.tokenizer,
            )
            for folder in (WEIGHTS, changed)
        ]
        for dtype in (torch.float32, torch.bfloat16)
    )
    scores = [
        beatrice.load(tmp_path / "probe", model=known).score(*answer).p_correct
        for known in (model, same)
    ]
    assert scores[0] == scores[1] is not None
    for known, message in ((other, "another model"), (rounded, "another precision")):
        with pytest.raises(ValueError, match=message):
            beatrice.load(tmp_path / "probe", model=known).load_scorer()


@pytest.mark.parametrize("stop_id", [-1, 10**6])
def test_a_model_without_the_token_that_ended_answers_is_refused(model, stop_id):
    with pytest.raises(ValueError, match=f"end with token {stop_id}, but embedded kno"):
        probe_of(model, stop_id=stop_id)


@pytest.mark.parametrize("read", [load_arrays, Detector.load.__func__])
def test_a_probe_replaced_while_it_is_read_is_not_mixed_with_the_new_one(
    model, tmp_path, read
):
    old, new = probe_of(model), probe_of(model, stop_id=7)
    old.save(tmp_path / "probe")

    def replace(frame, event, _):
        if frame.f_code is read.__code__ and event == "return":
            sys.setprofile(None)
            new.save(tmp_path / "probe")

    sys.setprofile(replace)
    with pytest.raises(ValueError, match="probe was replaced by another while it was"):
        beatrice.load(tmp_path / "probe")
    assert beatrice.load(tmp_path / "probe").detector.provenance.stop_id == 7


OLDER, NEWER = "a" * 40, "b" * 40
OF_COMMITS = """
import sys, beatrice
from beatrice.extract.backbone.names import WEIGHTS
probe = beatrice.load(sys.argv[1])
assert probe.score("where was he born?", "Guzolt Falls").p_correct is not None
older = beatrice.LanguageModel("owner/name", revision=sys.argv[2])
for known in (probe.scorer.probed, older, beatrice.LanguageModel("owner/name")):
    print(known.backbone.revision, known.backbone.files_sha256)
load, values = older.__reduce__()  # in another process
assert load(*values).backbone.revision == sys.argv[2]
# Of the folder that the older commit has.
assert beatrice.load("embedded", model=older).load_scorer()
"""


@pytest.fixture
def changed(tmp_path):
    """A copy of the embedded model with one number of a tensor changed."""
    folder = shutil.copytree(WEIGHTS, tmp_path / "changed")
    tensors = load_file(folder / "model.safetensors")
    next(iter(tensors.values())).view(-1)[0] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def test_a_probe_of_a_commit_loads_it_or_the_same_files_from_elsewhere(
    model, changed, tmp_path
):
    repository = tmp_path / "models--owner--name"
    for commit, folder in ((OLDER, WEIGHTS), (NEWER, changed)):
        shutil.copytree(folder, repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(NEWER)
    files = model.backbone.files_sha256
    names = {"model": "owner/name", "revision": OLDER, "files_sha256": files}
    probe_of(model, **names).save(tmp_path / "probe")
    cache = str(tmp_path)
    done = run_python(OF_COMMITS, tmp_path / "probe", OLDER, HF_HUB_CACHE=cache)
    others = load_backbone(changed).files_sha256
    assert done.stdout.split() == [*([OLDER, files] * 2), NEWER, others]
    copied = shutil.copytree(WEIGHTS, tmp_path / "copied")
    known = beatrice.load(tmp_path / "probe", model=copied)
    assert known.score("where was he born?", "Guzolt Falls").p_correct is not None
    with pytest.raises(ValueError, match="another model"):
        beatrice.load(tmp_path / "probe", model=changed).load_scorer()
    with pytest.raises(ValueError, match="revision: .* is a model on this machine"):
        beatrice.LanguageModel(copied, revision=OLDER)


@pytest.mark.parametrize(
    ("dtype", "paths", "ns"),
    [
        ("float32", {}, (0, 0)),
        ("bfloat16", {}, (0, 1)),
        ("bfloat16", {"closed_book": "decode"}, (1, 0)),
        ("bfloat16", {"with_context": "decode"}, (0, 1)),
    ],
)
def test_predicting_from_another_reading_warns_if_the_dtype_rounds(dtype, paths, ns):
    model = beatrice.LanguageModel("embedded", dtype=dtype)
    probe = probe_of(model, dtype=dtype, paths=paths)
    asked = ["where was Skiband Rugrond born?"]
    answers, written = model.answer(asked, read=True, layers=[LAYER])
    for signals, n in zip(
        (model.read(answers, layers=[LAYER]), written), ns, strict=True
    ):
        with warnings.catch_warnings(record=True) as noted:
            warnings.simplefilter("always")
            probe.predict(signals)
        texts = [str(each.message) for each in noted]
        assert sum(f"{dtype} rounds the two differently" in text for text in texts) == n
        assert len(texts) == n


def test_signals_of_another_model_precision_or_answer_span_are_refused(model, changed):
    answers = model.as_answers([("where was he born?", "Guzolt Falls")])
    usual = {"layers": [LAYER], "config": ExtractConfig()}
    signals, probe = model.read(answers, **usual), probe_of(model)
    literal = ExtractConfig(answer_span="literal")
    prompt = dataclasses.replace(model.prompt, template="paper")
    asked = beatrice.LanguageModel("embedded", prompt=prompt)
    half = beatrice.LanguageModel("embedded", dtype="bfloat16")
    other = beatrice.LanguageModel(changed, prompt=model.prompt)
    pair = model.backbone.model, model.backbone.tokenizer
    ours = beatrice.LanguageModel(*pair, prompt=model.prompt)
    for reader, config, named in (
        (other, usual["config"], "another model"),
        (half, usual["config"], "another precision"),
        (model, literal, "another answer span"),
    ):
        unlike = reader.read(answers, layers=[LAYER], config=config)
        with pytest.raises(ValueError, match=f"signals: {named}"):
            probe.predict(unlike)
        lenient = beatrice.Probe(probe.detector, layer=LAYER, strict=False)
        with pytest.warns(UserWarning, match=named):
            lenient.predict(unlike)
    with pytest.warns(UserWarning, match="another prompt"):
        probe.predict(asked.read(answers, **usual))
    arrays, spans = {k: [x] for k, x in signals[0].items()}, signals.spans
    in_memory = {"model": IN_MEMORY, "revision": ours.backbone.revision}
    for known, read in (
        (probe, signals),
        (probe, beatrice.Signals(signals.store)),
        (probe_of(model, **in_memory), ours.read(answers, **usual)),
        (probe_of(model, **in_memory), signals),  # from files of the same model
        (probe, beatrice.Signals.from_arrays(arrays, spans=spans, layers=[LAYER])),
    ):
        assert known.predict(read) == pytest.approx(probe.predict(signals))
