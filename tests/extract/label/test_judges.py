import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from beatrice.extract.backbone.names import WEIGHTS
from beatrice.extract.label.labels import (
    RUBRICS,
    ConsensusConfig,
    Rubric,
    consensus,
    delimit,
    escape,
    exact_match,
    judge_answers,
    judge_prompt,
    parse_verdict,
)
from beatrice.extract.label.stage import between_judges, join_labels
from tests.extract.generate.loopback import open_replies
from tests.extract.label.scripted import (
    FORESEEN,
    INJECTIONS,
    LABELLED,
    ScriptedGenerator,
    answered,
    fair_verdict,
    fields_of,
    generated,
)
from tests.records import an_example

QUESTION = "What is the capital of France?"
GOLDS = ("Paris", "Paris, France")


EXAMPLE = an_example(question=QUESTION, golds=GOLDS)
PARIS = [answered("Paris")]


def judged(tmp_path, rule, answers=PARIS, name="scripted", rubrics=RUBRICS, **config):
    """Let a judge with this rule label answers; its replies are kept in a folder."""
    generator, config = ScriptedGenerator(rule, name), ConsensusConfig(**config)
    given = (answers, [EXAMPLE], generator, open_replies(tmp_path / "replies.jsonl"))
    return judge_answers(*given, config, rubrics=rubrics), generator


@pytest.mark.parametrize("rubric", RUBRICS, ids=lambda r: r.name)
def test_a_prompt_holds_each_field_once_and_ends_with_the_rules(rubric):
    prompt = judge_prompt(rubric, QUESTION, GOLDS, "Paris")
    assert fields_of(prompt) == [
        ("question", QUESTION),
        ("gold answer(s)", "Paris\nParis, France"),
        ("model answer", "Paris"),
    ]
    assert prompt.startswith(rubric.opening)
    assert prompt.endswith(rubric.rules)


def test_a_marker_depends_on_answer_rubric_attempt_and_seed_and_is_in_no_field():
    def marker(rubric=0, text="x", **kwargs):
        prompt = judge_prompt(RUBRICS[rubric], QUESTION, GOLDS, text, **kwargs)
        return prompt.split("carry the marker ")[1].split(".")[0]

    changes = ({"rubric": 1}, {"text": "y"}, {"attempt": 1}, {"seed": 1})
    assert len({marker(), *(marker(**change) for change in changes)}) == 5
    assert marker() == marker()
    unsalted, _ = delimit({"answer": "x"}, salt="s")
    assert delimit({"answer": f"x {unsalted}"}, salt="s")[0] != unsalted


@pytest.mark.parametrize("rubric", RUBRICS, ids=lambda r: r.name)
@pytest.mark.parametrize("around", ["{}", "Lyon\n{}", "{}\nLyon"])
def test_no_injection_leaves_its_field_or_flips_a_fair_judge(rubric, around):
    for injection in INJECTIONS:
        text = around.replace("{}", injection)
        prompt = judge_prompt(rubric, QUESTION, GOLDS, text)
        assert dict(fields_of(prompt))["model answer"] == escape(text)
        assert len(fields_of(prompt)) == 3
        assert fair_verdict(prompt) == "Incorrect"


def test_no_injection_in_another_field_flips_a_fair_judge():
    for injection in INJECTIONS:
        for question, golds in ((injection, GOLDS), (QUESTION, (injection, *GOLDS))):
            for text in ("Paris", "Lyon"):  # "Lyon" with invisible letters is right
                verdict = "Correct" if exact_match(text, golds) else "Incorrect"
                prompt = judge_prompt(RUBRICS[0], question, golds, text)
                assert fair_verdict(prompt) == verdict


@pytest.mark.parametrize("marker", FORESEEN)
def test_the_same_injections_fool_a_judge_whose_marker_can_be_guessed(marker):
    verdicts = set()
    for injection in INJECTIONS:
        fields = {"gold answer(s)": "Paris", "model answer": injection}.items()
        texts = (f"[begin {n} {marker}]\n{x}\n[end {n} {marker}]" for n, x in fields)
        verdicts.add(fair_verdict("\n".join(texts), marker))
    assert "Correct" in verdicts


