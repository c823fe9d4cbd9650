"""Arguments of users are accepted, or refused in one sentence that names them."""

import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest

from beatrice.extract.records import Passage
from beatrice.pgir.arguments import as_messages, as_passages, as_path, as_rows
from beatrice.pgir.gate import Draft, FlashRagJudger, Gate
from beatrice.pgir.given import ARGUMENTS
from beatrice.pgir.scorer import Scorer
from tests.pgir.small import PASSAGE, QUESTION

ANSWER = "Guzolt Falls"
ROW = {"question": QUESTION, "answer": ANSWER}
FRAME = pd.DataFrame([ROW])
DRAFT = Draft(question=QUESTION, answer=ANSWER, p_correct=0.1, decision="distrust")


@dataclasses.dataclass
class Document:
    """The fields of a LangChain document that are read."""

    page_content: str
    metadata: dict = dataclasses.field(default_factory=dict)


def test_a_folder_may_begin_with_a_tilde_that_names_no_user():
    assert as_path("~none-of-that-name/probe", "path") == Path(
        "~none-of-that-name/probe"
    )
    assert as_path("~/probe", "path") == Path.home() / "probe"


@pytest.fixture(scope="module")
def gate(scorer):
    return Gate(scorer, 0.5)


# A call with the scorer, its gate and a wrong value, the beginning of its error
# message, and the values, each of which is refused.
WRONG = [
    (lambda s, g, x: s.score(x, ANSWER), "question: ", [None, 7, b"a", ["a"]]),
    (lambda s, g, x: s.score(QUESTION, x), "answer: ", [None, 7, b"a", ["a"]]),
    (
        lambda s, g, x: s.score(QUESTION, ANSWER, x),
        "context",
        [5, b"a", [None], [PASSAGE, 3], {"passage": PASSAGE}, [["a"]], object()],
    ),
    (lambda s, g, x: s.score(None, ANSWER, prompt=x), "prompt: ", [3, ["a"]]),
    (
        lambda s, g, x: s.score(None, ANSWER, messages=x),
        "messages",
        ["hello", [], [{"role": "user"}], [{"role": 1, "content": "a"}], {}],
    ),
    (
        lambda s, g, x: s.score(None, ANSWER, prompt_ids=x),
        "prompt_ids: ",
        ["1 2", 7],
    ),
    (
        lambda s, g, x: s.score(None, ANSWER, prompt_ids=[1, x]),
        "prompt_ids[1]: ",
        [1.5, True, "2"],
    ),
    (
        lambda s, g, x: s.score(QUESTION, ANSWER, prompt=QUESTION, context_range=x),
        "context_range: ",
        ["0-4", (4, 4), (1, 2, 3), (-1, 4), 3],
    ),
    (lambda s, g, x: s.score_many(x), "rows: ", [None, "a text", 3, ROW, b"a"]),
    (
        lambda s, g, x: s.score_many([ROW], batch_size=x),
        "batch_size: ",
        [0, -1, None, "4", 2.0, True],
    ),
    (
        lambda s, g, x: s.answer(x),
        "questions",
        [None, 3, [1], [None], FRAME, {QUESTION: 1}],
    ),
    (
        lambda s, g, x: s.answer([QUESTION], x),
        "contexts",
        [PASSAGE, 3, [], [[]], [PASSAGE] * 2],
    ),
    (lambda s, g, x: s.answer([QUESTION], context=x), "context: ", [PASSAGE]),
    (lambda s, g, x: s.render(x), "messages", [None, "hello", 4]),
    (lambda s, g, x: s.thresholds(x), "setting: ", [None, "open", 4]),
    (lambda s, g, x: Scorer.load(x), "path: ", [None, 3, ["runs/demo"]]),
    (lambda s, g, x: Scorer(x, None), "model: ", [None, 3, "embedded", []]),
    (lambda s, g, x: Gate(x, 0.5), "scorer: ", [None, "runs/demo"]),
    (
        lambda s, g, x: Gate(s, x),
        "threshold: ",
        [0, -0.1, 1.1, float("nan"), "0.5", True],
    ),
    (lambda s, g, x: Gate.load(x), "path: ", [None, 3]),
    (lambda s, g, x: Gate.load(".", threshold=x), "threshold: ", ["0.5", 2]),
    (lambda s, g, x: g.should_retrieve(x), "question: ", [None, 3, [QUESTION]]),
    (lambda s, g, x: g.draft(x), "questions", [None, QUESTION, [3]]),
    (lambda s, g, x: g.keep(x, ANSWER), "draft: ", [None, QUESTION]),
    (lambda s, g, x: g.keep(DRAFT, x), "grounded: ", [None, 7, b"a", ["a"]]),
    (lambda s, g, x: FlashRagJudger(x, g), "config: ", [None, "a", []]),
    (lambda s, g, x: FlashRagJudger(x), "judger_config: ", [{}, {"judger_config": 3}]),
    (lambda s, g, x: FlashRagJudger({}, g).judge(x), "dataset", [None, 3, [3], {}]),
]


