"""How each number of a run comes about, for a terminal of 80 columns and as JSON (schema iosim.explain/1)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from textwrap import wrap
from typing import Any

import iosim
from iosim.program import Kernel
from iosim.report import text
from iosim.report.layout import WIDTH, paragraph
from iosim.study.depends import Dependence
from iosim.study.explain import Explanation, Line, Step
from iosim.study.run import chosen_fields
from iosim.words import count, duration, percent, size

SCHEMA = "iosim.explain/1"
LABEL = 20  # characters
READABLE = 10**15  # a divisor above says nothing
HOW = (
    "Follows: what moved the line when it alone was changed (numbers of the profile at half and at double, options to "
    "another value, the schedule held); the same with --json for every number by name."
)


def shown(e: Explanation) -> dict[str, str]:
    """The lines of `iosim run` by their labels."""
    return {label: cell(e.run) for label, cell, _ in text.rows((e.run,))}


def render(e: Explanation) -> str:
    """Each line as `iosim run` prints it, below it the steps to it and what it depends on."""
    here = shown(e)
    parts = [
        *paragraph(text.headline(e.run.problem, e.run.dataflow.computes)),
        *paragraph(text.machine_line(e.plan.machine)),
    ]
    parts += paragraph(f"Program: {e.run.dataflow.name}, {' then '.join(_grid(k) for k in e.run.program.kernels)}")
    before: Line | None = None
    for line in e.lines:
        parts += ["", f"{line.label:{LABEL}}{here.get(line.label) or size(int(line.value or 0))}"]
        for step in line.steps:
            parts += _step(step)
        if len([s for s in line.steps if s.factors]) > 1:
            parts += _indented(f"Together {_amount(line)}.")
        if before is not None and line.depends is not None and line.depends == before.depends:
            parts += _indented(f"Follows what {before.label} follows.")
        else:
            parts += _depends(line.depends)
            before = line
    parts += ["", *paragraph(HOW)] if any(line.depends for line in e.lines) else []
    return "\n".join(parts) + "\n"


def _grid(kernel: Kernel) -> str:
    axes = " x ".join(f"{axis} {extent:,}" for axis, extent in kernel.grid)
    return f"kernel {kernel.name} of {kernel.blocks:,} blocks ({axes})"


def _indented(words: str, pad: str = "  ") -> list[str]:
    return wrap(words, WIDTH, initial_indent=pad, subsequent_indent=pad, break_long_words=False, break_on_hyphens=False)


def _step(step: Step) -> Iterator[str]:
    first = step.text.split()[0]  # names of tensors and options stay as they are
    ended = step.text[0].upper() + step.text[1:] if first.strip(".,:").isalpha() and first.islower() else step.text
    yield from _indented(f"{ended}: {product(step)}" if step.factors else ended)
    for code in step.program:
        yield from _indented(code, "    | ")


def product(step: Step) -> str:
    """ "16 x 2 x 4,096 x 128 x 2 B = 33,554,432 B (33.6 MB)"."""
    left = " x ".join(f"{n:,}" for n in step.factors)
    if step.over != 1:
        share = percent(float(step.value))
        return f"{left} / {step.over:,} = {share}" if step.over < READABLE else share
    value = int(step.value)
    if step.unit == "blocks":
        return count(value, "block", "blocks")
    words = duration(value / 1e12) if step.unit == "ps" else size(value)
    whole = f"{value:,} {step.unit}"
    plain = whole if words == f"{value} {step.unit}" else f"{whole} ({words})"
    return plain if len(step.factors) == 1 else f"{left} {step.unit} = {plain}"


def _amount(line: Line) -> str:
    return product(Step("", (int(line.value or 0),), line.unit))


def _depends(d: Dependence | None) -> Iterator[str]:
    if d is None:
        return
    numbers = ", ".join(d.numbers) or "no number of the profile"
    options = " ".join(d.options) or "no option"
    yield from _indented(f"Follows {options}; {numbers}.")
    other = " ".join(d.other_options) or "every option moves it"
    rest = f"; {len(d.other_numbers)} other numbers of the profile" if d.other_numbers else ""
    rest += f". Untried, as no block fits with them at half: {', '.join(d.untried)}" if d.untried else ""
    yield from _indented(f"Not: {other}{rest}.")


def document(e: Explanation, request: Mapping[str, Any]) -> dict[str, Any]:
    """For JSON; `request` repeats what was asked for."""
    here = shown(e)
    return {
        "schema": SCHEMA,
        "request": dict(request),
        "provenance": {"iosim": iosim.__version__, "profile_hash": {e.plan.machine.name: e.plan.machine.profile_hash}},
        "dataflow": e.run.dataflow.name,
        "hardware": e.plan.machine.name,
        "problem": e.run.problem.as_dict(),
        "schedule": chosen_fields(e.run.dataflow, e.run.schedule) | {"why": e.run.why},
        "lines": {line.key: _line(line, here.get(line.label)) for line in e.lines},
    }


def _line(line: Line, here: str | None) -> dict[str, Any]:
    value = None if line.value is None else int(line.value) if line.unit else float(line.value)
    d = line.depends
    return {
        "label": line.label,
        "shown": here,
        "value": value,
        "unit": line.unit,
        "steps": [_step_document(step) for step in line.steps],
        "depends_on": None if d is None else {"options": list(d.options), "profile": list(d.numbers)},
        "independent_of": None if d is None else {"options": list(d.other_options), "profile": list(d.other_numbers)},
        "untried": None if d is None else list(d.untried),
    }


def _step_document(step: Step) -> dict[str, Any]:
    value = None if not step.factors else int(step.value) if step.over == 1 else float(step.value)
    return {
        "text": step.text,
        "factors": list(step.factors),
        "over": step.over,
        "unit": step.unit if step.factors else "",
        "value": value,
        "program": list(step.program),
    }
