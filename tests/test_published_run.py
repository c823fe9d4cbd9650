"""A run of published questions goes the whole way, to the rows of the results.

The files are in HotpotQA's form and ask what the embedded model knows, so that there
are right and wrong answers to tell apart.
"""

import json

import pytest

from extract.world.commands import WORLD_PRESETS
from extract.world.facts import make_world
from extract.world.questions import make_examples
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


@pytest.mark.slow
def test_a_run_of_published_questions_goes_to_the_rows_of_the_results(tmp_path):
    config = WORLD_PRESETS["smoke"]
    files = {"train": [], "dev": []}
    for example in make_examples(make_world(config.world), config.questions):
        if example.split != "ood":
            role = "train" if example.split == "train" else "dev"
            files[role].append(hotpot_form(example))
    for role, records in files.items():
        (tmp_path / role).write_text(json.dumps(records))
    run = tmp_path / "run"
    n_train, n_evaluation = len(files["train"]), len(files["dev"]) // 3
    call(
        *("data", run, "--preset", "smoke", "--template", "short"),
        *("--train", f"hotpotqa={tmp_path / 'train'}", "--n-train", n_train),
        *("--dev", f"hotpotqa={tmp_path / 'dev'}", "--n-evaluation", n_evaluation),
        *("--overlong", "drop-passages", "--max-new-tokens", 10),
    )
    for verb in "answer label extract sweep train select calibrate evaluate".split():
        said = call(verb, run).stderr
        assert f"{verb}: done in" in said
    rows = [json.loads(x) for x in (run / "results.jsonl").read_text().splitlines()]
    measured = [
        r for r in rows if r["detector"] == "champion" and r["metric"] == "auroc"
    ]
    assert {r["setting"] for r in measured} == {"closed_book", "with_context"}
    assert {r["dataset"] for r in rows} == {"hotpotqa"}
    cut = [row for row in rows if row["experiment"] == "prompts"]
    assert cut and all(row["value"] == 0 for row in cut)
    assert "every checksum holds" in call("verify", run).stdout
