"""`iosim report timeline`: text, JSON, CSV, pictures, and what is refused."""

from __future__ import annotations

import json
import re
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from iosim.cli.commands.report.timeline import timeline
from iosim.cli.commands.trace import trace
from tests.conftest import Iosim

SMALL = ("report", "timeline", "-n", "512", "-d", "64")
TALL = ("report", "timeline", "-n", "1024", "-d", "128", "--block-q", "64", "--block-k", "128")
SCHEMA = json.loads(files("iosim").joinpath("data/timeline.schema.json").read_text())


def document(iosim: Iosim, *args: str) -> dict[str, Any]:
    answer = iosim(*args, "--json")
    assert answer.code == 0, answer.err
    return json.loads(answer.out)


def test_the_text_leads_with_what_double_buffering_brought_and_fits_80_columns(iosim: Iosim) -> None:
    answer = iosim(*TALL, "--iterations", "0..4")
    assert answer.code == 0, answer.err
    lines = answer.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert lines[0].startswith("flash2 on mp31")
    words = " ".join(answer.out.split())
    assert re.match(r"flash2 .*? fidelity Double buffering (brought|cost) \d\.\d+x", words)
    assert "3 stages do not fit: flash2: kernel attention needs 229,376 B of SRAM" in words
    assert "Shown: iterations 0 to 3 of 8." in words
    for row in ("load k", "load v", "matrix", "exp", "DRAM", "SRAM"):
        assert sum(line.startswith(row) for line in lines) == 2, row  # at one and at two stages


@pytest.mark.parametrize(
    "args",
    [
        (*TALL, "--iterations", "2..5"),
        (*SMALL, "--causal", "--block", "7"),
        (*SMALL, "--dataflow", "flash3", "--hw", "h200-sxm"),
        (*SMALL, "--dataflow", "softmax-safe", "--stages", "2"),
        (*SMALL, "--stages", "2", "--fidelity", "chip", "--processor", "1", "--iterations", "all"),
    ],
)
def test_json_follows_the_shipped_schema_and_its_spans_fill_the_window(iosim: Iosim, args: tuple[str, ...]) -> None:
    found = document(iosim, *args)
    jsonschema.validate(found, SCHEMA)
    for case in found["stages"]:
        if not case["fits"]:
            continue
        window = case["window_ps"][1] - case["window_ps"][0]
        for track in case["tracks"]:
            spans = sorted(track["spans"])
            assert spans[-1][0] + spans[-1][1] <= window
            assert all(0 <= span[2] < len(found["names"]) for span in spans)
            if track["kind"] != "load":  # loads of one tile may be in flight together
                assert all(a[0] + a[1] <= b[0] for a, b in pairwise(spans))
            if track["name"] == "matrix":  # busy and waiting by cause: nothing is left over
                assert sum(span[1] for span in spans) == window
        assert all(held <= case["sram"]["allocated_bytes"] for _, held in case["sram"]["in_use"])


def test_a_block_shown_alone_has_its_own_iterations(iosim: Iosim) -> None:
    """Causal, tiles of 64 x 64: block 3 of 8 has four iterations, block 7 eight."""
    for block, turns in ((3, 4), (7, 8)):
        args = ("--causal", "--block", str(block), "--block-q", "64", "--block-k", "64", "--stages", "1")
        found = document(iosim, *SMALL, *args)
        assert found["iterations"]["of"] == turns
        spans = [s for t in found["stages"][0]["tracks"] if t["kind"] != "unit" for s in t["spans"]]
        assert {s[4] for s in spans} == {block}
        assert {s[3] for s in spans} - {None} >= set(range(turns))


