"""`iosim sweep`: many configurations, kept as they come."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from iosim.cli.group import command
from iosim.cli.options import (
    batch_of,
    batch_options,
    is_typed,
    problem_of,
    problem_options,
    schedule_of,
    schedule_options,
)
from iosim.cli.output import CheckError, Form, Terminated, answer_options, progress, require_writable, write
from iosim.errors import InputError

if TYPE_CHECKING:
    from iosim.study.sweep.grid import Grid

_OWN = ("store", "export", "workers", "scheduler", "retry", "trust", "form", "as_json", "as_csv", "output", "force",
        "file")  # fmt: skip


@command()
@click.argument("file", required=False, metavar="[FILE.toml]")
@click.option(
    "--vary",
    metavar="NAME=VALUES",
    multiple=True,
    help="A field and its values, as in iosim whatif: block_k=32,64 or n=1024..65536:x2; may be repeated.",
)
@click.option("--dataflow", multiple=True, help="A dataflow by name, or a .py file; may be repeated.")
@click.option("--kernel", multiple=True, help="A kernel that people run; may be repeated.")
@click.option("--hw", multiple=True, help="A machine by name, or a .toml file; may be repeated.  [default: mp31]")
@schedule_options
@click.option("--fidelity", multiple=True, help="fair or chip; may be repeated.  [default: fair]")
@problem_options
@batch_options
@click.option("--store", metavar="FILE.db", default="sweep.db", show_default=True, help="Where results are kept.")
@click.option("--export", metavar="FILE.csv|FILE.parquet", help="Write the table into this file too.")
@click.option("--retry", is_flag=True, help="Run what has failed before once more.")
@click.option("--workers", type=click.IntRange(0, 1024), help="Processes; 0: none but this.  [default: one a core]")
@click.option("--scheduler", metavar="tcp://HOST:PORT", help="A Dask scheduler, whose workers run it instead.")
@click.option("--trust", is_flag=True, help="Run the Python files too that FILE.toml names as dataflows.")
@answer_options("iosim.sweep/1", "configuration")
def sweep(form: Form, file: str | None, store: str, export: str | None, **options: Any) -> None:
    """Run a grid of configurations, and keep the results.

    Every combination of problems, machines, dataflows and schedules is run.  Results go into the store as
    they come.  The same command again runs only what is missing there, also after Ctrl-C or a crash; several sweeps may
    write to one store at once.  A configuration that cannot run is kept with the reason; where none can, the exit code
    is 1.  Without a problem and without FILE.toml, the rows of the store are shown or exported.

    \b
    Example: iosim sweep -d 128 --vary n=1024..8192:x2 --vary block_q=64,128
             iosim sweep grid.toml --export out.csv
             iosim sweep --store sweep.db --export out.parquet

    \b
    FILE.toml: schema = "iosim.sweep/1", then tables such as
             [[grid]]
             dataflow = ["flash2", "standard"]
             hw = "mp31"
             n = "1024..8192:x2"
             d = [64, 128]
             "hw.sram.capacity_kib" = [128, 192]
    """
    from iosim.report import sweep as report
    from iosim.study.sweep import sweep as study
    from iosim.study.sweep.cluster import require_address
    from iosim.study.sweep.store import open_store

    if options["scheduler"] is not None:
        require_address(options["scheduler"])
    kind = None
    if export is not None:
        kind = report.require_export(export)
        require_writable(export, "--export")
    request = {"file": file, "store": store, **options}
    grids = _grids(file, options)
    with open_store(store, new=bool(grids)) as kept:
        did = None
        if grids:
            try:
                with progress() as note:
                    did = study(grids, kept, workers=options["workers"], scheduler=options["scheduler"],
                                retry=options["retry"], note=note)  # fmt: skip
            except (KeyboardInterrupt, Terminated) as stop:
                by_key = isinstance(stop, KeyboardInterrupt)
                after = "\n" if by_key else ""  # the terminal's ^C
                click.echo(f"{after}iosim: what is done is kept in {store}; the same command runs the rest", err=True)
                raise (click.Abort if by_key else Terminated) from None
        rows = list(kept.read(None if did is None else did.keys))
    if export is not None and kind is not None:
        write(report.export(rows, kind), export, "--export")
    form.give(
        partial(report.render, rows, did, store),
        partial(report.document, rows, did, store, request),
        partial(report.rows_as_csv, rows),
    )
    if did is not None and all(row.error is not None for row in rows):
        raise CheckError("sweep: no configuration could run; the answer has the reasons")


def _grids(file: str | None, options: dict[str, Any]) -> tuple[Grid, ...]:
    """The grids of a file, or the one of the options; none where neither is given."""
    from iosim.study.sweep.grid import axes_of, grid_of, read_grids, sources_of

    given = _given()
    if file is not None:
        if given:
            raise InputError(f"{given[0]}: stands in the file, where there is one; give one of them")
        return read_grids(file, trust=options["trust"])
    if options["trust"]:
        raise InputError("--trust: changes nothing without a file")
    if not given:
        for name in ("retry", "workers", "scheduler"):
            if options[name]:
                raise InputError(f"--{name}: changes nothing without a problem or a file")
        return ()
    sources = sources_of(options["dataflow"], options["kernel"])
    axes = axes_of(options["vary"], sources)
    for one in axes:
        option = {"n": "n_q"}.get(one.name, one.name)
        if options.get(option) not in (None, ()) and is_typed(option):
            raise InputError(f"vary: {one.name}: is given as an option too")
        if option in ("n_q", "d"):
            options[option] = one.values[0]
    return (
        grid_of(
            problem_of(options),
            sources,
            options["hw"],
            given=schedule_of(options),
            axes=axes,
            fidelities=options["fidelity"],
            batch=batch_of(options),
        ),
    )


def _given() -> list[str]:
    """The options that say what to run, and are given."""
    context = click.get_current_context()
    return [max(p.opts, key=len) for p in context.command.params if p.name not in _OWN and p.name and _is_given(p.name)]


def _is_given(name: str) -> bool:
    return click.get_current_context().get_parameter_source(name) is not ParameterSource.DEFAULT
