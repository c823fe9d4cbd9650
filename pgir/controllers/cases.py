"""Six questions from the controller's run, with what the model showed at each token."""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from beatrice.extract.label.labels import exact_match
from beatrice.extract.records import Example
from beatrice.pgir.controllers.calls import Call
from beatrice.pgir.controllers.policy import Decision, Draft, Policy, Traced, decide
from beatrice.pgir.controllers.services import Answering
from beatrice.pgir.scoring.page import shown_tokens

Match = Callable[[Decision, bool, bool], bool]  # decision, draft right, final right

# What a reader should see, successes and failures alike.
KINDS: tuple[tuple[str, str, int, Match], ...] = (
    (
        "Accept, no retrieval",
        "The closed-book draft cleared the threshold and is right.",
        1,
        lambda d, first, last: d.round == 0 and d.is_accepted and last,
    ),
    (
        "Retrieve, then trust",
        "The draft was wrong and scored low; the grounded answer is right.",
        2,
        lambda d, first, last: d.round > 0 and d.is_accepted and last and not first,
    ),
    (
        "Retrieve again, then trust",
        "It took more than one round to find an answer that is trusted, and right.",
        1,
        lambda d, first, last: d.round > 1 and d.is_accepted and last,
    ),
    (
        "Retrieve; all flagged, none trusted",
        "No draft cleared the threshold; the best is returned without trust.",
        1,
        lambda d, first, last: not d.is_accepted and not last,
    ),
    (
        "Trusted, and wrong",
        "A failure: the accepted answer is wrong.",
        1,
        lambda d, first, last: d.is_accepted and not last,
    ),
)


def _shown_draft(
    answering: Answering, example: Example, draft: Draft
) -> dict[str, Any]:
    """Return a draft as the report shows it; it is answered again for its signals."""
    probed = answering.probed
    request, _ = answering.request(Call("answer", example.question, draft.passages))
    (answer,) = probed.answer([request])
    (signals,) = probed.read([answer]).signals
    return {
        "setting": request.setting,
        "answer": answer.text,
        "p_correct": draft.p_correct,
        "correct": exact_match(answer.text, example.golds),
        "passages": [answering.passages[p].text for p in draft.passages],
        "tokens": shown_tokens(
            probed.backbone.tokenizer.decode, answer, signals.prob, signals.first_token
        ),
    }


class Chosen(NamedTuple):
    """A question that is shown: its set, its place there, and what happened."""

    traced: Traced
    place: int
    action: str
    verdict: str
    decision: Decision


def choose_cases(traced: Sequence[Traced], policy: Policy) -> list[Chosen]:
    """Return questions that show each kind of outcome, from all sets.

    For each case, in the order of KINDS: the first question of its kind in the set that
    has been shown least, of equals the earlier one. Nobody picks.
    """
    outcomes: list[list[tuple[Decision, bool, bool]]] = []
    for one in traced:
        outcomes.append([])
        for trace, example in zip(one.traces, one.examples, strict=True):
            decision = decide(trace, policy)
            first, last = (
                exact_match(trace[r].answer, example.golds) for r in (0, decision.round)
            )
            outcomes[-1].append((decision, first, last))
    shown: dict[tuple[int, int], Chosen] = {}
    for action, verdict, n_wanted, matches in KINDS:
        for _ in range(n_wanted):
            n_shown = collections.Counter(place for place, _ in shown)
            fitting = (
                (n_shown[s], s, i)
                for s, own in enumerate(outcomes)
                for i, outcome in enumerate(own)
                if (s, i) not in shown and matches(*outcome)
            )
            best = min(fitting, default=None)
            if best is not None:
                _, s, i = best
                decision = outcomes[s][i][0]
                shown[s, i] = Chosen(traced[s], i, action, verdict, decision)
    return list(shown.values())


def make_cases(
    answering: Answering, traced: Sequence[Traced], policy: Policy
) -> list[dict[str, Any]]:
    """Return the case studies of the evaluated sets as the report shows them."""
    cases = []
    for one in choose_cases(traced, policy):
        example, trace = one.traced.examples[one.place], one.traced.traces[one.place]
        drafts = [trace[r] for r in sorted({0, one.decision.round})]
        cases.append(
            {
                "dataset": example.dataset,
                "question": example.question,
                "golds": list(example.golds[:2]),
                "action": one.action,
                "verdict": one.verdict,
                "drafts": [_shown_draft(answering, example, d) for d in drafts],
            }
        )
    return cases
