"""`iosim serve` and `iosim run --lengths`: forms, options and bad input."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import click
import jsonschema
import pytest

from iosim.cli import cli
from iosim.cli.group import TAKE_LENGTHS
from iosim.study.sweep.grid import read_grids
from tests.conftest import Iosim
from tests.model_configs import CONFIGS, written

SCHEMA = json.loads(files("iosim").joinpath("data/report.schema.json").read_text())
SHAPE = ("-d", "64", "-H", "4", "--kv-heads", "2")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Twelve steps of three requests that decode, one with a chunk of a prompt."""
    lines = [{"step": n, "context": c + n} for n in range(12) for c in (100, 700, 1500)]
    lines.append({"step": 12, "context": 0, "new": 256})
    place = tmp_path / "trace.jsonl"
    place.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(place)


def test_a_trace_in_all_forms(iosim: Iosim, trace: str) -> None:
    shown, document, lines = (iosim("serve", trace, *SHAPE, *form) for form in ((), ("--json",), ("--csv",)))
    assert (shown.code, shown.err) == (document.code, document.err) == (lines.code, lines.err) == (0, "")
    assert max(map(len, shown.out.splitlines())) <= 80
    for words in ("Attention only: no projections, no MLP", "Not validated", "The slowest steps"):
        assert words in shown.out
    found = json.loads(document.out)
    jsonschema.validate(found, SCHEMA)
    assert sum(row["tokens"] for row in found["tables"]["bounds"]["rows"]) == 36 + 256
    rows = list(csv.DictReader(io.StringIO(lines.out)))
    assert [int(row["step"]) for row in rows] == list(range(13))
    assert int(rows[0]["kv_bytes"]) == 2 * 2 * 64 * 2 * (101 + 701 + 1501)


def test_the_layers_of_a_model(iosim: Iosim, trace: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS["gpt2"]))
    shown = iosim("serve", trace, "--config", str(config))
    assert (shown.code, shown.err) == (0, "")
    assert "12 full layers; 12 heads, d 64" in shown.out


def test_sequences_of_their_own_lengths(iosim: Iosim) -> None:
    args = ("run", "--lengths", "128,300,1:700,1:700", *SHAPE, "--causal")
    shown, document = iosim(*args), iosim(*args, "--json", "--no-check")
    assert (shown.code, shown.err) == (document.code, document.err) == (0, "")
    assert max(map(len, shown.out.splitlines())) <= 80
    assert "Numbers of all 3 classes of sequences are within their bounds" in shown.out
    found = json.loads(document.out)
    jsonschema.validate(found, SCHEMA)
    packed, padded = found["tables"]["packed"]["rows"]
    assert (packed["query_rows"], packed["key_rows"]) == (128 + 300 + 2, 128 + 300 + 1400)
    assert (padded["query_rows"], padded["key_rows"]) == (4 * 300, 4 * 700)


def test_lengths_with_the_shape_of_a_model(iosim: Iosim, tmp_path: Path) -> None:
    """A model's file stands for the options that it gives, its window too where a sequence is longer; in decode too."""
    config = written(tmp_path, "mistral-7b", num_attention_heads=4, num_key_value_heads=2, head_dim=64,
                     sliding_window=256, num_hidden_layers=3)  # fmt: skip
    rest = ("--lengths", "40,1:300,3:500", "--no-check", "--json")
    plain = json.loads(iosim("run", *SHAPE, "--dtype", "bf16", "--causal", "--window", "256", *rest).out)
    for phase in ("prefill", "decode"):
        made = iosim("run", "--config", config, "--phase", phase, *rest)
        assert (made.code, f"3 sliding-window (256) layers; {phase} of sequences" in made.err) == (0, True)
        found = json.loads(made.out)
        assert (found["tables"], found["subject"]) == (plain["tables"], plain["subject"])
        assert (found["request"]["heads"], found["request"]["phase"]) == (4, phase)
    varied = iosim("whatif", "--config", config, "--lengths", "40,1:200", "--vary", "block_k=32", "--json")
    problem = json.loads(varied.out)["problem"]
    assert (problem["heads"], problem["window"], problem["lengths"]) == (4, None, [[40, 40], [1, 200]])
    latent = written(tmp_path, "deepseek-v3")
    for phase, words in (("training", "--phase: training is not taken with"), ("decode", "--phase: decode from a")):
        refused = iosim("run", "--config", latent, "--phase", phase, "--lengths", "1:64")
        assert (refused.code, refused.out, words in refused.err) == (2, "", True)


