"""Released models on published questions, and detectors moved to retrieved passages.

The questions are the microworld's in published layouts, which the embedded model can
answer.
"""

import collections
import dataclasses
import gzip
import itertools
import json
import re
import shutil
from functools import partial
from pathlib import Path

import jax
import msgspec
import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from beatrice.benchmarks import transfer
from beatrice.benchmarks.baselines.detector import DetectorInput, DetectorOutput
from beatrice.benchmarks.baselines.judge import chosen_detectors, score
from beatrice.benchmarks.commands import real, with_defaults
from beatrice.benchmarks.real import (
    COSTS,
    WANTED,
    costs_in_words,
    cpu_dtype,
    find_questions,
    n_threads_of,
    n_workers,
    read_costs,
    recorded_cost,
)
from beatrice.benchmarks.results import names
from beatrice.benchmarks.results.evaluate import run_detectors
from beatrice.benchmarks.results.report import run_ledger
from beatrice.benchmarks.stages import BASELINES, BaselinesConfig
from beatrice.benchmarks.transfer import (
    Scenario,
    TransferConfig,
    _answer_rows,
    asked_questions,
    encoder_scores,
    open_inner,
    published_rivals,
    published_scores,
    rival_scores,
    run_scenario,
    scenario_rows,
    selected_scores,
    with_passages,
)
from beatrice.extract.backbone.names import WEIGHTS, BackboneConfig
from beatrice.extract.datasets.commands import QuestionOptions
from beatrice.extract.datasets.splits import Source
from beatrice.extract.generate.answers import answer_config
from beatrice.extract.records import (
    IN_DOMAIN,
    SETTINGS,
    Answer,
    Example,
    Passage,
    read_records,
    text_key,
    write_lines,
)
from beatrice.extract.run.contents import read_examples
from beatrice.extract.run.directory import NewRun, RunDir
from beatrice.extract.run.files import write_json_atomic, write_text_atomic
from beatrice.extract.run.rows import (
    Subject,
    encoder,
    label_rule,
    read_result_rows,
    read_rows,
)
from beatrice.extract.signals.extract import extract_config
from beatrice.extract.store.spec import Family
from beatrice.jaxprobe import checkpoint
from beatrice.jaxprobe.calibrate import score_store
from beatrice.jaxprobe.config import EncoderConfig, GridConfig
from beatrice.jaxprobe.encoder import Encoder
from beatrice.jaxprobe.families import SUBSET_NAMES, SUBSETS, paper_dims
from beatrice.jaxprobe.metrics import BootstrapConfig
from beatrice.jaxprobe.stages import grid_config
from beatrice.jaxprobe.tokens import read_features, split_families
from beatrice.pgir.bm25 import Bm25Retriever
from beatrice.pgir.retrieval_server import RetrievalServer
from beatrice.pgir.retrievers import Retrieval, RetrievalFailed
from tests.benchmarks.baselines.planted import baseline_of
from tests.extract.datasets import published as pub
from tests.extract.small_run import (
    assert_error_sentence,
    beatrice,
    make_run,
    questions,
    smoke,
)
from tests.jaxprobe.samples import (
    random_bank,
    random_detector,
    rows_like,
    score_as_trained,
    store_like,
)
from tests.pgir.test_retrievers import serving
from tests.process import call
from tests.records import an_answer, an_example


def write_questions(folder):
    """Write the microworld's questions as three published sets."""

    def passages(example, **marks):
        return [dict(title=p.title, text=p.text, **marks) for p in example.passages]

    requests = questions(n_train=128, n_evaluation=32, n_ood=40)
    known = [e for e in requests if e.split != "ood"]
    held_out = [e for e in requests if e.split == "ood"]
    folder.mkdir()
    rows = [{"question": e.question, "answer": str(list(e.golds))} for e in known[::2]]
    pub.write_table(folder / "trivia.csv", rows, header=False)
    oracle = [
        {
            "question": e.question,
            "answers": list(e.golds),
            "ctxs": passages(e, hasanswer=True, isgold=True),
            "nq_annotated_gold": {"title": "A"},
        }
        for e in known[1::2]
    ]
    lines = "".join(json.dumps(item) + "\n" for item in oracle)
    (folder / "oracle.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    popqa = [
        pub.popqa(i)
        | {
            "question": e.question,
            "possible_answers": json.dumps(list(e.golds)),
            "paragraphs": passages(e, is_supporting=True),
        }
        for i, e in enumerate(held_out)
    ]
    pub.write_array(folder / "popqa.json", popqa)
    return folder


