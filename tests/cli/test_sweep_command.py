"""`iosim sweep`, `iosim pareto` and `iosim rerun`: what they print, their JSON and CSV, files, and bad input."""

from __future__ import annotations

import csv
import io
import json
import re
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import given
from hypothesis import strategies as st

from iosim.study.pareto import Point, front
from iosim.study.sweep import Stored
from tests.conftest import Iosim

TILES = ("-d", "64", "--vary", "n=64,128", "--vary", "block_q=32,64,8192", "--block-k", "64", "--stages", "1")


def schema(name: str) -> Any:
    return json.loads(files("iosim").joinpath(f"data/{name}.schema.json").read_text())


@pytest.fixture
def store(iosim: Iosim, tmp_path: Path) -> str:
    """A store with four results and two failures."""
    path = str(tmp_path / "sweep.db")
    assert iosim("sweep", *TILES, "--workers", "0", "--store", path).code == 0
    return path


def test_sweep_in_words_fits_the_terminal_and_says_what_was_done(iosim: Iosim, tmp_path: Path) -> None:
    path = str(tmp_path / "s.db")
    answer = iosim("sweep", *TILES, "--workers", "0", "--store", path)
    assert answer.code == 0
    lines = answer.out.splitlines()
    words = " ".join(answer.out.split())
    assert max(map(len, lines)) <= max(80, len(path) + 40)
    assert "6 configurations: 6 run now in" in words
    assert re.search(r"2 failed\. Fastest at n 64: block q \d+, [\d.]+ us; at n 128: block q \d+, [\d.]+ us\. ", words)
    assert "failed (1): flash2: kernel attention needs" in words
    again = " ".join(iosim("sweep", *TILES, "--workers", "0", "--store", path).out.split())
    assert "6 configurations: 0 run now, 6 found in" in again


def test_the_rows_of_a_store_as_json_csv_and_a_file(iosim: Iosim, store: str, tmp_path: Path) -> None:
    document = json.loads(iosim("sweep", "--store", store, "--json").out)
    jsonschema.validate(document, schema("sweep"))
    assert document["done"] is None
    rows = document["configurations"]
    assert [(r["inputs"]["problem"]["n_q"], r["inputs"]["schedule"]["block_q"]) for r in rows] == [
        (n, block) for n in (64, 128) for block in (32, 64, 8192)
    ]
    table = iosim("sweep", "--store", store, "--csv").out
    read = list(csv.DictReader(io.StringIO(table)))
    assert [r["key"] for r in read] == [r["key"] for r in rows]
    out = tmp_path / "out.csv"
    assert iosim("sweep", "--store", store, "--export", str(out)).code == 0
    assert out.read_text() == table
    now = json.loads(iosim("sweep", *TILES, "--workers", "0", "--store", store, "--json").out)
    jsonschema.validate(now, schema("sweep"))
    assert now["done"] == {"now": 0, "failed": 0, "found": 6}
    assert {r["key"]: r["result"] for r in now["configurations"]} == {r["key"]: r["result"] for r in rows}


def test_a_sweep_in_which_all_fails_has_its_reasons_and_ends_with_1(iosim: Iosim, tmp_path: Path) -> None:
    path = str(tmp_path / "s.db")
    for _ in range(2):  # run, and found
        answer = iosim("sweep", "-n", "64", "-d", "64", "--block-q", "8192", "--workers", "0", "--store", path)
        assert (answer.code, answer.err) == (
            1,
            "iosim: sweep: no configuration could run; the answer has the reasons\n",
        )
        assert "failed (1): flash2: kernel attention needs" in " ".join(answer.out.split())
    assert iosim("sweep", "--store", path).code == 0  # to show a store is no sweep


def test_a_sweep_of_a_file(iosim: Iosim, tmp_path: Path) -> None:
    file = tmp_path / "grid.toml"
    file.write_text('schema = "iosim.sweep/1"\n[[grid]]\nn = [64, 128]\nd = 64\nblock_q = 64\nblock_k = 64\n')
    answer = iosim("sweep", str(file), "--workers", "0", "--store", str(tmp_path / "s.db"))
    assert "2 configurations: 2 run now" in " ".join(answer.out.split())


