"""Many questions answered together, and settings chosen on them under one cap."""

import dataclasses
import math
import os
import signal
import sys
import time

import pytest

from beatrice.extract.backbone.loading import load_backbone
from beatrice.extract.backbone.names import WEIGHTS
from beatrice.extract.generate.prompts import GenerationConfig
from beatrice.extract.records import Passage
from beatrice.extract.run.rows import write_rows
from beatrice.jaxprobe.metrics import BootstrapConfig
from beatrice.pgir.bm25 import Bm25Retriever
from beatrice.pgir.bridge import ProbedBackbone
from beatrice.pgir.controllers import loop
from beatrice.pgir.controllers.session import (
    Session,
    all_rivals,
    question_sets,
    training_questions,
)
from beatrice.pgir.controllers.stage import _run_rivals, control_rows
from beatrice.pgir.controllers.waves import (
    AnswerService,
    CallJournal,
    Failed,
    Waves,
    open_services,
    written_tokens,
)
from beatrice.pgir.stages import ControlConfig
from tests.pgir.small import (
    PASSAGE,
    QUESTION,
    Ranked,
    answering_of,
    make_detector,
    played,
    reply,
    retrained,
)
from tests.process import run_python, start
from tests.records import an_answer, an_example

QUESTIONS = [f"question {i}?" for i in range(7)]
CONFIG = loop.ControllerConfig(max_budget=2)
PRICES = {
    "search": loop.Cost(retrievals=1),
    "answer": loop.Cost(generations=1, sequences=1, tokens=12),
    "score": loop.Cost(forwards=1),
}


def give(call):
    """Return the value of a call; answers are right once shown passage 4."""
    if call.kind == "search":
        return (1, 2, 3, 4, 5, 6)
    if call.kind == "score":
        return loop.DraftScore(0.1 * len(call.passages), 0.5)
    return reply("right" if 4 in call.passages else "guess")


class Served:
    """A service that serves `n_batch` calls at a time and records the calls."""

    def __init__(self, kind, give=give, n_batch=2, dies_after=None):
        self.kind, self.give, self.n_batch = kind, give, n_batch
        self.served, self.dies_after = [], dies_after

    def batches(self, calls, done):
        for first in range(0, len(calls), self.n_batch):
            places = range(first, min(first + self.n_batch, len(calls)))
            if all(i in done for i in places):
                continue
            if self.dies_after == len(self.served):
                raise KeyboardInterrupt
            self.served.append(tuple(calls[i] for i in places))
            yield [(i, self.give(calls[i])) for i in places]

    def cost(self, call, value):
        return PRICES[self.kind]


def waves(path, key="corpus", **options):
    deaths = options.pop("deaths", {})
    services = {kind: Served(kind, dies_after=deaths.get(kind)) for kind in PRICES}
    return Waves(services, CallJournal(path, key), **options)


def run(runner, name="trace"):
    return runner.run(name, [loop.drafts(question, CONFIG) for question in QUESTIONS])


def counted(results):
    return [(done.value, done.cost._replace(seconds=0)) for done in results]


@pytest.mark.parametrize("group_size", [1, 3, 256])
def test_waves_give_each_question_what_it_gets_on_its_own(tmp_path, group_size):
    results = run(waves(tmp_path / "calls.jsonl", group_size=group_size))
    alone = [played(loop.drafts(question, CONFIG), give) for question in QUESTIONS]
    assert [done.value for done in results] == [value for value, _ in alone]
    for done, (_, calls) in zip(results, alone, strict=True):
        total = loop.Cost()
        for call in calls:
            total = total.plus(PRICES[call.kind])
        assert done.cost._replace(seconds=0) == total
        assert done.cost.seconds > 0


def test_first_drafts_share_batches_and_repeated_calls_are_only_counted(tmp_path):
    runner = waves(tmp_path / "calls.jsonl")
    before = run(runner)
    first = [call for batch in runner.services["answer"].served[:4] for call in batch]
    assert [call.text for call in first] == QUESTIONS
    assert {call.passages for call in first} == {()}
    n_batches = {kind: len(service.served) for kind, service in runner.services.items()}
    after = run(runner, "again")
    assert {kind: len(s.served) for kind, s in runner.services.items()} == n_batches
    assert after == before


