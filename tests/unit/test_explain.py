"""Explanations: they add up, they follow the program, and what they say of dependence is what changing shows."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

import iosim.dataflows.flash2
from iosim.dataflows import dataflow_names, load_dataflow
from iosim.hardware import load_hardware
from iosim.problem import Attention
from iosim.report.explain import render
from iosim.report.text import rows
from iosim.study.explain import Explanation, explain, lines
from iosim.study.run import check_of, evaluate, plan_of
from tests.dataflow_checks import suited


def explained(
    name: str, *, hw: str = "mp31", depends: bool = False, fidelity: str = "fair", **problem: object
) -> Explanation:
    a = suited(name, Attention(**{"n_q": 256, "d": 64, **problem}))  # type: ignore[arg-type]
    plan = plan_of(a, load_hardware(hw), load_dataflow(name), {})
    return explain(plan, evaluate(plan, fidelity), {}, depends=depends)


@pytest.mark.parametrize("name", dataflow_names())
@pytest.mark.parametrize("more", [{}, {"n_q": 200, "causal": True, "heads": 4, "kv_heads": 2}])
def test_the_steps_of_every_line_add_up_to_it(name: str, more: dict[str, object]) -> None:
    found = explained(name, **more)
    known = {line.key: line for line in found.lines}
    for line in found.lines:
        if line.value is not None and any(step.factors for step in line.steps):
            assert line.total == line.value, line.key
    run = found.run
    assert run.timeline is not None
    assert known["time"].total == run.timeline.makespan_ps
    assert known["dram"].total == run.device.dram_read_bytes + run.device.dram_write_bytes
    assert known["sram"].total == run.footprint.sram_bytes
    assert known["extra_memory"].total == run.ledger.extra_bytes
    if run.peak_share is not None:
        assert float(known["peak_share"].total) == pytest.approx(run.peak_share, rel=1e-6)
    labels = [label for label, _, _ in rows((run,)) if label != "rows checked"]
    assert [line.label for line in found.lines if line.key != "hbm_add"] == labels


def test_the_simulation_of_every_processor_adds_up_too() -> None:
    time = next(line for line in explained("flash2", fidelity="chip").lines if line.key == "time")
    assert time.total == time.value
    assert "every processor simulated" in time.steps[-1].text


def test_the_sentence_of_the_guide() -> None:
    """16 Q blocks read K and V once each: 16 x 2 x 4096 x 128 x 2 B = 33.6 MB."""
    a = Attention(n_q=4096, d=128)
    plan = plan_of(a, load_hardware("mp31"), load_dataflow("flash2"), {"block_q": 256, "block_k": 64, "stages": (1,)})
    read = next(line for line in lines(evaluate(plan)) if line.key == "hbm_read")
    step = next(step for step in read.steps if step.text.startswith("K and V"))
    assert step.text == "K and V are read once for each of ⌈4,096/256⌉ = 16 blocks of 256 rows of Q (i)"
    assert step.factors == (16, 2, 4096, 128, 2)
    assert "16 x 2 x 4,096 x 128 x 2 B = 33,554,432 B (33.6 MB)" in " ".join(
        render(explain(plan, evaluate(plan), {}, depends=False)).split()
    )


def test_a_changed_dataflow_changes_its_explanation(tmp_path: Path) -> None:
    """K read a second time in the loop, and O kept in device memory: said so, and still adding up."""
    code = Path(iosim.dataflows.flash2.__file__).read_text()
    code = code.replace("def flash2(", "def twice(").replace('Builder("flash2")', 'Builder("twice")')
    code = code.replace('BACKWARD = "flash-backward"\n', "")
    (line,) = (line for line in code.splitlines(keepends=True) if 'k = p.load("k", K[b, kv, rows(j, bk)])' in line)
    file = tmp_path / "twice.py"
    file.write_text(code.replace(line, line + line.replace('k = p.load("k"', 'p.load("k again"')))
    before, after = explained("flash2"), explained(str(file))
    reads = [next(line for line in e.lines if line.key == "hbm_read") for e in (before, after)]
    assert reads[0].steps[1].text.startswith("K and V are read")
    assert reads[1].steps[1].text.startswith("K (2 times) and V are read")
    assert reads[1].total == reads[1].value == after.run.ledger.hbm_read_bytes
    k = next(f.hbm_bytes for f in before.run.ledger.flows if f.tensor == "K")
    assert reads[1].total - reads[0].total == k
    srams = [next(line for line in e.lines if line.key == "sram") for e in (before, after)]
    assert [any("k again" in step.text for step in line.steps) for line in srams] == [False, True]


def test_what_a_line_follows_and_what_it_does_not() -> None:
    """Bytes of blocks follow no machine; SRAM follows the tile; time follows the rates."""
    whole = explained("flash2", depends=True, n_q=512)
    found = {line.key: line.depends for line in whole.lines}
    read, sram, time, extra = (found[key] for key in ("hbm_read", "sram", "time", "extra_memory"))
    assert read is not None
    assert sram is not None
    assert time is not None
    assert extra is not None
    shown = render(whole)
    assert "  Follows no option; no number of the profile.\n" in shown
    assert shown.count("  Follows what ") == sum(
        before.depends == after.depends is not None for before, after in pairwise(whole.lines)
    )
    assert max(map(len, shown.splitlines())) <= 80
    assert (extra.options, extra.numbers, read.numbers) == ((), (), ())
    assert {"--n", "--d", "--block-q", "--dtype"} <= set(read.options)
    assert {"--stages", "--lse", "--fidelity"} <= set(read.other_options)
    assert set(sram.options) == {"--d", "--d-v", "--dtype", "--block-q", "--block-k", "--stages"}
    assert {"launch.kernel_us", "matrix.tflops.fp16", "processor.clock_mhz"} <= set(time.numbers)
    assert {"matrix.tflops.tf32", "hbm.capacity_gib"} <= set(time.other_numbers)
    assert "--fidelity" in time.options
    assert not {"energy.l2_pj_per_byte"} & {*time.numbers, *time.other_numbers, *time.untried}
    # Each number of the profile that time needs is in one of the three lists, once.
    names = [*time.numbers, *time.other_numbers, *time.untried]
    facts = [f.name for f in load_hardware("mp31").fields() if f.value is not None and not f.name.startswith("energy.")]
    assert sorted(names) == sorted(facts)
    faster = load_hardware("mp31").with_value("launch.kernel_us", 1)
    plan = plan_of(Attention(n_q=512, d=64), faster, load_dataflow("flash2"), {})
    here = evaluate(plan_of(Attention(n_q=512, d=64), load_hardware("mp31"), load_dataflow("flash2"), {}))
    assert evaluate(plan).seconds != here.seconds


def test_the_check_says_what_it_was_held_against() -> None:
    plan = plan_of(Attention(n_q=64, d=32), load_hardware("mp31"), load_dataflow("flash2"), {})
    line = list(lines(evaluate(plan, check=check_of(plan))))[-1]
    assert line.key == "check"
    assert "2^-11 (fp16)" in line.steps[1].text
