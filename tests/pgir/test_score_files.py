"""Files of answers: their formats, bad rows and results, and the page of results."""

import decimal
import fcntl
import json
import os
import re
import threading
import tracemalloc

import pandas as pd
import pytest
import torch
from click.testing import CliRunner

from beatrice.cli import main
from beatrice.extract.backbone.names import BackboneConfig
from beatrice.extract.datasets.readers import read_lm_eval
from beatrice.extract.generate.prompts import AnswerConfig, GenerationConfig
from beatrice.extract.records import Passage
from beatrice.extract.run.directory import NewRun, RunDir
from beatrice.extract.run.files import JsonLines, sha256_json
from beatrice.own_model import read_labelled
from beatrice.pgir import score_files
from beatrice.pgir.asking import Score
from beatrice.pgir.given import AnswerToScore
from beatrice.pgir.score_files import Tally, page, read_rows, score_html, score_rows
from beatrice.pgir.scorer import Scorer
from tests.extract.datasets.published import lm_eval, write_array, write_lines
from tests.extract.small_run import assert_error_sentence, beatrice
from tests.pgir.small import PASSAGE, QUESTION

GENERATION = GenerationConfig(max_new_tokens=32, tokens_per_batch=4096)
ROW = {"id": "a", "question": QUESTION, "answer": "Guzolt Falls"}
PROMPT = f"Context: {PASSAGE} Question: {QUESTION} Answer:"


def score_lines(scorer, path, out=None, identity="d"):
    """Score a file; return the results and their counts."""
    score, rows, written, tally = scorer.score_many, read_rows(path), [], Tally()
    score_rows(score, rows, identity, out, written.extend, tally.add)
    return [json.loads(line) for line in written], tally


def test_results_keep_the_order_of_the_file_and_bad_rows_their_place(scorer, tmp_path):
    rows = [
        {**ROW, "context": PASSAGE, "latency": 3},
        {**ROW, "id": 7, "answer": ""},
        ROW,
        {"id": "c", "question": QUESTION},
        {**ROW, "context": [PASSAGE, 5]},
        {**ROW, "answer": "a </s> b"},
        {"prompt": PROMPT, "answer": " Guzolt Falls", "context": PASSAGE},
    ]
    path = write_lines(tmp_path / "answers.jsonl", rows)
    with path.open("a") as file:
        file.write('{"question": \n[1, 2]\n')
        file.write(json.dumps({**ROW, "answer": " ".join(["Falls"] * 600)}) + "\n")
    results, tally = score_lines(scorer, path)
    assert [r["line"] for r in results] == list(range(1, 11))
    assert [r["id"] for r in results[:4]] == ["a", 7, "a", "c"]
    bad = {r["line"]: r["error"] for r in results if "error" in r}
    assert sorted(bad) == [2, 4, 5, 6, 8, 9]
    assert "the answer is empty" in bad[2] and "no 'answer'" in bad[4]
    assert "context[1]: expected a text" in bad[5] and "</s>" in bad[6]
    assert results[0]["p_correct"] == pytest.approx(
        scorer.score(QUESTION, "Guzolt Falls", PASSAGE).p_correct, abs=1e-5
    )
    assert results[9]["p_correct"] is None and "window" in results[9]["reason"]
    assert tally.in_words() == (
        "10 rows: 0 trusted, 0 distrusted, 4 unknown, 6 bad; "
        "fields not read: 'latency' (1)"
    )
    assert tally.first_bad == f"line 2: {bad[2]}"
    assert Tally(n_done=1).in_words().startswith("1 row: ")


CONTEXTS = [
    [PASSAGE, ""],
    [{"title": "T", "text": f" {PASSAGE}"}, {"text": "It."}],
    [{"contents": f"T\n{PASSAGE}"}],
    [{"title": "T", "paragraph_text": PASSAGE}],
    [{"page_content": PASSAGE, "metadata": {"title": "T"}}],
]


