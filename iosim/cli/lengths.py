"""`iosim run --lengths`: sequences of different lengths in one launch."""

from __future__ import annotations

from functools import partial
from typing import Any

import click
from click.core import ParameterSource

from iosim.cli.options import schedule_of
from iosim.cli.output import CheckError, Form, progress
from iosim.errors import InputError

SHAPE = ("d", "d_v", "heads", "kv_heads", "dtype", "accumulator", "causal", "window")
TAKEN = {*SHAPE, "lengths", "dataflow", "hw", "block_q", "block_k", "stages", "splits", "check", "seed", "as_json",
         "as_csv", "output", "force"}  # fmt: skip


def run_lengths(form: Form, options: dict[str, Any]) -> None:
    """Time, bytes, padding, orders and check of the sequences of --lengths."""
    context = click.get_current_context()
    for parameter in context.command.params:
        name = parameter.name or ""
        if name not in TAKEN and context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None):
            hint = "; iosim serve takes it" if name == "config" else ""
            raise InputError(f"{name}: is not taken with --lengths{hint}")
    if options["d"] is None:
        raise click.UsageError("Missing option '--d'.", context)
    for name in ("dataflow", "hw"):
        if len(options[name]) > 1:
            raise InputError(f"{name}: --lengths takes one")
    from iosim.problem import Attention
    from iosim.report import sections
    from iosim.report.ragged import section
    from iosim.study.ragged import Engine, lengths_of, ragged
    from iosim.study.run import machine_called

    sequences = lengths_of(options["lengths"])
    shape = Attention(n_q=1, **{name: options[name] for name in SHAPE if options[name] is not None})
    machine = machine_called((options["hw"] or ("mp31",))[0])
    dataflow = (options["dataflow"] or ("flash2",))[0]
    engine = Engine(shape, machine, dataflow, schedule_of(options))
    with progress() as note:
        done = ragged(engine, sequences, check=options["check"], seed=options["seed"], note=note)
    asked = {"lengths": [list(s) for s in sequences], "hw": machine.name, "dataflow": dataflow}
    made = section(done, {**{name: options[name] for name in SHAPE}, **asked, **engine.given})
    form.give(partial(sections.text, made), partial(sections.document, made), partial(sections.csv, made))
    if failed := [f"{q}:{k}" for (q, k), c in done.checks.items() if c.status == "failed"]:
        raise CheckError(f"check of {', '.join(failed)} failed")
