"""`iosim report`: forms, the JSON contract, bad input, and the page in a real browser."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from tests.conftest import Iosim

SCHEMA = json.loads(files("iosim").joinpath("data/report.schema.json").read_text())
SMALL = ("-n", "256", "-d", "64", "-H", "1", "--dataflow", "standard", "--dataflow", "flash2")
REPORTS = {
    "memory": ("-n", "256,512", "-d", "64"),
    "io": SMALL,
    "trend": SMALL,
    "roofline": SMALL,
    "serving": ("-H", "2", "--context", "256,1024", "--batch", "1,4", "--new", "1,64"),
}
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.mark.parametrize("name", REPORTS)
def test_text_json_and_csv_say_the_same(iosim: Iosim, name: str) -> None:
    shown, document, lines = (iosim("report", name, *REPORTS[name], *form) for form in ((), ("--json",), ("--csv",)))
    assert (shown.code, shown.err) == (document.code, document.err) == (lines.code, lines.err) == (0, "")
    assert max(map(len, shown.out.splitlines())) <= 80
    found = json.loads(document.out)
    jsonschema.validate(found, SCHEMA)
    assert found["report"] == name
    assert found["answer"][0].split()[0] in shown.out
    rows = list(csv.DictReader(io.StringIO(lines.out)))
    assert len(rows) == sum(len(table["rows"]) for table in found["tables"].values())
    first = next(iter(found["tables"].values()))["rows"][0]
    assert {key: rows[0][key] for key in first} == {k: "" if v is None else str(v) for k, v in first.items()}
    assert document.out == iosim("report", name, *REPORTS[name], "--json").out


def test_a_plot_is_written_as_its_name_says(iosim: Iosim, tmp_path: Path) -> None:
    place = tmp_path / "memory.svg"
    assert iosim("report", "memory", *REPORTS["memory"], "--plot", str(place)).code == 0
    assert "<title>FlashAttention, forward, N 512: 262 kB</title>" in place.read_text()


def test_several_machines_have_tables_of_their_own(iosim: Iosim) -> None:
    shown = iosim("report", "io", *SMALL, "--hw", "mp31", "--hw", "h200-sxm").out
    assert re.findall(r"^Traffic by dataflow and level: (\S+)$", shown, re.M) == ["mp31", "h200-sxm"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("memory", "-n", "0"), "--n: 0 is out of range; 1 to 16777216 is allowed"),
        (("memory", "-n", "1,many"), "--n: 'many' in '1,many' is not a whole number; like 512,2048,4096"),
        (("io", "-n", "64,64"), "--n: 64 is given twice"),
        (("io", "-d", "0"), "--d: 0 is out of range"),
        (("io", "--hw", "mp32"), "--hw: unknown machine 'mp32' (did you mean 'mp31'?)"),
        (("io", "--hw", "mp31", "--hw", "mp31"), "--hw: mp31 is given twice"),
        (("trend", "--dataflow", "flsh2"), "did you mean 'flash2'?"),
        (("trend", "--dataflow", "flash-backward"), "flash-backward computes backward"),
        (("trend", "--dataflow", "flash2", "--dataflow", "flash2"), "--dataflow: flash2 is given twice"),
        (("trend", "--dtype", "fp61"), "did you mean 'fp16'?"),
        (("roofline", "-n", "64,128"), "--n: a roofline is of one N"),
        (("memory", "--plot", "x.gif"), "--plot: 'x.gif' does not end with .png or .svg"),
        (("memory", "--json", "--csv"), "--json and --csv: give one of them"),
        (("meory",), "no command 'meory' (did you mean 'memory'?)"),
        (("all",), "Missing option '--output'"),
    ],
)
def test_bad_input_is_one_line(iosim: Iosim, args: tuple[str, ...], message: str) -> None:
    answer = iosim("report", *args)
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err
    assert len(answer.err.splitlines()) == 1


def test_a_directory_of_other_things_is_refused_before_any_work(iosim: Iosim, tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    answer = iosim("report", "all", "-o", str(tmp_path))
    assert answer.code == 3
    assert "--force replaces the whole directory" in answer.err
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.slow
def test_the_whole_report_is_there_and_its_page_works(iosim: Iosim, tmp_path: Path) -> None:
    """In headless Chromium, where there is one: no error, and a click sorts by raw values."""
    place = tmp_path / "mp31"
    args = ("-n", "256,1024", "-d", "64", "-H", "1", "--dataflow", "standard", "--dataflow", "flash2")
    assert iosim("report", "all", *args, "--hw", "mp31", "-o", str(place)).code == 0
    index = json.loads((place / "report.json").read_text())
    assert {p.name for p in place.iterdir()} == set(index["files"])
    for report in index["reports"].values():
        jsonschema.validate(report, SCHEMA)
    page = (place / "index.html").read_text()
    for name in ("memory", "io", "trend", "roofline"):
        assert page.count(f'<section id="{name}"') == 1
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    click = """<script>
    const head = document.querySelectorAll("#trend th button")[1];
    head.click(); head.click();
    document.title = JSON.stringify([...head.closest("table").tBodies[0].rows].map((r) => r.cells[1].dataset.value));
    </script>"""
    (tmp_path / "clicked.html").write_text(page.replace("</body>", f"{click}</body>"))
    command = [CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr", "--dump-dom"]
    done = subprocess.run([*command, f"file://{tmp_path}/clicked.html"], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    found = re.search(r"<title>(\[.*?\])</title>", done.stdout)
    assert found is not None
    values = [float(value) for value in json.loads(found[1].replace("&quot;", '"'))]
    assert len(values) == 2
    assert values == sorted(values, reverse=True)
    assert 'data-said="' in done.stdout
