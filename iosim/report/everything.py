"""All reports on machines, from runs that they share."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from iosim.hardware import Hardware
from iosim.problem import Attention
from iosim.report import io, memory, roofline, trend
from iosim.report.sections import Section
from iosim.study.cases import Runs, cases
from iosim.study.io import io as traffic
from iosim.study.memory import guide
from iosim.study.memory import memory as memory_of
from iosim.study.roofline import roofline as roofline_of
from iosim.study.run import Note
from iosim.study.trend import trend as trend_of

TRAFFIC = (512, 8192)  # lengths at which traffic is worth showing: shorter is all launch, longer is more of the same
ROOFLINE = 4096


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
    one_head = {name: value for name, value in shape.items() if name in ("d", "dtype", "causal")}
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
