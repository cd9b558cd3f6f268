"""Vector lanes: fused multiply-adds, maxima and exponentials of a processor a clock, and the clock while they run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from iosim.gpu.device import Gpu, Kernel
from iosim.study.readings import Reading, reading

THREADS, CHAINS, ROUNDS, TRIPS = 512, 8, 32, 400
SOURCE = """
extern "C" __global__ void lanes(float* sink, u64* cycles, u64* time, int trips, float a, float b) {
  float x[8];
  for (int c = 0; c < 8; c++) x[c] = threadIdx.x * 0.001f + c;
  __syncthreads();
  u64 start = clocks(), began = nanoseconds();
  for (int i = 0; i < trips; i++) {
#pragma unroll
    for (int r = 0; r < 32; r++) {
#pragma unroll
      for (int c = 0; c < 8; c++) asm volatile(OPERATION);
    }
  }
  __syncthreads();
  u64 stop = clocks(), ended = nanoseconds();
  float sum = 0;
  for (int c = 0; c < 8; c++) sum += x[c];
  if (sum == 0.12345f) sink[0] = sum;
  if (threadIdx.x == 0) { cycles[blockIdx.x] = stop - start; time[blockIdx.x] = ended - began; }
}
"""
# A maximum of a ring of values can't be simplified away; a chain waits for itself only once in 8 instructions.
OPERATIONS = (
    ("vector.lanes_per_clock", "fma.rn.f32", '"fma.rn.f32 %0, %0, %1, %2;" : "+f"(x[c]) : "f"(a), "f"(b)'),
    ("vector.alu_lanes_per_clock", "max.f32", '"max.f32 %0, %0, %1;" : "+f"(x[c]) : "f"(x[(c + 1) % 8])'),
    ("exp.ops_per_clock", "ex2.approx.ftz.f32", '"ex2.approx.ftz.f32 %0, %0;" : "+f"(x[c])'),
)


def measure(gpu: Gpu) -> Iterator[Reading]:
    """Lanes a clock of each instruction, and the clock of multiply-adds over some milliseconds."""
    cycles, time = gpu.counters(gpu.processors), gpu.counters(gpu.processors)
    sink = gpu.torch.empty(1, device="cuda")
    work = THREADS * CHAINS * ROUNDS * TRIPS
    for name, instruction, operation in OPERATIONS:
        kernel = gpu.kernel(SOURCE.replace("OPERATION", operation), "lanes")

        def run(kernel: Kernel = kernel) -> None:
            kernel(gpu.processors, THREADS, sink, cycles, time, TRIPS, 0.999, 0.001)

        rates = [work / c for c in gpu.medians(run, cycles)]
        yield reading(name, rates, f"{instruction}, 16 warps a processor, 8 chains each, clock64")
        if instruction == "fma.rn.f32":
            yield _clock(gpu, kernel, sink, cycles, time)


def _clock(gpu: Gpu, kernel: Kernel, sink: Any, cycles: Any, time: Any) -> Reading:
    values = []
    for _ in range(6):
        kernel(gpu.processors, THREADS, sink, cycles, time, 20 * TRIPS, 0.999, 0.001)
        values.append(float((cycles.double() / time.double()).median()) * 1e3)
    return reading("processor.boost_clock_mhz", values[1:], "clock64 / globaltimer in kernels of multiply-adds")
