"""Batches on a cluster: the same ones, sent to a Dask scheduler.

Dask itself sends a batch to another worker when the one that had it is lost.  The scheduler and the workers need this
version of iosim; a dataflow's own file has to be at the same path there.
"""

from __future__ import annotations

import logging
import pickle
import re
from collections.abc import Generator
from typing import Any
from uuid import uuid4

from iosim.errors import InputError, IosimError
from iosim.study.sweep.feed import BATCH_SECONDS, Done, Feed
from iosim.study.sweep.store import Answer
from iosim.study.sweep.work import work

AHEAD = 2  # batches that wait for each thread, so that none is idle while the answer to one travels
TASK_SECONDS = 0.01  # of the scheduler's one core for a task; see docs/cluster.md
_ADDRESS = re.compile(r"(tcp|tls|wss?)://(\[[0-9a-fA-F:.%]+\]|[^\s/:@\[\]]+):(\d{1,5})")
_SECONDS = 30  # to reach the scheduler, and for a first worker to be there


class ClusterError(IosimError):
    """The cluster was lost (exit code 1)."""


def require_address(address: str) -> None:
    """Raise InputError for what has not the form of a scheduler's address; whether one is there is seen later."""
    found = _ADDRESS.fullmatch(address)
    if found is None or not 1 <= int(found[3]) <= 65_535:
        raise InputError(f"scheduler: {address!r} is not an address like tcp://HOST:PORT (tcp, tls, ws or wss)")


def unpacked(packed: bytes) -> tuple[tuple[Answer, ...], float]:
    """`work` of a batch that is bytes on its way, so that the scheduler spends no time on what is in it."""
    return work(pickle.loads(packed))  # noqa: S301 - our own, of the client that this worker serves


def on_cluster(feed: Feed, address: str) -> Generator[Done, None, None]:
    """All batches, on the workers of the scheduler at `address`, as they are done.

    Raises InputError where it cannot be reached or has no workers, ClusterError where it is lost.
    """
    require_address(address)
    try:
        from distributed import Client, as_completed
        from distributed.scheduler import KilledWorker
    except ImportError:
        raise InputError("scheduler: needs the package distributed: pip install 'iosim[dask]'") from None
    logging.getLogger("distributed").setLevel(logging.CRITICAL)  # what matters is raised

    class Reached(Client):  # type: ignore[misc]
        """A client that is closed where it could not start; else Python waits for it at its end, a minute or more."""

        def start(self, **options: Any) -> None:
            try:
                super().start(**options)
            except BaseException:
                self.status = "closed"
                raise

    try:
        client = Reached(address, timeout=_SECONDS, set_as_default=False)
    except (OSError, ValueError, TypeError) as error:
        raise InputError(f"scheduler: {address!r} cannot be reached: {str(error).partition(chr(10))[0]}") from None
    with client:
        try:
            client.wait_for_workers(1, timeout=_SECONDS)
        except TimeoutError:
            raise InputError(f"scheduler: {address} has no workers") from None
        waiting: dict[str, Any] = {}
        done = as_completed(loop=client.loop)
        while True:
            feed.workers = max(1, sum(client.nthreads().values()))
            feed.batch_seconds = max(BATCH_SECONDS, TASK_SECONDS * feed.workers)
            while len(waiting) < AHEAD * feed.workers and (batch := feed.take()) is not None:
                future = client.submit(unpacked, pickle.dumps(batch), key=f"iosim-{uuid4().hex}", pure=False)
                waiting[future.key] = batch
                done.add(future)
            if not waiting:
                return
            future = next(done)
            batch = waiting.pop(future.key)
            failure = future.exception()
            if failure is None:
                answers, seconds = future.result()
                feed.took(batch, seconds)
                yield Done(batch, answers)
            elif isinstance(failure, KilledWorker):
                yield Done(batch, None)
            elif isinstance(failure, IosimError):
                raise failure
            elif isinstance(failure, ImportError | AttributeError) or "deserialization" in str(failure):
                raise InputError(f"scheduler: {address} or its workers have no iosim, or another than this")
            else:
                raise ClusterError(f"scheduler: {address}: {type(failure).__name__}: {failure}")
