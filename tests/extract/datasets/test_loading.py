"""Recognising a file's question set, making examples of it, and splitting these."""

import json
import random

import msgspec
import pandas as pd
import pytest

from beatrice.extract.datasets.building import build_examples, check_folder
from beatrice.extract.datasets.loading import inspect_file, open_dataset, read_questions
from beatrice.extract.datasets.splits import (
    HELD_OUT_SIZES,
    BuildConfig,
    Candidate,
    Source,
    SplitConfig,
    draw_splits,
    read_splits,
)
from beatrice.extract.records import (
    Example,
    Passage,
    read_records,
    text_key,
    write_lines,
)
from beatrice.extract.run.files import seal
from tests.extract.datasets import published as pub
from tests.extract.small_run import questions


def lists(name=None, **more):
    """Records in NQ-open's layout, which others use too; `name` is a pattern of ids."""
    return [
        {"question": f"Which city is {i}?", "answer": ["a", "b", "c", "d"]}
        | ({"id": name.format(i)} if name else {})
        | more
        for i in range(3)
    ]


def hotpot(**more):
    return [pub.hotpot(i, **more) for i in range(3)]


RAGS = [
    pub.flashrag(i, question=f"Who is {i}?", golden_answers=list("abcd"))
    for i in range(3)
]
LONGTAIL = [
    {"id": i, "question": f"What is {i}?", "answers": ["a"], "s_wiki_title": "S"}
    for i in range(3)
]
FACTS = {"context": pub.hotpot_columns(0)["context"], "type": "bridge"}
LEVELS = [pub.twowiki(i, level="hard") for i in range(3)]
NO_ID = [{k: v for k, v in pub.twowiki(0).items() if k != "_id"}]
HEX24, STYLE = "5a7f6fd75542992e7d278cf{}", "style of the questions"
# Records, the file's name, the set, and what it was recognised by.
SETS = [
    (lists(), "a.jsonl", "nq", "layout"),
    (lists(), "nq-open.jsonl", "nq", "layout"),
    (lists(), "popqa.jsonl", "popqa", "file name"),
    (lists(dataset="trivia"), "a", "triviaqa", "records"),
    (lists(dataset="popqa"), "nq", "popqa", "records"),
    (lists(dataset="nq_open"), "popqa", "nq", "records"),
    (lists("tc_{}"), "a", "triviaqa", "records"),
    (lists(HEX24), "hotpot.jsonl", "hotpotqa", "file name"),
    (lists(HEX24), "a", None, None),
    (lists("2hop__1_{}"), "a", "musique", "records"),
    (hotpot(evidence=["x"]), "a", "hotpotqa", "records"),
    (hotpot(answer_id="Q1"), "a", "hotpotqa", "records"),
    (hotpot(entity_ids="Q1"), "2wiki", "hotpotqa", "records"),
    (LEVELS, "hotpot", "2wikimultihopqa", "records"),
    (NO_ID, "a", "2wikimultihopqa", "records"),
    (RAGS, "a", "triviaqa", STYLE),
    (RAGS, "popqa_test.jsonl", "popqa", "file name"),
    (RAGS, "squad_dev.jsonl", None, None),
    ([x | {"metadata": FACTS} for x in RAGS], "a", "hotpotqa", "records"),
    (LONGTAIL, "triviaqa", "popqa", "records"),
]


@pytest.mark.parametrize(("records", "name", "dataset", "source"), SETS)
def test_marks_in_records_override_file_names_which_override_guesses(
    records, name, dataset, source, tmp_path
):
    folder = tmp_path / "plain"  # the name of `tmp_path` would be one too
    folder.mkdir()
    file = open_dataset(pub.write_lines(folder / name, records))
    assert (file.dataset, file.dataset_from) == (dataset, source)


