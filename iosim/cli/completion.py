"""Completion in a shell: the values of options and arguments, by the name that a parameter has in every command.

click asks for them when the variable COMPLETE is set, as the scripts of `iosim completion` do.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

import click

from iosim.errors import IosimError

if TYPE_CHECKING:
    from click.shell_completion import CompletionItem

COMPLETE = "_IOSIM_COMPLETE"


def _dataflows() -> Iterable[str]:
    from iosim.dataflows import dataflow_names

    return dataflow_names()


def _kernels() -> Iterable[str]:
    from iosim.kernels import kernel_names

    return kernel_names()


def _machines() -> Iterable[str]:
    from iosim.hardware import profile_names

    return profile_names()


def _dtypes() -> Iterable[str]:
    from iosim.dtypes import DATA

    return DATA


def _accumulators() -> Iterable[str]:
    from iosim.problem import ACCUMULATORS

    return ACCUMULATORS


def _alignments() -> Iterable[str]:
    from iosim.problem import ALIGNMENTS

    return ALIGNMENTS


def _softmaxes() -> Iterable[str]:
    from iosim.schedule import SOFTMAXES

    return SOFTMAXES


def _scores() -> Iterable[str]:
    from iosim.schedule import SCORES

    return SCORES


def _grid_orders() -> Iterable[str]:
    from iosim.schedule import GRID_ORDERS

    return GRID_ORDERS


def _passes() -> Iterable[str]:
    from iosim.study.run import PASSES

    return PASSES


def _fidelities() -> Iterable[str]:
    from iosim.interpreters.timeline import FIDELITIES

    return FIDELITIES


def _layouts() -> Iterable[str]:
    from iosim.check.given import LAYOUTS

    return LAYOUTS


def _places() -> Iterable[str]:
    from iosim.strides import LAYOUTS

    return LAYOUTS


def _phases() -> Iterable[str]:
    from iosim.study.models import PHASES

    return PHASES


def _layers() -> Iterable[str]:
    from iosim.study.models import ALL, KINDS

    return *KINDS, ALL


def _biases() -> Iterable[str]:
    from iosim.problem import BIASES

    return BIASES


def _cached() -> Iterable[str]:
    return "fp8", "int8"


def _scales() -> Iterable[str]:
    from iosim.dataflows.narrow_cache import PER

    return PER


def _split_rules() -> Iterable[str]:
    from iosim.study.ragged import RULES

    return RULES


VALUES: dict[str, Callable[[], Iterable[str]]] = {
    "dataflow": _dataflows,
    "kernel": _kernels,
    "hw": _machines,
    "dtype": _dtypes,
    "accumulator": _accumulators,
    "causal_align": _alignments,
    "softmax": _softmaxes,
    "scores": _scores,
    "grid_order": _grid_orders,
    "pass": _passes,
    "fidelity": _fidelities,
    "inputs_layout": _layouts,
    "layout": _places,
    "bias": _biases,
    "phase": _phases,
    "layers": _layers,
    "cache_dtype": _cached,
    "cache_scales": _scales,
    "split_rule": _split_rules,
}
FILES = {
    "dataflow",
    "hw",
    "inputs",
    "config",
    "block_mask",
    "output",
    "plot",
    "shapes",
    "file",
    "files",
    "problem",
    "lengths",
    "trace",
}  # also, or only


class Text(click.types.StringParamType):
    """Text whose values a shell can complete."""

    def shell_complete(self, ctx: click.Context, param: click.Parameter, incomplete: str) -> list[CompletionItem]:
        """Names that begin so; files where a parameter takes them and no name does."""
        from click.shell_completion import CompletionItem

        del ctx
        found: list[CompletionItem] = []
        with suppress(IosimError, OSError):  # such as a profile that another package has damaged
            names = VALUES[param.name]() if param.name in VALUES else ()
            found = [CompletionItem(name) for name in names if name.startswith(incomplete)]
        if not found and param.name in FILES:
            return [CompletionItem(incomplete, type="file")]
        return found


def complete(parameters: Iterable[click.Parameter]) -> None:
    """Let those be completed that take text of one of these names."""
    for parameter in parameters:
        if type(parameter.type) is click.types.StringParamType and parameter.name in VALUES.keys() | FILES:
            parameter.type = Text()
