"""Labels by the consensus of rubrics; the paper has three (appendix A, "Labels").

Every answer is judged under every rubric, per setting and variant. A reply that is no
verdict is asked for again, twice; what is unparsable then stays so and is counted.
"""

import dataclasses
import itertools
from collections.abc import Iterable, Sequence

from beatrice.extract.generate.generator import (
    Generator,
    GeneratorPrompt,
    SamplingConfig,
)
from beatrice.extract.generate.replies import Texts
from beatrice.extract.label.labels import pair_answers
from beatrice.extract.label.rubrics import RUBRICS, Rubric, judge_prompt
from beatrice.extract.label.verdicts import Verdict, Vote, label_by, parse_verdict
from beatrice.extract.records import Answer, Example, Label
from beatrice.extract.run.console import Update


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConsensusConfig:
    """How answers are judged."""

    vote: Vote = "unanimous"  # drops what the rubrics disagree on; "majority" keeps it
    n_retries: int = 2  # of a reply that is no verdict
    max_new_tokens: int = 8  # a verdict is one word, and a reply that was cut is none
    seed: int = 0  # of the delimiters' markers


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judgements:
    """The verdicts of the judges, as labels."""

    labels: tuple[Label, ...]  # one per answer, verdicts in the order of the rubrics
    n_retried: int  # replies that were asked for again, each attempt counted
    n_unparsable: int  # verdicts that stayed so

    def counts(self) -> list[dict[str, str | int]]:
        """Return, per setting and variant, how many answers got which label."""
        kinds = {True: "n_correct", False: "n_incorrect", None: "n_dropped"}
        names = ("n", *kinds.values(), "n_with_unparsable")
        tallies: dict[tuple[str, str], dict[str, int]] = {}
        for label in self.labels:
            group = (label.setting, label.variant)
            tally = tallies.setdefault(group, dict.fromkeys(names, 0))
            tally["n"] += 1
            tally[kinds[label.label]] += 1
            tally["n_with_unparsable"] += "unparsable" in label.verdicts
        return [
            {"setting": setting, "variant": variant, **tally}
            for (setting, variant), tally in sorted(tallies.items())
        ]


def judge_answers(
    answers: Iterable[Answer],
    examples: Iterable[Example],
    generator: Generator,
    replies: Texts,
    config: ConsensusConfig,
    progress: Update = lambda done, total: None,
    *,
    rubrics: Sequence[Rubric] = RUBRICS,
) -> Judgements | None:
    """Label answers by the consensus of the rubrics.

    Args:
      answers: in any order, which the labels keep.
      examples: the questions of all of them.
      generator: the judge.
      replies: where its words are kept.
      config: how.
      progress: called with replies that are there and replies wanted; a retry starts
        again from 0.
      rubrics: by which each answer is judged once; by default the paper's three.

    Returns:
      None where these replies are a share of the texts.

    Raises:
      ValueError: there is no rubric; see also `pair_answers`.
    """
    if not rubrics:
        raise ValueError("a judge needs at least one rubric, found none")
    pairs = pair_answers(answers, examples)
    pending = list(itertools.product(range(len(pairs)), range(len(rubrics))))
    verdicts: dict[tuple[int, int], Verdict] = {}
    n_retried = 0
    sampling = SamplingConfig(max_new_tokens=config.max_new_tokens)
    for attempt in range(config.n_retries + 1):
        if not pending:
            break
        n_retried += len(pending) if attempt else 0
        prompts = [
            _prompt(rubrics[r], *pairs[i], attempt=attempt, seed=config.seed)
            for i, r in pending
        ]
        texts = replies.generate(generator, prompts, sampling, progress)
        if texts is None:
            return None
        for cell, reply in zip(pending, texts, strict=True):
            is_whole = reply.finish == "stop"
            verdicts[cell] = parse_verdict(reply.text) if is_whole else "unparsable"
        pending = [cell for cell in pending if verdicts[cell] == "unparsable"]
    return Judgements(
        labels=tuple(
            label_by(answer, [verdicts[i, r] for r in range(len(rubrics))], config.vote)
            for i, (_, answer) in enumerate(pairs)
        ),
        n_retried=n_retried,
        n_unparsable=len(pending),
    )


def _prompt(
    rubric: Rubric, example: Example, answer: Answer, **marker: int
) -> GeneratorPrompt:
    texts = example.question, example.golds, answer.text
    text = judge_prompt(rubric, *texts, **marker)
    return GeneratorPrompt(text=text, is_chat=True)