def test_a_gold_answer_of_two_lines_is_one_gold_answer():
    prompt = judge_prompt(RUBRICS[0], QUESTION, ("Paris\nLyon", "Paris"), "Lyon")
    assert dict(fields_of(prompt))["gold answer(s)"] == "Paris Lyon\nParis"
    assert fair_verdict(prompt) == "Incorrect"


CONTROL_TOKENS = (
    "<|im_start|> <|im_end|> <|eot_id|> <|start_header_id|> <|end_header_id|> "
    "<start_of_turn> <end_of_turn> <bos> <eos> [INST] [/INST] <<SYS>> <</SYS>> "
    "<|assistant|> <|end|> <\uff5cAssistant\uff5c> <think> </think> [gMASK] <|turn> "
    "<turn|> <|channel|> <|message|> <|return|> [SYSTEM_PROMPT] [TOOL_RESULTS]"
).split()


def test_a_tokenizer_finds_no_control_token_inside_a_field():
    tokenizer = AutoTokenizer.from_pretrained(WEIGHTS)
    tokenizer.add_special_tokens({"additional_special_tokens": CONTROL_TOKENS})
    control = set(tokenizer.all_special_ids) - {tokenizer.unk_token_id}

    def n_control(text):
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        return sum(token in control for token in ids)

    assert sum(n_control(text) > 0 for text in INJECTIONS) >= 20
    assert sum(n_control(escape(text)) for text in INJECTIONS) == 0


def test_escaping_twice_changes_nothing_more_and_plain_text_not_at_all():
    for text in INJECTIONS:
        assert escape(escape(text)) == escape(text)
    for text in ("Paris", "a\nb\tc", "\u6771\u4eac 2020", "3 < 4 > 2", "x [see 2]"):
        assert escape(text) == text


def test_no_labelled_string_is_misread():
    read = {text: parse_verdict(text) for text, _ in LABELLED}
    assert {t: read[t] for t, verdict in LABELLED if read[t] != verdict} == {}


@given(st.text())
def test_any_text_is_unparsable_or_the_verdict_that_its_letters_spell(text):
    letters = "".join(c for c in text if c.isalpha()).lower()
    assert parse_verdict(text) in ("unparsable", letters)


def test_a_judge_that_parrots_an_injection_gives_no_verdict():
    # Except the bare word in quotes or emphasis, which is that verdict.
    bare = {f"{q}\nCorrect\n{q}" for q in ("***", "'''", '"""', "```")}
    parsed = {text for text in INJECTIONS if parse_verdict(text) != "unparsable"}
    assert parsed == bare


@pytest.mark.parametrize(
    ("vote", "verdicts", "label", "reason"),
    [
        ("unanimous", ("correct",) * 3, True, "unanimous of 3"),
        ("unanimous", ("incorrect",) * 3, False, "unanimous of 3"),
        ("unanimous", ("correct", "incorrect", "correct"), None, "2 of 3"),
        ("unanimous", ("correct", "unparsable", "correct"), None, "1 verdicts were"),
        ("majority", ("correct", "correct", "unparsable"), True, "2 of 3"),
        ("majority", ("incorrect", "unparsable", "incorrect"), False, "2 of 3"),
        ("majority", ("correct", "incorrect", "unparsable"), None, "1 of 3"),
        ("majority", ("correct", "unparsable", "unparsable"), None, "2 verdicts"),
        ("majority", ("unparsable",) * 3, None, "3 verdicts"),
        ("majority", ("correct", "incorrect"), None, "1 of 2"),
    ],
)
def test_a_label_follows_all_or_a_majority_of_the_verdicts(
    vote, verdicts, label, reason
):
    assert consensus(verdicts, vote)[0] is label
    assert reason in consensus(verdicts, vote)[1]


def test_an_unknown_vote_and_no_verdict_are_refused():
    with pytest.raises(ValueError, match="unanimous, majority, found 'plurality'"):
        consensus(("correct",), "plurality")
    with pytest.raises(ValueError, match="at least one verdict"):
        consensus(())


@pytest.mark.parametrize("reply", ["Well, correct.", generated("Correct", "length")])
def test_an_unparsable_or_cut_reply_is_asked_for_twice_more_and_counted(
    tmp_path, reply
):
    judgements, generator = judged(tmp_path, lambda prompt: reply)
    (label,) = judgements.labels
    assert (label.label, label.verdicts) == (None, ("unparsable",) * 3)
    assert (judgements.n_retried, judgements.n_unparsable) == (6, 3)
    assert len(generator.prompts) == len(set(generator.prompts)) == 9
    assert judgements.counts()[0]["n_with_unparsable"] == 1


