"""Sweeps: keys, grids, the store, failures, and results that do not depend on where they are run."""

from __future__ import annotations

import csv
import io
import json
import os
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from iosim.errors import InputError, OutputError
from iosim.problem import Attention
from iosim.report import sweep as report
from iosim.study.run import run
from iosim.study.sweep import DIED, Answer, Configuration, Grid, Store, Stored, pool, sweep, work
from iosim.study.sweep.feed import Feed
from iosim.study.sweep.grid import axes_of, grid_of, read_grids, sources_of
from iosim.study.vary import Case, Source

RESULT = (
    '{"schedule":{},"computes":"forward","makespan_ps":1,"dram_read_bytes":2,"dram_write_bytes":3,"sram_used_bytes":4,'
    '"flops_convention":5}'
)
TILE = {"block_q": 64, "block_k": 64, "stages": (2,)}


def grid(*vary: str, dataflow: tuple[str, ...] = ("flash2",), hw: tuple[str, ...] = (), **given: Any) -> Grid:
    sources = sources_of(dataflow, [])
    fidelities = given.pop("fidelities", ("fair",))
    problem = given.pop("problem", Attention(n_q=128, d=64))
    return grid_of(problem, sources, hw, given=given, axes=axes_of(vary, sources), fidelities=fidelities)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    with closing(Store(str(tmp_path / "sweep.db"))) as made:
        yield made


# ---------------------------------------------------------------- grids and keys


def test_a_grid_is_every_combination_and_a_field_goes_to_the_dataflows_that_read_it() -> None:
    made = grid("n=64,128", "splits=2,4", "hw.sram.capacity_kib=128,192", dataflow=("flash2", "split-kv"))
    found = list(made.configurations())
    # two problems and two machines; flash2 reads no splits, so it is there once for each, split-kv twice
    assert len(found) == len(made) == 2 * 2 * (1 + 2)
    assert len({c.key for c in found}) == len(found)
    given = [(c.job.source.dataflow, c.job.given.get("splits")) for c in found if c.job is not None]
    assert {(flow, splits) for flow, splits in given} == {("flash2", None), ("split-kv", 2), ("split-kv", 4)}
    assert {c.job.problem.n_k for c in found if c.job} == {64, 128}
    assert {c.job.machine.sram.capacity_bytes for c in found if c.job} == {128 * 1024, 192 * 1024}


def test_the_key_follows_every_input_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def key(made: Grid) -> str:
        (one,) = made.configurations()
        return one.key

    file = tmp_path / "mine.py"
    flash2 = "from iosim.dataflows.flash2 import USES, flash2\n\n\ndef mine(a, s):\n    return flash2(a, s)\n"
    file.write_text('"""One."""\n' + flash2)
    keys = [
        key(grid()),
        key(grid(problem=Attention(n_q=128, d=64, causal=True))),
        key(grid(block_q=64)),
        key(grid(fidelities=("chip",))),
        key(grid(hw=("h200-sxm",))),
        key(grid("hw.hbm.bandwidth_gb_per_s=1000")),
        key(grid(dataflow=("standard",))),
        key(grid(dataflow=(str(file),))),
    ]
    assert key(grid()) == keys[0]
    assert key(grid(problem=Attention(n_q=128, n_k=128, d=64, kv_heads=1))) == keys[0]
    other = tmp_path / "other" / "mine.py"
    other.parent.mkdir()
    other.write_bytes(file.read_bytes())
    assert key(grid(dataflow=(str(other),))) == keys[-1]  # where it stands does not matter
    other.with_name("changed").mkdir()
    changed = other.with_name("changed") / "mine.py"
    changed.write_text('"""Two."""\n' + flash2)
    keys.append(key(grid(dataflow=(str(changed),))))
    monkeypatch.setattr("iosim.__version__", "99")
    keys.append(key(grid()))
    assert len(set(keys)) == len(keys)


