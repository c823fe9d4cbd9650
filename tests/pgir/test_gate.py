"""The gate, pipelines of other libraries, and users' own retrievers and judges."""

import concurrent.futures
import copy
import dataclasses
import importlib.util
import itertools
import json
import re
import shutil
import sys
import threading
import warnings
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest

from beatrice import LanguageModel, load
from beatrice.extract.generate.prompts import ANSWER_PRESETS, build_prompt
from beatrice.extract.generate.templates import TEMPLATES, PromptConfig
from beatrice.extract.plugs import load_plug
from beatrice.extract.records import Passage
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.stages import change_settings
from beatrice.jaxprobe.scope import Validation, certified
from beatrice.pgir.controllers.loop import Call
from beatrice.pgir.controllers.waves import (
    AnswerService,
    CallJournal,
    JudgeService,
    showable,
)
from beatrice.pgir.gate import (
    Draft,
    FlashRagJudger,
    Gate,
    langgraph_app,
    llama_index_engine,
    run_pgir,
)
from beatrice.pgir.retrievers import (
    RetrievalConfig,
    RetrievalFailed,
    UserRetriever,
    load_retriever,
)
from beatrice.pgir.scorer import Scorer
from beatrice.pgir.stages import CONTROL, JUDGES, ControlConfig, record_retrieval
from tests.extract.signals.test_full_device import room_for
from tests.extract.small_run import beatrice, make_run
from tests.pgir.small import (
    PASSAGE,
    QUESTION,
    answering_of,
    input_shapes,
    make_detector,
    reply,
)
from tests.pgir.test_scorer import CHAT, FEW, scorer_with_head
from tests.process import ROOT, forked

OTHER = "what is the genre of Skiband Rugrond?"
ANSWER = "Guzolt Falls"


def strict(scorer):
    return Gate(scorer, 1.0)  # calibrated P never reaches 1: no answer stands


def lenient(scorer):
    return Gate(scorer, 1e-6)  # every answer stands


def test_a_draft_is_the_models_answer_and_stands_at_or_above_the_threshold(scorer):
    drafts = strict(scorer).draft([QUESTION, OTHER])
    assert [draft.question for draft in drafts] == [QUESTION, OTHER]
    texts = [score.text for score in scorer.answer([QUESTION, OTHER])]
    assert [draft.answer for draft in drafts] == texts
    expected = [scorer.score(d.question, d.answer).p_correct for d in drafts]
    assert [d.p_correct for d in drafts] == pytest.approx(expected, abs=1e-5)
    assert strict(scorer).draft([]) == []
    p_correct = scorer.answer(QUESTION).p_correct
    assert not Gate(scorer, p_correct).should_retrieve(QUESTION)
    assert Gate(scorer, p_correct + 1e-4).should_retrieve(QUESTION)


def test_an_empty_draft_is_never_trusted(probed, scorer):
    config = dataclasses.replace(probed.config, stop=(scorer.answer(QUESTION).text[0],))
    cut = Scorer(probed.backbone, probed.detector, config)
    (empty,) = lenient(cut).draft([QUESTION])
    assert (empty.answer, empty.decision) == ("", "distrust") and empty.p_correct > 0
    assert lenient(cut).keep(empty, ANSWER, [PASSAGE]).answer == ANSWER
    (grounded,) = run_pgir(cut, [QUESTION], finding(), threshold=1e-6)
    assert grounded.answer == cut.answer(QUESTION, [PASSAGE]).text != ""
    assert grounded.is_trusted and grounded.n_generations == 2
    (empty,) = run_pgir(cut, [QUESTION], Fixed(lambda q, n: [[]]), threshold=1e-6)
    assert (empty.answer, empty.p_correct, empty.is_trusted) == ("", None, False)
    assert (empty.reason, grounded.reason) == ("the model's answer is empty", None)


BAD = {
    "": "is empty",
    "what is <s>?": "the text holds '<s>'.* take it out",
    "who is " * 600: "has a window of 512; give a shorter question",
}


def test_an_answer_longer_than_the_window_is_told_to_be_shorter(scorer):
    with pytest.raises(ValueError, match="window of 512; allow fewer new tokens"):
        scorer.answer(QUESTION, max_new_tokens=600)