def test_with_two_buffers_a_load_is_in_flight_under_the_product_before_it(iosim: Iosim) -> None:
    """With one, K of the next iteration is issued when QK has read this one's; with two, an iteration earlier."""
    found = document(iosim, *TALL, "--iterations", "0..6")
    for case in found["stages"][:2]:
        spans = {t["name"]: t["spans"] for t in case["tracks"]}
        qk = next(n for n, what in enumerate(found["names"]) if what == {"kind": "work", "name": "qk"})
        group = next(name for name in spans if name.endswith("group"))
        ends = {s[3]: s[0] + s[1] for s in spans[group] if s[2] == qk}
        issued = {s[3]: s[0] for s in spans["load k"] if s[4] == 0}
        (depth,) = case["stages"]
        for t in range(depth, 6):
            assert issued[t] >= ends[t - depth]


def test_a_picture_is_made_by_the_name_of_its_file(iosim: Iosim, tmp_path: Path) -> None:
    file = tmp_path / "a.svg"
    assert iosim(*SMALL, "--stages", "1", "--iterations", "0..1", "-o", str(file)) == (0, "", "")
    drawn = file.read_text()
    for words in ("<svg", "matrix products", "waits: data", "SRAM in", "1 stage"):
        assert words in drawn
    answer = iosim(*SMALL, "-o", str(tmp_path / "a.pdf"))
    assert (answer.code, list(tmp_path.glob("*.pdf"))) == (2, [])
    assert "pictures are .png or .svg" in answer.err


@pytest.mark.long
def test_pictures_are_the_same_each_time(iosim: Iosim, tmp_path: Path) -> None:
    for kind in ("png", "svg"):
        files_ = [tmp_path / f"{n}.{kind}" for n in range(2)]
        for file in files_:
            assert iosim(*SMALL, "--stages", "2", "--iterations", "0..2", "-o", str(file)) == (0, "", "")
        assert files_[0].read_bytes() == files_[1].read_bytes()
    assert (tmp_path / "0.png").read_bytes().startswith(b"\x89PNG")


def test_a_kernel_with_buffers_of_its_own_is_shown_once(iosim: Iosim) -> None:
    answer = iosim(*SMALL, "--kernel", "flash2", "--hw", "a100-sxm-80gb")
    assert answer.code == 0, answer.err
    assert "the number of stages changes nothing in this kernel" in " ".join(answer.out.split())
    assert sum(line.startswith("load k") for line in answer.out.splitlines()) == 1


def test_csv_has_a_line_a_span(iosim: Iosim) -> None:
    args = (*SMALL, "--stages", "2")
    spans = sum(len(t["spans"]) for case in document(iosim, *args)["stages"] for t in case["tracks"])
    lines = iosim(*args, "--csv").out.splitlines()
    assert lines[0] == "stages,track,kind,what,start_ps,end_ps,iteration,block"
    assert len(lines) == spans + 1


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--iterations", "5..2"), "--iterations: '5..2' is not A..B"),
        (("--iterations", "90..95"), "--iterations: 90..95: kernel attention has 4 iterations"),
        (("--block", "9999"), "--block: 9999 is not one of 0 to"),
        (("--processor", "1"), "--processor: all are alike in the fidelity fair"),
        (("--processor", "1", "--block", "1"), "--block and --processor: give one of them"),
        (("--program-kernel", "atention"), "did you mean 'attention'"),
        (("--hw", "mp22"), "no time"),
        (("--block-q", "512", "--block-k", "512"), "needs"),
        (("--fidelity", "chip", "--block", "2000"), "--block: 2000 is not one of 0 to"),
    ],
)
def test_what_cannot_be_shown_is_said_in_one_line(iosim: Iosim, args: tuple[str, ...], words: str) -> None:
    answer = iosim(*SMALL, *args)
    assert answer.code == 2, answer
    assert answer.out == ""
    assert words in answer.err
    assert len(answer.err.splitlines()) == 1 or "Usage" in answer.err


@pytest.mark.long
@pytest.mark.parametrize("command", [timeline, trace])
def test_the_examples_of_the_help_run_as_written(
    command: Any, iosim: Iosim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"^\s*(?:Example: )?iosim (.*)$", command.help, re.MULTILINE)
    assert len(examples) >= 2
    for example in examples:
        answer = iosim(*example.split())
        assert (answer.code, answer.err) == (0, ""), example
