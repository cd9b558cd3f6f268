"""The backward passes that people run, as kernels: what they occupy and move, and their measured times."""

from __future__ import annotations

from dataclasses import replace

import pytest

from iosim.check import check_all
from iosim.hardware import Hardware, load_hardware
from iosim.interpreters.ledger import ledger
from iosim.interpreters.model import Model
from iosim.interpreters.timeline import KernelTime, timeline
from iosim.kernels import load_kernel
from iosim.memory.cache import behind_caches
from iosim.memory.onchip import footprints
from iosim.problem import Attention
from iosim.program import Builder, Program, rows
from iosim.schedule import Schedule
from iosim.study.choose import choose
from iosim.study.validate import shipped_rows
from iosim.study.validate.rows import Row
from iosim.study.validate.times import predicted_dram, predicted_time

H200 = load_hardware("h200-sxm")
MACHINES = {name: load_hardware(name) for name in ("h200-sxm", "h100-sxm", "a100-sxm-80gb")}


def planned(name: str, a: Attention, *, strided: bool = False) -> tuple[Program, Schedule]:
    flow = load_kernel(name).dataflow(strided=strided)
    schedule, _ = choose(flow, a, H200, {})
    return flow(a, schedule), schedule


def timed(name: str, a: Attention, machine: Hardware = H200, *, strided: bool = False) -> dict[str, KernelTime]:
    program, schedule = planned(name, a, strided=strided)
    resident = {k: f.resident * 132 for k, f in footprints(program, schedule, machine).items()}
    traffic = behind_caches(program, ledger(program), machine, resident, descending=schedule.descending)
    return {k.name: k for k in timeline(program, schedule, machine, traffic).kernels}


@pytest.mark.parametrize("d", [64, 128])
def test_a_block_of_flash2_takes_what_was_counted(d: int) -> None:
    """148,480 B of SRAM are counted, of which the driver has 1024; two blocks do not fit, of other kernels several."""
    program, schedule = planned("flash2-backward", Attention(n_q=1024, d=d))
    prints = footprints(program, schedule, H200)
    assert prints["gradients"].sram_bytes == 148_480 - 1024
    assert (prints["gradients"].threads, prints["gradients"].resident) == (256, 1)
    assert prints["convert dQ"].resident == 5  # 48 registers of 256 threads: 65536 / 12288


