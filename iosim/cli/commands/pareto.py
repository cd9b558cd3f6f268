"""`iosim pareto`: the configurations of a sweep that no other beats."""

from __future__ import annotations

from functools import partial

import click

from iosim.cli.group import command
from iosim.cli.output import Form, answer_options, progress, require_image, write


@command()
@click.argument("store", metavar="STORE")
@click.option("--hw", multiple=True, help="Only rows of this machine; may be repeated.  [default: all]")
@click.option("--plot", metavar="FILE.png|FILE.svg", help="Draw the fronts into this file.")
@answer_options("iosim.pareto/1", "configuration")
def pareto(form: Form, store: str, hw: tuple[str, ...], plot: str | None) -> None:
    """Show the configurations of a sweep that no other beats.

    No other is as good in time, SRAM and DRAM traffic.  STORE is a file of iosim sweep.  Dataflows and
    schedules for the same problem on the same machine are compared; a machine whose fields were varied counts as one.

    \b
    Example: iosim sweep -n 4096 -d 128 --vary block_q=64,128 --vary stages=1,2
             iosim pareto sweep.db --plot front.png
    """
    kind = None if plot is None else require_image(plot)
    from iosim.report import pareto as report
    from iosim.study.pareto import pareto as study
    from iosim.study.sweep.store import open_store

    with progress() as note, open_store(store, new=False) as kept:
        note(f"reading {store}")
        found = study(kept.read(), hw)
    if plot is not None and kind is not None:
        write(report.plot(found, kind), plot, "--plot")
    form.give(
        partial(report.render, found, store),
        partial(report.document, found, store, {"store": store, "hw": list(hw)}),
        partial(report.rows_as_csv, found),
    )
