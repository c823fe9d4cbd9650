"""What a fork finds: free locks, and the work under them done."""

import contextlib
import signal
import sys
import threading
import time

import pytest

from beatrice.extract.forks import ForkLock
from tests.process import forked, interrupt_where, run_python

BUSY = """
import os, signal, threading
from beatrice.extract.forks import ForkLock  # first, as after `import beatrice`
import logging
from concurrent.futures import ThreadPoolExecutor
signal.alarm(20)  # ends a process that waits
held = threading.Event()
def work():
    with ForkLock(), ThreadPoolExecutor() as pool:
        held.set()
        while not ForkLock._n_forks:
            pass
        pool.submit(logging.getLogger, "new").result()
thread = threading.Thread(target=work)
thread.start()
held.wait()
if os.fork() == 0:
    os._exit(0)
thread.join()
"""


def take(*locks):
    for lock in locks:
        with lock:
            pass


@contextlib.contextmanager
def thread_of(work):
    """Run a thread until it sets its event; at the end wait for it."""
    there = threading.Event()
    thread = threading.Thread(target=work, args=(there,), daemon=True)
    thread.start()
    assert there.wait(30)
    yield
    thread.join(30)
    assert not thread.is_alive()


def test_a_fork_waits_until_the_work_under_a_lock_is_done():
    first, second, done = ForkLock(), ForkLock(), []

    def work(there):
        with first:
            there.set()
            time.sleep(0.3)
            with second:  # a fork that held it would deadlock
                done.append("all")

    def look():
        take(first, second)
        assert done

    with thread_of(work):
        assert forked(look) == 0
    take(first, second)


def test_a_fork_takes_no_lock_that_a_thread_needs_to_log_or_to_start_another():
    run_python(BUSY)


def test_a_waiting_thread_gets_a_lock_before_one_that_takes_it_repeatedly():
    lock, turns = ForkLock(), []

    def work(there):
        for turn in range(50):
            with lock:
                turns.append(turn)
                there.set()
                time.sleep(0.01)

    with thread_of(work):
        n_before = len(turns)
        with lock:
            n_waited = len(turns) - n_before
    assert n_waited <= 3 and len(turns) == 50


def test_a_thread_interrupted_while_it_waited_does_not_block_others():
    lock, leave = ForkLock(), threading.Event()

    def work(there):
        with lock:
            there.set()
            leave.wait(30)

    def ask(there):
        take(lock)
        there.set()

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # xdist ignores
    with thread_of(work):
        me = threading.get_ident()
        threading.Timer(0.2, signal.pthread_kill, [me, signal.SIGINT]).start()
        with pytest.raises(KeyboardInterrupt):
            take(lock)
        leave.set()
    signal.signal(signal.SIGINT, before)
    with thread_of(ask):
        pass


def test_an_interrupt_inside_pythons_locks_leaves_no_lock_taken():
    lock, n_left = ForkLock(), 0

    def interrupt(frame, event, arg):  # where Python looks for signals
        nonlocal n_left
        n_left -= frame.f_code.co_filename == threading.__file__
        if n_left == 0:
            raise KeyboardInterrupt

    def ask(there):
        take(lock)
        there.set()

    before = sys.gettrace()
    for n_left in range(1, 7):  # noqa: B007 (`interrupt` reads it)
        sys.settrace(interrupt)
        with contextlib.suppress(KeyboardInterrupt):
            take(lock)
        sys.settrace(before)
        with thread_of(ask):
            pass


def test_an_interrupt_that_comes_as_a_lock_is_left_waits_until_it_is_free():
    lock = ForkLock()

    def ask(there):
        take(lock)
        there.set()

    interrupt_where(ForkLock.__exit__.__code__.__eq__, lambda: take(lock))
    with thread_of(ask):
        pass


def test_what_takes_long_to_be_left_is_interrupted_all_the_same():
    def slowly():
        with ForkLock(), contextlib.ExitStack() as stack:
            stack.callback(time.sleep, 60)

    start = time.monotonic()
    interrupt_where(contextlib.ExitStack.__exit__.__code__.__eq__, slowly)
    assert 0.5 <= time.monotonic() - start < 25


def test_a_signal_that_waits_comes_before_the_last_lock_has_been_left():
    """A time limit would otherwise end after its handler has gone, and kill."""
    before, came = signal.signal(signal.SIGALRM, lambda *_: came.append("alarm")), []

    def trace(frame, event, arg):
        if frame.f_code is ForkLock.__exit__.__code__ and not sent:
            sent.append(signal.raise_signal(signal.SIGALRM))

    sent, tracer = [], sys.gettrace()
    sys.settrace(trace)
    take(ForkLock())
    sys.settrace(tracer)
    assert came == ["alarm"] and sent
    signal.signal(signal.SIGALRM, before)
    time.sleep(0.05)
    assert came == ["alarm"]


def test_the_handler_of_the_process_comes_back_with_the_last_lock():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with ForkLock(), ForkLock():
            assert signal.getsignal(signal.SIGINT) is not signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        with ForkLock():  # a handler that is set under a lock stays
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        assert signal.getsignal(signal.SIGINT) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_fork_is_not_blocked_by_threads_that_take_locks_repeatedly():
    first, second, leave = ForkLock(), ForkLock(), threading.Event()

    def working(lock):
        def work(there):
            while not leave.is_set():
                with lock:
                    there.set()
                    time.sleep(0.02)

        return work

    with thread_of(working(first)), thread_of(working(second)):
        codes = [forked(lambda: take(first, second)) for _ in range(3)]
        leave.set()
    assert codes == [0] * 3


def test_the_holder_of_a_lock_can_fork_and_also_holds_it_in_the_child():
    mine, theirs, leave = ForkLock(), ForkLock(), threading.Event()

    def work(there):
        with theirs:
            there.set()
            with mine:  # waits for the forking thread
                leave.set()

    def child():
        take(mine, theirs)
        mine.__exit__()
        thread = threading.Thread(target=take, args=(mine, theirs))
        thread.start()
        thread.join(20)
        assert not thread.is_alive()

    mine.__enter__()
    with thread_of(work):
        code = forked(child)
        mine.__exit__()
        assert leave.wait(30)
    assert code == 0
