"""Device memory: share of the peak that reads and copies reach, and latency."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from iosim.gpu.device import Gpu, GpuError
from iosim.gpu.micro import chase, copies
from iosim.study.readings import Reading, reading

THREADS, CHUNK = 256, 64 << 10
BYTES, WINDOW, HOPS = 4 << 30, 1 << 30, 4096  # BYTES at most: an eighth of the memory of small GPUs
SOURCE = """
extern "C" __global__ void chunks(const uint4* data, u32* sink) {
  const uint4* p = data + (u64)blockIdx.x * 4096 + threadIdx.x;
  uint4 v[16];
#pragma unroll
  for (int i = 0; i < 16; i++) v[i] = __ldcs(p + i * 256);
  u32 sum = 0;
#pragma unroll
  for (int i = 0; i < 16; i++) sum ^= v[i].x ^ v[i].y ^ v[i].z ^ v[i].w;
  if (sum == 12345u) sink[0] = sum;
}
"""


def measure(gpu: Gpu) -> Iterator[Reading]:
    """Streams over buffers far larger than the L2; a chain of loads over 1 GiB."""
    peak = gpu.properties.memory_gb_per_s
    if not peak:
        raise GpuError("the driver does not say the clock of device memory, so that its peak is not known")
    size = min(BYTES, gpu.properties.memory_bytes // 8 // CHUNK * CHUNK)
    data = gpu.bytes(size)
    sink = gpu.torch.empty(1, dtype=gpu.torch.int32, device="cuda")
    chunks = gpu.kernel(SOURCE, "chunks")
    times = gpu.milliseconds(lambda: chunks(size // CHUNK, THREADS, data, sink))
    shares = [size / t / 1e6 / peak for t in times]
    how = "64 KiB a block, 16-byte loads"
    if gpu.capability >= copies.BULK_FROM:
        bulk = copies.chip_read_gb_per_s(gpu, data)
        if max(bulk) > max(shares) * peak:
            shares, how = [b / peak for b in bulk], "cp.async.bulk, 4 x 16 KiB in flight a processor"
    of = f"of {peak:.0f} GB/s, {size / 2**30:.1f} GiB"
    yield reading("hbm.read_efficiency", [min(1.0, s) for s in shares], f"{how}, {of}")
    times = _copies(gpu, data)
    shares = [min(1.0, 2 * size / t / 1e6 / peak) for t in times]
    yield reading("hbm.mixed_efficiency", shares, f"PyTorch's copy_, bytes read and written {of}")
    nanoseconds = [ns for _, ns in chase.hops(gpu, WINDOW, HOPS, flush=True)]
    yield reading("hbm.latency_ns", nanoseconds, "a random chain of ld.global.cg over 1 GiB, L2 flushed, globaltimer")


def _copies(gpu: Gpu, data: Any) -> list[float]:
    """Milliseconds to copy `data`."""
    target = gpu.torch.empty_like(data)
    return gpu.milliseconds(lambda: target.copy_(data))
