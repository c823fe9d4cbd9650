"""The bench of answers times what it says it times."""

import json

import pytest
from click.testing import CliRunner

from beatrice.benchmarks.bench.answer import CONFIG, WAYS, AnswerBench, measure_latency
from beatrice.cli import main


def test_a_row_a_setting_has_every_ratio_above_zero():
    done = CliRunner().invoke(main, ["bench", "answer", "--rounds", "1", "--json"])
    assert done.exit_code == 0, done.output
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["setting"] for row in rows] == ["closed_book", "with_context"]
    for row in rows:
        ratios = [value for name, value in row.items() if "_over_" in name]
        assert len(ratios) == 6 and min(ratios) > 0


def test_one_scored_answer_is_timed_beside_the_same_tokens_alone():
    cost = measure_latency("embedded", n_rounds=1)
    assert cost.n_new <= 8 < cost.n_prompt
    assert min(cost.plain, cost.scored, cost.clock, cost.processors) > 0


@pytest.fixture(scope="module")
def bench():
    return AnswerBench("embedded", "float32", "with_context")


def test_the_floor_computes_the_logits_of_all_tokens_that_are_read(bench):
    """Plain generation multiplies one state of a row and step by the output matrix."""
    counts = dict.fromkeys(WAYS, 0)

    def count(module, inputs, output):
        counts[way] += inputs[0][..., 0].numel()

    handle = bench.backbone.layout.head.register_forward_hook(count)
    for way in ("plain", "floor"):
        bench.run(way)
    handle.remove()
    n_rows = len(bench.requests)
    n_read = sum(
        len(r.prompt.ids)
        - (r.prompt.context_span[0] if r.prompt.context_span[0] >= 48 else 0)
        for r in bench.requests
    )
    assert counts["plain"] <= n_rows * CONFIG.max_new_tokens
    # Steps at which a batch is parted differ by those that run what was cut.
    assert abs(counts["floor"] - counts["plain"] - n_read) <= n_rows