@pytest.mark.parametrize(
    ("kind", "batch"), [("answer", 2), ("answer", 6), ("score", 5)]
)
def test_an_interrupted_wave_goes_on_with_the_same_batches(tmp_path, kind, batch):
    whole = waves(tmp_path / "whole.jsonl")
    expected = run(whole)
    path = tmp_path / "calls.jsonl"
    broken = waves(path, deaths={kind: batch})
    with pytest.raises(KeyboardInterrupt):
        run(broken)
    resumed = waves(path)
    assert counted(run(resumed)) == counted(expected)
    for name, service in resumed.services.items():
        before = broken.services[name].served
        assert before + service.served == whole.services[name].served


def test_calls_on_cut_or_changed_lines_or_of_another_corpus_are_made_again(tmp_path):
    path = tmp_path / "calls.jsonl"
    expected = counted(run(first := waves(path)))
    lines = path.read_bytes().splitlines(keepends=True)
    damaged = {
        "cut": b"".join(lines[:9]) + lines[9][:-7],
        "changed": b"".join(lines).replace(b'"guess"', b'"gauss"', 1),
        "no line": b"".join(lines[:9]) + b"{}\n" + b"".join(lines[9:]),
    }
    for content in damaged.values():
        path.write_bytes(content)
        runner = waves(path)
        assert counted(run(runner)) == expected
        assert any(service.served for service in runner.services.values())
        again = waves(path)
        assert counted(run(again)) == expected
        assert not any(service.served for service in again.services.values())
    run(other := waves(path, key="another corpus"))
    served = [[s.served for s in x.services.values()] for x in (first, other)]
    assert served[0] == served[1]


@pytest.mark.parametrize(
    ("call", "value"),
    [
        (loop.Call("search", "q", n=3), (2, 0)),
        (loop.Call("answer", "q", (2, 0)), reply("a")),
    ],
)
def test_a_call_whose_passages_have_changed_is_made_again(tmp_path, call, value):
    def journal(texts):
        passages = [Passage(title="", text=text) for text in texts]
        return CallJournal(tmp_path / "calls.jsonl", "one", passages)

    # Passages may have been added; a deleted table is empty or in another order.
    for texts, is_kept in (("abcd", True), ("", False), ("cba", False)):
        journal("abc").add("w", [call], [value], 0.0)
        assert (journal(texts).find(call) is not None) == is_kept


def test_outdated_calls_are_set_aside_and_calls_without_passages_kept(tmp_path):
    path, drafted = tmp_path / "calls.jsonl", loop.Call("answer", "q")
    searched = loop.Call("search", "q", n=1)
    CallJournal(path, "one").add("w", [drafted], [reply("a")], 0.0)
    kept = path.read_bytes()
    passages = [Passage(title="", text="b")]
    CallJournal(path, "one", passages).add("w", [searched], [(0,)], 0.0)
    of_search = path.read_bytes().removeprefix(kept)
    path.write_bytes(path.read_bytes() + b"{half")
    again = CallJournal(path, "one", [Passage(title="", text="c")])
    assert again.find(drafted) is not None and again.find(searched) is None
    assert path.read_bytes() == kept
    assert (tmp_path / "calls.jsonl.stale").read_bytes() == of_search


def test_a_number_that_is_not_finite_is_read_back_as_written(tmp_path):
    path = tmp_path / "calls.jsonl"
    values = {
        loop.Call("score", "q"): loop.DraftScore(math.nan, math.inf),
        loop.Call("spread", "q", n=3): (-math.inf, 4),
        loop.Call("answer", "q"): reply("a", -math.inf),
    }
    CallJournal(path, "one").add("w", list(values), list(values.values()), 0.0)
    journal = CallJournal(path, "one")
    assert repr({call: journal.value(call) for call in values}) == repr(values)


