"""A run that cannot work says so early, in a sentence."""

import json
import shutil

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file

from beatrice.extract.backbone.loading import load_backbone
from beatrice.extract.backbone.names import WEIGHTS
from beatrice.extract.generate.answers import answer_shares, is_hedge, summarize_answers
from beatrice.extract.generate.generator import GeneratorPrompt, SamplingConfig
from beatrice.extract.generate.local import TransformersGenerator
from beatrice.extract.generate.prompts import AnswerConfig, GenerationConfig
from beatrice.extract.generate.templates import SHOTS, PromptConfig
from beatrice.extract.label.labels import shares_in_words, too_few_answers
from beatrice.extract.records import Label, read_records
from tests.extract.small_run import beatrice, make_run, questions
from tests.records import a_label, an_answer, an_example


@pytest.fixture(scope="module")
def examples():
    return questions()


def test_a_model_with_damaged_weights_answers_nothing(tmp_path, examples):
    model = tmp_path / "damaged"
    shutil.copytree(WEIGHTS, model)
    weights = load_file(model / "model.safetensors")
    name = next(name for name in weights if "layers.3.mlp" in name)
    weights[name][0, 0] = torch.nan
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})
    run = make_run(tmp_path / "run", examples, model).path
    done = beatrice("answer", run, code=1)
    assert "states of layer 3 are not finite in float32" in done.stderr
    assert "load them as float32" not in done.stderr
    # A judge's weights are not checked on loading; its first text shows the damage.
    generator = TransformersGenerator(backbone=load_backbone(model))
    with pytest.raises(ValueError, match="not finite, in float32: .* check them$"):
        dict(generator.stream([GeneratorPrompt(text="who?")], SamplingConfig()))
    assert not (run / "answers" / "answers.jsonl").exists()


def test_answers_cut_at_the_length_limit_are_counted_with_advice(tmp_path, examples):
    short = AnswerConfig(generation=GenerationConfig(max_new_tokens=1))
    run = make_run(tmp_path / "run", examples, answer=short).path
    done = beatrice("answer", run)
    assert "answer: closed_book: 18 answers, 18 cut at 1 tokens, 0 empty" in done.stderr
    assert "--max-new-tokens above 1" in done.stderr


@pytest.mark.parametrize(
    ("prompt", "left"),
    [
        (PromptConfig(chat=True), {"--template"}),
        (PromptConfig(template="few-shot", shots=SHOTS), {"--chat"}),
        (PromptConfig(template="few-shot", shots=SHOTS, chat=True), set()),
        (PromptConfig(), {"--chat", "--template"}),
    ],
)
def test_advice_on_cut_answers_leaves_out_what_was_already_done(prompt, left):
    (line,) = summarize_answers([an_answer(stop_id=None)] * 3, 7, prompt)
    advice = line.partition("Make another run with")[2]
    assert "--max-new-tokens above 7" in advice
    assert {x for x in ("--chat", "--template") if x in advice} == left


def test_cut_answers_and_hedges_are_counted_and_only_all_empty_ones_refused():
    answers = [an_answer() for _ in range(19)] + [an_answer(stop_id=None, text="")]
    assert summarize_answers(answers, 7, PromptConfig()) == [
        "closed_book: 20 answers, 1 cut at 7 tokens, 1 empty, 0 hedges or refusals"
    ]
    answers = [an_answer(text=x) for x in ("Oslo", "I do not know", "unclear", "")]
    (line,) = summarize_answers(answers, 7, PromptConfig())
    assert line.endswith("4 answers, 0 cut at 7 tokens, 1 empty, 2 hedges or refusals")
    assert answer_shares(answers) == {"cut_off": 0.0, "empty": 0.25, "hedged": 0.5}
    with pytest.raises(ValueError, match="all 3 answers are empty"):
        summarize_answers([an_answer(text="")] * 3, 10, PromptConfig())


@pytest.mark.parametrize(
    ("text", "counts"),
    [
        ("I don't know.", True),
        ("I don’t know", True),
        (" Unknown", True),
        ("I cannot answer that", True),
        ("As an AI language model, I", True),
        ("It depends on the edition", True),
        ("The answer is not mentioned in the passage.", True),
        ("None", True),
        ("The Unknown Soldier", False),
        ("Unknown Pleasures", True),  # a list of words does not recognise a title
        ("None of the above albums", False),
        ("Sorrento", False),
        ("Paris", False),
        ("", False),
    ],
)
def test_hedges_and_refusals_are_recognised_by_how_an_answer_begins(text, counts):
    assert is_hedge(text) == counts


