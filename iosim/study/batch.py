"""A batch of sequences of different lengths in place of a problem: for what-ifs, sweeps and searches of a schedule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from iosim.errors import InputError
from iosim.memory.onchip import Footprint
from iosim.study.ragged import Cache, Engine, Lengths, Step, require_prefix

if TYPE_CHECKING:
    from iosim.interpreters.timeline import Fidelity
    from iosim.schedule import Schedule
    from iosim.study.outcome import Outcome
    from iosim.study.vary import Case

PAGED = {"page": "page", "shared_prefix": "shared", "cache_dtype": "dtype", "cache_scales": "scales"}  # of a Cache
FIELDS = {"page": int, "shared_prefix": int, "cache_dtype": str, "cache_scales": str, "split_rule": str}
LENGTHS_SAY = ("n", "n_q", "n_k", "batch", "causal_align", "lse")  # of a problem: not varied beside lengths
SETTLED = ("block_q", "block_k", "stages", "groups", "pack_gqa")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Sequences of one launch, how their K and V lie, and how split-kv cuts their keys; see iosim.study.ragged."""

    sequences: tuple[Lengths, ...]
    cache: Cache | None = None
    split_rule: str = "balanced"

    def __post_init__(self) -> None:
        if self.cache is not None:
            require_prefix(self.cache, max(s.k for s in self.sequences))

    def having(self, values: Mapping[str, Any]) -> Batch:
        """The same with other values of FIELDS."""
        own = {PAGED[name]: value for name, value in values.items() if name in PAGED}
        cache = replace(self.cache or Cache(), **own) if own else self.cache
        return replace(self, cache=cache, split_rule=values.get("split_rule", self.split_rule))

    def as_dict(self) -> dict[str, Any]:
        """What a result depends on, for JSON."""
        cache = {} if self.cache is None else {name: getattr(self.cache, of) for name, of in PAGED.items()}
        return {"lengths": [list(s) for s in self.sequences], "split_rule": self.split_rule, **cache}


def step_of(case: Case, schedule: Schedule | None = None) -> tuple[Engine, Step]:
    """The launch of a case, with a `schedule` that is settled where there is one.

    Raises InputError where it cannot run.
    """
    if case.batch is None:
        raise InputError("lengths: are missing")
    if case.source.kernel:
        raise InputError("kernel: sequences of different lengths are run by a dataflow, flash2 or split-kv")
    given = dict(case.given)
    if schedule is not None:
        given |= {name: getattr(schedule, name) for name in SETTLED}
    order = {name: given.pop(name) for name in ("grid_order", "persistent") if name in given}
    batch, fidelity = case.batch, cast("Fidelity", case.fidelity)
    engine = Engine(case.problem, case.machine, case.source.dataflow, given, batch.split_rule, batch.cache, fidelity)
    if engine.shape.causal_align != "bottom-right":
        raise InputError("causal_align: the last query of a sequence sees all of its keys")
    step = engine.step(case.batch.sequences, order.get("grid_order", "natural"),
                       persistent=bool(order.get("persistent", False)))  # fmt: skip
    return engine, step


def footprint_of(engine: Engine, step: Step) -> Footprint:
    """What a block takes on chip: of the sequence whose blocks take most SRAM."""
    plain = replace(step.schedule, cycles={}, grid_order="natural", persistent=False)
    classes = dict.fromkeys(zip(step.sequences, step.splits, strict=True))
    prints = (f for s, n in classes for f in engine.footprints(engine.one(s, replace(plain, splits=n)).program, plain))
    return max(prints, key=lambda f: f.sram_bytes)


def outcome_of(case: Case, schedule: Schedule | None = None) -> Outcome:
    """What a case with a batch comes to."""
    from iosim.study.outcome import Outcome, shares

    engine, step = step_of(case, schedule)
    unit = "vector" if case.problem.dtype == "fp32" else "matrix"
    busy, stalls = shares(step.timeline, unit)
    return Outcome(
        schedule=step.schedule,
        why="one tile for all sequences",
        footprint=footprint_of(engine, step),
        hbm_bytes=step.hbm_read_bytes + step.hbm_write_bytes,
        dram_bytes=step.dram_bytes,
        makespan_ps=step.timeline.makespan_ps,
        no_time="",
        bound=step.bound,
        compute_unit=unit,
        busy=busy,
        stalls=stalls,
        load_ps=0,
    )


def result_of(case: Case) -> dict[str, Any]:
    """What a sweep keeps of a case with a batch; tensors are packed, a shared prefix is there once."""
    from iosim.study.run import chosen_fields

    engine, step = step_of(case)
    prints = footprint_of(engine, step)
    unit = step.timeline.units["vector" if case.problem.dtype == "fp32" else "matrix"]
    io = engine.io_bytes(step.sequences)
    return {
        "computes": "forward",
        "schedule": chosen_fields(engine.flow, step.schedule),
        "makespan_ps": step.timeline.makespan_ps,
        "no_time": "",
        "bound": step.bound,
        "stall": max(unit.stalls_ps, key=lambda cause: unit.stalls_ps[cause], default=None),
        "hbm_read_bytes": step.hbm_read_bytes,
        "hbm_write_bytes": step.hbm_write_bytes,
        "hbm_add_bytes": 0,
        "paper_hbm_bytes": step.hbm_read_bytes + step.hbm_write_bytes,
        "dram_read_bytes": step.dram_read_bytes,
        "dram_write_bytes": step.dram_write_bytes,
        "dram_method": "closed form",
        "io_bytes": io,
        "extra_bytes": step.extra_bytes,
        "peak_bytes": io + step.extra_bytes,
        "fits": io + step.extra_bytes <= case.machine.hbm.capacity_bytes,
        "sram_used_bytes": prints.sram_bytes,
        "sram_capacity_bytes": prints.sram_capacity,
        "flops_convention": step.flops,
        "flops_executed": step.executed_flops,
    }
