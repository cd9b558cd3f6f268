"""A training step: its memory, tensor by tensor, against a published table, and its two passes as one run."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from iosim.dataflows import load_dataflow
from iosim.errors import InputError
from iosim.hardware import profile_names
from iosim.memory.step import StepMemory, joined, step_memory
from iosim.problem import Attention
from iosim.program import Builder, Program, rows
from iosim.schedule import Schedule
from iosim.study.run import compare
from tests.conftest import Iosim

# Dao et al. 2022 (arXiv 2205.14135), Table 21: memory of forward and backward, no mask, no dropout, fp16, batch 16, 8
# heads, d 64, on an A100-40GB.  It says MB and means MiB.  Standard stops at 4096, where it runs out of memory.
TABLE_21 = Path(__file__).parents[1] / "data" / "flash_attention_table21.csv"
TABLE = list(csv.DictReader(TABLE_21.read_text().splitlines()))
TILES = Schedule(block_q=64, block_k=64)


def memory(n: int, forward: str, backward: str, schedule: Schedule = TILES) -> StepMemory:
    a = Attention(n_q=n, d=64, heads=8, batch=16)
    first = replace(a, lse=backward == "flash-backward")
    return step_memory(load_dataflow(forward)(first, schedule), load_dataflow(backward)(a, schedule))


def mib(count: int) -> int:
    """Whole MiB, as printed: a half goes to the even number."""
    return round(count / 2**20)


@pytest.mark.parametrize("row", TABLE, ids=lambda row: row["n"])
def test_memory_is_that_of_the_published_table(row: dict[str, str]) -> None:
    n = int(row["n"])
    if row["standard_mib"]:
        assert mib(memory(n, "standard", "standard-backward").peak_bytes) == int(row["standard_mib"])
    flash = memory(n, "flash2", "flash-backward")
    peak = flash.peak_bytes
    if n <= 256:  # the paper's kernel has one block of 256 keys, and so no sum of dQ
        peak -= next(t.bytes for t in flash.alive if t.tensor == "dQ sum")
    assert mib(peak) == int(row["flash_attention_mib"])


def test_the_tensors_of_the_table_are_named() -> None:
    """Ten N x d tensors and four N x N ones; thirteen, the fp32 sum of dQ counted twice, and two row statistics."""
    matrix, data, statistic = (16 * 8 * count for count in (2 * 1024**2, 2 * 1024 * 64, 4 * 1024))
    standard = {t.tensor: t.bytes for t in memory(1024, "standard", "standard-backward").alive}
    assert {name for name, size in standard.items() if size == matrix} == {"P", "dP", "dS", "P * dP"}
    ten = {"Q", "K", "V", "O", "dO", "dV", "Q.grad", "K.grad", "V.grad", "K / sqrt(d)"}
    assert {name for name, size in standard.items() if size == data} == ten
    assert len(standard) == 14
    flash = {t.tensor: t.bytes for t in memory(1024, "flash2", "flash-backward").alive}
    eleven = {"Q", "K", "V", "O", "dO", "dQ", "dK", "dV", "Q.grad", "K.grad", "V.grad"}
    assert flash == dict.fromkeys(eleven, data) | {"dQ sum": 2 * data, "L": statistic, "D": statistic}


def copies(name: str, *steps: tuple[str, str], library: bool = True, **roles: str) -> Program:
    """A kernel for each step, which copies one tensor of 64 fp32 numbers to another."""
    p = Builder(name)
    tensors = {n: p.tensor(n, (64, 1), "fp32", role) for n, role in roles.items()}  # type: ignore[arg-type]
    for source, target in steps:
        with p.kernel(f"{name} {target}", operands_once=library, i=1) as (i,):
            p.store(tensors[target][rows(i, 64)], p.load("x", tensors[source][rows(i, 64)]))
    return p.done()


def test_a_tensor_lives_from_its_first_store_to_its_last_use_in_either_pass() -> None:
    """Forward A -> B -> C -> O; backward (B, dO) -> E -> dA.  B stays for E, C does not; at E: A, B, O, dO, E."""
    forward = copies("forward", ("A", "B"), ("B", "C"), ("C", "O"), A="in", B="scratch", C="scratch", O="out")
    backward = copies("backward", ("B", "E"), ("E", "dA"), B="in", dO="in", E="scratch", dA="out")
    found = step_memory(forward, backward)
    # While C is made: A, B, C, dO.  While O is: A, B, C, O, dO, which is the first of two times with five.
    assert found.kernels == ("forward O",)
    assert [t.tensor for t in found.alive] == ["A", "B", "C", "O", "dO"]
    assert (found.peak_bytes, found.allocated_bytes) == (5 * 256, 3 * 256)


def test_a_fused_pass_is_one_call_that_holds_all_its_scratch() -> None:
    forward = copies(
        "forward", ("A", "B"), ("B", "C"), ("C", "O"), library=False, A="in", B="scratch", C="scratch", O="out"
    )
    backward = copies("backward", ("dO", "E"), ("E", "F"), ("F", "dA"), library=False, dO="in", E="scratch",
                      F="scratch", dA="out")  # fmt: skip
    found = step_memory(forward, backward)
    assert found.kernels == ("backward E", "backward F", "backward dA")
    assert [t.tensor for t in found.alive] == ["A", "O", "dO", "E", "F", "dA"]


def test_passes_that_do_not_fit_together_are_refused() -> None:
    forward = copies("forward", ("A", "O"), A="in", O="out")
    with pytest.raises(InputError, match="takes M, which the forward pass does not make"):
        joined(forward, copies("backward", ("M", "dA"), M="in", dA="out"))
    with pytest.raises(InputError, match="both have a tensor O, and it is not the same"):
        joined(forward, copies("backward", ("A", "O"), A="in", O="out"))
    with pytest.raises(InputError, match="both have a kernel forward O"):
        joined(forward, forward)


@pytest.mark.parametrize("fidelity", ["fair", pytest.param("chip", marks=pytest.mark.slow)])
def test_a_step_is_the_sum_of_its_passes(fidelity: str) -> None:
    a = Attention(n_q=200, d=32, heads=4, kv_heads=2, causal=True)
    step = compare(a, computes="training", fidelity=fidelity)
    backward = compare(a, computes="backward", fidelity=fidelity)
    forward = [
        compare(replace(a, lse=n > 0), dataflows=d, fidelity=fidelity) for n, d in enumerate(("standard", "flash2"))
    ]
    for n, whole in enumerate(step.runs):
        parts = forward[n].runs[0], backward.runs[n]
        assert [p.dataflow.name for p in whole.parts] == [p.dataflow.name for p in parts]
        for key in ("hbm_read_bytes", "hbm_write_bytes", "hbm_add_bytes", "paper_hbm_bytes", "executed_flops"):
            assert getattr(whole.ledger, key) == sum(getattr(p.ledger, key) for p in parts)
        assert whole.device.dram_read_bytes == sum(p.device.dram_read_bytes for p in parts)
        assert whole.timeline is not None
        assert whole.timeline.makespan_ps == sum(p.timeline.makespan_ps for p in parts if p.timeline)
        assert whole.dataflow.flops(a) == a.flops + a.backward_flops
        assert whole.check is not None
        assert whole.check.status == "passed"
        assert whole.check.rows_checked == sum(p.check.rows_checked for p in parts if p.check)
        assert whole.step is not None
        assert whole.ledger.peak_bytes == whole.step.peak_bytes


@pytest.mark.parametrize("machine", profile_names())
def test_a_step_runs_on_every_machine(machine: str) -> None:
    for whole in compare(Attention(n_q=300, d=64), hardware=machine, computes="training", check=False).runs:
        assert whole.fits
        assert whole.check is None
        assert (whole.timeline is None) == bool(whole.no_time)
        assert whole.stalls.empty == (whole.timeline is None)
        for unit in whole.timeline.units.values() if whole.timeline else ():
            assert unit.busy_ps + sum(unit.stalls_ps.values()) == unit.instances * whole.timeline.makespan_ps


def test_a_step_fails_its_check_where_one_pass_does(monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrong scale in the backward program alone."""
    import iosim.dataflows.flash_backward as module

    right = module.flash_backward
    monkeypatch.setattr(module, "flash_backward", lambda a, s: _scaled(right, a, s))
    (run,) = compare(Attention(n_q=64, d=32), dataflows="flash2", computes="training").runs
    assert [part.check.status for part in run.parts if part.check] == ["passed", "failed"]
    assert run.check is not None
    assert run.check.status == "failed"


