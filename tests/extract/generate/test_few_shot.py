import dataclasses
import json

import click
import pytest
from click.testing import CliRunner

from beatrice.cli import main
from beatrice.extract.datasets.commands import AskingOptions
from beatrice.extract.generate.generator import SamplingConfig
from beatrice.extract.generate.prompts import (
    SHOTS,
    TEMPLATES,
    PromptConfig,
    Shot,
    build_prompt,
    read_shots,
)
from beatrice.extract.generate.requests import Request
from beatrice.extract.generate.server import ServedGenerator, ServerConfig
from beatrice.extract.records import Passage
from beatrice.extract.signals.sequence import sequence_of
from tests.extract.generate.generating import GREEDY, prompts_of, texts
from tests.extract.generate.loopback import served

FEW_SHOT = dataclasses.replace(TEMPLATES["few-shot"], shots=SHOTS)
PASSAGES = [Passage(title="Bern", text="The capital lies on the Aare.")]


def parts(tokenizer, prompt):
    """Return what stands before the spans, the context, and the question."""
    start, stop = prompt.context_span
    pieces = prompt.ids[:start], prompt.ids[start:stop], prompt.ids[stop:]
    return [tokenizer.decode(ids, skip_special_tokens=True) for ids in pieces]


@pytest.mark.parametrize("chat", [False, True])
def test_worked_examples_stand_before_the_spans_and_belong_to_none(bytewise, chat):
    template = dataclasses.replace(FEW_SHOT, chat=chat)
    before, context, question = parts(
        bytewise, build_prompt(bytewise, template, "Where is it?")
    )
    assert before.count("Question:") == before.count("Answer:") == len(SHOTS)
    assert (context, question) == ("", "Question: Where is it?\nAnswer:")
    before, context, question = parts(
        bytewise, build_prompt(bytewise, template, "Where is it?", PASSAGES)
    )
    assert before.count("Question:") == len(SHOTS)
    assert before.endswith("\n\nContext: ")
    assert context == "Bern: The capital lies on the Aare."
    assert question == "\nQuestion: Where is it?\nAnswer:"


def test_an_example_is_shown_in_the_words_of_the_question(bytewise):
    shot = Shot(question="Who?", answer="Ann", context="Ann did.")
    for passages in ((), PASSAGES):
        asked = build_prompt(bytewise, TEMPLATES["few-shot"], "Who?", passages)
        shown = dataclasses.replace(FEW_SHOT, shots=(shot,))
        prompt = build_prompt(bytewise, shown, "Who?", passages)
        text = bytewise.decode(prompt.ids, skip_special_tokens=True)
        example, _, rest = text.partition(" Ann\n\n")
        alone = bytewise.decode(asked.ids, skip_special_tokens=True)
        assert rest == alone
        assert example == alone.replace(
            "Bern: The capital lies on the Aare.", "Ann did."
        )


def test_the_answers_to_a_prompt_with_examples_have_its_spans(local):
    tokenizer = local.backbone.tokenizer
    prompt = build_prompt(tokenizer, FEW_SHOT, "Where is it?")
    request = Request("q", "closed_book", "original", prompt)
    (found,) = texts(local, prompts_of([request]))
    spans = sequence_of(request.answer(found)).spans
    n_before = prompt.context_span[0]
    n_prompt, n_read = len(prompt.ids), len(prompt.ids) + len(found.token_ids)
    assert n_before > 20
    assert spans[:, 0].tolist() == [n_before, n_before, n_prompt - 1]
    assert spans[2, 1] == n_read


def test_examples_without_a_context_are_for_questions_without_one(bytewise):
    bare = dataclasses.replace(FEW_SHOT, shots=(Shot(question="Who?", answer="Ann"),))
    build_prompt(bytewise, bare, "Who?")
    with pytest.raises(ValueError, match="none of the worked examples has a context"):
        build_prompt(bytewise, bare, "Who?", PASSAGES)


@pytest.mark.parametrize("template", ["paper", "few-shot"])
def test_the_template_with_examples_has_some_and_no_other_has_any(template):
    shots = SHOTS if template == "paper" else ()
    with pytest.raises(ValueError, match="worked examples"):
        PromptConfig(template=template, shots=shots)


def stops_within(local, requests):
    """Return requests whose texts have several tokens, and strings to end them at."""
    decode = local.backbone.tokenizer.decode
    whole = texts(local, prompts_of(requests))
    chosen = [
        (request, reply)
        for request, reply in zip(requests, whole, strict=True)
        if len(reply.token_ids) >= 3 and len(set(reply.text.split())) >= 3
    ][:4]
    assert len(chosen) == 4
    return chosen, [decode(reply.token_ids[1:3]).strip() for _, reply in chosen]


