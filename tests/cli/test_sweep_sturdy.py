"""Sweeps that are killed, interrupted, run side by side, or spread over a cluster: nothing lost, nothing twice."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import pytest

import iosim

pytestmark = [pytest.mark.long, pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")]

SLOW = '''"""flash2, whose programs take a while to write."""

import time

from iosim.dataflows.flash2 import USES, flash2


def slow(attention, schedule):
    time.sleep(0.1)
    return flash2(attention, schedule)
'''
COUNT = 16
WAIT = 60.0  # seconds, of a loaded machine


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of a sweep of COUNT configurations, each of which takes a tenth of a second or more."""
    file = tmp_path_factory.mktemp("flow") / "slow.py"
    file.write_text(SLOW)
    return [sys.executable, "-m", "iosim", "sweep", "-n", "64", "--dataflow", str(file), "--vary",
            f"d=8..{8 * COUNT}:+8", "--block-q", "64", "--block-k", "32", "--stages", "1",
            "--workers", "2"]  # fmt: skip


@pytest.fixture(scope="module")
def alone(sweep: list[str], tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """The results of one sweep that nothing disturbs."""
    store = tmp_path_factory.mktemp("alone") / "a.db"
    with running([*sweep, "--store", str(store)]) as process:
        process.communicate(timeout=WAIT)
    return rows(store)


@contextmanager
def running(command: list[str], cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """A process with a group of its own, of which nothing is left afterwards."""
    env = os.environ | {"PYTHONPATH": str(Path(iosim.__file__).parents[1])}
    with subprocess.Popen(command, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
                          env=env, cwd=cwd) as process:  # fmt: skip
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


def until(what: Callable[[], object]) -> None:
    end = time.monotonic() + WAIT
    while not what():
        assert time.monotonic() < end, "nothing happened"
        time.sleep(0.02)


def rows(store: Path) -> dict[str, str]:
    """The results of a store, which is whole."""
    if not store.exists():
        return {}
    with closing(sqlite3.connect(store, timeout=WAIT)) as file:
        assert file.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        if not file.execute("SELECT count(*) FROM sqlite_master WHERE name = 'configuration'").fetchone()[0]:
            return {}
        found = file.execute("SELECT key, result FROM configuration").fetchall()
    assert all(result for _, result in found)
    return dict(found)


def children(pid: int) -> list[int]:
    """Python's processes below one, but not the one that tracks its resources."""
    found = [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return [child for child in found if "spawn_main" in Path(f"/proc/{child}/cmdline").read_text()]


def alive(pid: int) -> bool:
    """Whether it runs; one that has ended and is not yet waited for does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_kill_9_in_the_middle_and_again(sweep: list[str], tmp_path: Path) -> None:
    store = tmp_path / "a.db"
    command = [*sweep, "--store", str(store)]
    with running(command) as process:
        until(lambda: len(rows(store)) >= 3)
        workers = children(process.pid)
        assert len(workers) == 2
        process.kill()
        process.wait()
        until(lambda: not any(map(alive, workers)))
    kept = rows(store)
    assert 3 <= len(kept) < COUNT
    with running(command) as process:
        until(lambda: len(rows(store)) > len(kept))
        os.kill(children(process.pid)[0], signal.SIGKILL)  # a worker, this time: it is replaced
        out, _ = process.communicate(timeout=WAIT)
    assert process.returncode == 0
    assert f"{COUNT - len(kept)} run now" in out
    assert f"{len(kept)} found" in out
    done = rows(store)
    assert len(done) == COUNT
    assert kept.items() <= done.items()


def test_ctrl_c_ends_clean_and_keeps_what_is_done(sweep: list[str], tmp_path: Path) -> None:
    store = tmp_path / "a.db"
    with running([*sweep, "--store", str(store)]) as process:
        until(lambda: len(rows(store)) >= 2)
        workers = children(process.pid)
        os.killpg(process.pid, signal.SIGINT)  # as a terminal does
        out, err = process.communicate(timeout=WAIT)
        until(lambda: not any(map(alive, workers)))
    assert process.returncode == 130
    assert out == ""
    assert err.splitlines() == [
        "",  # after the terminal's ^C
        f"iosim: what is done is kept in {store}; the same command runs the rest",
        "iosim: interrupted",
    ]
    assert 2 <= len(rows(store)) < COUNT


def test_two_sweeps_on_one_store_at_once(sweep: list[str], alone: dict[str, str], tmp_path: Path) -> None:
    store = tmp_path / "a.db"
    command = [*sweep, "--store", str(store)]
    with running(command) as first, running(command) as second:
        said = [process.communicate(timeout=WAIT) for process in (first, second)]
    assert (first.returncode, second.returncode) == (0, 0), said
    assert len(alone) == COUNT
    assert rows(store) == alone  # to the byte


@contextmanager
def cluster(folder: Path) -> Iterator[tuple[str, list[subprocess.Popen[str]]]]:
    """A Dask scheduler on loopback and worker processes: its address, and the workers."""
    import json

    file = folder / "scheduler.json"
    plain = ("--no-dashboard", "--scheduler-file", str(file))
    scheduler = [sys.executable, "-m", "distributed.cli.dask_scheduler", *plain, "--host", "127.0.0.1", "--port", "0"]
    worker = [sys.executable, "-m", "distributed.cli.dask_worker", *plain, "--no-nanny", "--nthreads", "1"]
    with running(scheduler, cwd=folder):
        until(file.exists)
        with running(worker, cwd=folder) as a, running(worker, cwd=folder) as b, running(worker, cwd=folder) as c:
            yield json.loads(file.read_text())["address"], [a, b, c]


def test_a_cluster_one_of_whose_workers_is_killed_gives_the_same_bytes(
    sweep: list[str], alone: dict[str, str], tmp_path: Path
) -> None:
    pytest.importorskip("distributed")
    store = tmp_path / "cluster.db"
    with cluster(tmp_path) as (address, workers):
        with running([*sweep, "--store", str(store), "--scheduler", address]) as process:
            until(lambda: len(rows(store)) >= 4)
            workers[0].kill()
            out, err = process.communicate(timeout=WAIT)
        assert process.returncode == 0, err
        assert f"{COUNT} run now" in out
        assert workers[0].wait() == -signal.SIGKILL
    assert len(alone) == COUNT
    assert rows(store) == alone
