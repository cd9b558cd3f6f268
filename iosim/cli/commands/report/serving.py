"""`iosim report serving`: decode over context and batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from iosim.cli.group import command
from iosim.cli.sections import lengths_of, section_options
from iosim.cli.serving import request_of, server_of, server_options
from iosim.errors import InputError

if TYPE_CHECKING:
    from iosim.report.sections import Section
    from iosim.study.run import Note


@command()
@click.option(
    "--context", metavar="N,...", default="1024,4096,16384,65536", show_default=True, callback=lengths_of,
    help="Tokens of a sequence, in the cache and new.",
)  # fmt: skip
@click.option(
    "--batch", "-b", metavar="N,...", default="1,8,32,128", show_default=True, callback=lengths_of,
    help="Sequences of a step.",
)  # fmt: skip
@click.option(
    "--new", metavar="N,...", default="1,4,16,64,256,1024", show_default=True, callback=lengths_of,
    help="New tokens a sequence, to find where memory stops to bound.",
)  # fmt: skip
@click.option(
    "--reserve", type=click.FloatRange(0, 1e6), default=0.0, show_default=True, metavar="GB",
    help="Device memory that is not for the cache (weights), in 10^9 bytes.",
)  # fmt: skip
@server_options
@section_options
def serving(
    context: tuple[int, ...], batch: tuple[int, ...], new: tuple[int, ...], reserve: float, **options: Any
) -> Callable[[Note], Section]:
    """Decode time and bytes a token over context and batch.

    How long a token's attention takes and how much of the K/V cache it reads, where memory stops to bound as sequences
    bring more new tokens, and how many sequences fit in device memory.  Attention alone: no MLP, no projections.

    \b
    Example: iosim report serving --kv-heads 8 --hw h200-sxm
             iosim report serving --config config.json --reserve 16 --plot s.png
    """
    for name, values in (("context", context), ("batch", batch), ("new", new)):
        if values[0] < 1:
            raise InputError(f"{name}: 0 is out of range; it is at least 1")
    server = server_of(options)
    request = request_of(options, context=list(context), batch=list(batch), new=list(new), reserve=reserve)

    def make(note: Note) -> Section:
        from iosim.report.serving import section
        from iosim.study.capacity import capacity

        return section(capacity(server, context, batch, new, round(reserve * 1e9), note), request)

    return make
