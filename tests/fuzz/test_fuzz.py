"""Damaged files and command lines of every kind: taken or refused in one line, in time and in bounded memory.

A failure names its kind and number, of which the same input comes again: attempt(KINDS[kind], number, folder).
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections import Counter
from functools import partial
from pathlib import Path
from random import Random

import pytest

from tests.fuzz.bombs import BOMBS
from tests.fuzz.kinds import KINDS, LawError, attempt, lawful, limited

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="limits memory as Linux does")

# Tries of each kind: in a plain run, and beyond the gate.  Those that simulate cost the most.
SHORT = {"options": 40, "rerun": 6, "machine": 12, "validate": 12, "store": 15, "result": 25, "sweep": 60,
         "kernel": 100, "profile": 100, "measurements": 60}  # fmt: skip
OTHER = 150
LONG = {"options": 5000, "rerun": 1500, "machine": 3000, "validate": 1500, "store": 2500, "index": 2000, "mask": 2000,
        "lengths": 2000}  # fmt: skip
OTHER_LONG = 8500
FAR = 1_000_000  # numbers of the long run, which a plain run does not have
BOMB_SECONDS, BOMB_BYTES = 20.0, 2**29


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> None:
    """No command says after ten seconds that it is still there, however slow this machine is."""
    monkeypatch.setattr("iosim.cli.output.PATIENCE", 3600)


@pytest.mark.parametrize("name", KINDS)
def test_some_of_each_kind(name: str, tmp_path: Path) -> None:
    """New ones with each run, the same ones in CI."""
    first = 0 if "CI" in os.environ else time.time_ns() % FAR
    taken = Counter(attempt(KINDS[name], first + n, tmp_path) for n in range(SHORT.get(name, OTHER)))
    assert taken[False] > 0, "nothing was damaged enough to be refused"


@pytest.mark.parametrize("bomb", BOMBS)
def test_what_asks_for_too_much_is_refused_soon(bomb: str, tmp_path: Path) -> None:
    """In half a gigabyte and in seconds, of which a quiet machine takes two at most."""
    name, write = BOMBS[bomb]
    path = tmp_path / f"x{KINDS[name].suffix}"
    KINDS[name].seeds()
    write(path)
    with limited(BOMB_SECONDS, BOMB_BYTES):
        assert lawful(partial(KINDS[name].read, path, Random(1))) is (bomb in ("many differences", "many runs"))  # noqa: S311


def _forever(*_: object) -> None:
    while True:
        pass


def test_the_law_can_be_broken(tmp_path: Path) -> None:
    """A reader that raises anything else, hangs, or takes memory without end is found out."""
    from dataclasses import replace

    for read, said in (
        (lambda *_: {}["x"], "KeyError"),
        (lambda *_: bytearray(2**31), "MemoryError"),
        (_forever, "TimeoutError"),
    ):
        with pytest.raises(LawError, match=f"config 7: {said}"):
            attempt(replace(KINDS["config"], read=read), 7, tmp_path, 0.3)


@pytest.mark.long
def test_a_hundred_thousand_tries() -> None:
    """Every kind in a process of its own, so that nothing of one changes another; faults are told all together."""
    tries = {name: LONG.get(name, OTHER_LONG) for name in KINDS}
    assert sum(tries.values()) >= 100_000
    said, count_of = [], Counter[str]()
    for name, count in tries.items():
        start = time.monotonic()
        call = [sys.executable, "-m", "tests.fuzz.many", name, str(FAR), str(count)]
        done = subprocess.run(call, text=True, capture_output=True, check=False, cwd=Path(__file__).parents[2])
        assert done.returncode == 0, done.stderr[-2000:]
        said.append(f"{done.stdout.strip()} in {time.monotonic() - start:.0f} s")
        count_of[name] = int(said[-1].split()[1])
        print(said[-1], flush=True)
    faults = [line for line in said if " 0 faults" not in line]
    assert faults == []
    print(f"{count_of.total()} tries")
    assert count_of == tries
