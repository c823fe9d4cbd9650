"""How far labels can be trusted: agreement, and a sample for a person to judge."""

import collections
import csv
import dataclasses
import io
import itertools
import re

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import cohen_kappa_score

from beatrice.extract.label.labels import consensus
from beatrice.extract.label.stage import (
    against_exact_match,
    agreement,
    between_judges,
    disagreements,
    draw_sample,
    join_labels,
    kappas,
    noise_in_words,
    read_annotations,
    write_sample,
)
from beatrice.extract.records import SETTINGS, Passage
from tests.records import a_label, an_answer, an_example


def labelled(verdicts, texts=None, settings=SETTINGS):
    """Return examples, answers and labels; the gold is always "yes"."""
    examples, answers, labels = [], [], []
    for i, votes in enumerate(verdicts):
        setting, text = settings[i % len(settings)], texts[i] if texts else "yes"
        key = {"example_id": f"q{i}", "setting": setting}
        examples.append(an_example(id=f"q{i}", question="is it?", golds=("yes",)))
        answers.append(an_answer(**key, text=text))
        label, reason = consensus(votes)
        labels.append(a_label(label, **key, verdicts=votes, reason=reason))
    return examples, answers, labels


YES, NO = ("correct",) * 3, ("incorrect",) * 3
SPLIT = ("correct", "incorrect", "correct")
LOST = ("correct", "unparsable", "correct")


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=60))
def test_kappa_is_that_of_scikit_learn_and_undefined_for_one_class(pairs):
    result, raters = agreement(pairs), list(zip(*pairs, strict=True))
    if len({*raters[0], *raters[1]}) == 1:
        assert result.kappa is None
    else:
        assert result.kappa == pytest.approx(cohen_kappa_score(*raters), abs=1e-12)


def test_the_interval_covers_that_of_resampling_questions_one_by_one():
    rng = np.random.default_rng(1)
    first = rng.random(100) < 0.5
    second = np.where(rng.random(100) < 0.1, ~first, first)
    pairs = list(zip(first.tolist(), second.tolist(), strict=True))
    result = agreement(pairs)
    a, b = np.stack([first, second])[:, rng.integers(0, 100, (20_000, 100))]
    cells = [(a & b), (a & ~b), (~a & b), (~a & ~b)]
    drawn_kappas = kappas(np.stack([cell.sum(axis=1) for cell in cells], axis=-1))
    expected = np.quantile(drawn_kappas, (0.025, 0.975))
    # Two Monte Carlo estimates of the same quantiles; 0.02 is four standard errors.
    assert result.ci_high == pytest.approx(expected[1], abs=0.02)
    assert result.ci_low < expected[0] < result.kappa  # Wilson's lies lower here
    thrice = agreement(
        pairs * 3, [f"q{i}" for i in range(100)] * 3
    )  # three answers to each question
    assert (thrice.ci_low, thrice.ci_high) == (result.ci_low, result.ci_high)


def test_one_class_gives_a_reason_for_no_kappa_and_such_resamples_are_counted():
    result = agreement([(True, True)] * 4)
    assert (result.kappa, result.ci_low, result.n_agree) == (None, None, 4)
    assert "one class" in result.reason and "undefined" in result.in_words()
    assert agreement([]).reason == "no items"
    result = agreement([(True, True)] * 2 + [(False, False)])
    # All three draws from one class: 8/27 + 1/27.
    assert result.n_undefined / result.n_bootstrap == pytest.approx(1 / 3, abs=0.03)
    # All defined resamples agree, but Wilson's interval of 3 in 3 begins at .4385.
    low = (0.4385 - 5 / 9) / (1 - 5 / 9)
    assert (result.ci_low, result.ci_high) == pytest.approx((low, 1.0), abs=1e-3)


def test_labels_are_compared_with_exact_match_and_rubrics_with_each_other():
    votes = [YES, NO, YES, NO, SPLIT, LOST]
    rows = join_labels(*labelled(votes, ["yes", "no", "yep", "yes", "yes", "yes"]))
    kinds = {d["example_id"]: d["kind"] for d in disagreements(rows)}
    assert list(kinds) == ["q2", "q3", "q4", "q5"]
    assert " ".join(kinds.values()) == "judge_only exact_match_only dropped unparsable"
    overall, *groups = against_exact_match(rows)
    counts = ("n_answers", "n_dropped", "n_unparsable_verdicts", "n", "n_agree")
    assert [overall[name] for name in counts] == [6, 2, 1, 4, 2]
    assert {g["setting"]: g["n"] for g in groups} == dict.fromkeys(SETTINGS, 2)
    pairs = [(p["n"], p["n_agree"], p["n_unparsable"]) for p in between_judges(rows)]
    assert pairs == [(5, 4, 1), (6, 6, 0), (5, 4, 1)]
    assert between_judges(join_labels(*labelled([("correct",)]))) == []


