"""`iosim validate`: the standing table, JSON, CSV, the plot, and options."""

from __future__ import annotations

import csv
import io
import json
import re
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from tests.conftest import Iosim

DATA = Path(__file__).parent.parent / "data"
SCHEMA = json.loads(files("iosim").joinpath("data/validate.schema.json").read_text())
README = (Path(__file__).parents[2] / "README.md").read_text()
HEADER = "impl,pass,batch,heads,n,d,causal,ms,peak_extra_bytes"


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """Two calls that allocate O (4194304 bytes), L (131072), seed and offset, the second measured at twice of that."""
    path = tmp_path / "mine.csv"
    lines = [f"flash2,fwd,8,8,512,64,{causal},0.25,{measured}" for causal, measured in ((0, 4326400), (1, 8652800))]
    path.write_text("\n".join([HEADER, *lines, "xformers,fwd,1,8,512,64,0,0.02,1"]) + "\n")
    return path


@pytest.mark.slow
def test_alone_it_holds_all_that_ships_against_the_goals(iosim: Iosim) -> None:
    """The README shows the goals as they are reached; regenerate its block with: iosim validate."""
    answer = iosim("validate")
    assert answer.code == 0
    assert max(map(len, answer.out.splitlines())) <= 80
    words = " ".join(answer.out.split())
    assert "h200_attention.csv 181, h200_counters.csv 111, h200_triton_tiles.csv 152, published_attention.csv" in words
    assert "Host-bound calls, timed by events below what the host needs for a call (not scored): 27" in words
    shown = re.search(r"<!-- goals: iosim validate -->\n```text\n(.*?)```", README, re.S)
    reached = re.search(r"^Goals .*?(?=\n\n)", answer.out, re.S | re.M)
    assert shown is not None
    assert reached is not None
    assert shown[1].split() == reached[0].split()


def test_where_the_papers_kernel_holds_less_than_the_program_that_runs(iosim: Iosim, tmp_path: Path) -> None:
    shipped = (files("iosim") / "data" / "published_attention.csv").read_text().splitlines()
    rows = list(csv.DictReader(shipped))
    memory = [n for n, r in enumerate(rows, 1) if (r["kernel"], r["metric"]) == ("FlashAttention-1", "memory_MB")]
    short, long = ([n for n in memory if rows[n - 1]["n_k"] == keys] for keys in ("256", "512"))
    for chosen, said in ((short, True), (long, False)):
        mine = tmp_path / f"{said}.csv"
        mine.write_text("\n".join([shipped[0], *(shipped[n] for n in chosen)]) + "\n")
        text = " ".join(iosim("validate", str(mine)).out.split())
        assert ("The program that iosim run --pass training takes always has it." in text) is said


@pytest.mark.slow
def test_json_follows_the_shipped_schema(iosim: Iosim, tmp_path: Path) -> None:
    shipped = (files("iosim") / "data" / "h200_attention.csv").read_text().splitlines()
    mine = tmp_path / "h200_some.csv"
    mine.write_text("\n".join([shipped[0], *(line for line in shipped[1:] if ",512,512,64," in line)]) + "\n")
    found = json.loads(iosim("validate", str(mine), "--json").out)
    jsonschema.validate(found, SCHEMA)
    memory = [f for f in found["families"] if f["quantity"] == "peak_extra_bytes"]
    assert sum(f["rows"] for f in memory) > 5
    assert {f["worst_ape_pct"] for f in memory} == {0}


def test_a_file_of_ones_own(iosim: Iosim, calls: Path) -> None:
    found = json.loads(iosim("validate", str(calls), "--json").out)
    jsonschema.validate(found, SCHEMA)
    (family,) = [f for f in found["families"] if f["quantity"] == "peak_extra_bytes"]
    assert family["family"] == "h200-sxm calls: flash2 forward d=64: peak extra memory"
    assert family["rows"] == 2
    assert family["mape_pct"] == pytest.approx(25)  # 0 % and 4326400 of 8652800
    assert family["bias_pct"] == pytest.approx(-25)
    assert found["assumed_machine"] == {"mine.csv": "h200-sxm"}
    other = [r for r in found["rows"] if r["implementation"] == "xformers"]
    assert {r["status"] for r in other} == {"not modelled"}
    assert "is taken (--hw NAME" in iosim("validate", str(calls)).out


def test_another_machine_has_other_splits(iosim: Iosim, tmp_path: Path) -> None:
    """8 heads of 1024 queries are 128 blocks, over 80 % of 56 processors' 112 slots, and half of 132 processors' 264.

    Two splits then add O and L in fp32 twice: 2 * (4 * 8 * 1024 * 64 + 4 * 8 * 1024) bytes.
    """
    path = tmp_path / "mine.csv"
    path.write_text(f"{HEADER}\nflash2,fwd,1,8,1024,64,0,0.25,1\n")
    predicted = {}
    for machine in ("h200-sxm", "mp31"):
        found = json.loads(iosim("validate", str(path), "--json", "--hw", machine).out)
        assert found["assumed_machine"] == {}
        assert {r["machine"] for r in found["rows"]} == {machine}
        predicted[machine] = next(r["predicted"] for r in found["rows"] if r["quantity"] == "peak_extra_bytes")
    assert predicted["h200-sxm"] - predicted["mp31"] == 2 * (4 * 8 * 1024 * 64 + 4 * 8 * 1024)


def test_csv_has_a_line_for_every_number(iosim: Iosim, calls: Path) -> None:
    rows = list(csv.DictReader(io.StringIO(iosim("validate", str(calls), "--csv").out)))
    assert [(r["line"], r["quantity"]) for r in rows] == [
        (line, quantity) for line in "234" for quantity in ("time", "peak_extra_bytes")
    ]
    assert rows[1]["predicted"] == "4326400.0"


def test_nsights_own_file(iosim: Iosim) -> None:
    found = json.loads(iosim("validate", str(DATA / "ncu_raw_sample.csv"), "--json").out)
    jsonschema.validate(found, SCHEMA)
    assert len([r for r in found["rows"] if r["quantity"] == "time"]) == 11
    shapes = str(DATA / "ncu_raw_sample.shapes.csv")
    assert json.loads(iosim("validate", str(DATA / "ncu_raw_sample.csv"), "--json", "--shapes", shapes).out) == found


def test_plot(iosim: Iosim, calls: Path, tmp_path: Path) -> None:
    picture = tmp_path / "p.png"
    assert iosim("validate", str(calls), "--plot", str(picture)).code == 0
    assert picture.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("none.csv",), 2, "none.csv: cannot be read: No such file"),
        (("--json", "--csv"), 2, "give one of them"),
        (("--shape", "n=64,d=64", "--shapes", "x.csv"), 2, "give one of them"),
        (("--plot", "x.svg"), 2, "--plot: 'x.svg' does not end with .png"),
        (("--plot", "no/such/x.png"), 3, "--plot: no/such/x.png: No such file"),
        (("--shape", "n=64,d=64"), 2, "--shape: changes nothing"),
        (("--hw", "h2000"), 2, "did you mean"),
        (("--shapes", "none.csv"), 2, "none.csv: cannot be read: No such file"),
    ],
)
def test_bad_options(iosim: Iosim, args: tuple[str, ...], code: int, words: str) -> None:
    answer = iosim("validate", *args)
    assert (answer.code, answer.out) == (code, "")
    assert words in answer.err
    assert answer.err.count("\n") == 1
