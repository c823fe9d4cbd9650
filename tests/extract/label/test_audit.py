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

from extract.label.annotation import (
    draw_sample,
    noise_in_words,
    read_annotations,
    sample_csv,
    write_sample,
)
from extract.label.audit import (
    _kappas,
    against_exact_match,
    agreement,
    between_judges,
    disagreements,
    join_labels,
)
from extract.label.verdicts import consensus
from extract.records import Answer, Example, Label, Passage


def labelled(verdicts, texts=None, settings=("closed_book", "with_context")):
    """Return examples, answers and labels; the gold is always "yes"."""
    examples, answers, labels = [], [], []
    for i, votes in enumerate(verdicts):
        setting, text = settings[i % len(settings)], texts[i] if texts else "yes"
        key = {"example_id": f"q{i}", "setting": setting, "variant": "original"}
        examples.append(
            Example(
                id=f"q{i}", dataset="d", split="test", question="is it?", golds=("yes",)
            )
        )
        answers.append(
            Answer(
                **key,
                text=text,
                prompt_ids=(1,),
                token_ids=(2,),
                stop_id=0,
                context_span=(1, 1),
            )
        )
        label, reason = consensus(votes)
        labels.append(Label(**key, verdicts=votes, label=label, reason=reason))
    return examples, answers, labels


YES, NO = ("correct",) * 3, ("incorrect",) * 3
SPLIT = ("correct", "incorrect", "correct")
LOST = ("correct", "unparsable", "correct")


@given(st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=60))
def test_kappa_is_agreement_beyond_chance_and_undefined_for_one_class(pairs):
    first, second = zip(*pairs, strict=True)
    found = agreement(pairs, n_bootstrap=10)
    if found.kappa is None:
        assert set(first) == set(second) and len(set(first)) == 1
    else:
        p, q = np.mean(first), np.mean(second)
        chance = p * q + (1 - p) * (1 - q)
        expected = (found.rate - chance) / (1 - chance)
        assert found.kappa == pytest.approx(expected, abs=1e-12)


def test_the_interval_is_that_of_resampling_items_one_by_one():
    rng = np.random.default_rng(1)
    first = rng.random(100) < 0.5
    second = np.where(rng.random(100) < 0.1, ~first, first)
    pairs = list(zip(first.tolist(), second.tolist(), strict=True))
    found = agreement(pairs, n_bootstrap=20_000)
    drawn = rng.integers(0, 100, (20_000, 100))
    a, b = first[drawn], second[drawn]
    cells = [(a & b), (a & ~b), (~a & b), (~a & ~b)]
    kappas = _kappas(np.stack([cell.sum(axis=1) for cell in cells], axis=-1))
    expected = np.quantile(kappas, (0.025, 0.975))
    # Two Monte Carlo estimates of the same quantiles; 0.02 is four standard errors.
    assert (found.ci_low, found.ci_high) == pytest.approx(tuple(expected), abs=0.02)
    assert found.ci_low < found.kappa < found.ci_high


def test_resampled_kappas_are_those_of_scikit_learn():
    tables = np.array([[5, 0, 0, 5], [4, 4, 4, 4], [0, 5, 5, 0], [9, 2, 1, 3]])
    one_by_one = [
        cohen_kappa_score([1, 1, 0, 0], [1, 0, 1, 0], sample_weight=table)
        for table in tables
    ]
    assert _kappas(tables) == pytest.approx(one_by_one)
    assert one_by_one[:3] == pytest.approx([1.0, 0.0, -1.0])
    assert np.isnan(_kappas(np.array([[3, 0, 0, 0]]))).all()


def test_one_class_has_no_kappa_but_a_reason():
    found = agreement([(True, True)] * 4)
    assert (found.kappa, found.ci_low, found.rate) == (None, None, 1.0)
    assert "one class" in found.reason
    assert agreement([]).reason == "no items"
    assert "undefined" in found.in_words()


def test_resamples_without_a_kappa_are_counted():
    found = agreement([(True, True)] * 2 + [(False, False)], n_bootstrap=5000)
    # All three draws from one class: 8/27 + 1/27.
    assert found.n_undefined / 5000 == pytest.approx(1 / 3, abs=0.03)
    assert found.ci_low == found.ci_high == 1.0


def test_every_kind_of_disagreement_is_listed_and_agreement_is_not():
    rows = join_labels(
        *labelled(
            [YES, NO, YES, NO, SPLIT, LOST], ["yes", "no", "yep", "yes", "yes", "yes"]
        )
    )
    assert [(d["example_id"], d["kind"]) for d in disagreements(rows)] == [
        ("q2", "judge_only"),
        ("q3", "exact_match_only"),
        ("q4", "dropped"),
        ("q5", "unparsable"),
    ]