@pytest.mark.parametrize(("d", "counted"), [(64, 702.2e6), (128, 656.2e6)])
def test_the_sram_traffic_of_flash2_is_what_was_counted(d: int, counted: float) -> None:
    """Nsight Compute's wavefronts of 128 B for 4 x 4096 rows of 32 or 16 heads, and two for 128 B of a reduction."""
    a = Attention(batch=4, heads=2048 // d, n_q=4096, d=d)
    done = timed("flash2-backward", a, replace(H200, power=None))["gradients"].units["sram"]
    machine = H200.at_clock(H200.matrix_hz or 0)
    added = 2 * a.batch * a.heads * a.n_q * (a.n_k // 128) * d * 4
    assert done.busy_ps / 1e12 * (machine.sram.bandwidth or 0) == pytest.approx(counted * 128 + added, rel=0.05)


def test_products_read_the_rows_of_a_and_the_columns_of_b_of_each_warp() -> None:
    """8 warps, 4 along the rows and 2 along the columns: A is read twice and B four times."""
    program, schedule = planned("flash2-backward", Attention(n_q=256, d=64))
    kernel = next(k for k in program.kernels if k.name == "gradients")
    flows = behind_caches(program, ledger(program), H200, {k.name: 132 for k in program.kernels}).flows
    own = tuple(f for f in flows if f.flow.kernel == "gradients")

    def sram_bytes(s: Schedule) -> int:
        model = Model(kernel, s, H200.with_units(s.units), own)
        phase = next(p for part in model.parts for p in part.phases if p.name == "qk")
        each = dict(model.cost(phase, phase.nodes).lengths)["sram"] * model.workers
        return round(each * (H200.sram.bandwidth or 0) / 1e12)

    q = k = 128 * 64 * 2
    assert sram_bytes(schedule) == pytest.approx(2 * q + 4 * k, rel=1e-3)
    assert sram_bytes(replace(schedule, along_rows={"qk": 8})) == pytest.approx(q + 8 * k, rel=1e-3)
    assert sram_bytes(replace(schedule, along_rows={})) == pytest.approx(q + 8 * k, rel=1e-3)


def test_one_set_of_operands_costs_a_latency_and_a_drain_for_each_step() -> None:
    """S is a product over d = 64 in steps of 16: 4 times the latency of SRAM and the drain of mma.sync."""
    program, schedule = planned("flash2-backward", Attention(n_q=256, d=64))
    kernel = next(k for k in program.kernels if k.name == "gradients")
    machine = H200.with_units(schedule.units)
    flows = behind_caches(program, ledger(program), H200, {k.name: 132 for k in program.kernels}).flows
    own = tuple(f for f in flows if f.flow.kernel == "gradients")
    lags = []
    for fragments in (1, 2):
        model = Model(kernel, replace(schedule, fragments=fragments), machine, own)
        phase = next(p for part in model.parts for p in part.phases if p.name == "qk")
        lags.append(model.cost(phase, phase.nodes).lag)
    assert lags[0] - lags[1] == 4 * ((machine.sram.latency_ps or 0) + machine.matrix.drain_ps)


def test_strided_inputs_are_copied_once_and_the_gradients_stay_the_same() -> None:
    a = Attention(heads=2, n_q=96, d=64)
    plain, _ = planned("flash2-backward", a)
    copied, _ = planned("flash2-backward", a, strided=True)
    size = 2 * 96 * 64 * 2
    assert [k.name for k in copied.kernels[:2]] == ["copy O", "copy dO"]
    assert ledger(copied).hbm_read_bytes - ledger(plain).hbm_read_bytes == 2 * size
    assert ledger(copied).hbm_write_bytes - ledger(plain).hbm_write_bytes == 2 * size
    assert {check.status for check in check_all(a, [plain, copied], seed=1)} == {"passed"}
    cudnn = [planned("cudnn-backward", a, strided=strided)[0] for strided in (False, True)]
    assert cudnn[0].kernels == cudnn[1].kernels  # it takes strided ones


def test_a_copy_is_bound_by_its_instructions() -> None:
    """90 issue slots of 128 a clock for each element, 132 processors at 1980 MHz; the rest is a latency."""
    a = Attention(batch=4, heads=32, n_q=4096, d=64)
    copy = timed("flash2-backward", a, strided=True)["copy O"]
    least = 4 * 32 * 4096 * 64 * 90 / (128 * 132 * 1.98e9)
    assert least <= (copy.makespan_ps - copy.launch_ps) / 1e12 <= 1.03 * least


def test_instructions_by_the_name_of_a_phase_are_for_each_element_of_its_last_tile() -> None:
    p = Builder("double")
    x, y = (p.tensor(name, (256, 64), "fp32", role) for name, role in (("X", "in"), ("Y", "out")))
    with p.kernel("double", i=4) as (i,):
        t = p.load("t", x[rows(i, 64)])
        with p.phase("work"):
            p.store(y[rows(i, 64)], p.scale("u", t, by=2))
    program = p.done()
    flows = behind_caches(program, ledger(program), H200, {"double": 132}).flows

    def slots(**instructions: float) -> int:
        model = Model(program.kernels[0], Schedule(block_q=64, block_k=64, instructions=instructions), H200, flows)
        phase = next(ph for part in model.parts for ph in part.phases if ph.name == "work")
        return dict(model.cost(phase, phase.nodes).lengths)["issue"]

    one = 64 * 64 * 1e12 / (H200.issue_rate or 1)
    assert slots() == pytest.approx(one, rel=1e-3)
    assert slots(work=7) == pytest.approx(8 * one, rel=1e-3)


def test_a_kernel_may_differ_from_the_rest_of_its_program() -> None:
    whole = Schedule(block_q=64, block_k=64, registers=255, kernels={"a": {"registers": 40, "groups": 2}})
    assert (whole.of("a").registers, whole.of("a").groups) == (40, 2)
    assert whole.of("b") is whole
    assert whole.of("a").of("a") == whole.of("a")


# ---------------------------------------------------------------- held against measurements


def backward(*implementations: str, kind: str = "") -> list[Row]:
    return [
        r for r in shipped_rows()
        if r.direction == "backward" and r.implementation in implementations and r.kind == (kind or r.kind)
        and r.machine in MACHINES and r.problem is not None and "time" in r.measured
    ]  # fmt: skip


def time_error(r: Row) -> float:
    return 100 * (predicted_time(r, MACHINES[r.machine]) / r.measured["time"] - 1)


@pytest.mark.parametrize("implementation", ["flash2", "cudnn"])
@pytest.mark.parametrize("d", [64, 128])
def test_a_call_of_4096_rows(implementation: str, d: int) -> None:
    (row,) = (
        r for r in backward(implementation, kind="calls")
        if r.problem is not None and (r.problem.n_q, r.problem.d, r.problem.causal) == (4096, d, False)
    )  # fmt: skip
    assert abs(time_error(row)) <= 4


def test_every_kernel_of_a_counted_call() -> None:
    """Copies, row sums, gradients and conversion: each is predicted, and moves about what was counted."""
    first = [r for r in backward("flash2", kind="kernels") if r.kernel is not None and r.kernel.role][:5]
    assert [r.kernel.role for r in first if r.kernel] == ["copy", "copy", "dot", "attention", "convert dQ"]
    for r in first:
        read, written = predicted_dram(r, H200)
        assert read == pytest.approx(r.measured["dram_read_bytes"], rel=0.05)
        assert written == pytest.approx(r.measured["dram_write_bytes"], rel=0.06)
        assert abs(time_error(r)) <= 25


@pytest.mark.slow
@pytest.mark.parametrize("implementation", ["flash2", "cudnn", "flash3"])
@pytest.mark.parametrize(
    "shape",
    [
        {"d": 96}, {"d": 256}, {"d": 128, "heads": 8, "kv_heads": 2}, {"d": 64, "n_q": 200, "n_k": 777, "causal": True},
        {"d": 128, "n_q": 1},
    ],
)  # fmt: skip
def test_shapes_that_nobody_measured_have_a_time(implementation: str, shape: dict[str, int]) -> None:
    a = Attention(**{"n_q": 1024, "heads": 8, **shape})
    row = Row(file="", line=1, kind="calls", device="", machine="h200-sxm", implementation=implementation,
              direction="backward", problem=a, measured={"time": 1.0})  # fmt: skip
    assert a.backward_flops / 989e12 < predicted_time(row, H200) < 2e-3


@pytest.mark.long
def test_errors_of_backward_times() -> None:
    own = [r for r in backward("flash2", "cudnn") if r.kind in ("calls", "kernels") and r.measured["time"] > 1e-4]
    errors = [abs(time_error(r)) for r in own]
    assert len(errors) == 40
    assert sum(errors) / 40 <= 4
    assert max(errors) <= 12
    for name, most in (("flash2", 6), ("flash3", 5), ("cudnn", 5)):
        papers = [abs(time_error(r)) for r in backward(name, kind="published")]
        assert sum(papers) / len(papers) <= most


@pytest.mark.long
def test_errors_of_dram_bytes() -> None:
    own = [r for r in shipped_rows() if r.kind == "kernels" and r.implementation in ("flash2", "cudnn")]
    own = [r for r in own if r.kernel is not None and r.kernel.role != "combine"]
    reads, writes = [], []
    for r in own:
        read, written = predicted_dram(r, H200)
        if (counted := r.measured["dram_read_bytes"]) > 0.1e6:
            reads.append(100 * abs(read / counted - 1))
        if (counted := r.measured["dram_write_bytes"]) > 20e6:
            writes.append(100 * abs(written / counted - 1))
    assert len(reads) > 60
    assert len(writes) > 50
    assert (sum(reads) / len(reads), max(reads)) <= (2, 16)
    assert sum(writes) / len(writes) <= 5
    assert max(writes) <= 25
