"""One NVIDIA GPU: kernels in CUDA C, timed; through PyTorch (memory, events) and CUDA's bindings (NVRTC, driver, NVML).

Raises InputError, one line, where a package or a GPU is missing, and GpuError where the GPU or a library refuses.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from iosim.errors import InputError, IosimError
from iosim.study.readings import Properties

Load = Callable[[str], Any]

INSTALL = "pip install 'iosim[gpu]'"
FLUSH_BYTES = 256 << 20
PRELUDE = """
typedef unsigned int u32;
typedef unsigned long long u64;
__device__ __forceinline__ u64 clocks() {
  u64 t; asm volatile("mov.u64 %0, %%clock64;" : "=l"(t) :: "memory"); return t;
}
__device__ __forceinline__ u64 nanoseconds() {
  u64 t; asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(t) :: "memory"); return t;
}
__device__ __forceinline__ u32 shared_address(const void* p) {
  u32 a; asm("{ .reg .u64 t; cvta.to.shared.u64 t, %1; cvt.u32.u64 %0, t; }" : "=r"(a) : "l"(p)); return a;
}
"""


class GpuError(IosimError):
    """The GPU, its driver or a library refused something."""


def load_torch(load: Load = import_module) -> Any:
    """PyTorch with an NVIDIA GPU that it can use; `load` imports a module by name."""
    torch = _package("torch", "PyTorch", load)
    if torch.version.cuda is None:
        raise InputError("this PyTorch was built without CUDA; measuring needs one that has it, and an NVIDIA GPU")
    if not torch.cuda.is_available():
        raise InputError("PyTorch finds no NVIDIA GPU; measuring needs one, with its driver")
    return torch


def _package(module: str, called: str, load: Load) -> Any:
    try:
        return load(module)
    except ImportError:
        raise InputError(f"{called} is not installed: {INSTALL}") from None


class Kernel:
    """A compiled CUDA function; call it with a grid, threads a block and arguments (tensors, ints, floats)."""

    def __init__(self, driver: Any, function: Any, torch: Any) -> None:
        self._driver, self._function, self._torch = driver, function, torch

    def __call__(self, grid: int, threads: int, *arguments: Any, shared: int = 0) -> None:
        """Launch on the current stream; `shared` are bytes of dynamic SRAM a block."""
        if shared > 48 << 10:
            attribute = self._driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            _done(self._driver.cuFuncSetAttribute(self._function, attribute, shared))
        stream = self._torch.cuda.current_stream().cuda_stream
        pairs = [_argument(a) for a in arguments]
        packed = (tuple(p[0] for p in pairs), tuple(p[1] for p in pairs)) if pairs else 0
        _done(self._driver.cuLaunchKernel(self._function, grid, 1, 1, threads, 1, 1, shared, stream, packed, 0))


def _argument(value: Any) -> tuple[Any, Any]:
    if isinstance(value, float):
        return value, ctypes.c_float
    if isinstance(value, int):
        return value, ctypes.c_int
    return value.data_ptr(), ctypes.c_void_p


def _done(answer: tuple[Any, ...]) -> Any:
    """What a call of CUDA's bindings returned after its error code; raises GpuError for a code other than success."""
    code, *values = answer
    if code.value != 0:
        raise GpuError(f"CUDA: {code.name}")
    return values[0] if len(values) == 1 else tuple(values)


