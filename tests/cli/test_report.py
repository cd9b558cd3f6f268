"""`iosim report`: forms, the JSON contract, bad input, and the page in a real browser."""

from __future__ import annotations

import csv
import html
import io
import json
import re
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

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
    "latent": ("-H", "4", "--n-k", "256,1024", "-n", "256"),
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


@pytest.mark.long
def test_the_whole_report_is_there_and_its_page_works(iosim: Iosim, tmp_path: Path) -> None:
    """In headless Chromium, where there is one: no error; clicks sort by raw values; plots and timeline answer."""
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
    assert not re.search(r"""(?:src|href)=["'](?:https?:)?//""", page)  # it needs no network
    if CHROMIUM is None:
        pytest.skip("no Chromium here")
    found = in_chromium(tmp_path, page)
    values = [float(value) for value in found["sorted"]]
    assert len(values) == 2
    assert values == sorted(values, reverse=True)
    assert re.search(r": [\d.,]+ ", found["plot"])  # a mark says its value
    loads, switched = found["hovered"], found["switched"]
    assert re.match(r"load q: q, iteration 0, block 0; [\d.]+ [µn]s, from 0", loads)
    assert len({found["one"], found["two"], switched}) == 3  # the kernel's time at 1, 2 and 3 stages
    assert found["key"].startswith("load ")
    assert found["zoomed"] != found["whole"] == found["home"]  # pixels
    assert found["wide"] == 0  # nothing but tables and plots, in boxes of their own, is wider than the window


ACTIONS = """
const head = document.querySelectorAll("#trend th button")[1], out = {};
head.click(); head.click();
out.sorted = [...head.closest("table").tBodies[0].rows].map((r) => r.cells[1].dataset.value);
const mark = document.querySelector("#trend .mark");
mark.dispatchEvent(new PointerEvent("pointermove", { bubbles: true, clientX: 5, clientY: 5 }));
out.plot = document.getElementById("said").textContent;
const box = document.querySelector(".timeline"), canvas = box.querySelector("canvas");
const told = box.querySelector(".told");
const press = (key) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
const two = told.textContent;
out.two = two;
out.whole = canvas.toDataURL();
press("+"); out.zoomed = canvas.toDataURL();
press("Home"); out.home = canvas.toDataURL();
const at = canvas.getBoundingClientRect();
canvas.dispatchEvent(new PointerEvent("pointermove", { clientX: at.left + 103, clientY: at.top + 30 }));
out.hovered = told.textContent;
press("Escape"); press("ArrowDown"); out.key = told.textContent; press("Escape");
press("1"); out.one = told.textContent;
box.querySelectorAll("input")[2].click(); out.switched = told.textContent;
out.wide = Math.max(0, document.documentElement.scrollWidth - innerWidth);
document.title = JSON.stringify(out);
"""


def in_chromium(place: Path, page: str) -> dict[str, Any]:
    """What the actions find on the page; a line on the console fails."""
    (place / "acted.html").write_text(page.replace("</body>", f"<script>{{{ACTIONS}}}</script></body>"))
    command = [
        str(CHROMIUM),
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--dump-dom",
    ]
    done = subprocess.run([*command, f"file://{place}/acted.html"], capture_output=True, text=True, timeout=120)
    assert "CONSOLE" not in done.stderr
    found = re.search(r"<title>(\{.*?\})</title>", done.stdout)
    assert found is not None
    out: dict[str, Any] = json.loads(html.unescape(found[1]))
    return out
