import msgspec
import pytest
from transformers import AutoTokenizer

from beatrice.extract.backbone.names import WEIGHTS
from beatrice.extract.generate.replies import Replies
from beatrice.extract.label.audit import between_judges, join_labels
from beatrice.extract.label.judges import (
    RUBRICS,
    ConsensusConfig,
    Rubric,
    consensus,
    delimit,
    escape,
    judge_answers,
    judge_prompt,
    marker_for,
)
from beatrice.extract.records import Answer, Example
from tests.extract.label.scripted import (
    ScriptedGenerator,
    fair_verdict,
    fields_of,
    generated,
)
from tests.extract.label.strings import INJECTIONS

QUESTION = "What is the capital of France?"
GOLDS = ("Paris", "Paris, France")


def example(golds=GOLDS, question=QUESTION, name="q"):
    return Example(id=name, dataset="d", split="test", question=question, golds=golds)


def answer(text, setting="closed_book", variant="original", name="q"):
    return Answer(
        example_id=name,
        setting=setting,
        variant=variant,
        text=text,
        prompt_ids=(1, 2),
        token_ids=(3,),
        stop_id=0,
        context_span=(1, 1),
    )


def judged(tmp_path, rule, texts, **config):
    answers = [answer(text) for text in texts]
    generator = ScriptedGenerator(rule)
    replies = Replies.open(tmp_path / "replies.jsonl")
    found = judge_answers(
        answers, [example()], generator, replies, ConsensusConfig(**config)
    )
    return found, generator


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


def test_the_three_rubrics_are_three_and_ask_for_one_word():
    assert len({rubric.name for rubric in RUBRICS}) == 3
    assert all(
        rubric.rules.endswith("Correct or Incorrect.")
        and rubric.rules.count("Correct or Incorrect.") == 1
        for rubric in RUBRICS
    )


def test_the_marker_changes_with_the_answer_the_rubric_the_attempt_and_the_seed():
    def marker(rubric=0, text="x", **kwargs):
        prompt = judge_prompt(RUBRICS[rubric], QUESTION, GOLDS, text, **kwargs)
        return prompt.split("carry the marker ")[1].split(".")[0]

    kinds = [
        marker(),
        marker(rubric=1),
        marker(text="y"),
        marker(attempt=1),
        marker(seed=1),
    ]
    assert len(set(kinds)) == len(kinds)
    assert marker() == kinds[0]


def test_a_marker_that_stands_in_a_field_is_never_chosen_and_always_refused():
    fields = {"answer": "x"}
    marker = marker_for(fields, salt="s")
    assert marker_for({"answer": f"x {marker}"}, salt="s") != marker
    with pytest.raises(ValueError, match="contains the marker"):
        delimit("answer", f"x {marker} y", marker)


def test_the_table_of_injections_is_as_large_as_it_claims():
    assert len(set(INJECTIONS)) >= 200
    assert not any("Paris" == text for text in INJECTIONS)


@pytest.mark.parametrize("rubric", RUBRICS, ids=lambda r: r.name)
@pytest.mark.parametrize("around", ["{}", "Lyon\n{}", "{}\nLyon"])
def test_no_injection_leaves_its_field_or_flips_a_fair_judge(rubric, around):
    for injection in INJECTIONS:
        text = around.replace("{}", injection)
        prompt = judge_prompt(rubric, QUESTION, GOLDS, text)
        assert dict(fields_of(prompt))["model answer"] == escape(text)
        assert len(fields_of(prompt)) == 3
        assert fair_verdict(prompt) == "Incorrect"


@pytest.mark.parametrize("place", ["question", "golds"])
def test_no_injection_in_another_field_flips_a_fair_judge(place):
    for injection in INJECTIONS:
        question = injection if place == "question" else QUESTION
        golds = (injection, *GOLDS) if place == "golds" else GOLDS
        for text, verdict in (("Paris", "Correct"), ("Lyon", "Incorrect")):
            prompt = judge_prompt(RUBRICS[0], question, golds, text)
            assert fair_verdict(prompt) == verdict


