"""Locks that a fork waits for.

A forked process has the thread that forked, and no other: what the others were at stays
half done there, hooks on a model, default types, a lock that nobody gives back.
"""

import collections
import os
import threading
from typing import ClassVar


class ForkLock:
    """One thread at a time, and again by the one that has it; a fork waits for it.

    Threads get it in the order in which they ask: without that, one that works batch
    after batch would have it again before a thread that waits has woken.

    A fork waits until no thread has any of these locks, and none gets one meanwhile
    that has none: a pass ends first, however long it takes. A thread that has one
    itself forks at once, since whoever it waited for may wait for it.
    """

    # Guards all of them: taken one by one, two locks could wait for each other.
    _changed: ClassVar = threading.Condition()
    _n_held: ClassVar[collections.Counter[int]] = collections.Counter()  # by thread
    _n_forks: ClassVar = 0  # that wait, or are under way
    # Threads that wait, in the order in which they asked, each with its lock.
    _waiting: ClassVar[list[tuple["ForkLock", int]]] = []

    def __init__(self) -> None:
        """Begin free."""
        self._owner: int | None = None
        self._depth = 0  # how often the owner has it
        self._process = os.getpid()

    @property
    def is_forked(self) -> bool:
        """Return whether it is of a process that this one was forked from."""
        return self._process != os.getpid()

    def _is_free_for(self, thread: int) -> bool:
        held = ForkLock._n_held
        if self._owner in held:  # an owner that has nothing is not of this process
            return self._owner == thread
        may_have = (
            waiting
            for lock, waiting in ForkLock._waiting
            if lock is self and (not ForkLock._n_forks or waiting in held)
        )
        return next(may_have, None) == thread

    def __enter__(self) -> None:
        """Wait until no other thread of this process has it."""
        thread = threading.get_ident()
        with ForkLock._changed:
            ForkLock._waiting.append((self, thread))
            try:
                ForkLock._changed.wait_for(lambda: self._is_free_for(thread))
            except BaseException:
                ForkLock._changed.notify_all()  # of whom one may be the next now
                raise
            finally:
                ForkLock._waiting.remove((self, thread))
            self._depth = self._depth + 1 if self._owner == thread else 1
            self._owner = thread
            ForkLock._n_held[thread] += 1

    def __exit__(self, *_: object) -> None:
        """Let the next one have it."""
        thread, held = threading.get_ident(), ForkLock._n_held
        with ForkLock._changed:
            self._depth -= 1
            held[thread] -= 1
            if not held[thread]:
                del held[thread]
            if not self._depth:
                self._owner = None
                ForkLock._changed.notify_all()

    @classmethod
    def _before_fork(cls) -> None:
        ForkLock._changed.acquire()  # until the process has forked
        ForkLock._n_forks += 1
        if threading.get_ident() not in cls._n_held:
            ForkLock._changed.wait_for(lambda: not cls._n_held)

    @classmethod
    def _after_in_parent(cls) -> None:
        ForkLock._n_forks -= 1
        ForkLock._changed.notify_all()
        ForkLock._changed.release()

    @classmethod
    def _after_in_child(cls) -> None:
        ForkLock._changed, ForkLock._n_forks = threading.Condition(), 0
        ForkLock._waiting = []
        for thread in [*cls._n_held]:
            if thread != threading.get_ident():
                del cls._n_held[thread]


os.register_at_fork(
    before=ForkLock._before_fork,
    after_in_parent=ForkLock._after_in_parent,
    after_in_child=ForkLock._after_in_child,
)
