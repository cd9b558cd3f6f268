"""The L2: bytes a second of reads by window, of writes and of fp32 sums; latency."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from statistics import median

from iosim.gpu.device import Gpu
from iosim.gpu.micro import chase
from iosim.study.readings import Reading, reading

THREADS, BLOCKS, TRIPS, TILE, HOPS = 256, 8, 400, 16 << 10, 8192
SOURCE = """
__device__ __forceinline__ u64 next(u32 tiles, u32& state) {  // a random tile
  state = state * 1664525u + 1013904223u;
  return (state >> 8) % tiles;
}
extern "C" __global__ void reads(uint4* data, u32* sink, u32 tiles, int trips) {
  u32 state = blockIdx.x * 2654435761u, sum = 0;
  for (int t = 0; t < trips; t++) {
    const uint4* p = data + next(tiles, state) * 1024 + threadIdx.x;
    uint4 v[4];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = __ldcg(p + i * 256);
#pragma unroll
    for (int i = 0; i < 4; i++) sum ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  }
  if (sum == 12345u) sink[0] = sum;
}
extern "C" __global__ void writes(uint4* data, u32* sink, u32 tiles, int trips) {
  u32 state = blockIdx.x * 2654435761u;
  for (int t = 0; t < trips; t++) {
    uint4* p = data + next(tiles, state) * 1024 + threadIdx.x;
#pragma unroll
    for (int i = 0; i < 4; i++) p[i * 256] = make_uint4(state, t, i, threadIdx.x);
  }
}
extern "C" __global__ void sums(float* data, u32* sink, u32 tiles, int trips) {
  u32 state = blockIdx.x * 2654435761u;
  for (int t = 0; t < trips; t++) {
    float* p = data + next(tiles, state) * 4096 + threadIdx.x;
#pragma unroll
    for (int i = 0; i < 16; i++) asm volatile("red.global.add.f32 [%0], %1;" :: "l"(p + i * 256), "f"(1.0f) : "memory");
  }
}
"""


def measure(gpu: Gpu) -> Iterator[Reading]:
    """Every block goes through random tiles of 16 KiB of a window that fits; blocks seldom meet in one."""
    window = gpu.properties.l2_bytes // 4 // TILE * TILE
    data = gpu.bytes(3 * window)
    sink = gpu.torch.empty(1, dtype=gpu.torch.int32, device="cuda")
    grid = BLOCKS * gpu.processors

    def gb_per_s(function: str, size: int) -> list[float]:
        run = partial(gpu.kernel(SOURCE, function), grid, THREADS, data, sink, size // TILE, TRIPS)
        return [grid * TRIPS * TILE / t / 1e6 for t in gpu.milliseconds(run)]

    sizes = (window // 4, window, 2 * window, 3 * window)
    rates = [median(gb_per_s("reads", size)) for size in sizes]
    said = ", ".join(f"{size / 2**20:.0f} MiB {rate:.0f}" for size, rate in zip(sizes, rates, strict=True))
    how = f"ld.global.cg of random 16 KiB tiles, by window: {said} GB/s; taken: a quarter of the L2"
    yield Reading("l2.bandwidth_gb_per_s", rates[1], min(rates), max(rates), how)
    for name, function in (("write_bandwidth", "writes"), ("add_bandwidth", "sums")):
        how = f"{function} of random 16 KiB tiles in a window of {window / 2**20:.0f} MiB"
        yield reading(f"l2.{name}_gb_per_s", gb_per_s(function, window), how)
    cycles = [c for c, _ in chase.hops(gpu, HOPS * chase.STEP, HOPS)]
    how = f"a random chain of ld.global.cg, {HOPS * chase.STEP >> 20} MiB again and again, clock64"
    yield reading("l2.latency_cycles", cycles, how)
