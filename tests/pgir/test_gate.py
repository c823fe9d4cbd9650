"""The gate, and the pipelines of others that it stands in."""

import importlib.util
import json

import pytest

from beatrice.pgir.gate import (
    Draft,
    FlashRagJudger,
    Gate,
    Kept,
    langgraph_app,
    llama_index_engine,
)
from tests.pgir.small import PASSAGE, QUESTION

OTHER = "what is the genre of Skiband Rugrond?"
ANSWER = "Guzolt Falls"


def needs(package):
    top = package.split(".")[0]
    is_installed = importlib.util.find_spec(top) is not None
    return pytest.mark.skipif(
        not is_installed, reason=f"{package} is not installed here"
    )


@pytest.fixture(scope="module")
def p_correct(scorer):
    """Of the backbone's own closed-book answer."""
    return Gate(scorer, 0.5).draft([QUESTION])[0].p_correct


def strict(scorer):
    return Gate(scorer, 1.0)  # the map keeps away from certainty: nothing stands


def lenient(scorer):
    return Gate(scorer, 1e-6)  # everything stands


def test_a_draft_stands_from_the_threshold_on(scorer, p_correct):
    at, above = Gate(scorer, p_correct), Gate(scorer, p_correct + 1e-4)
    assert not at.should_retrieve(QUESTION)
    assert above.should_retrieve(QUESTION)


def test_the_draft_is_the_backbones_answer_and_its_score(scorer):
    drafts = strict(scorer).draft([QUESTION, OTHER])
    assert [draft.question for draft in drafts] == [QUESTION, OTHER]
    texts = [score.text for score in scorer.answer([QUESTION, OTHER])]
    assert [draft.answer for draft in drafts] == texts
    expected = [scorer.score(d.question, d.answer).p_correct for d in drafts]
    assert [d.p_correct for d in drafts] == pytest.approx(expected, abs=1e-5)
    assert strict(scorer).draft([]) == []


def draft(p, decision="distrust"):
    return Draft(question=QUESTION, answer="own", p_correct=p, decision=decision)


def test_of_two_answers_that_do_not_stand_the_better_is_kept(scorer):
    theirs = scorer.score(QUESTION, ANSWER, [PASSAGE]).p_correct
    gate = strict(scorer)
    best = gate.keep(draft(theirs - 0.01), ANSWER, [PASSAGE])
    assert best == Kept(
        answer=ANSWER, p_correct=theirs, is_grounded=True, decision="distrust"
    )
    assert gate.keep(draft(theirs + 0.01), ANSWER, [PASSAGE]).answer == "own"
    assert gate.keep(draft(theirs), ANSWER, [PASSAGE]).answer == "own"  # a tie
    assert gate.keep(draft(None), ANSWER, [PASSAGE]).answer == ANSWER


def test_the_first_answer_that_stands_is_kept_though_the_other_is_better(scorer):
    theirs = scorer.score(QUESTION, ANSWER, [PASSAGE]).p_correct
    gate = Gate(scorer, theirs / 2)
    best = gate.keep(draft(theirs * 0.75, "trust"), ANSWER, [PASSAGE])
    assert (best.answer, best.is_trusted) == ("own", True)
    best = gate.keep(draft(theirs * 0.25), ANSWER, [PASSAGE])
    assert (best.answer, best.is_grounded, best.is_trusted) == (ANSWER, True, True)


def test_without_a_policy_or_a_threshold_no_gate_opens(tmp_path):
    with pytest.raises(ValueError, match="run `beatrice control`, or give a thr"):
        Gate.load(tmp_path)
    (tmp_path / "control").mkdir()
    control = {"tau": "high", "cases": []}
    (tmp_path / "control" / "control.json").write_text(json.dumps(control))
    with pytest.raises(ValueError, match="control.json"):
        Gate.load(tmp_path)


class FlashRagDataset:
    """What a judger reads of FlashRAG's dataset."""

    question = [QUESTION, OTHER]


def test_flashrag_gets_a_verdict_for_each_question(scorer):
    config = {"judger_name": "beatrice", "device": "cpu"}
    judger = FlashRagJudger(config, gate=strict(scorer))
    assert judger.judge(FlashRagDataset()) == [True, True]
    assert judger.judge([QUESTION]) == judger.judge(QUESTION) == [True]
    assert FlashRagJudger({}, gate=lenient(scorer)).judge(QUESTION) == [False]


def test_flashrags_judger_opens_the_run_that_its_config_names(tmp_path):
    config = {"judger_config": {"run": tmp_path / "no run", "threshold": 0.5}}
    with pytest.raises(ValueError, match="no run"):
        FlashRagJudger(config)


def never(*_):
    raise AssertionError("nothing was to be retrieved")


@needs("langgraph")
def test_a_graph_retrieves_only_if_the_draft_does_not_stand(scorer):
    app = langgraph_app(lenient(scorer), never, never)
    state = app.invoke({"question": QUESTION})
    assert state["answer"] == scorer.answer(QUESTION).text
    assert "passages" not in state


@needs("langgraph")
def test_a_graph_keeps_the_better_answer(scorer):
    gate = strict(scorer)
    app = langgraph_app(gate, lambda q: [PASSAGE], lambda q, passages: ANSWER)
    state = app.invoke({"question": QUESTION})
    (drafted,) = gate.draft([QUESTION])
    best = gate.keep(drafted, ANSWER, [PASSAGE])
    assert (state["answer"], state["p_correct"]) == (best.answer, best.p_correct)
    assert state["passages"] == [PASSAGE]


@pytest.fixture
def engine():
    """A LlamaIndex engine of one passage and one answer."""
    from llama_index.core.base.response.schema import Response
    from llama_index.core.query_engine import CustomQueryEngine
    from llama_index.core.schema import NodeWithScore, TextNode

    class FixedAnswer(CustomQueryEngine):
        n_queries: int = 0

        def custom_query(self, query_str):
            self.n_queries += 1
            node = NodeWithScore(node=TextNode(text=PASSAGE), score=1.0)
            return Response(response=ANSWER, source_nodes=[node])

    return FixedAnswer()


@needs("llama_index.core")
def test_an_engine_is_asked_only_if_the_draft_does_not_stand(scorer, engine):
    gated = llama_index_engine(lenient(scorer), engine)
    assert str(gated.query(QUESTION)) == scorer.answer(QUESTION).text
    assert engine.n_queries == 0


@needs("llama_index.core")
def test_an_engine_keeps_the_better_answer_with_its_sources(scorer, engine):
    gate = strict(scorer)
    (drafted,) = gate.draft([QUESTION])
    best = gate.keep(drafted, ANSWER, [PASSAGE])
    response = llama_index_engine(gate, engine).query(QUESTION)
    assert engine.n_queries == 1 and str(response) == best.answer
    assert response.metadata["p_correct"] == best.p_correct
    assert bool(response.source_nodes) == best.is_grounded
