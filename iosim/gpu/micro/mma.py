"""The matrix instruction of one warp, mma.sync: rate, alone with loads, latency of a chain; the clock beside it."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

from iosim.gpu.device import Gpu
from iosim.study.readings import Reading, reading

SINCE = (8, 0)  # m16n8k16
FLOP = 2 * 16 * 8 * 16
TRIPS = 4000
SOURCE = """
__device__ __forceinline__ void mma(float* d, const u32* a, const u32* b) {
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.TYPE.TYPE.f32 "
               "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
               : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ __forceinline__ u32 operand(u32 i) {  // two 16-bit numbers from 0.5 to 1
  return ((i * 2654435761u + threadIdx.x * 40503u) & ONES) | HALVES;
}
__device__ __forceinline__ void finish(float sum, float* sink, u64* cycles, u64* time, u64 start, u64 began) {
  u64 stop = clocks(), ended = nanoseconds();
  if (sum == 0.12345f) sink[0] = sum;
  if (threadIdx.x == 0) { cycles[blockIdx.x] = stop - start; time[blockIdx.x] = ended - began; }
}
extern "C" __global__ void grid_of_products(float* sink, u64* cycles, u64* time, int trips) {
  u32 a[4][4], b[4][2];
  float d[4][4][4] = {};
  for (int i = 0; i < 16; i++) { a[i / 4][i % 4] = operand(i); b[i / 4][i % 2] = operand(99 + i); }
  __syncthreads();
  u64 start = clocks(), began = nanoseconds();
  for (int t = 0; t < trips; t++)
#pragma unroll
    for (int i = 0; i < 4; i++)
#pragma unroll
      for (int j = 0; j < 4; j++) mma(d[i][j], a[i], b[j]);
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < 64; i++) sum += d[i / 16][i / 4 % 4][i % 4];
  finish(sum, sink, cycles, time, start, began);
}
extern "C" __global__ void chain(float* sink, u64* cycles, u64* time, int trips) {
  u32 a[4], b[2];
  float d[4] = {};
  for (int i = 0; i < 4; i++) { a[i] = operand(i); b[i % 2] = operand(9 + i); }
  u64 start = clocks(), began = nanoseconds();
  for (int t = 0; t < trips; t++)
#pragma unroll
    for (int i = 0; i < 16; i++) mma(d, a, b);
  finish(d[0] + d[1] + d[2] + d[3], sink, cycles, time, start, began);
}
__device__ __forceinline__ void load(u32* b, u32 address) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(b[0]), "=r"(b[1]), "=r"(b[2]), "=r"(b[3]) : "r"(address));
}
extern "C" __global__ void with_loads(float* sink, u64* cycles, u64* time, int trips) {  // B from SRAM, 32 rows a warp
  extern __shared__ u32 tile[];
  for (int i = threadIdx.x; i < 4096; i += blockDim.x) tile[i] = operand(i);  // two halves, in turn
  u32 a[2][4], b[2][8];
  float d[2][4][4] = {};
  for (int i = 0; i < 8; i++) a[i / 4][i % 4] = operand(i);
  __syncthreads();
  u32 base = shared_address(tile) + (threadIdx.x % 32) * 16;
  load(b[0], base); load(b[0] + 4, base + 512);
  u64 start = clocks(), began = nanoseconds();
#pragma unroll 1
  for (int t = 0; t < trips; t++)
#pragma unroll
    for (int s = 0; s < 8; s++) {
      u32 next = base + (t + (s == 7)) % 2 * 8192 + (s + 1) % 8 * 1024;
      load(b[(s + 1) % 2], next); load(b[(s + 1) % 2] + 4, next + 512);
#pragma unroll
      for (int i = 0; i < 2; i++)
#pragma unroll
        for (int j = 0; j < 4; j++) mma(d[i][j], a[i], b[s % 2] + 2 * j);
    }
  __syncthreads();
  float sum = 0;
  for (int i = 0; i < 32; i++) sum += d[i / 16][i / 4 % 4][i % 4];
  finish(sum, sink, cycles, time, start, began);
}
"""
# dtype: PTX's name, the bits of a fraction, one half
TYPES = {"fp16": ("f16", "0x03ff03ffu", "0x38003800u"), "bf16": ("bf16", "0x007f007fu", "0x3f003f00u")}


def measure(gpu: Gpu) -> Iterator[Reading]:
    """FLOP a clock of 8 warps from registers; what one warp group reaches with its loads; the matrix clock."""
    if gpu.capability < SINCE:
        return
    cycles, time = gpu.counters(gpu.processors), gpu.counters(gpu.processors)
    sink = gpu.torch.empty(1, device="cuda")
    whole = 0.0
    for dtype in TYPES:
        kernel = gpu.kernel(_source(dtype), "grid_of_products")
        counted = gpu.medians(partial(kernel, gpu.processors, 256, sink, cycles, time, TRIPS), cycles)
        rates = [8 * 16 * TRIPS * FLOP / c for c in counted]
        how = "mma.sync m16n8k16 from registers, 8 warps a processor, 4 x 4 accumulators, clock64"
        yield reading(f"mma.sync.flop_per_clock.{dtype}", rates, how)
        whole = max(whole, *rates)
    loads, chain = gpu.kernel(_source("fp16"), "with_loads"), gpu.kernel(_source("fp16"), "chain")
    counted = gpu.medians(lambda: loads(gpu.processors, 128, sink, cycles, time, TRIPS, shared=16384), cycles)
    shares = [min(1.0, 4 * 64 * TRIPS * FLOP / c / whole) for c in counted]
    yield reading(
        "mma.sync.lone_share", shares, "4 warps of 32 rows, B by ldmatrix a step ahead, against 8 warps from registers"
    )
    counted = gpu.medians(lambda: chain(gpu.processors, 32, sink, cycles, time, TRIPS), cycles)
    yield reading("mma.sync.drain_cycles", [c / TRIPS / 16 for c in counted], "a chain of mma.sync, clock64")
    mhz = []
    for _ in range(6):  # one warp a processor: far from the power limit
        chain(gpu.processors, 32, sink, cycles, time, 10 * TRIPS)
        mhz.append(float((cycles.double() / time.double()).median()) * 1e3)
    how = "clock64 / globaltimer in kernels of one warp of mma.sync a processor"
    yield reading("processor.matrix_clock_mhz", mhz[1:], how)


def _source(dtype: str) -> str:
    name, ones, halves = TYPES[dtype]
    return SOURCE.replace("TYPE", name).replace("ONES", ones).replace("HALVES", halves)
