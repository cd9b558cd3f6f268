"""Numeric work on all cores: one Python thread a core, and one BLAS thread in each.

numpy's calls release the interpreter lock, so threads suffice.  BLAS's own threads wait for one another at every
product; on a busy machine that made the products of a tile program ten times slower.  With one BLAS thread the
results do not depend on the number of cores either.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING

from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_WORKERS = 16


@contextmanager
def workers() -> Iterator[ThreadPoolExecutor]:
    """Threads for as many cores as this process may use; BLAS has one thread while they are there."""
    with threadpool_limits(1, "blas"), ThreadPoolExecutor(min(MAX_WORKERS, cores())) as threads:
        yield threads


def cores() -> int:
    """How many cores this process may use."""
    affinity = getattr(os, "sched_getaffinity", None)  # Linux: what a container or taskset allows
    return len(affinity(0)) if affinity else os.cpu_count() or 1