@pytest.mark.parametrize("dataset", ["squad1_dev", "webq_dev", "curatedtrec_dev"])
@pytest.mark.parametrize("make", [pub.biencoder, pub.flashrag, lambda i: lists()[i]])
def test_a_record_of_a_set_other_than_the_six_is_refused(make, dataset, tmp_path):
    records = [make(i) | {"dataset": dataset} for i in range(2)]
    report = inspect_file(pub.write_lines(tmp_path / "a", records))
    assert (report["loaded"], report["refused"]) == (0, 2)
    assert f"{dataset!r}, which is none of the six" in report["error"]


@pytest.mark.parametrize(
    ("question", "golds", "expected"),
    [
        ("who sings number {}", "['Ann']", "nq"),
        ("Who sings number {}?", "['A', 'B', 'C', 'D']", "triviaqa"),
        ("Who sings number {}?", "['A']", None),
    ],
)
def test_sets_without_a_mark_are_recognised_by_how_they_ask(
    question, golds, expected, tmp_path_factory
):
    path = tmp_path_factory.mktemp("plain") / "questions.csv"
    path.write_text("".join(f"{question.format(i)}\t{golds}\n" for i in range(9)))
    assert open_dataset(path).dataset == expected
    assert open_dataset(path, dataset="nq").dataset == "nq"
    named = path.with_name("trivia-dev.qa.csv")
    named.write_bytes(path.read_bytes())
    assert open_dataset(named).dataset == "triviaqa"  # a name overrides the guess


def test_a_named_set_overrides_a_layout_but_not_a_mark(tmp_path):
    path = pub.write_lines(tmp_path / "a", lists())
    assert open_dataset(path, dataset="popqa").dataset == "popqa"
    for records, name in ((lists(dataset="nq"), "nq"), (hotpot(), "hotpotqa")):
        path = pub.write_lines(tmp_path / "b", records)
        with pytest.raises(ValueError, match=f"holds {name}, not popqa"):
            open_dataset(path, dataset="popqa")
    # Nor do marks in a few records, unless the given name is the user's own.
    path = pub.write_lines(
        tmp_path / "c", lists(dataset="nq") + lists(dataset="popqa")[:1]
    )
    *_, row = open_dataset(path, dataset="nq").read()
    assert row.reason == "is of popqa, but its file was given as nq"
    rows = open_dataset(path, dataset="mine").read()
    assert {row.question.dataset for row in rows} == {"mine"}
    # Between two sets with equally many records the format decides.
    for records in ([pub.hotpot(), pub.musique()], [pub.musique(), pub.hotpot()]):
        file = open_dataset(pub.write_lines(tmp_path / "mixed", records))
        assert file.format.dataset == file.dataset


# Reading a file of questions in Python, without a run.

CAPITALS = [
    {"question": "Capital of Mali?", "golds": ["Bamako"], "passages": ["In Bamako."]},
    {"question": "Capital of Peru?", "golds": ["Lima", "Ciudad de los Reyes"]},
]


def test_a_users_own_questions_are_read_in_order_with_an_id_each(tmp_path):
    path = pub.write_lines(tmp_path / "capitals.jsonl", [*CAPITALS, CAPITALS[0]])
    mali, peru, again = read_questions(path)
    assert mali.question == "Capital of Mali?"
    assert peru.golds == ("Lima", "Ciudad de los Reyes")
    assert mali.passages == (Passage(title="", text="In Bamako."),)
    assert (mali.dataset, mali.split) == ("capitals", "train")
    assert again.id == f"{mali.id}-2"
    third = CAPITALS[1] | {"id": f"{mali.id}-3".removeprefix("capitals-")}
    often = [CAPITALS[0], third, *CAPITALS[:1] * 3]
    ids = [q.id for q in read_questions(pub.write_lines(path, often))]
    assert [x.removeprefix(mali.id) for x in ids] == ["", "-3", "-2", "-4", "-5"]
    assert read_questions(str(path), "towns")[0].id.startswith("towns-")
    rows = [x | {"split": "ood", "dataset": "d"} for x in CAPITALS]
    examples = read_questions(pub.write_lines(tmp_path / "examples.jsonl", rows))
    assert [example.split for example in examples] == ["ood"] * 2


