"""Labels by the consensus of three rubrics: paper, appendix A, "Labels".

Every answer is judged under every rubric, per setting and variant. A reply that is no
verdict is asked for again, twice; what is unparsable then stays so and is counted.
"""

import collections
import dataclasses
from collections.abc import Sequence

from extract.generate.generator import Generator, GeneratorPrompt, SamplingConfig
from extract.generate.replies import Progress, Replies
from extract.label.rubrics import RUBRICS, judge_prompt
from extract.label.verdicts import Verdict, Vote, label_answer, parse_verdict
from extract.records import Answer, Example, Label


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConsensusConfig:
    """How answers are judged.

    Attributes:
      vote: "unanimous" drops what the rubrics disagree on; "majority" keeps it.
      n_retries: how often a reply that is no verdict is asked for again.
      max_new_tokens: longest reply; a verdict is one word, and a reply that was cut
        at this length is none.
      seed: of the fences' markers.
    """

    vote: Vote = "unanimous"
    n_retries: int = 2
    max_new_tokens: int = 8
    seed: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Judged:
    """What the judges said.

    Attributes:
      labels: one per answer, in order; verdicts in the order of `RUBRICS`.
      n_retried: replies that were asked for again, each attempt counted.
      n_unparsable: verdicts that stayed unparsable.
    """

    labels: tuple[Label, ...]
    n_retried: int
    n_unparsable: int

    def counts(self) -> list[dict[str, str | int]]:
        """Return, per setting and variant, how many answers got which label."""
        tallies: dict[tuple[str, str], collections.Counter[str]] = {}
        for label in self.labels:
            tally = tallies.setdefault((label.setting, label.variant), _empty())
            tally["n"] += 1
            kind = {True: "n_correct", False: "n_incorrect", None: "n_dropped"}
            tally[kind[label.label]] += 1
            tally["n_with_unparsable"] += "unparsable" in label.verdicts
        return [
            {"setting": setting, "variant": variant, **tally}
            for (setting, variant), tally in sorted(tallies.items())
        ]


def _empty() -> collections.Counter[str]:
    names = "n n_correct n_incorrect n_dropped n_with_unparsable".split()
    return collections.Counter(dict.fromkeys(names, 0))


def judge_answers(
    pairs: Sequence[tuple[Example, Answer]],
    generator: Generator,
    replies: Replies,
    config: ConsensusConfig,
    progress: Progress = lambda done, total: None,
) -> Judged:
    """Label answers by the consensus of the rubrics.

    Args:
      pairs: answers with their questions.
      generator: the judge.
      replies: where its words are kept.
      config: how.
      progress: told replies there and wanted; a retry starts again from 0.
    """
    cells = [(i, r) for i in range(len(pairs)) for r in range(len(RUBRICS))]
    verdicts: dict[tuple[int, int], Verdict] = {}
    pending, n_retried = cells, 0
    sampling = SamplingConfig(max_new_tokens=config.max_new_tokens)
    for attempt in range(config.n_retries + 1):
        if not pending:
            break
        n_retried += len(pending) if attempt else 0
        prompts = [
            _prompt(pairs[i], rubric=r, attempt=attempt, seed=config.seed)
            for i, r in pending
        ]
        found = replies.generate(generator, prompts, sampling, progress)
        for cell, reply in zip(pending, found, strict=True):
            is_whole = reply.finish == "stop"
            verdicts[cell] = parse_verdict(reply.text) if is_whole else "unparsable"
        pending = [cell for cell in pending if verdicts[cell] == "unparsable"]
    return Judged(
        labels=tuple(
            _label(pair, tuple(verdicts[i, r] for r in range(len(RUBRICS))), config)
            for i, pair in enumerate(pairs)
        ),
        n_retried=n_retried,
        n_unparsable=len(pending),
    )


def _prompt(
    pair: tuple[Example, Answer], *, rubric: int, attempt: int, seed: int
) -> GeneratorPrompt:
    example, answer = pair
    text = judge_prompt(
        RUBRICS[rubric],
        example.question,
        example.golds,
        answer.text,
        attempt=attempt,
        seed=seed,
    )
    return GeneratorPrompt(text=text, is_chat=True)


def _label(
    pair: tuple[Example, Answer],
    verdicts: tuple[Verdict, ...],
    config: ConsensusConfig,
) -> Label:
    example, answer = pair
    return label_answer(example, answer, lambda *_: verdicts, config.vote)
