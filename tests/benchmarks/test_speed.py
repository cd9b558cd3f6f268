"""Speed, as ratios measured side by side: absolute times differ from machine to machine."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

pytestmark = pytest.mark.benchmark

REFERENCE = """
import numpy as np
rng = np.random.default_rng(0)
n, d = 4096, 128
q, k, v = (rng.standard_normal((n, d)).astype(np.float16).astype(np.float64) for _ in "qkv")
s = q @ k.T / np.sqrt(d)
s -= s.max(1, keepdims=True)
p = np.exp(s)
o = p @ v / p.sum(1, keepdims=True)
print(o.sum())
"""


def process(*args: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, *args], check=True, capture_output=True)
    return time.perf_counter() - start


def ratio(ours: Callable[[], float], theirs: Callable[[], float], runs: int = 5) -> float:
    """Median of the ratios of paired runs, after one warm-up of each."""
    ours(), theirs()
    return statistics.median(ours() / theirs() for _ in range(runs))


def report(what: str, found: float, limit: float, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print(f"\n{what}: {found:.2f}x (limit {limit:g}x)")
    assert found <= limit


def test_main_job_against_the_bare_float64_reference(capsys: pytest.CaptureFixture[str]) -> None:
    found = ratio(lambda: process("-m", "iosim", "run", "--n", "4096", "--d", "128"), lambda: process("-c", REFERENCE))
    report("iosim run --n 4096 --d 128 / import numpy and the float64 reference", found, 5, capsys)


def test_help_against_importing_click(capsys: pytest.CaptureFixture[str]) -> None:
    found = ratio(lambda: process("-m", "iosim", "--help"), lambda: process("-c", "import click"), runs=15)
    report("iosim --help / python -c 'import click'", found, 3, capsys)
