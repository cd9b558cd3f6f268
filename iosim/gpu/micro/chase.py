"""A random chain of loads through a window of device memory: cycles and nanoseconds a load."""

from __future__ import annotations

from typing import Any

from iosim.gpu.device import Gpu

STEP = 256  # bytes from one link to the next: no two in one line
SOURCE = """
extern "C" __global__ void chain(u64* at, u64* out, int hops) {
  u64 p = (u64)at;
  u64 start = clocks(), began = nanoseconds();
#pragma unroll 8
  for (int i = 0; i < hops; i++) asm volatile("ld.global.cg.u64 %0, [%0];" : "+l"(p) :: "memory");
  u64 stop = clocks(), ended = nanoseconds();
  if (p == 1) out[0] = p;
  out[0] = stop - start; out[1] = ended - began;
}
"""


def hops(gpu: Gpu, window: int, count: int, *, flush: bool = False, repeats: int = 5) -> list[tuple[float, float]]:
    """(cycles, nanoseconds) of a load, by repeats after one not counted; each starts elsewhere in the window.

    With `flush` the L2 is emptied before each; without, a window that fits and is gone through whole stays there.
    """
    links = _cycle(gpu, window // STEP)
    out = gpu.counters(2)
    kernel = gpu.kernel(SOURCE, "chain")
    words, found = STEP // 8, []
    for repeat in range(repeats + 1):
        start = links.view(-1, words)[(repeat * 7919) % (window // STEP)]
        if flush:
            gpu.flush()
        kernel(1, 1, start, out, count)
        found.append(tuple(float(v) / count for v in out.tolist()))
    return [(cycles, ns) for cycles, ns in found[1:]]


def _cycle(gpu: Gpu, count: int) -> Any:
    """Links at every `STEP` bytes, each the address of another, in one random cycle."""
    torch = gpu.torch
    links = torch.zeros((count, STEP // 8), dtype=torch.int64, device="cuda")
    order = torch.randperm(count, device="cuda")
    links[order, 0] = links.data_ptr() + torch.roll(order, -1) * STEP
    return links
