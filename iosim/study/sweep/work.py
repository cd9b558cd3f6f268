"""What a worker does: a batch of configurations, one after the other, here or on another machine."""

from __future__ import annotations

import json
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from threading import Lock
from time import perf_counter
from typing import Any

import iosim
from iosim.errors import InputError
from iosim.study.batch import result_of
from iosim.study.outcome import run_case
from iosim.study.run import Run, chosen_fields
from iosim.study.sweep.grid import Configuration, content_hash
from iosim.study.sweep.store import Answer
from iosim.study.vary import Case, Source

_ONE = Lock()  # a cluster's worker may have several threads, which this work cannot use


@dataclass(frozen=True, slots=True)
class Batch:
    """Configurations that one worker runs one after the other, and what it has to be the same as the sender."""

    configurations: tuple[Configuration, ...]
    version: str
    contents: Mapping[Source, str] = field(hash=False)

    @classmethod
    def of(cls, configurations: Sequence[Configuration]) -> Batch:
        """A batch of ours."""
        sources = {c.job.source for c in configurations if c.job is not None}
        return cls(tuple(configurations), iosim.__version__, {source: content_hash(source) for source in sources})


def work(batch: Batch) -> tuple[tuple[Answer, ...], float]:
    """What each configuration comes to, and how many seconds all took.

    Raises InputError where this process's iosim, or a dataflow's file, is not the sender's.
    """
    with _ONE:
        _prepare()
        if batch.version != iosim.__version__:
            raise InputError(f"scheduler: its workers have iosim {iosim.__version__}, this is {batch.version}")
        for source, content in batch.contents.items():
            try:
                same = content_hash(source) == content
            except (OSError, InputError) as error:
                raise InputError(f"scheduler: its workers say: {error}") from None
            if not same:
                raise InputError(f"scheduler: its workers have another {source.kernel or source.dataflow}")
        start = perf_counter()
        answers = tuple(map(answer, batch.configurations))
        for source in batch.contents:
            source.load().written.clear()  # or the memory of a long sweep would grow
        return answers, perf_counter() - start


@lru_cache(maxsize=1)
def _prepare() -> None:
    """One BLAS thread in this process: there are as many processes as cores."""
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    threadpool_limits(1, "blas")


def answer(c: Configuration) -> Answer:
    """What one configuration comes to.  Errors are answers, bugs too, so that the rest goes on."""
    if c.job is None:
        return Answer(c.key, c.inputs, None, c.refused)
    try:
        job = c.job
        case = Case(job.problem, job.source, job.machine, job.given, job.fidelity, job.batch)
        found = result(run_case(case)) if job.batch is None else result_of(case)
        return Answer(c.key, c.inputs, json.dumps(found, separators=(",", ":"), allow_nan=False), None)
    except InputError as error:
        return Answer(c.key, c.inputs, None, str(error))
    except (Exception, RecursionError) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        where = f"{Path(last.filename).name}, line {last.lineno}"
        return Answer(c.key, c.inputs, None, f"internal: {type(error).__name__} in {where}: {str(error)[:200]}")


def result(r: Run) -> dict[str, Any]:
    """What is kept of a run: whole numbers and words alone, so that it has the same bytes on every machine."""
    t, l, device = r.timeline, r.ledger, r.device
    out: dict[str, Any] = {
        "computes": r.dataflow.computes,
        "schedule": chosen_fields(r.dataflow, r.schedule),
        "makespan_ps": None if t is None else t.makespan_ps,
        "no_time": r.no_time,
        "bound": None if t is None else t.bound,
        "stall": None,
        "hbm_read_bytes": l.hbm_read_bytes,
        "hbm_write_bytes": l.hbm_write_bytes,
        "hbm_add_bytes": l.hbm_add_bytes,
        "paper_hbm_bytes": l.paper_hbm_bytes,
        "dram_read_bytes": device.dram_read_bytes,
        "dram_write_bytes": device.dram_write_bytes,
        "dram_method": device.method,
        "io_bytes": l.io_bytes,
        "extra_bytes": l.extra_bytes,
        "peak_bytes": l.peak_bytes,
        "fits": r.fits,
        "sram_used_bytes": r.footprint.sram_bytes,
        "sram_capacity_bytes": r.footprint.sram_capacity,
        "flops_convention": r.dataflow.flops(r.problem),
        "flops_executed": l.executed_flops,
    }
    if t is not None and (unit := t.units.get(r.compute_unit)) is not None:
        out["stall"] = max(unit.stalls_ps, key=lambda cause: unit.stalls_ps[cause], default=None)
    return out
