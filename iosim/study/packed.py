"""What sequences of different lengths hold and move by tensor, packed and padded to the longest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from iosim.dataflows import load_dataflow
from iosim.dataflows.narrow_cache import SCALE_BYTES
from iosim.dtypes import dtype
from iosim.hardware import Hardware
from iosim.problem import Attention
from iosim.study.batch import Batch
from iosim.study.ragged import DATAFLOWS, ENTRY_BYTES, Engine, Lengths, OneClass, Step, padded
from iosim.study.run import Note

TABLE = "block table"


@dataclass(frozen=True, slots=True)
class Traffic:
    """Bytes of one tensor in one direction: what blocks ask for, what of it reaches DRAM; None: not known."""

    asked_bytes: int | None
    dram_bytes: int | None


@dataclass(frozen=True, slots=True)
class Packed:
    """A batch on one machine by one dataflow: packed, and with all sequences as long as the longest."""

    engine: Engine
    step: Step
    padded: Step

    @property
    def steps(self) -> Mapping[str, Step]:
        """Both by name."""
        return {"packed": self.step, "padded": self.padded}


def dataflows(shape: Mapping[str, Any]) -> tuple[str, ...]:
    """Those that run sequences of different lengths of this shape (split-kv is not written for fp8)."""
    a = Attention(n_q=1, **shape)
    return tuple(name for name in DATAFLOWS if not load_dataflow(name).refusal(a)) or DATAFLOWS


def packed(
    batch: Batch,
    shape: Mapping[str, Any],
    machines: Sequence[Hardware],
    names: Sequence[str],
    note: Note = lambda _: None,
) -> Iterator[Packed]:
    """Every dataflow on every machine; `shape` has the fields of Attention but the lengths.

    Raises InputError for what is out of range, or does not run sequences of different lengths.
    """
    a = Attention(n_q=1, **shape)
    for machine in machines:
        for name in names:
            note(f"{name} on {machine.name}")
            engine = Engine(a, machine, name, {}, batch.split_rule, batch.cache)
            yield Packed(engine, engine.step(batch.sequences), engine.step(padded(batch.sequences)))


def held(engine: Engine, step: Step) -> dict[str, int]:
    """Bytes of device memory by tensor, of a shape without sinks or a bias.

    Of a cache these are whole pages; those that a shared prefix fills are there once.
    """
    a, cache, size = engine.shape, engine.cache, dtype(engine.shape.dtype).bytes
    rows, tokens = (sum(column) for column in zip(*step.sequences, strict=True))
    kept, scales = size, 0
    if cache is not None:
        pages = sum(cache.pages(s.k) - min(s.k, cache.shared) // cache.page for s in step.sequences)
        tokens = (pages + cache.shared // cache.page) * cache.page
        if cache.dtype is not None:
            kept = dtype(cache.dtype).bytes
            scales = (tokens if cache.scales == "token" else len(step.sequences)) * a.kv_heads * SCALE_BYTES
    out = {"Q": rows * a.heads * a.d * size, "K": tokens * a.kv_heads * a.d * kept}
    out |= {"SK": scales} if scales else {}
    out |= {"V": tokens * a.kv_heads * a.d_v * kept}
    out |= {"SV": scales} if scales else {}
    for part, times in _classes(engine, step):
        for tensor in part.program.tensors:
            if tensor.role == "scratch" or (tensor.scales is not None and not scales):
                out[tensor.name] = out.get(tensor.name, 0) + times * tensor.bytes
    out["O"] = rows * a.heads * a.d_v * dtype(a.out_dtype).bytes
    if cache is not None:
        out[TABLE] = ENTRY_BYTES * sum(cache.pages(s.k) for s in step.sequences)
    return out


def traffic(engine: Engine, step: Step) -> dict[tuple[str, str], Traffic]:
    """By (tensor, direction); what the L2 gives of a shared prefix is taken off its tensors in proportion."""
    asked, dram = Counter[tuple[str, str]](), Counter[tuple[str, str]]()
    for part, times in _classes(engine, step):
        for f in part.device.flows:
            key = f.flow.tensor, f.flow.direction
            asked[key] += times * f.flow.hbm_bytes
            dram[key] += times * (f.dram_read_bytes + f.dram_write_bytes)
    if step.saved_bytes:
        left, total = step.saved_bytes, sum(dram[name, "read"] for name in engine.prefix_tensors)
        for name in engine.prefix_tensors:  # of what is left, so that parts add up to all
            read = dram[name, "read"]
            gone = left * read // total
            dram[name, "read"], left, total = read - gone, left - gone, total - read
    return {key: Traffic(asked[key], dram[key]) for key in asked}


def score_bytes(a: Attention, sequences: Sequence[Lengths]) -> int:
    """S and P of all sequences, as standard attention keeps them."""
    return a.heads * (dtype(a.score_dtype).bytes + dtype(a.dtype).bytes) * sum(s.q * s.k for s in sequences)


def _classes(engine: Engine, step: Step) -> Iterator[tuple[OneClass, int]]:
    """The classes of a step's sequences, and how many there are of each."""
    plain = replace(step.schedule, cycles={}, grid_order="natural", persistent=False)
    for (s, splits), times in Counter(zip(step.sequences, step.splits, strict=True)).items():
        yield engine.one(s, replace(plain, splits=splits)), times
