"""All reports on machines, from runs that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from iosim.dataflows import load_dataflow
from iosim.errors import InputError
from iosim.hardware import Hardware
from iosim.problem import Attention
from iosim.report import interactive, io, memory, roofline, trend
from iosim.report.book import Extra
from iosim.report.sections import Section
from iosim.study.cases import Runs, cases
from iosim.study.choose import KEYS
from iosim.study.io import io as traffic
from iosim.study.memory import guide
from iosim.study.memory import memory as memory_of
from iosim.study.pipeline import Pipeline, pipeline
from iosim.study.roofline import roofline as roofline_of
from iosim.study.run import Note
from iosim.study.trend import trend as trend_of

TRAFFIC = (512, 8192)  # lengths at which traffic is worth showing: shorter is all launch, longer is more of the same
ROOFLINE = 4096
SHOWN = (0, 8)  # iterations of the timeline


def sections(
    lengths: Sequence[int],
    shape: Mapping[str, Any],
    machines: Sequence[Hardware],
    dataflows: Sequence[str],
    request: Mapping[str, Any],
    note: Note = lambda _: None,
) -> list[Section]:
    """Memory, traffic, time and rooflines of problems of `shape` (fields of Attention but n_q).

    Memory is shown for one head and the guide's lengths, so that it can be held against the guide's table (and, as
    there, in fp16 where the data is fp8, for which no gradients are written); traffic at the lengths where it matters;
    the roofline at N = 4096, or at the longest.
    """
    runs = Runs(note)
    runs.get(cases(lengths, shape, machines, dataflows))
    some = [n for n in lengths if TRAFFIC[0] <= n <= TRAFFIC[1]] or list(lengths)
    longest = ROOFLINE if ROOFLINE in lengths else max(lengths)
    one_head = {name: value for name, value in shape.items() if name in ("d", "d_v", "dtype", "causal")}
    if Attention(n_q=1, **one_head).is_fp8:
        one_head["dtype"] = "fp16"
    guided = [p.n for p in guide()]
    own = dict(request)
    note("memory")
    held = memory.section(
        memory_of(guided, one_head, machines), {**own, **one_head, "n": guided, "heads": 1, "batch": 1}
    )
    return [
        trend.section(trend_of(lengths, shape, machines, dataflows, runs), own),
        io.section(traffic(some, shape, machines, dataflows, runs, note), own | {"n": some}),
        held,
        roofline.section(
            roofline_of(Attention(n_q=longest, **shape), machines, dataflows, runs), own | {"n": [longest]}
        ),
    ]


def extras(
    lengths: Sequence[int],
    shape: Mapping[str, Any],
    machines: Sequence[Hardware],
    dataflows: Sequence[str],
    note: Note = lambda _: None,
) -> list[Extra]:
    """An interactive timeline for each machine that has a time: of flash2 where it is asked for, else of the first."""
    longest = ROOFLINE if ROOFLINE in lengths else max(lengths)
    name = "flash2" if "flash2" in dataflows else dataflows[0]
    out: list[Extra] = []
    for machine in machines:
        try:
            found = _three(Attention(n_q=longest, **shape), name, machine, note)
        except InputError as error:  # no time, or a format that is not written for
            note(str(error))
            continue
        out.append(interactive.part(found, len(out)))
    return out


def _three(problem: Attention, name: str, machine: Hardware, note: Note) -> Pipeline:
    """The pipeline with the widest key tile of which three stages fit, so that all compare; else by the rule."""
    flow = load_dataflow(name)
    by_rule = pipeline(problem, flow, machine, {}, iterations=SHOWN, note=note)
    if all(case.recording for case in by_rule.cases) or "block_k" not in flow.uses:
        return by_rule
    widest = next(case.run.schedule.block_k for case in by_rule.cases if case.run is not None)
    for block_k in (k for k in KEYS if k < widest):
        found = pipeline(problem, flow, machine, {"block_k": block_k}, iterations=SHOWN, note=note)
        if all(case.recording for case in found.cases):
            return found
    return by_rule