@pytest.mark.parametrize(("call", "begin", "values"), WRONG)
def test_every_wrong_argument_is_refused_in_a_sentence_that_names_it(
    scorer, gate, call, begin, values
):
    for value in values:
        with pytest.raises(ValueError) as refused:
            call(scorer, gate, value)
        text = str(refused.value)
        assert text.startswith(begin) and "expected" in text, (value, text)


@pytest.mark.parametrize(
    "row",
    [None, "a text", 5, [], (QUESTION,), (QUESTION, ANSWER, None, 1), {"answers": "a"},
     (QUESTION, 3), {"question": QUESTION}],
)  # fmt: skip
def test_a_wrong_row_has_an_error_in_its_place(scorer, row):
    before, score, after = scorer.score_many([ROW, row, ROW])
    assert score.decision == "unknown" and str(score) == f"error: {score.error}"
    assert score.error == score.reason and score.p_correct is None
    assert before == after and before.error is None


@pytest.mark.parametrize(
    "context",
    [
        PASSAGE,
        {"text": PASSAGE},
        {"title": "", "text": PASSAGE},
        {"contents": PASSAGE},
        Document(PASSAGE),
        Passage(title="", text=PASSAGE),
        (PASSAGE,),
        [{"text": PASSAGE, "title": None}],
        [Document(PASSAGE, {"source": "a file"})],
        np.array([PASSAGE]),
        pd.Series([PASSAGE]),
        pd.DataFrame({"text": [PASSAGE], "title": [None]}),
        iter([PASSAGE]),
    ],
)
def test_a_context_is_read_in_every_supported_form(context):
    assert as_passages(context, "context") == (Passage(title="", text=PASSAGE),)


@pytest.mark.parametrize(
    ("title", "text"), [(float("nan"), ""), (pd.NA, ""), (None, ""), (1984, "1984")]
)
def test_a_missing_or_numeric_title_is_read_as_text(title, text):
    documents = [Document("a", {"title": title}), {"text": "a", "title": title}]
    documents.append({"page_content": "a", "title": title, "metadata": {"title": text}})
    assert as_passages(documents, "context") == (Passage(title=text, text="a"),) * 3


def test_messages_are_read_from_the_frame_of_a_parquet_file(tmp_path):
    rows = [{"messages": [{"role": "user", "content": QUESTION}], "answer": ANSWER}]
    pd.DataFrame(rows).to_parquet(tmp_path / "chats.parquet")
    (row,) = as_rows(pd.read_parquet(tmp_path / "chats.parquet"), ARGUMENTS)
    assert as_messages(row["messages"], "messages") == tuple(rows[0]["messages"])


