"""iosim: a memory-hierarchy simulator and cost model for attention kernels.

    import iosim
    result = iosim.compare(iosim.Attention(n_q=4096, d=128), hardware=["mp31", "h200-sxm"])
    print(result.to_frame())

The names below are the public ones; they are imported when they are first used, so that `import iosim` is fast.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from iosim.blockmask import BlockMask, load_block_mask
    from iosim.check.given import Inputs, load_inputs
    from iosim.dataflows import dataflow_names, load_dataflow
    from iosim.errors import InputError, IosimError, OutputError
    from iosim.hardware import Hardware, load_hardware, profile_names
    from iosim.problem import Attention
    from iosim.program import show
    from iosim.schedule import Order, Role, Schedule, Step
    from iosim.study.layers import ModelComparison, compare_model
    from iosim.study.models import Model, load_model, model_problem
    from iosim.study.precision import Precision, precision
    from iosim.study.run import Comparison, Run, compare, run
    from iosim.study.tune import Tuned, tune

__version__ = "0.1.0"

_HOMES = {
    "Attention": "problem",
    "BlockMask": "blockmask",
    "Comparison": "study.run",
    "Hardware": "hardware",
    "InputError": "errors",
    "Inputs": "check.given",
    "IosimError": "errors",
    "Model": "study.models",
    "ModelComparison": "study.layers",
    "Order": "schedule",
    "OutputError": "errors",
    "Precision": "study.precision",
    "Role": "schedule",
    "Run": "study.run",
    "Schedule": "schedule",
    "Step": "schedule",
    "Tuned": "study.tune",
    "compare": "study.run",
    "compare_model": "study.layers",
    "dataflow_names": "dataflows",
    "load_block_mask": "blockmask",
    "load_dataflow": "dataflows",
    "load_hardware": "hardware",
    "load_inputs": "check.given",
    "load_model": "study.models",
    "model_problem": "study.models",
    "precision": "study.precision",
    "profile_names": "hardware",
    "run": "study.run",
    "show": "program",
    "tune": "study.tune",
}

__all__ = [
    "Attention",
    "BlockMask",
    "Comparison",
    "Hardware",
    "InputError",
    "Inputs",
    "IosimError",
    "Model",
    "ModelComparison",
    "Order",
    "OutputError",
    "Precision",
    "Role",
    "Run",
    "Schedule",
    "Step",
    "Tuned",
    "compare",
    "compare_model",
    "dataflow_names",
    "load_block_mask",
    "load_dataflow",
    "load_hardware",
    "load_inputs",
    "load_model",
    "model_problem",
    "precision",
    "profile_names",
    "run",
    "show",
    "tune",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'iosim' has no attribute {name!r}")
    return getattr(import_module(f"iosim.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted(__all__)
