"""Configurations a second and core, beside two peers that cost the pair of products of attention; docs/throughput.md.

The peers need an older numpy, so they run in the Python that the environment variable IOSIM_PEERS names (by default
this one): that of an environment with iosim's extra `bench`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path

import pytest

from iosim.problem import Attention
from iosim.study.tune import Tuned, tune

pytestmark = pytest.mark.benchmark

PEERS = os.path.abspath(os.environ.get("IOSIM_PEERS", sys.executable))  # they run in a folder of their own
PEER = Path(__file__).with_name("peers.py")
N, D = 512, 64
PAIR = Attention(n_q=N, d=D)
EVERY = 10**6  # as many of the best are asked for: no bound rules a candidate out, each is costed to the end
TILES = {"block_q": (64, 128)}


def timed(top: int, limits: Mapping[str, Sequence[int]]) -> tuple[float, Tuned]:
    """Seconds of processor time that a search in this process takes, and what it found."""
    start = time.process_time()
    found = tune(PAIR, top=top, limits=limits)
    return time.process_time() - start, found


@lru_cache(maxsize=1)
def swept() -> tuple[float, int]:
    """A sweep over the key tiles, stages and warp groups of two query tiles: seconds, configurations costed."""
    tune(PAIR, limits={"block_q": (32,), "block_k": (64,)})  # loads what is loaded once
    seconds, found = timed(EVERY, TILES)
    assert found.timed == len(found.candidates) > 300
    return seconds, found.timed


def peer(kind: str, count: int, folder: Path) -> float:
    """Configurations a second of a peer, start-up left out; skips where it is not installed."""
    module = kind.partition("-")[0]
    there = subprocess.run([PEERS, "-c", f"import {module}"], capture_output=True, check=False)
    if there.returncode:
        pytest.skip(f"{PEERS} has no {module}: IOSIM_PEERS names the Python of an environment with iosim[bench]")
    job = [PEERS, str(PEER), kind, str(N), str(D), str(count)]
    done = subprocess.run(job, cwd=folder, check=True, capture_output=True, text=True)
    found = json.loads(done.stdout.splitlines()[-1])
    assert all(cycles >= 2 * N * N * D / 2048 for cycles in found["cycles"])  # it did the work
    return float(found["configurations"] / found["seconds"])


@pytest.mark.parametrize(
    ("kind", "count", "least", "what"),
    [
        ("scalesim", 1, 100, "SCALE-Sim"),
        ("zigzag", 2, 100, "ZigZag, which searches the loop order of each product"),
        ("zigzag-order", 40, 1, "ZigZag with the loop order given"),
    ],
)
def test_configurations_a_second_beside_a_peer(
    kind: str,
    count: int,
    least: float,
    what: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    theirs = peer(kind, count, tmp_path)
    seconds, number = swept()
    ours = number / seconds
    with capsys.disabled():
        print(f"\n{what}: {theirs:.3g} configurations a second and core, iosim {ours:.3g}")
        print(f"that is {ours / theirs:.3g}x (limit at least {least:g}x)")
    assert ours >= least * theirs


def test_a_search_settles_more_candidates_than_it_times(capsys: pytest.CaptureFixture[str]) -> None:
    seconds, number = swept()
    every = seconds / number
    seconds, found = timed(10, {})
    times = every * found.considered / seconds
    with capsys.disabled():
        print(f"\ntune: {found.considered:,} candidates in {seconds:.1f} s of processor time, {found.timed} timed")
        print(f"costing one to the end takes {every * 1e3:.1f} ms, for all of them {times:.0f}x (limit at least 10x)")
    assert times >= 10
