"""`iosim serve`: a recorded trace of a server's steps."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from iosim.cli.group import command
from iosim.cli.output import Form, answer_options, progress
from iosim.cli.serving import request_of, server_of, server_options


@command()
@click.argument("trace", metavar="TRACE.jsonl")
@server_options
@answer_options("iosim.report/1", "step")
def serve(form: Form, trace: str, **options: Any) -> None:
    """Replay a server's steps: attention time, bytes, bounds.

    Each line of the trace is one request of one step, as JSON: {"step": 0, "context": 4096, "new": 1} has 4096 tokens
    in the K/V cache and computes the attention of 1 more; without "step" all lines are one step.  All requests of a
    step, in prefill and decode, run in one launch a layer.  This is attention alone: no MLP, no projections.

    \b
    Example: iosim serve trace.jsonl -H 32 --kv-heads 8 --hw h200-sxm
             iosim serve trace.jsonl --config config.json --csv -o steps.csv
    """
    from iosim.report import sections
    from iosim.report.serve import rows_as_csv, section
    from iosim.study.serving import load_trace, replayed

    server, steps = server_of(options), load_trace(trace)
    with progress() as note:
        done = replayed(server, steps, note)
    made = section(done, trace, request_of(options, trace=trace))
    form.give(partial(sections.text, made), partial(sections.document, made), partial(rows_as_csv, done))