@pytest.mark.parametrize(("report", "key"), [("memory", "bytes"), ("io", "asked_bytes")])
def test_reports_of_lengths_by_tensor(iosim: Iosim, tmp_path: Path, report: str, key: str) -> None:
    """In all forms; queries are those of the lengths, which blocks read once, packed or padded."""
    args = ("report", report, "--lengths", "40,1:300,1:300", *SHAPE, "--causal", "--page", "64")
    place = tmp_path / "bars.svg"
    shown, document = iosim(*args, "--plot", str(place)), iosim(*args, "--json")
    lines = iosim(*args, "--csv")
    assert (shown.code, shown.err) == (document.code, document.err) == (lines.code, lines.err) == (0, "")
    assert max(map(len, shown.out.splitlines())) <= 80
    assert "<title>flash2, Q" in place.read_text()
    found = json.loads(document.out)
    jsonschema.validate(found, SCHEMA)
    rows = found["tables"]["packed"]["rows"]
    assert len(list(csv.DictReader(io.StringIO(lines.out)))) == len(rows)
    q = next(row for row in rows if (row["dataflow"], row["tensor"]) == ("flash2", "Q"))
    assert (q[f"packed_{key}"], q[f"padded_{key}"]) == (42 * 4 * 64 * 2, 3 * 40 * 4 * 64 * 2)
    assert (found["request"]["lengths"], found["request"]["page"]) == ([[40, 40], [1, 300], [1, 300]], 64)


def of_problems(group: click.Group, before: str = "") -> Iterator[tuple[str, set[str | None]]]:
    """Commands that take the length of a problem or lengths, and the names of their options."""
    for name in group.list_commands(click.Context(group)):
        found = group.get_command(click.Context(group), name)
        if isinstance(found, click.Group):
            yield from of_problems(found, f"{before}{name} ")
        elif found is not None and (names := {p.name for p in found.params}) & {"n_q", "lengths"}:
            yield before + name, names


def test_commands_of_one_length_say_who_takes_several(iosim: Iosim, problem: str) -> None:
    commands = dict(of_problems(cli))
    assert {name for name, options in commands.items() if "page" in options} == set(TAKE_LENGTHS)
    others = sorted(set(commands) - set(TAKE_LENGTHS))
    assert {"explain", "sensitivity", "report trend"} <= set(others)
    for name in others:
        refused = iosim(*name.split(), "--lengths", "4,5")
        assert (refused.code, refused.out) == (2, "")
        assert refused.err.startswith(f"iosim {name}: --lengths is not taken, as sequences have one length here; run, ")
    refused = iosim("explain", "--problem", problem)
    assert (refused.code, "page is not taken by iosim explain; run, whatif, " in refused.err) == (2, True)


@pytest.fixture
def problem(tmp_path: Path) -> str:
    """A batch with a cache in int8, as a file."""
    place = tmp_path / "problem.toml"
    place.write_text(
        'schema = "iosim.problem/1"\nd = 64\nheads = 4\nkv_heads = 2\ncausal = true\npage = 32\n'
        'lengths = [40, "1:300", "5:200"]\ncache_dtype = "int8"\ncache-scales = "head"\n'
    )
    return str(place)


