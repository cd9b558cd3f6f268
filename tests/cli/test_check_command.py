"""`iosim check`: the answer, its exit codes, JSON and CSV."""

from __future__ import annotations

import csv
import io
import json
from importlib.resources import files

import jsonschema
import pytest

from tests.conftest import Iosim

SCHEMA = json.loads(files("iosim").joinpath("data/check.schema.json").read_text())
SMALL = ("check", "-n", "256", "-d", "64")
GUIDE = ("check", "-n", "512", "-d", "128", "--block-q", "256", "--block-k", "128")


def test_the_answer_leads_and_fits_80_columns(iosim: Iosim) -> None:
    answer = iosim(*SMALL)
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("Check of flash2 on mp31 (")
    assert "0 fails" in " ".join(answer.out.split())[:120]
    assert max(map(len, answer.out.splitlines())) <= 80


def test_the_guide_s_tile_exits_with_1(iosim: Iosim) -> None:
    answer = iosim(*GUIDE)
    assert (answer.code, answer.err) == (1, "iosim: check of flash2 failed: SRAM\n")
    text = " ".join(answer.out.split())
    assert "192 of 192 KiB, 100 % below 90 %" in text
    assert text.count("= 192 KiB") == 2
    assert max(map(len, answer.out.splitlines())) <= 80
    found = json.loads(iosim(*GUIDE, "--stages", "2", "--json").out)
    jsonschema.validate(found, SCHEMA)
    assert (found["seconds"], found["counts"]["fail"], len(found["notes"])) == (None, 2, 4)


@pytest.mark.parametrize(
    ("args", "code"), [((), 0), (("--strict",), 1), (("--margin", "0.9"), 1), (("--margin", "0.9", "--strict"), 1)]
)
def test_exit_codes(iosim: Iosim, args: tuple[str, ...], code: int) -> None:
    """The small problem warns of its few blocks; with a margin of 0.9 no tile that runs is allowed."""
    assert iosim(*SMALL, *args).code == code


@pytest.mark.parametrize("args", [SMALL, (*SMALL, "--hw", "mp22")])
def test_json_follows_the_schema_and_csv_has_its_rows(iosim: Iosim, args: tuple[str, ...]) -> None:
    found = json.loads(iosim(*args, "--json").out)
    jsonschema.validate(found, SCHEMA)
    assert sum(found["counts"].values()) == len(found["checks"]) == 10
    rows = list(csv.DictReader(io.StringIO(iosim(*args, "--csv").out)))
    assert [row["status"] for row in rows] == [check["status"] for check in found["checks"]]
