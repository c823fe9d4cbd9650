"""Count the positions that batches compute per token that they hold.

`python docs/positions.py RUN` prints how many positions per token the batches of
`extract.signals.sequence.batches_of` compute for a run's answers. It counts positions
after the worked examples: for all sequences that `extract` reads, and for sequences in
groups of 256 (controllers) and 64 (rows of `score_many`). It also counts whole prompts,
as for answering. No model is run.
"""

import sys
from pathlib import Path

from beatrice.extract.generate.prompts import GenerationConfig
from beatrice.extract.run.contents import read_answers, settings_of
from beatrice.extract.run.directory import RunDir
from beatrice.extract.signals.extract import ExtractConfig
from beatrice.extract.signals.sequence import batches_of, first_read_token


def share(lengths, n_waiting, tokens_per_batch, **options):
    """Return positions per token, if `n_waiting` sequences are batched at a time."""
    positions = 0
    for start in range(0, len(lengths), n_waiting):
        group = lengths[start : start + n_waiting]
        for batch in batches_of(group, tokens_per_batch, **options):
            positions += len(batch) * max(group[i] for i in batch)
    return positions / sum(lengths)


def main(run):
    """Print a table with one row per setting."""
    generation, n_read = GenerationConfig(), ExtractConfig().tokens_per_batch
    n_most, n_new = generation.tokens_per_batch, generation.max_new_tokens
    print("| setting | extract | 256 waiting | 64 waiting | answered |")
    print("|---|---|---|---|---|")
    for setting in settings_of(run):
        answers = read_answers(run, setting)
        prompts = [len(a.prompt_ids) for a in answers]
        lengths = [len(a.prompt_ids) + len(a.token_ids) for a in answers]
        firsts = [first_read_token(a.context_span[0]) for a in answers]
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