def test_grids_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_bytes(
        b'schema = "iosim.sweep/1"\r\n[[grid]]\r\ndataflow = ["flash2", "standard"]\r\nn = "64..256:x2"\r\n'
        b"d = [32, 64]\r\ncausal = [false, true]\r\n[[grid]]\r\nkernel = 'triton'\r\nhw = 'h200-sxm'\r\nn = 64\r\n"
        b'd = 64\r\nheads = 8\r\nkv_heads = 2\r\n"hw.sram.capacity_kib" = 128\r\n'
    )
    first, second = read_grids(str(file))
    assert len(first) == 2 * 3 * 2 * 2
    (one,) = second.configurations()
    assert one.job is not None
    assert one.job.problem == Attention(n_q=64, d=64, heads=8, kv_heads=2)
    assert one.job.source == Source(kernel="triton")
    assert (one.job.machine.name, one.job.machine.sram.capacity_bytes) == ("h200-sxm", 128 * 1024)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", 'needs schema = "iosim.sweep/1"'),
        ("SCHEMA", "there is no grid"),
        ("SCHEMA grdi = 1", "'grdi' is unknown"),
        ("SCHEMA [[grid]]\nn = 64", "grid 1: d: is missing"),
        ("SCHEMA [[grid]]\nn = 64\nd = 'x'", "grid 1: d: 'x' is not a whole number"),
        ("SCHEMA [[grid]]\nn = 64\nd = 64\nblok_q = 1", "grid 1: 'blok_q' is no field"),
        ("SCHEMA [[grid]]\nn = 64\nd = 64\nhw.sram.capacity_kib = 1", 'in quotes: "hw.sram.capacity_kib"'),
        ("SCHEMA [[grid]]\nn = 64\nd = 64\nblock_q = {a = 1}", "grid 1: block_q: is not a value"),
        (
            "SCHEMA [[grid]]\nn = 99999999999999999999\nd = 64",
            "n: 99999999999999999999 is out of range; a number here is",
        ),
        ("SCHEMA [[grid]]\nn = '1..1000000:1'\nd = 64", "grid 1: n: '1..1000000:1' needs a step, as in 1..1000000:x2"),
        ("SCHEMA [[grid]]\nn = 64\nd = 64\ndataflow = 'flsh2'", "did you mean 'flash2'?"),
        ("SCHEMA [[grid]]\nn = 64\nd = 64\nfidelity = 'fare'", "did you mean 'fair'?"),
        ("SCHEMA [[grid]]\nn = [", "not valid TOML"),
        ("SCHEMA [[grid]]\nd = " + "1" * 5000, "integer string"),
    ],
)
def test_a_file_that_is_no_sweep_says_why_in_a_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "grid.toml"
    file.write_text(text.replace("SCHEMA", 'schema = "iosim.sweep/1"\n'))
    with pytest.raises(InputError, match=r"^[^\n]+$") as raised:
        read_grids(str(file))
    assert said in str(raised.value)


def test_a_sweep_that_is_too_large_is_refused_before_it_is_listed() -> None:
    with pytest.raises(InputError, match=r"makes 4,000,000 configurations; one takes 1,000,000"):
        grid("n=1..200", "d=1..200", "batch=1..100")


# ---------------------------------------------------------------- what is kept


def calls(
    monkeypatch: pytest.MonkeyPatch, fails: Callable[[Case], BaseException | None] = lambda _: None
) -> list[Case]:
    """The cases that are run from now on; those for which `fails` gives an error raise it."""
    made: list[Case] = []
    plain = work.run_case

    def counted(case: Case) -> Any:
        made.append(case)
        if (error := fails(case)) is not None:
            raise error
        return plain(case)

    monkeypatch.setattr(work, "run_case", counted)
    return made


def test_a_result_is_that_of_a_run(store: Store) -> None:
    sweep([grid(dataflow=("flash2", "standard"))], store, workers=0)
    for row in store.read():
        assert row.result is not None
        alone = run(Attention(n_q=128, d=64), dataflow=row.inputs["dataflow"]["name"], check=False)
        assert alone.timeline is not None
        assert row.result["makespan_ps"] == alone.timeline.makespan_ps
        assert row.result["dram_read_bytes"] == alone.device.dram_read_bytes
        assert row.result["sram_used_bytes"] == alone.footprint.sram_bytes


