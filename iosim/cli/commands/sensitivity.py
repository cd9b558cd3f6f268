"""`iosim sensitivity`: which numbers of a machine the time depends on."""

from __future__ import annotations

from functools import partial
from typing import Any

import click
from click.shell_completion import CompletionItem

from iosim.cli.group import command
from iosim.cli.options import case_of, subject_options
from iosim.cli.output import Form, answer_options, progress, require_image, write


def _complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of a profile's numbers that begin so."""
    from iosim.hardware import settable

    return [CompletionItem(name) for name in settable() if name.startswith(incomplete)]


@command()
@click.option(
    "--field",
    metavar="NAME",
    multiple=True,
    shell_complete=_complete,
    help="Try this number of the profile alone (exp.ops_per_clock); may be repeated.  [default: all]",
)
@subject_options
@click.option("--energy", is_flag=True, help="Estimate joules too, with their range.")
@click.option("--plot", metavar="FILE.png|FILE.svg", help="Draw a tornado plot into this file.")
@answer_options("iosim.sensitivity/1", "number")
def sensitivity(form: Form, field: tuple[str, ...], energy: bool, plot: str | None, **options: Any) -> None:
    """Show which numbers of a machine the time depends on.

    Each number of the profile is taken a tenth down and up, doubled (or halved, where it is a cost), and raised until
    it stops mattering; capacities say from where on one more block is resident.  The schedule stays as it is.  A
    hundred runs or so, on all cores.

    \b
    Example: iosim sensitivity -n 1024 -d 64
             iosim sensitivity -n 2048 -d 128 --hw h200-sxm --field exp.ops
    """
    kind = None if plot is None else require_image(plot)
    from iosim.report import sensitivity as report
    from iosim.study.sensitivity import sensitivity as study

    with progress() as note:
        case, _, _ = case_of(options)
        found = study(case, field, note, energy=energy)
    if plot is not None and kind is not None:
        write(report.plot(found, kind), plot, "--plot")
    request = {**options, "field": list(field), "energy": energy}
    form.give(
        partial(report.render, found), partial(report.document, found, request), partial(report.rows_as_csv, found)
    )