def test_labels_report_the_right_answers_and_splits_of_only_one_class():
    examples, labels, others = [], [], []
    for split in ("train", "validation", "test"):
        for i in range(20):
            x = f"{split}-{i}"
            examples.append(an_example(id=x, split=split))
            labels.append(a_label(split != "validation" and i % 10 == 0, example_id=x))
            others.append(a_label(i % 2 == 0, example_id=x, setting="with_context"))
    labels[0] = msgspec.structs.replace(labels[0], label=None)
    first, warned, one_class, complete, few = shares_in_words(examples, labels + others)
    assert first == "closed_book: 3 of 59 answers correct (5.1 %), 1 without a label"
    assert warned.startswith("closed_book, train: 1 correct and 18 incorrect")
    assert one_class.startswith("closed_book, validation: 0 of 20 labelled answers are")
    assert "one class alone" in one_class
    assert complete == "with_context: 30 of 60 answers correct (50.0 %)"
    assert few.startswith("with_context, train: 10 correct and 10 incorrect")


@pytest.mark.parametrize(
    ("n_correct", "n_wrong", "is_enough"),
    [(150, 150, True), (149, 900, False), (900, 149, False)],
)
def test_a_setting_with_fewer_than_150_of_either_class_cannot_conclude(
    n_correct, n_wrong, is_enough
):
    n = n_correct + n_wrong
    row = {"split": "train", "setting": "closed_book", "variant": "original"}
    row |= {"n": n - 100, "n_correct": n_correct - 50, "dataset": "nq"}
    more = row | {"n": 100, "n_correct": 50, "dataset": "triviaqa"}
    # Neither other splits nor other wordings of the same questions make it enough.
    others = [row | {"split": "test"}, row | {"variant": "rewritten"}]
    result = too_few_answers([row, more, *others])
    assert (result == {}) == is_enough
    if not is_enough:
        message = f"{n_correct} correct and {n_wrong} incorrect training answers"
        assert message in result["closed_book"]
        assert "cannot conclude" in result["closed_book"]


def test_labels_of_one_class_are_warned_of_and_never_trained_on(tmp_path, examples):
    hopeless = [msgspec.structs.replace(e, golds=("zzz",)) for e in examples]
    run = make_run(tmp_path / "run", hopeless).path
    beatrice("answer", run)
    done = beatrice("label", run)
    assert "closed_book, train: 0 of 4 labelled answers are correct" in done.stderr
    assert "for instance, 'wh" in done.stderr and "golds are 'zzz'" in done.stderr
    stopped = beatrice("extract", run, code=1).stderr
    assert "closed_book, train: 0 of 4" in stopped and "one class" in stopped
    labels = (run / "labels.jsonl").rename(tmp_path / "labels.jsonl")
    beatrice("extract", run)
    labels.rename(run / "labels.jsonl")
    assert "one class" in beatrice("sweep", run, code=1).stderr
    (run / "sweep.json").write_text(json.dumps({"layer": 1, "settings": {}}))
    done = beatrice("train", run, code=1)
    # Both settings are trained at once, and either may be the first to fail.
    assert "labelled training answers are correct, but both" in done.stderr


def test_answers_beyond_the_gold_are_right_only_by_containment(tmp_path, examples):
    golds = ("Falls", "Works", "Academy")  # last words of names, never a whole answer
    named = [msgspec.structs.replace(e, golds=golds) for e in examples]
    run = make_run(tmp_path / "run", named).path
    beatrice("answer", run)

    def labels():
        return [x.label for x in read_records(run / "labels.jsonl", Label)]

    assert "by exact match" in beatrice("label", run).stderr
    assert not any(labels())
    assert "by containment" in beatrice("label", run, "--match", "containment").stderr
    assert any(labels())
    assert "already done" in beatrice("label", run).stderr
    sections = json.loads((run / "manifest.json").read_text())["sections"]
    assert sections["label"] == {"match": "containment"}
    result = json.loads(beatrice("label", run, "--audit", "--json").stdout)
    assert result["label_rule"] == "containment"
    assert "by exact match" in beatrice("label", run, "--match", "exact").stderr
    assert not any(labels())
