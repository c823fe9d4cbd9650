import threading
from concurrent.futures import CancelledError

import pytest

from benchmarks.stage import side_by_side


def test_every_item_is_done_and_every_thing_counted_once():
    told = []

    def work(item, tick):
        for _ in range(item):
            tick()

    side_by_side(work, (3, 4), lambda *said: told.append(said), 7)
    assert sorted(told) == [(n, 7) for n in range(1, 8)]


def test_a_part_that_fails_stops_the_others_and_is_what_is_raised():
    failed, ended = threading.Event(), []

    def work(item, tick):
        if item == "bad":
            failed.set()
            raise ValueError("this part is damaged")
        failed.wait()
        try:
            while True:  # ends only because the other part has failed
                tick()
        except CancelledError:
            ended.append(item)
            raise

    with pytest.raises(ValueError, match="damaged"):
        side_by_side(work, ("good", "bad"), lambda *_: None, 1)
    assert ended == ["good"]
