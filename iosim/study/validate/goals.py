"""The errors that iosim aims at, by group of rows: data, held against the scores."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from iosim.study.validate import metrics
from iosim.study.validate.score import Score, errors, stage_steps, sweep

AT_LEAST = ("spearman", "right")  # targets that are reached from above
EXACT: Mapping[str, float] = {"mean": 0.0, "worst": 0.0}


@dataclass(frozen=True, slots=True)
class Goal:
    """A group of scores and its targets: mean, worst, regret at most, spearman and right (percent) at least.

    With `steps` it is about the change of time that one more stage brings: right are those of the right direction, and
    the mean is of how many points of percent the size of the change is off.
    """

    name: str
    quantity: str
    targets: Mapping[str, float] = field(hash=False)
    picks: Callable[[Score], bool]
    steps: bool = False


@dataclass(frozen=True, slots=True)
class Verdict:
    """A goal and what was reached; `rows` 0 where there is no row to hold against it."""

    goal: Goal
    rows: int
    reached: Mapping[str, float | None] = field(hash=False)

    @property
    def met(self) -> bool | None:
        """Whether every target was met; None without rows."""
        if not self.rows:
            return None
        return all(self.meets(name) for name in self.goal.targets)

    def meets(self, name: str) -> bool:
        """Whether one of the targets was met; what could not be had (a rank of equal predictions) was not."""
        value, target = self.reached[name], self.goal.targets[name]
        if value is None:
            return False
        return value >= target if name in AT_LEAST else value <= target


def judge(scores: Iterable[Score]) -> list[Verdict]:
    """Every goal against the scored numbers."""
    counted = [s for s in scores if s.status == "scored"]
    return [_verdict(g, [s for s in counted if s.quantity.name == g.quantity and g.picks(s)]) for g in GOALS]


def _verdict(goal: Goal, scores: list[Score]) -> Verdict:
    if goal.steps:
        return _steps(goal, scores)
    if not scores:
        return Verdict(goal, 0, {})
    off = errors(scores)
    rank, regret = sweep(scores)
    right = 100 * sum(e == 0 for e in off) / len(off)
    reached = {
        "mean": metrics.mape(off), "worst": metrics.worst_ape(off), "spearman": rank, "regret": regret, "right": right,
    }  # fmt: skip
    return Verdict(goal, len(scores), {name: reached[name] for name in goal.targets})


def _steps(goal: Goal, scores: list[Score]) -> Verdict:
    steps = stage_steps(scores)
    if not steps:
        return Verdict(goal, 0, {})
    right = 100 * sum(measured * predicted > 0 for measured, predicted in steps) / len(steps)
    off = [predicted - measured for measured, predicted in steps]
    return Verdict(goal, len(steps), {"right": right, "mean": metrics.mape(off)})


def _split(s: Score) -> bool:
    """One query against many keys, or so few query tiles that the keys are cut into splits."""
    return s.splits > 1 or (s.row.problem is not None and s.row.problem.n_q == 1)


def _long(implementations: tuple[str, ...], direction: str, least: float = 100e-6) -> Callable[[Score], bool]:
    """Calls and kernels of more than `least` seconds; decoding and split keys are another group."""

    def picks(s: Score) -> bool:
        r = s.row
        own = r.implementation in implementations and r.direction == direction
        return own and r.kind in ("calls", "kernels") and s.measured > least and not _split(s)

    return picks


def _calls(picks: Callable[[Score], bool]) -> Callable[[Score], bool]:
    return lambda s: s.row.kind == "calls" and picks(s)


def _small(s: Score) -> bool:
    if s.row.kind not in ("calls", "kernels") or s.measured < 10e-6:
        return False
    return _split(s) or (s.row.kind == "kernels" and s.measured <= 100e-6)


def _spills_not(s: Score) -> bool:
    return s.row.tile is not None and s.row.tile.spills == 0


def _tiles(s: Score) -> bool:
    return s.row.tile is not None


def _counted(s: Score) -> bool:
    return s.row.kind == "kernels"


def _paper(implementation: str) -> Callable[[Score], bool]:
    def picks(s: Score) -> bool:
        a = s.row.problem
        return s.row.kind == "published" and s.row.implementation == implementation and a is not None and a.n_q >= 1024

    return picks


SWEEP = {"spearman": 0.95, "regret": 2.0}
GOALS: tuple[Goal, ...] = (
    Goal("peak extra memory", "peak_extra_bytes", EXACT, lambda _: True),
    Goal("DRAM read over 0.1 MB", "dram_read_bytes", {"mean": 2, "worst": 16}, _counted),
    Goal("DRAM written over 20 MB", "dram_write_bytes", {"mean": 5, "worst": 25}, _counted),
    Goal("flash2 forward over 0.1 ms", "time", {"mean": 4, "worst": 15}, _long(("flash2",), "forward")),
    Goal("cudnn forward over 0.1 ms", "time", {"mean": 5, "worst": 18}, _long(("cudnn",), "forward")),
    Goal("standard forward over 0.08 ms", "time", {"mean": 5, "worst": 15},
         _calls(_long(("standard",), "forward", 80e-6))),
    Goal("flash2, cudnn backward", "time", {"mean": 4, "worst": 12}, _long(("flash2", "cudnn"), "backward")),
    Goal("unfused backward calls", "time", {"mean": 4, "worst": 12}, _calls(_long(("standard",), "backward"))),
    Goal("kernels of 10-100 us, splits, decode", "time", {"mean": 8, "worst": 25}, _small),
    Goal("Triton tiles without spills", "time", {"mean": 7}, _spills_not),
    Goal("Triton tiles, all", "time", {"mean": 11, **SWEEP}, _tiles),
    Goal("Triton tiles, estimated spills", "time_estimated", {"mean": 14, "spearman": 0.88, "regret": 3}, _tiles),
    Goal("Triton stages, steps over 5 %", "time", {"right": 90, "mean": 15}, _tiles, steps=True),
    Goal("Triton SRAM", "smem_bytes", EXACT, _tiles),
    Goal("Triton launches or does not", "launches", EXACT, _tiles),
    Goal("Triton occupancy", "occupancy", {"right": 95}, _tiles),
    Goal("papers N >= 1024: FlashAttention-3", "time", {"mean": 5}, _paper("flash3")),
    Goal("papers N >= 1024: FlashAttention-2", "time", {"mean": 8}, _paper("flash2")),
    Goal("papers N >= 1024: standard", "time", {"mean": 15}, _paper("standard")),
)  # fmt: skip
