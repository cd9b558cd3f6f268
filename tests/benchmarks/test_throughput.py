"""Configurations a second and core, beside two peers that cost the pair of products of attention; docs/throughput.md.

The peers run in the Python that the environment variable IOSIM_PEERS names (its default is this one), as they need an
older numpy: an environment with iosim's extra `bench`.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from iosim.problem import Attention
from iosim.study.tune import Tuned, tune

pytestmark = pytest.mark.benchmark

PEERS = os.environ.get("IOSIM_PEERS", sys.executable)
PEER = Path(__file__).with_name("peers.py")
N, D = 512, 64
PAIR = Attention(n_q=N, d=D)
EVERY = 10**6  # as many of the best: no bound rules a candidate out, each is costed to the end


def answered(problem: Attention, top: int) -> tuple[float, Tuned]:
    """Seconds of processor time that a search takes, and what it found."""
    start = time.process_time()
    found = tune(problem, top=top)
    return time.process_time() - start, found


@pytest.fixture(scope="module")
def swept() -> Iterator[tuple[float, int]]:
    """A sweep over all tiles, stages and warp groups that the machine's rules leave: seconds, configurations."""
    tune(PAIR, limits={"block_q": (64,), "block_k": (64,)})  # loads what is loaded once
    seconds, found = answered(PAIR, EVERY)
    assert found.timed == len(found.candidates) > 1000
    yield seconds, found.timed


def peer(kind: str, count: int, folder: Path) -> float:
    """Configurations a second of a peer, start-up left out; skips where it is not installed."""
    module = kind.partition("-")[0]
    there = subprocess.run([PEERS, "-c", f"import {module}"], capture_output=True, check=False)
    if there.returncode:
        pytest.skip(f"{module} is not installed in {PEERS}: install iosim[bench] elsewhere, name its Python IOSIM_PEERS")
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
    kind: str, count: int, least: float, what: str, swept: tuple[float, int], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    seconds, number = swept
    theirs, ours = peer(kind, count, tmp_path), number / seconds
    with capsys.disabled():
        print(f"\nconfigurations a second and core: iosim {ours:.3g}, {what} {theirs:.3g}: {ours / theirs:.3g}x "
              f"(at least {least:g}x)")  # fmt: skip
    assert ours >= least * theirs


def test_a_search_settles_more_candidates_than_it_times(
    swept: tuple[float, int], capsys: pytest.CaptureFixture[str]
) -> None:
    every = swept[0] / swept[1]
    seconds, found = answered(PAIR, 10)
    with capsys.disabled():
        print(f"\ntune: {found.considered:,} candidates in {seconds:.2f} s of processor time, {found.timed} timed; "
              f"costing one to the end takes {every * 1e3:.1f} ms")  # fmt: skip
    assert seconds < every * found.considered / 10