def test_a_table_with_many_fields_says_them_in_words(iosim: Iosim, tmp_path: Path) -> None:
    vary = [f"--vary={text}" for text in ("n=64,128", "d=16,32", "causal=yes,no", "hw.hbm.bandwidth_gb_per_s=500,900")]
    answer = iosim("sweep", *vary, "--hw", "mp31", "--hw", "mp22", "--workers", "0", "--store", str(tmp_path / "s.db"))
    assert answer.code == 0, answer.err
    assert "…" not in answer.out
    assert "\nhardware mp31, n 64, d 16," in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80


@pytest.mark.slow
def test_a_store_of_sweeps_over_other_fields_is_sorted(iosim: Iosim, tmp_path: Path) -> None:
    path = str(tmp_path / "mixed.db")
    for more in ((), ("--vary", "stages=1,2"), ("--vary", "hw.exp.ops_per_clock=16")):
        assert iosim("sweep", "-n", "64", "-d", "32", "--store", path, "--workers", "1", *more).code == 0
    assert "of 4 configurations" in iosim("pareto", path).out


def test_pareto_in_words_json_csv_and_a_plot(iosim: Iosim, store: str, tmp_path: Path) -> None:
    plot = tmp_path / "front.png"
    answer = iosim("pareto", store, "--plot", str(plot))
    assert answer.code == 0
    assert "of 4 configurations in" in answer.out
    assert "besides 2 that failed" in " ".join(answer.out.split())
    assert plot.read_bytes().startswith(b"\x89PNG")
    document = json.loads(iosim("pareto", store, "--json").out)
    jsonschema.validate(document, schema("pareto"))
    assert [f["problem"]["n_q"] for f in document["fronts"]] == [64, 128]
    points = [p["key"] for f in document["fronts"] for p in f["points"]]
    assert [row["key"] for row in csv.DictReader(io.StringIO(iosim("pareto", store, "--csv").out))] == points
    assert len(points) + sum(f["beaten"] for f in document["fronts"]) == 4