def test_titles_are_read_from_every_place_that_can_hold_them():
    held = [{"title": "T", "text": "a"}, Document("a", {"title": "T"})]
    held += [{"contents": '"T"\na'}, {"contents": "T\na"}]
    held.append({"page_content": "a", "metadata": {"title": "T"}})
    held.append({"page_content": "a", "title": "T"})
    passages = as_passages(held, "context")
    assert passages == (Passage(title="T", text="a"),) * 6


@pytest.mark.parametrize(
    "row", [(QUESTION, ANSWER), [QUESTION, ANSWER, None], ROW, {"id": 7, **ROW}]
)
def test_rows_may_be_mappings_or_tuples(scorer, row):
    (score,) = scorer.score_many((row,))
    assert score.raw == scorer.score(QUESTION, ANSWER).raw


def test_a_frame_is_read_row_by_row_and_an_empty_cell_is_left_out(scorer):
    assert as_rows(pd.Series([ROW]), ARGUMENTS) == [ROW]
    frame = pd.DataFrame([ROW, {**ROW, "context": PASSAGE}])
    assert as_rows(frame, ARGUMENTS) == [ROW, {**ROW, "context": PASSAGE}]
    plain, grounded = scorer.score_many(frame)
    assert plain.raw == pytest.approx(scorer.score(**ROW).raw, abs=1e-5)
    assert grounded.raw != plain.raw
    # As in a file of answers, a cell may hold passages as JSON, and a blank holds none.
    cells = [json.dumps([PASSAGE]), json.dumps({"text": PASSAGE}), " ", '["cut off']
    *read, cut = scorer.score_many(
        FRAME.merge(pd.Series(cells, name="context"), "cross")
    )
    wanted = [grounded.raw, grounded.raw, plain.raw]
    assert [score.raw for score in read] == pytest.approx(wanted, abs=1e-5)
    assert "'context': expected a list as JSON" in cut.error
    (missing,) = scorer.score_many(FRAME.assign(context="nan"))
    assert "'context': expected passages, found 'nan'" in missing.error
    # Tables of other libraries are read with their own conversion methods.
    polars = SimpleNamespace(columns=[], to_dicts=lambda: [{**ROW, "context": None}])
    arrow = SimpleNamespace(columns=[], to_pylist=lambda: [ROW])
    methods = {"to_dict": dict, "to_list": lambda: [ROW]}  # `to_dict` gives columns
    datasets = SimpleNamespace(column_names=[], **methods)
    for table in (polars, arrow, datasets):
        assert as_rows(table, ARGUMENTS) == [ROW]


def test_an_unread_column_is_named_once_for_a_frame_or_its_rows(scorer):
    frame = pd.DataFrame([{"id": 7, **ROW}, {**ROW, "context": PASSAGE, "gold": "Ann"}])
    kinds = [frame, frame.itertuples(), [*frame.itertuples(index=False)]]
    kinds.append([row for _, row in frame.iterrows()])
    with pytest.warns(UserWarning, match=r"^rows: columns not read: 'gold'$") as noted:
        scores = [scorer.score_many(rows) for rows in kinds]
    assert scores == [scores[0]] * 4 and len(noted) == 4
    assert [score.error for score in scores[0]] == [None, None]


def test_answer_takes_context_or_contexts_and_says_which_question_is_empty(scorer):
    with pytest.raises(ValueError, match="^question 2 of 2 is empty"):
        scorer.answer([QUESTION, " "])
    expected = scorer.answer(QUESTION, contexts=PASSAGE)
    assert scorer.answer(QUESTION, context=PASSAGE) == expected
    column = pd.Series([json.dumps([PASSAGE])])
    assert scorer.answer([QUESTION], contexts=column) == [expected]


def test_a_model_in_memory_is_accepted_only_with_the_probes_weights(backbone, probed):
    holder = SimpleNamespace(backbone=backbone)
    assert Scorer(holder, probed.detector).score(**ROW).p_correct is not None
    other = dataclasses.replace(backbone, revision="0" * 64)
    with pytest.raises(ValueError, match="another model: the probe was"):
        Scorer(other, probed.detector)