def test_aliases_of_an_answer_are_golds_and_fields_that_are_not_read_are_named(
    tmp_path,
):
    row = {"Question": "Capital of Peru?", "answer": "Lima", "answer_aliases": ["Lim"]}
    rows = [row | {"docs": ["In Lima."], "hint": ""}, row | {"aliases": ["Peruvian"]}]
    path = pub.write_lines(tmp_path / "own.jsonl", rows)
    unread = r"own.jsonl: fields not read: 'aliases' \(1\), 'docs' \(1\)$"
    with pytest.warns(UserWarning, match=unread):
        assert {example.golds for example in read_questions(path)} == {("Lima", "Lim")}


def test_examples_written_by_this_program_are_read_unchanged(tmp_path):
    rows = [msgspec.structs.replace(e, meta={"hop": 2}) for e in questions(2, 2, 2)]
    assert any(row.rewritten for row in rows)
    path = tmp_path / "examples.jsonl"
    path.write_text(write_lines(rows))
    assert read_questions(path) == rows
    assert not any(row.rewritten for row in read_questions(path, context="none"))


def test_a_published_set_keeps_its_name_and_the_passages_asked_for(tmp_path):
    facts = [["Toto", 0], ["Rush &amp; co", 0]]
    path = pub.write_array(tmp_path / "a.json", hotpot(supporting_facts=facts))
    gold = [title for title, _ in facts]
    shown = {"supporting": gold, "first": gold[:1], "none": []}
    for context, titles in ({"all": ["Neil Peart", *gold]} | shown).items():
        examples = read_questions(path, context=context)
        assert [[p.title for p in e.passages] for e in examples] == [titles] * 3
    assert {example.dataset for example in examples} == {"hotpotqa"}


@pytest.mark.parametrize(
    ("path", "options", "named"),
    [
        ([CAPITALS[0]], {}, ["list", "Example"]),
        (pd.DataFrame(CAPITALS), {}, ["DataFrame", "Example"]),
        (None, {}, ["expected its path, found NoneType"]),
        ("absent.jsonl", {}, ["absent.jsonl", "no such file"]),
        ("own.jsonl", {"dataset": "../up"}, ["dataset", "'../up'"]),
        ("own.jsonl", {"dataset": 5}, ["dataset", "found 5"]),
        ("own.jsonl", {"context": "some"}, ["context", "'some'", "supporting"]),
        ("bad.jsonl", {}, ["bad.jsonl", "record 2", "golds"]),
        ("text.txt", {}, ["text.txt: the file is plain text"]),
    ],
)
def test_wrong_arguments_and_files_are_named_when_questions_are_read(
    path, options, named, working_folder
):
    pub.write_lines(working_folder / "own.jsonl", CAPITALS)
    records = [CAPITALS[0], {"question": "?", "golds": []}]
    pub.write_lines(working_folder / "bad.jsonl", records)
    (working_folder / "text.txt").write_text('"a text"\n')
    with pytest.raises(ValueError) as caught:
        read_questions(path, **options)
    for name in named:
        assert name in str(caught.value)


def candidates(n, start=0, word="q"):
    names = range(start, start + n)
    return [Candidate(str(i), text_key(f"{word} {i}?")) for i in names]


def build(folder, sources, fixed=None, note=lambda text: None, **config):
    """Build a folder with the splits of `small`, unless others are given."""
    folder.mkdir(exist_ok=True)  # as a run does, which spares the folders of others
    usual = {"sources": tuple(sources), "fixed": fixed, "splits": small()}
    return build_examples(folder, BuildConfig(**(usual | config)), note)


def source(dataset, role, path):
    return Source(dataset=dataset, role=role, path=path)


def small(**changes):
    sizes = {"n_train": 30, "n_evaluation": 10, "n_held_out": {"popqa": 10}}
    return SplitConfig(**(sizes | changes))


def test_the_sizes_are_those_of_appendix_a():
    config = SplitConfig()
    assert config.size("hotpotqa", "train") == 10_000
    assert config.size("musique", "dev") == 500
    assert HELD_OUT_SIZES == {"popqa": 1000, "nq": 1182, "triviaqa": 1277}
    with pytest.raises(ValueError, match="--n-held-out hotpotqa=N"):
        config.size("hotpotqa", "held-out")


