"""Small records in the layouts in which the six sets are published."""

import gzip
import json
import os
from pathlib import Path

import pytest


def samples():
    """Return the folder of published samples, or skip the test."""
    given = os.environ.get("BEATRICE_SAMPLES")
    beside = Path(__file__).parents[4] / "shared" / "data"
    folder = Path(given) if given else beside
    if not folder.is_dir():
        pytest.skip("no samples: set BEATRICE_SAMPLES")
    return folder


def hotpot(number=0, **changes):
    """Two gold paragraphs and a distractor, sentences with their leading spaces."""
    return {
        "_id": f"{number:024x}",
        "answer": "Rush",
        "question": f"Which band number {number} had a drummer named Neil?",
        "supporting_facts": [["Neil Peart", 0], ["Rush &amp; co", 9]],
        "context": [
            ["Neil Peart", ["Neil was a drummer.", " He wrote."]],
            ["Toto", ["Toto is a band."]],
            ["Rush &amp; co", ["Rush is a band."]],
        ],
        "type": "bridge",
        "level": "hard",
        **changes,
    }


def hotpot_columns(number=0):
    """The hub's layout: lists side by side, `id` for `_id`."""
    found = hotpot(number)
    titles, facts = found["context"], found["supporting_facts"]
    return {
        "id": found["_id"],
        "question": found["question"],
        "answer": found["answer"],
        "type": "bridge",
        "level": "hard",
        "supporting_facts": {
            "title": [title for title, _ in facts],
            "sent_id": [n for _, n in facts],
        },
        "context": {
            "title": [title for title, _ in titles],
            "sentences": [sentences for _, sentences in titles],
        },
    }


def twowiki(number=0, **changes):
    """Sentences without leading spaces, and no level."""
    return {
        "_id": f"{number:032x}",
        "type": "comparison",
        "question": f"Which film number {number} is older?",
        "context": [
            ["Film A", ["It is of 1920.", "It is mute."]],
            ["Film B", ["It is of 1950."]],
        ],
        "entity_ids": "Q1_Q2",
        "supporting_facts": [["Film A", 0], ["Film B", 0]],
        "evidences": [["Film A", "year", "1920"]],
        "answer": "Film A",
        "evidences_id": [],
        "answer_id": None,
        **changes,
    }


def twowiki_strings(number=0):
    """The hub's Parquet layout: nested fields are JSON written as text."""
    nested = ("context", "supporting_facts", "evidences", "evidences_id")
    found = twowiki(number)
    return found | {key: json.dumps(found[key]) for key in nested}


def musique(number=0, **changes):
    """A distractor has the title of a gold paragraph."""
    return {
        "id": f"2hop__{number}_7",
        "paragraphs": [
            {
                "idx": i,
                "title": title,
                "paragraph_text": f"{title} is paragraph {i}.",
                "is_supporting": gold,
            }
            for i, (title, gold) in enumerate(
                [("Green", True), ("Green", False), ("Blue", True)]
            )
        ],
        "question": f"Who owns the label of performer {number}?",
        "question_decomposition": [
            {"id": 1, "question": "a >> b", "answer": "c", "paragraph_support_idx": 0},
            {"id": 2, "question": "#1 >> d", "answer": "e", "paragraph_support_idx": 2},
        ],
        "answer": "Warner Music Group",
        "answer_aliases": ["Warner Music", "Warner Music"],
        "answerable": True,
        **changes,
    }


POPQA_COLUMNS = (
    "id subj prop obj subj_id prop_id obj_id s_aliases o_aliases s_uri o_uri "
    "s_wiki_title o_wiki_title s_pop o_pop question possible_answers"
).split()


def popqa(number=0):
    """One row; list cells are JSON written as text."""
    values = {column: f"{column} {number}" for column in POPQA_COLUMNS}
    return values | {
        "id": number,
        "question": f"What is the occupation of person {number}?",
        "possible_answers": json.dumps(["politician", 'so-called "pol"']),
    }


