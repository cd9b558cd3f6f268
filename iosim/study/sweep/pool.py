"""Batches on the cores of this machine: one spawned process a core, each with a pipe of its own.

A process that dies (out of memory) takes only its own batch with it, and is replaced; all end when this one does,
however it ends.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Generator, Iterator
from contextlib import contextmanager, suppress
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any

from iosim.study.sweep.feed import Done, Feed
from iosim.study.sweep.work import Batch, work

_GRACE = 5.0  # seconds that a process gets to end


def here(feed: Feed) -> Generator[Done, None, None]:
    """All batches in this process."""
    while (batch := feed.take()) is not None:
        answers, seconds = work(batch)
        feed.took(batch, seconds)
        yield Done(batch, answers)


def in_processes(feed: Feed, count: int) -> Generator[Done, None, None]:
    """All batches, in `count` processes, as they are done."""
    feed.workers = count
    processes: dict[Connection, BaseProcess] = {}
    busy: dict[Connection, Batch] = {}
    try:
        for _ in range(count):
            _start(processes)
        while True:
            _fill(feed, processes, busy)
            if not busy:
                return
            ready = [conn for conn in wait(list(busy)) if isinstance(conn, Connection)]
            done = [_received(feed, processes, conn, busy.pop(conn)) for conn in ready]
            _fill(feed, processes, busy)  # they work while the answers are stored
            yield from done
    finally:
        _end(processes)


def _fill(feed: Feed, processes: dict[Connection, BaseProcess], busy: dict[Connection, Batch]) -> None:
    for conn in [conn for conn in processes if conn not in busy]:
        if (batch := feed.take()) is None:
            return
        busy[conn] = batch
        with suppress(OSError):  # it has died, which reading from it will show
            conn.send(batch)


def _received(feed: Feed, processes: dict[Connection, BaseProcess], conn: Connection, batch: Batch) -> Done:
    try:
        answered = conn.recv()
    except (EOFError, OSError):
        conn.close()
        processes.pop(conn).join(_GRACE)
        _start(processes)
        return Done(batch, None)
    if isinstance(answered, Exception):
        raise answered
    answers, seconds = answered
    feed.took(batch, seconds)
    return Done(batch, answers)


def _start(processes: dict[Connection, BaseProcess]) -> None:
    context = get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_serve, args=(theirs,), daemon=True)
    with _without_interrupts():
        process.start()
    theirs.close()
    processes[ours] = process


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


def _end(processes: dict[Connection, BaseProcess]) -> None:
    for conn, process in processes.items():
        process.terminate()
        conn.close()
    for process in processes.values():
        process.join(_GRACE)
        if process.is_alive():
            process.kill()


def _serve(conn: Any) -> None:
    """The life of a worker."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, daemon=True).start()
    with suppress(EOFError, OSError):
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