def test_a_set_may_have_its_own_size_and_a_set_too_small_is_refused_with_advice():
    config = small(n_train_of={"nq": 7})
    pools = {(name, "train"): candidates(100, word=name) for name in ("nq", "popqa")}
    drawn = draw_splits(pools, config).splits["train"]
    assert {name: len(ids) for name, ids in drawn.items()} == {"nq": 7, "popqa": 30}
    with pytest.raises(ValueError, match="needs at least one question, not 0"):
        small(n_train_of={"nq": 0})
    with pytest.raises(ValueError, match=r"10 \+ 10 .* have 15 .*--n-evaluation"):
        draw_splits({("hotpotqa", "dev"): candidates(15)}, small())


def test_a_draw_depends_on_the_seed_but_not_on_other_questions_and_is_even():
    pool = candidates(200)

    def drawn(pool, **changes):
        pools = {("hotpotqa", "train"): pool}
        return draw_splits(pools, small(**changes)).splits["train"]["hotpotqa"]

    names = drawn(pool)
    assert drawn(random.Random(1).sample(pool, len(pool))) == names
    assert drawn(pool, seed=1) != names
    stayed = [name for name in names if int(name) % 7]
    assert drawn([c for c in pool if int(c.id) % 7])[: len(stayed)] == stayed
    n_low = sum(int(i) < 1000 for i in drawn(candidates(2000), n_train=1000))
    assert abs(n_low - 500) < 4 * 1000**0.5 / 2  # four standard deviations


def test_all_questions_are_used_and_those_that_name_no_split_are_halved():
    pool = [
        Candidate(c.id, c.text_key, "validation" if i < 4 else None)
        for i, c in enumerate(candidates(10))
    ]
    pools = {("mine", "dev"): pool}
    drawn = draw_splits(pools, small(n_evaluation="all")).splits
    assert {*"0123"} < {*drawn["validation"]["mine"]}
    assert [len(drawn[x]["mine"]) for x in ("validation", "test")] == [7, 3]


def test_no_text_is_in_two_splits_and_evaluation_keeps_it():
    dev = candidates(40)
    twins = [Candidate(f"t{i}", c.text_key) for i, c in enumerate(dev)]
    train = twins + candidates(40, start=1000)
    pools = {("hotpotqa", "train"): train, ("hotpotqa", "dev"): dev}
    drawn = draw_splits(pools, small())
    texts = {c.id: c.text_key for pool in pools.values() for c in pool}
    split_of = {}
    for split, sets in drawn.splits.items():
        for name in sets["hotpotqa"]:
            assert split_of.setdefault(texts[name], split) == split
    assert len(drawn.splits["train"]["hotpotqa"]) == 30
    assert {c.split for c in drawn.conflicts} == {"train"}
    assert {c.other_split for c in drawn.conflicts} <= {"validation", "test"}


def test_the_same_id_is_not_drawn_for_training_and_evaluation():
    words = {"train": "one", "dev": "another"}
    pools = {("hotpotqa", role): candidates(60, word=x) for role, x in words.items()}
    drawn = draw_splits(pools, small())
    names = [name for sets in drawn.splits.values() for name in sets["hotpotqa"]]
    assert len(names) == len(set(names))
    for passed in drawn.conflicts:  # names the question with that id
        assert passed.id == passed.other_id
        assert passed.other_id in drawn.splits[passed.other_split]["hotpotqa"]
    assert drawn.conflicts and not drawn.repeated


def test_a_repeated_text_in_one_split_is_kept_and_reported():
    pool = [*candidates(9), Candidate("twin", text_key("q 3?"))]
    drawn = draw_splits({("popqa", "held-out"): pool}, small())
    assert len(drawn.splits["ood"]["popqa"]) == 10
    ((split, _, name, _, other),) = drawn.repeated
    assert (split, {name, other}) == ("ood", {"3", "twin"})


