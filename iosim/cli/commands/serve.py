"""`iosim serve`: a recorded trace of a server's steps, or of requests as they arrive."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from iosim.cli.group import command
from iosim.cli.output import Form, answer_options, progress
from iosim.cli.serving import POLICY, policy_of, request_of, server_of, server_options
from iosim.errors import InputError


@command()
@click.argument("trace", metavar="TRACE.jsonl")
@server_options
@click.option("--step-tokens", type=int, metavar="N", help="Arrivals: new tokens of a step at most.  [default: 2048]")
@click.option("--sequences", type=int, metavar="N", help="Arrivals: requests that run at one time.  [default: 256]")
@click.option("--reserve", type=float, metavar="GB", help="Arrivals: memory for weights and the rest.  [default: 0]")
@click.option("--beside", type=float, metavar="US", help="Arrivals: us of a step beside attention.  [default: 0]")
@answer_options("iosim.report/1", "step, or request")
def serve(form: Form, trace: str, **options: Any) -> None:
    """Replay a server's steps, or requests as they arrive.

    Each line of the trace is one request of one step, as JSON: {"step": 0, "context": 4096, "new": 1} has 4096 tokens
    in the K/V cache and computes the attention of 1 more; without "step" all lines are one step.  Or it is a request
    as it arrives, {"arrival": 0.25, "prompt": 1024, "output": 128} (seconds, tokens): requests then wait for room and
    are batched step by step.  All requests of a step, in prefill and decode, run in one launch a layer.  This is
    attention alone: no MLP, no projections.

    \b
    Example: iosim serve trace.jsonl -H 32 --kv-heads 8 --hw h200-sxm
             iosim serve trace.jsonl --config config.json --csv -o steps.csv
    """
    from iosim.report import arrivals, sections
    from iosim.report import serve as steps
    from iosim.study.arrivals import has_arrivals, load_arrivals
    from iosim.study.arrivals import serve as served
    from iosim.study.serving import load_trace, replayed

    server, request = server_of(options), request_of(options, trace=trace)
    if has_arrivals(trace):
        found, policy = load_arrivals(trace), policy_of(options)
        with progress() as note:
            service = served(server, found, policy, note)
        made, rows = arrivals.section(service, trace, request), partial(arrivals.rows_as_csv, service)
    else:
        for name in POLICY:
            if options[name] is not None:
                raise InputError(f"{name}: changes nothing without arrival times in the trace")
        recorded = load_trace(trace)
        with progress() as note:
            done = replayed(server, recorded, note)
        made, rows = steps.section(done, trace, request), partial(steps.rows_as_csv, done)
    form.give(partial(sections.text, made), partial(sections.document, made), rows)
