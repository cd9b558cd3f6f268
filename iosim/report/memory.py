"""The memory report: both algorithms under named accountings, the guide's table beside them, and measured calls."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from iosim.dtypes import dtype
from iosim.problem import MAX_N
from iosim.report import plots
from iosim.report.sections import Column, Plot, Section, Table
from iosim.study.memory import ACCOUNTINGS, ALGORITHMS, GUIDE_D, MEASURED, MIB, Memory, Printed, Tensors
from iosim.words import count, digits, size

if TYPE_CHECKING:
    from iosim.report.sections import Canvas

GUIDE = "Moore Threads, FlashAttention optimisation guide for MP31, memory table (fp16)"
_HEADS = {"forward": "forward", "fp32": "fp32", "training": "step"}


def section(m: Memory, request: dict[str, Any]) -> Section:
    """The report."""
    a = m.problem
    heads = count(a.batch * a.heads, "head", "heads in all")
    width = f"d {a.d}" if a.d == a.d_v else f"d {a.d}, d_v {a.d_v}"
    lengths = ", ".join(f"{n:,}" for n in m.lengths)
    machines = [f"{h.name}: {size(h.hbm.capacity_bytes)} of {h.hbm.kind}" for h in m.machines]
    return Section(
        name="memory",
        title="Device memory of attention: what grows with N x N, and what does not",
        subject=(f"N {lengths}, {width}, {a.dtype}, {heads}; {'; '.join(machines)}",),
        answer=tuple(_answer(m)),
        tables=(_accountings(m), _tensors(m), _guide(m), _longest(m), _calls(m)),
        plots=(
            Plot(
                "memory",
                "Device memory over N: standard attention by accounting, FlashAttention, and the guide's figures",
                partial(_draw, m),
            ),
        ),
        notes=tuple(_notes(m)),
        machines=m.machines,
        request=request,
    )


def _answer(m: Memory) -> Iterator[str]:
    n = m.lengths[-1]
    bytes_of = {(c.name, name): size(m.held[c.name, name, n].bytes) for c in ACCOUNTINGS for name in ALGORITHMS}
    yield (
        f"At N = {n:,} a forward pass of standard attention holds {bytes_of['forward', 'standard']} of device "
        f"memory, FlashAttention {bytes_of['forward', 'flash']} ({_times(m.ratio('forward', n))} less); a training "
        f"step with scores in fp32 {bytes_of['training', 'standard']} against {bytes_of['training', 'flash']} "
        f"({_times(m.ratio('training', n))} less). Standard attention grows with N^2, FlashAttention with N."
    )
    scores = ", ".join(name for name, _ in m.held["training", "standard", n].scores)
    yield (f"The guide's table counts 16 N^2 bytes for standard attention, which is what a training step with fp32 "
           f"scores keeps of them ({scores}), and 8 N d "
           f"bytes at d = {GUIDE_D} for FlashAttention, which is Q, K, V and O of a forward pass. Its ratios divide MB "
           f"by MiB: 268x at N = 16,384, where both in bytes give 256x (N / 64).")  # fmt: skip
    yield from (_holds(m, name) for name in (h.name for h in m.machines))


def _holds(m: Memory, machine: str) -> str:
    standard, flash = (m.longest[machine, "forward", name] for name in ("standard", "flash"))
    if standard is None or flash is None:
        return f"{machine} holds no forward pass of this shape."
    beyond = f"at every N that iosim takes (to {MAX_N:,})" if flash >= MAX_N else f"up to N = {flash:,}"
    return (f"{machine} holds a forward pass of standard attention up to N = {standard:,}, of FlashAttention "
            f"{beyond}.")  # fmt: skip


def _times(value: float) -> str:
    return f"{digits(value)}x"


# ---------------------------------------------------------------- tables

N = Column("n", "N", "", show=lambda n: f"{n:,}")


def _accountings(m: Memory) -> Table:
    columns, words = [N], {c.name: c.words for c in ACCOUNTINGS}
    shown = [("standard", c.name) for c in ACCOUNTINGS] + [("flash", "forward"), ("flash", "training")]
    for algorithm, name in shown:
        counts = (
            words[name] if algorithm == "standard" else {"forward": "forward pass", "training": "training step"}[name]
        )
        columns.append(Column(f"{algorithm}_{name}_bytes", f"{algorithm}\n{_HEADS[name]}", "B", counts, size))
    columns += [
        Column(f"{c.name}_ratio", f"ratio\n{_HEADS[c.name]}", "", "standard over flash of that name", _times)
        for c in ACCOUNTINGS
    ]
    rows: list[dict[str, Any]] = []
    for n in m.lengths:
        row: dict[str, Any] = {"n": n}
        row |= {f"{algorithm}_{name}_bytes": m.held[name, algorithm, n].bytes for algorithm, name in shown}
        rows.append(row | {f"{c.name}_ratio": m.ratio(c.name, n) for c in ACCOUNTINGS})
    title = "Peak device memory: inputs, outputs and all that is kept between kernels"
    return Table("memory", title, tuple(columns), tuple(rows))


def _tensors(m: Memory) -> Table:
    """What each accounting counts at the longest N."""
    n = m.lengths[-1]
    columns = (
        Column("accounting", "accounting", words=True),
        Column("algorithm", "algorithm", words=True),
        Column("score_tensors", "N x N tensors", words=True),
        Column("score_bytes", "bytes", "B", "", size),
        Column("other_tensors", "other tensors", words=True),
        Column("other_bytes", "bytes", "B", "", size),
    )
    rows: list[dict[str, Any]] = []
    seen: set[Tensors] = set()
    for c in ACCOUNTINGS:
        for name in ("standard", "flash"):
            t = m.held[c.name, name, n]
            if t not in seen:
                rows.append(
                    {
                        "accounting": c.name,
                        "algorithm": name,
                        "score_tensors": _names(t.scores) or "none",
                        "score_bytes": t.score_bytes,
                        "other_tensors": _names(t.others),
                        "other_bytes": t.bytes - t.score_bytes,
                    }
                )
            seen.add(t)
    return Table(
        "tensors", f"What is counted: the tensors that are there when most is held, N = {n:,}", columns, tuple(rows)
    )


def _names(tensors: tuple[tuple[str, int], ...]) -> str:
    return ", ".join(name for name, _ in tensors)


def _guide(m: Memory) -> Table:
    own = "the guide's figure as it is printed"
    columns = (
        N,
        Column("standard_printed", "standard\nprinted", "", own, words=True),
        Column("standard_bytes", "16 N^2", "B", "four N x N matrices in fp32", size),
        Column("standard_cause", "cause of the\ndifference", words=True),
        Column("flash_printed", "flash\nprinted", "", own, words=True),
        Column("flash_bytes", "8 N d", "B", f"Q, K, V, O in fp16 at d = {GUIDE_D}", lambda b: f"{b / MIB:g} MiB"),
        Column("ratio_printed", "ratio\nprinted", "", own, lambda x: f"{x}x"),
        Column("ratio_mixed", "MB /\nMiB", "", "16 N^2 in MB over 8 N d in MiB", digits),
        Column("ratio_one_unit", "true\nratio", "", "16 N^2 over 8 N d, both in bytes", lambda x: f"{x:g}x"),
    )
    rows = tuple(
        {
            "n": p.n,
            "standard_printed": f"{p.standard_value:g} {p.standard_unit}",
            "standard_bytes": p.standard_bytes,
            "standard_cause": _cause(p),
            "flash_printed": f"{p.flash_value:g} {p.flash_unit}",
            "flash_bytes": p.flash_bytes,
            "ratio_printed": p.ratio,
            "ratio_mixed": p.mixed_ratio,
            "ratio_one_unit": p.one_unit_ratio,
        }
        for p in m.guide
    )
    return Table("guide", f"The guide's own figures: {GUIDE}", columns, rows)


def _cause(p: Printed) -> str:
    """Why the printed figure of standard attention is not 16 N^2."""
    return "rounded" if p.rounded else f"{p.ratio} x {p.flash_value:g}: the rounded ratio times {p.flash_value:g}"


def _longest(m: Memory) -> Table:
    columns = (
        Column("machine", "machine", words=True),
        Column("capacity_bytes", "device memory", "B", "", size),
        *(
            Column(f"{name}_{c.name}_n", f"{name}\n{_HEADS[c.name]}", "", "", _longest_words)
            for name in ("standard", "flash")
            for c in ACCOUNTINGS
            if (name, c.name) != ("flash", "fp32")
        ),
    )
    rows = tuple(
        {c.key: m.longest[h.name, c.key.split("_")[1], c.key.split("_")[0]] for c in columns[2:]}
        | {"machine": h.name, "capacity_bytes": h.hbm.capacity_bytes}
        for h in m.machines
    )
    return Table("longest", "The largest N whose tensors a machine holds", columns, rows)


def _longest_words(n: int) -> str:
    return f"{n:,}" if n < MAX_N else f"> {MAX_N // 10**6} million"


def _calls(m: Memory) -> Table:
    measured = "peak beyond what was allocated before the call"
    columns = (
        Column("batch", "batch"),
        Column("heads", "heads"),
        N,
        *(Column(f"{name}_bytes", name, "B", measured, size) for name in MEASURED),
        Column("off_bytes", "predicted\nminus\nmeasured", "B", "the largest of the three; predicted from the tensors "
               "of the library's call", lambda b: f"{b} B"),
        Column("bytes_a_score", "standard\na score", "B", "measured bytes over heads x N^2",
               lambda x: f"{digits(x)} B"),
    )  # fmt: skip
    shapes = dict.fromkeys(c.problem for c in m.calls if c.implementation == "standard")
    rows: list[dict[str, Any]] = []
    for a in shapes:
        calls = {c.implementation: c for c in m.calls if c.problem == a}
        row: dict[str, Any] = {"batch": a.batch, "heads": a.heads, "n": a.n_q}
        row |= {f"{name}_bytes": calls[name].measured_bytes if name in calls else None for name in MEASURED}
        row["off_bytes"] = max((c.listed_bytes - c.measured_bytes for c in calls.values()), key=abs)
        rows.append(row | {"bytes_a_score": calls["standard"].bytes_a_score})
    return Table(
        "measured", "Measured: PyTorch 2.11 on one H200, forward, fp16, d = 128, no mask", columns, tuple(rows)
    )


def _notes(m: Memory) -> Iterator[str]:
    standard = max((c for c in m.calls if c.implementation == "standard"), key=lambda c: c.problem.n_q)
    yield (f"The measured standard call at N = {standard.problem.n_q:,} takes {digits(standard.bytes_a_score)} bytes a "
           "score: S and P in fp16 are 4, so an inference pass is a quarter of the guide's 16. Its scaled Q is "
           "the rest.")  # fmt: skip
    yield ("The forward columns leave out the log-sum-exp, which training keeps (4 bytes a query). The tensors of a "
           "training step are those of Table 21 of the FlashAttention paper (arXiv 2205.14135), to its printed MiB: "
           "gradients of the step before are still there.")  # fmt: skip
    size_of = dtype(m.problem.dtype).bytes
    if (m.problem.d, size_of, m.problem.batch * m.problem.heads) != (GUIDE_D, 2, 1):
        yield f"The guide's figures are those of one head, d = {GUIDE_D}, fp16, whatever shape was asked for above."


# ---------------------------------------------------------------- plot


def _draw(m: Memory, canvas: Canvas) -> None:
    axes = canvas.subplots()
    lines = (
        ("standard", "training", "standard, training, scores fp32", plots.VERMILION, "-"),
        ("standard", "fp32", "standard, forward, scores fp32", plots.VERMILION, "--"),
        ("standard", "forward", "standard, forward", plots.VERMILION, ":"),
        ("flash", "training", "FlashAttention, training", plots.BLUE, "-"),
        ("flash", "forward", "FlashAttention, forward", plots.BLUE, ":"),
    )
    for algorithm, name, label, colour, style in lines:
        marker = "o" if algorithm == "standard" else "^"
        points = [(n, m.held[name, algorithm, n].bytes) for n in m.lengths]
        plots.series(axes, points, label, colour, style, marker, said=lambda x, y: f"N {x:,}: {size(y)}")
    printed = (
        ("guide: standard", [(p.n, p.standard_bytes) for p in m.guide], plots.VERMILION),
        ("guide: FlashAttention", [(p.n, p.flash_bytes) for p in m.guide], plots.BLUE),
    )
    for label, points, colour in printed:
        plots.series(
            axes, points, label, colour, "", "s", hollow=True,
            said=lambda x, y: f"N {x:,}: {size(y)}",
        )  # fmt: skip
    plots.lengths_axis(axes, m.lengths)
    plots.bytes_axis(axes, "device memory")
    axes.legend(fontsize=8, loc="upper left", bbox_to_anchor=(1.01, 1.0))
