"""Six questions from the controller's run, with what the model showed at each token."""

from collections.abc import Callable, Sequence
from typing import Any

from extract.label.verdicts import exact_match
from extract.records import Answer, Passage
from extract.signals.batch import Signals
from extract.signals.plan import sequence_of
from pgir.bridge import ProbedBackbone
from pgir.controllers.policy import Decision, Policy, decide
from pgir.controllers.traces import Traced

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


def _tokens(probed: ProbedBackbone, answer: Answer, signals: Signals) -> list[dict]:
    """Return the tokens of a sequence; each shows how probable it was."""
    # Whose text a token is, whichever positions the run reads as the answer.
    spans = sequence_of(answer, answer_span="emitting").spans
    ids = [*answer.prompt_ids, *answer.token_ids]
    rows = []
    for place, token in enumerate(ids):
        span = next(
            (
                name
                for name, (start, stop) in zip(
                    ("context", "question", "answer"), spans, strict=True
                )
                # A token is shown with the position that emitted it, one before.
                if start <= place - (name == "answer") < stop
            ),
            None,
        )
        if span is None or place == 0:
            continue
        p, surprisal, entropy, _, margin = signals.prob[place - 1].tolist()
        rows.append(
            {
                "text": probed.backbone.tokenizer.decode([token]),
                "span": span,
                "p": p,
                "surprisal": surprisal,
                "entropy": entropy,
                "margin": margin,
            }
        )
    return rows


def _draft(
    probed: ProbedBackbone,
    question: str,
    golds: Sequence[str],
    context: Sequence[Passage],
    p_correct: float,
) -> dict[str, Any]:
    setting = "with_context" if context else "closed_book"
    (request,) = probed.requests(setting, [question], [context])
    (answer,) = probed.answer([request])
    (signals,) = probed.read([answer]).signals
    return {
        "setting": setting,
        "answer": answer.text,
        "p_correct": p_correct,
        "correct": exact_match(answer.text, golds),
        "passages": [passage.text for passage in context],
        "tokens": _tokens(probed, answer, signals),
    }


def choose_cases(
    traced: Traced, policy: Policy
) -> list[tuple[int, str, str, Decision]]:
    """Return the first questions of a set that show each kind of outcome."""
    chosen: list[tuple[int, str, str, Decision]] = []
    for action, verdict, n_wanted, matches in KINDS:
        found = 0
        for i, (trace, example) in enumerate(
            zip(traced.traces, traced.examples, strict=True)
        ):
            if found == n_wanted:
                break
            if any(i == other for other, *_ in chosen):
                continue
            decision = decide(trace, policy)
            first, last = (
                exact_match(trace[r].answer, example.golds) for r in (0, decision.round)
            )
            if matches(decision, first, last):
                chosen.append((i, action, verdict, decision))
                found += 1
    return chosen


def make_cases(
    probed: ProbedBackbone,
    passages: Sequence[Passage],
    traced: Traced,
    policy: Policy,
) -> list[dict[str, Any]]:
    """Return the case studies of a set as the report shows them."""
    cases = []
    for i, action, verdict, decision in choose_cases(traced, policy):
        example, trace = traced.examples[i], traced.traces[i]
        shown = sorted({0, decision.round})
        cases.append(
            {
                "question": example.question,
                "golds": list(example.golds[:2]),
                "action": action,
                "verdict": verdict,
                "drafts": [
                    _draft(
                        probed,
                        example.question,
                        example.golds,
                        [passages[p] for p in trace[r].passages],
                        trace[r].p_correct,
                    )
                    for r in shown
                ],
            }
        )
    return cases
