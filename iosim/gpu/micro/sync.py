"""Synchronisation: barriers of a block, turns between two warp groups, a maximum over four lanes; in cycles."""

from __future__ import annotations

from collections.abc import Iterator

from iosim.gpu.device import Gpu
from iosim.study.readings import Reading, reading

TRIPS = 4096
SOURCE = """
extern "C" __global__ void barriers(u64* cycles, int trips) {
  __syncthreads();
  u64 start = clocks();
#pragma unroll 128
  for (int i = 0; i < trips; i++) __syncthreads();
  u64 stop = clocks();
  if (threadIdx.x == 0) cycles[blockIdx.x] = stop - start;
}
extern "C" __global__ void turns(u64* cycles, int trips) {
  bool first = threadIdx.x < 128;
  __syncthreads();
  u64 start = clocks();
  if (!first) asm volatile("bar.arrive 1, 256;" ::: "memory");
  for (int i = 0; i < trips; i++) {
    if (first) {
      asm volatile("bar.sync 1, 256;" ::: "memory");
      asm volatile("bar.arrive 2, 256;" ::: "memory");
    } else {
      asm volatile("bar.sync 2, 256;" ::: "memory");
      if (i + 1 < trips) asm volatile("bar.arrive 1, 256;" ::: "memory");
    }
  }
  u64 stop = clocks();
  __syncthreads();
  if (threadIdx.x == 128) cycles[blockIdx.x] = stop - start;
}
extern "C" __global__ void maxima(u64* cycles, int trips, float* sink) {
  float x = threadIdx.x;
  u64 start = clocks();
#pragma unroll 16
  for (int i = 0; i < trips; i++) {
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 1));
    x = fmaxf(x, __shfl_xor_sync(0xffffffffu, x, 2));
  }
  u64 stop = clocks();
  if (x < 0) sink[0] = x;
  if (threadIdx.x == 0) cycles[blockIdx.x] = stop - start;
}
"""


def measure(gpu: Gpu) -> Iterator[Reading]:
    """Cycles of each, by clock64."""
    cycles = gpu.counters(gpu.processors)
    barriers, turns, maxima = (gpu.kernel(SOURCE, name) for name in ("barriers", "turns", "maxima"))

    def barrier(threads: int) -> list[float]:
        counted = gpu.medians(lambda: barriers(gpu.processors, threads, cycles, TRIPS), cycles)
        return [c / TRIPS for c in counted]

    few, many = barrier(128), barrier(512)  # 4 and 16 warps
    slopes = [(m - f) / 12 for f, m in zip(few, many, strict=True)]
    how = "__syncthreads of 128 and of 512 threads, clock64"
    yield reading("processor.barrier_cycles_per_warp", slopes, how)
    yield reading("processor.barrier_cycles", [f - 4 * s for f, s in zip(few, slopes, strict=True)], how)
    counted = gpu.medians(lambda: turns(gpu.processors, 256, cycles, TRIPS), cycles)
    how = "half a round trip between two groups of 4 warps by bar.sync and bar.arrive, nothing else, clock64"
    yield reading("processor.turn_cycles", [c / TRIPS / 2 for c in counted], how)
    sink = gpu.torch.empty(1, device="cuda")
    counted = gpu.medians(lambda: maxima(gpu.processors, 32, cycles, TRIPS, sink), cycles)
    how = "maximum over 4 lanes, a chain of 2 shuffles and 2 maxima, clock64"
    yield reading("processor.reduce_cycles", [c / TRIPS for c in counted], how)
