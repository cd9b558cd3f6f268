"""What sequences of different lengths hold and move by tensor: sections of the memory and the traffic report."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from iosim.report import plots
from iosim.report.ragged import UNVALIDATED
from iosim.report.sections import Column, Plot, Section, Table
from iosim.report.text import heads_words, machine_line
from iosim.study.packed import TABLE, Packed, Traffic, held, score_bytes, traffic
from iosim.study.ragged import Step
from iosim.words import count, ratio, size

if TYPE_CHECKING:
    from iosim.report.sections import Canvas

ALL = "all"
MACHINE = Column("machine", "machine", words=True)
DATAFLOW = Column("dataflow", "dataflow", words=True)
TENSOR = Column("tensor", "tensor", words=True)


def memory_section(found: Sequence[Packed], request: Mapping[str, Any]) -> Section:
    """What a batch holds of device memory."""
    rows = tuple(row for p in found for row in _held(p))
    columns = (
        MACHINE,
        DATAFLOW,
        TENSOR,
        Column("packed_bytes", "packed", "B", "", size),
        Column("padded_bytes", "padded", "B", "all as long as the longest queries and keys", size),
        Column("ratio", "padded\n/packed", "", "", _times),
    )
    return Section(
        name="memory",
        title=f"Device memory of {_batch(found[0])}: packed, and padded to the longest",
        subject=tuple(_subject(found)),
        answer=tuple(_memory_answer(found, rows)),
        tables=(Table("packed", "Device memory by tensor", columns, rows, by="machine"),),
        plots=(_plot("Device memory by tensor", "device memory", found[0], rows, "packed_bytes", "padded_bytes"),),
        notes=tuple(_memory_notes(found[0])),
        machines=tuple(_machines(found)),
        request=request,
    )


def io_section(found: Sequence[Packed], request: Mapping[str, Any]) -> Section:
    """What a batch moves between device memory and the chip."""
    rows = tuple(row for p in found for row in _moved(p))
    columns = (
        MACHINE,
        DATAFLOW,
        TENSOR,
        Column("direction", "", words=True),
        Column("packed_asked_bytes", "asked,\npacked", "B", "all loads or stores of all blocks", size),
        Column("padded_asked_bytes", "asked,\npadded", "B", "the same, all as long as the longest", size),
        Column("packed_dram_bytes", "DRAM,\npacked", "B", "", size),
        Column("padded_dram_bytes", "DRAM,\npadded", "B", "", size),
        Column("dram_ratio", "padded\n/packed", "", "of DRAM bytes", _times),
    )
    return Section(
        name="io",
        title=f"Traffic of {_batch(found[0])}: packed, and padded to the longest",
        subject=tuple(_subject(found)),
        answer=tuple(_io_answer(found)),
        tables=(Table("packed", "Traffic by tensor", columns, rows, by="machine"),),
        plots=(_plot("DRAM traffic by tensor", "traffic", found[0], rows, "packed_dram_bytes", "padded_dram_bytes"),),
        notes=tuple(_io_notes(found)),
        machines=tuple(_machines(found)),
        request=request,
    )


def _batch(p: Packed) -> str:
    return count(len(p.step.sequences), "sequence", "sequences")


def _machines(found: Sequence[Packed]) -> list[Any]:
    return list({p.engine.hardware.name: p.engine.hardware for p in found}.values())


def _subject(found: Sequence[Packed]) -> Iterator[str]:
    a, step = found[0].engine.shape, found[0].step
    width = f"d {a.d}" if a.d == a.d_v else f"d {a.d}, d_v {a.d_v}"
    mask = (", causal" if a.causal else "") + (f", window {a.window:,}" if a.window else "")
    queries, keys = (sum(column) for column in zip(*step.sequences, strict=True))
    yield (f"{heads_words(a)}, {width}, {a.dtype}{mask}; {queries:,} query rows and {keys:,} key rows, the longest "
           f"{max(s.k for s in step.sequences):,} keys")  # fmt: skip
    yield from map(machine_line, _machines(found))


def _scales(p: Packed) -> str:
    if p.engine.shape.is_fp8:
        return " SQ, SK and SV are the scales of Q, K and V."
    return " SK and SV are the scales of K and V." if p.engine.cache and p.engine.cache.dtype else ""


def _times(value: float) -> str:
    return ratio(value, 1.0)


def _over(padded: int | None, packed: int | None) -> float | None:
    return padded / packed if padded is not None and packed else None


# ---------------------------------------------------------------- memory


def _held(p: Packed) -> Iterator[dict[str, Any]]:
    packed, padded = (held(p.engine, step) for step in p.steps.values())
    sums = {ALL: (sum(packed.values()), sum(padded.values()))}
    each = {name: (packed.get(name), padded.get(name)) for name in packed | padded} | sums
    for name, (own, long) in each.items():
        yield {
            "machine": p.engine.hardware.name,
            "dataflow": p.engine.dataflow,
            "tensor": name,
            "packed_bytes": own,
            "padded_bytes": long,
            "ratio": _over(long, own),
        }


def _memory_answer(found: Sequence[Packed], rows: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    sums = {(row["machine"], row["dataflow"]): row for row in rows if row["tensor"] == ALL}
    for p in found:
        machine, name = p.engine.hardware, p.engine.dataflow
        row = sums[machine.name, name]
        capacity = machine.hbm.capacity_bytes
        lacking = [how for how in p.steps if row[f"{how}_bytes"] > capacity]
        fits = (
            f"; {machine.name} has {size(capacity)}, too little for the {' or the '.join(lacking)} batch"
            if lacking
            else ""
        )
        where = f" on {machine.name}" if len(_machines(found)) > 1 else ""
        yield (f"{name}{where} holds {size(row['packed_bytes'])} packed and {size(row['padded_bytes'])} padded to the "
               f"longest ({_times(row['ratio'])}){fits}.")  # fmt: skip
    a, steps = found[0].engine.shape, found[0].steps.values()
    packed, padded = (size(score_bytes(a, step.sequences)) for step in steps)
    yield (f"S and P are not held, which standard attention keeps: {packed} for the pairs of these "
           f"lengths, {padded} padded.")  # fmt: skip


def _memory_notes(p: Packed) -> Iterator[str]:
    yield ("Inputs, outputs and what split-kv keeps between its two launches (O and L parts), all there at one time."
           f"{_scales(p)}")  # fmt: skip
    if (cache := p.engine.cache) is not None:
        shared = "; whole pages of the shared prefix are there once" if cache.shared else ""
        yield f"K and V are whole pages of {count(cache.page, 'token', 'tokens')}, a last one too{shared}."
    if p.engine.shape.window is not None:
        yield "All keys are counted, also those that no query's window reaches any more."


# ---------------------------------------------------------------- traffic


def _moved(p: Packed) -> Iterator[dict[str, Any]]:
    packed, padded = (traffic(p.engine, step) for step in p.steps.values())
    for key in packed | padded:
        yield _row(p, key, packed.get(key), padded.get(key))
    if p.engine.cache is not None:
        yield _row(p, (TABLE, "read"), *(Traffic(step.table_bytes, None) for step in p.steps.values()))
    yield _row(p, (ALL, ""), *map(_sums, p.steps.values()))


def _sums(step: Step) -> Traffic:
    return Traffic(step.hbm_read_bytes + step.hbm_write_bytes, step.dram_bytes)


def _row(p: Packed, key: tuple[str, str], packed: Traffic | None, padded: Traffic | None) -> dict[str, Any]:
    """A row of a tensor and direction; None where such a launch does not have it."""
    none = Traffic(None, None)
    own, long = packed or none, padded or none
    return {
        "machine": p.engine.hardware.name,
        "dataflow": p.engine.dataflow,
        "tensor": key[0],
        "direction": key[1],
        "packed_asked_bytes": own.asked_bytes,
        "padded_asked_bytes": long.asked_bytes,
        "packed_dram_bytes": own.dram_bytes,
        "padded_dram_bytes": long.dram_bytes,
        "dram_ratio": _over(long.dram_bytes, own.dram_bytes),
    }


def _io_answer(found: Sequence[Packed]) -> Iterator[str]:
    for p in found:
        s, long = p.step, p.padded
        asked, long_asked = (step.hbm_read_bytes + step.hbm_write_bytes for step in (s, long))
        where = f" on {p.engine.hardware.name}" if len(_machines(found)) > 1 else ""
        yield (f"{p.engine.dataflow}{where} asks for {size(asked)} packed, of which {size(s.dram_bytes)} reach "
               f"DRAM; padded to the longest for {size(long_asked)} ({ratio(long_asked, asked)}) and "
               f"{size(long.dram_bytes)} ({ratio(long.dram_bytes, s.dram_bytes)}).")  # fmt: skip


def _io_notes(found: Sequence[Packed]) -> Iterator[str]:
    scales = _scales(found[0])
    yield f"Each sequence stands behind an L2 of its own, by the closed form.{scales}"
    if found[0].engine.cache is not None:
        yield (f"The {TABLE} is in no sum, and what of it reaches DRAM is not modelled. Of a last page the rows that "
               "are there are read.")  # fmt: skip
    if saved := [f"{size(p.step.saved_bytes)} ({p.engine.dataflow})" for p in found if p.step.saved_bytes]:
        yield f"Of the shared prefix the L2 gives {' and '.join(saved)}, which are taken off K and V."
    yield UNVALIDATED


# ---------------------------------------------------------------- plots


def _plot(title: str, axis: str, first: Packed, rows: Sequence[Mapping[str, Any]], *keys: str) -> Plot:
    machine = first.engine.hardware.name
    own = [row for row in rows if row["machine"] == machine and row["tensor"] not in (ALL, TABLE)]
    draw: Callable[[Canvas], None] = partial(_bars, own, keys, axis)
    return Plot("packed", f"{title} on {machine}: packed, and padded to the longest", draw)


def _bars(rows: Sequence[Mapping[str, Any]], keys: Sequence[str], axis: str, canvas: Canvas) -> None:
    """Two bars a tensor, packed and padded, for each dataflow."""
    names = list(dict.fromkeys(row["dataflow"] for row in rows))
    drawn = canvas.subplots(1, len(names), squeeze=False, sharey=True)[0]
    for axes, name in zip(drawn, names, strict=True):
        own = [row for row in rows if row["dataflow"] == name]
        labels = [f"{row['tensor']} {row.get('direction', '')}".strip() for row in own]
        for at, (key, colour, hatch) in enumerate(zip(keys, (plots.BLUE, plots.ORANGE), ("", "//"), strict=True)):
            for x, (label, row) in enumerate(zip(labels, own, strict=True)):
                value = row[key] or 0
                how = key.partition("_")[0]
                gid = f"{plots.HOVER}{name}, {label}, {how}: {size(value)}"
                look = {"color": colour, "hatch": hatch, "edgecolor": "white", "linewidth": 0.5}
                axes.bar([x + 0.4 * at - 0.2], [value], 0.4, gid=gid, label="" if x else how, **look)
        axes.set_xticks(range(len(own)), labels, rotation=40, ha="right", fontsize=8)
        axes.set_title(name, fontsize=10)
    plots.linear_bytes_axis(drawn[0], axis)
    drawn[-1].legend(fontsize=8)
