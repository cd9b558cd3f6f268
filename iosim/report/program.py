"""A dataflow's program as a JSON document (schema iosim.show/1)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import iosim
from iosim.program import show
from iosim.study.run import Plan, chosen_fields

SCHEMA = "iosim.show/1"


def document(plan: Plan, request: Mapping[str, Any]) -> dict[str, Any]:
    """The program as text, with its tensors and grids; `request` repeats what was asked for."""
    program = plan.program
    return {
        "schema": SCHEMA,
        "request": dict(request),
        "provenance": {"iosim": iosim.__version__, "profile_hash": {plan.machine.name: plan.machine.profile_hash}},
        "dataflow": plan.flow.name,
        "hardware": plan.machine.name,
        "problem": plan.problem.as_dict(),
        "schedule": chosen_fields(plan.flow, plan.schedule) | {"why": plan.why},
        "tensors": [
            {"name": t.name, "role": t.role, "shape": list(t.shape), "dtype": t.dtype, "bytes": t.bytes}
            for t in program.tensors
        ],
        "kernels": [{"name": k.name, "grid": dict(k.grid), "blocks": k.blocks} for k in program.kernels],
        "text": show(program),
    }
