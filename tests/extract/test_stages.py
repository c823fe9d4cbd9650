import threading
from concurrent.futures import CancelledError

import pytest

from extract.run.stages import side_by_side


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


def test_one_at_a_time_none_begins_before_the_last_has_ended():
    now, most, began = set(), [], []

    def work(item, tick):
        began.append(item)
        now.add(item)
        most.append(len(now))
        tick()
        now.remove(item)

    side_by_side(work, "abc", lambda *_: None, 3, at_once=1)
    assert began == ["a", "b", "c"] and most == [1, 1, 1]

    def fail(item, tick):
        began.append(item)
        raise ValueError("this part is damaged")

    with pytest.raises(ValueError, match="damaged"):
        side_by_side(fail, "xyz", lambda *_: None, 3, at_once=1)
    assert began[3:] == ["x"]
