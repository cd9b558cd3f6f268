"""Many configurations, on all cores or a cluster, into a store; see grid, store, pool and cluster."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from time import monotonic

from iosim.parallel import cores
from iosim.study.run import Note
from iosim.study.sweep.feed import Done, Feed
from iosim.study.sweep.grid import Configuration, Grid
from iosim.study.sweep.pool import here, in_processes
from iosim.study.sweep.store import Answer, Store, Stored
from iosim.study.sweep.work import answer
from iosim.words import count

DIED = "the process that ran it died, twice; it may need more memory than there is"


@dataclass(frozen=True, slots=True)
class Swept:
    """What a sweep did: `keys` in the order of its grids; `done` now, `failed` of these, and `found` in the store."""

    keys: tuple[str, ...]
    done: int
    failed: int
    found: int
    seconds: float


def sweep(
    grids: Sequence[Grid],
    store: Store,
    *,
    workers: int | None = None,
    scheduler: str | None = None,
    retry: bool = False,
    note: Note = lambda _: None,
) -> Swept:
    """Run what is missing in the store, and with `retry` what has failed; answers are kept batch by batch.

    `workers` are processes: as many as there are cores, 0 for none but this one.  `scheduler` is a Dask scheduler's
    address, whose workers run the same.
    """
    note("listing the configurations")
    wanted = {c.key: c for grid in grids for c in grid.configurations()}
    known = store.known(list(wanted), failed=not retry)
    todo = [c for key, c in wanted.items() if key not in known]
    refused = [c for c in todo if c.job is None]
    store.add([answer(c) for c in refused])
    feed = Feed([c for c in todo if c.job is not None], lambda keys: _missing(store, keys, retry=retry))
    where = "starting workers" if scheduler is None else f"waiting for the scheduler at {scheduler}"
    note(f"{count(len(todo), 'configuration', 'configurations')} to run; {where}")
    start, first, done, failed = monotonic(), None, len(refused), len(refused)
    with closing(_backend(feed, workers, scheduler)) as batches:
        for answers in _answers(batches, feed):
            store.add(answers)
            done += len(answers)
            failed += sum(a.error is not None for a in answers)
            first = first or (monotonic(), done)
            note(_progress(done, len(todo) - feed.elsewhere, done - first[1], monotonic() - first[0]))
    return Swept(tuple(wanted), done, failed, len(wanted) - done, monotonic() - start)


def _missing(store: Store, keys: Sequence[str], *, retry: bool) -> set[str]:
    return set(keys) - store.known(keys, failed=not retry)


def _backend(feed: Feed, workers: int | None, scheduler: str | None) -> Generator[Done, None, None]:
    if scheduler is not None:
        from iosim.study.sweep.cluster import on_cluster

        return on_cluster(feed, scheduler)
    processes = min(cores() if workers is None else workers, len(feed.left))
    return in_processes(feed, processes) if processes else here(feed)


def _answers(batches: Iterator[Done], feed: Feed) -> Iterator[Sequence[Answer]]:
    """The answers of batches; where a process died, its batch is tried once more, each configuration alone."""
    alone: set[str] = set()
    for one in batches:
        if one.answers is not None:
            yield one.answers
            continue
        (first, *more) = one.batch.configurations
        if not more and first.key in alone:
            yield [Answer(first.key, first.inputs, None, DIED)]
        else:
            alone.update(c.key for c in one.batch.configurations)
            feed.one_by_one(one.batch)


def _progress(done: int, of: int, lately: int, seconds: float) -> str:
    """How far it is, and how fast and how long from here: by what was done `lately`, in so many seconds."""
    from datetime import timedelta

    rate = lately / seconds if seconds > 0 else 0.0
    left = f", {rate:.3g} a second, {timedelta(seconds=round((of - done) / rate))} left" if rate else ""
    return f"{done:,} of {count(of, 'configuration', 'configurations')}{left}"


__all__ = ["Configuration", "Grid", "Store", "Stored", "Swept", "sweep"]
