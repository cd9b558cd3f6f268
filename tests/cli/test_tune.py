"""`iosim tune`: the tables, the JSON contract, CSV, what it emits, and bad input."""

from __future__ import annotations

import ast
import csv
import io
import json
from importlib.resources import files

import jsonschema
import pytest

import iosim as package
from tests.conftest import Iosim

SMALL = ("tune", "-n", "256", "-d", "64", "--block-q", "64", "--block-k", "32,64", "--groups", "1")
SCHEMA = json.loads(files("iosim").joinpath("data/tune.schema.json").read_text())


def test_the_answer_comes_first_and_fits_80_columns(iosim: Iosim) -> None:
    answer = iosim(*SMALL, "--stages", "1", "--stages", "2,1")
    assert (answer.code, answer.err) == (0, "")
    assert max(map(len, answer.out.splitlines())) <= 80
    best = next(line for line in answer.out.splitlines() if line.startswith("Best for flash2: 64 x "))
    assert answer.out.index(best) < answer.out.index("busiest")
    text = " ".join(answer.out.split())
    assert "Best for each number of stages:" in text
    assert "12 candidates: the machine's rules remove 8" in text  # p or q in registers, from which SQMMA cannot read
    assert "Against the next (64 x " in text
    assert "Against the default (" in text


def test_switches_of_an_order_have_a_column(iosim: Iosim) -> None:
    answer = iosim(*SMALL, "--dataflow", "flash3", "--stages", "2")
    assert (answer.code, answer.err) == (0, "")
    assert max(map(len, answer.out.splitlines())) <= 80
    assert " PTO " in answer.out
    assert "P a producer" in answer.out


def test_every_column_fits_where_order_and_staging_are_searched(iosim: Iosim) -> None:
    """The H200's matrix unit takes P and Q from SRAM and from registers."""
    args = ("tune", "-n", "256", "-d", "64", "--hw", "h200-sxm", "--dataflow", "flash3", "--block-q", "128",
            "--block-k", "128", "--stages", "2,1", "--groups", "2")  # fmt: skip
    answer = iosim(*args)
    assert (answer.code, answer.err) == (0, "")
    assert max(map(len, answer.out.splitlines())) <= 80
    rows = [line.split() for line in answer.out.splitlines() if line.startswith("128 x 128")]
    assert len(rows) == 11  # ten, and one for two stages
    assert any("q:r" in row for row in rows)
    assert "q:r is q in registers" in " ".join(answer.out.split())


def test_json_follows_its_schema_and_does_not_change(iosim: Iosim) -> None:
    answers = [iosim(*SMALL, "--json", "--stages", "2", "--stages", "1,2") for _ in range(2)]
    assert answers[0].out == answers[1].out
    document = json.loads(answers[0].out)
    jsonschema.validate(document, SCHEMA)
    assert document["removed"] == {"staging": 8}
    assert document["considered"] == 8 + document["bounded"] + document["timed"]
    times = [c["time"]["makespan_ps"] for c in document["candidates"]]
    assert times == sorted(times)
    for c in document["candidates"]:  # busy time and stalls are all of the time of each unit
        for unit in c["units"].values():
            whole = unit["instances"] * c["time"]["makespan_ps"]
            assert unit["busy_ps"] + sum(unit["stalls_ps"].values()) == whole


def test_csv_has_the_same_candidates(iosim: Iosim) -> None:
    args = (*SMALL, "--stages", "2", "--stages", "2,1", "--top", "3")
    rows = list(csv.DictReader(io.StringIO(iosim(*args, "--csv").out)))
    wanted = json.loads(iosim(*args, "--json").out)["candidates"]
    assert [int(r["makespan_ps"]) for r in rows] == [c["time"]["makespan_ps"] for c in wanted]
    assert [int(r["rank"]) for r in rows] == [1, 2, 3]
    assert {r["stages"] for r in rows} <= {"2", "2,1"}


def test_emitted_schedules_are_what_run_takes(iosim: Iosim) -> None:
    emitted = json.loads(iosim(*SMALL, "--stages", "2,1", "--emit", "json").out)
    assert [s["stages"] for s in emitted] == [[2, 1], [2, 1]]
    run = package.run(package.Attention(n_q=256, d=64), schedule=emitted[0], check=False)
    assert (run.schedule.stages, run.schedule.block_q) == ((2, 1), 64)


def test_emitted_configs_are_a_list_of_tritons(iosim: Iosim) -> None:
    answer = iosim("tune", "-n", "1024", "-d", "64", "-H", "8", "--hw", "h200-sxm", "--kernel", "triton",
                   "--block-q", "64,128", "--block-k", "64", "--stages", "2", "--groups", "1,2", "--emit",
                   "triton")  # fmt: skip
    assert (answer.code, answer.err) == (0, "")
    (line,) = ast.parse(answer.out).body
    assert isinstance(line, ast.Assign)
    assert isinstance(line.value, ast.List)
    found = set()
    for call in line.value.elts:
        assert isinstance(call, ast.Call)
        assert ast.unparse(call.func) == "triton.Config"
        options = {k.arg: ast.literal_eval(k.value) for k in call.keywords}
        sizes = ast.literal_eval(call.args[0])
        found.add((sizes["BLOCK_M"], sizes["BLOCK_N"], options["num_warps"], options["num_stages"]))
    assert found == {(q, 64, warps, 2) for q in (64, 128) for warps in (4, 8)}


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("--block-q", "64,x"), "--block-q: '64,x' is not a list of whole numbers"),
        (("--stages", "1,2,3"), "--stages: '1,2,3' is not a whole number or two"),
        (("--margin", "1.5"), "--margin: 1.5 is not from 0 to below 1"),
        (("--top", "0"), "--top"),
        (("--emit", "tritom"), "did you mean 'triton'"),
        (("--emit", "json", "--csv"), "--emit, --json and --csv: give one of them"),
        (("--kernel", "triton", "--dataflow", "flash2"), "--dataflow and --kernel: give one of them"),
        (("--kernel", "triton"), "triton is of another machine"),
        (("--kernel", "tritn"), "did you mean 'triton'"),
        (("--dataflow", "softmax-online"), "no block_q and block_k to search"),
        (("--hw", "mp22"), "no time without"),
        (("--block-k", "20"), "the rules remove all"),
        (("--block-q", "96", "--emit", "triton"), "--block-q: Triton has no 96"),
    ],
)
def test_bad_input_is_one_line(iosim: Iosim, args: tuple[str, ...], message: str) -> None:
    answer = iosim("tune", "-n", "256", "-d", "64", *args)
    assert answer.code == 2
    assert answer.out == ""
    assert message in answer.err
    assert len(answer.err.splitlines()) == 1
