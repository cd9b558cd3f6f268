"""Machine profiles: the list, one with all its sources, the answer to a check; as text, JSON (iosim.hw/1) and CSV."""

from __future__ import annotations

from collections.abc import Sequence
from textwrap import wrap
from typing import Any

import iosim
from iosim.hardware import DEFAULT, DTYPES, Hardware
from iosim.report.layout import WIDTH, csv_text
from iosim.words import kib, size

SCHEMA = "iosim.hw/1"


def list_text(machines: Sequence[Hardware]) -> str:
    """One line a machine."""
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


# ---------------------------------------------------------------- JSON and CSV


def document(machines: Sequence[Hardware], *, numbers: bool = False) -> dict[str, Any]:
    """Machines, in bytes, hertz and operations a second of the whole chip; with the `numbers` of their profiles."""
    return {
        "schema": SCHEMA,
        "provenance": {"iosim": iosim.__version__},
        "machines": [
            _machine(m)
            | {"default": m.name == DEFAULT, "missing_for_time": list(m.missing_for_time())}
            | ({"notes": m.notes, "numbers": [fact._asdict() for fact in m.fields()]} if numbers else {})
            for m in machines
        ],
    }


def _machine(m: Hardware) -> dict[str, Any]:
    """One machine as a flat row; null for what nobody knows, and a rate that it does not have."""
    rates = {f"matrix_{name}_flop_per_s": m.matrix_rate(name) for name in DTYPES}
    return {
        "name": m.name,
        "title": m.title,
        "vendor": m.vendor,
        "profile_hash": m.profile_hash,
        "processors": m.processors,
        "called": m.called,
        "clock_hz": m.clock_hz,
        "sram_bytes": m.sram.capacity_bytes,
        "l2_bytes": None if m.l2 is None else m.l2.capacity_bytes,
        "hbm_kind": m.hbm.kind,
        "hbm_bytes": m.hbm.capacity_bytes,
        "hbm_bytes_per_s": m.hbm.bandwidth,
        **{name: rate * m.processors if rate and m.processors else None for name, rate in rates.items()},
        "numbers_total": len(m.fields()),
        "numbers_estimated": len(m.estimates()),
    }


def list_csv(machines: Sequence[Hardware]) -> str:
    """A header and one line a machine."""
    return csv_text([_machine(m) for m in machines])


def numbers_as_csv(m: Hardware) -> str:
    """A header and one line a number of the profile."""
    return csv_text([fact._asdict() for fact in m.fields()])