@pytest.mark.parametrize("passages", CONTEXTS)
def test_a_context_is_the_same_under_both_names_in_lines_and_tables(passages, tmp_path):
    contexts = []
    for name in ("context", "passages"):
        lines = write_lines(tmp_path / "a.jsonl", [{**ROW, "label": 1, name: passages}])
        table = tmp_path / "a.csv"
        for written in (passages, json.dumps(passages)):  # as Python or JSON text
            frame = pd.DataFrame([{**ROW, "label": 1, name: written}])
            frame.to_csv(table, index=False)
            for path in (lines, table):
                (row,), ((labelled, *_),) = read_rows(path), read_labelled(path, print)
                contexts += [row.given.context, labelled.context]
    title = "T" if isinstance(passages[0], dict) else ""
    assert contexts[0][0] == Passage(title=title, text=PASSAGE)
    assert set(contexts) == {contexts[0]} and all(x.text for x in contexts[0])


@pytest.mark.parametrize("between", [",", "\t"])
def test_every_argument_can_be_a_column_of_a_table(between, tmp_path):
    chat = [{"role": "user", "content": "Who?"}]
    for given in (
        {"prompt": PROMPT, "answer": "Guzolt Falls", "context_range": [9, 20]},
        {"messages": chat, "answer": "Guzolt Falls"},
        {"prompt_ids": [1, 2], "answer_ids": [3]},
    ):
        cells = {
            k: v if isinstance(v, str) else json.dumps(v) for k, v in given.items()
        }
        path = tmp_path / "a.csv"
        pd.DataFrame([cells]).to_csv(path, index=False, sep=between)
        (row,) = read_rows(path)
        (same,) = read_rows(write_lines(tmp_path / "a.jsonl", [given]))
        assert row.given == same.given and isinstance(row.given, AnswerToScore)


@pytest.mark.parametrize(
    "name", ["passages", "passage", "contexts", "retrieved_contexts", "ctxs"]
)
def test_passages_are_read_under_every_name_that_question_files_have(name, tmp_path):
    for value in ([PASSAGE, ""], [{"title": "", "text": PASSAGE}], PASSAGE):
        path = write_lines(tmp_path / "a.jsonl", [{**ROW, name: value, "p": 1}])
        (row,) = read_rows(path)
        assert [x.text for x in row.given.context] == [PASSAGE]
        assert row.unread == ("p",)
    (row,) = read_rows(write_lines(path, [{**ROW, "context": "It.", name: [PASSAGE]}]))
    assert [x.text for x in row.given.context] == ["It."] and row.unread == (name,)


def test_a_result_has_the_id_of_its_row(tmp_path):
    ids = ["a", 7, 7.5, None, float("inf"), ["a"]]  # tables with gaps hold 7 as 7.0
    rows = read_rows(write_lines(tmp_path / "a.jsonl", [{**ROW, "id": x} for x in ids]))
    assert [row.id for row in rows] == ["a", 7, 7.5, None, None, None]


def test_an_unread_column_may_hold_bytes_and_decimals(tmp_path):
    image = {"bytes": b"\xff", "path": "a.png"}
    odd = {"price": decimal.Decimal("1.50"), "image": image}
    table = pd.DataFrame([{**ROW, **odd, "scan": x} for x in (b"a", b"b")])
    table.to_parquet(tmp_path / "a.parquet")
    first, second = read_rows(tmp_path / "a.parquet")
    (row,) = read_rows(write_lines(tmp_path / "a.jsonl", [ROW]))
    assert first.given == second.given == row.given
    assert first.unread == ("price", "image", "scan")
    assert first.digest != second.digest


def given(record, tmp_path, write=write_lines):
    (row,) = read_rows(write(tmp_path / "rows.json", [record]))
    assert isinstance(row.given, AnswerToScore), row.given
    return row.given


def test_a_log_of_lm_eval_is_read_with_the_prompt_that_it_records(tmp_path):
    result = given({**lm_eval(3), "arguments": [["Q: who did thing 3", {}]]}, tmp_path)
    assert result == AnswerToScore(
        prompt="Q: who did thing 3",
        question="who did thing 3",
        answer=" Ann\n",  # as generated, not as filtered
    )
    turn = {"role": "user", "content": "who did thing 3"}
    newer = {"gen_args_0": {"arg_0": [json.dumps([turn])], "arg_1": {}}}
    result = given({**lm_eval(3), "arguments": newer}, tmp_path)
    assert result.messages == (turn,) and result.question == "who did thing 3"
    parts = [{"type": "text", "text": turn["content"]}]  # servers accept such content
    newer["gen_args_0"]["arg_0"] = [json.dumps([{**turn, "content": parts}])]
    assert given({**lm_eval(3), "arguments": newer}, tmp_path) == result
    newer["gen_args_0"]["arg_0"] = [json.dumps([{**turn, "content": 2 * parts}])]
    (row,) = read_rows(
        write_lines(tmp_path / "two.json", [{**lm_eval(3), "arguments": newer}])
    )
    assert "texts role and content" in row.given
    plain = {k: v for k, v in lm_eval(3).items() if k != "arguments"}
    for record in (plain, {**plain, "arguments": []}):
        assert given(record, tmp_path).uses_template


