"""Scored answers as a page to look at: self-contained, no script, nothing from outside.

A token is tinted by its own probability under the backbone, at the place where it was
written. That is the simplest quantity that is exact for a token: P(correct) is one
number for the whole answer, read from more than these probabilities.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jinja2
import numpy as np

from beatrice.extract.records import Answer
from beatrice.extract.signals.plan import sequence_of

P_STEPS = (0.05, 0.25, 0.5, 0.8)  # upper ends of the tints of a token, by its p

_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>{{ title }}</title><style>
body { font: 16px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto;
  padding: 0 1rem; color: #1b1b1b; background: #fff }
article { border-top: 1px solid #ccc; padding: .7rem 0 }
.p { font-weight: 600; font-variant-numeric: tabular-nums }
.answer { white-space: pre-wrap; font-size: 1.1rem; margin: .2rem 0 }
.asked, small { color: #555; white-space: pre-wrap } small { display: block }
.t0 { background: #e8835a } .t1 { background: #f2ad8b } .t2 { background: #f8cfba }
.t3 { background: #fce9df } .bad { color: #a00 }
</style></head><body>
<h1>{{ title }}</h1>
<p>{{ summary }}</p>
<p>A token's tint is its probability p under the backbone where it was written:
{% for step in steps %}<span class="t{{ loop.index0 }}">p &lt; {{ step }}</span>
{% endfor %}and none from {{ steps[-1] }} on. It is not the detector's reason:
P(correct) is one number for the whole answer, read from more than these
probabilities. A token's title shows log p in nats.</p>
{% for row in rows %}<article id="line-{{ row.line }}">
{% if row.error %}<div class="bad">line {{ row.line }}: {{ row.error }}</div>
{% else %}<span class="p">{{ row.p }}</span> {{ row.decision }}
<small>line {{ row.line }}{% if row.id is not none %}, {{ row.id }}{% endif %}</small>
{% endif %}{% if row.asked %}<div class="asked">{{ row.asked }}</div>
{% endif %}<div class="answer">
{%- for token in row.tokens %}<span
{%- if token.tint is not none %} class="t{{ token.tint }}"{% endif %}
{%- if token.log_p is not none %} title="log p = {{ token.log_p }}"{% endif -%}
>{{ token.text }}</span>{% endfor -%}
</div>
{% for note in row.notes %}<small>{{ note }}</small>
{% endfor %}</article>
{% endfor %}</body></html>
"""


def _token(text: str, log_p: float | None) -> dict[str, Any]:
    """Return a token with its tint; without a probability it has none."""
    if log_p is None:
        return {"text": text, "tint": None, "log_p": None}
    tints = (i for i, step in enumerate(P_STEPS) if math.exp(log_p) < step)
    return {"text": text, "tint": next(tints, None), "log_p": f"{log_p:.3f}"}


def _entry(asked: str | None, result: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the page shows of one result."""
    tokens = result.get("tokens", [])
    log_probs = result.get("log_probs") or [None] * len(tokens)
    p_correct = result.get("p_correct")
    reason = result.get("reason")
    return {
        "line": result.get("line", 1),
        "id": result.get("id"),
        "error": result.get("error"),
        "p": "no P" if p_correct is None else f"P(correct) = {p_correct:.3f}",
        "decision": result.get("decision"),
        "asked": asked,
        "tokens": [_token(*pair) for pair in zip(tokens, log_probs, strict=True)],
        "notes": [*([reason] if reason else []), *result.get("warnings", [])],
    }


def page(
    title: str, summary: str, results: Iterable[tuple[str | None, Mapping[str, Any]]]
) -> str:
    """Return the page of scored answers.

    Args:
      title: of the page.
      summary: what became of the rows, in words.
      results: per answer what was asked, and its score as JSON values, see
        `Score.as_json`.
    """
    template = jinja2.Environment(autoescape=True).from_string(_PAGE)
    rows = [_entry(asked, result) for asked, result in results]
    return template.render(title=title, summary=summary, steps=P_STEPS, rows=rows)


def shown_tokens(
    decode: Callable[[list[int]], str],
    answer: Answer,
    prob: np.ndarray,
    first_token: int = 0,
) -> list[dict[str, Any]]:
    """Return the tokens of a sequence as the report shows them.

    Args:
      decode: gives the text of token ids.
      answer: the exact ids.
      prob: `[n_tokens, 5]`, the prob family of the same sequence; each token is shown
        with the numbers of the position that emitted it. A token whose position has
        none (the first of all) is left out.
      first_token: which token the first row is of.
    """
    from beatrice.jaxprobe.features.families import (
        SPAN_NAMES,  # the report needs no JAX
    )

    # Whose text a token is, whichever positions the run reads as the answer.
    spans = sequence_of(answer, answer_span="emitting").spans
    rows = []
    for place, token in enumerate([*answer.prompt_ids, *answer.token_ids]):
        # An answer token is shown with the position that emitted it, one before.
        inside = (
            name
            for name, (start, stop) in zip(SPAN_NAMES, spans, strict=True)
            if start <= place - (name == "answer") < stop
        )
        span = next(inside, None)
        if span is None or place <= first_token:
            continue
        p, surprisal, entropy, _, margin = prob[place - 1 - first_token].tolist()
        rows.append(
            {
                "text": decode([token]),
                "span": span,
                "p": p,
                "surprisal": surprisal,
                "entropy": entropy,
                "margin": margin,
            }
        )
    return rows