def test_labels_and_answers_that_do_not_match_are_refused():
    examples, answers, labels = labelled([YES, NO])
    with pytest.raises(ValueError, match="has no label"):
        join_labels(examples, answers, labels[:1])
    with pytest.raises(ValueError, match="has no answer"):
        join_labels(examples, answers[:1], labels)


def many(n=300):
    votes = [YES if i % 3 else NO for i in range(n)]
    return join_labels(*labelled(votes, ["yes" if i % 3 else "no" for i in range(n)]))


def test_a_sample_is_seeded_and_even_over_settings_and_labels():
    rows = many()
    sample = draw_sample(rows, 100, seed=3)
    assert len({row.label.key for row in sample}) == 100
    kinds = collections.Counter((x.label.setting, x.label.label) for x in sample)
    assert set(kinds.values()) == {25} and len(kinds) == 4
    assert draw_sample(rows, 100, seed=3) == sample
    assert draw_sample(rows, 100, seed=4) != sample


def test_a_sample_takes_evaluated_labelled_answers_and_fills_up_small_groups():
    splits = ["train", "test", "ood"] * 40
    rows = [
        dataclasses.replace(row, example=msgspec.structs.replace(row.example, split=s))
        for row, s in zip(many(120), splits, strict=True)
    ]
    assert {row.example.split for row in draw_sample(rows, 60)} == {"test", "ood"}
    dropped = join_labels(*labelled([SPLIT, YES, NO]))
    assert {row.example.id for row in draw_sample(dropped, 100)} == {"q1", "q2"}
    uneven = join_labels(*labelled([YES] * 9, settings=("closed_book",) * 8 + ("x",)))
    assert len(draw_sample(uneven, 6)) == 6


def cells_of(path):
    text = path.read_bytes().decode("utf-8-sig")
    return list(csv.DictReader(io.StringIO(text, newline="")))


def test_the_sample_shows_the_passages_that_the_model_saw_and_no_verdict(tmp_path):
    closed, shown = many(2)
    path, long = tmp_path / "sample.csv", "a" * 200_000
    passages = tuple(Passage(title=x, text=long) for x in ("seen", "left out"))
    example = msgspec.structs.replace(shown.example, passages=passages)
    answer = msgspec.structs.replace(shown.answer, dropped=(1,))
    sample = [closed, dataclasses.replace(shown, example=example, answer=answer)]
    write_sample(path, sample, sample)
    assert path.read_bytes().startswith(b"\xef\xbb\xbf")  # else Excel guesses
    write_sample(path, sample, sample)  # reads it again
    cells = cells_of(path)
    assert [row["passages"] for row in cells] == ["", f"seen: {long}"]
    assert [row["human"] for row in cells] == ["", ""]
    assert "correct" not in path.read_text()


@pytest.fixture
def sample(tmp_path):
    """The rows of `many`, and a file with a hundred of them for a person to judge."""
    rows, path = many(), tmp_path / "sample.csv"
    write_sample(path, draw_sample(rows, 100), rows)
    return rows, path


def fill(path, decide=lambda i, row: "correct", **replacements):
    """Fill the column `human` as a person would."""
    rows = cells_of(path)
    for i, row in enumerate(rows):
        row["human"] = decide(i, row)
        row.update(replacements if i == 0 else {})
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def test_planted_label_noise_is_found_and_weighted_by_how_many_have_each_label(sample):
    rows, path = sample  # two in three are labelled right
    n_wrong = itertools.count()

    def decide(i, row):
        is_slip = row["answer"] == "no" and next(n_wrong) % 5 == 0  # ten of fifty
        return "correct" if row["answer"] == "yes" or is_slip else "incorrect"

    fill(path, decide)
    result = read_annotations(path, rows)
    disputed = collections.Counter()
    for item in result.noise:
        disputed[item.label] += item.n_disputed
        # Wilson 1927: the shares at which the score test has |z| = 1.96.
        for p in (item.ci_low, item.ci_high):
            z = (item.n_disputed / item.n - p) / max(1e-12, p * (1 - p) / item.n) ** 0.5
            assert p < 1e-9 or abs(z) == pytest.approx(1.96, abs=1e-3)
    assert disputed == {True: 0, False: 10}
    lines = [line for line in noise_in_words(result.noise) if "all answers" in line]
    shares = [float(re.search(r"([\d.]+) % mislabelled", x)[1]) for x in lines]
    assert len(shares) == 2 and np.mean(shares) == pytest.approx(100 / 15, abs=0.1)
    assert len(result.verdicts) == 100