def test_agreement_with_exact_match_is_over_kept_labels_and_per_group():
    rows = join_labels(
        *labelled([YES, NO, YES, NO, SPLIT], ["yes", "no", "yep", "no", "no"])
    )
    overall, *groups = against_exact_match(rows)
    assert (overall["n_answers"], overall["n_dropped"]) == (5, 1)
    assert (overall["n"], overall["n_agree"]) == (4, 3)
    assert {g["setting"]: g["n"] for g in groups} == {
        "closed_book": 2,
        "with_context": 2,
    }


def test_rubrics_are_compared_pairwise_without_unparsable_verdicts():
    rows = join_labels(*labelled([YES, NO, SPLIT, LOST]))
    pairs = between_judges(rows)
    assert [(p["n"], p["n_agree"], p["n_unparsable"]) for p in pairs] == [
        (3, 2, 1),
        (4, 4, 0),
        (3, 2, 1),
    ]
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


def test_a_sample_is_seeded_even_over_settings_and_without_dropped_answers():
    rows = many()
    sample = draw_sample(rows, 100, seed=3)
    settings = [row.label.setting for row in sample]
    assert len({row.label.key for row in sample}) == 100
    assert settings.count("closed_book") == settings.count("with_context") == 50
    assert draw_sample(rows, 100, seed=3) == sample
    assert draw_sample(rows, 100, seed=4) != sample
    dropped = join_labels(*labelled([SPLIT, YES, NO]))
    assert {row.example.id for row in draw_sample(dropped, 100)} == {"q1", "q2"}


def test_half_of_a_sample_is_labelled_right_and_half_wrong():
    labels = [row.label.label for row in draw_sample(many(), 100)]
    assert labels.count(True) == labels.count(False) == 50


def test_evaluated_answers_are_drawn_where_there_are_any():
    rows = [
        dataclasses.replace(row, example=msgspec.structs.replace(row.example, split=s))
        for row, s in zip(many(120), ["train", "test", "ood"] * 40, strict=True)
    ]
    assert {row.example.split for row in draw_sample(rows, 60)} == {"test", "ood"}


def test_planted_label_noise_is_found_and_weighted_by_how_many_have_each_label(
    tmp_path,
):
    rows, path = many(), tmp_path / "sample.csv"  # two in three are labelled right
    write_sample(path, draw_sample(rows, 100))
    n_wrong = itertools.count()

    def decide(i, row):
        is_slip = row["answer"] == "no" and next(n_wrong) % 5 == 0  # ten of fifty
        return "correct" if row["answer"] == "yes" or is_slip else "incorrect"

    filled(path, decide)
    found = read_annotations(path, rows)
    by_label = {
        x: [one for one in found.noise if one.label is x] for x in (True, False)
    }
    assert sum(one.n_disputed for one in by_label[True]) == 0
    assert sum(one.n_disputed for one in by_label[False]) == 10
    for one in found.noise:
        # Wilson 1927: where the score test of a share has |z| = 1.96.
        for p in (one.ci_low, one.ci_high):
            z = (one.n_disputed / one.n - p) / max(1e-12, p * (1 - p) / one.n) ** 0.5
            assert p == pytest.approx(0, abs=1e-9) or abs(z) == pytest.approx(
                1.96, abs=1e-3
            )
    shares = [
        float(re.search(r"([\d.]+) % mislabelled", line)[1])
        for line in noise_in_words(found.noise)
        if "all answers" in line
    ]
    assert len(shares) == 2 and np.mean(shares) == pytest.approx(100 / 15, abs=0.1)
    assert len(found.verdicts) == 100


def test_the_sample_shows_the_passages_that_the_model_saw():
    (closed, shown), (first, second) = many(2), ("seen", "left out")
    passages = tuple(
        Passage(title=x, text=x, is_supporting=True) for x in (first, second)
    )
    example = msgspec.structs.replace(shown.example, passages=passages)
    answer = msgspec.structs.replace(shown.answer, dropped=(1,))
    shown = dataclasses.replace(shown, example=example, answer=answer)
    found = list(csv.DictReader(io.StringIO(sample_csv([closed, shown]))))
    assert [row["passages"] for row in found] == ["", "seen: seen"]


def test_a_small_setting_is_filled_up_from_the_other():
    rows = join_labels(*labelled([YES] * 9, settings=("closed_book",) * 8 + ("x",)))
    assert len(draw_sample(rows, 6)) == 6


