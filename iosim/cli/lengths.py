"""`iosim run --lengths`: sequences of different lengths in one launch."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from iosim.cli.options import problem_of, schedule_of
from iosim.cli.output import CheckError, Form, progress
from iosim.errors import InputError

if TYPE_CHECKING:
    from iosim.study.batch import Batch

NOT_TAKEN = ("computes", "pass", "interval", "energy", "softmax", "scores", "grid_order")
MODEL = ("config", "phase", "layers")
SHAPE = ("d", "d_v", "heads", "kv_heads", "dtype", "accumulator", "causal", "window", "softcap", "alibi", "bias",
         "sinks", "global_tokens", "dropout")  # fmt: skip


def run_lengths(form: Form, batch: Batch, options: dict[str, Any]) -> None:
    """Time, bytes, padding, orders and check of the sequences of --lengths."""
    context = click.get_current_context()
    for name in NOT_TAKEN:
        if context.get_parameter_source(name) not in (ParameterSource.DEFAULT, None):
            raise InputError(f"{name}: is not taken with --lengths")
    for name in ("dataflow", "hw"):
        if len(options[name]) > 1:
            raise InputError(f"{name}: --lengths takes one")
    shape = problem_of(options)
    from iosim.report import sections
    from iosim.report.ragged import section
    from iosim.study.ragged import Engine, ragged
    from iosim.study.run import machine_called

    machine = machine_called((options["hw"] or ("mp31",))[0])
    dataflow = (options["dataflow"] or ("flash2",))[0]
    engine = Engine(shape, machine, dataflow, schedule_of(options), batch.split_rule, batch.cache, options["fidelity"])
    with progress() as note:
        done = ragged(engine, batch.sequences, check=options["check"], seed=options["seed"], note=note)
    asked = {**batch.as_dict(), "hw": machine.name, "dataflow": dataflow}
    model = {name: options[name] for name in MODEL if options[name] is not None}
    made = section(done, {**model, **{name: getattr(shape, name) for name in SHAPE}, **asked, **engine.given})
    form.give(partial(sections.text, made), partial(sections.document, made), partial(sections.csv, made))
    if failed := [f"{q}:{k}" for (q, k), c in done.checks.items() if c.status == "failed"]:
        raise CheckError(f"check of {', '.join(failed)} failed")
