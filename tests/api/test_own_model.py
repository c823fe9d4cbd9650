"""How `fit` prepares answers: splits of whole questions, and work done only once."""

from types import SimpleNamespace

import numpy as np
import pytest

import beatrice
from beatrice.extract.backbone.names import locked_folder
from beatrice.extract.generate.templates import PromptConfig, Shot
from beatrice.extract.records import Answer
from beatrice.extract.run.contents import read_examples
from beatrice.extract.run.directory import RunDir
from beatrice.extract.run.files import JsonLines
from beatrice.fitting import drawn_splits
from beatrice.jaxprobe.scope import Evidence, Validation, certified
from beatrice.own_model import (
    LabelledSignals,
    _counts_in_all,
    _store_name,
    answer_and_label,
    clear_work,
    decisions_in_words,
    read_given,
    split_answers,
    split_settings,
    without_worked_examples,
)
from beatrice.pgir.given import AnswerToScore
from tests.extract import small_run
from tests.extract.datasets.published import write_lines
from tests.records import an_example, labelled_rows


def test_every_split_has_its_share_of_right_answers_and_whole_questions():
    labels = np.arange(400) % 10 == 0
    splits = split_answers(labels, [str(i) for i in range(400)])
    for name, n in {"train": 200, "validation": 100, "test": 100}.items():
        assert (splits == name).sum() == n
        assert labels[splits == name].sum() == n // 10
    rng = np.random.default_rng(0)
    labels, questions = rng.random(400) < 0.4, [str(i % 80) for i in range(400)]
    splits = split_answers(labels, questions)
    assert {len(set(splits[k::80])) for k in range(80)} == {1}
    assert set(splits) == {"train", "validation", "test"}
    # Two answers each: one in ten questions has both right, the others have one.
    labels = np.concatenate([np.arange(400) % 10 == 0, np.ones(400, bool)])
    names = [f"Who wrote book {i}?" for i in range(400)]
    twins = [name.lower().rstrip("?") + " ?" for name in names]
    splits = split_answers(labels, names + twins)
    assert (splits[:400] == splits[400:]).all()
    assert (labels[:400] & (splits[:400] == "test")).sum() == 10


def answered(labels, questions):
    return LabelledSignals(
        questions, [()] * len(questions), [], None, np.asarray(labels)
    )


def test_a_setting_of_too_few_answers_or_questions_is_left_out_or_refused():
    names = [str(i) for i in range(200)]
    two = answered(np.arange(400) % 5 < 2, [str(i % 2) for i in range(400)])
    expected = "160 right and 240 wrong answers from memory to 2 questions"
    with pytest.raises(ValueError, match=expected):
        split_settings({"closed_book": two}, print)
    enough = answered(np.arange(200) % 2 == 0, names)
    few = answered(np.arange(320) % 16 < 8, [str(i % 16) for i in range(320)])
    for other, counts in (
        (answered([True] * 200, names), "200 right and 0 wrong answers with passages"),
        (few, "160 right and 160 wrong answers with passages to 16 questions"),
    ):
        notes = []
        both = {"closed_book": enough, "with_context": other}
        assert list(split_settings(both, notes.append)) == ["closed_book"]
        assert len(notes) == 1 and counts in notes[0]
    parts = split_settings(dict.fromkeys(both, enough), notes.append)
    assert (parts["closed_book"].splits == parts["with_context"].splits).all()
    assert len(notes) == 1


def test_more_answers_are_asked_for_only_where_there_are_too_few():
    parts = {"closed_book": answered(np.arange(200) < 20, [])}
    texts = []
    for n in (9, 10):
        evidence = Evidence(train=(40, 40), validation=(n, n), auroc=(0.4, 0.6))
        heads = {"closed_book": SimpleNamespace(evidence=evidence)}
        probe = SimpleNamespace(detector=SimpleNamespace(heads=heads))
        texts.append(_counts_in_all(probe, parts))
    counts = "there are 20 right and 180 wrong answers in all"
    enough = "40 of each are enough, at this rate from about 400 questions"
    assert texts == [f"{counts}, and {enough}", counts]


