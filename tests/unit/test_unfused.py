"""Times of PyTorch's unfused attention on an H200, an H100 and an A100, held against measurements.

The row softmax was measured over row lengths that no attention call here has; two constants of it were fitted to that
file (docs/constants.md), so that calls are a test of them.
"""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from importlib.resources import files

import pytest

from iosim.dataflows import load_dataflow
from iosim.hardware import load_hardware
from iosim.interpreters.ledger import ledger
from iosim.interpreters.timeline import timeline
from iosim.kernels import load_kernel
from iosim.memory.cache import behind_caches
from iosim.memory.onchip import footprints
from iosim.problem import Attention
from iosim.program import Compute, walk
from iosim.study.choose import choose
from iosim.study.validate import shipped_rows
from iosim.study.validate.rows import Row
from iosim.study.validate.times import predicted_dram, predicted_time

H200 = load_hardware("h200-sxm")
EVENTS = 1.7e-6  # that CUDA events add to a kernel (iosim/data/conditions.toml)


@cache
def measured() -> tuple[Row, ...]:
    return tuple(r for r in shipped_rows() if r.implementation == "standard")


def error(row: Row) -> float:
    """In percent."""
    return 100 * (predicted_time(row, load_hardware(row.machine or "h200-sxm")) / row.measured["time"] - 1)


def long_calls(direction: str) -> list[Row]:
    return [r for r in measured() if r.kind == "calls" and r.direction == direction and r.measured["time"] > 80e-6]


def softmax_seconds(rows: int, n: int) -> float:
    """The softmax kernel that PyTorch runs on so many rows of n elements."""
    a = Attention(n_q=rows, n_k=n, d=64)
    s, _ = choose(load_kernel("standard").dataflow(), a, H200, {})
    program = load_dataflow("softmax-safe")(a, s)
    resident = {name: f.resident * 132 for name, f in footprints(program, s, H200).items()}
    return timeline(program, s, H200, behind_caches(program, ledger(program), H200, resident)).seconds


def softmax_errors(take: Callable[[int], bool]) -> dict[int, float]:
    """In percent, by row length."""
    with (files("iosim.data") / "h200_softmax.csv").open() as file:
        table = {int(r["n"]): r for r in csv.DictReader(file)}
    return {
        n: 100 * ((softmax_seconds(int(r["rows"]), n) + EVENTS) / (float(r["ms"]) * 1e-3) - 1)
        for n, r in table.items()
        if take(n)
    }


def within(errors: list[float], *, mean: float, worst: float) -> bool:
    sizes = [abs(e) for e in errors]
    return sum(sizes) / len(sizes) <= mean and max(sizes) <= worst


@pytest.mark.parametrize("n", [512, 2048, 8192, 16384])
def test_each_softmax_kernel_is_near_the_measurement(n: int) -> None:
    assert abs(softmax_errors(lambda m: m == n)[n]) <= 6


