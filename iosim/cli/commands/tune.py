"""`iosim tune`: the best schedules of a dataflow."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from iosim.cli.group import command
from iosim.cli.options import batch_of, batch_options, problem_of, problem_options, stages_of, wholes
from iosim.cli.output import Form, answer_options, progress
from iosim.errors import InputError, nearest

EMITTED = ("triton", "json")  # what --emit takes


def _numbers(_: click.Context, parameter: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """Whole numbers with commas between."""
    if value is None:
        return None
    if (found := wholes(value)) is None:
        raise InputError(f"{parameter.opts[0]}: {value!r} is not a list of whole numbers, like 64,128,256")
    return found


def _stages(_: click.Context, __: click.Parameter, values: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
    """One number of buffers, or one for K and one for V, each time."""
    return tuple(map(stages_of, values))


@command()
@problem_options
@batch_options
@click.option("--dataflow", help="A dataflow by name, or a .py file.  [default: flash2]")
@click.option("--kernel", help="A kernel that people run, in place of a dataflow; triton: Triton's tiles.")
@click.option("--hw", default="mp31", show_default=True, help="A machine by name, or a .toml file.")
@click.option("--block-q", metavar="N,...", callback=_numbers, help="Query rows of a tile: only these.")
@click.option("--block-k", metavar="N,...", callback=_numbers, help="Key rows of a tile: only these.")
@click.option("--stages", metavar="N[,N]", multiple=True, callback=_stages, help="Buffers: only this; may be repeated.")
@click.option("--groups", metavar="N,...", callback=_numbers, help="Warp groups that share a tile: only these.")
@click.option("--margin", type=float, default=0.1, show_default=True, help="Share of SRAM that stays free.")
@click.option("--top", type=int, default=10, show_default=True, help="How many of the best to show.")
@click.option("--emit", metavar="KIND", help="Print only a list: triton (of triton.Config), json (of schedules).")
@answer_options("iosim.tune/1", "candidate")
def tune(form: Form, **options: Any) -> None:
    """Search tiles, stages and warp groups for the fastest.

    Candidates that break a rule of the machine are counted by rule; the others are ranked by their predicted time. It
    says why the best wins over the next one and over the default. The guide's 10 % margin of SRAM is the default;
    --margin 0 lifts it.

    \b
    Example: iosim tune -n 4096 -d 128 -H 32 --dataflow flash3
             iosim tune -n 4096 -d 64 --hw h200-sxm --kernel triton --emit triton
    """
    problem, batch, emit = problem_of(options), batch_of(options), options["emit"]
    if options["kernel"] is not None and options["dataflow"] is not None:
        raise InputError("--dataflow and --kernel: give one of them")
    if emit is not None and emit not in EMITTED:
        raise InputError(f"emit: {emit!r} is not one of {', '.join(EMITTED)}{nearest(emit, EMITTED)}")
    if emit is not None and (form.as_json or form.as_csv):
        raise InputError("--emit, --json and --csv: give one of them")
    from iosim.study.tune import tune as search

    limits = {name: options[name] for name in ("block_q", "block_k", "stages", "groups") if options[name]}
    with progress() as note:
        found = search(
            problem,
            dataflow=options["dataflow"] or "flash2",
            kernel=options["kernel"],
            hardware=options["hw"],
            margin=options["margin"],
            limits=limits,
            top=options["top"],
            for_triton=emit == "triton",
            workers=None,
            note=note,
            batch=batch,
        )
    from iosim.report import tune as report

    text = {"triton": report.configs, "json": report.schedules}.get(emit, report.render)
    document = partial(report.document, found, options)
    form.give(partial(text, found), document, partial(report.rows_as_csv, found))