def test_files_are_recognised_by_their_content_and_the_largest_is_taken(tmp_path):
    folder = write_questions(tmp_path / "questions")
    small = pub.write_lines(folder / "a_few.jsonl", [pub.oracle(i) for i in range(3)])
    bare = pub.write_table(folder / "bare.tsv", [pub.popqa(i) for i in range(99)])
    (folder / "readme.txt").write_text("no questions")
    calls = []
    result = find_questions(folder, calls.append)
    wanted = {(role, name) for name, x in WANTED.items() for role in x.roles}
    assert {(role, name) for role, name, _ in result} == wanted
    assert {small, bare}.isdisjoint(path for _, _, path in result)
    others = find_questions(folder, print, {("train", "nq")})
    assert {x[:2] for x in result} - {x[:2] for x in others} == {("train", "nq")}
    others = find_questions(folder, print, {("held-out", "nq")})
    assert {name for _, name, _ in others} == {"triviaqa", "popqa"}
    assert len(calls) == 3 and "Natural Questions" in calls[1]


def test_all_missing_sets_are_named_with_files_that_would_do(tmp_path):
    pub.write_array(tmp_path / "bare.json", [pub.trivia(i) for i in range(3)])
    with pytest.raises(ValueError, match="lacks Natural Questions"):
        find_questions(tmp_path, print, {("train", "triviaqa"), ("dev", "triviaqa")})
    output = beatrice("real", tmp_path, tmp_path / "run", code=1).stderr
    assert re.search(r"lacks Natural Questions: .*oracle.*; PopQA: .*popqa\.j", output)
    options = "--train nq=FILE --dev nq=FILE --held-out popqa=FILE"
    assert output.rstrip().endswith(options)
    assert not (tmp_path / "run").exists()