def test_fields_shown_in_a_prompt_of_lm_eval_but_not_read_are_named(tmp_path):
    document = {"question": "What is new?", "answer": "The X", "kind": "new"}
    texts = {"abstract": "We present The X.", "title": "On X", "venue": "not shown"}
    prompt = f"{texts['title']}\n{texts['abstract']}\n{PASSAGE}\n{document['question']}"
    log = {"doc": {**document, **texts, "passage": PASSAGE}, "target": "The X"}
    log |= {"arguments": [[prompt, {}]], "resps": [["The X"]]}
    (row,) = read_rows(write_lines(tmp_path / "log.jsonl", [log]))
    assert [x.text for x in row.given.context] == [PASSAGE]
    assert row.unread == ("doc.abstract", "doc.title")


@pytest.mark.parametrize("answers", [[["4"], ["four"]], {"text": ["4"]}, None])
def test_a_log_of_lm_eval_is_read_even_if_its_golds_cannot_be(tmp_path, answers):
    document = {"question": QUESTION, "context": PASSAGE, "answers": answers}
    log = {"doc": document, "target": answers, "resps": [["4"]]}
    log["arguments"] = [[f"{PASSAGE}\n{QUESTION}", {}]]
    result = given(log, tmp_path)
    assert result.question == QUESTION and result.answer == "4"
    assert [x.text for x in result.context] == [PASSAGE]
    with pytest.raises(ValueError, match="in 'doc': 'answers"):
        read_lm_eval(log)


@pytest.mark.parametrize(
    "question",
    ["این کتاب\u200cها از کیست؟", """Whose "Ann's"?""", "who?\nwhen?", r"what is \pi?"],
)
def test_a_question_is_found_in_messages_as_in_a_plain_prompt(question, tmp_path):
    record = {**lm_eval(3), "doc": {"question": question, "answer": ["Ann"]}}
    turn = {"role": "user", "content": f"Q: {question}"}
    for prompt in (turn["content"], json.dumps([turn])):
        log = {**record, "arguments": [[prompt, {}]]}
        assert given(log, tmp_path).question == question


@pytest.mark.parametrize("response", [["-9.43", "False"], [-9.43, True]])
def test_log_likelihoods_of_lm_eval_are_not_taken_for_answers(response, tmp_path):
    record = {**lm_eval(3), "resps": [[response], [["-1.2", "True"]]]}
    (row,) = read_rows(write_lines(tmp_path / "a.jsonl", [record]))
    assert "its responses are log-likelihoods" in row.given
    generated = {**record, "resps": [["True"]]}  # the answer to a yes-no task
    assert given(generated, tmp_path).answer == "True"


def test_a_record_of_flashrag_is_read_with_its_retrieved_passages(tmp_path):
    retrieved = [{"id": "1", "contents": f"Skiband\n{PASSAGE}"}]
    output = {"pred": "Guzolt Falls", "retrieval_result": retrieved}
    output["metric_score"] = {"em": 1.0}
    record = {"id": "test_1", "question": QUESTION, "output": output}
    record["golden_answers"] = ["Guzolt Falls"]
    fields = {"question": QUESTION, "answer": "Guzolt Falls"}
    fields["context"] = [{"title": "Skiband", "text": PASSAGE}]
    assert given(record, tmp_path, write_array) == AnswerToScore(**fields)
    output["prompt"] = PROMPT
    assert given(record, tmp_path) == AnswerToScore(**fields, prompt=PROMPT)
    output["prompt"] = f"Question: {QUESTION} Answer:"
    (row,) = read_rows(write_lines(tmp_path / "other.jsonl", [record]))
    assert "its prompt lacks 1 of 1 retrieved passages" in row.given


