"""Real bytes of the six sets, against the facts in their description."""

import csv

import pytest

from beatrice.extract.datasets.loading import inspect_file, open_dataset
from beatrice.extract.label.labels import exact_match
from tests.extract.datasets.published import samples

# file: set, records, loaded, with passages, with gold passages
FACTS = {
    "hotpotqa/hotpot_dev_distractor_v1.sample200.json": ("hotpotqa", 200, 200, 200),
    "hotpotqa/distractor.validation.sample200.parquet": ("hotpotqa", 200, 200, 200),
    "hotpotqa/meve.hub_columnar.dev.100.json": ("hotpotqa", 100, 100, 100),
    "hotpotqa/react.hotpot_dev_v1_simplified.qa_only.json": ("hotpotqa", 7405, 7405, 0),
    "musique/musique_ans_v1.0_dev.sample200.jsonl": ("musique", 200, 200, 200),
    "musique/musique_ans_v1.0_train.sample100.jsonl": ("musique", 100, 100, 100),
    "musique/musique_full_v1.0_train.sample20.jsonl": ("musique", 20, 11, 11),
    "2wikimultihopqa/dev.sample164.json": ("2wikimultihopqa", 164, 164, 164),
    "2wikimultihopqa/dev.sample164.parquet": ("2wikimultihopqa", 164, 164, 164),
    "2wikimultihopqa/train.sample500.json": ("2wikimultihopqa", 500, 500, 500),
    "popqa/popQA.sample1000.tsv": ("popqa", 1000, 1000, 0),
    "popqa/neuropath.popqa.1000.with_paragraphs.json": ("popqa", 1000, 1000, 1000),
    "popqa/retrievalqa.popqa.50.with_retrieved_passages.jsonl": ("popqa", 50, 50, 0),
    "nq/NQ-open.dev.jsonl": ("nq", 3610, 3610, 0),
    "nq/NQ-open.efficientqa.dev.1.1.jsonl": ("nq", 1800, 1800, 0),
    "nq/NQ-open.efficientqa.test.1.1.jsonl": ("nq", 1769, 1769, 0),
    "nq/NQ-open.efficientqa.dev.1.1.no-annotations.sample.jsonl": ("nq", 100, 0, 0),
    "nq/dpr.nq-dev.qa.csv": ("nq", 8757, 8757, 0),
    "nq/dpr.nq-test.qa.csv": ("nq", 3610, 3610, 0),
    "nq/farm.biencoder-nq-dev.5.json": ("nq", 5, 5, 5),
    "nq/farm.nq_simplified.train_sample.jsonl": ("nq", 1, 0, 0),
    "nq/flashrag.nq_test.1000.jsonl": ("nq", 1000, 1000, 0),
    "nq/flashrag.nq_test.quickstart17.jsonl": ("nq", 17, 17, 0),
    "nq/nq-open-oracle.jsonl.gz": ("nq", 2655, 2655, 2655),
    "triviaqa/dpr.trivia-dev.qa.csv": ("triviaqa", 8837, 8837, 0),
    "triviaqa/dpr.trivia-test.qa.csv": ("triviaqa", 11313, 11313, 0),
    "triviaqa/flashrag.triviaqa_test.1000.jsonl": ("triviaqa", 1000, 1000, 0),
    "triviaqa/triviaqa_sample.json": ("triviaqa", 1, 1, 0),
    "triviaqa/allennlp_triviaqa-rc_sample/qa/web-dev.json": ("triviaqa", 2, 2, 2),
    "triviaqa/allennlp_triviaqa-rc_sample/qa/web-train.json": ("triviaqa", 3, 3, 3),
    "triviaqa/allennlp_triviaqa-rc_sample/qa/wikipedia-dev.json": ("triviaqa", 2, 2, 2),
    "triviaqa/allennlp_triviaqa-rc_sample/qa/wikipedia-train.json": (
        "triviaqa",
        4,
        4,
        4,
    ),
}


@pytest.mark.parametrize("name", FACTS)
def test_a_published_file_is_what_its_description_says(name):
    path = samples() / name
    if not path.exists():
        pytest.skip(f"{name} is not among the samples")
    report = inspect_file(path)
    dataset, records, loaded, gold = FACTS[name]
    assert report["dataset"] == dataset
    assert (report["records"], report["loaded"]) == (records, loaded)
    assert report["with_gold_passages"] == gold
    assert report["refused"] == records - loaded
    assert (report["error"] is None) == (loaded > 0)


def read(name):
    path = samples() / name
    if not path.exists():
        pytest.skip(f"{name} is not among the samples")
    return [found.question for found in open_dataset(path).read()]


