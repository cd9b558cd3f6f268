"""Batches on the cores of this machine: one spawned process a core, each with a pipe of its own.

A process that dies (out of memory) takes only its own batch with it, and is replaced; all end when this one does,
however it ends.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from multiprocessing import get_context, parent_process
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any

from iosim.errors import IosimError
from iosim.study.sweep.feed import Done, Feed
from iosim.study.sweep.work import Batch, work

STARTED = "started"
_GRACE = 5.0  # seconds that a process gets to end


class PoolError(IosimError):
    """Processes cannot be started (exit code 1)."""


@dataclass(slots=True)
class _Worker:
    """A process, and the batch that it has."""

    process: BaseProcess
    batch: Batch | None = None
    started: bool = False


def here(feed: Feed) -> Generator[Done, None, None]:
    """All batches in this process."""
    while (batch := feed.take()) is not None:
        answers, seconds = work(batch)
        feed.took(batch, seconds)
        yield Done(batch, answers)


def in_processes(feed: Feed, count: int) -> Generator[Done, None, None]:
    """All batches, in `count` processes, as they are done; raises PoolError where processes cannot start."""
    feed.workers = count
    workers: dict[Any, _Worker] = {}
    try:
        for _ in range(count):
            _start(workers)
        while True:
            _fill(feed, workers)
            busy = [conn for conn, worker in workers.items() if worker.batch is not None]
            if not busy:
                return
            done = [_received(feed, workers, conn) for conn in wait(busy)]
            _fill(feed, workers)  # they work while the answers are stored
            yield from (one for one in done if one is not None)
    finally:
        _end(workers)


def _fill(feed: Feed, workers: dict[Any, _Worker]) -> None:
    for conn, worker in workers.items():
        if worker.batch is None:
            worker.batch = feed.take()
            if worker.batch is None:
                return
            with suppress(OSError):  # it has died, which reading from it will show
                conn.send(worker.batch)


def _received(feed: Feed, workers: dict[Any, _Worker], conn: Any) -> Done | None:
    """What a worker says: the answers to its batch, or None when it has started."""
    worker = workers[conn]
    assert worker.batch is not None  # noqa: S101 - only such are waited for
    try:
        answered = conn.recv()
    except (EOFError, OSError):
        conn.close()
        del workers[conn]
        worker.process.join(_GRACE)
        if not worker.started and not feed.timed:  # and no other has done anything yet
            raise PoolError(f"a worker process ended before it had started (exit code {worker.process.exitcode}); "
                            f"--workers 0 runs all in one process") from None  # fmt: skip
        _start(workers)
        return Done(worker.batch, None)
    if answered == STARTED:
        worker.started = True
        return None
    if isinstance(answered, Exception):
        raise answered
    answers, seconds = answered
    batch, worker.batch = worker.batch, None
    feed.took(batch, seconds)
    return Done(batch, answers)


def _start(workers: dict[Any, _Worker]) -> None:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    with _without_interrupts():
        process.start()
    theirs.close()
    workers[ours] = _Worker(process)


@contextmanager
def _without_interrupts() -> Iterator[None]:
    """A process started here never sees Ctrl-C, which a terminal sends to all; this one does, a moment later."""
    if not hasattr(signal, "pthread_sigmask"):
        yield
        return
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _end(workers: dict[Any, _Worker]) -> None:
    for conn, worker in workers.items():
        worker.process.terminate()
        conn.close()
    for worker in workers.values():
        worker.process.join(_GRACE)
        if worker.process.is_alive():
            worker.process.kill()


def _serve(conn: Any) -> None:
    """The life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError):
        conn.send(STARTED)
        while True:
            batch = conn.recv()
            try:
                answered: Any = work(batch)
            except Exception as error:
                answered = error
            conn.send(answered)


def _end_with_parent() -> None:
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
