"""Every dataflow on every machine: numbers, bytes, capacity, time.  Dataflows and machines are found by discovery."""

from __future__ import annotations

from dataclasses import replace

import pytest

from iosim.blockmask import BlockMask
from iosim.check import check
from iosim.dataflows import dataflow_names, load_dataflow
from iosim.errors import InputError
from iosim.hardware import Hardware, load_hardware, profile_names
from iosim.problem import Attention
from iosim.program import check as check_program
from iosim.study.choose import choose
from iosim.study.run import Run, compare

PROBLEMS = {
    "square": Attention(n_q=256, d=64),
    "ragged causal GQA": Attention(n_q=201, n_k=333, d=40, d_v=24, heads=4, kv_heads=2, batch=2, causal=True, lse=True),
    "rows that see nothing": Attention(n_q=150, n_k=70, d=32, causal=True, lse=True, dtype="bf16"),
    "one query": Attention(n_q=1, n_k=700, d=128, heads=2),
    "fp8": Attention(n_q=201, n_k=333, d=48, d_v=24, heads=4, kv_heads=2, causal=True, lse=True, dtype="fp8"),
    "fp16 accumulator": Attention(n_q=70, n_k=200, d=40, d_v=24, heads=2, lse=True, accumulator="fp16"),
    "latent": Attention(n_q=1, n_k=300, d=72, d_v=64, heads=20, kv_heads=1, batch=2, lse=True),
    "latent, many queries": Attention(n_q=100, n_k=130, d=72, d_v=64, heads=2, kv_heads=1, causal=True),
    "operations": Attention(n_q=100, n_k=130, d=64, heads=3, causal=True, window=40, global_tokens=20, softcap=20,
                            alibi=True, bias="heads", sinks=True, dropout=0.1, lse=True),
    "block mask": Attention(n_q=256, n_k=384, d=64, block_mask=BlockMask.of([[1, 0, 1], [0, 1, 0]])),
    "fp32": Attention(n_q=100, d=64, dtype="fp32", causal=True, causal_align="top-left", n_k=130),
}  # fmt: skip


SLOW = pytest.mark.slow
TILES = {"flash1": 4, "flash-backward": 4}  # that a block holds beside statistics: Q, K, V and O or dO