def test_the_sample_shows_no_verdict():
    text = sample_csv(draw_sample(many(), 20))
    header, *rows = csv.reader(io.StringIO(text))
    assert header[-1] == "human"
    assert all(row[-1] == "" for row in rows)
    assert "correct" not in text


def filled(path, decide, **replacements):
    """Fill the column `human` as a person would."""
    rows = list(csv.DictReader(io.StringIO(path.read_text())))
    for i, row in enumerate(rows):
        row["human"] = decide(i, row)
        row.update(replacements if i == 0 else {})
    with path.open("w", newline="") as stream:
        writer = csv.DictWriter(stream, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)


def test_a_person_who_agrees_has_kappa_one_and_empty_cells_are_counted(tmp_path):
    rows, path = many(), tmp_path / "sample.csv"
    write_sample(path, draw_sample(rows, 100))
    filled(
        path,
        lambda i, row: (
            "" if i < 10 else "Correct" if row["answer"] == "yes" else " incorrect."
        ),
    )
    found = read_annotations(path, rows)
    assert found.n_empty == 10
    assert (found.judge.n, found.judge.kappa) == (90, 1.0)
    assert found.exact.kappa == 1.0


def test_planted_slips_of_a_person_lower_kappa_as_scikit_learn_says(tmp_path):
    rows, path = many(), tmp_path / "sample.csv"
    write_sample(path, draw_sample(rows, 100))

    def decide(i, row):
        right = (row["answer"] == "yes") != (i in (5, 50))
        return "correct" if right else "incorrect"

    filled(path, decide)
    found = read_annotations(path, rows).judge
    answers = [r["answer"] for r in csv.DictReader(io.StringIO(path.read_text()))]
    judge = [text == "yes" for text in answers]
    human = [right != (i in (5, 50)) for i, right in enumerate(judge)]
    assert found.n_agree == 98
    assert found.kappa == pytest.approx(cohen_kappa_score(human, judge))
    assert found.ci_low < found.kappa


def test_a_spreadsheets_semicolons_and_byte_order_mark_are_read(tmp_path):
    rows, path = many(), tmp_path / "sample.csv"
    write_sample(path, draw_sample(rows, 10))
    filled(path, lambda i, row: "correct")
    table = list(csv.reader(io.StringIO(path.read_text())))
    with path.open("w", newline="", encoding="utf-8-sig") as stream:
        csv.writer(stream, delimiter=";").writerows(table)
    assert read_annotations(path, rows).judge.n == 10


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"human": "perhaps"}, "correct, incorrect or empty"),
        ({"example_id": "nobody"}, "no labelled answer"),
        ({"check": "c0"}, "another question, gold or answer"),
    ],
)
def test_a_wrong_annotation_is_refused_with_its_row(tmp_path, change, words):
    rows, path = many(), tmp_path / "sample.csv"
    write_sample(path, draw_sample(rows, 10))
    filled(path, lambda i, row: "correct", **change)
    with pytest.raises(ValueError, match=f"row 1.*{words}"):
        read_annotations(path, rows)


def test_an_item_twice_and_a_missing_column_are_refused(tmp_path):
    rows, path = many(), tmp_path / "sample.csv"
    write_sample(path, draw_sample(rows, 10))
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([*lines, lines[1]]))
    with pytest.raises(ValueError, match="row 11.*twice"):
        read_annotations(path, rows)
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ValueError, match="found no 'item'"):
        read_annotations(path, rows)


def test_a_filled_sample_is_never_overwritten(tmp_path):
    rows, path = many(), tmp_path / "sample.csv"
    write_sample(path, draw_sample(rows, 10))
    filled(path, lambda i, row: "correct")
    content = path.read_bytes()
    write_sample(path, draw_sample(rows, 10))
    assert path.read_bytes() == content
    with pytest.raises(ValueError, match="another sample"):
        write_sample(path, draw_sample(rows, 10, seed=9))


def test_no_cell_is_taken_for_a_formula_and_it_is_found_again(tmp_path):
    rows = join_labels(*labelled([YES, NO], ['=HYPERLINK("x")', "-1"]))
    path = tmp_path / "sample.csv"
    write_sample(path, draw_sample(rows, 2))
    cells = {r["answer"] for r in csv.DictReader(io.StringIO(path.read_text()))}
    assert cells == {'\'=HYPERLINK("x")', "'-1"}
    filled(path, lambda i, row: "correct")
    assert read_annotations(path, rows).judge.n == 2