@pytest.mark.parametrize("bad", BAD)
def test_a_question_no_prompt_can_hold_goes_to_retrieval_and_affects_no_other(
    scorer, bad
):
    gate, questions = lenient(scorer), [QUESTION, bad, OTHER]
    first, wrong, last = gate.draft(questions)
    assert [first, last] == gate.draft([QUESTION, OTHER]) and not first.retrieve
    assert wrong.retrieve and (wrong.answer, wrong.p_correct) == ("", None)
    assert re.search(BAD[bad], wrong.reason)
    assert gate.keep(wrong, ANSWER, [PASSAGE]).answer == ANSWER
    with pytest.raises(ValueError, match=f"^question 2 of 3.* {BAD[bad]}"):
        scorer.answer(questions)
    first, wrong, last = run_pgir(scorer, questions, finding(), threshold=0.5)
    expected = run_pgir(scorer, [QUESTION, OTHER], finding(), threshold=0.5)
    assert [first, last] == expected and first.error is None
    assert (wrong.question, wrong.answer, wrong.n_generations) == (bad, None, 0)
    assert re.search(BAD[bad].partition(";")[0], wrong.error)


def test_a_question_whose_passages_do_not_fit_is_refused_in_a_sentence(scorer):
    with pytest.raises(ValueError, match="^the question needs .* shorter passages$"):
        scorer.answer(QUESTION, [PASSAGE * 90])


def test_a_missing_chat_template_is_one_error_and_not_a_reason_per_draft(probed):
    scorer = Scorer(probed.backbone, probed.detector, probed.config)
    assert probed.backbone.tokenizer.chat_template is None
    scorer.probed.template = PromptConfig(chat=True).prompt_template()
    with pytest.raises(ValueError, match="chat template"):
        lenient(scorer).draft([QUESTION])
    with pytest.raises(ValueError, match="chat template"):
        run_pgir(scorer, [QUESTION], finding(), threshold=0.5)


def test_an_answer_too_long_to_be_read_again_fails_only_its_question(probed):
    scorer = Scorer(probed.backbone, probed.detector, probed.config)
    scorer.probed.why_read_again = "its attention does not allow it"
    questions = [QUESTION, "who is " * 30, OTHER]
    expected = run_pgir(scorer, questions, finding(), threshold=1e-6)
    requests = scorer.probed.requests("closed_book", questions, [()] * 3)
    with room_for(probed.backbone, n_tokens=len(requests[1].prompt.ids)):
        results = run_pgir(scorer, questions, finding(), threshold=1e-6)
    assert [x.answer for x in results] == [x.answer for x in expected]
    assert [x.p_correct is None for x in results] == [False, True, False]
    assert [x.error is None for x in results] == [True, False, True]
    assert "does not fit in the device" in results[1].error


@pytest.mark.parametrize(
    ("ask", "why"),
    [
        (lambda scorer, x: lenient(scorer).draft(x), "reason"),
        (
            lambda scorer, texts: run_pgir(scorer, texts, finding(), threshold=1),
            "error",
        ),
    ],
)
def test_a_prompt_too_large_for_the_device_fails_only_its_question(scorer, ask, why):
    questions = [f"where is Guzolt {i}?" for i in range(40)]
    expected = [result.answer for result in ask(scorer, questions)]
    questions[7] = "who is " * 30
    with (
        room_for(scorer.probed.backbone, n_tokens=60),
        input_shapes(scorer.probed.backbone) as shapes,
    ):
        results = ask(scorer, questions)
    failed = results.pop(7)
    assert not failed.answer and getattr(failed, "retrieve", True)
    assert "does not fit in the device" in getattr(failed, why)
    assert [result.answer for result in results] == expected[:7] + expected[8:]
    assert max(shapes)[0] >= 20  # others are still answered together


def test_a_gate_decides_alike_after_copying_or_pickling():
    gate = Gate(load("embedded"), 0.5)
    drafts = gate.draft([QUESTION])
    for other in (
        copy.deepcopy(gate),
        ForkingPickler.loads(ForkingPickler.dumps(gate)),
    ):
        assert other.draft([QUESTION]) == drafts


def test_a_gate_works_in_a_process_forked_while_a_thread_was_using_it(scorer):
    gate, leave = strict(scorer), threading.Event()
    drafts, asked = gate.draft([QUESTION]), threading.Event()

    def work():
        while not leave.is_set():
            gate.draft([QUESTION] * 8)
            asked.set()

    def child():
        with warnings.catch_warnings(action="ignore"):
            assert gate.draft([QUESTION]) == drafts

    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        working = pool.submit(work)
        asked.wait()
        codes = [forked(child) for _ in range(3)]
        leave.set()
        working.result()
    assert codes == [0] * 3


def draft(p, decision="distrust"):
    return Draft(question=QUESTION, answer="own", p_correct=p, decision=decision)