def test_a_truncated_download_is_reported(tmp_path):
    lines = "".join(json.dumps(pub.oracle(i)) + "\n" for i in range(9000))  # two chunks
    packed, notes = gzip.compress(lines.encode()), []
    (tmp_path / "oracle.jsonl.gz").write_bytes(packed[: len(packed) // 2])
    with pytest.raises(ValueError, match="lacks TriviaQA.*; Natural Questions"):
        find_questions(tmp_path, notes.append)
    (line,) = notes
    assert line.startswith("Natural Questions: left out: ") and "gzip" in line


@pytest.mark.parametrize(
    ("line", "dtype"),
    [
        ("flags : fpu avx512f amx_bf16", "bfloat16"),
        ("Features : fp asimd bf16", "bfloat16"),
        ("flags : fpu avx2 avx512f", "float32"),
        (None, "float32"),
    ],
)
def test_weights_are_bfloat16_if_the_processor_multiplies_it(tmp_path, line, dtype):
    path = tmp_path / "cpuinfo"
    if line is not None:
        path.write_text(f"processor : 0\n{line}\n")
    assert cpu_dtype(path) == dtype


def test_small_models_answer_in_processes_of_one_thread_for_which_there_is_room(
    tmp_path,
):
    path, gib = tmp_path / "model.gguf", 1 << 30
    with path.open("wb") as file:
        file.truncate(gib)
    small = BackboneConfig(model=str(path), n_threads=n_threads_of(path))
    assert small.n_threads == 1
    for n_asked, n_free, n_cores, expected in (
        (6_700, 64 * gib, 4, 4),
        (2_999, 64 * gib, 4, 2),  # each has a thousand questions
        (6_700, 17 * gib, 4, 2),  # and four times the file and 4 GiB of memory
        (6_700, 9 * gib, 4, 1),
        (10, 64 * gib, 4, 1),
    ):
        assert n_workers(small, n_asked, n_free, n_cores) == expected
    on_a_gpu = dataclasses.replace(small, device="cuda")
    of_the_hub = dataclasses.replace(small, model="no/such-model")
    for config in (on_a_gpu, of_the_hub):
        assert n_workers(config, 6_700, 64 * gib, 4) == 1
    with path.open("wb") as file:
        file.truncate(2 * gib)
    large = dataclasses.replace(small, n_threads=n_threads_of(path))
    assert large.n_threads == 2 and n_workers(large, 6_700, 64 * gib, 4) == 2


def test_a_restarted_stage_counts_two_starts_and_a_done_one_no_more(tmp_path):
    with RunDir.open(tmp_path / "run", NewRun(preset="smoke")) as run:
        stage = run.path, "answer", run.stage_record
        with pytest.raises(KeyboardInterrupt), recorded_cost(*stage):
            raise KeyboardInterrupt
        with recorded_cost(*stage):
            run.mark_stage("answer", {}, 1.0, [])
        first = read_costs(run.path / COSTS)["answer"]
        assert first.n_starts == 2 and first.peak_bytes > 1 << 20
        with recorded_cost(*stage):
            pass  # done already
        assert read_costs(run.path / COSTS)["answer"] == first
        assert "last start" in costs_in_words(read_costs(run.path / COSTS))


def test_sets_that_an_option_of_real_does_not_name_keep_its_defaults():
    sources = [
        Source(dataset=name, role=role, path=Path("questions"))
        for name, wanted in WANTED.items()
        for role in wanted.roles
    ]

    def build(*words, files=sources):
        values = real.make_context("real", [*words]).params
        names = {name: values[name] for name in ("n_train", "context")}
        return with_defaults(QuestionOptions(**names), files).build_config(files, 0)

    usual = build()
    assert usual.splits.n_train_of == {"triviaqa": 2000, "nq": 1300}
    assert usual.contexts == {name: wanted.context for name, wanted in WANTED.items()}
    more = build("--n-train", "triviaqa=4000", "--context", "nq=all")
    assert more.splits.n_train_of == {"triviaqa": 4000, "nq": 1300}
    assert more.contexts == usual.contexts | {"nq": "all"}
    every = build("--n-train", "50", "--context", "none")
    assert (every.splits.size("nq", "train"), every.context_of("nq")) == (50, "none")
    untrained = [x for x in sources if (x.dataset, x.role) != ("nq", "train")]
    assert build(files=untrained).splits.n_train_of == {"triviaqa": 2000}


@pytest.mark.parametrize(
    ("device", "dtype"), [("cpu", cpu_dtype()), ("cuda", "bfloat16")]
)
def test_real_says_in_which_type_weights_are_held_on_either_device(
    tmp_path, device, dtype
):
    folder = write_questions(tmp_path / "questions")
    line = ("real", folder, tmp_path / "run", "--model", WEIGHTS, "--device", device)
    line += ("--n-evaluation", "12", "--n-held-out", "popqa=all")
    done = beatrice(*line, "--n-train", "triviaqa=40", code=1)
    assert f"weights are held in {dtype}\n" in done.stderr
    assert_error_sentence(done, "nq: 1300 questions are asked for")


@pytest.mark.slow
def test_one_command_goes_from_published_files_to_the_report(tmp_path):
    folder, run = write_questions(tmp_path / "questions"), tmp_path / "run"
    line = ["real", folder, run, "--model", WEIGHTS, "--preset", "smoke"]
    line += ["--template", "short", "--n-train", "40", "--n-evaluation", "12"]
    line += ["--n-held-out", "popqa=16", "--model-dtype", "float32"]
    done = beatrice(*line)
    assert "stage 3 of 10: extract" in done.stderr
    assert "cannot conclude for this setting" in done.stderr
    for stage in ("answer", "extract", "train", "report"):
        assert f"\n{stage} " in done.stderr
    assert (run / "report.html").is_file()
    assert extract_config(RunDir(run)).hidden_spans == "answer"
    examples = list(read_records(run / "examples.jsonl", Example))
    trained = {e.dataset for e in examples if e.split == "train"}
    assert trained == {"triviaqa", "nq"}
    assert {e.dataset for e in examples if e.split == "ood"} == {"popqa"}
    assert all(len(e.passages) <= 1 for e in examples if e.dataset == "popqa")
    texts = {}
    for e in examples:
        assert texts.setdefault(text_key(e.question), e.split) == e.split
    rows, costs = (run / "results.jsonl").read_bytes(), (run / "costs.json").read_text()
    again = beatrice(*line)
    assert "train: already done" in again.stderr
    assert (run / "results.jsonl").read_bytes() == rows
    assert (run / "costs.json").read_text() == costs


CORPUS = [Passage(title=f"T{i}", text=f"word{i}", is_supporting=True) for i in range(5)]


class Half:
    """A retriever whose server fails for every second question."""

    def search(self, queries, depth):
        hits = {i: np.arange(depth) for i in range(0, len(queries), 2)}
        raise RetrievalFailed(
            "http://there", {i: "it is slow" for i in range(1, len(queries), 2)}, hits
        )


@pytest.fixture
def unasked(tmp_path):
    """A run of the microworld's questions, nothing answered."""
    run = tmp_path / "run"
    beatrice("data", run, "--world", "--preset", "smoke")
    return RunDir(run)


def test_the_first_test_and_held_out_questions_of_each_set_are_asked(unasked):
    requests = asked_questions(read_examples(unasked), TransferConfig(limit=3))
    sets = {(e.dataset, e.split) for e in requests}
    assert {split for _, split in sets} == {"test", "ood"}
    assert len(requests) == 3 * len(sets)
    assert not any(e.passages for e in requests)


def test_another_set_is_held_out_and_no_question_of_the_run_is_in_it(unasked, tmp_path):
    known = asked_questions(read_examples(unasked), TransferConfig(limit=1))[0]
    lines = [
        {"id": "1", "question": "What is new?", "golden_answers": ["this"]},
        {"id": "2", "question": known.question.upper(), "golden_answers": ["x"]},
    ]
    lines.append({"id": "3", "question": "", "golden_answers": ["x"]})
    lines.append(lines[0] | {"id": "4"})  # of a subject of the same name
    lines += [{"question": "No id?", "golden_answers": ["x"]}] * 2
    file = pub.write_lines(tmp_path / "more.jsonl", lines)
    config, notes = TransferConfig(limit=3, questions=(("own", str(file)),)), []
    requests = asked_questions(read_examples(unasked), config, notes.append)
    new_examples = [e for e in requests if e.dataset == "own"]
    assert {e.split for e in new_examples} == {"ood"}
    assert [e.id for e in new_examples[:2]] == ["own-1", "own-4"]
    assert [e.question for e in new_examples[2:]] == ["No id?"]
    counts = [
        int(n) for n in re.findall(r"(\d+) (?:questions|in|with|refused)", notes[0])
    ]
    assert counts == [3, 1, 1, 1] and sum(counts) == len(lines)
    assert "line 3" in notes[0]


def test_retrieved_passages_are_not_marked_gold_and_none_found_is_a_failure():
    texts = ["word0 T0 T1 T2", "word1 T0 T1 T2", "zzzz"]
    requests = [an_example(id=f"q{i}", question=text) for i, text in enumerate(texts)]
    result = Retrieval(Bm25Retriever(CORPUS), CORPUS, "")
    examples, failed = with_passages(requests, result, 3)
    assert [e.passages[0].title for e in examples] == ["T0", "T1"]
    assert not any(p.is_supporting for e in examples for p in e.passages)
    assert {len(e.passages) for e in examples} == {3}
    assert failed == {"q2": "the search found none"}


def test_questions_that_a_server_failed_are_named_and_the_others_kept():
    requests = [an_example(id=f"q{i}") for i in range(5)]
    examples, failed = with_passages(requests, Retrieval(Half(), CORPUS, ""), 2)
    assert [e.id for e in examples] == [e.id for e in requests[::2]]
    assert set(failed) == {e.id for e in requests[1::2]}
    assert set(failed.values()) == {"it is slow"}


DIMS = paper_dims(hidden=6, prob=5, resid=4, attn=2)
TINY = EncoderConfig(projection=4, hidden=8, n_blocks=1, n_groups=2)


def signals_of(setting, spans):
    """Return normally distributed signals of answers that nothing was trained on."""
    sizes = zip(DIMS.names, DIMS.sizes, strict=True)
    families = {name: Family(shape=(size,)) for name, size in sizes}
    store = store_like(f"memory://{setting}-{len(spans)}", families, spans)
    rows = rows_like([True] * len(spans), setting)
    return DetectorInput(store=store, rows=rows, layer=None)


def test_selected_encoders_are_scored_seed_by_seed_as_their_rivals_are():
    every = ("with_context", "HP"), ("with_context", "A")
    reads = {"with_context": every, "single_pass": every[:1]}
    detector = random_detector(dict.fromkeys(SETTINGS, DIMS), TINY, reads, 4)
    spans = np.tile([(0, 2), (2, 4), (4, 7)], (9, 1, 1))
    new, asked_before = (signals_of(x, spans) for x in ("with_context", "closed_book"))
    scenario = Scenario(trained=new, new=new, closed_book=asked_before)
    result = selected_scores(scenario, detector)
    heads = {"champion": "with_context", "without_closed_book": "single_pass"}
    assert [*result] == [Subject(name) for name in heads]
    for scores, head in zip(result.values(), heads.values(), strict=True):
        assert scores.shape == (2, 9) and np.abs(np.diff(scores, axis=0)).max() > 0.01
        score = partial(score_as_trained, detector)
        stores = {"with_context": new.store}
        raw = score_store(detector, head, stores, layer=None, score=score).raw
        np.testing.assert_allclose(scores.mean(axis=0), raw, atol=1e-6)


def test_encoders_score_retrieved_answers_as_each_does_by_itself():
    spans = np.tile([(0, 0), (0, 1), (1, 3)], (192, 1, 1))
    spans[::30, 2] = 1, 31  # so that they are read in two groups
    new = signals_of("closed_book", spans)
    scenario = Scenario(trained=new, new=new)
    bank, n_subsets = random_bank("closed_book", DIMS, TINY, 0), len(SUBSETS)
    params = jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), bank.params)
    tree = {"params": params, "standardizer": bank.standardizer._asdict()}
    train = dataclasses.replace(GridConfig().train, n_seeds=2)
    result = encoder_scores(scenario, tree, GridConfig(encoder=TINY, train=train))
    features = read_features(new.store, None, np.arange(192), (1, 30))
    families = split_families(features, DIMS, bank.standardizer)
    alone = jax.jit(Encoder(TINY, DIMS).apply)
    for number in range(2 * n_subsets):
        seed, subset = divmod(number, n_subsets)
        member = jax.tree.map(lambda x, seed=seed, i=subset: x[seed, i], bank.params)
        logits, _ = alone(member, families, SUBSETS[subset])
        scores = result[encoder(SUBSET_NAMES[subset])]
        np.testing.assert_allclose(scores[seed], logits, atol=1e-4)
    assert np.ptp(result[names.HIDDEN_ONLY]) > 0.1
    np.testing.assert_array_equal(result[names.HIDDEN_ONLY], result[encoder("H")])
    np.testing.assert_array_equal(result[names.EARLY_FUSION], result[encoder("HPRA")])


