"""Small records in the published layouts of the six sets."""

import csv
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


TEMPLATES = json.loads(Path(__file__).with_suffix(".json").read_text(encoding="utf-8"))


def record(layout, number, **changes):
    """Return a record of a layout, its number filled in as decimal or hexadecimal."""
    text = json.dumps(TEMPLATES[layout])
    for word, value in (
        ("HEX24", f"{number:024x}"),
        ("HEX32", f"{number:032x}"),
        ("NUMBER", str(number)),
        ('"INTEGER"', str(number)),
    ):
        text = text.replace(word, value)
    return json.loads(text) | changes


def maker(layout):
    """Return a function that makes records of a layout."""

    def make(number=0, **changes):
        return record(layout, number, **changes)

    make.__name__ = layout
    return make


# Two gold paragraphs and a distractor, sentences with their leading spaces.
hotpot = maker("hotpot")
twowiki = maker("twowiki")  # sentences without leading spaces, and no level
musique = maker("musique")  # a distractor has the title of a gold paragraph
popqa = maker("popqa")  # one row; list cells are JSON written as text
# The first positive is the annotated page, the second was retrieved.
biencoder = maker("biencoder")
oracle = maker("oracle")  # NQ with its gold passage and a distractor
trivia = maker("trivia")  # one question with a page of each kind
flashrag = maker("flashrag")
lm_eval = maker("lm_eval")


def hotpot_columns(number=0):
    """The Hub's layout: parallel lists, and `id` instead of `_id`."""
    result = hotpot(number)
    for field, name in (("supporting_facts", "sent_id"), ("context", "sentences")):
        titles, others = map(list, zip(*result[field], strict=True))
        result[field] = {"title": titles, name: others}
    return {"id": result.pop("_id")} | result


def twowiki_strings(number=0):
    """The Hub's Parquet layout: nested fields are JSON written as text."""
    nested = ("context", "supporting_facts", "evidences", "evidences_id")
    result = twowiki(number)
    return result | {key: json.dumps(result[key]) for key in nested}


def simplified(number=0, start=4):
    """One annotation: a long answer with tags, and a short answer inside it."""
    result = record("simplified", number, example_id=-5 - number)
    result["annotations"][0]["long_answer"]["start_token"] = start
    return result


def trivia_file(number=3, **changes):
    """The object around TriviaQA's questions."""
    records = [trivia(i) for i in range(number)]
    return {"Data": records, "Domain": "Wikipedia", "Split": "dev", **changes}


def write_array(path, records, **options):
    path.write_text(json.dumps(records, **options), encoding="utf-8")
    return path


def write_lines(path, records):
    text = "".join(json.dumps(record) + "\n" for record in records)
    path.write_text(text, encoding="utf-8")
    return path


def write_table(path, records, header=True):
    with path.open("w", encoding="utf-8", newline="") as out:
        rows = csv.DictWriter(out, records[0], delimiter="\t")
        if header:
            rows.writeheader()
        rows.writerows(records)
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
