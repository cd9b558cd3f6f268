"""`iosim trace`: a run for a trace viewer."""

from __future__ import annotations

from typing import Any

import click

from iosim.cli.group import command
from iosim.cli.options import subject_of, subject_options, window_of, window_options
from iosim.cli.output import force_option, progress, require_writable, write


@command("trace")
@subject_options
@window_options("0..40", "all")
@click.option("--output", "-o", metavar="FILE", required=True, help="Write the trace to this file; - is the terminal.")
@force_option
def trace(output: str, **options: Any) -> None:
    """Write a run as a trace for Perfetto or chrome://tracing.

    One processor of each kernel with its resident blocks: a track a unit and a warp group, loads with arrows to their
    first use, SRAM in use and bandwidth used as counters.  Loops are cut after 40 iterations, which the trace says.

    \b
    Example: iosim trace --n 4096 --d 128 -o run.json
             iosim trace -n 8192 -d 64 --kernel flash3 --hw h200-sxm -o fa3.json
    """
    require_writable(output)
    subject = subject_of(options)
    import json

    from iosim.report.trace import document, summary
    from iosim.study.pipeline import trace as record

    with progress() as note:
        given = subject.problem, subject.flow, subject.machine, subject.given
        found = record(*given, fidelity=subject.fidelity, note=note, **window_of(options))
        made = document(found, {**options, "output": output})
    write(json.dumps(made, allow_nan=False) + "\n", output)
    if output != "-":
        write(summary(found, made, output), None)
