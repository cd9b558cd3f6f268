"""All micro-benchmarks on the current GPU."""

from __future__ import annotations

from importlib import import_module

from iosim.gpu.device import Gpu
from iosim.gpu.micro import MODULES
from iosim.study.readings import Note, Properties, Reading, Readings


class GpuBench:
    """A `Bench` of the current GPU.  Raises InputError where there is none, or a package is missing."""

    def __init__(self) -> None:
        self._gpu = Gpu()

    def properties(self) -> Properties:
        """What the driver says."""
        return self._gpu.properties

    def readings(self, note: Note) -> Readings:
        """Run every module; one that fails, for whatever reason of its libraries, doesn't stop the others."""
        found: list[Reading] = []
        failed = []
        for number, name in enumerate(MODULES, start=1):
            note(f"{name} ({number} of {len(MODULES)})")
            try:
                found += import_module(f"iosim.gpu.micro.{name}").measure(self._gpu)
            except Exception as error:
                failed.append(f"{name}: {' '.join(str(error).split())[:200] or type(error).__name__}")
            self._gpu.torch.cuda.empty_cache()
        return Readings(tuple(found), tuple(failed))