def test_texts_are_compared_without_case_marks_and_articles():
    assert text_key("Who is the King?") == text_key("who is  king")
    assert text_key("he\xadlium \u200b gas") == text_key("helium\u200bgas\u200e")
    assert text_key("who is a queen") != text_key("who is a king")
    assert text_key("???") != text_key("!")


def test_a_changed_manifest_is_refused(tmp_path):
    path = tmp_path / "splits.json"
    manifest = seal({"format": "beatrice-splits", "version": 1, "splits": {"a": [1]}})
    path.write_text(json.dumps(manifest))
    assert read_splits(path) == manifest
    for other in (manifest | {"splits": {"a": [2]}}, {}, seal({"format": "other"})):
        path.write_text(json.dumps(other))
        with pytest.raises(ValueError, match=r"splits.json is .*draw splits again"):
            read_splits(path)


@pytest.fixture
def sources(tmp_path):
    train = [pub.hotpot(i) for i in range(60)]
    dev = [pub.hotpot(i) for i in range(50, 100)]  # ten of them also in train
    gold = {"title": "T", "text": "A politician.", "is_supporting": True}
    rows = [pub.popqa(i) | {"paragraphs": [gold]} for i in range(20)]
    return [
        source("hotpotqa", "train", pub.write_array(tmp_path / "train.json", train)),
        source("hotpotqa", "dev", pub.write_array(tmp_path / "dev.json", dev)),
        source("popqa", "held-out", pub.write_lines(tmp_path / "pop", rows)),
    ]


def test_files_with_the_same_ids_keep_their_questions_in_their_own_splits(tmp_path):
    sources = []
    for role, n in (("train", 60), ("dev", 20)):
        rows = [{"id": i, "question": f"{role} {i}?", "golds": ["a"]} for i in range(n)]
        path = pub.write_lines(tmp_path / f"{role}.jsonl", rows)
        sources.append(source("mine", role, path))
    build(tmp_path / "out", sources, context="none", splits=small(n_held_out={}))
    for example in read_records(tmp_path / "out" / "examples.jsonl", Example):
        role = "train" if example.split == "train" else "dev"
        assert example.question.startswith(role)


def test_a_folder_holds_the_drawn_examples_with_their_gold_passages(sources, tmp_path):
    out = tmp_path / "out"
    manifest = build(out, sources)
    examples = list(read_records(out / "examples.jsonl", Example))
    assert len({example.id for example in examples}) == len(examples)
    for split, sets in manifest["splits"].items():
        for dataset, names in sets.items():
            assert [f"{dataset}-{name}" for name in names] == [
                e.id for e in examples if (e.split, e.dataset) == (split, dataset)
            ]
    assert all(p.is_supporting for e in examples for p in e.passages)
    assert {len(e.passages) for e in examples} == {1, 2}
    passages = list(read_records(out / "passages.jsonl", Passage))
    assert {p.title for p in passages} == {"Neil Peart", "Toto", "Rush &amp; co", "T"}
    assert check_folder(out) == manifest


def test_the_same_files_in_another_order_give_the_same_bytes(sources, tmp_path):
    build(tmp_path / "a", sources, context="all")
    records = json.loads(sources[0].path.read_text())
    pub.write_lines(sources[0].path, records[::-1])
    build(tmp_path / "b", sources, context="all")
    for name in ("examples.jsonl", "passages.jsonl"):
        first, other = ((tmp_path / d / name).read_bytes() for d in "ab")
        assert first == other


def test_fixed_splits_are_taken_from_any_container(sources, tmp_path):
    drawn = build(tmp_path / "a", sources)
    records = json.loads(sources[1].path.read_text())
    pub.write_lines(sources[1].path, records[::-1])
    fixed = tmp_path / "a" / "splits.json"
    again = build(tmp_path / "b", sources, fixed, splits=small(seed=9))
    for name in ("splits", "questions_sha256"):
        assert again[name] == drawn[name]
    unsized = SplitConfig(n_held_out={})  # their sizes are those that were drawn
    assert build(tmp_path / "d", sources, fixed, splits=unsized) == again
    for record in records:
        record["question"] = record["question"].replace("band", "group")
    pub.write_lines(sources[1].path, records)
    with pytest.raises(ValueError, match="are not those the splits were drawn from"):
        build(tmp_path / "c", sources, fixed)
    assert not list((tmp_path / "c").iterdir())


