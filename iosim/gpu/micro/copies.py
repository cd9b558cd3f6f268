"""Asynchronous copies into SRAM: bytes a clock into one processor, latency beyond the L2's, reads of the whole chip."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

from iosim.gpu.device import Gpu, Kernel
from iosim.gpu.micro import chase
from iosim.study.readings import Reading, reading

TILE, TILES, WINDOW = 16 << 10, 2048, 1 << 20
THREADS_FROM, BULK_FROM = (8, 0), (9, 0)  # compute capabilities that have cp.async, cp.async.bulk
SOURCE = """
extern "C" __global__ void by_threads(const char* source, u64* cycles, int tiles, int window) {
  extern __shared__ __align__(128) char slots[];
  u32 base = shared_address(slots) + threadIdx.x * 16;
  int tile = 0;
  __syncthreads();
  u64 start = clocks();
  for (int i = 0; i < tiles; i++) {
    asm volatile("cp.async.wait_group %0;" :: "n"(DEPTH - 1) : "memory");
    __syncthreads();
    const char* from = source + (u64)tile * 16384 + threadIdx.x * 16;
    if (++tile == window) tile = 0;
    u32 to = base + (i % DEPTH) * 16384;
#pragma unroll
    for (int j = 0; j < 8; j++)
      asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" :: "r"(to + j * 2048), "l"(from + j * 2048) : "memory");
    asm volatile("cp.async.commit_group;" ::: "memory");
  }
  asm volatile("cp.async.wait_group 0;" ::: "memory");
  __syncthreads();
  u64 stop = clocks();
  if (threadIdx.x == 0) cycles[blockIdx.x] = stop - start;
}
"""
BULK = """
__device__ __forceinline__ void arrived(u32 barrier, u32 parity) {
  asm volatile("{ .reg .pred p; WAIT: mbarrier.try_wait.parity.shared::cta.b64 p, [%0], %1; @!p bra WAIT; }"
               :: "r"(barrier), "r"(parity) : "memory");
}
extern "C" __global__ void by_engine(const char* source, u64* cycles, int tiles, int window) {
  extern __shared__ __align__(128) char slots[];
  __shared__ u64 barriers[DEPTH];
  if (threadIdx.x == 0) {  // one thread asks and waits: nothing else is in the way
    for (int s = 0; s < DEPTH; s++)
      asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(shared_address(barriers + s)) : "memory");
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    int tile = blockIdx.x;
    u64 start = clocks();
    for (int i = 0; i < tiles + DEPTH; i++) {
      u32 slot = i % DEPTH, barrier = shared_address(barriers + slot);
      if (i >= DEPTH) arrived(barrier, (i / DEPTH - 1) & 1);
      if (i >= tiles) continue;
      asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], 16384;" :: "r"(barrier) : "memory");
      asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], 16384, [%2];"
                   :: "r"(shared_address(slots) + slot * 16384), "l"(source + (u64)tile * 16384), "r"(barrier)
                   : "memory");
      if ((tile += gridDim.x) >= window) tile -= window;
    }
    cycles[blockIdx.x] = clocks() - start;
  }
}
"""


def measure(gpu: Gpu) -> Iterator[Reading]:
    """Tiles of 16 KiB from the L2 into one processor; one at a time is the round trip, several show the port."""
    l2 = median(cycles for cycles, _ in chase.hops(gpu, WINDOW, WINDOW // chase.STEP))
    kinds = (
        ("cp.async", "128 threads ask and wait", THREADS_FROM, SOURCE, "by_threads"),
        ("cp.async.bulk", "one thread asks and waits, and hands over to no other", BULK_FROM, BULK, "by_engine"),
    )
    for instruction, who, since, source, function in kinds:
        if gpu.capability < since:
            continue
        rates = {depth: _bytes_per_clock(gpu, source, function, depth) for depth in (1, 4, 8)}
        depth = max((4, 8), key=lambda d: max(rates[d]))
        how = f"{instruction}: {who}; 16 KiB tiles from the L2 into one processor, {depth} in flight, clock64"
        yield reading(f"{instruction}.bandwidth_bytes_per_clock", rates[depth], how)
        port = TILE / max(rates[depth])
        beyond = [max(0.0, TILE / rate - port - l2) for rate in rates[1]]
        how = f"{instruction}: {who}; round trip of a 16 KiB tile less its {port:.0f} cycles and the L2's {l2:.0f}"
        yield reading(f"{instruction}.latency_cycles", beyond, how)


def _bytes_per_clock(gpu: Gpu, source: str, function: str, depth: int) -> list[float]:
    data, cycles = gpu.bytes(WINDOW), gpu.counters(1)
    kernel = gpu.kernel(f"#define DEPTH {depth}\n{source}", function)
    run = _launch(kernel, 1, data, cycles, TILES, WINDOW // TILE, depth)
    return [TILES * TILE / counted for counted in gpu.medians(run, cycles)]


def _launch(
    kernel: Kernel, grid: int, data: Any, cycles: Any, tiles: int, window: int, depth: int
) -> Callable[[], None]:
    return lambda: kernel(grid, 128, data, cycles, tiles, window, shared=depth * TILE)


def chip_read_gb_per_s(gpu: Gpu, data: Any) -> list[float]:
    """Every processor copies its share of `data` once, four tiles in flight."""
    tiles = data.numel() // TILE
    kernel = gpu.kernel(f"#define DEPTH 4\n{BULK}", "by_engine")
    each = tiles // gpu.processors
    run = _launch(kernel, gpu.processors, data, gpu.counters(gpu.processors), each, tiles, 4)
    return [each * gpu.processors * TILE / t / 1e6 for t in gpu.milliseconds(run)]