def test_a_failed_search_fails_only_its_question_and_is_tried_again(tmp_path):
    class Down(Served):
        def batches(self, calls, done):
            for batch in super().batches(calls, done):
                yield [
                    (i, Failed("no route") if "3" in calls[i].text else value)
                    for i, value in batch
                ]

    path = tmp_path / "calls.jsonl"
    runner = waves(path)
    runner.services["search"] = Down("search")
    results = run(runner)
    failed = {i: done for i, done in enumerate(results) if isinstance(done, Failed)}
    assert {i: done.reason for i, done in failed.items()} == {3: "no route"}
    assert failed[3].cost.generations == 1  # the draft written before
    assert set(runner.failed.values()) == {"no route"}
    mended = waves(path)
    assert not any(isinstance(done, Failed) for done in run(mended))
    answered = [c for batch in mended.services["answer"].served for c in batch]
    # The other question shares its batch, so that rounding is the same.
    assert {call.text for call in answered} == set(QUESTIONS[2:4])


def answer_all(folder):
    """Run the loop and a rival on 64 questions, in a process that may be killed."""
    splits = "validation", "test"
    texts = [f"{split} {i} is what {PASSAGE}" for split in splits for i in range(32)]
    passages, sets = [Passage(title="t", text=text) for text in texts], sets_of(32)
    backbone = load_backbone(WEIGHTS)
    config = GenerationConfig(max_new_tokens=6, tokens_per_batch=200)
    probed = ProbedBackbone(backbone, make_detector(backbone), config)
    journal = CallJournal(folder / "calls.jsonl", "one")
    answering = AnswerService(probed, passages, journal)
    services = open_services(answering, Bm25Retriever(passages))
    given = a_session(services, sets, answering=answering)
    traced = given.trace("trace", CONFIG)
    given.answer("vanilla_rag", lambda e: loop.vanilla_rag(e.question, CONFIG))
    given.run_pgir("pgir", traced)
    rows = control_rows(sets, given.answers, BootstrapConfig(n_resamples=50))
    (folder / "rows.jsonl").write_text(write_rows(rows))
    (folder / "traces.txt").write_text(repr(traced))