def test_one_file_of_a_problem_for_every_command(iosim: Iosim, problem: str, tmp_path: Path) -> None:
    """The same lengths, pages and cache in run, whatif, sweep and tune; an option wins over the file."""
    shown = iosim("run", "--problem", problem, "--dataflow", "split-kv", "--page", "64")
    assert (shown.code, shown.err) == (0, "")
    assert max(map(len, shown.out.splitlines())) <= 80
    for words in ("A page of 64 tokens holds", "The cache is in int8", "Numbers of all 3 classes"):
        assert words in " ".join(shown.out.split())
    varied = iosim("whatif", "--problem", problem, "--vary", "pack_gqa=yes,no", "--vary", "cache_dtype=fp8", "--json")
    assert (varied.code, varied.err) == (0, "")
    rows = json.loads(varied.out)
    jsonschema.validate(rows, json.loads(files("iosim").joinpath("data/whatif.schema.json").read_text()))
    assert rows["problem"]["lengths"] == [[40, 40], [1, 300], [5, 200]]
    packed, alone = (row["hbm_bytes"] for row in rows["rows"])
    assert packed < alone
    few = ("--block-q", "16,32", "--block-k", "32", "--groups", "1", "--stages", "2")
    tuned = iosim("tune", "--problem", problem, *few, "--json")
    assert (tuned.code, tuned.err) == (0, "")
    found = json.loads(tuned.out)
    jsonschema.validate(found, json.loads(files("iosim").joinpath("data/tune.schema.json").read_text()))
    assert found["problem"]["page"] == 32
    store = str(tmp_path / "s.db")
    swept = iosim("sweep", "--problem", problem, "--vary", "page=16,64", "--store", store, "--workers", "0", "--json")
    assert swept.code == 0
    made = json.loads(swept.out)
    jsonschema.validate(made, json.loads(files("iosim").joinpath("data/sweep.schema.json").read_text()))
    assert [c["inputs"]["problem"]["page"] for c in made["configurations"]] == [16, 64]
    assert all(c["error"] is None for c in made["configurations"])
    assert "3 sequences" in iosim("pareto", store).out


def test_a_grid_of_lengths_in_a_file(iosim: Iosim, tmp_path: Path) -> None:
    place = tmp_path / "grid.toml"
    place.write_text(
        'schema = "iosim.sweep/1"\n[[grid]]\nd = 64\nlengths = [64, "1:100"]\ncache_dtype = ["fp8", "int8"]\n'
    )
    made = iosim("sweep", str(place), "--store", str(tmp_path / "s.db"), "--workers", "0", "--csv")
    rows = list(csv.DictReader(io.StringIO(made.out)))
    assert [(row["lengths"], row["cache_dtype"], row["error"]) for row in rows] == [
        ("64:64,1:100", "fp8_e4m3", ""),
        ("64:64,1:100", "int8", ""),
    ]


