"""Measure how early in an answer its running P is useful.

`python docs/prefixes.py RUN PROBE [SET …]` asks the closed-book test and held-out
questions of a run (only its examples are needed) with a packaged probe. It scores every
answer after 25, 50, 75 and 100 % of its tokens, rounded up, in the passes that write
it: as an answer that ends there (as `Probe.stream` does), and as one that is cut there,
whose last token emitted nothing. Whole answers are labelled by exact match. The mean
log-probability of the same tokens is shown for comparison.
"""

import math
import sys
from pathlib import Path

import numpy as np

import beatrice
from beatrice.extract.generate.answers import prompts_of
from beatrice.extract.generate.generator import SamplingConfig
from beatrice.extract.generate.local import TransformersGenerator
from beatrice.extract.label.labels import exact_match
from beatrice.extract.records import Answer
from beatrice.extract.run.contents import read_examples
from beatrice.extract.run.directory import RunDir
from beatrice.extract.signals.decode import DecodeReading
from beatrice.fitting import metric_rows
from beatrice.jaxprobe.metrics import BootstrapConfig

MOST_TOKENS = 16  # of an answer
SHARES = (0.25, 0.5, 0.75, 1.0)
WAYS = ("as if it ended", "as if it were cut", "mean log p")


class Prefixes(DecodeReading):
    """Scores every answer of a batch after each token that is chosen."""

    def __init__(self, probed, requests, stop_id):
        """Start without tokens; `scores[way][row]` has one entry per token."""
        prompts = [request.prompt for request in requests]
        super().__init__(probed.reader, prompts, MOST_TOKENS)
        self.probed, self.requests, self.stop_id = probed, requests, stop_id
        self.texts = [[] for _ in requests]
        self.scores = {way: [[] for _ in requests] for way in WAYS}

    def on_choice(self, ids, is_done):
        """Score the text so far: as ended before this token, and as cut after it."""
        super().on_choice(ids, is_done)
        for row, token in zip(self.run_rows, ids[:, -1].tolist(), strict=True):
            self.texts[row].append(token)
        n = max(map(len, self.texts))
        if n > 1:
            self.score("as if it ended", n - 1, self.stop_id, self.ended)
        if n <= MOST_TOKENS:
            self.score("as if it were cut", n, None, self.signals)

    def score(self, way, n, stop_id, read):
        """Score the first `n` tokens of the rows that are still being written."""
        answers = [
            Answer(
                example_id=request.example_id,
                setting=request.setting,
                variant=request.variant,
                text="",
                prompt_ids=request.prompt.ids,
                token_ids=tuple(text[:n]),
                stop_id=stop_id,
                context_span=request.prompt.context_span,
            )
            for request, text in zip(self.requests, self.texts, strict=True)
        ]
        signals = read(answers)
        rows = [row for row in self.run_rows if signals[row] is not None]
        if not rows:
            return
        sequences = [
            self.probed.sequence(self.requests[row], answers[row]) for row in rows
        ]
        reading = self.probed.reading([signals[row] for row in rows], sequences)
        scores = self.probed.score("closed_book", {"closed_book": reading})
        for row, p, sequence in zip(rows, scores.p_correct, sequences, strict=True):
            self.scores[way][row].append(p)
            if way == "as if it were cut":
                span = sequence.spans[2] - signals[row].first_token
                emitted = signals[row].prob[slice(*span), 1]
                self.scores["mean log p"][row].append(-emitted.mean())


def scored(probed, requests):
    """Return the answers, each with the scores of its prefixes in every way."""
    generator = TransformersGenerator(backbone=probed.backbone)
    sampling = SamplingConfig(max_new_tokens=MOST_TOKENS, stop=probed.config.stop)
    prompts = prompts_of(requests)
    rows = {}
    for batch in generator.plan(prompts, sampling):
        rows_of_batch = [requests[i] for i in batch]
        watch = Prefixes(probed, rows_of_batch, probed.trained.stop_id)
        replies = generator.write([prompts[i] for i in batch], sampling, watch)
        for row, (i, reply) in enumerate(zip(batch, replies, strict=True)):
            answer = rows_of_batch[row].answer(reply)
            rows[i] = answer, {way: watch.scores[way][row] for way in WAYS}
        print(f"{len(rows)} of {len(requests)} answers", file=sys.stderr, flush=True)
    return [rows[i] for i in range(len(requests))]


def main(run, name, *datasets):
    """Print a table with one row per set and way."""
    probed = beatrice.load(name).scorer.probed
    examples = [
        example
        for example in read_examples(RunDir(Path(run)))
        if example.split in ("test", "ood")
    ]
    shares = " | ".join(f"{share:.0%}" for share in SHARES)
    print(f"| set | n, right | mean tokens | P of a prefix | {shares} |")
    print("|---" * 8 + "|")
    for dataset in datasets or sorted({example.dataset for example in examples}):
        of_set = [example for example in examples if example.dataset == dataset]
        texts = [example.question for example in of_set]
        requests = probed.requests("closed_book", texts, [()] * len(texts))
        pairs = list(zip(scored(probed, requests), of_set, strict=True))
        # An answer of maximal length can only be scored as cut.
        pairs = [pair for pair in pairs if 0 < len(pair[0][0].token_ids) < MOST_TOKENS]
        labels = np.array([exact_match(a.text, e.golds) for (a, _), e in pairs])
        lengths = [len(a.token_ids) for (a, _), _ in pairs]
        ids = np.array([example.id for _, example in pairs])
        about = f"{len(labels)}, {labels.sum()} | {np.mean(lengths):.1f}"
        for way in WAYS:
            cells = []
            for share in SHARES:
                places = [math.ceil(share * n) - 1 for n in lengths]
                values = np.array(
                    [s[way][k] for ((_, s), _), k in zip(pairs, places, strict=True)]
                )
                config = BootstrapConfig(n_resamples=2000)
                row = metric_rows(values, values, labels, ids, config)[0]
                cells.append(
                    f"{row['value']:.3f} [{row['ci_low']:.3f}, {row['ci_high']:.3f}]"
                )
            print(f"| {dataset} | {about} | {way} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
