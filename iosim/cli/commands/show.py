"""`iosim show`: a dataflow's program."""

from __future__ import annotations

from typing import Any

import click

from iosim.cli.group import command
from iosim.cli.options import problem_of, problem_options, schedule_of, schedule_options
from iosim.cli.output import write


@command()
@click.argument("dataflow")
@problem_options
@click.option("--hw", default="mp31", show_default=True, help="The machine whose default tile is used.")
@schedule_options
def show(dataflow: str, **options: Any) -> None:
    """Print a dataflow's tile program as pseudo-code.

    Example: iosim show flash2 --n 4096 --d 128
    """
    from iosim.dataflows import load_dataflow
    from iosim.program import show as text_of
    from iosim.study.choose import choose
    from iosim.study.run import machine_called, require_formats, require_read, require_uneven

    problem, given, machine = problem_of(options), schedule_of(options), machine_called(options["hw"])
    flow = load_dataflow(dataflow)
    require_read(given, [flow])
    require_formats(problem, machine, flow)
    schedule, _ = choose(flow, problem, machine, given)
    program = flow(problem, schedule)
    require_uneven(given, [program])
    write(text_of(program) + "\n", None)
