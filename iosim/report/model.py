"""A model's layers for a terminal of 80 columns, as a run's JSON document with what is the model's, and as rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from iosim.report import document as documents
from iosim.report import text
from iosim.report.layout import csv_text, draw, paragraph, table
from iosim.study.layers import ModelComparison, Total
from iosim.study.models import Layers, ModelCase
from iosim.words import count, duration, ratio, size


def render(found: ModelComparison, **shown: Any) -> str:
    """All layers, then one layer of each kind: of a single kind with all that is said of a run.

    `shown` are options of a run's report, as in the two functions below.
    """
    case, machines = found.case, {r.hardware.name: r.hardware for r in found.runs}
    lines = [*paragraph(headline(case)), *paragraph(_answer(found)), "", _totals(found).rstrip("\n"), ""]
    if case.phase != "training":
        lines += paragraph(_keys(case, {name: m.hbm.capacity_bytes for name, m in machines.items()}))
        lines.append("")
    if len(case.layers) == 1:
        return "\n".join([*lines, f"{_one(case.layers[0])}:", text.render(found.parts[0], **shown)])
    for machine in machines.values():
        lines += paragraph(text.machine_line(machine))
    for layers, part in zip(case.layers, found.parts, strict=True):
        lines += ["", f"{_one(layers)}:", text.render(part, explained=False, **shown).rstrip("\n")]
    kinds = " or ".join(f"--layers {layers.kind}" for layers in case.layers)
    return "\n".join([*lines, "", *paragraph(f"{kinds} explains these layers alone.")]) + "\n"


def headline(case: ModelCase, tokens: str = "") -> str:
    """The model, its layers and its phase in one line; the phase is of `tokens` where that says it, else of n."""
    model, n = case.model, count(case.n, "token", "tokens")
    parts = [f"{layers.count} {_kind(layers)}" for layers in case.layers]
    words = f"Model {model.origin}{f' ({model.name})' if model.name else ''}: {' and '.join(parts)} layer"
    words += "s" if case.count > 1 else ""
    words += f" of {len(model.kinds)}" if case.count < len(model.kinds) else ""
    if case.hidden_nothing and model.window is not None:
        words += f" ({case.hidden_nothing} of them slide, and their window hides nothing here)"
    phases = {
        "prefill": f"prefill of {n}",
        "decode": f"decode of one token that sees {n}",
        "training": f"training on {n}",
    }
    words += f"; {case.phase} of {tokens}" if tokens else f"; {phases[case.phase]}, batch {case.batch}"
    if model.latent is not None:
        size = f"{model.latent.rank} + {model.latent.rope} numbers a token"
        decoding = f"which the dataflow mla reads as {size}" if case.phase == "decode" else f"cached as {size}"
        words += f". K and V are latent, {decoding}"
    words += "" if model.dtype else f". It names no dtype: {case.layers[0].problem.dtype} is taken"
    return words + (f". Not modelled: {', '.join(case.not_modelled)}" if case.not_modelled else "")


def _kind(layers: Layers) -> str:
    window = layers.problem.window
    return "full-attention" if window is None else f"sliding-window ({window:,})"


def _one(layers: Layers) -> str:
    return f"One of the {count(layers.count, f'{_kind(layers)} layer', f'{_kind(layers)} layers')}"


def _answer(found: ModelComparison) -> str:
    """How long all layers take, the fastest first."""
    timed = sorted((t for t in found.totals if t.seconds is not None), key=lambda t: t.picoseconds or 0)
    every = f"Attention in all {found.case.count} layers" if found.case.count > 1 else "Attention in its only layer"
    if not timed:
        return f"{every}: no time, as the profile lacks numbers that it needs."
    best = timed[0].seconds or 1.0
    fidelity = next(r.timeline.fidelity for r in found.runs if r.timeline is not None)
    several = len({t.hardware for t in timed}) > 1
    words = []
    for t in timed:
        name = f"{t.dataflow} on {t.hardware}" if several else t.dataflow
        slower = f" ({ratio(t.seconds or 0, best)})" if t is not timed[0] else ""
        words.append(f"{name} {duration(t.seconds or 0)}{slower}")
    return f"{every} ({fidelity} fidelity): {', '.join(words)}."


def _totals(found: ModelComparison) -> str:
    """A row a machine and dataflow: the time of each kind of layer, then the sums."""
    case, several = found.case, len({t.hardware for t in found.totals}) > 1
    kinds = [f"{layers.count} {layers.kind}" for layers in case.layers] if len(case.layers) > 1 else []
    words = ["machine", "dataflow"] if several else ["dataflow"]
    drawn = table(*words, *kinds, f"{case.count} layers", "HBM", "DRAM", "extra", left=len(words))
    drawn.padding = (0, 1, 0, 0)
    for number, total in enumerate(found.totals):
        runs = [part.runs[number] for part in found.parts]
        each = [_time(None if r.seconds is None else r.seconds * n.count)
                for r, n in zip(runs, case.layers, strict=True)]  # fmt: skip
        names = [total.hardware, total.dataflow] if several else [total.dataflow]
        drawn.add_row(*names, *(each if kinds else []), _time(total.seconds), size(_hbm(total)), size(_dram(total)),
                      size(total.extra_bytes))  # fmt: skip
    return draw(drawn)


def _time(seconds: float | None) -> str:
    return "unknown" if seconds is None else duration(seconds)


def _hbm(t: Total) -> int:
    return t.hbm_read_bytes + t.hbm_write_bytes


def _dram(t: Total) -> int:
    return t.dram_read_bytes + t.dram_write_bytes


def _keys(case: ModelCase, capacities: Mapping[str, int]) -> str:
    """The bytes of K and V, and the machines that they are too many for."""
    small = [f"the {size(most)} of {name}" for name, most in capacities.items() if case.kv_bytes > most]
    return f"K and V of all layers: {size(case.kv_bytes)}{', more than ' if small else ''}{' and '.join(small)}."


# ---------------------------------------------------------------- JSON and CSV


def document(found: ModelComparison, request: Mapping[str, Any], **shown: Any) -> dict[str, Any]:
    """As of a comparison, of the first kind of layer; `runs` has those of all kinds, and `model` the sums."""
    case, parts = found.case, [documents.document(part, request, **shown) for part in found.parts]
    runs = [
        run | {"layers": layers.kind} for layers, part in zip(case.layers, parts, strict=True) for run in part["runs"]
    ]
    model = {
        "file": case.model.origin,
        "model_type": case.model.name or None,
        "phase": case.phase,
        "n": case.n,
        "batch": case.batch,
        "layers": [{"kind": l.kind, "count": l.count, "problem": l.problem.as_dict()} for l in case.layers],
        "layers_of_model": len(case.model.kinds),
        "kv_bytes": case.kv_bytes,
        "not_modelled": list(case.not_modelled),
        "totals": [_total(t) for t in found.totals],
    }
    return parts[0] | {"model": model, "runs": runs}


def _total(t: Total) -> dict[str, Any]:
    fields = asdict(t)
    return {name: value for name, value in fields.items() if name != "picoseconds"} | {
        "makespan_ps": t.picoseconds,
        "seconds": t.seconds,
    }


def rows_as_csv(found: ModelComparison, **shown: Any) -> str:
    """A header and one line a run, which is that of one layer: `layers` says of which kind, `count` how many it has."""
    return csv_text(
        [
            documents.run_row(r, **shown) | {"layers": layers.kind, "count": layers.count}
            for layers, part in zip(found.case.layers, found.parts, strict=True)
            for r in part.runs
        ]
    )
