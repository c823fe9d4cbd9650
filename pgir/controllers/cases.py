"""Six questions from the controller's run, with what the model showed at each token."""

from collections.abc import Callable, Sequence
from typing import Any

from extract.label.verdicts import exact_match
from extract.records import Answer, Example, Passage
from extract.signals.batch import Signals
from extract.signals.plan import sequence_of
from jaxprobe.features.reading import SPAN_NAMES
from pgir.bridge import ProbedBackbone
from pgir.controllers.policy import Decision, Draft, Policy, decide
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
    rows = []
    for place, token in enumerate([*answer.prompt_ids, *answer.token_ids]):
        # An answer token is shown with the position that emitted it, one before.
        inside = (
            name
            for name, (start, stop) in zip(SPAN_NAMES, spans, strict=True)
            if start <= place - (name == "answer") < stop
        )
        span = next(inside, None)
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


def _shown_draft(
    probed: ProbedBackbone, passages: Sequence[Passage], example: Example, draft: Draft
) -> dict[str, Any]:
    """Return a draft as the report shows it; it is answered again for its signals."""
    context = [passages[p] for p in draft.passages]
    setting = "with_context" if context else "closed_book"
    (request,) = probed.requests(setting, [example.question], [context])
    (answer,) = probed.answer([request])
    (signals,) = probed.read([answer]).signals
    return {
        "setting": setting,
        "answer": answer.text,
        "p_correct": draft.p_correct,
        "correct": exact_match(answer.text, example.golds),
        "passages": [passage.text for passage in context],
        "tokens": _tokens(probed, answer, signals),
    }


def choose_cases(
    traced: Traced, policy: Policy
) -> list[tuple[int, str, str, Decision]]:
    """Return the first questions of a set that show each kind of outcome."""
    outcomes = []
    for trace, example in zip(traced.traces, traced.examples, strict=True):
        decision = decide(trace, policy)
        first, last = (
            exact_match(trace[r].answer, example.golds) for r in (0, decision.round)
        )
        outcomes.append((decision, first, last))
    chosen: dict[int, tuple[int, str, str, Decision]] = {}
    for action, verdict, n_wanted, matches in KINDS:
        fitting = [
            i for i, one in enumerate(outcomes) if i not in chosen and matches(*one)
        ]
        for i in fitting[:n_wanted]:
            chosen[i] = (i, action, verdict, outcomes[i][0])
    return list(chosen.values())


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
        drafts = [trace[r] for r in sorted({0, decision.round})]
        cases.append(
            {
                "question": example.question,
                "golds": list(example.golds[:2]),
                "action": action,
                "verdict": verdict,
                "drafts": [_shown_draft(probed, passages, example, d) for d in drafts],
            }
        )
    return cases