@pytest.mark.parametrize(
    ("lengths", "batches"),
    [
        ('["1:64", "1:99"]', ["1:64,1:99"]),  # a list of sequences, as in a file of a problem
        ('["1:64,1:99", "2:8"]', ["1:64,1:99", "2:8"]),
        ('[[64, "1:100"], [8]]', ["64:64,1:100", "8:8"]),
    ],
)
def test_a_list_of_batches_is_an_axis(tmp_path: Path, lengths: str, batches: list[str]) -> None:
    place = tmp_path / "grid.toml"
    place.write_text(f'schema = "iosim.sweep/1"\n[[grid]]\nd = 64\nlengths = {lengths}\n')
    made = [grid.batch for grid in read_grids(str(place))]
    assert [",".join(f"{s.q}:{s.k}" for s in batch.sequences) for batch in made if batch] == batches


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("n = 64\nlengths = [4]", "grid.toml: grid 1: n: is not varied beside lengths"),
        ("n = 64\npage = 16", "grid 1: page: changes nothing without lengths"),
        ('lengths = ["4,8", "4:4,8:8"]', "grid 1: lengths: '4:4,8:8' is given twice"),
    ],
)
def test_a_grid_that_cannot_be_is_refused_before_it_runs(
    iosim: Iosim, tmp_path: Path, table: str, message: str
) -> None:
    place = tmp_path / "grid.toml"
    place.write_text(f'schema = "iosim.sweep/1"\n[[grid]]\nd = 64\n{table}\n')
    answer = iosim("sweep", str(place), "--store", str(tmp_path / "s.db"))
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert message in answer.err
    assert not (tmp_path / "s.db").exists()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("d = 64", 'needs schema = "iosim.problem/1"'),
        ('schema = "iosim.problem/1"\nhaeds = 4', "'haeds' is no field of a problem (did you mean 'heads'?)"),
        ('schema = "iosim.problem/1"\nheads = [4]', "heads: [4] is not a value"),
        ('schema = "iosim.problem/1"\nlengths = [4]', "lengths is not taken by iosim show"),
        ('schema = "iosim.problem/1"\nheads = "many"', "problem.toml: heads: 'many' is not a whole number"),
        ('schema = "iosim.problem/1"\nheads = 2.7', "problem.toml: heads: 2.7 is not a whole number"),
        ('schema = "iosim.problem/1"\nheads = true', "problem.toml: heads: true is not a whole number"),
        ('schema = "iosim.problem/1"\ncausal = 1', "problem.toml: causal: 1 is not true or false"),
        ('schema = "iosim.problem/1"\nsinks = "yes"', "problem.toml: sinks: 'yes' is not true or false"),
        ('schema = "iosim.problem/1"\nsoftcap = false', "problem.toml: softcap: false is not a number"),
        (f'schema = "iosim.problem/1"\nsoftcap = 0x{"f" * 9999}', "softcap: is a whole number of more than 63 bits"),
        ('schema = "iosim.problem/1"\ndtype = 16', "problem.toml: dtype: 16 is not a text in quotes"),
    ],
)
def test_a_wrong_file_of_a_problem(iosim: Iosim, tmp_path: Path, text: str, message: str) -> None:
    place = tmp_path / "problem.toml"
    place.write_text(text + "\n")
    answer = iosim("show", "flash2", "--problem", str(place), "-n", "64", "-d", "64")
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert message in answer.err


def test_a_file_of_a_problem_may_have_one_number_for_a_list(iosim: Iosim, tmp_path: Path) -> None:
    place = tmp_path / "problem.toml"
    place.write_text('schema = "iosim.problem/1"\nlengths = 40\nd = 64\nsoftcap = 30\ncausal = false\n')
    from_file, from_options = (
        iosim("run", *given, "--no-check", "--csv")
        for given in (("--problem", str(place)), ("--lengths", "40", "-d", "64", "--softcap", "30"))
    )
    assert (from_file.code, from_file.out) == (0, from_options.out)


def test_requests_as_they_arrive(iosim: Iosim, tmp_path: Path) -> None:
    place = tmp_path / "arrivals.jsonl"
    asked = [(0.0, 300, 3), (0.0, 40, 2), (1.0, 500, 1)]
    place.write_text("".join(json.dumps(dict(zip(("arrival", "prompt", "output"), r, strict=True))) + "\n"
                             for r in asked))  # fmt: skip
    args = ("serve", str(place), *SHAPE, "--step-tokens", "256")
    shown, document, lines = (iosim(*args, *form) for form in ((), ("--json",), ("--csv",)))
    assert (shown.code, shown.err) == (document.code, document.err) == (lines.code, lines.err) == (0, "")
    assert max(len(line) for line in shown.out.splitlines() if str(tmp_path) not in line) <= 80
    assert "At most 2 requests run at one time, and no request ever waits for room" in " ".join(shown.out.split())
    found = json.loads(document.out)
    jsonschema.validate(found, SCHEMA)
    assert sum(row["tokens"] for row in found["tables"]["bounds"]["rows"]) == 300 + 2 + 40 + 1 + 500
    rows = list(csv.DictReader(io.StringIO(lines.out)))
    assert [(row["prompt"], float(row["waited_s"])) for row in rows] == [("40", 0), ("300", 0), ("500", 0)]
    wrong = iosim("serve", str(place), *SHAPE, "--reserve", "85.8993")
    assert (wrong.code, "and there is room for" in wrong.err) == (2, True)


