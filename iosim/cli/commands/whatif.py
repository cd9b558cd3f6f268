"""`iosim whatif`: a dataflow with some of its fields, the problem's or the machine's varied."""

from __future__ import annotations

from functools import partial
from typing import Any

import click
from click.shell_completion import CompletionItem

from iosim.cli.group import command
from iosim.cli.options import batch_options, case_of, subject_options
from iosim.cli.output import Form, answer_options, progress, require_image, write


def _complete(_: click.Context, __: click.Parameter, incomplete: str) -> list[CompletionItem]:
    """Names of fields that begin so, with the = that comes next."""
    from iosim.study.vary import kinds

    return [CompletionItem(f"{name}=") for name in kinds() if name.startswith(incomplete)]


@command()
@click.option(
    "--vary",
    metavar="NAME=VALUES",
    multiple=True,
    shell_complete=_complete,
    help="A field and its values: 1,2,3 or 32..256:x2 or 32..256:+32; repeated: all combinations, the last fastest.",
)
@click.option(
    "--set",
    metavar="NAME=VALUE",
    multiple=True,
    shell_complete=_complete,
    help="A field and the value that it has in all rows; may be repeated.",
)
@click.option(
    "--rechoose",
    is_flag=True,
    help="Let each row choose what is not given or varied.  [default: where the problem is varied]",
)
@subject_options
@batch_options
@click.option("--energy", is_flag=True, help="Estimate joules too, with their range.")
@click.option("--plot", metavar="FILE.png|FILE.svg", help="Draw the rows into this file.")
@answer_options("iosim.whatif/1", "row")
def whatif(form: Form, vary: tuple[str, ...], rechoose: bool, energy: bool, plot: str | None, **options: Any) -> None:
    """Vary fields of a schedule, a problem or a machine.

    NAME is a field of the schedule (stages, block_k), of the problem (n, causal), or hw. and one of the machine's
    profile (hw.sram.capacity_kib; iosim hw show lists them).  The first row is the base.  Rows keep the tile of the
    plain run unless it is varied; one that cannot run says why.  stages shows how much of the loads is hidden.

    \b
    Example: iosim whatif -n 4096 -d 128 --block-k 64 --vary stages=1,2,3
             iosim whatif -n 4096 -d 128 --vary hw.sram.capacity_kib=128,192,256
             iosim whatif -n 2048 -d 64 --vary block_k=32..128:x2
             iosim whatif -d 64 --vary n=512,2048 --set hw.copy.asynchronous=no
    """
    kind, settings = None if plot is None else require_image(plot), options.pop("set")
    from iosim.report import whatif as report
    from iosim.study.whatif import whatif as study

    with progress() as note:
        case, axes, sets = case_of(options, vary, settings)
        found = study(case, axes, sets, keep=not rechoose, note=note, energy=energy)
    if plot is not None and kind is not None:
        write(report.plot(found, kind), plot, "--plot")
    request = {**options, "vary": list(vary), "set": list(settings), "rechoose": rechoose, "energy": energy}
    form.give(
        partial(report.render, found), partial(report.document, found, request), partial(report.rows_as_csv, found)
    )