def test_a_sample_drawn_by_other_labels_gives_no_noise_estimate(tmp_path):
    """The right answer is "yes"; unanimous judges drop what a majority mislabels."""
    votes = [(YES, NO, SPLIT)[i % 3] for i in range(300)]
    texts = [("yes", "no", "no")[i % 3] for i in range(300)]
    examples, answers, labels = labelled(votes, texts)
    path, by = tmp_path / "sample.csv", {}
    for vote in ("unanimous", "majority"):
        given = [
            msgspec.structs.replace(label, label=consensus(label.verdicts, vote)[0])
            for label in labels
        ]
        by[vote] = join_labels(examples, answers, given)

    def drawn_and_judged(vote):
        path.unlink(missing_ok=True)
        write_sample(path, draw_sample(by[vote], 100), by[vote])
        fill(path, lambda i, row: "correct" if row["answer"] == "yes" else "incorrect")

    drawn_and_judged("unanimous")
    assert not any(x.n_disputed for x in read_annotations(path, by["unanimous"]).noise)
    result = read_annotations(path, by["majority"])
    assert result.noise == () and result.judge.n_agree == result.judge.n == 100
    drawn_and_judged("majority")
    assert any(x.n_disputed for x in read_annotations(path, by["majority"]).noise)
    result = read_annotations(path, by["unanimous"])
    assert result.noise == () and result.n_empty == 0
    assert result.judge.n == 100 - result.n_dropped < 100
    # Files of earlier versions do not record by which labels they were drawn.
    drawn_and_judged("unanimous")
    path.write_text(re.sub(r"(c[0-9a-f]{12})-[0-9a-f]{8}", r"\1", path.read_text()))
    assert len(read_annotations(path, by["unanimous"]).noise) == 4


@pytest.mark.parametrize("slips", [(), (15, 50)])
def test_an_annotators_slips_lower_kappa_and_empty_cells_are_counted(sample, slips):
    rows, path = sample

    def decide(i, row):
        is_right = (row["answer"] == "yes") != (i in slips)
        return "" if i < 10 else "Correct" if is_right else " incorrect."

    fill(path, decide)
    result = read_annotations(path, rows)
    judge = [row["answer"] == "yes" for row in cells_of(path)][10:]
    human = [right != (i in slips) for i, right in enumerate(judge, start=10)]
    assert (result.n_empty, result.judge.n) == (10, 90)
    assert result.judge.n_agree == result.exact.n_agree == 90 - len(slips)
    assert result.judge.kappa == pytest.approx(cohen_kappa_score(human, judge))
    assert (result.judge.kappa == 1.0) == (slips == ())


def test_a_filled_sample_is_kept_and_read_as_a_spreadsheet_saves_it(sample):
    rows, path = sample
    fill(path)
    content = path.read_bytes()
    write_sample(path, draw_sample(rows, 100), rows)
    assert path.read_bytes() == content
    with pytest.raises(ValueError, match="another sample"):
        write_sample(path, draw_sample(rows, 100, seed=9), rows)
    table = list(csv.reader(io.StringIO(path.read_text())))
    with path.open("w", newline="", encoding="utf-8-sig") as stream:
        csv.writer(stream, delimiter=";").writerows(table)
    assert read_annotations(path, rows).judge.n == 100


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"human": "perhaps"}, "row 1.*correct, incorrect or nothing"),
        ({"example_id": "nobody"}, "row 1.*not an answer of this run"),
        ({"check": "c0"}, "row 1.*another question, gold or answer"),
        ("twice", "row 101.*twice"),
        ("columns", "found no 'item'"),
    ],
)
def test_a_wrong_annotation_is_refused_with_its_row(sample, change, words):
    rows, path = sample
    fill(path, **(change if isinstance(change, dict) else {}))
    lines = path.read_text().splitlines(keepends=True)
    if change == "twice":
        path.write_text("".join([*lines, lines[1]]))
    if change == "columns":
        path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match=words):
        read_annotations(path, rows)


def test_texts_are_kept_in_cells_and_no_cell_can_be_taken_for_a_formula(tmp_path):
    texts = ["a\rb", "a\r\nb", "a\nb", 'a\u2028"b"', '=HYPERLINK("x")', "-1"]
    rows, path = join_labels(*labelled([YES] * 6, texts)), tmp_path / "sample.csv"
    write_sample(path, rows, rows)
    write_sample(path, rows, rows)  # reads it again
    cells = [row["answer"] for row in cells_of(path)]
    assert cells == [*texts[:4], *(f"'{text}" for text in texts[4:])]
    fill(path)
    assert read_annotations(path, rows).judge.n == 6