@pytest.mark.parametrize(
    ("share", "draft_share", "decision", "expected"),  # shares of the grounded P
    [
        (None, 0.9, "distrust", (ANSWER, "distrust")),  # neither stands: the better one
        (None, 1.1, "distrust", ("own", "distrust")),
        (None, 1.0, "distrust", ("own", "distrust")),  # a tie
        (None, None, "unknown", (ANSWER, "distrust")),
        (0.5, 0.75, "trust", ("own", "trust")),  # the first one that stands
        (0.5, 0.25, "distrust", (ANSWER, "trust")),
        # The draft's own threshold may be higher than the grounded answer's.
        (0.5, 1.1, "distrust", (ANSWER, "trust")),
    ],
)
def test_the_first_answer_that_stands_is_kept_or_else_the_better_one(
    scorer, share, draft_share, decision, expected
):
    theirs = scorer.score(QUESTION, ANSWER, [PASSAGE]).p_correct
    gate = Gate(scorer, share * theirs) if share else strict(scorer)
    p_correct = draft_share and draft_share * theirs
    best = gate.keep(draft(p_correct, decision), ANSWER, PASSAGE)
    assert (best.answer, best.decision) == expected
    assert best.is_grounded == (best.answer == ANSWER)
    assert best.p_correct == (theirs if best.is_grounded else p_correct)
    assert best.is_trusted == (best.decision == "trust") and best.reason is None


def test_only_a_grounded_answer_that_could_not_be_read_gives_a_reason(scorer):
    gate = strict(scorer)
    long, worse = (
        gate.keep(draft(1.0), ANSWER, [passage])
        for passage in (PASSAGE * 90, PASSAGE + " xyzzy")
    )
    assert (long.answer, worse.answer) == ("own", "own")
    assert "has a window of 512" in long.reason and worse.reason is None
    score = scorer.score(QUESTION, ANSWER, [PASSAGE + " xyzzy"])
    assert worse.warnings == score.warnings != ()


@pytest.mark.parametrize(
    ("p_correct", "grounded", "reason"),
    [
        (0.1, " \n", "the grounded answer is empty"),
        (None, " \n", "the grounded answer is empty"),
        (0.1, f"{ANSWER}</s>", "'</s>'"),
        (0.1, f"{ANSWER}\ud800", "lone surrogate"),
    ],
)
def test_a_grounded_answer_that_cannot_be_scored_leaves_the_draft(
    scorer, p_correct, grounded, reason
):
    kept = strict(scorer).keep(draft(p_correct), grounded, [PASSAGE])
    assert (kept.answer, kept.p_correct, kept.is_grounded) == ("own", p_correct, False)
    assert reason in kept.reason


def test_passages_that_no_prompt_can_hold_are_left_out_or_changed(scorer):
    gate, plain = strict(scorer), "Guzolt Falls is < /s> a place."
    expected = gate.keep(draft(0.0), ANSWER, [plain])
    kept = gate.keep(draft(0.0), ANSWER, [" ", plain.replace("< /s>", "</s>")])
    assert dataclasses.replace(kept, warnings=kept.warnings[1:]) == expected
    assert "of 2, 1 left out as empty and 1 changed by" in kept.warnings[0]
    blank = gate.keep(draft(None), ANSWER, [" ", ""])
    assert blank.p_correct is None and "every passage is empty" in blank.reason


def test_without_a_threshold_the_probes_own_decisions_hold():
    probe = load("embedded", precision=0.8)
    gate, questions = Gate(probe), [QUESTION, "who employs Browuff Dogral?"]
    assert repr(gate) == f"Gate({probe!r}, threshold: the probe's)"
    scorer = probe.load_scorer()
    assert repr(Gate(scorer, 0.5)) == "Gate(Scorer(embedded on cpu), threshold: 0.5)"
    scores = probe.answer(questions)
    drafts = gate.draft(questions)
    assert [d.decision for d in drafts] == [s.decision for s in scores]
    assert [d.retrieve for d in drafts] == [True, False]
    score = probe.score(QUESTION, ANSWER, [PASSAGE])
    kept = gate.keep(drafts[0], ANSWER, [PASSAGE])
    assert (kept.answer, kept.decision) == (ANSWER, score.decision)
    with pytest.raises(ValueError, match="lower precision, or give a threshold"):
        Gate(load("embedded", precision=0.995))


