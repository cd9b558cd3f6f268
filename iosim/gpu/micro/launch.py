"""Kernel launches back to back in a stream, and the time between two blocks in one place of a processor."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from time import perf_counter

from iosim.gpu.device import Gpu, GpuError
from iosim.study.readings import Reading, reading

LAUNCHES, AHEAD_NS, BLOCKS = 400, 40_000_000, 64
SOURCE = """
extern "C" __global__ void nothing() {}
extern "C" __global__ void wait(u64* out, int ns) {
  u64 start = nanoseconds();
  while (nanoseconds() - start < ns) {}
  out[0] = start;
}
extern "C" __global__ void blocks(u64* processor, u64* began, u64* ended, int cycles) {
  u64 start = clocks();
  u32 id;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(id));
  while (clocks() - start < cycles) {}
  if (threadIdx.x == 0) { processor[blockIdx.x] = id; began[blockIdx.x] = start; ended[blockIdx.x] = clocks(); }
}
"""


def measure(gpu: Gpu) -> Iterator[Reading]:
    """Launches are queued behind a kernel that waits, so that the host's time doesn't show."""
    how = f"{LAUNCHES} empty kernels of a block a processor, queued in a stream behind one that waits"
    yield reading("launch.kernel_us", [_stream(gpu) for _ in range(6)][1:], how)
    gaps = _turnovers(gpu)
    value, high = median(gaps), gaps[int(0.9 * len(gaps))]
    how = "end of a block to start of the next, one resident a processor, clock64; median, up to the 90th percentile"
    yield Reading("launch.block_cycles", value, min(value, gaps[0]), high, how)


def _stream(gpu: Gpu) -> float:
    """Microseconds a launch."""
    nothing, wait, out = gpu.kernel(SOURCE, "nothing"), gpu.kernel(SOURCE, "wait"), gpu.counters(1)
    event = gpu.torch.cuda.Event
    start, stop = event(enable_timing=True), event(enable_timing=True)
    gpu.torch.cuda.synchronize()
    wait(1, 1, out, AHEAD_NS)
    before = perf_counter()
    start.record()
    for _ in range(LAUNCHES):
        nothing(gpu.processors, 128)
    stop.record()
    if (perf_counter() - before) * 1e9 > AHEAD_NS:
        raise GpuError("the host was too slow to queue kernels ahead")
    gpu.torch.cuda.synchronize()
    return float(start.elapsed_time(stop)) * 1e3 / LAUNCHES


def _turnovers(gpu: Gpu) -> list[float]:
    """Cycles between the blocks that follow each other on a processor, in order of size."""
    grid = BLOCKS * gpu.processors
    kernel = gpu.kernel(SOURCE, "blocks")
    columns = [gpu.counters(grid) for _ in range(3)]
    shared = gpu.properties.sram_block_bytes * 7 // 8
    for _ in range(2):
        kernel(grid, 128, *columns, 3000, shared=shared)
    by_processor: dict[int, list[tuple[int, int]]] = {}
    for processor, began, ended in zip(*(c.tolist() for c in columns), strict=True):
        by_processor.setdefault(processor, []).append((began, ended))
    found = []
    for spans in by_processor.values():
        spans.sort()
        found += [float(after[0] - before[1]) for before, after in pairwise(spans)]
    return sorted(found)
