"""The memory of the host that a check runs on."""

from __future__ import annotations

from pathlib import Path


def available_memory() -> int:
    """Bytes that can be allocated without swapping, as far as the system tells."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return 2**63  # unknown: let the allocation itself decide
