"""`iosim diff`: two results side by side."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from iosim.cli.group import command
from iosim.cli.output import Form, Stop, answer_options


@command()
@click.argument("a", metavar="A.json")
@click.argument("b", metavar="B.json")
@click.option("--exit-code", is_flag=True, help="Exit with 1 where they differ, as git diff does.")
@answer_options("iosim.diff/1", "value that differs")
def diff(form: Form, a: str, b: str, exit_code: bool) -> None:
    """Show what differs between two results of --json.

    Inputs (problem, schedule, machine, version of iosim), bytes, time, bottleneck and check, with ratios. Runs are
    paired by machine and dataflow. Results of run, check, precision and validate can be compared.

    \b
    Example: iosim run -n 4096 -d 128 --no-check --json -o a.json
             iosim run -n 4096 -d 128 --block-k 64 --no-check --json -o b.json
             iosim diff a.json b.json
    """
    from iosim.report import diff as report
    from iosim.study.diff import diff as compare

    found = compare(a, b)
    request: dict[str, Any] = {"a": a, "b": b, "exit_code": exit_code}
    form.give(
        partial(report.render, found), partial(report.document, found, request), partial(report.rows_as_csv, found)
    )
    if exit_code and not found.same:
        raise Stop(1)
