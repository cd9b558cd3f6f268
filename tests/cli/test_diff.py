"""`iosim diff`: what is shown of two results, and files of strangers."""

from __future__ import annotations

import copy
import csv
import io
import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from iosim.study.diff import MOST_BYTES, SHAPES, diff
from tests.conftest import Iosim

SCHEMA = json.loads(files("iosim").joinpath("data/diff.schema.json").read_text())
RUN = ("run", "-n", "256", "-d", "64", "--no-check", "--json")

Put = Callable[[str, Any], str]


@pytest.fixture
def put(tmp_path: Path) -> Put:
    """Write a file; returns its path."""

    def write(name: str, data: Any) -> str:
        path = tmp_path / name
        path.write_text(data if isinstance(data, str) else json.dumps(data))
        return str(path)

    return write


@pytest.fixture(scope="module")
def result() -> dict[str, Any]:
    from iosim.problem import Attention
    from iosim.report.document import document
    from iosim.study.run import compare

    made = document(compare(Attention(n_q=256, d=64), check=False), {"seed": 0})
    return json.loads(json.dumps(made))


def changed(result: dict[str, Any], change: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    made = copy.deepcopy(result)
    change(made)
    return made


def test_the_same_has_no_difference(iosim: Iosim, put: Put, result: dict[str, Any]) -> None:
    a, b = put("a.json", result), put("b.json", result)
    answer = iosim("diff", a, b, "--exit-code")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.split()[:3] == ["No", "difference", "between"]
    assert json.loads(iosim("diff", a, b, "--json").out)["same"] is True
    assert iosim("diff", a, b, "--csv").out == "entry,group,name,a,b,ratio\n"


def test_real_runs_side_by_side(iosim: Iosim, tmp_path: Path) -> None:
    """Twice as many heads move twice the bytes; the tile is given, so that it is the same in both."""
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    tile = ("--block-q", "64", "--block-k", "64", "--dataflow", "flash2")
    assert iosim(*RUN, *tile, "-o", a).code == iosim(*RUN, *tile, "-H", "2", "-o", b).code == 0
    answer = iosim("diff", a, b)
    assert answer.code == 0
    assert max(map(len, answer.out.splitlines())) <= 80
    for words in ("mp31 flash2: ", "problem.heads", "traffic.hbm_read_bytes", "2.00x", "time.seconds"):
        assert words in answer.out
    found = json.loads(iosim("diff", a, b, "--json").out)
    jsonschema.validate(found, SCHEMA)
    changes = {c["name"]: c for c in found["changes"]}
    assert (changes["problem.heads"]["group"], changes["problem.heads"]["b"]) == ("inputs", 2)
    assert (changes["traffic.hbm_read_bytes"]["group"], changes["traffic.hbm_read_bytes"]["ratio"]) == ("bytes", 2)
    assert not any(name.startswith("schedule") for name in changes)
    rows = list(csv.DictReader(io.StringIO(iosim("diff", a, b, "--csv").out)))
    assert len(rows) == len(found["changes"])
    assert iosim("diff", a, b, "--exit-code").code == 1


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda r: r["provenance"].update(iosim="9"), ("", "inputs", "provenance.iosim", "9")),
        (
            lambda r: r["provenance"]["profile_hash"].update(mp31="f" * 64),
            ("", "inputs", "provenance.profile_hash.mp31", "f" * 64),
        ),
        (lambda r: r.update({"pass": "backward"}), ("", "inputs", "pass", "backward")),
        (lambda r: r["request"].update(seed=3), ("", "inputs", "seed", 3)),
        (
            lambda r: r["runs"][1]["schedule"].update(stages=[2, 1]),
            ("mp31 flash2", "inputs", "schedule.stages", "[2, 1]"),
        ),
        (lambda r: r["runs"][1]["time"].update(bound="sram"), ("mp31 flash2", "bottleneck", "time.bound", "sram")),
        (
            lambda r: r["runs"][0]["units"]["matrix"]["stalls_ps"].update(barrier=10**15),
            ("mp31 standard", "bottleneck", "largest stall", "barrier"),
        ),
        (lambda r: r["runs"][0]["check"].update(status="failed"), ("mp31 standard", "check", "check.status", "failed")),
        (lambda r: r["runs"][0]["memory"].update(fits=False), ("mp31 standard", "bytes", "memory.fits", False)),
        (
            lambda r: r["runs"][0]["kernels"][2].update(makespan_ps=5),
            ("mp31 standard", "time", "kernels.output.makespan_ps", 5),
        ),
    ],
)  # fmt: skip
def test_one_value_that_differs_is_found_in_its_group(
    put: Put, result: dict[str, Any], change: Callable[[dict[str, Any]], object], expected: tuple[Any, ...]
) -> None:
    found = diff(put("a.json", result), put("b.json", changed(result, change)))
    assert expected in [(c.entry, c.group, c.name, c.b) for c in found.changes]
    assert len(found.changes) <= 2  # a stall is shown by its number as well


def test_the_order_of_runs_does_not_matter_and_partners_are_named(put: Put, result: dict[str, Any]) -> None:
    turned = changed(result, lambda r: r["runs"].reverse())
    assert diff(put("a.json", result), put("b.json", turned)).same
    turned["runs"][0]["dataflow"] = "flash1"
    found = diff(put("a.json", result), put("b.json", turned))
    assert (found.only_a, found.only_b, found.compared) == (("mp31 flash2",), ("mp31 flash1",), 1)
    assert not found.same