def test_a_question_that_the_prompt_answers_is_left_out_and_counted(tmp_path):
    asked = [an_example(id=f"q{i}", question=f"Who wrote {i}?") for i in range(3)]
    shots, notes = [Shot(question="who wrote 1", answer="me")], []
    kept = without_worked_examples(asked, shots, notes.append)
    assert [question.id for question in kept] == ["q0", "q2"]
    assert len(notes) == 1 and notes[0].endswith(": 1 of 3")
    assert without_worked_examples(asked, [], notes.append) == asked
    model = SimpleNamespace(prompt=PromptConfig(template="few-shot", shots=(*shots,)))
    with pytest.raises(ValueError, match="all questions .1. are worked examples"):
        answer_and_label(model, asked[1:2], tmp_path, notes.append)
    assert len(notes) == 1


def test_the_answers_that_a_forecast_is_based_on_are_not_written_again(tmp_path):
    model, sizes, notes = beatrice.LanguageModel("embedded"), [], []
    texts = [f"Where was person {i} born?" for i in range(60)]
    decoder = model.backbone.layout.decoder
    decoder.register_forward_pre_hook(
        lambda module, args, kwargs: sizes.append(kwargs["input_ids"].numel()),
        with_kwargs=True,
    )
    alone, _ = model.answer(texts, read=True)
    n_positions = sum(sizes)
    sizes.clear()
    asked = [an_example(id=f"q{i}", question=x) for i, x in enumerate(texts)]
    with pytest.raises(ValueError, match="too few to fit: 0 right and 60 wrong"):
        answer_and_label(model, asked, tmp_path, notes.append)
    assert "by the first 50" in notes[0]
    assert sum(sizes) < 1.3 * n_positions  # 1 + 49 + 10 fill batches less than 60
    (written,) = tmp_path.glob("*.written")
    rows = JsonLines.open(written / "answers.jsonl").intact_rows(Answer)
    assert [row.text for row in rows] == [answer.text for answer in alone]


def test_answers_with_other_stop_tokens_are_not_resumed(tmp_path):
    model, store = beatrice.LanguageModel("embedded"), tmp_path / "signals"
    question = an_example(question="Where was Skiband born?")
    options = {"max_new_tokens": 1, "read": True, "store": store}
    name = _store_name(model, ["asked"])
    assert _store_name(model, ["asked"]) == name
    model.answer([question], **options)
    model.backbone.model.generation_config.eos_token_id = 5
    assert _store_name(model, ["asked"]) != name
    with pytest.raises(ValueError, match="other content"):
        model.answer([question], **options)


def test_labelled_answers_that_were_read_are_not_read_again(tmp_path):
    model, passes = beatrice.LanguageModel("embedded"), []
    texts = [f"Where was person {i} born?" for i in range(24)]
    answers = [AnswerToScore(question=text, answer="x") for text in texts]
    rows = [(answer, i % 2 == 0, "") for i, answer in enumerate(answers)]
    decoder = model.backbone.layout.decoder
    decoder.register_forward_pre_hook(lambda *_: passes.append(1))
    read_given(model, rows, tmp_path, print)
    n_passes = len(passes)
    read_given(model, rows, tmp_path, print)
    assert 0 < n_passes == len(passes)
    with locked_folder(tmp_path):
        clear_work(tmp_path)  # a saved probe does not need it
    assert not tmp_path.exists()


def test_prompts_are_answered_by_length_and_signals_keep_the_given_order(tmp_path):
    model, store = beatrice.LanguageModel("embedded"), tmp_path / "signals"
    texts = [f"Where was {'very ' * (i * 7 % 30)}{i} born?" for i in range(300)]
    options = {"max_new_tokens": 1, "read": True, "store": store}
    answers, signals = model.answer(texts, **options)
    lines = JsonLines.open(tmp_path / "signals.written" / "answers.jsonl")
    lengths = [len(row.prompt_ids) for row in lines.intact_rows(Answer)]
    assert lengths == sorted(lengths, reverse=True) and len({*lengths}) > 20
    assert list(signals.ids) == [answer.example_id for answer in answers]


