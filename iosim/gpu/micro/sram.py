"""SRAM of a processor: bytes a clock of 16-byte loads by all threads, and latency of a load."""

from __future__ import annotations

from collections.abc import Iterator

from iosim.gpu.device import Gpu
from iosim.study.readings import Reading, reading

THREADS, ROUNDS, TRIPS, HOPS = 512, 16, 400, 4096
SOURCE = """
extern "C" __global__ void stream(u32* sink, u64* cycles, int trips) {
  extern __shared__ u32 tile[];
  for (int i = threadIdx.x; i < 8192; i += blockDim.x) tile[i] = i * 2654435761u;
  __syncthreads();
  u32 address = shared_address(tile) + threadIdx.x * 16, s0 = 0, s1 = 0, s2 = 0, s3 = 0;
  u64 start = clocks();
  for (int i = 0; i < trips; i++) {
#pragma unroll
    for (int r = 0; r < 16; r++) {
      u32 a, b, c, d;
      asm volatile("ld.volatile.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                   : "=r"(a), "=r"(b), "=r"(c), "=r"(d) : "r"(address + (r % 4) * 8192));
      s0 ^= a; s1 ^= b; s2 ^= c; s3 ^= d;
    }
  }
  __syncthreads();
  u64 stop = clocks();
  u32 sum = s0 ^ s1 ^ s2 ^ s3;
  if (sum == 12345u) sink[0] = sum;
  if (threadIdx.x == 0) cycles[blockIdx.x] = stop - start;
}
extern "C" __global__ void chase(u32* sink, u64* cycles, int hops) {
  extern __shared__ u32 tile[];
  u32 base = shared_address(tile);
  for (int i = threadIdx.x; i < 8192; i += blockDim.x) tile[i] = base + (i * 4 + 4 * 1031) % 32768;
  __syncthreads();
  u32 at = base;
  u64 start = clocks();
#pragma unroll 16
  for (int i = 0; i < hops; i++) asm volatile("ld.shared.u32 %0, [%0];" : "+r"(at));
  u64 stop = clocks();
  if (at == 1u) sink[0] = at;
  if (threadIdx.x == 0) cycles[blockIdx.x] = stop - start;
}
"""


def measure(gpu: Gpu) -> Iterator[Reading]:
    """Bandwidth and latency."""
    cycles = gpu.counters(gpu.processors)
    sink = gpu.torch.empty(1, dtype=gpu.torch.int32, device="cuda")
    stream, chase = gpu.kernel(SOURCE, "stream"), gpu.kernel(SOURCE, "chase")
    counted = gpu.medians(lambda: stream(gpu.processors, THREADS, sink, cycles, TRIPS, shared=32768), cycles)
    moved = THREADS * 16 * ROUNDS * TRIPS
    yield reading("sram.bandwidth_bytes_per_clock", [moved / c for c in counted], "ld.shared.v4 from 16 warps, clock64")
    counted = gpu.medians(lambda: chase(gpu.processors, 32, sink, cycles, HOPS, shared=32768), cycles)
    yield reading("sram.latency_cycles", [c / HOPS for c in counted], "a chain of ld.shared, clock64")
