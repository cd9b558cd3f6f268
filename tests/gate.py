"""The whole gate: style, types, tests, and the marked tests that fit in ten minutes in all."""

from __future__ import annotations

import subprocess
import sys
import time

STEPS = (
    ("ruff", "check", "."),
    ("ruff", "format", "--check", "."),
    ("mypy",),
    ("pytest", "-q", "-m", "not benchmark and not long"),
    ("pytest", "-q", "-n", "0", "-m", "benchmark and not long"),
)


def main() -> int:
    """Run every step; the first that fails ends the gate with its exit code."""
    for step in STEPS:
        print(f"== {' '.join(step)}", flush=True)
        start = time.monotonic()
        done = subprocess.run([sys.executable, "-m", *step], check=False)
        print(f"== {step[0]}: exit {done.returncode} after {time.monotonic() - start:.0f} s", flush=True)
        if done.returncode:
            return done.returncode
    return 0


if __name__ == "__main__":
    sys.exit(main())
