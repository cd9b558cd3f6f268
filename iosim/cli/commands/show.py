"""`iosim show`: a dataflow's program."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from iosim.cli.group import command
from iosim.cli.options import problem_of, problem_options, schedule_of, schedule_options
from iosim.cli.output import Form, answer_options


@command()
@click.argument("dataflow")
@problem_options
@click.option("--hw", default="mp31", show_default=True, help="The machine whose default tile is used.")
@schedule_options
@answer_options("iosim.show/1")
def show(dataflow: str, form: Form, **options: Any) -> None:
    """Print a dataflow's tile program as pseudo-code.

    Example: iosim show flash2 --n 4096 --d 128
    """
    from iosim.dataflows import load_dataflow
    from iosim.program import show as text_of
    from iosim.report.program import document
    from iosim.study.run import machine_called, plan_of, require_formats, require_read, require_uneven

    problem, given, machine = problem_of(options), schedule_of(options), machine_called(options["hw"])
    flow = load_dataflow(dataflow)
    require_read(given, [flow])
    require_formats(problem, machine, flow)
    plan = plan_of(problem, machine, flow, given)
    require_uneven(given, [plan.program])
    form.give(lambda: text_of(plan.program) + "\n", partial(document, plan, {"dataflow": dataflow, **options}))