def test_a_machine_that_only_one_has_is_no_list_of_its_numbers(put: Put, result: dict[str, Any]) -> None:
    other = changed(result, lambda r: r["hardware"].update(b200=dict(r["hardware"]["mp31"])))
    assert diff(put("a.json", result), put("b.json", other)).same


def test_other_kinds_of_results(iosim: Iosim, tmp_path: Path) -> None:
    a, b = str(tmp_path / "a.json"), str(tmp_path / "b.json")
    small = ("check", "-n", "256", "-d", "64", "--hw", "mp22", "--json")
    iosim(*small, "-o", a)
    iosim(*small, "--stages", "1", "-o", b)
    found = diff(a, b)
    assert ("double buffered", "check", "status", "pass", "warn") in [
        (c.entry, c.group, c.name, c.a, c.b) for c in found.changes
    ]
    assert {c.name for c in found.changes if not c.entry} >= {"schedule.stages"}
    assert "double buffered" in iosim("diff", a, b).out
    assert set(SHAPES) == set(SCHEMA["properties"]["of"]["enum"])


BAD = {
    "no JSON": ("{", "not valid JSON: Expecting property name"),
    "no result": ("[1]", "is no JSON result of iosim's: it has no schema"),
    "no schema": ("{}", "it has no schema"),
    "other schema": ('{"schema": "iosim.rnu/1"}', "its schema is iosim.rnu/1; compared are iosim.run/1"),
    "other kind": ('{"schema": "iosim.check/1", "checks": []}', "results of one kind are compared"),
    "no runs": ('{"schema": "iosim.run/1"}', "runs is not a list"),
    "runs are numbers": ('{"schema": "iosim.run/1", "runs": [1]}', "runs[0] is not an object"),
    "no machine": ('{"schema": "iosim.run/1", "runs": [{"hardware": 1}]}', "runs[0].hardware is not a text"),
    "twice": (
        '{"schema": "iosim.run/1", "runs": [{"hardware": "a", "dataflow": "b"}, {"hardware": "a", "dataflow": "b"}]}',
        "runs[1]: a b is there twice",
    ),
    "key twice": ('{"schema": "iosim.run/1", "schema": "x"}', "the key 'schema' is there twice"),
    "NaN": ('{"schema": "iosim.run/1", "x": NaN}', "NaN is no number of JSON"),
    "deep": ("[" * 100_000, "nested too deeply"),
    "digits": ('{"schema": ' + "9" * 5000 + "}", "not valid JSON: Exceeds the limit"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_files_are_refused_in_one_line(iosim: Iosim, put: Put, result: dict[str, Any], case: str) -> None:
    text, words = BAD[case]
    good, bad = put("good.json", result), put("bad.json", text)
    for args in ((good, bad), (bad, good)):
        answer = iosim("diff", *args)
        assert (answer.code, answer.out) == (2, "")
        assert answer.err.count("\n") == 1
        assert words in answer.err
        assert len(answer.err) < 600


def test_no_plain_file_and_no_text(iosim: Iosim, put: Put, result: dict[str, Any], tmp_path: Path) -> None:
    good = put("good.json", result)
    (tmp_path / "binary").write_bytes(b"\xff\xfe{}")
    for path, words in (
        (str(tmp_path), "is a directory"),
        ("/dev/zero", "is not a regular file"),
        (str(tmp_path / "no.json"), "cannot be read: No such file"),
        (str(tmp_path / "binary"), "not UTF-8 at byte 0"),
    ):
        answer = iosim("diff", good, path)
        assert (answer.code, answer.err.count("\n")) == (2, 1)
        assert words in answer.err


def test_a_large_file_is_not_read(iosim: Iosim, tmp_path: Path) -> None:
    with open(tmp_path / "large.json", "wb") as file:
        file.truncate(MOST_BYTES + 1)
    assert "16777217 bytes; a result has at most 16777216" in iosim("diff", str(tmp_path / "large.json"), "x.json").err


def test_a_stranger_s_text_changes_no_terminal(iosim: Iosim, put: Put) -> None:
    """No control characters, no markup of rich, no line that is too long, no number that cannot be printed."""

    def made(name: str, value: object) -> str:
        run = {
            "hardware": "\x1b[31m[red]" + "m" * 90,
            "dataflow": "[/x]\n",
            "time": {"seconds": 1e300, "y" * 99: value},
        }
        return put(name, {"schema": "iosim.run/1", "runs": [run], "problem": {"[bold]": value}})

    a, b = made("a.json", 10**400), made("b.json", "\x07" * 200)
    c = put("c.json", Path(a).read_text().replace("1e+300", "1e-300"))
    for pair in ((a, b), (a, c)):
        answer = iosim("diff", *pair)
        assert (answer.code, answer.err) == (0, "")
        assert answer.out.replace("\n", "").isprintable()
        assert max(map(len, answer.out.splitlines())) <= 80 or str(Path(a).parent) in answer.out
        found = iosim("diff", *pair, "--json")
        jsonschema.validate(json.loads(found.out), SCHEMA)
    assert "[bold]" in iosim("diff", a, b).out