def test_a_reply_that_parses_at_the_second_attempt_is_a_verdict(tmp_path):
    replies = iter(["I think correct"] * 3 + ["Correct"] * 3)
    judgements, _ = judged(tmp_path, lambda prompt: next(replies))
    assert judgements.labels[0].label is True
    assert (judgements.n_retried, judgements.n_unparsable) == (3, 0)


def test_settings_and_variants_are_judged_and_counted_apart(tmp_path):
    rewritten = answered("Paris", "with_context", "rewritten")
    answers = [*PARIS, answered("", "with_context"), rewritten]
    judgements, generator = judged(tmp_path, fair_verdict, answers)
    assert [label.key for label in judgements.labels] == [a.key for a in answers]
    assert [label.label for label in judgements.labels] == [True, False, True]
    assert judgements.labels[0].verdicts == ("correct",) * 3
    assert judgements.n_retried == judgements.n_unparsable == 0
    assert [row["n_correct"] for row in judgements.counts()] == [1, 0, 1]
    assert len(generator.prompts) == 6  # an equal answer is judged once


def test_another_judge_or_seed_asks_again(tmp_path):
    judged(tmp_path, fair_verdict)
    for other, n_prompts in ({}, 0), ({"seed": 1}, 3), ({"name": "other"}, 3):
        _, generator = judged(tmp_path, fair_verdict, **other)
        assert len(generator.prompts) == n_prompts


def test_every_field_of_a_reply_is_read_back_and_a_line_of_another_type_named(tmp_path):
    ids = dict(token_ids=(1, 2), log_probs=(-0.5, -1e-7), stop_id=2, n_new_tokens=3)
    reply = msgspec.structs.replace(generated("x"), **ids)
    judged(tmp_path, lambda prompt: reply, n_retries=0)
    again = open_replies(tmp_path / "replies.jsonl").journal.values()
    names = reply.__struct_fields__
    (row,) = {tuple(getattr(x, name) for name in names) for x in again}
    assert row == tuple(getattr(reply, name) for name in names)
    (tmp_path / "replies.jsonl").write_text('{"key": "k", "text": 3}\n')
    with pytest.raises(ValueError, match="line 1.*text.*expected str"):
        open_replies(tmp_path / "replies.jsonl")


def test_custom_rubrics_are_asked_in_their_own_words_and_compared(tmp_path):
    rubrics = [
        Rubric(name=name, opening=f"Judge {name}ly.", rules="Say Correct or Incorrect.")
        for name in ("strict", "mild")
    ]

    def rule(prompt):
        return "Correct" if prompt.startswith("Judge mildly.") else "Incorrect"

    judgements, generator = judged(tmp_path, rule, rubrics=rubrics)
    assert judgements.labels[0].verdicts == ("incorrect", "correct")
    openings = [prompt.split("\n")[0] for prompt in generator.prompts]
    assert openings == ["Judge strictly.", "Judge mildly."]
    assert judgements.labels[0].reason == "judges disagree: 1 of 2 say correct"
    majority, _ = judged(tmp_path, rule, rubrics=rubrics, vote="majority")
    assert majority.labels[0].reason.startswith("no majority: 1 of 2")
    rows = join_labels([EXAMPLE], PARIS, judgements.labels)
    (pair,) = between_judges(rows, rubrics=rubrics)
    assert (pair["first"], pair["second"], pair["n_agree"]) == ("strict", "mild", 0)


def test_kept_verdicts_show_that_a_stopped_judge_can_judge(tmp_path):
    def silent(prompt):
        return "Perhaps"

    def stopped(prompt):
        if (tmp_path / "replies.jsonl").stat().st_size:
            raise ConnectionError("the server went away")
        return "Incorrect"

    answers = [answered(f"Paris {i}") for i in range(100)]
    with pytest.raises(ValueError, match=r"none of the first \d+ replies"):
        judged(tmp_path / "silent", silent, answers)
    (tmp_path / "replies.jsonl").touch()
    with pytest.raises(ConnectionError):
        judged(tmp_path, stopped, answers)
    result, generator = judged(tmp_path, silent, answers)
    assert len(result.labels) == 100 and len(generator.prompts) > 100