@given(st.lists(st.tuples(*[st.integers(0, 4)] * 3), min_size=1, max_size=20))
def test_a_front_is_what_no_other_point_beats(costs: list[tuple[int, int, int]]) -> None:
    row = Stored("k", {}, None, None)
    found = front([Point(row, *cost) for cost in costs])

    def beats(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
        return a != b and all(x <= y for x, y in zip(a, b, strict=True))

    best = sorted(cost for cost in costs if not any(beats(other, cost) for other in costs))
    assert [p.cost for p in found.best] == best
    assert len(found.best) + len(found.beaten) == len(costs)


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("sweep", "-n", "64", "-d", "64", "--vary", "n=1,2"), "--vary: n: is given as an option too"),
        (("sweep", "-n", "64", "-d", "64", "--block-q", "8", "--vary", "block_q=1,2"), "block_q: is given as an"),
        (("sweep", "-d", "64", "--vary", "n=1,2", "--vary", "n=3"), "--vary: n: is given twice"),
        (("sweep", "-n", "64", "-d", "64", "--vary", "splits=1,2"), "--vary: splits: changes nothing in flash2"),
        (("sweep", "-n", "64", "-d", "64", "--hw", "mp32"), "--hw: unknown machine 'mp32' (did you mean 'mp31'?)"),
        (("sweep", "-n", "64", "-d", "64", "--fidelity", "fare"), "--fidelity: 'fare' is not one of fair, chip"),
        (("sweep", "-n", "64"), "Missing option '--d'"),
        (("sweep", "none.toml"), "none.toml: cannot be read: No such file or directory"),
        (("sweep", "grid.toml", "-n", "64"), "--n: stands in the file, where there is one; give one of them"),
        (("sweep",), "--store: sweep.db: no such file"),
        (("sweep", "--retry"), "--retry: changes nothing without a problem or a file"),
        (
            ("sweep", "-n", "64", "-d", "64", "--scheduler", "foo"),
            "--scheduler: 'foo' is not an address like tcp://HOST",
        ),
        (
            ("sweep", "-n", "64", "-d", "64", "--scheduler", ""),
            "--scheduler: '' is not an address like tcp://HOST:PORT",
        ),
        (("sweep", "-n", "64", "-d", "64", "--scheduler", "tcp://"), "'tcp://' is not an address like tcp://HOST:PORT"),
        (("sweep", "--scheduler", "tcp://a:99999"), "'tcp://a:99999' is not an address like tcp://HOST:PORT"),
        (("sweep", "-n", "64", "-d", "64", "--export", "x.xls"), "'x.xls' does not end with .csv or .parquet"),
        (("pareto", "none.db"), "STORE: none.db: no such file"),
        (("pareto", "none.db", "--plot", "x.gif"), "--plot: 'x.gif' does not end with .png or .svg"),
        (("rerun", "none.json"), "none.json: cannot be read: No such file or directory"),
    ],
)
def test_bad_input_is_one_line(
    iosim: Iosim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, args: tuple[str, ...], said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    answer = iosim(*args)
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert said in answer.err
    assert list(tmp_path.iterdir()) == []


# ---------------------------------------------------------------- rerun


@pytest.fixture
def result(iosim: Iosim, tmp_path: Path) -> Path:
    """A run's JSON, with options of every kind."""
    path = tmp_path / "r.json"
    args = ("-n", "64", "-d", "32", "-H", "2", "--causal", "--stages", "2,1", "--hw", "h200-sxm", "--hw", "mp31")
    assert iosim("run", *args, "--dataflow", "flash2", "--seed", "7", "--json", "-o", str(path)).code == 0
    return path


def test_a_result_that_is_run_again_is_the_same(iosim: Iosim, result: Path) -> None:
    answer = iosim("rerun", str(result))
    assert answer.code == 0, answer.err
    assert f"No difference between {result} and now (2 pairs of iosim.run/1)." in " ".join(answer.out.split())


@pytest.mark.parametrize("name", ["check", "precision"])
def test_other_results_are_run_again_too(iosim: Iosim, tmp_path: Path, name: str) -> None:
    path = tmp_path / "r.json"
    iosim(name, "-n", "64", "-d", "32", "--json", "-o", str(path))
    assert iosim("rerun", str(path)).code == 0


def test_no_check_stays_no_check(iosim: Iosim, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    iosim("run", "-n", "64", "-d", "32", "--no-check", "--json", "-o", str(path))
    assert iosim("rerun", str(path)).code == 0


def test_what_differs_is_said_and_ends_with_1(iosim: Iosim, result: Path) -> None:
    document = json.loads(result.read_text())
    document["provenance"]["profile_hash"]["mp31"] = "f" * 64
    document["provenance"]["iosim"] = "0.0.1"
    document["runs"][0]["time"]["makespan_ps"] += 1
    result.write_text(json.dumps(document))
    answer = iosim("rerun", str(result))
    assert answer.code == 1
    assert "Made by iosim '0.0.1'" in answer.out
    assert "The profile of mp31 has changed: ffffffffffff then, " in answer.out
    assert "h200-sxm has changed" not in answer.out
    assert "is not what this iosim makes of it now" in answer.err
    found = json.loads(iosim("rerun", str(result), "--json").out)
    jsonschema.validate(found, schema("diff"))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"schema": "iosim.validate/1"}, "its schema is iosim.validate/1; results of run, check, precision"),
        ({"request": None}, "it has no request"),
        ({"request": {"output": "x.json"}}, "request: output is no option of this iosim's run"),
        ({"request": {"n_q": {"a": 1}}}, "request: n_q: is no value of --n"),
        ({"request": {"n_q": True}}, "request: n_q: True is no value of --n"),
        ({"request": {"n_q": 64}}, "Missing option '--d'"),
    ],
)
def test_a_result_that_cannot_be_run_again_says_why(iosim: Iosim, result: Path, change: Any, said: str) -> None:
    result.write_text(json.dumps(json.loads(result.read_text()) | change))
    answer = iosim("rerun", str(result))
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert said in answer.err