def biencoder(number=0):
    """The first positive is the annotated page, the second was retrieved."""
    passage = {"title": "Page", "text": "Linda sings.", "title_score": 1}
    return {
        "dataset": "nq_dev_psgs_w100",
        "question": f"who sings song {number}",
        "answers": ["Linda Davis"],
        "positive_ctxs": [
            passage | {"score": 13.4, "passage_id": "2"},
            passage | {"score": 1000, "passage_id": "1", "text": "Linda did."},
        ],
        "negative_ctxs": [passage | {"score": 0, "passage_id": "3"}],
        "hard_negative_ctxs": [],
    }


def oracle(number=0):
    """NQ with its gold passage and a distractor."""
    return {
        "question": f"who got prize {number}",
        "answers": ["Röntgen"],
        "ctxs": [
            {"title": "A", "text": "Röntgen did.", "hasanswer": True, "isgold": True},
            {"title": "B", "text": "Röntgen too.", "hasanswer": True, "isgold": False},
        ],
        "nq_annotated_gold": {"title": "A"},
    }


def simplified(number=0, start=4):
    """One annotation of a long answer with tags, and a short one inside it."""
    text = "Moon - wikipedia <H1> <P> Men walked  there in December 1972 . </P> end"
    return {
        "document_text": text,
        "long_answer_candidates": [],
        "question_text": f"when was moon walk {number}",
        "annotations": [
            {
                "annotation_id": 1,
                "long_answer": {"start_token": start, "end_token": 14},
                "short_answers": [{"start_token": 10, "end_token": 12}],
                "yes_no_answer": "NONE",
            }
        ],
        "example_id": -5 - number,
    }


def trivia(number=0):
    """One question with a page of each kind."""
    return {
        "Answer": {
            "Aliases": ["Sunset Blvd", "Sunset Boulevard"],
            "NormalizedAliases": ["sunset blvd"],
            "NormalizedValue": "sunset boulevard",
            "Type": "WikipediaEntity",
            "Value": "Sunset Boulevard",
        },
        "EntityPages": [{"DocSource": "TagMe", "Filename": "W.txt", "Title": "Webber"}],
        "Question": f"Which musical number {number} came in 1993?",
        "QuestionId": f"tc_{number}",
        "SearchResults": [
            {"Filename": "1/1_2.txt", "Title": "A site", "Rank": 0},
            {"Title": "No file", "Rank": 1},
        ],
    }


def trivia_file(number=3, **changes):
    """The object around TriviaQA's questions."""
    records = [trivia(i) for i in range(number)]
    return {"Data": records, "Domain": "Wikipedia", "Split": "dev", **changes}


def flashrag(number=0, **changes):
    return {
        "id": f"test_{number}",
        "question": f"who did thing {number}",
        "golden_answers": ["Ann", "Ann", "Bob"],
        **changes,
    }


def lm_eval(number=0):
    return {
        "doc_id": number,
        "doc": {"question": f"who did thing {number}", "answer": ["Ann"]},
        "target": ["Ann"],
        "arguments": [["Q:", {}]],
        "resps": [[" Ann\n"]],
        "filtered_resps": ["Ann"],
        "filter": "remove_whitespace",
        "exact_match": 1.0,
    }


def write_array(path, records, **options):
    path.write_text(json.dumps(records, **options), encoding="utf-8")
    return path


def write_lines(path, records):
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_text(text, encoding="utf-8")
    return path


def write_table(path, records, delimiter="\t", header=True):
    import csv

    with path.open("w", encoding="utf-8", newline="") as out:
        names = list(records[0])
        rows = csv.writer(out, delimiter=delimiter)
        if header:
            rows.writerow(names)
        rows.writerows([record[name] for name in names] for record in records)
    return path


def write_parquet(path, records):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


def zipped(path):
    target = path.with_name(path.name + ".gz")
    target.write_bytes(gzip.compress(path.read_bytes()))
    return target
