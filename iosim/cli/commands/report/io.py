"""`iosim report io`: traffic over N."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from iosim.cli.group import command
from iosim.cli.sections import asked, dataflows_option, machines_option, packed_of, section_options, shape_options

if TYPE_CHECKING:
    from iosim.report.sections import Section
    from iosim.study.batch import Batch
    from iosim.study.run import Note


@command()
@shape_options(n="512,1024,2048,4096,8192", heads=16, batches=True)
@dataflows_option
@machines_option
@section_options
def io(
    lengths: tuple[int, ...],
    shape: Mapping[str, Any],
    dataflow: tuple[str, ...],
    hw: tuple[str, ...],
    batch: Batch | None,
) -> Callable[[Note], Section]:
    """Traffic of every dataflow over N, by tensor and level.

    What blocks ask of device memory and what of it reaches DRAM, against the least that inputs and outputs need and the
    lower bound for the machine's SRAM; over the size of a tile too.
    With --lengths: what sequences move packed and padded to the longest, by tensor.

    \b
    Example: iosim report io
             iosim report io -n 1024,4096 -d 64 --hw h200-sxm
             iosim report io --lengths 512,4096,1:777 --kv-heads 4 --page 64
    """

    def make(note: Note) -> Section:
        if batch is not None:
            from iosim.report.packed import io_section

            return io_section(*packed_of(batch, shape, dataflow, hw, note))
        from iosim.report.io import section
        from iosim.study.cases import Runs
        from iosim.study.io import io as study

        machines, dataflows, request = asked(lengths, shape, dataflow, hw)
        return section(study(lengths, shape, machines, dataflows, Runs(note), note), request)

    return make
