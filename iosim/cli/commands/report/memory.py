"""`iosim report memory`: device memory over N."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from iosim.cli.group import command
from iosim.cli.sections import asked, machines_option, packed_of, section_options, shape_options

if TYPE_CHECKING:
    from iosim.report.sections import Section
    from iosim.study.batch import Batch
    from iosim.study.run import Note


@command()
@shape_options(n="512,2048,4096,16384", heads=1, batches=True)
@machines_option
@section_options
def memory(
    lengths: tuple[int, ...], shape: Mapping[str, Any], hw: tuple[str, ...], batch: Batch | None
) -> Callable[[Note], Section]:
    """Device memory of standard attention and FlashAttention over N.

    Under named accountings (a forward pass, one with fp32 scores, a training step), each saying what it counts; beside
    them the table of Moore Threads' guide with the cause of each difference, and peaks measured on an H200.
    With --lengths: what sequences hold packed (in pages too) and padded to the longest, by tensor.

    \b
    Example: iosim report memory
             iosim report memory -n 1024,8192,65536 -d 64 -H 16 --plot memory.png
             iosim report memory --lengths 512,4096,1:777 -H 32 --kv-heads 8
    """

    def make(note: Note) -> Section:
        if batch is not None:
            from iosim.report.packed import memory_section

            return memory_section(*packed_of(batch, shape, (), hw, note))
        from iosim.report.memory import section
        from iosim.study.memory import memory as study

        note("counting tensors")
        machines, _, request = asked(lengths, shape, (), hw)
        return section(study(lengths, shape, machines), request)

    return make