def test_repeating_labelled_answers_adds_no_evidence(smoke_run, tmp_path):
    examples = read_examples(RunDir(smoke_run))[:120]
    rows = [row for example in examples for row in labelled_rows(example)]
    evidence, intervals = [], []
    for n_times in (1, 4):
        path = write_lines(tmp_path / "labelled.jsonl", rows * n_times)
        probe = tmp_path / f"probe-{n_times}"
        words = ("embedded", "--labelled", path, probe, "--untrustworthy")
        small_run.beatrice("fit", *words)
        loaded = beatrice.load(probe)
        head = loaded.detector.heads["closed_book"]
        evidence.append((head.evidence.validation, len(head.validation.labels)))
        of = loaded.report[loaded.report.metric == "auroc of length alone"]
        intervals.append(float((of.ci_high - of.ci_low).iloc[0]))
    assert evidence[0] == evidence[1]
    assert intervals[0] == pytest.approx(intervals[1], abs=0.02)


def test_held_out_decisions_are_counted_with_those_that_are_right():
    labels = np.arange(200) >= 100
    both = certified(Validation(np.repeat([0.1, 0.9], 100), labels), 0.9)
    p_correct = np.array([0.05, 0.1, 0.1, 0.5, 0.9, 0.95])
    right = np.array([False, False, True, True, True, False])
    assert decisions_in_words(both, p_correct, right) == (
        "at precision 0.9: 3 trusted, of them right: 2; 3 distrusted, of them wrong: 2"
    )
    none = certified(Validation(p_correct, right), 0.9)
    assert decisions_in_words(none, p_correct, right) == (
        "at precision 0.9: 0 trusted; 0 distrusted"
    )


@pytest.mark.parametrize("n", [2, 4, 5])
def test_each_of_a_few_unlike_groups_validates_under_some_seeds(n):
    names, number = np.divmod(np.arange(n * n), n)
    labels = number < names  # group k has k right answers
    truth = {"closed_book": (labels, np.ones(n * n, bool))}
    n_times = np.zeros(n)
    for seed in range(100):
        (splits,) = drawn_splits({"closed_book": names}, truth, seed).values()
        drawn = np.unique(names[splits == "validation"])
        n_times[drawn] += 1
        assert 1 <= len(drawn) < n
    assert n_times.min() > 15  # at least 30 are expected


def test_answers_without_a_label_do_not_change_how_many_wrong_ones_validate():
    names, is_labelled = {"closed_book": np.arange(1000)}, np.arange(1000) < 80
    truth = {"closed_book": (np.arange(1000) < 40, is_labelled)}
    for seed in range(20):
        (splits,) = drawn_splits(names, truth, seed).values()
        validation = np.flatnonzero((splits == "validation") & is_labelled)
        assert np.bincount(validation // 40).tolist() == [12, 12]


def test_groups_and_questions_are_matched_across_both_settings():
    lengths, rows = np.full(40, 2), np.ones((80, 2))
    spans = np.tile([[0, 1], [1, 1], [1, 2]], (40, 1, 1))
    from_arrays = beatrice.Signals.from_arrays
    passes = {
        "closed_book": from_arrays({"a": rows[::2]}),
        "with_context": from_arrays({"a": rows}, lengths=lengths, spans=spans),
    }
    labels = dict.fromkeys(passes, [True, False] * 20)
    numbers = dict(zip(passes, (np.arange(40), np.arange(40.0)), strict=True))
    parts = {"closed_book": ["train"] * 40, "with_context": ["validation"] * 40}
    with pytest.raises(ValueError, match="answers of '0' are in 'train'"):
        beatrice.fit(passes, labels, groups=numbers, splits=parts, progress=False)
    numbers["with_context"] += 100
    with pytest.raises(ValueError, match="put all answers to a question"):
        beatrice.fit(passes, labels, groups=numbers, progress=False)
