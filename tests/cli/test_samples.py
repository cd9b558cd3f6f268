"""The committed reports and examples are what today's code makes."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Iosim

REPORTS = Path(__file__).parents[2] / "reports"
README = (REPORTS / "README.md").read_text()
COMMANDS = re.findall(r"^iosim (report all .* -o reports/(\S+))$", README, re.M)
EXAMPLES = sorted((REPORTS / "examples").glob("*.py"))
MOST = 3_000_000  # bytes of one report
AGAIN = "differs: if the change is meant, run the commands of reports/README.md again"


def said(name: str, data: bytes) -> str:
    """What a file says whatever draws it: of plots the values of their marks, as lines move with matplotlib."""
    text = data.decode()
    if name.endswith(".svg"):
        return "\n".join(re.findall(r"<title>(.*?)</title>", text))
    if name == "index.html":
        return re.sub(r"(<svg.*?</svg>)", lambda plot: said(".svg", plot[1].encode()), text, flags=re.S)
    return text


def test_every_sample_is_made_by_a_command_and_every_example_has_its_output() -> None:
    assert [name for _, name in COMMANDS] == ["mp31", "h200-sxm"]
    found = {path.name for path in REPORTS.iterdir() if path.is_dir()}
    assert found == {"examples", *(name for _, name in COMMANDS)}
    assert [path.stem for path in EXAMPLES] == sorted(path.stem for path in (REPORTS / "examples").glob("*.txt"))
    assert all(f"`{path.name}`" in README for path in EXAMPLES)


@pytest.mark.parametrize("name", [name for _, name in COMMANDS])
def test_a_sample_is_whole_and_small(name: str) -> None:
    files = {path.name: path.stat().st_size for path in (REPORTS / name).iterdir()}
    assert set(files) == set(json.loads((REPORTS / name / "report.json").read_text())["files"])
    assert sum(files.values()) < MOST


@pytest.mark.long
@pytest.mark.parametrize(("command", "name"), COMMANDS)
def test_a_sample_is_what_its_command_makes(iosim: Iosim, tmp_path: Path, command: str, name: str) -> None:
    made, kept = tmp_path / name, REPORTS / name
    assert iosim(*command.rpartition(" ")[0].split(), str(made)).code == 0
    assert {p.name for p in made.iterdir()} == {p.name for p in kept.iterdir()}
    for path in sorted(made.iterdir()):
        if path.suffix == ".png":
            continue
        again, before = (said(path.name, (place / path.name).read_bytes()) for place in (made, kept))
        assert again == before, f"reports/{name}/{path.name} {AGAIN}"


@pytest.mark.long
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_prints_what_stands_beside_it(path: Path) -> None:
    done = subprocess.run([sys.executable, str(path)], capture_output=True, text=True, timeout=300, cwd=REPORTS.parent)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == path.with_suffix(".txt").read_text(), f"{path.name}: what it prints {AGAIN}"
