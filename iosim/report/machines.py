"""Machine profiles as text: the list, one with all its sources, and the answer to a check."""

from __future__ import annotations

from textwrap import wrap

from iosim.hardware import DEFAULT, Hardware, load_hardware, profile_names
from iosim.report.layout import WIDTH
from iosim.report.words import kib, size


def list_text() -> str:
    """One line a shipped machine."""
    machines = [load_hardware(name) for name in profile_names()]
    width = max(len(m.name) for m in machines)
    lines = []
    for m in machines:
        count = f"{m.processors or '?'} {m.called}s".rjust(8)
        fp16 = m.matrix_rate("fp16")
        rate = f"{fp16 * m.processors / 1e12:5.0f} TFLOP/s" if fp16 and m.processors else "    ? TFLOP/s"
        sram = kib(m.sram.capacity_bytes).rjust(7)
        mark = "  (default)" if m.name == DEFAULT else ""
        lines.append(f"{m.name:{width}} {count} {sram} SRAM {rate} fp16 {size(m.hbm.bandwidth):>7}/s{mark}")
    return "\n".join(lines) + "\n"


def show_text(m: Hardware) -> str:
    """Every number of a profile: value, unit, confidence, range, source."""
    lines = [f"{m.name}: {m.title} ({m.vendor})", f"profile hash {m.profile_hash[:16]}"]
    lines += wrap(m.notes, WIDTH)
    facts = m.fields()
    width = max(len(f.name) for f in facts)
    for fact in facts:
        value = "unknown" if fact.value is None else f"{fact.value:g} {fact.unit}".strip()
        span = "" if fact.low is None or fact.high is None else f", {fact.low:g} to {fact.high:g}"
        lines.append(f"{fact.name:{width}}  {value}  [{fact.confidence}{span}]")
        lines += wrap(fact.source or "", WIDTH, initial_indent="    ", subsequent_indent="    ")
    return "\n".join(lines) + "\n"


def check_text(m: Hardware) -> str:
    """That a profile is valid, and what it leaves open."""
    lines = [f"{m.name}: valid, {len(m.fields())} numbers, {len(m.estimates())} of them estimates"]
    if missing := m.missing_for_time():
        lines += wrap(f"time cannot be predicted without: {', '.join(missing)}", WIDTH)
    return "\n".join(lines) + "\n"