def test_a_probe_fitted_on_too_few_answers_needs_a_threshold_and_warns(probed):
    p = np.linspace(0, 1, 100)
    validation = Validation(p, p > 0.5)  # enough to certify a threshold, by luck
    doubtful = scorer_with_head(probed, evidence=FEW, validation=validation)
    assert certified(validation, 0.9).trust.p_correct is not None
    assert doubtful.thresholds("closed_book").trust.p_correct is None
    with pytest.raises(ValueError, match="too few to trust.* fit it on more answers"):
        Gate(doubtful)
    (draft,) = Gate(doubtful, 0.5).draft([QUESTION])
    assert draft.warnings == doubtful.answer(QUESTION).warnings
    assert "too few to trust" in draft.warnings[0]


def test_a_gate_needs_a_policy_from_control_or_a_threshold(tmp_path):
    with pytest.raises(ValueError, match="run `beatrice control`, or give a thr"):
        Gate.load(tmp_path)
    (tmp_path / "control").mkdir()
    control = {"tau": "high", "cases": []}
    (tmp_path / "control" / "control.json").write_text(json.dumps(control))
    with pytest.raises(ValueError, match="control.json"):
        Gate.load(tmp_path)


def test_a_threshold_from_control_applies_only_to_its_own_detector(tmp_path, backbone):
    run, detector = make_run(tmp_path / "run"), make_detector(backbone)
    run.resolve_section("answer", ANSWER_PRESETS)
    detector.save(run.detector)
    run.control.mkdir()
    (run.control / "control.json").write_text(json.dumps({"tau": 0.6}))
    run.mark_stage("control", run.hash_inputs(run.detector), 1.0, [run.control])
    assert Gate.load(run.path).threshold == 0.6
    heads = detector.heads | {"single_pass": detector.heads["with_context"]}
    dataclasses.replace(detector, heads=heads).save(run.detector)
    with pytest.raises(ValueError, match="input detector has changed.*control` again"):
        Gate.load(run.path)
    assert Gate.load(run.path, threshold=0.5).threshold == 0.5


class FlashRagDataset:
    """The part of FlashRAG's dataset that a judger reads."""

    question = [QUESTION, OTHER]


def test_flashrag_gets_verdicts_and_a_missing_run_is_refused(scorer, tmp_path):
    config = {"judger_name": "beatrice", "device": "cpu"}
    judger = FlashRagJudger(config, gate=strict(scorer))
    assert judger.judge(FlashRagDataset()) == [True, True]
    assert judger.judge([QUESTION]) == judger.judge(QUESTION) == [True]
    assert FlashRagJudger({}, gate=lenient(scorer)).judge(QUESTION) == [False]
    config = {"judger_config": {"run": tmp_path / "no run", "threshold": 0.5}}
    with pytest.raises(ValueError, match="no run"):
        FlashRagJudger(config)


def never(*_):
    raise AssertionError("nothing was to be retrieved")


@pytest.mark.parametrize(
    ("package", "make", "arguments"),
    [
        ("langgraph", langgraph_app, (never, never)),
        ("llama_index", llama_index_engine, (None,)),
    ],
)
def test_a_pipeline_whose_package_is_missing_says_what_to_install(
    scorer, package, make, arguments
):
    if importlib.util.find_spec(package) is not None:
        pytest.skip(f"{package} is installed")
    with pytest.raises(ImportError, match=rf"{package}.*probe\[pipelines\]"):
        make(lenient(scorer), *arguments)


def test_a_graph_retrieves_only_if_needed_and_keeps_the_better_answer(scorer):
    pytest.importorskip("langgraph")
    app = langgraph_app(lenient(scorer), never, never)
    state = app.invoke({"question": QUESTION})
    assert state["answer"] == scorer.answer(QUESTION).text
    assert state["passages"] == []
    gate = strict(scorer)
    app = langgraph_app(gate, lambda q: [PASSAGE], lambda q, passages: ANSWER)
    state = app.invoke({"question": QUESTION})
    (drafted,) = gate.draft([QUESTION])
    best = gate.keep(drafted, ANSWER, [PASSAGE])
    assert (state["answer"], state["p_correct"]) == (best.answer, best.p_correct)
    assert state["passages"] == [PASSAGE] and state["reason"] is None
    assert [*app.get_input_jsonschema()["properties"]] == ["question"]
    edges = {(edge.source, edge.target) for edge in app.get_graph().edges}
    assert ("write", "ground") in edges


