"""How texts are written down: by the batch, in the time of none, for a share alone."""

import time
from functools import partial

from beatrice.extract.generate.generator import GeneratorPrompt, Replies, reply_files
from beatrice.extract.run.files import Journal
from beatrice.extract.run.process import Share
from tests.extract.generate.loopback import GREEDY
from tests.extract.label.scripted import ScriptedGenerator

PROMPTS = [GeneratorPrompt(text=str(i)) for i in range(12)]


class InPairs(ScriptedGenerator):
    """A generator of this machine, whose batches are two prompts each."""

    def plan(self, prompts, config):
        return [(i, i + 1) for i in range(0, len(prompts), 2)]


class SlowJournal(Journal):
    """A journal on a disk that takes a while to sync."""

    n_syncs = 0

    def append(self, rows):
        super().append(rows)
        self.n_syncs += 1
        time.sleep(0.25)


def test_a_batch_is_written_in_one_go_and_its_texts_take_no_time_for_it(tmp_path):
    journal = SlowJournal(**vars(Journal.open(reply_files(tmp_path / "r.jsonl"))))
    replies = Replies(journal=journal, is_timed=True)
    texts = replies.generate(InPairs(str.upper), PROMPTS, GREEDY)
    assert [text.text for text in texts] == [prompt.text for prompt in PROMPTS]
    assert journal.n_syncs == 6
    assert sum(text.seconds for text in texts) < 0.25


def test_the_progress_of_a_share_is_of_its_own_texts(tmp_path):
    files = reply_files(tmp_path / "r.jsonl", tmp_path / "parts")
    # Another worker's texts are there, and one prompt stands twice.
    for rank in range(3):
        share, counts = Share(rank, 3), []
        replies = Replies(journal=Journal.open(files, share), share=share)
        twice = [*PROMPTS, *PROMPTS[:2]]
        update = partial(note_counts, counts)
        replies.generate(InPairs(str.upper), twice, GREEDY, update)
        assert counts == [(0, 4), (2, 4), (4, 4)]


def note_counts(counts, done, total):
    counts.append((done, total))