def _scaled(write: object, a: Attention, s: Schedule) -> Program:
    scale = Attention.scale
    Attention.scale = property(lambda a: 1.01 / a.d**0.5)  # type: ignore[assignment, method-assign]
    try:
        return write(a, s)  # type: ignore[operator, no-any-return]
    finally:
        Attention.scale = scale  # type: ignore[method-assign]


@pytest.mark.slow
def test_the_command_says_what_is_alive(iosim: Iosim) -> None:
    args = ("run", "-n", "1024", "-d", "64", "-b", "16", "-H", "8", "--pass", "training", "--no-check")
    text = " ".join(iosim(*args).out.split())
    assert "Training with standard holds most while dS runs: 1.24 GB (1,184 MiB), which is Q, K, V, O, dO" in text
    assert "219 MB (209 MiB)" in text
    found = json.loads(iosim(*args, "--json").out)
    assert found["pass"] == "training"  # noqa: S105 - no password
    for run in found["runs"]:
        memory = run["memory"]
        assert sum(t["bytes"] for t in memory["alive_at_peak"]) == memory["peak_bytes"]
        assert memory["allocated_bytes"] == sum(t["bytes"] for t in memory["alive_at_peak"] if t["role"] != "in")
        assert {t["tensor"] for t in memory["alive_at_peak"] if "why" in t} >= {"Q.grad", "K.grad", "V.grad"}
        assert [part["pass"] for part in run["parts"]] == ["forward", "backward"]


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--pass", "trainign"), "--pass: 'trainign' is not one of forward, backward, training (did you mean 't"),
        (("--pass", "training", "--dataflow", "flash-backward"), "computes backward; pass training takes forward"),
        (("--pass", "forward", "--dataflow", "softmax-safe"), "softmax-safe computes softmax; pass forward takes"),
        (("--pass", "backward", "--dataflow", "flash2", "--dataflow", "flash1"),
         "flash-backward is given twice, as the backward pass of two of flash2, flash1"),
        (("--pass", "training", "--splits", "2"), "--splits: changes nothing in standard, flash2"),
    ],
)  # fmt: skip
def test_picks_that_make_no_pass_are_refused(iosim: Iosim, args: tuple[str, ...], words: str) -> None:
    answer = iosim("run", "-n", "64", "-d", "64", "--no-check", *args)
    assert answer.code == 2
    assert words in answer.err


