"""Requests served as they arrived, as a Section: tokens a second, how long requests wait, what bounds the steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from iosim.report import plots
from iosim.report.sections import Column, Plot, Section, Table
from iosim.report.serve import ATTENTION_ONLY, UNVALIDATED, bounds, cache_line, layers_line, model_notes
from iosim.report.text import machine_line
from iosim.study.arrivals import Served, Service
from iosim.words import count, digits, duration, percent, size

if TYPE_CHECKING:
    from iosim.report.sections import Canvas

QUANTILES = (0.5, 0.9, 0.99)
TIMES: Mapping[str, tuple[str, Callable[[Served], float]]] = {
    "waited_s": ("wait to be let in", lambda s: s.waited),
    "to_first_s": ("to the first token", lambda s: s.to_first),
    "each_s": ("a further token", lambda s: s.each),
    "whole_s": ("to the last token", lambda s: s.last - s.request.arrival),
}


def section(s: Service, path: str, request: Mapping[str, Any]) -> Section:
    """The report."""
    server = s.replayed.server
    return Section(
        name="serve",
        title=f"Attention of {count(len(s.served), 'request', 'requests')} as they arrived: {path}",
        subject=(layers_line(server.layers), machine_line(server.hardware), cache_line(server), _policy(s)),
        answer=tuple(_answer(s)),
        tables=(_latencies(s), bounds(s.replayed)),
        plots=(Plot("queue", "Requests that run and that wait", partial(_draw, s)),),
        notes=(_alone(s), *model_notes(server), _scheduling(s), UNVALIDATED),
        machines=(server.hardware,),
        request=request,
    )


def _policy(s: Service) -> str:
    p = s.policy
    beside = f", {duration(p.beside)} beside attention" if p.beside else ""
    return f"steps of up to {p.step_tokens:,} tokens and {p.sequences:,} sequences{beside}"


def _answer(s: Service) -> Iterator[str]:
    steps, r = s.replayed.steps, s.replayed
    made = sum(one.request.output for one in s.served)
    kv = sum(step.kv_bytes for step in steps)
    yield (f"{digits(made / s.seconds)} tokens of answers a second ({digits(r.tokens / s.seconds)} with prompts), "
           f"{count(len(steps), 'step', 'steps')} in {duration(s.seconds)}, of which the machine computes "
           f"{percent(s.busy / s.seconds)}.")  # fmt: skip
    first, each = (sorted(map(TIMES[name][1], s.served)) for name in ("to_first_s", "each_s"))
    yield (f"Half of the requests have their first token after {duration(_quantile(first, 0.5))}, 99 % after "
           f"{duration(_quantile(first, 0.99))}; further ones take {duration(_quantile(each, 0.5))} each.")  # fmt: skip
    bound = max({step.bound for step in steps}, key=lambda name: sum(x.seconds for x in steps if x.bound == name))
    share = sum(x.seconds for x in steps if x.bound == bound) / r.seconds
    yield (f"Attention is bound by {bound} for {percent(share)} of its time, and reads {size(round(kv / r.tokens))} of "
           "K and V a token.")  # fmt: skip
    most, free = max(step.requests for step in steps), 1 - s.held / s.room
    waited = max(s.waiting)
    full = (
        "no request ever waits for room" if not waited else f"up to {count(waited, 'request waits', 'requests wait')}"
    )
    yield (f"At most {count(most, 'request runs', 'requests run')} at one time, and {full}; their cache takes "
           f"{size(s.held)} of {size(s.room)} ({percent(free)} stays free).")  # fmt: skip


def _quantile(values: list[float], q: float) -> float:
    """The smallest of sorted values that so large a share does not exceed."""
    return values[min(len(values) - 1, max(0, -(-int(q * 10_000) * len(values) // 10_000) - 1))]


def _latencies(s: Service) -> Table:
    columns = (
        Column("what", "a request's time", words=True),
        Column("mean_s", "mean", "s", "", duration),
        *(Column(f"p{round(100 * q)}_s", f"{100 * q:g} %", "s", "", duration) for q in QUANTILES),
        Column("most_s", "longest", "s", "", duration),
    )
    rows = []
    for words, time in TIMES.values():
        values = sorted(map(time, s.served))
        rows.append(
            {
                "what": words,
                "mean_s": sum(values) / len(values),
                **{f"p{round(100 * q)}_s": _quantile(values, q) for q in QUANTILES},
                "most_s": values[-1],
            }
        )
    return Table("latencies", "How long requests take", columns, tuple(rows))


def _alone(s: Service) -> str:
    if not s.policy.beside:
        return f"{ATTENTION_ONLY} So requests overlap less here than there; --beside adds a time to each step."
    return f"Attention, and {duration(s.policy.beside)} a step that was given for all else."


def _scheduling(s: Service) -> str:
    return ("A step decodes a token of every sequence that runs and computes prompts, first come first served, with "
            "what is left of its tokens. A request is let in when device memory has room for its whole sequence, so "
            f"none is put out again; {size(s.policy.reserved)} are reserved for other things.")  # fmt: skip


def rows_as_csv(s: Service) -> str:
    """A header and one line for every request, in the order in which they leave."""
    from iosim.report.layout import csv_text

    return csv_text(
        [
            {
                "arrival_s": one.request.arrival,
                "prompt": one.request.prompt,
                "output": one.request.output,
                **{name: time(one) for name, (_, time) in TIMES.items()},
            }
            for one in s.served
        ]
    )


def _draw(s: Service, canvas: Canvas) -> None:
    axes = canvas.add_subplot()
    axes.step(s.starts, [step.requests for step in s.replayed.steps], where="post", color=plots.BLUE, label="run")
    axes.step(s.starts, s.waiting, where="post", color=plots.ORANGE, label="wait")
    axes.set_ylabel("requests")
    axes.set_ylim(bottom=0)
    axes.set_xlabel("time of the trace (s)")
    axes.grid(visible=True, color="0.85", linewidth=0.6)
    axes.legend(loc="best")
