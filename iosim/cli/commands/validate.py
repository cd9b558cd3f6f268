"""`iosim validate`: predictions held against measured rows."""

from __future__ import annotations

from functools import partial

import click

from iosim.cli.group import command
from iosim.cli.output import Form, answer_options, progress, require_writable, write
from iosim.errors import InputError


@command()
@click.argument("files", nargs=-1)
@click.option("--hw", help="The machine of every row.  [default: the one that the row or its file names]")
@click.option("--shape", metavar="N=V,...", help="Shape of all kernels of Nsight Compute's files: n=4096,d=128.")
@click.option("--shapes", metavar="FILE", help="Shapes of Nsight Compute's kernels by ID.  [default: X.shapes.csv]")
@click.option("--plot", metavar="FILE.png", help="Draw predicted against measured into this file.")
@click.option("--cross", is_flag=True, help="Fit each constant again without parts of its rows, judge it on these.")
@answer_options("iosim.validate/1", "measured number")
def validate(
    files: tuple[str, ...],
    hw: str | None,
    shape: str | None,
    shapes: str | None,
    plot: str | None,
    cross: bool,
    form: Form,
) -> None:
    """Hold predictions against measured rows, and print the errors.

    FILES are CSV files of attention calls, hardware counters, tile sweeps or published numbers, or Nsight Compute's
    own (ncu --csv --page raw); their columns say which.  Without FILES: the measurements that ship with iosim.

    \b
    Example: iosim validate
             iosim validate mine.csv --hw h200-sxm
             iosim validate --cross
    """
    if cross:
        _cross(files, any(option is not None for option in (hw, shape, shapes, plot)), form)
        return
    if shape is not None and shapes is not None:
        raise InputError("--shape and --shapes: give one of them")
    if plot is not None:
        if not plot.endswith(".png"):
            raise InputError(f"--plot: {plot!r} does not end with .png")
        require_writable(plot, "--plot")
    from pathlib import Path

    from iosim.report import validation as report
    from iosim.study.validate import nsight, table
    from iosim.study.validate import validate as hold

    given = (
        [nsight.shape_record(shape)] if shape is not None else table.records(Path(shapes)) if shapes is not None else []
    )
    with progress() as note:
        note("predicting")
        found = hold(files, hardware=hw, shapes=given)
    if plot is not None:
        write(report.plot(found), plot, "--plot")
    form.give(partial(report.render, found), partial(report.document, found), partial(report.as_csv, found))


def _cross(paths: tuple[str, ...], more: bool, form: Form) -> None:
    """The answer of --cross; it takes some minutes."""
    if more:
        raise InputError("--cross: takes files only: the constants are of one machine, and its table has no plot")
    from pathlib import Path

    from iosim.report import crossed as report
    from iosim.study.validate.cross import cross_validate
    from iosim.study.validate.readers import read

    rows = [row for path in map(Path, paths) for row in read(path, ())] if paths else None
    with progress() as note:
        found = cross_validate(rows=rows, note=note)
    form.give(partial(report.render, found), partial(report.document, found), partial(report.as_csv, found))