def test_scoring_a_file_continues_where_it_stopped(scorer, tmp_path):
    path = write_lines(tmp_path / "answers.jsonl", [ROW, {**ROW, "answer": ""}, ROW])
    results, _ = score_lines(scorer, path)
    out = tmp_path / "out.jsonl"
    out.write_text("".join(json.dumps(r) + "\n" for r in results[:2]) + '{"line": 3,')
    rest, tally = score_lines(scorer, path, JsonLines.open(out))
    assert [r["line"] for r in rest] == [3]
    assert (tally.n_done, tally.n_bad) == (3, 1)


@pytest.mark.parametrize(
    ("batch_size", "sizes"), [(1, [64, 64, 2]), (100, [100, 30]), (512, [130])]
)
def test_rows_are_written_together_in_groups_that_grow_with_the_batch_size(
    tmp_path, batch_size, sizes
):
    path, written = write_lines(tmp_path / "answers.jsonl", [ROW] * 130), []

    def score(rows):
        calls.append((len(rows), len(written)))  # a kill now loses only these rows
        return [Score() for _ in rows]

    rows, calls = read_rows(path), []
    score_rows(score, rows, "d", None, written.extend, Tally().add, batch_size)
    assert calls == [(n, sum(sizes[:i])) for i, n in enumerate(sizes)]
    assert len(written) == 130


def test_a_result_names_the_line_of_the_file(tmp_path):
    table = tmp_path / "answers.csv"
    table.write_text(f"question,answer\n{QUESTION},a\n\n{QUESTION},b\n")
    lines = tmp_path / "answers.jsonl"
    lines.write_text(f"\n{json.dumps(ROW)}\n\n{json.dumps(ROW)}\n")
    array = write_array(tmp_path / "answers.json", [ROW, ROW])
    for path, expected in ((table, [2, 4]), (lines, [2, 4]), (array, [1, 2])):
        assert [row.line for row in read_rows(path)] == expected, path
    table.write_text(f"question,answer,context,prompt\n{QUESTION},Guzolt Falls,,\n")
    (row,) = read_rows(table)  # an empty cell is no passage, and no prompt
    assert row.given == AnswerToScore(question=QUESTION, answer="Guzolt Falls")


@pytest.mark.parametrize(
    ("precision", "decision"), [(0.6, "distrust"), (0.999, "unknown")]
)
def test_a_file_of_results_has_one_precision(tmp_path, precision, decision):
    path = write_lines(tmp_path / "answers.jsonl", [ROW])
    line = ["score", "--probe", "embedded", "--file", path]
    line += ["--out", tmp_path / "out.jsonl", "--precision"]
    beatrice(*line, precision)
    (result,) = JsonLines.open(tmp_path / "out.jsonl").rows()
    assert result["decision"] == decision
    other = beatrice(*line, 0.7, code=1)
    assert "another row, detector, precision" in other.output


def test_results_of_a_version_that_read_texts_differently_are_not_continued(
    scorer, tmp_path
):
    path = write_lines(tmp_path / "answers.jsonl", [ROW])
    (row,), (result,) = read_rows(path), score_lines(scorer, path)[0]
    result |= {"key": sha256_json([row.digest, "d"])[:16]}
    del result["check"]
    result |= {"check": sha256_json(result)[:16]}
    out = write_lines(tmp_path / "out.jsonl", [result])
    with pytest.raises(ValueError, match="line 1: .* or version"):
        score_lines(scorer, path, JsonLines(out))


@pytest.mark.parametrize(
    ("edit", "row", "identity", "message"),
    [
        ({"p_correct": 0.99}, {}, "d", r"out.jsonl, line 2: was edited"),
        ({"decision": "trust"}, {}, "d", r"out.jsonl, line 2: was edited"),
        ({}, {}, "other", "another row, detector, precision"),
        ({}, {"answer": "Falls"}, "d", "another row, detector, precision"),
    ],
)
def test_results_that_were_edited_or_belong_to_other_inputs_are_not_continued(
    scorer, tmp_path, edit, row, identity, message
):
    path = write_lines(tmp_path / "answers.jsonl", [ROW, ROW])
    results, _ = score_lines(scorer, path)
    out = write_lines(tmp_path / "out.jsonl", [results[0], results[1] | edit])
    write_lines(path, [ROW, ROW | row])
    with pytest.raises(ValueError, match=message):
        score_lines(scorer, path, JsonLines(out), identity)


