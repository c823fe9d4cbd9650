"""How texts are recorded: by batch, outside their own time, counted per share."""

import time
from functools import partial

from beatrice.extract.generate.generator import GeneratorPrompt, Replies, reply_files
from beatrice.extract.run.files import Journal
from beatrice.extract.run.process import Share
from tests.extract.generate.loopback import GREEDY
from tests.extract.label.scripted import ScriptedGenerator

PROMPTS = [GeneratorPrompt(text=str(i)) for i in range(12)]


class InPairs(ScriptedGenerator):
    """A local generator with batches of two prompts."""

    def plan(self, prompts, config):
        return [(i, i + 1) for i in range(0, len(prompts), 2)]


class SlowJournal(Journal):
    """A journal on a disk that takes a while to sync."""

    n_syncs = 0

    def append(self, rows):
        super().append(rows)
        self.n_syncs += 1
        time.sleep(0.25)


def test_a_batch_is_written_at_once_and_its_time_excludes_the_writing(tmp_path):
    journal = SlowJournal(**vars(Journal.open(reply_files(tmp_path / "r.jsonl"))))
    replies = Replies(journal=journal, is_timed=True)
    texts = replies.generate(InPairs(str.upper), PROMPTS, GREEDY)
    assert [text.text for text in texts] == [prompt.text for prompt in PROMPTS]
    assert journal.n_syncs == 6
    assert sum(text.seconds for text in texts) < 0.25


def test_the_progress_of_a_share_counts_only_its_own_texts(tmp_path):
    files = reply_files(tmp_path / "r.jsonl", tmp_path / "parts")
    # Other workers' texts are there, and two prompts are repeated.
    for rank in range(3):
        share, counts = Share(rank, 3), []
        replies = Replies(journal=Journal.open(files, share), share=share)
        twice = [*PROMPTS, *PROMPTS[:2]]
        update = partial(note_counts, counts)
        replies.generate(InPairs(str.upper), twice, GREEDY, update)
        assert counts == [(0, 4), (2, 4), (4, 4)]


def note_counts(counts, done, total):
    counts.append((done, total))