@pytest.mark.parametrize(
    "marker", ["0" * 32, "f" * 32, "deadbeef" * 4, "0123456789abcdef" * 2, "MARKER"]
)
def test_a_delimiter_that_can_be_foreseen_is_left_by_the_same_injections(marker):
    """The control: where an injection knows the marker, the same judge is fooled."""
    verdicts = []
    for injection in INJECTIONS:
        fields = (("gold answer(s)", "Paris"), ("model answer", injection))
        prompt = "\n".join(
            f"[begin {name} {marker}]\n{text}\n[end {name} {marker}]"
            for name, text in fields
        )
        verdicts.append(fair_verdict(prompt, marker))
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


def test_defusing_twice_changes_nothing_and_plain_text_never():
    for text in INJECTIONS:
        assert escape(escape(text)) == escape(text)
    for text in ("Paris", "a\nb\tc", "\u6771\u4eac 2020", "3 < 4 > 2", "x [see 2]"):
        assert escape(text) == text


def test_right_and_wrong_answers_get_their_labels_from_three_equal_judges(tmp_path):
    found, generator = judged(tmp_path, fair_verdict, ["Paris", "Lyon", ""])
    assert [label.label for label in found.labels] == [True, False, False]
    assert found.labels[0].verdicts == ("correct",) * 3
    assert found.n_retried == found.n_unparsable == 0
    assert len(generator.asked) == 9


def strict_only(prompt):
    """Say correct under the strict rubric alone."""
    return "Correct" if prompt.startswith(RUBRICS[0].opening) else "Incorrect"


def test_disagreement_drops_a_label_and_the_majority_keeps_it(tmp_path):
    found, _ = judged(tmp_path / "a", strict_only, ["Paris"])
    assert found.labels[0].label is None
    assert "1 of 3 say correct" in found.labels[0].reason
    found, _ = judged(tmp_path / "b", strict_only, ["Paris"], vote="majority")
    assert found.labels[0].label is False
    assert "majority: 2 of 3 say incorrect" in found.labels[0].reason


def test_verdicts_stand_in_the_order_of_the_rubrics(tmp_path):
    found, _ = judged(tmp_path, strict_only, ["Paris"])
    assert found.labels[0].verdicts == ("correct", "incorrect", "incorrect")


@pytest.mark.parametrize(
    ("verdicts", "label"),
    [
        (("correct", "correct", "unparsable"), True),
        (("incorrect", "unparsable", "incorrect"), False),
        (("correct", "incorrect", "unparsable"), None),
        (("correct", "unparsable", "unparsable"), None),
        (("unparsable",) * 3, None),
        (("correct", "incorrect"), None),
    ],
)
def test_a_majority_is_more_than_half_of_all_verdicts(verdicts, label):
    assert consensus(verdicts, "majority")[0] is label


def test_an_unknown_vote_is_refused():
    with pytest.raises(ValueError, match="expected one of unanimous, majority"):
        consensus(("correct",), "plurality")


def test_an_unparsable_reply_is_asked_for_twice_more_then_kept_and_counted(tmp_path):
    found, generator = judged(tmp_path, lambda prompt: "Well, correct.", ["Paris"])
    assert found.labels[0].verdicts == ("unparsable",) * 3
    assert found.labels[0].label is None
    assert found.n_unparsable == 3
    assert found.n_retried == 6
    assert len(generator.asked) == len(set(generator.asked)) == 9
    assert found.counts()[0]["n_with_unparsable"] == 1


def test_a_reply_that_parses_at_the_second_attempt_counts(tmp_path):
    seen = []

    def stutters(prompt):
        seen.append(prompt)
        return "I think correct" if len(seen) <= 3 else "Correct"

    found, _ = judged(tmp_path, stutters, ["Paris"])
    assert found.labels[0].label is True
    assert found.n_retried == 3
    assert found.n_unparsable == 0


def test_a_reply_that_was_cut_is_no_verdict(tmp_path):
    class Cut(ScriptedGenerator):
        def stream(self, prompts, config, done=()):
            for i, _ in super().stream(prompts, config, done):
                yield i, generated("Correct", finish="length")

    found = judge_answers(
        [answer("Paris")],
        [example()],
        Cut(fair_verdict),
        Replies.open(tmp_path / "r.jsonl"),
        ConsensusConfig(),
    )
    assert found.labels[0].verdicts == ("unparsable",) * 3