def test_the_page_tints_tokens_by_their_probability_and_explains_it():
    result = {
        "line": 4,
        "id": "<b>",
        "p_correct": 0.25,
        "decision": "distrust",
        "reason": "P is below",
        "tokens": [" Gu", "<zolt", " Falls"],
        "log_probs": [-4.0, -0.1, -1.0],
        "warnings": ["a warning"],
    }
    rows = [("where?", ["<p>"], result), (None, (), {"error": "bad"})]
    text = page("A page", "1 row", rows, ["trust at P >= 0.9"])
    assert "<li>trust at P &gt;= 0.9</li>" in text
    assert '<span class="t0" title="log p = -4.000">Gu</span>' in text  # p = 0.018
    assert '<span title="log p = -0.100">&lt;zolt</span>' in text  # p = 0.905
    assert '<span class="t2" title="log p = -1.000"> Falls</span>' in text  # 0.368
    assert "its probability p under the model" in text
    assert "✗ distrust (1)" in text and "! bad (1)" in text
    assert "1 passage" in text and '<p dir="auto">&lt;p&gt;</p>' in text
    assert "P(correct) = 0.250" in text and "&lt;b&gt;" in text and "bad" in text
    assert not re.search(r"https?://|<link|<img", text)
    assert text.count("<script") == 1


def test_question_answer_and_passage_follow_the_direction_of_their_script():
    row = {"line": 1, "p_correct": 0.5, "decision": "unknown"}
    row |= {"tokens": ["תשובה"], "log_probs": [-1.0]}
    text = page("A page", "", [("שאלה", ["קטע"], row)])
    directed = re.findall(r'dir="auto">(?:<span[^>]*>)?([^<]+)<', text)
    assert directed == ["שאלה", "תשובה", "קטע"]
    assert re.search(r"<bdi[^>]*><span[^>]*>תשובה</span></bdi>", score_html(row, ()))


@pytest.mark.parametrize("tokens", [[], [" "], ["\n", " "]])
def test_an_empty_answer_is_shown_as_no_answer_and_a_bad_row_is_not(tokens):
    result = {"decision": "unknown", "tokens": tokens}
    rows = [("where?", (), result), ("where?", (), {"error": "bad"})]
    assert page("A page", "", rows).count("(no answer)") == 1
    assert score_html(result, [0.0] * len(tokens)).count("(no answer)") == 1


@pytest.mark.parametrize("other", [0.2, -1e-9])
def test_a_token_that_moves_p_only_by_rounding_has_no_tint(other):
    result = {"p_correct": 0.5, "decision": "unknown", "tokens": ["a", "b"]}
    text = score_html(result, [1e-9, other])
    assert '<span title="moves P by less than 0.001">a</span>' in text
    assert text.count("rgba") == (abs(other) > 0.001) and "0.000" not in text


def test_a_note_shared_by_rows_is_written_once_and_cited_by_number():
    results = [
        {"line": i, "p_correct": 0.5, "decision": "unknown", "warnings": ["of all"]}
        for i in range(3)
    ]
    results[0]["reason"] = "its own"
    text = page("A page", "", [("q", (), result) for result in results])
    assert text.count("of all") == text.count("its own") == 1
    assert text.count(">notes above: 1<") == 3


def test_the_page_counts_every_answer_and_reports_how_many_it_leaves_out():
    decisions = ["unknown"] * 1501 + ["trust"] * 1499
    rows = [
        ("q", (), {"line": i, "p_correct": i / 2999, "decision": decision})
        for i, decision in enumerate(decisions)
    ]
    text = page("A page", "", rows)
    assert text.count("<article") == 2000
    assert "the first 2000 rows; 1000 more" in text
    counts = map(int, re.findall(r"<title>P [^:]*: (\d+) ", text))
    assert sum(counts) == 3000
    assert "? unknown (1501)" in text and "✓ trust (499 of 1499)" in text
    # Without it a reload could keep boxes unticked and yet hide no row.
    assert '<form autocomplete="off">' in text