CHILD = f"""
import sys; from pathlib import Path; from {__name__} import answer_all
answer_all(Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_a_kill_in_the_middle_of_a_wave_changes_no_row(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    run_python(CHILD, whole)
    journal = killed / "calls.jsonl"
    n_lines = len((whole / "calls.jsonl").read_bytes().splitlines())
    for share in (0.1, 0.5, 0.8):  # in the drafts, in later rounds
        process = start(sys.executable, "-c", CHILD, killed)
        while process.poll() is None:
            time.sleep(0.002)
            n = journal.read_bytes().count(b"\n") if journal.exists() else 0
            if n > share * n_lines:
                os.killpg(process.pid, signal.SIGKILL)
                break
        process.communicate()
        assert process.returncode == -signal.SIGKILL, "it ended before it was killed"
        assert not (killed / "rows.jsonl").exists()
    run_python(CHILD, killed)
    for name in ("rows.jsonl", "traces.txt"):
        assert (killed / name).read_bytes() == (whole / name).read_bytes()


@pytest.mark.parametrize(
    ("token_ids", "stop_id", "places"),
    [
        ((3, 4, 5), 0, (2, 5)),
        ((3, 4, 5), None, (2, 4)),  # cut off: the last was never fed
        ((), 0, (1, 2)),  # only a stop token, emitted by the prompt's last position
        ((3,), None, (1, 2)),
    ],
)
def test_an_answer_spans_the_places_its_tokens_were_fed_at(token_ids, stop_id, places):
    answer = an_answer(token_ids=token_ids, stop_id=stop_id)  # after a prompt of two
    assert written_tokens(answer) == places


PASSAGES = (Passage(title="t", text="x"),)


def serve(call):
    """Serve calls: passage 7 has every answer; a question finds it, a draft does not.

    The score is .9 for an answer from passage 7, .3 for any other.
    """
    if call.kind == "search":
        return (7, 8, 9) if call.text.endswith("?") else (1, 2, 3)
    is_right = 7 in call.passages
    if call.kind == "score":
        return loop.DraftScore(0.9 if is_right else 0.3, 0.5)
    return reply("yes" if is_right else "no")


def example(i, split="validation", dataset="world", **fields):
    usual = dict(id=f"{dataset}-{split}-{i}", dataset=dataset, split=split)
    usual |= dict(question=f"{split} {i}?", golds=("yes",), passages=PASSAGES)
    return an_example(**usual | fields)


class Roomy:
    """Answering with room for every passage in a prompt."""

    def __init__(self, path):
        self.journal = CallJournal(path, "one")

    def fitting(self, question, ranking):
        return tuple(ranking)


def a_session(services, sets, *, answering, **fields):
    """Return a session that has nothing for rivals to learn from."""
    usual = dict(training=(), config=CONFIG, encoder=lambda: None, stores=lambda: {})
    waves = Waves(services, answering.journal)
    return Session(waves=waves, sets=sets, answering=answering, **usual | fields)


def sets_of(n, test_golds=("yes",)):
    golds = {"validation": ("yes",), "test": test_golds}
    return [
        loop.QuestionSet(
            dataset="world",
            split=split,
            examples=tuple(example(i, split, golds=golds[split]) for i in range(n)),
        )
        for split in golds
    ]


def session(tmp_path, test_golds=("yes",), **config):
    services = {kind: Served(kind, serve, n_batch=99) for kind in PRICES}
    return a_session(
        services,
        sets_of(4, test_golds),
        training=tuple(example(i, "train") for i in range(3)),
        config=loop.ControllerConfig(max_budget=2, **config),
        answering=Roomy(tmp_path / "calls.jsonl"),
    )


def tune_everything(session):
    """Tune everything on the session's questions; return the chosen settings."""
    traced = session.trace("trace", session.config)
    session.run_pgir("pgir", traced)
    session.run_pgir_query("pgir", loop.detector_judge, show_all=True)
    shared = session.config
    plans = {"none": loop.no_rag, "once": lambda q: loop.vanilla_rag(q, shared)}
    session.tune("rival", ("none", "once"), lambda s, e: plans[s](e.question))
    return session.chosen


def test_the_planted_setting_and_the_planted_query_are_found(tmp_path):
    given = session(tmp_path)
    chosen = tune_everything(given)
    assert chosen["rival"] == "once"
    assert chosen["pgir_query"]["query"] == "question"
    assert chosen["pgir_query"]["threshold"] == 0.35  # the lowest above 0.3
    answers = given.answers[1]
    assert {done.value for done in answers["pgir"]} == {"no"}  # misled by its draft
    assert {done.value for done in answers["pgir_query"]} == {"yes"}
    assert {done.value for done in answers["pgir:question_first"]} == {"yes"}


def test_a_cap_excludes_dearer_settings_and_test_golds_change_no_choice(tmp_path):
    free = tune_everything(session(tmp_path))
    assert tune_everything(session(tmp_path / "other", test_golds=("no",))) == free
    capped = tune_everything(session(tmp_path / "capped", max_generations=1.0))
    assert free["pgir_query"]["query"] == "question"
    assert capped["pgir_query"]["threshold"] == 0.05  # every first draft is returned


def test_only_pgir_must_keep_the_cap_and_a_judge_gets_its_cheapest_policy(tmp_path):
    given = session(tmp_path, max_generations=0.5)
    with pytest.raises(ValueError, match="PGIR spends at least 1 .* --max-generations"):
        given.run_pgir("pgir", given.trace("trace", given.config))
    given.run_loop("judge:own", loop.detector_judge)
    assert given.chosen == {"judge:own": {"threshold": 0.05, "budget": 1}}


def test_training_outcomes_come_from_training_questions(tmp_path):
    given = session(tmp_path)
    without, once = given.outcomes
    assert [done.value for done in without] == ["no"] * 3
    assert [done.value for done in once] == ["yes"] * 3


