"""`iosim run`: dataflows on machines."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import click

from iosim.cli.group import command
from iosim.cli.options import (
    batch_of,
    batch_options,
    model_of,
    problem_of_inputs,
    problem_options,
    schedule_of,
    schedule_options,
)
from iosim.cli.output import CheckError, Form, answer_options, progress


@command()
@problem_options
@click.option(
    "--dataflow", multiple=True, help="A dataflow by name, or a .py file; may be repeated.  [default: standard, flash2]"
)
@click.option(
    "--pass",
    "pass",
    help="forward, backward, or training: a forward dataflow and the one of its gradients.  [default: forward]",
)
@click.option(
    "--kernel",
    multiple=True,
    help="A kernel that people run: its dataflow with its authors' schedule; may be repeated.",
)
@click.option("--hw", multiple=True, help="A machine by name, or a .toml file; may be repeated.  [default: mp31]")
@schedule_options
@click.option(
    "--fidelity", default="fair", show_default=True, help="fair: a processor a class of block; chip: all of them."
)
@click.option("--interval", is_flag=True, help="How far time may be off by the ranges that the profile gives.")
@click.option("--energy", is_flag=True, help="Estimate joules by level and unit, with their range.")
@click.option("--check/--no-check", default=True, show_default=True, help="Check the numbers against float64.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    metavar="INTEGER",
    default=0,
    show_default=True,
    help="Of the random inputs, and of the rows checked where they are too many.",
)
@click.option(
    "--inputs",
    metavar="FILE",
    help="Check your own tensors q, k, v (do, s) of a .safetensors or .npz file, which give the shape and dtype too; "
    "with --dtype they are rounded to it.",
)
@click.option(
    "--inputs-layout",
    metavar="LAYOUT",
    default="bhsd",
    show_default=True,
    help="Axes of q, k, v, do: bhsd (batch, heads, n, d) or bshd (batch, n, heads, d).",
)
@batch_options
@answer_options("iosim.run/1", "run")
def run(form: Form, **options: Any) -> None:
    """Compare dataflows on machines: memory, traffic, time, check.

    Without --block-q and --block-k the tile is the largest that gives every processor a block and leaves a tenth of the
    SRAM free with two stages; the output says what was chosen, and why.

    \b
    Example: iosim run --n 4096 --d 128
             iosim run -n 8192 -d 128 -H 32 --kv-heads 8 --causal --hw h200-sxm
             iosim run --config config.json --n 8192 --phase decode
             iosim run --lengths 512,4096,1:777 -d 128 -H 32 --kv-heads 8 --causal
    """
    if (batch := batch_of(options)) is not None:
        from iosim.cli.lengths import run_lengths

        run_lengths(form, batch, options)
        return
    case = None if options["inputs"] is not None else model_of(options)
    subject, inputs = (case, None) if case is not None else problem_of_inputs(options)
    from iosim.kernels import load_kernel
    from iosim.study.layers import compare_model
    from iosim.study.run import DATAFLOWS, compare

    options["hw"] = list(options["hw"]) or ["mp31"]
    kernels = options["kernel"] = list(options["kernel"])
    options["dataflow"] = list(options["dataflow"]) or ([] if kernels else list(DATAFLOWS))
    study: Callable[..., Any] = compare if case is None else compare_model
    with progress() as note:
        comparison = study(
            subject,
            dataflows=[*options["dataflow"], *(load_kernel(name).dataflow() for name in kernels)],
            computes=options["pass"],
            hardware=options["hw"],
            schedule=schedule_of(options),
            fidelity=options["fidelity"],
            check=options["check"],
            seed=options["seed"],
            inputs=inputs,
            note=note,
        )
        if options["interval"]:
            from iosim.study.interval import with_intervals

            comparison = with_intervals(comparison, note)
    from iosim.report import document, model, text

    render: Any = text.render if case is None else model.render
    report: Any = document if case is None else model
    joules = options["energy"]
    form.give(
        partial(render, comparison, energy=joules),
        partial(report.document, comparison, options, energy=joules),
        partial(report.rows_as_csv, comparison, energy=joules),
    )
    for r in comparison.runs:
        if r.check is not None and r.check.status == "failed":
            raise CheckError(f"check of {r.dataflow.name} failed: {r.check.detail}")