def test_running_again_does_only_what_is_missing(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    made = calls(monkeypatch)
    first = sweep([grid("n=64,128", **TILE)], store, workers=0)
    assert (first.done, first.found, len(made)) == (2, 0, 2)
    again = sweep([grid("n=64,128", **TILE)], store, workers=0)
    assert (again.done, again.found, len(made)) == (0, 2, 2)
    more = sweep([grid("n=64..256:x2", **TILE)], store, workers=0)
    assert (more.done, more.found, len(made)) == (1, 2, 3)
    assert made[-1].problem.n_q == 256
    assert len(more.keys) == 3


def test_a_failing_configuration_is_kept_with_its_error_and_the_rest_goes_on(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def bug(case: Case) -> BaseException | None:
        return ZeroDivisionError("by zero") if case.problem.n_q == 64 else None

    made = calls(monkeypatch, bug)
    wanted = grid("n=64,128,256", "block_q=64,8192", block_k=64, stages=(2,))
    did = sweep([wanted], store, workers=0)
    assert (did.done, did.failed) == (6, 4)
    errors = {(r.inputs["problem"]["n_q"], r.inputs["schedule"]["block_q"]): r.error for r in store.read()}
    assert str(errors[64, 64]).startswith("internal: ZeroDivisionError in ")
    assert errors[128, 64] is errors[256, 64] is None
    assert "needs" in str(errors[256, 8192])
    assert "B of SRAM" in str(errors[256, 8192])
    sweep([wanted], store, workers=0)
    assert len(made) == 6  # an error is an answer
    monkeypatch.undo()
    assert sweep([wanted], store, workers=0, retry=True).failed == 3
    assert sum(r.error is None for r in store.read()) == 3


def test_values_that_make_no_problem_are_errors_of_their_rows(store: Store) -> None:
    did = sweep([grid("heads=4,6", "kv_heads=4", **TILE)], store, workers=0)
    assert (did.done, did.failed) == (2, 1)
    (bad,) = (r for r in store.read() if r.error is not None)
    assert bad.error == "heads: 6 is not a multiple of kv_heads (4); the nearest kv_heads that divides it is 3"
    assert bad.inputs["problem"]["heads"] == 6


def test_a_stored_result_gives_way_to_nothing_and_an_error_to_a_result(store: Store) -> None:
    (one,) = grid().configurations()
    good, bad = Answer(one.key, one.inputs, RESULT, None), Answer(one.key, one.inputs, None, "no")
    for answers, kept in (
        ([bad], "no"),
        ([good], None),
        ([bad], None),
        ([replace(good, result=RESULT.replace("1", "9"))], None),
    ):
        store.add(answers)
        (row,) = store.read()
        assert row.error == kept
    assert row.result == json.loads(RESULT)


def test_answers_are_kept_all_or_none(store: Store) -> None:
    first, second = grid("n=64,128").configurations()
    with pytest.raises(InputError, match="CHECK constraint"):
        store.add([Answer(first.key, first.inputs, RESULT, None), Answer(second.key, second.inputs, None, None)])
    assert list(store.read()) == []


def test_a_full_disk_is_said_and_what_was_kept_stays(store: Store) -> None:
    first, second = grid("n=64,128").configurations()
    store.add([Answer(first.key, first.inputs, RESULT, None)])
    (pages,) = store.file.execute("PRAGMA page_count").fetchone()
    store.file.execute(f"PRAGMA max_page_count = {pages}")  # SQLite's own stand-in for a full disk
    with pytest.raises(OutputError, match="database or disk is full"):
        store.add([Answer(second.key, second.inputs, "x" * 10**6, None)])
    assert [row.key for row in store.read()] == [first.key]


def test_a_file_that_is_no_store_is_refused_and_left_alone(tmp_path: Path) -> None:
    foreign = tmp_path / "foreign.db"
    with closing(sqlite3.connect(foreign)) as file:
        file.execute("CREATE TABLE mine (x)")
    text = tmp_path / "text.db"
    text.write_text("no database at all, but a text that is long enough to have a header of SQLite\n" * 30)
    for path, said in ((foreign, "is a database, but not of iosim sweep"), (text, "file is not a database")):
        before = path.read_bytes()
        with pytest.raises(InputError, match=said):
            Store(str(path))
        assert path.read_bytes() == before
    with pytest.raises(InputError, match="no such file"):
        Store(str(tmp_path / "none.db"), new=False)
    with pytest.raises(InputError, match="the file name is empty"):
        Store("")
    with pytest.raises(OutputError, match="unable to open"):
        Store(str(tmp_path / "none" / "sweep.db"))


def test_a_row_that_iosim_did_not_write_is_refused(store: Store) -> None:
    store.add([Answer("k", '{"problem": 3}', RESULT, None)])
    with pytest.raises(InputError, match="row 'k' is not one of iosim's"):
        list(store.read())


def test_what_another_sweep_has_done_meanwhile_is_not_run(store: Store) -> None:
    todo = list(grid("n=64,128,256", **TILE).configurations())
    feed = Feed(todo, lambda keys: set(keys) - store.known(keys))
    other = todo[1]
    store.add([Answer(other.key, other.inputs, RESULT, None)])
    taken = [c.key for batch in iter(feed.take, None) for c in batch.configurations]
    assert sorted(taken) == sorted(c.key for c in todo if c is not other)
    assert feed.elsewhere == 1


# ---------------------------------------------------------------- batches and processes


def test_batches_grow_to_half_a_second_of_work_and_shrink_at_the_end() -> None:
    todo = [Configuration(str(n), RESULT, None) for n in range(1000)]
    feed = Feed(todo, set)
    feed.workers = 4
    sizes = []
    while (batch := feed.take()) is not None:
        sizes.append(len(batch.configurations))
        feed.took(batch, 0.01 * len(batch.configurations))
    assert sizes[0] == 1
    assert max(sizes) == 50  # 0.5 s / 0.01 s
    assert sizes[-1] == 1
    assert sum(sizes) == 1000
    feed = Feed(todo, set)
    feed.batch_seconds, feed.seconds, feed.timed = 1e9, 1.0, 1  # as on a large cluster
    assert len((feed.take() or pytest.fail("nothing")).configurations) == 256


def test_a_process_that_dies_costs_its_batch_one_more_try(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    todo = grid("n=64,128", **TILE)
    deadly = next(c.key for c in todo.configurations() if c.job and c.job.problem.n_q == 64)
    tries: list[list[str]] = []

    def dying(feed: Feed) -> Iterator[pool.Done]:
        while (batch := feed.take()) is not None:
            keys = [c.key for c in batch.configurations]
            tries.append(keys)
            yield pool.Done(batch, None if deadly in keys else work.work(batch)[0])

    monkeypatch.setattr("iosim.study.sweep.here", dying)
    did = sweep([todo], store, workers=0)
    assert (did.done, did.failed) == (2, 1)
    assert tries.count([deadly]) == 2
    assert [r.error for r in store.read()] == [DIED, None]


def test_processes_that_cannot_start_end_the_sweep(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool, "_serve", os._exit)  # called with the pipe, which is no exit code: the process fails
    with pytest.raises(pool.PoolError, match=r"ended before it had started \(exit code 1\); --workers 0 runs"):
        sweep([grid(**TILE)], store, workers=1)
    assert list(store.read()) == []


def test_a_worker_with_another_iosim_or_another_file_refuses(tmp_path: Path) -> None:
    batch = work.Batch.of(list(grid(**TILE).configurations()))
    with pytest.raises(InputError, match=r"its workers have iosim .*, this is 99"):
        work.work(replace(batch, version="99"))
    with pytest.raises(InputError, match="its workers have another flash2"):
        work.work(replace(batch, contents={Source(): "0" * 64}))
    with pytest.raises(InputError, match=r"its workers say: dataflow: .*none\.py is not a file"):
        work.work(replace(batch, contents={Source(dataflow=str(tmp_path / "none.py")): "0" * 64}))


# ---------------------------------------------------------------- tables


def test_csv_and_parquet_hold_the_same_rows(store: Store) -> None:
    sweep([grid("n=64,128", "stages=2,2/1,16", block_q=64, block_k=128)], store, workers=0)
    rows = list(store.read())
    table = list(csv.DictReader(io.StringIO(report.rows_as_csv(rows))))
    assert len(table) == 6
    assert {row["schedule_stages"] for row in table} == {"2", "2/1", "16"}
    assert [row["seconds"] == "" for row in table] == [row["error"] != "" for row in table]
    parquet = pytest.importorskip("pyarrow.parquet")
    read = parquet.read_table(io.BytesIO(report.export(rows, "parquet"))).to_pylist()
    assert [row["key"] for row in read] == [row["key"] for row in table]
    assert [row["makespan_ps"] for row in read] == [int(row["makespan_ps"] or 0) or None for row in table]


def test_parquet_without_pyarrow_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"pip install 'iosim\[parquet\]'; \.csv needs none"):
        report.require_export("out.parquet")
    assert report.require_export("out.csv") == "csv"


def test_dask_that_is_missing_says_what_to_install(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", None)
    with pytest.raises(InputError, match=r"pip install 'iosim\[dask\]'"):
        sweep([grid(**TILE)], store, scheduler="tcp://127.0.0.1:1")


def test_a_process_ends_where_the_client_of_a_scheduler_could_not_start() -> None:
    pytest.importorskip("distributed")
    code = (  # TLS without certificates fails at once, and would wait for a minute at the end of Python
        "from iosim.study.sweep.cluster import on_cluster\n"
        "from iosim.study.sweep.feed import Feed\n"
        "next(on_cluster(Feed([], lambda keys: set()), 'tls://127.0.0.1:1'))"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert "InputError: scheduler: 'tls://127.0.0.1:1' cannot be reached" in ended.stderr


# ---------------------------------------------------------------- the table


def kept(made: Grid, result: str = RESULT) -> list[Stored]:
    """The rows of a grid as if all had run and come to the same."""
    return [Stored(c.key, json.loads(c.inputs), json.loads(result), None) for c in made.configurations()]


def test_the_fastest_is_told_by_problem() -> None:
    slow, fast = RESULT.replace('"makespan_ps":1', '"makespan_ps":9000'), RESULT.replace('_ps":1', '_ps":8000')

    def told(*rows: Stored) -> str:
        return " ".join(report.render(rows, None, "s.db").split("\n\n")[0].split()).partition("failed.")[2].strip()

    assert told(*kept(grid("n=64,128", block_q=64), fast)) == ""  # that the smallest is the fastest says nothing
    one = [*kept(grid("block_q=32"), slow), *kept(grid("block_q=64"), fast)]
    assert told(*one) == "Fastest: flash2 on mp31, n 128, d 64, block_q 64, 8.00 ns."
    both = [*one, *kept(grid("n=64", "block_q=32"), fast), *kept(grid("n=64", "block_q=64"), slow)]
    assert told(*both) == "Fastest at n 128: block q 64, 8.00 ns; at n 64: block q 32, 8.00 ns."
    many = kept(grid("n=1..6", hw=("mp31", "mp22"), dataflow=("flash2",)), fast)
    assert told(*many).endswith("; at n 4: mp31, 8.00 ns. 2 more problems: iosim pareto s.db compares each.")


def test_a_column_of_a_machines_field_has_its_name_and_kib_three_digits() -> None:
    rows = kept(grid("hw.sram.capacity_kib=128,192"), RESULT.replace('"sram_used_bytes":4', '"sram_used_bytes":88074'))
    table = report.render(rows, None, "sweep.db")
    assert "\nhw.sram.capacity_kib " in table
    assert table.count(" 86.0 KiB\n") == 2


def test_a_long_table_has_the_fields_that_differ_among_all_rows() -> None:
    rows = kept(grid("n=1..60", dataflow=("flash2", "standard"), hw=("mp31", "mp22")))
    shown = report.render(rows, None, "sweep.db").splitlines()
    (head,) = (line for line in shown if line.startswith("hardware"))
    assert head.split() == ["hardware", "dataflow", "n", *report.NUMBERS]
    # the first 40 are of one dataflow and one machine, which the table says all the same
    assert sum(line.split()[:2] == ["mp31", "flash2"] for line in shown) == report.SHOWN