def test_settings_and_variants_are_judged_and_counted_apart(tmp_path):
    answers = [
        answer("Paris"),
        answer("Lyon", "with_context"),
        answer("Paris", "with_context", "rewritten"),
    ]
    replies = Replies.open(tmp_path / "r.jsonl")
    judge = ScriptedGenerator(fair_verdict)
    found = judge_answers(answers, [example()], judge, replies, ConsensusConfig())
    assert [(label.key, label.label) for label in found.labels] == [
        (("q", "closed_book", "original"), True),
        (("q", "with_context", "original"), False),
        (("q", "with_context", "rewritten"), True),
    ]
    assert [row["n_correct"] for row in found.counts()] == [1, 0, 1]


def test_a_second_run_asks_nothing_and_says_the_same(tmp_path):
    first, _ = judged(tmp_path, fair_verdict, ["Paris", "Lyon"])
    again, generator = judged(tmp_path, fair_verdict, ["Paris", "Lyon"])
    assert generator.asked == []
    assert again == first


def test_another_judge_or_seed_asks_again(tmp_path):
    judged(tmp_path, fair_verdict, ["Paris"])
    _, generator = judged(tmp_path, fair_verdict, ["Paris"], seed=1)
    assert len(generator.asked) == 3
    other = ScriptedGenerator(fair_verdict, name="other")
    replies = Replies.open(tmp_path / "replies.jsonl")
    judge_answers([answer("Paris")], [example()], other, replies, ConsensusConfig())
    assert len(other.asked) == 3
    assert (replies.n_reused, replies.n_new) == (0, 3)


def test_a_file_cut_at_any_byte_is_completed_to_the_same_replies(tmp_path):
    whole, _ = judged(tmp_path, fair_verdict, ["Paris", "Lyon"])
    path = tmp_path / "replies.jsonl"
    content = path.read_bytes()
    last = content[:-1].rindex(b"\n") + 1
    for cut in range(last, len(content)):
        path.write_bytes(content[:cut])
        again, generator = judged(tmp_path, fair_verdict, ["Paris", "Lyon"])
        assert again == whole
        assert len(generator.asked) == 1
        assert path.read_bytes() == content
    assert path.with_name("replies.jsonl.truncated").exists()


def test_a_line_that_is_no_reply_is_named(tmp_path):
    path = tmp_path / "replies.jsonl"
    path.write_text('{"key": "k", "text": 3}\n')
    with pytest.raises(ValueError, match="line 1.*text.*expected str"):
        Replies.open(path)


def test_every_field_of_a_reply_survives_the_disk(tmp_path):
    reply = msgspec.structs.replace(
        generated("x"),
        token_ids=(1, 2),
        log_probs=(-0.5, -1e-7),
        stop_id=2,
        n_new_tokens=3,
    )

    class One(ScriptedGenerator):
        def stream(self, prompts, config, done=()):
            yield from ((i, reply) for i in range(len(prompts)) if i not in done)

    replies = Replies.open(tmp_path / "r.jsonl")
    config = ConsensusConfig(n_retries=0)
    judge_answers([answer("Paris")], [example()], One(None), replies, config)
    again = Replies.open(tmp_path / "r.jsonl").journal.values()
    assert {row.text_alone() for row in again} == {reply}


def test_rubrics_of_ones_own_are_asked_in_their_words_and_compared(tmp_path):
    rubrics = [
        Rubric(name=name, opening=f"Judge {name}ly.", rules="Say Correct or Incorrect.")
        for name in ("strict", "mild")
    ]

    def rule(prompt):
        return "Correct" if prompt.startswith("Judge mildly.") else "Incorrect"

    generator = ScriptedGenerator(rule)
    replies = Replies.open(tmp_path / "r.jsonl")
    answers, examples = [answer("Lyon")], [example()]
    found = judge_answers(
        answers, examples, generator, replies, ConsensusConfig(), rubrics=rubrics
    )
    assert found.labels[0].verdicts == ("incorrect", "correct")
    assert [prompt.split("\n")[0] for prompt in generator.asked] == [
        "Judge strictly.",
        "Judge mildly.",
    ]
    rows = join_labels(examples, answers, found.labels)
    (pair,) = between_judges(rows, rubrics=rubrics)
    assert (pair["first"], pair["second"], pair["n_agree"]) == ("strict", "mild", 0)
    with pytest.raises(ValueError, match="at least one rubric"):
        judge_answers(
            answers, examples, generator, replies, ConsensusConfig(), rubrics=()
        )