@pytest.mark.parametrize("decision", ["trust", "distrust", "unknown"])
def test_the_page_names_a_decision_in_the_colour_of_its_bars(decision):
    row = {"line": 1, "p_correct": 0.5, "decision": decision}
    text = page("A page", "", [("q", (), row)])
    assert f'<rect class="fill-{decision}"' in text
    assert f'<label class="{decision}">' in text
    (bar,) = re.findall(rf"\.fill-{decision} {{ fill: (\S+) }}", text)
    (name,) = re.findall(rf"label\.{decision} {{ color: (\S+) }}", text)
    assert bar == name


def test_rows_that_the_page_does_not_show_are_not_kept_in_memory():
    def n_kept(n_rows):
        tracemalloc.start()
        rows = score_files.PageRows()
        for i in range(n_rows):
            result = {"line": i, "p_correct": i % 10 / 10, "decision": "unknown"}
            rows.add(("where?", (), {**result, "tokens": [f"token {i}"] * 20}))
        n_bytes = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        assert f"{n_rows - 2000} more" in page("A page", "", rows) or n_rows == 2000
        return n_bytes

    assert n_kept(20_000) < n_kept(2000) + 18_000 * 20


def save_run(path, detector, **backbone):
    """Make a run with a detector that `score` can open."""
    sections = {
        "backbone": BackboneConfig(**backbone),
        "answer": AnswerConfig(generation=GENERATION),
    }
    with RunDir.open(path, NewRun(preset="paper", seed=0, sections=sections)) as run:
        detector.save(run.detector)
    return path


@pytest.fixture(scope="module")
def run(probed, tmp_path_factory):
    return save_run(tmp_path_factory.mktemp("run") / "run", probed.detector)


def test_a_model_is_loaded_with_the_runs_settings_or_those_asked_for(run, backbone):
    with pytest.raises(ValueError, match="in float32, but .* computes in bfloat16"):
        Scorer.load(run, dtype="bfloat16")
    other = Scorer.load(run, dtype="bfloat16", device="cpu", strict=False)
    assert "bfloat16" in other.score(QUESTION, "Guzolt Falls").warnings[0]
    assert other.probed.backbone.dtype == torch.bfloat16
    probed = Scorer.load(run).probed
    assert probed.backbone.dtype == torch.float32
    assert probed.config == GENERATION  # including the batch size
    assert Scorer.load(run, model=backbone).probed.backbone is backbone
    for options, message in (
        ({"dtype": "float8"}, "dtype: expected one of"),
        ({"device": 3}, "device: expected a Torch device"),
        ({"device": f"cuda:{torch.cuda.device_count()}"}, "no such GPU"),
        ({"model": backbone, "device": "cpu"}, "those of the model in memory"),
        ({"model": 3}, "model: expected a path"),
    ):
        with pytest.raises(ValueError, match=message):
            Scorer.load(run, **options)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")
def test_a_run_from_a_gpu_is_scored_on_the_cpu_if_there_is_no_gpu(probed, tmp_path):
    run = save_run(tmp_path / "run", probed.detector, device="cuda")
    assert Scorer.load(run).probed.backbone.device.type == "cpu"


def test_the_verb_scores_a_file_and_fails_if_a_row_is_bad(run, tmp_path):
    rows = [ROW, {**ROW, "answer": " "}, {**ROW, "context": PASSAGE}]
    path = write_lines(tmp_path / "answers.jsonl", rows)
    out, html = tmp_path / "out.jsonl", tmp_path / "page.html"
    line = ("score", run, "--file", path, "--out", out, "--html", html)
    failed = "1 of 3 rows could not be scored; the first, line 2: the answer is empty"
    assert failed in beatrice(*line, code=1).stderr
    assert [row["line"] for row in JsonLines(out).rows()] == [1, 2, 3]
    assert "Guzolt" in html.read_text() and "<li>closed_book: " in html.read_text()
    before = out.read_bytes()
    beatrice(*line, code=1)
    assert out.read_bytes() == before
    write_lines(path, [ROW])
    assert 0 <= json.loads(beatrice(*line[:4]).stdout)["p_correct"] <= 1


def test_two_processes_cannot_write_results_into_one_file(run, tmp_path):
    path, out = write_lines(tmp_path / "a.jsonl", [ROW]), tmp_path / "out.jsonl"
    line = ("score", run, "--file", path, "--out", out)
    with out.open("ab") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert "another process" in beatrice(*line, code=1).stderr
    assert out.read_bytes() == b""
    beatrice(*line)
    assert len(list(JsonLines(out).rows())) == 1


