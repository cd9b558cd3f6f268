"""`iosim precision`: the table, the JSON contract, CSV, and bad input."""

from __future__ import annotations

import csv
import io
import json
from importlib.resources import files

import jsonschema
import pytest

from tests.conftest import Iosim

SMALL = ("precision", "-n", "256", "-d", "32", "--queries", "128")
SCHEMA = json.loads(files("iosim").joinpath("data/precision.schema.json").read_text())


def test_the_table_fits_80_columns_and_has_the_papers_figures(iosim: Iosim) -> None:
    answer = iosim("precision", "--queries", "2", "--dtype", "fp8", "--dataflow", "flash2", "--dataflow", "flash3")
    assert answer.code == 0
    assert answer.err == ""
    assert max(map(len, answer.out.splitlines())) <= 80
    assert {"paper", "ratio"} < set(answer.out.split())
    row = next(line.split() for line in answer.out.splitlines() if line.startswith("flash2/3 fp8") and "9.1e-3" in line)
    assert row[:5] == ["flash2/3", "fp8", "fp32", "block", "yes"]


def test_another_shape_is_not_held_against_the_paper(iosim: Iosim) -> None:
    answer = iosim(*SMALL)
    assert (answer.code, answer.err) == (0, "")
    assert max(map(len, answer.out.splitlines())) <= 80
    assert "ratio" not in answer.out
    assert "stand beside ours only at N 8,192 and d 128" in " ".join(answer.out.split())
    rows = json.loads(iosim(*SMALL, "--json").out)["rows"]
    assert {(row["paper_rmse"], row["paper_ratio"]) for row in rows} == {(None, None)}


@pytest.mark.slow
def test_json_follows_its_schema_and_does_not_change(iosim: Iosim) -> None:
    answers = [iosim(*SMALL, "--json", "--seeds", "2") for _ in range(2)]
    assert answers[0].out == answers[1].out
    document = json.loads(answers[0].out)
    jsonschema.validate(document, SCHEMA)
    assert document["problem"] == {"n": 256, "d": 32, "queries": 128, "seed": 0, "seeds": 2, "block_rows": 128}
    assert {row["dtype"] for row in document["rows"]} == {"fp16", "bf16", "fp8_e4m3"}


def test_csv_is_the_same_rows(iosim: Iosim) -> None:
    args = (*SMALL, "--dataflow", "flash3", "--dtype", "fp8", "--accumulator", "fp32")
    rows = list(csv.DictReader(io.StringIO(iosim(*args, "--csv").out)))
    wanted = json.loads(iosim(*args, "--json").out)["rows"]
    assert [float(r["outliers_rmse"]) for r in rows] == [r["outliers_rmse"] for r in wanted]
    assert [(r["scales"], r["incoherent"]) for r in rows] == [
        (scales, on) for scales in ("block", "head") for on in ("False", "True")
    ]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--json", "--csv"), "--json and --csv: give one of them"),
        (("--n", "0"), "iosim: --n: 0 is out of range"),
        (("--dtype", "fp32x"), "iosim: --dtype: 'fp32x' is not one of"),
        (("--seeds", "0"), "iosim: --seeds: 0 is out of range"),
        (("--dataflow", "softmax-safe"), "softmax-safe is softmax; only the O of forward dataflows is compared"),
    ],
)
def test_bad_input_is_one_line(iosim: Iosim, args: tuple[str, ...], message: str) -> None:
    answer = iosim(*SMALL, *args)
    assert answer.code == 2
    assert message in answer.err
    assert len(answer.err.splitlines()) == 1


def test_run_says_in_one_line_why_a_machine_cannot_do_fp8(iosim: Iosim) -> None:
    answer = iosim("run", "-n", "512", "-d", "64", "--dtype", "fp8", "--dataflow", "flash3", "--hw", "a100-sxm-80gb")
    assert answer.code == 2
    assert answer.err == "iosim: --dtype: a100-sxm-80gb has no matrix rate for fp8_e4m3; it takes fp16, bf16, fp32\n"


@pytest.mark.parametrize("option", [("--dtype", "fp8"), ("--accumulator", "fp16")])
def test_run_checks_the_formats(iosim: Iosim, option: tuple[str, str]) -> None:
    answer = iosim("run", "-n", "512", "-d", "64", *option, "--dataflow", "flash3", "--hw", "h200-sxm", "--json")
    document = json.loads(answer.out)
    jsonschema.validate(document, json.loads(files("iosim").joinpath("data/run.schema.json").read_text()))
    assert document["runs"][0]["check"]["status"] == "passed"
    assert document["problem"]["dtype" if option[0] == "--dtype" else "accumulator"] in ("fp8_e4m3", "fp16")
