"""A run of two question sets goes the whole way, to the report.

One set is in HotpotQA's form, one in plain lines. Both ask what the embedded model
knows, so that there are right and wrong answers to tell apart.
"""

import json

import pytest

from beatrice.extract.records import IN_DOMAIN
from beatrice.extract.world.facts import make_world
from beatrice.extract.world.questions import make_examples
from beatrice.extract.world.stage import WORLD_PRESETS
from tests.process import call


def hotpot_form(example):
    """Return a microworld question as HotpotQA publishes one."""
    titles = [f"{p.title} {i}" for i, p in enumerate(example.passages)]
    return {
        "_id": example.id,
        "question": example.question,
        "answer": example.golds[0],
        "supporting_facts": [[title, 0] for title in titles],
        "context": [
            [title, [passage.text]]
            for title, passage in zip(titles, example.passages, strict=True)
        ],
        "type": "bridge",
        "level": "hard",
    }


def plain_form(example):
    """Return it as a person writes one."""
    passages = [{"title": p.title, "text": p.text} for p in example.passages]
    golds = list(example.golds)
    return {"question": example.question, "golds": golds, "passages": passages}


@pytest.mark.slow
def test_a_run_of_two_sets_goes_the_whole_way_and_pools_them(tmp_path):
    config = WORLD_PRESETS["smoke"]
    options = []
    for is_plain, name in enumerate(("hotpotqa", "mine")):
        parts = {"train": [], "dev": []}
        examples = make_examples(make_world(config.world), config.questions)
        for example in [e for e in examples if e.split != "ood"][is_plain::2]:
            form = plain_form if is_plain else hotpot_form
            part = parts["train" if example.split == "train" else "dev"]
            part.append(form(example))
        for role, records in parts.items():
            path = tmp_path / f"{name}.{role}"
            lines = [json.dumps(one) + "\n" for one in records]
            path.write_text("".join(lines) if is_plain else json.dumps(records))
            options += [f"--{role}", f"{name}={path}"]
    run = tmp_path / "run"
    call(
        *("data", run, "--model", "embedded", "--preset", "smoke", *options),
        *("--n-train", "all", "--n-evaluation", "all", "--context", "all"),
        *("--template", "short", "--overlong", "drop-passages"),
    )
    verbs = "answer label extract sweep train select calibrate evaluate control report"
    for verb in verbs.split():
        assert f"{verb}: done in" in call(verb, run).stderr
    rows = [json.loads(x) for x in (run / "results.jsonl").read_text().splitlines()]
    assert {r["dataset"] for r in rows} == {"hotpotqa", "mine", IN_DOMAIN, "macro"}
    for setting in ("closed_book", "with_context"):
        n = {
            r["dataset"]: r["n"]
            for r in rows
            if (r["detector"], r["metric"], r["seed"]) == ("champion", "auroc", "mean")
            and (r["setting"], r["split"]) == (setting, "test")
        }
        assert n[IN_DOMAIN] == n["hotpotqa"] + n["mine"]
    cut = [row for row in rows if row["experiment"] == "prompts"]
    assert cut and all(row["value"] == 0 for row in cut)
    assert IN_DOMAIN in (run / "report.html").read_text()
    assert "every checksum holds" in call("doctor", run, "--verify").stdout