def test_a_text_ends_where_a_stop_string_begins_and_its_token_is_kept(local, requests):
    chosen, stops = stops_within(local, requests)
    asked = [request for request, _ in chosen]
    config = dataclasses.replace(GREEDY, stop=tuple(stops))
    for (_, whole), cut in zip(
        chosen, texts(local, prompts_of(asked), config), strict=True
    ):
        n = len(cut.token_ids)
        assert cut.token_ids == whole.token_ids[:n]
        assert (cut.stop_id, cut.finish) == (whole.token_ids[n], "stop")
        assert cut.log_probs == pytest.approx(whole.log_probs[: n + 1], abs=2e-4)
        assert not any(stop in cut.text for stop in stops)
        assert any(
            whole.text[len(cut.text) :].strip().startswith(stop) for stop in stops
        )


def test_a_stop_string_that_never_comes_changes_nothing(local, requests):
    asked = prompts_of(requests[:8])
    config = dataclasses.replace(GREEDY, stop=("\n", "Question:"))
    before, after = texts(local, asked), texts(local, asked, config)
    assert [b.token_ids for b in before] == [a.token_ids for a in after]
    assert [b.stop_id for b in before] == [a.stop_id for a in after]


def test_stopped_texts_of_a_server_are_the_local_ones(local, requests):
    chosen, stops = stops_within(local, requests)
    asked = prompts_of([request for request, _ in chosen])
    config = dataclasses.replace(GREEDY, stop=tuple(stops))
    with served(local) as loopback:
        server = ServerConfig(url=loopback.url, model="microworld", log_probs=True)
        with ServedGenerator(
            server, (2,), tokenizer=local.backbone.tokenizer
        ) as client:
            there = texts(client, asked, config)
        assert loopback.requests[0][1]["stop"] == stops
    for a, b in zip(texts(local, asked, config), there, strict=True):
        assert (a.text, a.token_ids, a.stop_id) == (b.text, b.token_ids, b.stop_id)
        assert (a.finish, b.finish) == ("stop", "stop")
        assert a.log_probs == pytest.approx(b.log_probs, abs=2e-4)


def test_a_stop_string_changes_the_key_of_a_reply_and_none_changes_nothing():
    assert GREEDY.as_key() == {"max_new_tokens": 10, "temperature": 0.0}
    assert SamplingConfig(stop=("x",)).as_key()["stop"] == ["x"]
    assert "stop" not in SamplingConfig(temperature=1.0).as_key()


def test_a_line_feed_ends_answers_to_worked_examples_unless_told_otherwise():
    assert AskingOptions(template="few-shot").stop_strings() == ("\n",)
    assert AskingOptions().stop_strings() == ()
    given = AskingOptions(stop=(r"\n\n", "Q:")).stop_strings()
    assert given == ("\n\n", "Q:")
    with pytest.raises(click.BadParameter):
        AskingOptions(stop=("",)).stop_strings()


BAD_SHOTS = [
    ("", "at least one worked example"),
    ('{"question": "Who?"}', "line 1: expected"),
    ('{"question": "Who?", "answer": " "}', "needs a question and an answer"),
    ('\n{"question": "Who?", "answer": "A\\nB"}', "line 2.*several lines"),
    ("nothing", "line 1: expected"),
]


@pytest.mark.parametrize(("text", "message"), BAD_SHOTS)
def test_a_file_of_examples_that_cannot_be_used_is_refused(tmp_path, text, message):
    path = tmp_path / "shots.jsonl"
    path.write_text(text, "utf-8")
    with pytest.raises(ValueError, match=message):
        read_shots(path)


def test_examples_of_ones_own_are_what_the_run_asks_with(tmp_path):
    own, rows = tmp_path / "shots.jsonl", tmp_path / "own.jsonl"
    own.write_text('{"question": "Who?", "answer": "Ann"}\n', "utf-8")
    lines = (
        json.dumps({"question": f"Where is {n}?", "golds": [f"at {n}"]})
        for n in range(12)
    )
    rows.write_text("\n".join(lines), "utf-8")
    files = ["--train", f"own={rows}", "--dev", f"own={rows}"]
    sizes = ["--n-train", "4", "--n-evaluation", "2", "--model", "embedded"]
    command = ["data", str(tmp_path / "run"), *files, *sizes, "--template", str(own)]
    made = CliRunner().invoke(main, command)
    assert made.exit_code == 0, made.output
    manifest = json.loads((tmp_path / "run" / "manifest.json").read_text("utf-8"))
    answer = manifest["sections"]["answer"]
    assert answer["prompt"]["shots"] == [
        {"question": "Who?", "answer": "Ann", "context": ""}
    ]
    assert answer["generation"]["stop"] == ["\n"]
