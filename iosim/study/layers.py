"""Dataflows on a model's layers: a comparison a kind of layer, and the sums over all of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from iosim.errors import InputError
from iosim.study.models import Layers, ModelCase
from iosim.study.run import Comparison, Run, compare


@dataclass(frozen=True, slots=True)
class Total:
    """What one dataflow does on one machine in all layers, one after another; `picoseconds` is None without a time.

    `extra_bytes` is the most that one layer needs, as the next one takes the same memory again.
    """

    hardware: str
    dataflow: str
    layers: int
    picoseconds: int | None
    hbm_read_bytes: int
    hbm_write_bytes: int
    hbm_add_bytes: int
    dram_read_bytes: int
    dram_write_bytes: int
    flops: int
    extra_bytes: int

    @property
    def seconds(self) -> float | None:
        """Predicted time."""
        return None if self.picoseconds is None else self.picoseconds / 1e12


@dataclass(frozen=True, slots=True)
class ModelComparison:
    """Runs of one layer of each kind: `parts` are comparisons in the order of `case.layers`, all of the same runs."""

    case: ModelCase
    parts: tuple[Comparison, ...]

    def __str__(self) -> str:
        """What `iosim run --config` prints."""
        from iosim.report.model import render

        return render(self)

    @property
    def runs(self) -> tuple[Run, ...]:
        """The runs of all kinds of layer, of one layer each."""
        return tuple(r for part in self.parts for r in part.runs)

    def each(self, change: Callable[[Run], Run]) -> ModelComparison:
        """The same with every run changed."""
        return replace(self, parts=tuple(part.each(change) for part in self.parts))

    @property
    def totals(self) -> tuple[Total, ...]:
        """The sums over all layers, in the order of the runs of a part."""
        alike = zip(*(part.runs for part in self.parts), strict=True)
        return tuple(_total(self.case.layers, runs) for runs in alike)


def compare_model(case: ModelCase, *, note: Callable[[str], None] = lambda _: None, **asked: Any) -> ModelComparison:
    """Run every dataflow on every machine for each kind of layer; `asked` are the options of `compare`.

    `computes` is what the phase says, or the same.  Raises InputError as `compare` does.
    """
    if asked.get("computes") not in (None, case.computes):
        raise InputError(f"pass: {asked['computes']} was given, and --phase {case.phase} computes {case.computes}")
    if case.computes == "training":
        asked["computes"] = case.computes
    parts = []
    for layers in case.layers:
        said = partial(_said, note, f"{layers.kind} layers: ") if len(case.layers) > 1 else note
        parts.append(compare(layers.problem, note=said, **asked))
    return ModelComparison(case, tuple(parts))


def _said(note: Callable[[str], None], which: str, text: str) -> None:
    note(which + text)


def _total(layers: tuple[Layers, ...], runs: tuple[Run, ...]) -> Total:
    """The sum of one run of each kind of layer, times how many there are."""
    total = Total(runs[0].hardware.name, (runs[0].parts or runs)[0].dataflow.name, 0, 0, 0, 0, 0, 0, 0, 0, 0)
    for part, r in zip(layers, runs, strict=True):
        n, l, t = part.count, r.ledger, r.timeline
        total = replace(
            total,
            layers=total.layers + n,
            picoseconds=None if t is None or total.picoseconds is None else total.picoseconds + n * t.makespan_ps,
            hbm_read_bytes=total.hbm_read_bytes + n * l.hbm_read_bytes,
            hbm_write_bytes=total.hbm_write_bytes + n * l.hbm_write_bytes,
            hbm_add_bytes=total.hbm_add_bytes + n * l.hbm_add_bytes,
            dram_read_bytes=total.dram_read_bytes + n * r.device.dram_read_bytes,
            dram_write_bytes=total.dram_write_bytes + n * r.device.dram_write_bytes,
            flops=total.flops + n * r.dataflow.flops(r.problem),
            extra_bytes=max(total.extra_bytes, l.extra_bytes),
        )
    return total