@pytest.mark.parametrize("setting", SETTINGS)
def test_on_their_own_rows_detectors_score_as_in_evaluate(smoke_run, setting):
    run = RunDir(smoke_run)
    scenario = run_scenario(run, run, setting)
    detectors = run_detectors(run, scenario.trained)[0]
    known = {detector.subject: detector.scores for detector in detectors}
    result = rival_scores(scenario)
    if setting == "closed_book":
        encoders, _ = checkpoint.restore(run.encoders(setting))
        result |= encoder_scores(scenario, encoders, grid_config(run))
    assert len(result) == (9 if setting == "with_context" else 26)
    for name, scores in result.items():
        # Encoders run in other batches; the probes' solver stops within its tolerance.
        np.testing.assert_allclose(scores, known[name], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("setting", SETTINGS)
def test_on_their_own_rows_published_detectors_score_as_in_baselines(
    smoke_run, setting
):
    run = RunDir(smoke_run)
    scenario = run_scenario(run, run, setting)
    every = chosen_detectors(BaselinesConfig())
    expected = [x for x in every if setting in x.settings]
    result = published_scores(scenario, expected)
    assert [x.name for x in result] == [x.name for x in expected]
    assert {"saplma_mean", "tfidf_svm", "llmcheck_perplexity"} <= {
        x.name for x in result
    }
    for scored, detector in zip(result, expected, strict=True):
        scores = score(detector, scenario.trained).output.scores
        assert np.isfinite(scored.scores).any()
        np.testing.assert_allclose(scored.scores, scores, rtol=1e-4, atol=1e-5)


def test_readings_and_draws_of_new_answers_are_appended_to_the_runs_own(smoke_run):
    run = RunDir(smoke_run)
    scenario = run_scenario(run, run, "closed_book")
    rows = scenario.trained.rows
    drawn = [(index,) for index in range(len(rows.ids))]
    inputs = dataclasses.replace(scenario.trained, samples=drawn)
    scenario = dataclasses.replace(scenario, trained=inputs, new=inputs)
    own = np.arange(2.0 * len(rows.ids)).reshape(-1, 2)
    new = np.pad(own, [(0, 0), (0, 1)], constant_values=5.0) + 0.5
    given = []

    def read(inputs):
        given.append(inputs)
        return DetectorOutput(inputs.readings["x"][None, :, 0])

    detector = baseline_of(read, name="own:read")
    (scored,) = published_scores(scenario, [detector], ({"x": own}, {"x": new}))
    np.testing.assert_array_equal(scored.scores, new[None, :, 0])
    joined = given[0]
    assert np.isnan(joined.readings["x"][: len(own), 2]).all()
    assert set(joined.rows.splits[len(own) :]) == {"ood"}
    is_learned = np.isin(rows.splits, ("train", "validation"))
    expected = [x if used else () for x, used in zip(drawn, is_learned, strict=True)]
    assert joined.samples == [*expected, *drawn]
    assert joined.texts[len(own) :] == scenario.new.texts


def test_rows_cover_every_set_and_all_sets_and_count_unanswered_questions():
    rng, at = np.random.default_rng(0), np.arange(90)
    labels, is_found, in_a = rng.random(90) < 0.4, at % 3 == 0, at < 50
    sets = np.where(in_a, "a", "b"), np.where(in_a, "test", "ood")
    rows = rows_like(labels, "with_context", datasets=sets[0], splits=sets[1])
    texts = [Passage(title="T", text="it is g" if x else "it is") for x in is_found]
    requests = [an_example(id=f"q{i}", passages=(texts[i],)) for i in at]
    lost = [
        an_example(id="c", dataset="a"),
        an_example(id="d", dataset="b", split="ood"),
    ]
    scores = {rival: rng.normal(size=(1, 90)) for rival in names.COMPARED}
    scores[names.CHAMPION] = labels + rng.normal(size=(2, 90))
    new = DetectorInput(store=None, rows=rows, layer=None, questions=requests)
    scenario, config = Scenario(trained=new, new=new), BootstrapConfig(n_resamples=20)
    result = scenario_rows(scenario, scores, [*requests, *lost], config)
    known = {
        (x.dataset, x.subject, x.rival, x.metric): x for x in result if x.seed == "mean"
    }
    backbone = Subject("backbone")
    sets = {
        "a": (in_a, 1),
        IN_DOMAIN: (in_a, 1),
        "b": (~in_a, 1),
        names.ALL_SETS: (at >= 0, 2),
    }
    for name, (here, n_failed) in sets.items():
        ours, other = (
            np.mean([roc_auc_score(labels[here], x[here]) for x in scores[subject]])
            for subject in (names.CHAMPION, names.PERPLEXITY)
        )
        for key, value in (
            ((names.CHAMPION, None, "auroc"), ours),
            ((names.CHAMPION, names.PERPLEXITY, "auroc"), ours - other),
            ((backbone, None, "right"), labels[here].mean()),
            ((backbone, None, "answer_found"), is_found[here].mean()),
        ):
            assert known[name, *key].value == pytest.approx(value, abs=1e-6)
            assert known[name, *key].n_failed == n_failed
    shown = _answer_rows(requests, dataclasses.replace(rows, setting="closed_book"))
    assert {x.metric for x in shown} == {"right"}


def test_a_run_inside_a_run_keeps_what_detectors_were_fitted_on(smoke_run, tmp_path):
    large = shutil.ignore_patterns("features", "encoders", "selection")
    run = RunDir(shutil.copytree(smoke_run, tmp_path / "run", ignore=large))
    with open_inner(run) as inner:
        assert extract_config(inner) == extract_config(run)
        assert answer_config(inner).prompt.overlong == "drop-passages"
        assert answer_config(inner).settings == SETTINGS


def test_closed_book_answers_are_reused_and_changed_questions_answered_again(tmp_path):
    passages = (Passage(title="T", text="new"),)
    *asked, other = [an_example(id=f"q{i}", passages=passages) for i in range(4)]
    run, notes = make_run(tmp_path / "run", [*asked, other]), []
    keys = itertools.product((*asked, other), SETTINGS)
    answers = [an_answer(example_id=x.id, setting=setting) for x, setting in keys]
    run.answers_file.parent.mkdir()
    run.answers_file.write_text(write_lines(answers))
    bare = [msgspec.structs.replace(example, passages=()) for example in asked]
    with RunDir.open(tmp_path / "inner", smoke()) as inner:
        for content, is_done in ((asked, True), (asked, True), (bare, False)):
            transfer.write_questions(inner, run, content, notes.append)
            assert read_examples(inner) == content
            taken = list(read_records(inner.answers_file, Answer))
            assert taken == [x for x in answers[:-2] if x.setting == "closed_book"]
            if not inner.stage_records():
                inner.mark_stage("answer", {}, 1.0)
                (inner.path / "features").mkdir()
            assert inner.stage_done("answer") == is_done
            assert (inner.path / "features").exists() == is_done
    assert notes == ["retrieved: passages or questions have changed; answering again"]


DRAWING = ("sep:words", "semantic_entropy_bayesian:words")


def test_new_answers_are_judged_by_draws_with_the_options_of_the_runs_own(tmp_path):
    run, config, notes = RunDir(tmp_path), BaselinesConfig(only=DRAWING), []

    def draw(run, n_samples):
        write_text_atomic(run.samples_file, "")
        drawing = {"draws": {"n_samples": n_samples}, "splits": ["train"]}
        write_json_atomic(run.samples / "config.json", drawing)
        run.mark_stage("sample", {}, 1.0)

    def rivals():
        return [x.name for x in published_rivals(run, config, notes.append)]

    draw(run, 4)
    assert rivals() == ["sep:words"]  # it has learned from the run's draws
    line = f"`beatrice sample {tmp_path}/retrieved --split train .*`, with the options "
    assert re.search(line + "of the run's own samples$", notes.pop())
    draw(RunDir(tmp_path / "retrieved"), 10)
    with pytest.raises(ValueError, match="drawn with other options than .*samples; "):
        rivals()
    draw(RunDir(tmp_path / "retrieved"), 4)
    assert sorted(rivals()) == sorted(DRAWING) and not notes


def test_transfer_answers_nothing_if_a_detectors_code_is_not_named(smoke_run, tmp_path):
    run = RunDir(shutil.copytree(smoke_run, tmp_path / "run"))
    only = BaselinesConfig(only=("foreign:x",))
    BASELINES.resolve_section(run, lambda _: only, is_replaceable=True)
    done = beatrice("transfer", run.path, code=1)
    assert_error_sentence(done, "give --only foreign:x to allow it")
    done = beatrice("transfer", run.path, "--only", "other:y", code=2)
    assert_error_sentence(done, f"`beatrice baselines {run.path} --only other:y`")
    for name in ("saplma_last", "again"):  # they would restrict nothing
        done = beatrice("transfer", run.path, "--only", name, code=2)
        assert_error_sentence(done, f"a detector of your own, found '{name}'")
    assert not (run.path / "retrieved").exists()


@pytest.mark.parametrize(
    ("rule", "options"),
    [
        ("containment", "--match containment"),
        ("judges: big, large, majority", "--judge 'big, large' --set vote=majority"),
        ("judge mine:x", "--judge mine:x"),
        ("imported from mine.jsonl", None),
    ],
)
def test_options_of_label_follow_from_a_label_rule(rule, options):
    assert transfer.labelling_options(rule) == options


@pytest.fixture(scope="module")
def finished(smoke_run, tmp_path_factory):
    """A finished run of the smallest preset, with retrieved answers judged."""
    run = shutil.copytree(smoke_run, tmp_path_factory.mktemp("transfer") / "run")
    call("transfer", run, "--limit", 20)
    retrieved = RunDir(run / "retrieved")
    call("label", retrieved.path, "--match", "containment")
    stderr = call("transfer", run).stderr
    assert "retrieved answers are labelled by containment" in stderr
    (line,) = re.findall("`beatrice (label .*?)`", stderr)
    call(*line.split())
    assert label_rule(retrieved) == label_rule(RunDir(run))
    call("label", retrieved.path, "--match", "containment")
    call("transfer", run)
    return RunDir(run)


@pytest.mark.slow
def test_rows_of_transfer_join_the_others_and_are_made_once(finished):
    rows = [r for r in read_result_rows(finished) if r.experiment == names.RETRIEVED]
    assert {r.setting for r in rows} == {"closed_book", "with_context"}
    result = {(r.dataset, r.metric) for r in rows if r.detector == "backbone"}
    assert (names.ALL_SETS, "right") in result and (
        names.ALL_SETS,
        "answer_found",
    ) in result
    wanted = map(Subject.of, ("champion", "perplexity", "tfidf", "saplma_mean"))
    assert {*wanted, names.probe("HPRA")} <= {r.subject for r in rows}
    before = finished.results.read_bytes()
    assert "transfer: already done" in call("transfer", finished.path).stderr
    assert finished.results.read_bytes() == before


@pytest.mark.slow
def test_rows_of_retrieved_answers_have_the_rule_of_their_own_labels(finished):
    rules = collections.defaultdict(set)
    for result in read_result_rows(finished):
        rules[result.experiment.startswith(names.RETRIEVED)].add(result.label_rule)
    assert rules == {True: {"containment"}, False: {"exact match"}}
    assert "exact match; retrieved answers: containment" in run_ledger(finished)


@pytest.mark.slow
def test_answers_from_other_passages_are_labelled_by_the_runs_rule(finished, tmp_path):
    run = shutil.copytree(finished.path, tmp_path / "run")
    call("transfer", run, "-k", 1)
    assert label_rule(RunDir(run / "retrieved")) == "exact match"


@pytest.mark.slow
def test_transfer_searches_with_the_server_that_control_used(smoke_run, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(smoke_run, run)
    held = list(read_records(run / "passages.jsonl", Passage))
    with serving(RetrievalServer(Bm25Retriever(held), held, port=0)) as url:
        beatrice("control", run, "--only", "none", "--url", f"{url}/retrieve")
        done = beatrice("transfer", run, "--limit", 1)
    assert "questions have passages, found by served among" in done.stderr
    rows = read_rows(run / "rows" / "transfer.jsonl")
    assert names.RETRIEVED in {row.experiment for row in rows}