def test_a_shorter_row_can_take_longer() -> None:
    """One block a processor instead of two: 40 registers of 1024 threads, 30 before and 32 behind; 536 MB each."""
    times = {n: softmax_seconds(2**28 // n, n) for n in (6144, 9216, 10240)}
    assert times[9216] > 1.2 * times[6144] > 1.2 * times[10240]


@pytest.mark.long
def test_softmax_over_all_measured_row_lengths() -> None:
    errors = softmax_errors(lambda _: True)
    assert len(errors) == 24
    assert within(list(errors.values()), mean=5, worst=11), errors


@pytest.mark.long
@pytest.mark.parametrize("n", [1000, 3000, 7168, 12289, 20000, 30000])
def test_row_lengths_that_were_not_measured_lie_near_their_neighbours(n: int) -> None:
    """No length takes less than its bytes need, or three times what the slowest measured one takes for a byte."""
    rows = 2**27 // n
    per_byte = softmax_seconds(rows, n) / (4 * rows * n)
    assert 1 / (0.9675 * 4.8e12) < per_byte < 3 * 0.998e-3 / 1.0737e9


def gradient_errors(take: Callable[[int], bool]) -> dict[int, float]:
    """Of the softmax gradient's kernel, in percent, by row length."""
    out = {}
    with (files("iosim.data") / "h200_softmax_backward.csv").open() as file:
        table = [(int(r["n"]), int(r["rows"]), float(r["us"]) * 1e-6) for r in csv.DictReader(file)]
    for n, rows, seconds in table:
        if take(n):
            a = Attention(n_q=rows, n_k=n, d=64)
            s, _ = choose(load_kernel("standard-backward").dataflow(), a, H200, {})
            whole = load_dataflow("standard-backward")(a, s)
            (kernel,) = (k for k in whole.kernels if k.name == "dS")
            named = {node.view.tensor.name for node, _ in walk(kernel.body) if not isinstance(node, Compute)}
            program = replace(whole, kernels=(kernel,), tensors=tuple(t for t in whole.tensors if t.name in named))
            resident = {name: f.resident * 132 for name, f in footprints(program, s, H200).items()}
            traffic = behind_caches(program, ledger(program), H200, resident)
            found = timeline(program, s, H200, traffic)
            out[n] = 100 * ((found.makespan_ps - found.kernels[0].launch_ps) / 1e12 / seconds - 1)
    return out


@pytest.mark.parametrize("n", [1024, 1536])
def test_each_softmax_gradient_kernel_is_near_the_measurement(n: int) -> None:
    assert abs(gradient_errors(lambda m: m == n)[n]) <= 8


@pytest.mark.long
def test_softmax_gradient_over_all_measured_row_lengths() -> None:
    """Beyond 24,000 another kernel runs, which reads rows twice."""
    assert within(list(gradient_errors(lambda n: n < 24_000).values()), mean=5, worst=14)


def test_one_head_of_4096_forward() -> None:
    rows = [r for r in long_calls("forward") if r.problem and (r.problem.heads, r.problem.n_q) == (1, 4096)]
    assert len(rows) == 2
    assert abs(error(rows[0])) <= 5


def test_one_backward_call() -> None:
    assert abs(error(long_calls("backward")[1])) <= 4


@pytest.mark.long
def test_forward_calls() -> None:
    errors = [error(r) for r in long_calls("forward")]
    assert len(errors) == 20
    assert within(errors, mean=5, worst=10), errors


@pytest.mark.long
def test_backward_calls_and_their_kernels() -> None:
    assert within([error(r) for r in long_calls("backward")], mean=3, worst=5)
    kernels = [r for r in measured() if r.kind == "kernels" and r.direction == "backward"]
    assert len(kernels) == 7
    assert within([error(r) for r in kernels], mean=4, worst=10)


@pytest.mark.long
def test_forward_kernels_longer_than_10_us() -> None:
    """Without those softmaxes of d = 128 whose unscaled scores make divisions slow (iosim/data/README.md)."""
    rows = [r for r in measured() if r.kind == "kernels" and r.direction == "forward" and r.measured["time"] > 10e-6]
    own = [r for r in rows if r.kernel is None or r.kernel.role != "softmax" or (r.problem and r.problem.d == 64)]
    assert len(own) == 15
    assert within([error(r) for r in own], mean=7, worst=26)


@pytest.mark.long
@pytest.mark.parametrize(("machine", "direction", "mean", "worst"), [
    ("h100-sxm", "forward", 6, 10), ("h100-sxm", "backward", 10, 15),
    ("a100-sxm-80gb", "forward", 10, 16), ("a100-sxm-80gb", "backward", 8, 10),
])  # fmt: skip
def test_published_rows(machine: str, direction: str, mean: float, worst: float) -> None:
    rows = [r for r in measured() if (r.kind, r.machine, r.direction) == ("published", machine, direction)]
    errors = [error(r) for r in rows if "time" in r.measured]
    assert errors
    assert within(errors, mean=mean, worst=worst), errors


@pytest.mark.long
def test_dram_bytes_of_the_counted_kernels() -> None:
    """All but the copy of dK, which reads it from DRAM although it was written just before."""
    rows = [r for r in measured() if r.kind == "kernels" and r.kernel is not None and r.kernel.role != "copy"]
    pairs = [(r.measured, predicted_dram(r, H200)) for r in rows]
    reads = [100 * (p[0] / m["dram_read_bytes"] - 1) for m, p in pairs if m["dram_read_bytes"] > 1e5]
    writes = [100 * (p[1] / m["dram_write_bytes"] - 1) for m, p in pairs if m["dram_write_bytes"] > 2e7]
    assert len(reads) == 31
    assert len(writes) == 21
    assert within(reads, mean=4, worst=16), reads
    assert within(writes, mean=6, worst=25), writes
