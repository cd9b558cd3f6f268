"""A comparison as the JSON document that other programs rely on (schema iosim.run/1), and as flat rows.

Bytes and picoseconds are integers.  A value that cannot be had is null, with a `reason` beside it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import iosim
from iosim.hardware import Hardware
from iosim.report.interval import interval_columns, interval_fields
from iosim.report.rows import layout_fields
from iosim.study.run import Comparison, Run, chosen_fields

if TYPE_CHECKING:
    from iosim.check.given import Inputs

SCHEMA = "iosim.run/1"


def document(comparison: Comparison, request: Mapping[str, Any], *, energy: bool = False) -> dict[str, Any]:
    """The whole comparison; `request` repeats what was asked for, so that the result can be had again."""
    machines = {r.hardware.name: r.hardware for r in comparison.runs}
    return {
        "schema": SCHEMA,
        "request": dict(request),
        "provenance": {
            "iosim": iosim.__version__,
            "profile_hash": {name: machine.profile_hash for name, machine in machines.items()},
            **({} if comparison.inputs is None else {"inputs": _inputs(comparison.inputs)}),
        },
        "pass": comparison.runs[0].dataflow.computes,
        "problem": comparison.problem.as_dict(),
        "hardware": {name: _hardware(machine) for name, machine in machines.items()},
        "runs": [_run(r, energy) for r in comparison.runs],
    }


def _inputs(inputs: Inputs) -> dict[str, Any]:
    return {
        "file": None if inputs.sha256 is None else inputs.origin,
        "sha256": inputs.sha256,
        "layout": inputs.layout,
        "tensors": {t.name: {"dtype": t.dtype.name, "shape": list(t.shape)} for t in inputs.tensors.values()},
    }


def _hardware(machine: Hardware) -> dict[str, Any]:
    return {
        "title": machine.title,
        "processors": machine.processors,
        "clock_hz": machine.clock_hz,
        "hbm": {
            "kind": machine.hbm.kind,
            "capacity_bytes": machine.hbm.capacity_bytes,
            "bandwidth_bytes_per_s": machine.hbm.bandwidth,
        },
        "l2_capacity_bytes": None if machine.l2 is None else machine.l2.capacity_bytes,
        "sram_capacity_bytes": machine.sram.capacity_bytes,
        "estimates": [e.name for e in machine.estimates()],
    }


def _run(r: Run, energy: bool) -> dict[str, Any]:
    out = {
        "dataflow": r.dataflow.name,
        "hardware": r.hardware.name,
        "schedule": schedule_fields(r) | {"why": r.why},
        "traffic": _traffic(r) | {"by_tensor": _by_tensor(r)} | _key_loads(r) | layout_fields(r),
        "bounds": {
            "hbm_accesses": r.accesses,
            "compulsory_accesses": r.bounds.compulsory,
            "theta_accesses": r.bounds.theta,
            "theta_formula": r.bounds.formula,
            "theta_m_elements": r.bounds.m,
        },
        "memory": {
            "io_bytes": r.ledger.io_bytes,
            "extra_bytes": r.ledger.extra_bytes,
            "allocated_bytes": r.ledger.allocated_bytes,
            "peak_bytes": r.ledger.peak_bytes,
            "capacity_bytes": r.hardware.hbm.capacity_bytes,
            "fits": r.fits,
        }
        | _alive(r),
        "sram": {
            "used_bytes": r.footprint.sram_bytes,
            "capacity_bytes": r.footprint.sram_capacity,
            "kernel": r.footprint.kernel,
            "items": dict(r.footprint.items),
        },
        "flops": {
            "convention": r.dataflow.flops(r.problem),
            "executed": r.ledger.executed_flops,
            "vector_ops": _work(r, "vector") + _work(r, "alu"),
            "exp_ops": _work(r, "exp"),
        },
        "time": _time(r),
        "kernels": _kernels(r),
        "units": {}
        if r.timeline is None
        else {
            name: {"instances": u.instances, "busy_ps": u.busy_ps, "stalls_ps": dict(u.stalls_ps)}
            for name, u in r.timeline.units.items()
        },
        "check": _check(r),
    }
    if r.interval is not None:
        out["interval"] = interval_fields(r.interval)
    if energy:
        from iosim.report.energy import energy_document

        out["energy"] = energy_document(r.energy)
    if r.parts:
        out["parts"] = [_run(part, energy) | {"pass": part.dataflow.computes} for part in r.parts]
    return out


def _alive(r: Run) -> dict[str, Any]:
    """What is there when a training step holds most."""
    if r.step is None:
        return {}
    tensors = [
        {"tensor": t.tensor, "bytes": t.bytes, "role": t.role} | ({"why": t.why} if t.why else {}) for t in r.step.alive
    ]
    return {"peak_kernels": list(r.step.kernels), "alive_at_peak": tensors}


def schedule_fields(r: Run) -> dict[str, Any]:
    """The choices that this run's dataflow reads, and those that every timeline reads."""
    return chosen_fields(r.dataflow, r.schedule)


def _traffic(r: Run) -> dict[str, int | str]:
    return {
        "hbm_read_bytes": r.ledger.hbm_read_bytes,
        "hbm_write_bytes": r.ledger.hbm_write_bytes,
        "hbm_add_bytes": r.ledger.hbm_add_bytes,
        "paper_hbm_bytes": r.ledger.paper_hbm_bytes,
        "dram_read_bytes": r.device.dram_read_bytes,
        "dram_write_bytes": r.device.dram_write_bytes,
        "dram_method": r.device.method,
        "l2_read_bytes": r.device.l2_read_bytes,
        "l2_write_bytes": r.device.l2_write_bytes,
        "l2_add_bytes": r.device.l2_add_bytes,
        "l2_counter_bytes": r.l2_counter_bytes,
    }


