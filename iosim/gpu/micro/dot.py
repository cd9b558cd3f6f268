"""Matrix products as Triton compiles them for this GPU, operands in SRAM: rate, clock and power under load."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from time import sleep
from typing import Any

import triton
import triton.language as tl

from iosim.gpu.device import Gpu
from iosim.study.readings import Reading, reading


@triton.jit
def _clock():  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise("mov.u64 $0, %clock64;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit
def _nanoseconds():  # type: ignore[no-untyped-def]
    return tl.inline_asm_elementwise("mov.u64 $0, %globaltimer;", "=l", [], dtype=tl.int64, is_pure=False, pack=1)


@triton.jit  # type: ignore[untyped-decorator]
def products(  # type: ignore[no-untyped-def]
    a, b, out, cycles, time, trips, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr
):
    m, n, k = tl.arange(0, M), tl.arange(0, N), tl.arange(0, K)
    left = tl.load(a + m[:, None] * K + k[None, :])
    right = tl.load(b + n[None, :] * K + k[:, None])
    sums = tl.zeros((M, N), dtype=tl.float32)
    start, began = _clock(), _nanoseconds()
    for _ in range(trips):
        sums = tl.dot(left, right, sums)
    total = tl.sum(tl.sum(sums, 1), 0)
    stop, ended = _clock(), _nanoseconds()
    tl.store(out + tl.program_id(0), total)
    tl.store(cycles + tl.program_id(0), stop - start)
    tl.store(time + tl.program_id(0), ended - began)


# dtype: PyTorch's name, M, N and K of the product that a block of 8 warps repeats, since which compute capability
SHAPES = {
    "fp16": ("float16", 128, 256, 64, (7, 0)),
    "bf16": ("bfloat16", 128, 256, 64, (8, 0)),
    "tf32": ("float32", 128, 256, 32, (8, 0)),
    "fp8_e4m3": ("float8_e4m3fn", 128, 256, 128, (8, 9)),
}
TRIPS, LONG_TRIPS, LAUNCHES, MATMUL = 2000, 30_000, 120, 8192
REST_S, POLL_S = 1.0, 0.02


def measure(gpu: Gpu) -> Iterator[Reading]:
    """FLOP a clock of every dtype; then PyTorch's matmul, and more than a second of fp16 under the power limit."""
    for dtype, (name, m, n, k, since) in SHAPES.items():
        if gpu.capability < since:
            continue
        loop = Loop(gpu, name, (m, n, k))
        counted = gpu.medians(partial(loop.run, TRIPS), loop.cycles)
        rates = [2 * m * n * k * TRIPS / c for c in counted]
        how = f"Triton's dot of {m} x {n} x {k} again and again, operands in SRAM, 8 warps a processor, clock64"
        yield reading(f"matrix.flop_per_clock.{dtype}", rates, how)
    yield _matmul(gpu)
    yield from _sustained(gpu)


class Loop:
    """A block a processor that repeats one product of random operands."""

    def __init__(self, gpu: Gpu, name: str, shape: tuple[int, int, int]) -> None:
        m, n, k = shape
        self.shape, self.grid = shape, gpu.processors

        def operand(rows: int) -> Any:
            return gpu.torch.randn(rows * k, device="cuda").to(getattr(gpu.torch, name))

        self.a, self.b = operand(m), operand(n)
        self.out = gpu.torch.empty(self.grid, device="cuda")
        self.cycles, self.time = gpu.counters(self.grid), gpu.counters(self.grid)

    def run(self, trips: int) -> None:
        """Launch."""
        m, n, k = self.shape
        products[(self.grid,)](self.a, self.b, self.out, self.cycles, self.time, trips, m, n, k, num_warps=8)

    @property
    def mhz(self) -> float:
        """The clock of the last launch."""
        return float((self.cycles.double() / self.time.double()).median()) * 1e3


def _matmul(gpu: Gpu) -> Reading:
    a, b = (gpu.torch.randn(MATMUL, MATMUL, device="cuda").half() for _ in range(2))
    times = gpu.milliseconds(lambda: gpu.torch.matmul(a, b), repeats=30)[10:]
    return reading("matmul.tflops", [2 * MATMUL**3 / t / 1e9 for t in times], f"PyTorch's matmul, fp16, {MATMUL}^3")


def _sustained(gpu: Gpu) -> Iterator[Reading]:
    """The clock that a full load settles at, and the power it takes (NVML's, last third)."""
    name, *shape, _ = SHAPES["fp16"]
    loop = Loop(gpu, str(name), (int(shape[0]), int(shape[1]), int(shape[2])))
    gpu.torch.cuda.synchronize()
    sleep(REST_S)
    done = gpu.torch.cuda.Event()
    for _ in range(LAUNCHES):
        loop.run(LONG_TRIPS)
    done.record()
    watts = []
    while not done.query():
        if (seen := gpu.watts_and_mhz()) is not None:
            watts.append(seen[0])
        sleep(POLL_S)
    mhz = loop.mhz
    how = f"clock64 / globaltimer in the last of {LAUNCHES} launches of fp16 products"
    yield reading("processor.sustained_clock_mhz", [mhz], how)
    if late := watts[len(watts) * 2 // 3 :]:
        how = "NVML's board power under fp16 products from SRAM on every processor"
        yield reading("power.load_w", late, how)
        yield reading("power.load_w_per_ghz3", [w / (mhz / 1e3) ** 3 for w in late], f"{how}, over the clock's cube")
