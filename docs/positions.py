"""Count the positions that batches compute by the tokens that they hold.

`python docs/positions.py RUN` prints, of the answers of a run, how many positions a
token `extract.signals.sequence.batches_of` computes behind the worked examples: of all
that `extract` reads, and of sequences that wait in groups of 256 (controllers) and 64
(rows of `score_many`); and of whole prompts that are answered. Nothing is computed by a
model.
"""

import sys
from pathlib import Path

from beatrice.extract.generate.prompts import GenerationConfig
from beatrice.extract.run.contents import read_answers, settings_of
from beatrice.extract.run.directory import RunDir
from beatrice.extract.signals.extract import ExtractConfig
from beatrice.extract.signals.sequence import batches_of, first_read


def share(lengths, n_waiting, tokens_per_batch, **options):
    """Return positions by tokens, where so many sequences wait at once."""
    positions = 0
    for start in range(0, len(lengths), n_waiting):
        group = lengths[start : start + n_waiting]
        for batch in batches_of(group, tokens_per_batch, **options):
            positions += len(batch) * max(group[i] for i in batch)
    return positions / sum(lengths)


def main(run):
    """Print a table, a setting a row."""
    generation, n_read = GenerationConfig(), ExtractConfig().tokens_per_batch
    n_most, n_new = generation.tokens_per_batch, generation.max_new_tokens
    print("| setting | extract | 256 waiting | 64 waiting | answered |")
    print("|---|---|---|---|---|")
    for setting in settings_of(run):
        answers = read_answers(run, setting)
        prompts = [len(a.prompt_ids) for a in answers]
        lengths = [len(a.prompt_ids) + len(a.token_ids) for a in answers]
        firsts = [first_read(a.context_span[0]) for a in answers]
        behind = [n - first for n, first in zip(lengths, firsts, strict=True)]
        n_begun = max(firsts)
        shares = (
            share(behind, len(behind), n_read, n_beside=n_begun),
            share(behind, 256, n_most, n_beside=n_begun),
            share(behind, 64, n_most, n_beside=n_begun),
            share(prompts, len(prompts), n_most, n_beside=n_new, n_passes=n_new),
        )
        print(f"| {setting} | {' | '.join(f'{x:.2f}' for x in shares)} |")


if __name__ == "__main__":
    main(RunDir(Path(sys.argv[1])))