def _by_tensor(r: Run) -> dict[str, dict[str, int]]:
    return {
        tensor: {f"hbm_{direction}_bytes": count for direction, count in flows.items()}
        for tensor, flows in r.ledger.by_tensor.items()
    }


def _key_loads(r: Run) -> dict[str, Any]:
    """How often K and V are loaded, where query heads share them."""
    found = {
        tensor: {"hbm_loads": n.hbm, "dram_loads": n.dram, "per": "query head" if n.per_head else "group"}
        for tensor, n in r.key_loads.items()
    }
    return {"kv_loads": found} if found else {}


def _work(r: Run, unit: str) -> int:
    return sum(units.get(unit, 0) for units in r.ledger.work.values())


def _time(r: Run) -> dict[str, Any]:
    if r.timeline is None:
        return {"seconds": None, "makespan_ps": None, "fidelity": None, "bound": None, "tflops": None,
                "peak_share": None, "launches": len(r.program.kernels), "reason": r.no_time}  # fmt: skip
    return {
        "seconds": r.timeline.seconds,
        "makespan_ps": r.timeline.makespan_ps,
        "fidelity": r.timeline.fidelity,
        "fidelity_spread_pct": spread_pct(r),
        "extrapolated": r.timeline.extrapolated,
        "bound": r.timeline.bound,
        "tflops": r.tflops,
        "peak_share": r.peak_share,
        "launches": len(r.timeline.kernels),
    }


def spread_pct(r: Run) -> int:
    """How far the other fidelity may be: the kernels' own spreads, weighted by their time, rounded up."""
    if r.timeline is None:
        return 0
    return -(-sum(k.spread_pct * k.makespan_ps for k in r.timeline.kernels) // r.timeline.makespan_ps)


def _kernels(r: Run) -> list[dict[str, Any]]:
    times = {} if r.timeline is None else {k.name: k for k in r.timeline.kernels}
    return [
        {
            "name": kernel.name,
            "blocks": kernel.blocks,
            "resident_blocks": r.footprints[kernel.name].resident,
            "resident_limit": r.footprints[kernel.name].limit,
            "sram_bytes": r.footprints[kernel.name].sram_bytes,
            "threads": r.footprints[kernel.name].threads,
            "registers_estimate": r.footprints[kernel.name].registers,
            "makespan_ps": times[kernel.name].makespan_ps if kernel.name in times else None,
        }
        for kernel in r.program.kernels
    ]


def _check(r: Run) -> dict[str, Any]:
    if r.check is None:
        return {"status": "skipped", "max_abs_error": None, "rel_error": None, "tolerance": None,
                "rows_checked": 0, "rows_total": rows_total(r), "reason": "--no-check"}  # fmt: skip
    out: dict[str, Any] = {
        "status": r.check.status,
        "max_abs_error": r.check.max_abs_error,
        "rel_error": r.check.rel_error,
        "tolerance": r.check.tolerance,
        "worst_ratio": r.check.worst_ratio,
        "plain_error": r.check.plain_error,
        "rows_checked": r.check.rows_checked,
        "rows_total": r.check.rows_total,
        "detail": r.check.detail,
    }
    infinite = [k for k, v in out.items() if isinstance(v, float) and not math.isfinite(v)]
    if infinite:
        out |= dict.fromkeys(infinite) | {"reason": f"{', '.join(infinite)} not finite"}
    return out


def rows_total(r: Run) -> int:
    """Rows of O over all batches and heads."""
    return r.problem.batch * r.problem.heads * r.problem.n_q


def run_row(r: Run, *, energy: bool = False) -> dict[str, Any]:
    """One run as a flat row, for a table or CSV; times in seconds, None where there is no time."""
    t = r.timeline
    joules = {}
    if energy:
        from iosim.report.energy import energy_row

        joules = energy_row(r.energy)
    return {
        "hardware": r.hardware.name,
        "dataflow": r.dataflow.name,
        **r.problem.as_dict(),
        "block_mask": None if r.problem.block_mask is None else r.problem.block_mask.origin,
        "fidelity": None if t is None else t.fidelity,
        "seconds": r.seconds,
        "tflops": r.tflops,
        "peak_share": r.peak_share,
        "bound": None if t is None else t.bound,
        **_traffic(r),
        "io_bytes": r.ledger.io_bytes,
        "extra_bytes": r.ledger.extra_bytes,
        "peak_bytes": r.ledger.peak_bytes,
        "fits": r.fits,
        "sram_used_bytes": r.footprint.sram_bytes,
        "sram_capacity_bytes": r.footprint.sram_capacity,
        "flops_convention": r.dataflow.flops(r.problem),
        "flops_executed": r.ledger.executed_flops,
        **joules,
        "check": "skipped" if r.check is None else r.check.status,
        **({} if r.interval is None else interval_columns(r.interval)),
        **{f"schedule_{name}": value for name, value in schedule_fields(r).items()},
    }


def rows_as_csv(comparison: Comparison, *, energy: bool = False) -> str:
    """A header and one line a run."""
    from iosim.report.layout import csv_text

    return csv_text([run_row(r, energy=energy) for r in comparison.runs])