def score_piped(run, text, *words):
    """Score rows from standard input."""
    return CliRunner().invoke(main, ["score", str(run), "--file", "-", *words], text)


def test_rows_may_come_through_a_pipe_and_results_go_to_standard_output(
    run, tmp_path, monkeypatch
):
    rows = [ROW, {**ROW, "context": PASSAGE}]
    path = write_lines(tmp_path / "answers.jsonl", rows)
    expected = beatrice("score", run, "--file", path).stdout
    done = score_piped(run, path.read_text())
    assert (done.exit_code, done.stdout) == (0, expected)
    monkeypatch.chdir(tmp_path)
    assert score_piped(run, path.read_text(), "--out", "-").stdout == expected
    assert not (tmp_path / "-").exists()
    nothing = score_piped(run, "")
    assert nothing.exit_code == 1 and "empty" in nothing.stderr
    os.mkfifo(pipe := tmp_path / "pipe")
    threading.Thread(target=lambda: pipe.write_bytes(path.read_bytes())).start()
    assert beatrice("score", run, "--file", pipe).stdout == expected


@pytest.mark.parametrize("content", ["hello there", '{"question": "who?"}\n'])
def test_an_error_names_a_pipe_as_it_was_typed(run, tmp_path, content):
    os.mkfifo(pipe := tmp_path / "pipe")
    threading.Thread(target=lambda: pipe.write_text(content)).start()
    failed = beatrice("score", run, "--file", pipe, code=1)
    assert_error_sentence(failed, f"Error: {pipe}: ")
    assert_error_sentence(score_piped(run, content), "Error: standard input: ")


def test_json_prints_the_counts_if_results_go_into_a_file(run, tmp_path):
    rows = [ROW, {**ROW, "answer": " "}]
    path = write_lines(tmp_path / "answers.jsonl", rows)
    out = tmp_path / "out.jsonl"
    done = beatrice("score", run, "--file", path, "--out", out, "--json", code=1)
    counts = json.loads(done.stdout)
    assert counts.pop("out") == str(out) and counts.pop("unread") == {}
    assert counts == {
        "n_rows": 2, "trust": 0, "distrust": 0, "unknown": 1, "bad": 1
    }  # fmt: skip
    done = beatrice("score", run, "--file", path, "--json", code=1)
    assert [json.loads(line)["line"] for line in done.stdout.splitlines()] == [1, 2]


@pytest.mark.parametrize(
    "content", ["", "[]", "\n\n", "hello there", "{}", '{"question": "who?"}\n' * 2]
)
def test_a_file_without_rows_is_refused_in_one_sentence(run, tmp_path, content):
    (tmp_path / "answers.jsonl").write_text(content)
    line = ("score", run, "--file", tmp_path / "answers.jsonl")
    assert_error_sentence(beatrice(*line, code=1))


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--answer", "a"], "give --file, or --question and optionally"),
        (["--file", __file__, "--answer", "a"], "--file replaces --question"),
        (["--question", "q?", "--answer", "a", "--out", "x"], "results of a --file"),
    ],
)
def test_options_that_do_not_fit_together_are_a_usage_error(words, message):
    assert message in beatrice("score", "nowhere", *words, code=2).stderr


@pytest.mark.parametrize(
    "words",
    [
        ("--file", "answers.jsonl", "--html", "answers.jsonl"),
        ("--file", "answers.jsonl", "--out", "./answers.jsonl"),
        ("--file", "answers.jsonl", "--out", "new.jsonl", "--html", "new.jsonl"),
        ("--file", "answers.jsonl", "--html", "link.jsonl"),
    ],
)
def test_no_file_is_written_over_another_file_of_the_same_command(
    run, tmp_path, monkeypatch, words
):
    monkeypatch.chdir(tmp_path)
    path = write_lines(tmp_path / "answers.jsonl", [ROW])
    (tmp_path / "link.jsonl").symlink_to(path)
    before = path.read_bytes()
    assert "are the same file" in beatrice("score", run, *words, code=2).stderr
    assert path.read_bytes() == before and not (tmp_path / "new.jsonl").exists()
