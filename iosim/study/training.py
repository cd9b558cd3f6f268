"""A training step: the runs of a forward pass and of its backward pass as one.

The backward pass is checked on its own, from the float64 results of the forward pass in the dtypes of its inputs.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from iosim.dataflows import Dataflow
from iosim.interpreters.ledger import ledger
from iosim.memory.cache import DeviceTraffic
from iosim.memory.step import joined, step_memory
from iosim.program import Program

if TYPE_CHECKING:
    from iosim.check import Check
    from iosim.interpreters.timeline import Timeline
    from iosim.study.run import Run


def training_step(forward: Run, backward: Run) -> Run:
    """Both runs, of one problem on one machine, as one run; raises InputError where they do not fit together."""
    f, b = forward.dataflow, backward.dataflow
    program = _both(forward.program, backward.program)
    memory = step_memory(forward.program, backward.program)
    uses = tuple(dict.fromkeys(f.uses + b.uses))
    flow = Dataflow(program.name, f.help, uses, lambda a, s: _both(f(a, s), b(a, s)), computes="training")
    counted = replace(ledger(program), allocated_bytes=memory.allocated_bytes, peak_bytes=memory.peak_bytes)
    return replace(
        forward,
        dataflow=flow,
        problem=backward.problem,
        why=f"forward: {forward.why}; backward: {backward.why}",
        program=program,
        ledger=counted,
        device=_device(forward.device, backward.device),
        footprints={**forward.footprints, **backward.footprints},
        timeline=_timeline(forward.timeline, backward.timeline),
        check=_check(forward.check, backward.check),
        parts=(forward, backward),
        step=memory,
    )


def _both(forward: Program, backward: Program) -> Program:
    name = f"{forward.name} + {backward.name}"
    strides = {**forward.strides, **backward.strides}
    return Program(name, joined(forward, backward), forward.kernels + backward.kernels, strides)


def _device(a: DeviceTraffic, b: DeviceTraffic) -> DeviceTraffic:
    return DeviceTraffic(
        flows=a.flows + b.flows,
        method=a.method if a.method == b.method else "closed form",  # of a part at least
    )


def _timeline(a: Timeline | None, b: Timeline | None) -> Timeline | None:
    if a is None or b is None:
        return None
    moved = {key: a.moved.get(key, 0) + b.moved.get(key, 0) for key in dict.fromkeys((*a.moved, *b.moved))}
    return replace(a, kernels=a.kernels + b.kernels, moved=moved)


def _check(a: Check | None, b: Check | None) -> Check | None:
    """The worse of both in each number."""
    if a is None or b is None:
        return None
    found = {a.status, b.status}
    return replace(
        a,
        status=next(status for status in ("failed", "skipped", "passed") if status in found),
        max_abs_error=max(a.max_abs_error, b.max_abs_error),
        rel_error=max(a.rel_error, b.rel_error),
        tolerance=max(a.tolerance, b.tolerance),
        worst_ratio=max(a.worst_ratio, b.worst_ratio),
        plain_error=max(a.plain_error, b.plain_error),
        rows_checked=a.rows_checked + b.rows_checked,
        rows_total=a.rows_total + b.rows_total,
        detail=f"forward: {a.detail}; backward: {b.detail}",
        counted=None,
    )
