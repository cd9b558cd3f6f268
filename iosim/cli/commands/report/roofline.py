"""`iosim report roofline`: ceilings and kernels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from iosim.cli.group import command
from iosim.cli.sections import asked, dataflows_option, machines_option, section_options, shape_options
from iosim.errors import InputError

if TYPE_CHECKING:
    from iosim.report.sections import Section
    from iosim.study.run import Note


@command()
@shape_options(n="4096", heads=16)
@dataflows_option
@machines_option
@section_options
def roofline(
    lengths: tuple[int, ...], shape: Mapping[str, Any], dataflow: tuple[str, ...], hw: tuple[str, ...]
) -> Callable[[Note], Section]:
    """A machine's ceilings, with the kernels of dataflows as points.

    Ceilings of DRAM, the L2, SRAM, and of the matrix, exp and vector units; each kernel with the lowest one for what it
    does a byte, and how near it comes.

    \b
    Example: iosim report roofline
             iosim report roofline -n 8192 --hw h200-sxm --plot roof.svg
    """

    def make(note: Note) -> Section:
        from iosim.problem import Attention
        from iosim.report.roofline import section
        from iosim.study.cases import Runs
        from iosim.study.roofline import roofline as study

        machines, dataflows, request = asked(lengths, shape, dataflow, hw)
        if len(lengths) > 1:
            raise InputError("n_q: a roofline is of one N")
        return section(study(Attention(n_q=lengths[0], **shape), machines, dataflows, Runs(note)), request)

    return make