def test_a_graphs_checkpoint_is_plain_and_passages_are_the_last_questions(
    scorer, caplog
):
    pytest.importorskip("langgraph")
    from langgraph.checkpoint.memory import InMemorySaver

    gate = strict(scorer)
    app = langgraph_app(gate, lambda q: [PASSAGE], lambda q, passages: ANSWER)
    app.checkpointer = InMemorySaver()
    thread = {"configurable": {"thread_id": "1"}}
    assert app.invoke({"question": QUESTION}, thread)["passages"] == [PASSAGE]
    gate.threshold = 1e-6
    assert app.invoke({"question": OTHER}, thread)["passages"] == []
    assert "unregistered type" not in caplog.text


@pytest.fixture
def notes(working_folder):
    """The README's retriever, from its module in the working folder."""
    text = (ROOT / "pgir" / "README.md").read_text()
    (block,) = re.findall(r"```python\n(# my_search\.py\n.*?)```", text, re.S)
    (working_folder / "my_search.py").write_text(block)
    yield load_retriever("my_search:Notes")
    del sys.modules["my_search"]


class Fixed:
    """A retriever that returns what `give` returns, and counts its queries."""

    identity = "fixed"

    def __init__(self, give):
        self.give, self.n_queries = give, 0

    def search(self, queries, depth):
        self.n_queries += len(queries)
        return self.give(queries, depth)


def finding(passage=PASSAGE):
    return Fixed(lambda queries, depth: [[passage]] * len(queries))


def test_a_ranking_is_as_deep_as_all_retrievals_may_show(scorer):
    depths = []
    retriever = Fixed(lambda queries, depth: depths.append(depth) or [[PASSAGE]])
    doubt = {"threshold": 1.0, "judge": lambda *draft: 0.1}
    run_pgir(scorer, [QUESTION], retriever, n_passages=40, **doubt)
    assert set(depths) == {80}


def test_the_readmes_retriever_and_judge_work_in_python(scorer, notes):
    from my_search import stands_in_a_passage

    def answer(threshold=0.8, **options):
        (result,) = run_pgir(scorer, [QUESTION], notes, threshold=threshold, **options)
        return result

    sure = answer(threshold=1e-6)
    assert sure.is_trusted and not sure.passages and sure.n_generations == 1
    judged = answer(judge=stands_in_a_passage)
    assert judged.answer == "Guzolt Falls" and judged.is_trusted
    assert judged.p_correct == 0.9 and judged.n_generations == 2
    assert judged.passages[0].text == PASSAGE
    doubted = answer(budget=1, judge=lambda q, a, p: 0.1)
    assert not doubted.is_trusted and doubted.n_generations == 2


class Guarded:
    """A tokenizer that only a thread holding its model's lock may use."""

    def __init__(self, tokenizer, lock):
        self._tokenizer, self._lock = tokenizer, lock

    def __getattr__(self, name):
        value = getattr(self._tokenizer, name)
        if callable(value):
            assert self._lock._owner == threading.get_ident(), name
        return value

    def __len__(self):
        return len(self._tokenizer)

    def __call__(self, *texts, **options):
        return self.__getattr__("__call__")(*texts, **options)


def guarded(backbone):
    tokenizer = copy.deepcopy(backbone.tokenizer)
    tokenizer.chat_template = CHAT
    tokenizer = Guarded(tokenizer, backbone.splitter.lock)
    return dataclasses.replace(backbone, tokenizer=tokenizer)


def test_the_tokenizer_is_used_only_under_its_models_lock(scorer):
    probed = scorer.probed
    alone = Scorer(guarded(probed.backbone), probed.detector, probed.config)
    bos = probed.backbone.tokenizer.bos_token  # split, since no prompt may contain it
    retriever = finding(f"{bos} {PASSAGE}")
    (result,) = run_pgir(alone, [QUESTION], retriever, **DOUBTING)
    assert result.n_generations > 1 and result.error is None
    chat = [{"role": "user", "content": QUESTION}]
    assert list(alone.stream(messages=chat, every=1))
    answering = answering_of(alone.probed, PASSAGE, PASSAGE * 90)
    assert answering.fitting(QUESTION, [0, 1]) == (0,)
    model = LanguageModel("embedded")
    model.backbone = guarded(model.backbone)
    assert model.as_answers([(QUESTION, ANSWER)])