class Gpu:
    """The current GPU."""

    def __init__(self, load: Load = import_module) -> None:
        self.torch = load_torch(load)
        self.triton = _package("triton", "Triton", load)
        self._driver = _package("cuda.bindings.driver", "cuda-bindings", load)
        self._nvrtc = _package("cuda.bindings.nvrtc", "cuda-bindings", load)
        self.torch.cuda.init()
        self._flush = self.torch.empty(FLUSH_BYTES, dtype=self.torch.uint8, device="cuda")
        self._nvml = _nvml(load, self.torch)
        self.properties = self._properties()
        self.processors = self.properties.processors
        self.capability = self.properties.capability

    def kernel(self, source: str, name: str) -> Kernel:
        """Compile a function of CUDA C, after `PRELUDE`."""
        architecture = f"--gpu-architecture=sm_{self.capability[0]}{self.capability[1]}"
        cubin = compile_cuda(self._nvrtc, source, architecture)
        module = _done(self._driver.cuModuleLoadData(cubin))
        return Kernel(self._driver, _done(self._driver.cuModuleGetFunction(module, name.encode())), self.torch)

    def bytes(self, count: int) -> Any:
        """Device memory with random contents."""
        words = self.torch.randint(-(2**31), 2**31 - 1, (count // 4,), dtype=self.torch.int32, device="cuda")
        return words.view(self.torch.uint8)

    def counters(self, count: int) -> Any:
        """Zeroed 64-bit counters, for a kernel to write clocks into."""
        return self.torch.zeros(count, dtype=self.torch.int64, device="cuda")

    def flush(self) -> None:
        """Leave nothing in the L2 but a fill of 256 MiB."""
        self._flush.zero_()

    def milliseconds(self, run: Callable[[], object], repeats: int = 7) -> list[float]:
        """Times of `run` by CUDA events, after one that is not counted."""
        event = self.torch.cuda.Event
        pairs = [(event(enable_timing=True), event(enable_timing=True)) for _ in range(repeats)]
        run()
        for start, stop in pairs:
            start.record()
            run()
            stop.record()
        self.torch.cuda.synchronize()
        return [start.elapsed_time(stop) for start, stop in pairs]

    def medians(self, run: Callable[[], object], counters: Any, repeats: int = 5) -> list[float]:
        """Median over blocks of what a kernel writes into `counters`, for each of some runs after one not counted."""
        run()
        out = []
        for _ in range(repeats):
            run()
            out.append(float(counters.double().median()))
        return out

    def watts_and_mhz(self) -> tuple[float, float] | None:
        """Board power and the processors' clock as NVML shows them; None without NVML."""
        if self._nvml is None:
            return None
        nvml, handle = self._nvml
        return nvml.nvmlDeviceGetPowerUsage(handle) / 1e3, nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)

    def _properties(self) -> Properties:
        attribute = self._driver.CUdevice_attribute
        index = self.torch.cuda.current_device()

        def ask(name: str) -> int:
            key = getattr(attribute, f"CU_DEVICE_ATTRIBUTE_{name}")
            return int(_done(self._driver.cuDeviceGetAttribute(key, index)))

        limits = {} if self._nvml is None else _power_limits(*self._nvml)
        return Properties(
            name=self.torch.cuda.get_device_name(index),
            capability=(ask("COMPUTE_CAPABILITY_MAJOR"), ask("COMPUTE_CAPABILITY_MINOR")),
            processors=ask("MULTIPROCESSOR_COUNT"),
            warp_size=ask("WARP_SIZE"),
            max_threads=ask("MAX_THREADS_PER_MULTIPROCESSOR"),
            max_threads_per_block=ask("MAX_THREADS_PER_BLOCK"),
            max_blocks=ask("MAX_BLOCKS_PER_MULTIPROCESSOR"),
            registers=ask("MAX_REGISTERS_PER_MULTIPROCESSOR"),
            sram_bytes=ask("MAX_SHARED_MEMORY_PER_MULTIPROCESSOR"),
            sram_block_bytes=ask("MAX_SHARED_MEMORY_PER_BLOCK_OPTIN"),
            sram_reserved_bytes=ask("RESERVED_SHARED_MEMORY_PER_BLOCK"),
            l2_bytes=ask("L2_CACHE_SIZE"),
            memory_bytes=int(self.torch.cuda.get_device_properties(index).total_memory),
            memory_clock_mhz=ask("MEMORY_CLOCK_RATE") / 1e3,
            memory_bus_bits=ask("GLOBAL_MEMORY_BUS_WIDTH"),
            software=f"PyTorch {self.torch.__version__}, Triton {self.triton.__version__}",
            **limits,
        )


def compile_cuda(nvrtc: Any, source: str, architecture: str) -> bytes:
    """Machine code of CUDA C; raises GpuError with the compiler's first error."""
    program = _done(nvrtc.nvrtcCreateProgram((PRELUDE + source).encode(), b"iosim.cu", 0, [], []))
    options: Sequence[bytes] = [architecture.encode(), b"--std=c++17"]
    (code,) = nvrtc.nvrtcCompileProgram(program, len(options), list(options))
    if code.value != 0:
        log = b" " * _done(nvrtc.nvrtcGetProgramLogSize(program))
        _done(nvrtc.nvrtcGetProgramLog(program, log))
        errors = [line for line in log.decode(errors="replace").splitlines() if "error" in line]
        raise GpuError(f"NVRTC: {errors[0] if errors else code.name}")
    cubin: bytes = b" " * _done(nvrtc.nvrtcGetCUBINSize(program))
    _done(nvrtc.nvrtcGetCUBIN(program, cubin))
    return cubin


def _nvml(load: Load, torch: Any) -> tuple[Any, Any] | None:
    """NVML and its handle of the current GPU, found by its UUID; None where there is no NVML."""
    try:
        nvml = load("pynvml")
        nvml.nvmlInit()
        uuid = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid)
        return nvml, nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())
    except ImportError:
        return None
    except nvml.NVMLError:
        return None


def _power_limits(nvml: Any, handle: Any) -> dict[str, float]:
    return {
        "power_limit_w": nvml.nvmlDeviceGetEnforcedPowerLimit(handle) / 1e3,
        "default_power_limit_w": nvml.nvmlDeviceGetPowerManagementDefaultLimit(handle) / 1e3,
    }