def test_every_file_of_passages_is_refused_as_passages():
    for path in (samples() / "corpora").iterdir():
        assert "holds passages" in inspect_file(path)["error"]


def test_hotpotqa_has_two_gold_titles_each_and_17_yes_or_no_answers():
    found = read("hotpotqa/hotpot_dev_distractor_v1.sample200.json")
    for question in found:
        gold = {p.title for p in question.passages if p.is_supporting}
        assert len(gold) == 2
    assert sum(q.golds[0] in ("yes", "no") for q in found) == 17


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            "hotpotqa/hotpot_dev_distractor_v1.sample200.json",
            "hotpotqa/distractor.validation.sample200.parquet",
        ),
        (
            "2wikimultihopqa/dev.sample164.json",
            "2wikimultihopqa/dev.sample164.parquet",
        ),
    ],
)
def test_json_and_parquet_of_a_set_give_the_same_questions(one, other):
    assert read(one) == read(other)


def test_musique_has_60_questions_with_a_distractor_of_a_gold_title():
    found = read("musique/musique_ans_v1.0_dev.sample200.jsonl")
    n_same = n_repeated = 0
    for question in found:
        gold = {p.title for p in question.passages if p.is_supporting}
        others = [p.title for p in question.passages if not p.is_supporting]
        n_same += any(title in gold for title in others)
        n_repeated += len({p.title for p in question.passages}) < 20
    assert (n_same, n_repeated) == (60, 113)


def test_twowiki_has_two_gold_titles_or_four():
    for name in ("dev.sample164.json", "train.sample500.json"):
        for question in read(f"2wikimultihopqa/{name}"):
            gold = {p.title for p in question.passages if p.is_supporting}
            n_expected = 4 if question.meta["type"] == "bridge_comparison" else 2
            assert len(gold) == n_expected


def test_the_published_table_of_popqa_is_the_copy_with_paragraphs():
    table = read("popqa/popQA.sample1000.tsv")
    copy = read("popqa/neuropath.popqa.1000.with_paragraphs.json")
    assert [(q.id, q.question, q.golds) for q in table] == [
        (q.id, q.question, q.golds) for q in copy
    ]
    assert all(len(q.passages) == 2 for q in copy)


def test_nq_open_has_142_answers_with_a_no_break_space():
    golds = [gold for q in read("nq/NQ-open.dev.jsonl") for gold in q.golds]
    assert sum("\u00a0" in gold for gold in golds) == 142


def test_in_the_oracle_file_the_answer_is_in_the_gold_passage():
    for question in read("nq/nq-open-oracle.jsonl.gz"):
        text = question.passages[0].text.lower()
        assert any(gold.lower() in text for gold in question.golds)


def test_dpr_and_nq_open_ask_the_same_of_3319_questions():
    dpr = {q.question: q for q in read("nq/dpr.nq-test.qa.csv")}
    both = [q for q in read("nq/NQ-open.dev.jsonl") if q.question in dpr]
    assert len(both) == 3319


@pytest.mark.parametrize(("split", "n_quoted"), [("dev", 547), ("test", 705)])
def test_the_quotes_that_are_left_in_triviaqa_are_removed(split, n_quoted):
    name = f"triviaqa/dpr.trivia-{split}.qa.csv"
    found = read(name)
    with (samples() / name).open(encoding="utf-8", newline="\n") as lines:
        rows = [row[0] for row in csv.reader(lines, delimiter="\t")]
    changed = [
        (raw, q.question)
        for raw, q in zip(rows, found, strict=True)
        if raw.strip() != q.question
    ]
    assert len(changed) == n_quoted
    for raw, question in changed:
        assert next(csv.reader([raw])) == [question]


def test_every_evidence_link_of_the_rc_sample_is_found():
    folder = samples() / "triviaqa" / "allennlp_triviaqa-rc_sample" / "qa"
    if not folder.is_dir():
        pytest.skip("the rc sample is not among the samples")
    n_links = 0
    for path in folder.iterdir():
        for found in open_dataset(path).read():
            question = found.question
            n_links += len(question.documents)
            assert "n_missing_documents" not in question.meta
            gold = [p for p in question.passages if p.is_supporting]
            assert len(gold) <= len(question.documents)
            assert gold
    assert n_links == 22


def test_exact_match_sees_through_the_no_break_space():
    found = read("nq/NQ-open.dev.jsonl")
    spaced = next(g for q in found for g in q.golds if "\u00a0" in g)
    assert exact_match(spaced.replace("\u00a0", " "), [spaced])