def suited(name: str, problem: Attention) -> Attention:
    """The problem, with one latent key/value head for a dataflow that is written for nothing else."""
    latent = replace(problem, kv_heads=1, d_v=max(1, problem.d - problem.d // 8))
    refused = load_dataflow(name).refusal(problem)
    return latent if refused and not load_dataflow(name).refusal(latent) else problem


def one(name: str, machine: str, problem: Attention, *, fidelity: str = "fair", checked: bool = False) -> Run:
    return compare(problem, dataflows=[name], hardware=[machine], fidelity=fidelity, check=checked).runs[0]


@pytest.mark.parametrize("problem", PROBLEMS.values(), ids=PROBLEMS)
@pytest.mark.parametrize("name", dataflow_names())
def test_the_numbers_are_right_and_all_counts_agree(name: str, problem: Attention) -> None:
    if refusal := load_dataflow(name).refusal(problem):
        with pytest.raises(InputError) as caught:
            one(name, "mp31", problem)
        assert str(caught.value) == refusal
        assert f"{name} is not written for" in refusal
        return
    run = one(name, "mp31", problem, checked=True)
    check_program(run.program)
    assert run.check is not None
    assert run.check.status == "passed", run.check.detail
    assert run.check.rows_checked == run.check.rows_total
    ledger = {(t, way): n for t, ways in run.ledger.by_tensor.items() for way, n in ways.items()}
    assert run.check.counted == ledger
    assert run.timeline is not None
    assert {k: n for k, n in run.timeline.moved.items() if n} == ledger
    chip = one(name, "mp31", problem, fidelity="chip").timeline
    assert chip is not None
    assert {k: n for k, n in chip.moved.items() if n} == ledger


@pytest.mark.slow
@pytest.mark.parametrize("machine", profile_names())
@pytest.mark.parametrize("name", dataflow_names())
def test_it_runs_on_every_machine_or_says_why_not(name: str, machine: str) -> None:
    problem = suited(name, Attention(n_q=1024, d=128, heads=4, causal=True))
    refusal = plan(name, problem, load_hardware(machine))
    if refusal is not None:
        assert lacks_what_it_needs(refusal, load_hardware(machine))
        return
    run = one(name, machine, problem)
    assert run.footprint.sram_bytes == sum(run.footprint.items.values()) <= run.footprint.sram_capacity
    if run.timeline is None:
        assert run.no_time
        return
    hardware = run.hardware
    count = hardware.processors or 0
    floor = max(
        (run.device.dram_read_bytes + run.device.dram_write_bytes) / hardware.hbm.bandwidth,
        run.ledger.executed_flops / ((hardware.matrix_rate("fp16") or 1) * count),
    )
    assert run.timeline.seconds >= floor
    if run.dataflow.computes == "softmax":
        assert run.peak_share is None
    else:
        assert run.peak_share is not None
        assert 0 < run.peak_share < 1
    for unit in run.timeline.units.values():
        assert unit.busy_ps + sum(unit.stalls_ps.values()) == unit.instances * run.timeline.makespan_ps
        assert min(unit.stalls_ps.values()) >= 0


@pytest.mark.parametrize("machine", profile_names())
@pytest.mark.parametrize("name", dataflow_names())
@pytest.mark.parametrize(
    "fields",
    [{"dtype": "fp8"}, pytest.param({"dtype": "bf16"}, marks=SLOW), pytest.param({"accumulator": "fp16"}, marks=SLOW)],
    ids=str,
)
def test_every_format_works_or_is_refused_in_one_line(name: str, machine: str, fields: dict[str, str]) -> None:
    problem, hardware = suited(name, Attention(n_q=512, d=64, **fields)), load_hardware(machine)
    known = hardware.matrix_rate(problem.dtype) is not None
    lacks_copies = plan(name, suited(name, Attention(n_q=512, d=64)), hardware) is not None
    if (refusal := load_dataflow(name).refusal(problem)) or lacks_copies or (problem.is_fp8 and not known):
        with pytest.raises(InputError) as caught:
            one(name, machine, problem)
        assert "\n" not in str(caught.value)
        assert str(caught.value) == refusal or lacks_copies or "has no matrix rate for fp8_e4m3" in str(caught.value)
        return
    run = one(name, machine, problem)
    assert run.timeline is not None or run.no_time


def lacks_what_it_needs(refusal: str, machine: Hardware) -> bool:
    """Whether a refusal rightly says that the machine has no asynchronous copies."""
    return "no asynchronous copies" in refusal and not machine.copy.asynchronous


def plan(name: str, problem: Attention, machine: Hardware) -> str | None:
    """None where a schedule is found, else the refusal."""
    try:
        choose(load_dataflow(name), problem, machine, {})
    except InputError as error:
        return str(error)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("d", [8, pytest.param(64, marks=SLOW), 96, 128, pytest.param(256, marks=SLOW), 512])
@pytest.mark.parametrize("name", dataflow_names())
def test_every_head_dimension_gets_a_tile_that_fits_or_a_clear_refusal(name: str, d: int) -> None:
    for machine in map(load_hardware, profile_names()):
        for dtype in ("fp16", "fp32"):
            problem = suited(name, Attention(n_q=4096, d=d, dtype=dtype))
            refusal = plan(name, problem, machine)
            if refusal is not None and not lacks_what_it_needs(refusal, machine):
                # only where 16 rows of what it holds, like Q, K and V, are too much
                assert machine.sram.block_capacity_bytes <= 16 * TILES.get(name, 3) * d * 4
                assert "of SRAM (" in refusal


def test_a_check_that_should_fail_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """The suite's own check is no rubber stamp: a wrong scale is noticed."""
    problem = Attention(n_q=64, d=64)
    monkeypatch.setattr(Attention, "scale", property(lambda a: 1.01 / a.d**0.5))
    flow = load_dataflow("flash2")
    program = flow(problem, choose(flow, problem, load_hardware("mp31"), {})[0])
    monkeypatch.undo()
    assert check(problem, program).status == "failed"