def test_the_readmes_retriever_and_judge_work_in_control(smoke_run, notes, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(smoke_run, run)
    judge = "my_search:stands_in_a_passage"
    words = ("--retriever", "my_search:Notes", "--judge", judge, "--only", "skr")
    beatrice("control", run, *words)
    rows = map(json.loads, (run / "rows" / "control.jsonl").read_text().splitlines())
    names = {row["detector"] for row in rows}
    assert {"pgir", "skr", f"judge:{judge}"} <= names and "dragin" not in names
    section = json.loads((run / "manifest.json").read_text())["sections"]["control"]
    assert section["rivals"] == ["skr", f"judge:{judge}"]
    (searches,) = (run / "searches").iterdir()
    assert PASSAGE in searches.read_text()


def test_passages_of_a_users_retriever_are_stored_under_stable_indices(tmp_path):
    passages = [[PASSAGE, {"title": "T", "text": "b"}], [" ", PASSAGE]]
    plug = Fixed(lambda queries, depth: passages)
    retriever = UserRetriever(plug, tmp_path / "kept.jsonl")
    assert retriever.search(["a", "b"], 2) == [(0, 1), (0,)]
    again = UserRetriever(plug, tmp_path / "kept.jsonl")
    assert again.search(["b", "a"], 2) == [(0,), (0, 1)]
    assert [p.text for p in again.passages[:2]] == [PASSAGE, "b"]
    assert [p.title for p in again.passages[:2]] == ["", "T"]
    assert plug.n_queries == 2


def broken(queries, depth):
    raise KeyError("nothing there")


@pytest.mark.parametrize(
    ("give", "message"),
    [
        (broken, "Fixed failed .KeyError"),
        (lambda queries, depth: [], "expected 1 lists of passages, found 0"),
        (lambda queries, depth: None, "passages for each query, found NoneType"),
        (lambda queries, depth: "a", "passages for each query, found 'a'"),
        (lambda queries, depth: [PASSAGE], r"passages\[0\]: expected a list of pass"),
        (lambda queries, depth: np.array(["a"]), r"passages\[0\]: expected a list"),
        (lambda queries, depth: [[3]], r"passages\[0\]\[0\]: expected a text"),
    ],
)
def test_a_broken_retriever_is_reported_in_a_sentence(give, message):
    with pytest.raises(ValueError, match=message):
        UserRetriever(Fixed(give)).search(["a"], 2)


@pytest.mark.parametrize("held", [tuple, iter, np.array])
def test_rankings_in_any_container_are_read_down_to_the_depth(held):
    rankings = [["x", "z"], ["y", "z"]]
    retriever = UserRetriever(Fixed(lambda queries, depth: held(rankings)))
    assert retriever.search(["a", "b"], 1) == [(0,), (1,)]
    assert len(retriever.passages) == 2


class Async:
    identity = "async"

    async def search(self, queries, depth):
        return [[PASSAGE] for _ in queries]


def test_an_async_search_is_refused_before_it_is_called():
    with pytest.raises(ValueError, match="Async.search is async: expected a method"):
        UserRetriever(Async())


DOUBTING = {"threshold": 1.0, "query": "question"}  # every question is searched for


def test_a_failed_connection_fails_only_its_own_questions(scorer):
    def give(queries, depth):
        if queries[0] != QUESTION or len(queries) > 1:
            raise ConnectionError(f"{queries[-1]} is down")
        return [[PASSAGE]]

    with pytest.raises(RetrievalFailed, match="1 of 2"):
        UserRetriever(Fixed(give)).search([QUESTION, "bad?"], 2)
    questions = [QUESTION, "bad?", "worse?"]
    good, bad, worse = run_pgir(scorer, questions, Fixed(give), **DOUBTING)
    assert good.answer and good.error is None
    assert (bad.error, worse.error) == ("bad? is down", "worse? is down")
    drafts = strict(scorer).draft(questions[1:])
    assert [(x.answer, x.n_generations) for x in (bad, worse)] == [
        (draft.answer, 1) for draft in drafts
    ]


def test_a_passage_that_is_not_valid_text_is_not_kept(tmp_path):
    passages = ["x", "a \ud800 b"]
    plug = Fixed(lambda queries, depth: [passages] * len(queries))
    retriever = UserRetriever(plug, tmp_path / "kept.jsonl")
    assert retriever.search(["a"], 1) == [(0,)]
    lone = r"Fixed: passage 2 has the lone surrogate U\+D800 at character 2"
    with pytest.raises(RetrievalFailed, match=lone):
        retriever.search(["a"], 2)
    passages[1] = "mended"
    assert retriever.search(["a"], 2) == [(0, 1)]


def test_a_question_whose_passage_fits_no_window_keeps_its_draft(scorer):
    long = Fixed(lambda q, n: [[PASSAGE * 90 if x == QUESTION else PASSAGE] for x in q])
    bad, good = run_pgir(scorer, [QUESTION, OTHER], long, **DOUBTING)
    assert good.error is None and good.n_generations == 2
    assert "has a window of 512; give shorter passages" in bad.error
    (draft,) = strict(scorer).draft([QUESTION])
    assert (bad.answer, bad.n_generations, bad.is_trusted) == (draft.answer, 1, False)
    assert bad.p_correct == pytest.approx(draft.p_correct, abs=1e-5)


def test_a_draft_that_the_detector_cannot_read_is_never_trusted(scorer):
    question = "xyzzy plugh qwerty?"
    (draft,) = lenient(scorer).draft([question])
    assert draft.p_correct is None and "unknown to" in draft.reason
    questions = [question, QUESTION]
    unread, read = run_pgir(scorer, questions, finding(), threshold=1e-6)
    assert (unread.is_trusted, unread.p_correct) == (False, None)
    assert (unread.reason, unread.answer) == (draft.reason, draft.answer)
    assert unread.n_generations == 2 and unread.error is None
    assert read.is_trusted and read.p_correct and read.reason is None


def test_an_answer_is_returned_even_if_its_judge_cannot_be_reached(scorer):
    def away(question, answer, passages):
        raise ConnectionError("no judge there")

    questions = [QUESTION, QUESTION * 90]
    judged, long = run_pgir(scorer, questions, finding(), threshold=0.5, judge=away)
    assert (judged.answer, judged.p_correct) == (scorer.answer(QUESTION).text, None)
    assert (judged.error, judged.n_generations) == ("no judge there", 1)
    # An answer is missing only if none was written.
    assert (long.answer, long.n_generations) == (None, 0)
    assert "has a window of 512" in long.error


class NoIdentity:
    def search(self, queries, depth):
        return []


@pytest.mark.parametrize("plug", [NoIdentity(), object(), None, "bm25"])
def test_an_object_that_is_no_retriever_is_refused(scorer, plug):
    with pytest.raises(ValueError, match="is no retriever: expected a method search"):
        run_pgir(scorer, [QUESTION], plug, threshold=0.5)


def scorer_of_one(scorer, setting, head):
    """Return a scorer whose probe knows the answers of only one setting."""
    probed = scorer.probed
    heads = {head: probed.detector.heads[head]}
    banks = {setting: probed.detector.banks[setting]}
    detector = dataclasses.replace(probed.detector, heads=heads, banks=banks)
    return Scorer(probed.backbone, detector, probed.config)


def test_a_probe_of_one_setting_needs_a_judge_for_the_other_setting(scorer):
    alone = scorer_of_one(scorer, "closed_book", "closed_book")
    with pytest.raises(ValueError, match="was fitted only on closed_book answers"):
        run_pgir(alone, [QUESTION], finding(), threshold=0.5)
    with pytest.raises(ValueError, match="was fitted only on closed_book answers"):
        strict(alone).keep(draft(0.1), ANSWER, [PASSAGE])
    for threshold in (0.5, None):  # each of its drafts would be refused
        with pytest.raises(ValueError, match="was fitted only on with_context answers"):
            Gate(scorer_of_one(scorer, "with_context", "single_pass"), threshold)
    options = {"threshold": 0.5, "judge": lambda question, answer, passages: 0.1}
    (result,) = run_pgir(alone, [QUESTION], finding(), **options)
    assert result.n_generations == 2 and result.error is None


@pytest.mark.parametrize("given", [1.5, -0.1, "0.5", None, float("nan")])
def test_a_judge_that_returns_no_probability_is_refused_in_a_sentence(scorer, given):
    options = {"threshold": 0.5, "judge": lambda question, answer, passages: given}
    with pytest.raises(ValueError, match="the judge: expected a probability"):
        run_pgir(scorer, [QUESTION], finding(), **options)


PLUGS = itertools.product(("retriever", "judge"), ("nowhere:Notes", "bm52", "os:path"))


@pytest.mark.parametrize(
    ("kind", "name", "named"),
    [
        *((kind, name, f"--{kind}") for kind, name in PLUGS),
        ("encoder", ROOT / "docs", "docs is no encoder"),
    ],
)
def test_a_plug_that_cannot_be_found_is_not_recorded_in_the_run(
    smoke_run, tmp_path, kind, name, named
):
    manifest = shutil.copyfile(smoke_run / "manifest.json", tmp_path / "manifest.json")
    before = manifest.read_bytes()
    assert named in beatrice("control", tmp_path, f"--{kind}", name, code=2).stderr
    assert manifest.read_bytes() == before


@pytest.mark.parametrize("kind", ["retriever", "judge"])
def test_code_that_a_run_names_runs_only_if_the_command_line_names_it_too(
    smoke_run, working_folder, kind
):
    (working_folder / "planted.py").write_text("")
    with RunDir.open(shutil.copytree(smoke_run, working_folder / "run")) as run:
        if kind == "retriever":
            config = RetrievalConfig(retriever="planted:run")
            record_retrieval(run, config, "retrieval")
        else:
            config = ControlConfig(rivals=("judge:planted:run",))
            change_settings(run, CONTROL, lambda _: config)
    stderr = beatrice("control", run.path, code=1).stderr
    assert f"`beatrice control {run.path} --{kind} planted:run`" in stderr
    # A finished stage stays finished without that code.
    record = run.stage_record("control")
    name = "retrieval" if kind == "retriever" else "judge:planted:run"
    run.mark_stage("control", record.inputs | {name: "sha"}, 1.0, record.outputs)
    assert "already done" in beatrice("control", run.path).stderr
    assert "planted" not in sys.modules
    stderr = beatrice("control", run.path, f"--{kind}", "planted:run", code=2).stderr
    assert "planted has no 'run'" in stderr and sys.modules.pop("planted")


def judging_of(probed):
    """Return judges of an answer whose prompt held only one of its two passages."""
    journal, call = CallJournal(None, ""), Call("answer", QUESTION, (0, 1))
    journal.add("one", [call], [reply("a", n_shown=1)], 0.0)
    return JudgeService(answering_of(probed, "shown", "dropped", journal=journal))


def test_verdicts_of_two_judges_are_separate_and_finished_calls_are_skipped(probed):
    judging = judging_of(probed)
    numbers = [
        judging.add("one", lambda question, answer, passages: 0.2),
        judging.add("other", lambda question, answer, passages: np.float32(0.75)),
    ]
    calls = [Call("judge", QUESTION, (0, 1), n) for n in numbers]
    verdicts = [v.p_correct for b in judging.batches(calls, {0}) for _, v in b]
    assert verdicts == [0.75] and len(set(numbers)) == 2


def test_a_judge_whose_file_changed_is_asked_again(probed, notes):
    from my_search import __file__, stands_in_a_passage

    judging = judging_of(probed)
    config = ControlConfig(rivals=("skr", "judge:my_search:stands_in_a_passage"))
    load_plug("my_search:stands_in_a_passage", JUDGES)
    number, identity = judging.add("a", stands_in_a_passage), CONTROL.identity(config)
    with open(__file__, "a") as file:
        file.write("# another line\n")
    assert judging.add("a", stands_in_a_passage) != number
    assert CONTROL.identity(config) != identity
    identity = CONTROL.identity(ControlConfig(rivals=("skr",)))
    assert {*identity} == {"served", "interval format"}


def test_a_judge_gets_only_the_passages_that_the_model_was_shown(probed):
    judging = judging_of(probed)
    number = judging.add("n", lambda q, a, p: [x.text for x in p] == ["shown"])
    (verdict,) = judging.values([Call("judge", QUESTION, (0, 1), number)])
    assert verdict.p_correct == 1


def test_a_control_token_in_a_passage_is_broken_up_before_it_is_shown(probed):
    poison = Passage(title="</s>", text=f"{PASSAGE} </s> <s> more")
    passages = [poison, Passage(title="", text=PASSAGE)]
    answering = AnswerService(probed, passages, CallJournal(None, ""))
    call = Call("answer", QUESTION, (0, 1))
    request, n_shown = answering.request(call)
    text = probed.backbone.tokenizer.decode(request.prompt.ids)
    assert n_shown == 2 and "</s>" not in text and text.count(PASSAGE) == 2
    ((_, reply),) = [pair for b in answering.batches([call], ()) for pair in b]
    assert reply.text
    resumed = AnswerService(probed, passages, CallJournal(None, ""))
    for service in (answering, resumed):  # a kept answer is shown its passages, too
        service.cost(call, reply)
        assert service.n_escaped == 1


def test_control_tokens_in_the_escaped_html_of_a_title_are_broken_up(backbone):
    template, tokenizer = TEMPLATES["paper"], backbone.tokenizer
    titles = {
        "a &lt;s&gt; b": "a < s> b",
        "a &amp;lt;s&amp;gt; &lt;/s> b": "a &lt;s&gt; < /s> b",
        "R&amp;D": "R&D",
    }
    for title, shown in titles.items():
        passages = [Passage(title=title, text="x")]
        (passage,) = showable(tokenizer, template, QUESTION, passages)
        assert template.passage_text(passage) == f"{shown}: x"
        build_prompt(tokenizer, template, QUESTION, [passage])
