"""Locks that a fork waits for, and under which no interrupt comes at a wrong moment.

A forked process has only the thread that forked. What other threads were doing stays
half done in it: hooks on a model, a changed default type, a lock nobody releases.
Ctrl-C does the same where it ends a function that was about to undo such a change.
"""

import _thread
import collections

# Both take a lock of their own before a fork. What was registered first comes last:
# else a fork would have these locks already while it waits for a thread that needs one.
import concurrent.futures.thread  # noqa: F401
import contextlib
import logging  # noqa: F401
import os
import signal
import threading
import time
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, ClassVar

# Signals whose handlers usually raise: Ctrl-C, the end of a job, a user's time limit.
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
# Functions that an exception would leave with a change half made or half undone.
_UNBROKEN = {
    function.__code__
    for function in (contextlib.ExitStack.enter_context, contextlib.ExitStack.callback)
}
_LONGEST, _WAIT = 0.5, 0.001  # seconds
# The process's handlers, for which `_deliver` stands while the main thread has a lock.
_handlers: dict[int, Callable[[int, FrameType | None], Any]] = {}
_pending: dict[int, float] = {}  # signals that wait, and when they came


def _deliver(number: int, frame: FrameType | None) -> None:
    """Call the process's handler once no context is being entered or left.

    That is half a second later at most: what takes longer, such as waiting for a lock
    or for a pool of threads, can be interrupted.
    """
    caller = frame
    while caller is not None and not _changes_context(caller.f_code):
        caller = caller.f_back
    waited = time.monotonic() - _pending.setdefault(number, time.monotonic())
    if caller is not None and waited < _LONGEST:
        # Not a `threading.Thread`: this thread may be inside its locks.
        _thread.start_new_thread(_send_again, (threading.get_ident(), number))
        return
    _pending.pop(number, None)  # another signal may have come on the lines above
    _handlers[number](number, frame)


def _changes_context(code: CodeType) -> bool:
    return code.co_name in ("__enter__", "__exit__") or code in _UNBROKEN


def _send_again(thread: int, number: int) -> None:
    time.sleep(_WAIT)
    if number in _pending:
        signal.pthread_kill(thread, number)  # which ends its waiting, as Ctrl-C does


def _postpone_signals() -> None:
    _pending.clear()  # one may be left if the handler of another has raised
    for number in _SIGNALS:
        handler = signal.getsignal(number)
        # Asyncio's raises nothing, but every arrival of a signal calls its callbacks.
        is_asyncio = getattr(handler, "__name__", "") == "_sighandler_noop"
        if callable(handler) and handler is not _deliver and not is_asyncio:
            _handlers[number] = handler
            signal.signal(number, _deliver)


def _restore_signals() -> None:
    for number, handler in _handlers.items():
        if signal.getsignal(number) is _deliver:
            signal.signal(number, handler)
    while _pending:  # now, while their handlers are there
        signal.raise_signal(_pending.popitem()[0])


def _handles_signals(thread: int) -> bool:
    return thread == threading.main_thread().ident


class ForkLock:
    """A re-entrant lock that a fork waits for.

    Threads get it in the order in which they ask. Otherwise a thread that works batch
    after batch would take it again before a waiting thread has woken.

    A fork waits until no thread holds any of these locks; meanwhile a thread that holds
    none cannot get one. So a running pass ends first, however long it takes. A thread
    that holds one itself forks at once: a thread it waited for may be waiting for it.

    While the main thread holds one, signals that would raise an exception in it wait
    until no context is being entered or left, so that all changes are undone.
    """

    # Guards all locks: with a condition each, two locks could wait for each other. Not
    # entered by way of the condition, in whose code an interrupt would leave it taken.
    _guard: ClassVar = threading.RLock()
    _changed: ClassVar = threading.Condition(_guard)
    _n_held: ClassVar[collections.Counter[int]] = collections.Counter()  # by thread
    _n_forks: ClassVar = 0  # forks that wait or are under way
    # Waiting threads, in the order in which they asked, each with its lock.
    _waiting: ClassVar[list[tuple["ForkLock", int]]] = []

    def __init__(self) -> None:
        """Create a free lock."""
        self._owner: int | None = None
        self._depth = 0  # how many times the owner has entered

    def _is_free_for(self, thread: int) -> bool:
        n_held = ForkLock._n_held
        if self._owner in n_held:  # else free, or the owner was lost in a fork
            return self._owner == thread
        may_have = (
            waiting
            for lock, waiting in ForkLock._waiting
            if lock is self and (not ForkLock._n_forks or waiting in n_held)
        )
        return next(may_have, None) == thread

    def __enter__(self) -> None:
        """Wait until no other thread of this process holds the lock, and take it."""
        thread, is_taken = threading.get_ident(), False
        try:
            with ForkLock._guard:
                ForkLock._waiting.append((self, thread))
                try:
                    ForkLock._changed.wait_for(lambda: self._is_free_for(thread))
                finally:
                    ForkLock._waiting.remove((self, thread))
                ForkLock._n_held[thread] += 1
                self._depth = self._depth + 1 if self._owner == thread else 1
                self._owner, is_taken = thread, True
            if ForkLock._n_held[thread] == 1 and _handles_signals(thread):
                _postpone_signals()
        except BaseException:  # an interrupt, at any of these lines
            if is_taken:
                self.__exit__()
            with ForkLock._guard:
                ForkLock._changed.notify_all()  # another may be next in line
            raise

    def __exit__(self, *_: object) -> None:
        """Leave the lock once; after the last time, release it to the next thread."""
        thread, n_held = threading.get_ident(), ForkLock._n_held
        with ForkLock._guard:
            self._depth -= 1
            n_held[thread] -= 1
            if not n_held[thread]:
                del n_held[thread]
            if not self._depth:
                self._owner = None
                ForkLock._changed.notify_all()
        if thread not in n_held and _handles_signals(thread):
            _restore_signals()

    @classmethod
    def _before_fork(cls) -> None:
        ForkLock._guard.acquire()  # until the process has forked
        ForkLock._n_forks += 1
        if threading.get_ident() not in cls._n_held:
            ForkLock._changed.wait_for(lambda: not cls._n_held)

    @classmethod
    def _after_in_parent(cls) -> None:
        ForkLock._n_forks -= 1
        ForkLock._changed.notify_all()
        ForkLock._guard.release()

    @classmethod
    def _after_in_child(cls) -> None:
        ForkLock._guard, ForkLock._n_forks = threading.RLock(), 0
        ForkLock._changed, ForkLock._waiting = threading.Condition(cls._guard), []
        _pending.clear()  # whoever would send them again is in the parent
        for thread in [*cls._n_held]:
            if thread != threading.get_ident():
                del cls._n_held[thread]


os.register_at_fork(
    before=ForkLock._before_fork,
    after_in_parent=ForkLock._after_in_parent,
    after_in_child=ForkLock._after_in_child,
)