@pytest.mark.parametrize("name", ["flash1", "flash3", "split-kv"])
def test_every_forward_dataflow_trains(iosim: Iosim, name: str) -> None:
    answer = iosim("run", "-n", "100", "-d", "32", "--hw", "h100-sxm", "--pass", "training", "--dataflow", name)
    assert answer.code == 0
    assert "flash-backward" in answer.out


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("", "mine names no dataflow of its gradients (BACKWARD in its file)"),
        ('BACKWARD = "flash3"', "BACKWARD of mine is flash3, which computes forward"),
        ('BACKWARD = "flash-bakward"', "(did you mean 'flash-backward'?)"),
        ("BACKWARD = 3", "is 3, which is no dataflow's name"),
        ('BACKWARD = "standard-backward"', "the backward pass takes P, which the forward pass does not make"),
    ],
)
def test_a_dataflow_of_ones_own_names_its_gradients(tmp_path: Path, iosim: Iosim, line: str, words: str) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(
        f'"""Mine."""\nfrom iosim.dataflows.flash2 import flash2 as mine\nUSES = ("block_q", "block_k")\n{line}\n'
    )
    args = ("run", "-n", "64", "-d", "64", "--no-check", "--pass", "training", "--dataflow", str(mine))
    answer = iosim(*args)
    assert answer.code == 2
    assert words in answer.err
    mine.write_text(mine.read_text() + 'BACKWARD = "flash-backward"\n')
    assert iosim(*args).code == 0