def answers_of_ranking(probed, texts, ranking):
    """Return a controller's answers and costs, and the passages too long for it."""
    answering = answering_of(probed, *texts)
    services = open_services(answering, Ranked(*ranking))
    examples = (example(0), example(1))
    sets = [loop.QuestionSet(dataset="world", split="test", examples=examples)]
    given = a_session(services, sets, answering=answering)
    (traced,) = given.trace("trace", loop.ControllerConfig(n_passages=1, max_budget=2))
    given.answer("vanilla_rag", lambda e: loop.vanilla_rag(e.question, CONFIG))
    return (traced.traces, counted(given.answers[0]["vanilla_rag"])), answering.overlong


def test_a_passage_that_fits_no_window_is_left_out_and_changes_no_answer(probed):
    texts = (PASSAGE, PASSAGE * 90, "Wegrur Trapolt is a man.")
    others, none = answers_of_ranking(probed, texts, (0, 2))
    for ranking in ((1, 0, 2), (0, 1, 2)):
        values, overlong = answers_of_ranking(probed, texts, ranking)
        assert values == others
        assert (overlong, none) == ({1}, set())


def test_probes_learn_from_answers_to_passages_that_fit(probed):
    answering = answering_of(probed, PASSAGE * 90, PASSAGE)
    services, training = open_services(answering, Ranked(0, 1)), [example(0, "train")]
    given = a_session(services, [], answering=answering, training=training)
    all_rivals()["probing_rag"](given)
    assert "0 of 2 training answers are right" in given.left_out["probing_rag"]


def test_a_prompt_is_cut_to_the_shorter_window_by_whole_passages(probed):
    prompt = dataclasses.replace(probed.trained.prompt, window=64)
    detector = retrained(probed.detector, prompt=prompt)
    narrow = ProbedBackbone(probed.backbone, detector, probed.config)
    call = loop.Call("answer", QUESTION, tuple(range(90)))
    lengths = []
    for each in (narrow, probed):
        request, n_shown = answering_of(each, *[PASSAGE] * 90).request(call)
        lengths.append(len(request.prompt.ids))
        assert 1 < n_shown < 90
    answering = answering_of(narrow, PASSAGE * 10)
    ((_, failed),) = next(answering.batches([loop.Call("answer", QUESTION, (0,))], ()))
    assert "the probe's prompt has a window of 64" in failed.reason
    assert lengths[0] + 8 <= 64 < lengths[1] <= probed.backbone.max_length - 8


def test_a_search_that_fails_for_all_questions_ends_the_stage(tmp_path):
    given = session(tmp_path)
    given.waves.services["search"] = Served("search", lambda _: Failed("timed out"))
    shared = given.config
    with pytest.raises(ConnectionError, match="8 of 8 questions.*timed out.*again"):
        given.answer("vanilla_rag", lambda e: loop.vanilla_rag(e.question, shared))


def test_deferred_work_runs_even_without_rivals(tmp_path):
    given = session(tmp_path)
    given.deferred.append(lambda: given.run_loop("late", loop.detector_judge))
    _run_rivals(given, ControlConfig(rivals=()))
    assert set(given.chosen) == {"late"}


def test_sets_without_passages_are_left_out_and_the_limit_holds_per_set():
    examples = [example(i) for i in range(5)]
    examples += [example(i, "ood", dataset="bare", passages=()) for i in range(5)]
    examples += [example(i, "test", dataset="held") for i in range(5)]
    result = question_sets(examples, 2)
    assert [(item.dataset, len(item.examples)) for item in result] == [
        ("world", 2),
        ("held", 2),
    ]


def test_training_questions_are_taken_equally_from_every_set():
    examples = [example(i, "train", dataset=d) for d in ("a", "b") for i in range(9)]
    examples += [example(i, "train", dataset="c", passages=()) for i in range(9)]
    result = training_questions(examples, 6)
    assert [e.dataset for e in result] == ["a"] * 3 + ["b"] * 3
    assert len(training_questions(examples[:9], 6)) == 6  # all from the only set