def test_splits_of_an_earlier_version_give_a_note_unless_files_are_the_same(
    sources, tmp_path
):
    drawn, notes = build(tmp_path / "a", sources), []
    digests = {
        split: dict.fromkeys(sets, "") for split, sets in drawn["splits"].items()
    }
    fields = {k: v for k, v in drawn.items() if k != "sha256"}
    fields |= {"version": 1, "questions_sha256": digests}
    fixed = tmp_path / "splits.json"
    fixed.write_text(json.dumps(seal(fields)))
    again = build(tmp_path / "b", sources, fixed, notes.append)
    assert again["splits"] == drawn["splits"] and "earlier" not in "".join(notes)
    assert again["questions_sha256"] == drawn["questions_sha256"]
    records = json.loads(sources[1].path.read_text())
    pub.write_lines(sources[1].path, records)
    build(tmp_path / "c", sources, fixed, notes.append)
    assert "drawn by an earlier version" in notes[-1]


def test_a_refused_record_stops_the_build_or_is_listed(sources, tmp_path):
    records = json.loads(sources[0].path.read_text())
    del records[4]["answer"]
    pub.write_array(sources[0].path, records)
    with pytest.raises(ValueError, match=r"record 5 \(byte \d+\): no 'answer'"):
        build(tmp_path / "out", sources)
    assert not list((tmp_path / "out").iterdir())
    manifest = build(tmp_path / "out", sources, skip_bad=True)
    (refusal,) = manifest["sources"][0]["refusals"]
    assert refusal["number"] == 5
    twins = [pub.musique(i, answerable=False) for i in range(2)]
    path = pub.write_lines(tmp_path / "twins", twins)
    every = [source("musique", "train", path), *sources]
    with pytest.raises(ValueError, match="none of 2 records can be used") as caught:
        build(tmp_path / "all", every, skip_bad=True)
    assert str(caught.value) == inspect_file(path)["error"]


def test_a_context_equal_to_the_default_is_not_written_down():
    config = BuildConfig(sources=(), splits=small(), contexts={"nq": "supporting"})
    assert config.contexts_as_text() == "supporting"  # as in runs of earlier versions


def test_a_repeated_text_without_an_id_is_listed(tmp_path):
    names = [f"who is {i % 12}" for i in range(14)]
    records = [{"question": name, "answer": ["a"], "alias": "b"} for name in names]
    path = pub.write_lines(tmp_path / "nq", records)
    sources, splits = [source("nq", "held-out", path)], small(n_held_out={"nq": 10})
    manifest = build(tmp_path / "out", sources, splits=splits, context="none")
    (report,) = manifest["sources"]
    assert (report["repeated"], report["refusals_not_listed"]) == (2, 0)
    assert report["unread"] == {"alias": 14}
    assert [item["at"] for item in report["repeats"]] == ["line 13", "line 14"]
    assert "the question of record 2" in report["repeats"][1]["reason"]


def test_a_finished_folder_keeps_its_examples_and_a_changed_one_is_refused(
    sources, tmp_path
):
    out = tmp_path / "out"
    first = build(out, sources)
    assert build(out, sources) == first
    with pytest.raises(ValueError, match="there already with other content"):
        build(out, sources, splits=small(seed=1))
    assert check_folder(out) == first
    with (out / "examples.jsonl").open("a") as file:
        file.write("\n")
    with pytest.raises(ValueError, match="not the file that splits.json names"):
        check_folder(out)
    with pytest.raises(ValueError, match="give one of the two files"):
        splits = small(n_held_out={})
        build(tmp_path / "twice", [sources[0], sources[0]], splits=splits)