def test_options_of_arrivals_need_arrivals(iosim: Iosim, trace: str) -> None:
    answer = iosim("serve", trace, *SHAPE, "--beside", "10")
    assert (answer.code, answer.err) == (2, "iosim: --beside: changes nothing without arrival times in the trace\n")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("run", "--lengths", "4,x", "-d", "64"), "--lengths: '4,x' is neither like 512,4096,1:777 nor a file"),
        (("run", "--lengths", "0", "-d", "64"), "--lengths: '0' is not a length from 1 to 16777216"),
        (("run", "--lengths", "4", "-d", "64", "-b", "2"), "--batch: is not taken with --lengths"),
        (("run", "--lengths", "4"), "Missing option '--d'"),
        (
            ("run", "--lengths", "4", "-d", "64", "--dataflow", "standard"),
            "--dataflow: 'standard' is not one of flash2",
        ),
        (("report", "io", "--lengths", "4", "-n", "5"), "--n: is not taken with --lengths"),
        (("report", "memory", "--lengths", "4", "-b", "2"), "--batch: is not taken with --lengths"),
        (("report", "memory", "--page", "16"), "--page: changes nothing without --lengths"),
        (("report", "io", "--lengths", "4", "--dataflow", "standard"), "--dataflow: 'standard' is not one of flash2"),
        (("serve", "none.jsonl"), "none.jsonl: cannot be read"),
        (
            ("report", "serving", "--context", "64", "--shared-prefix", "65"),
            "--shared-prefix: 65 tokens are more than the longest sequence, 64",
        ),
        (("report", "serving", "--context", "0,1024"), "--context: 0 is out of range; it is at least 1"),
        (("report", "serving", "--page", "0"), "--page: 0 is out of range; 1 to 4096 is allowed"),
        (("report", "serving", "--split-rule", "balance"), "(did you mean 'balanced'?)"),
        (("report", "serving", "--cache-dtype", "int4"), "--cache-dtype: 'int4' is not fp8 or int8"),
        (("run", "-n", "64", "-d", "64", "--page", "16"), "--page: changes nothing without --lengths"),
        (("whatif", "-n", "64", "-d", "64", "--vary", "page=16"), "page: changes nothing without lengths"),
        (("whatif", "--lengths", "4", "-d", "64", "--vary", "n=16"), "n: is not varied beside lengths"),
        (("sweep", "--lengths", "4", "-d", "64", "--vary", "n=16"), "--vary: n: is not varied beside lengths"),
        (("tune", "--lengths", "4", "-d", "64", "--kernel", "triton"), "--kernel: is not taken with --lengths"),
        (("whatif", "--lengths", "4", "-d", "64", "--energy", "--vary", "stages=1"), "--energy: is not estimated for"),
        (("run", "--lengths", "4,1:64", "-d", "64", "--shared-prefix", "65"), "--shared-prefix: 65 tokens are more"),
        (("run", "--problem", "none.toml"), "--problem: none.toml: cannot be read: No such file or directory"),
        (("report", "serving", "--layers", "full"), "--layers: changes nothing without --config"),
        (("report", "serving", "--heads", "5", "--kv-heads", "2"), "--heads: 5 is not a multiple of kv_heads (2)"),
    ],
)
def test_bad_input_is_one_line(iosim: Iosim, args: tuple[str, ...], message: str) -> None:
    answer = iosim(*args)
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err
    assert "Traceback" not in answer.err
