"""`iosim report trend`: time over N."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from iosim.cli.group import command
from iosim.cli.sections import asked, dataflows_option, machines_option, section_options, shape_options

if TYPE_CHECKING:
    from iosim.report.sections import Section
    from iosim.study.run import Note


@command()
@shape_options(n="128,256,512,1024,2048,4096,8192,16384", heads=16)
@dataflows_option
@machines_option
@section_options
def trend(
    lengths: tuple[int, ...], shape: Mapping[str, Any], dataflow: tuple[str, ...], hw: tuple[str, ...]
) -> Callable[[Note], Section]:
    """Predicted time and speed-up over N, with where the gain starts.

    Where FlashAttention starts to pay, and why it does not before: launches, idle processors and latency, from what the
    compute units wait for.

    \b
    Example: iosim report trend
             iosim report trend -n 512,4096 -H 1 --hw mp31 --hw h200-sxm
    """

    def make(note: Note) -> Section:
        from iosim.report.trend import section
        from iosim.study.cases import Runs
        from iosim.study.trend import trend as study

        machines, dataflows, request = asked(lengths, shape, dataflow, hw)
        return section(study(lengths, shape, machines, dataflows, Runs(note)), request)

    return make
