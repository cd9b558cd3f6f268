"""`iosim run`: the table, the JSON contract, CSV, and files."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from time import sleep
from typing import Any

import jsonschema
import pytest

from iosim.problem import Attention
from iosim.study.run import Comparison, compare
from tests.conftest import Iosim

SMALL = ("run", "-n", "512", "-d", "64")
SCHEMA = json.loads(files("iosim").joinpath("data/run.schema.json").read_text())


def document(iosim: Iosim, *args: str) -> dict[str, Any]:
    answer = iosim(*args, "--json")
    assert answer.code == 0, answer.err
    assert answer.err == ""
    return json.loads(answer.out)


def test_the_main_job_fits_80_columns_and_says_what_it_compares(iosim: Iosim) -> None:
    answer = iosim("run", "--n", "4096", "--d", "128")
    assert answer.code == 0
    assert max(map(len, answer.out.splitlines())) <= 80
    for words in ("standard", "flash2", "extra memory", "67.1 MB", "HBM read", "DRAM", "of 192 KiB", "check", "passed"):
        assert words in answer.out
    assert "block_q 64 is the largest that fits and gives each of 56 MPs a block" in " ".join(answer.out.split())


@pytest.mark.parametrize(
    "args",
    [
        SMALL,
        (*SMALL, "--causal", "--lse", "-H", "4", "--kv-heads", "2", "-b", "2", "--dtype", "bf16", "--d-v", "32"),
        (*SMALL, "--n-k", "100", "--causal", "--causal-align", "top-left", "--hw", "mp31", "--hw", "a100-sxm-80gb"),
        (*SMALL, "--hw", "mp22", "--no-check"),
        ("run", "-n", "1", "-d", "8", "--dtype", "fp32", "--fidelity", "chip"),
        (*SMALL, "--dataflow", "flash1", "--dataflow", "split-kv", "--window", "100", "--splits", "3"),
        (*SMALL, "--dataflow", "standard-backward", "--dataflow", "flash-backward", "-H", "4", "--kv-heads", "2"),
        (*SMALL, "--dataflow", "softmax-safe", "--dataflow", "softmax-naive"),
        (*SMALL, "--pass", "training", "--hw", "mp31", "--hw", "mp22", "--no-check"),
        (*SMALL, "--pass", "training", "--hw", "h200-sxm", "--hw", "mp22", "--no-check", "--energy"),
    ],
)
def test_json_follows_the_shipped_schema(iosim: Iosim, args: tuple[str, ...]) -> None:
    found = document(iosim, *args)
    jsonschema.validate(found, SCHEMA)
    for run in found["runs"]:
        for unit in run["units"].values():
            span = unit["instances"] * run["time"]["makespan_ps"]
            assert unit["busy_ps"] + sum(unit["stalls_ps"].values()) == span


def test_the_interval_in_text_json_and_csv(iosim: Iosim) -> None:
    args = ("run", "-n", "64", "-d", "64", "--dataflow", "flash2", "--interval", "--no-check")
    found = document(iosim, *args)
    jsonschema.validate(found, SCHEMA)
    for run in found["runs"]:
        low, high = run["interval"]["low_seconds"], run["interval"]["high_seconds"]
        assert low < run["time"]["seconds"] == run["interval"]["expected_seconds"] < high
    text = " ".join(iosim(*args).out.split())
    for run in found["runs"]:
        assert f"Range of {run['dataflow']}: " in text
        assert f"most of it from {run['interval']['dominant'][0]} (" in text
    rows = list(csv.DictReader(io.StringIO(iosim(*args, "--csv").out)))
    assert [float(r["seconds_high"]) for r in rows] == [r["interval"]["high_seconds"] for r in found["runs"]]
    assert "interval" not in document(iosim, *SMALL, "--no-check")["runs"][0]


def test_the_schema_refuses_a_document_without_its_parts(iosim: Iosim) -> None:
    found = document(iosim, *SMALL, "--no-check")
    del found["runs"][0]["traffic"]["dram_read_bytes"]
    with pytest.raises(jsonschema.ValidationError, match="dram_read_bytes"):
        jsonschema.validate(found, SCHEMA)


def test_the_same_call_gives_the_same_bytes(iosim: Iosim) -> None:
    assert iosim(*SMALL, "--json").out == iosim(*SMALL, "--json").out


def test_bytes_of_the_main_job(iosim: Iosim) -> None:
    """N=4096, d=128, one head, fp16, on MP31 with 64 x 128 tiles; N*d elements are 1 MiB, N*N are 32 MiB."""
    runs = {r["dataflow"]: r for r in document(iosim, "run", "-n", "4096", "-d", "128", "--no-check")["runs"]}
    mib = 2**20
    flash, standard = runs["flash2"], runs["standard"]
    # Q once, K and V once for each of 4096/64 = 64 Q blocks; O once.
    assert flash["traffic"]["hbm_read_bytes"] == (1 + 64 * 2) * mib
    assert flash["traffic"]["hbm_write_bytes"] == mib
    assert flash["memory"]["extra_bytes"] == 0
    # Scores: Q for each of 32 key tiles, K for each of 64 query tiles.  Softmax: S once.  Output: P once, V 64 times.
    assert standard["traffic"]["hbm_read_bytes"] == (32 + 64 + 32 + 32 + 64) * mib
    assert standard["traffic"]["hbm_write_bytes"] == (32 + 32 + 1) * mib
    assert standard["memory"]["extra_bytes"] == 4 * 4096**2
    assert standard["traffic"]["paper_hbm_bytes"] == 2 * (4 * 4096**2 + 4 * 4096 * 128)
    # The L2 (60 MiB) holds what flash2 touches, 4 MiB, so each operand crosses DRAM once.
    assert flash["traffic"]["dram_read_bytes"] == 3 * mib
    assert flash["traffic"]["dram_write_bytes"] == mib


def test_a_machine_without_clock_has_no_time_but_bytes(iosim: Iosim) -> None:
    run = document(iosim, *SMALL, "--hw", "mp22", "--dataflow", "flash2", "--no-check")["runs"][0]
    assert run["time"]["seconds"] is None
    assert "processor.count" in run["time"]["reason"]
    assert run["traffic"]["hbm_read_bytes"] > 0
    assert "No time" in iosim(*SMALL, "--hw", "mp22", "--no-check").out


def test_what_does_not_fit_device_memory_is_an_answer(iosim: Iosim) -> None:
    """S and P of one head of 2^20 tokens are 2 * 2 * 2^40 B = 4.4 TB, MP31 has 80 GiB."""
    answer = iosim("run", "-n", "1048576", "-d", "64", "--dataflow", "standard", "--no-check", "--hw", "mp22")
    assert answer.code == 0
    assert "no, 4.4" in answer.out.replace("fits device memory", "")


def test_several_machines_make_one_table(iosim: Iosim) -> None:
    answer = iosim(*SMALL, "--hw", "mp31", "--hw", "h200-sxm", "--no-check")
    assert answer.code == 0
    assert max(map(len, answer.out.splitlines())) <= 80
    rows = [line for line in answer.out.splitlines() if line.startswith(("mp31 ", "h200-sxm "))]
    assert len(rows) == 4


def test_what_is_computed_and_its_flops(iosim: Iosim) -> None:
    """Forward 2 pairs (d + d_v), backward 2 pairs (3 d + 2 d_v) = 2.5 times as much; a softmax alone has none."""
    flops = {}
    for name, computes in (("flash2", "forward"), ("flash-backward", "backward"), ("softmax-safe", "softmax")):
        found = document(iosim, *SMALL, "--dataflow", name, "--no-check")
        assert found["pass"] == computes
        flops[computes] = found["runs"][0]["flops"]["convention"]
    assert flops == {"forward": 4 * 512**2 * 64, "backward": 10 * 512**2 * 64, "softmax": 0}
    answer = iosim(*SMALL, "--dataflow", "flash2", "--dataflow", "flash-backward")
    assert answer.code == 2
    assert "compute different things" in answer.err


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--scores fp32 --softmax naive --dataflow standard", "Schedule of standard: naive softmax, S and P in fp32"),
        ("--causal --grid-order longest-first", "Schedule of flash2: blocks longest-first; block_q"),
        ("--dataflow split-kv --splits 3", "Schedule of split-kv: keys in 3 splits; block_q"),
        ("--dataflow split-kv --splits 3 --hw mp31 --hw b200", "Schedule of split-kv: keys in 3 splits."),
        ("--lse", "fp16, log-sum-exp written"),
        ("--window 9", "fp16, window 9 (later keys are seen too; --causal hides them)"),
        ("--window 9 --causal", "fp16, causal, window 9 mp31:"),
    ],
)
def test_the_text_says_which_variant_ran(iosim: Iosim, args: str, words: str) -> None:
    assert words in " ".join(iosim(*SMALL, *args.split(), "--no-check").out.split())


def test_csv_has_a_row_a_run(iosim: Iosim) -> None:
    rows = list(csv.DictReader(io.StringIO(iosim(*SMALL, "--no-check", "--csv").out)))
    assert [r["dataflow"] for r in rows] == ["standard", "flash2"]
    assert int(rows[1]["hbm_write_bytes"]) == 512 * 64 * 2


def test_output_is_written_whole(iosim: Iosim, tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    assert iosim(*SMALL, "--no-check", "--json", "-o", str(path)).code == 0
    assert json.loads(path.read_text())["schema"] == "iosim.run/1"
    assert [p.name for p in tmp_path.iterdir()] == ["run.json"]


@pytest.mark.parametrize(
    ("command", "option"),
    [("run -n 64 -d 64", "--output"), ("precision", "--output"), ("validate", "--output"), ("validate", "--plot")],
)
def test_output_that_cannot_be_written_is_exit_3_before_the_work(
    iosim: Iosim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, option: str
) -> None:
    for work in ("run.compare", "precision.precision", "validate.validate"):
        monkeypatch.setattr(f"iosim.study.{work}", lambda *_, **__: pytest.fail("the work was done"))
    (tmp_path / "is.png").mkdir()
    for path, why in (("missing/x.png", "No such file or directory"), ("is.png", "Is a directory")):
        answer = iosim(*command.split(), option, str(tmp_path / path))
        assert (answer.code, answer.err) == (3, f"iosim: {option}: {tmp_path / path}: {why}\n")
    assert [p.name for p in tmp_path.iterdir()] == ["is.png"]


def test_output_keeps_what_is_no_plain_file(iosim: Iosim, tmp_path: Path) -> None:
    """A device is written to, a link is followed: neither is replaced by a file."""
    link, target = tmp_path / "link", tmp_path / "target"
    target.write_text("old")
    link.symlink_to(target)
    assert iosim(*SMALL, "--no-check", "-o", str(link), "--force").code == 0
    assert link.is_symlink()
    assert "flash2" in target.read_text()
    assert iosim(*SMALL, "--no-check", "-o", "/dev/null").code == 0
    assert not Path("/dev/null").is_file()
    assert "flash2" in iosim(*SMALL, "--no-check", "-o", "-").out
    assert iosim(*SMALL, "--no-check", "-o", "").code == 2


@pytest.mark.parametrize(("closed", "code"), [(">&-", 3), ("2>&-", 0), (">/dev/full 2>/dev/full", 3)])
def test_closed_streams(closed: str, code: int) -> None:
    line = f"{sys.executable} -m iosim {' '.join(SMALL)} --no-check {closed}"
    done = subprocess.run(["bash", "-c", line], text=True, capture_output=True, check=False)
    assert done.returncode == code
    assert "Traceback" not in done.stderr
    assert ("flash2" in done.stdout) == (code == 0)


def process(*args: str, **kwargs: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "iosim", *args], text=True, check=False, **kwargs)


def test_a_full_disk_is_exit_3_in_one_line() -> None:
    with open("/dev/full", "w") as full:
        done = process(*SMALL, "--no-check", stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 3
    assert done.stderr == "iosim: output: No space left on device\n"


def test_a_closed_pipe_ends_quietly() -> None:
    line = f"{sys.executable} -m iosim {' '.join(SMALL)} --no-check --json | head -c 10"
    done = subprocess.run(["bash", "-c", line], text=True, capture_output=True, check=False)
    assert done.stderr == ""
    assert done.stdout == '{\n "schema'


@pytest.mark.parametrize("args", [("--version",), ("run", "-h"), ("hw", "list"), (*SMALL, "--no-check")])
def test_a_pipe_that_nobody_reads_is_no_error(args: tuple[str, ...]) -> None:
    """click's own answers too, for which it would exit with 1, which is a failed check."""
    read, write = os.pipe()
    os.close(read)
    with open(write, "w") as pipe:
        done = process(*args, stdout=pipe, stderr=subprocess.PIPE)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_pipe_is_told_once_what_takes_long(iosim: Iosim, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("iosim.cli.output.PATIENCE", 0.2)

    def slow(*_: object, note: Callable[[str], None], **__: object) -> Comparison:
        note("numeric check of flash2")
        sleep(0.5)
        return compare(Attention(n_q=64, d=64), dataflows="flash2", check=False)

    monkeypatch.setattr("iosim.study.run.compare", slow)
    answer = iosim(*SMALL)
    assert answer.err == "iosim: after 0.2 s: numeric check of flash2\n"
    assert "flash2" in answer.out


@pytest.mark.slow
def test_results_do_not_depend_on_the_hash_seed() -> None:
    outs = {
        process(*SMALL, "--json", "--causal", capture_output=True, env={**os.environ, "PYTHONHASHSEED": seed}).stdout
        for seed in ("1", "2")
    }
    assert len(outs) == 1
    assert json.loads(outs.pop())["runs"]


def test_version(iosim: Iosim) -> None:
    import iosim as package

    assert iosim("--version").out.strip() == f"iosim, version {package.__version__}"


# ---------------------------------------------------------------- energy


def test_energy_is_in_the_answer_when_it_is_asked_for(iosim: Iosim) -> None:
    ask = (*SMALL, "--no-check", "--hw", "h200-sxm")
    text, plain = iosim("run", "-n", "512", "-d", "64", "--no-check", "--energy").out, iosim(*ask).out
    for words in ("energy, estimated", "low to high", "to the matrix unit", "knows no TDP"):
        assert words in " ".join(text.split())
        assert words not in " ".join(plain.split())
    assert max(map(len, text.splitlines())) <= 80
    assert "energy" not in document(iosim, *ask)["runs"][0]
    runs = document(iosim, *ask, "--energy")["runs"]
    rows = list(csv.DictReader(io.StringIO(iosim(*ask, "--energy", "--csv").out)))
    for run, row in zip(runs, rows, strict=True):
        parts = run["energy"]["parts"]
        assert float(row["energy_joules"]) == run["energy"]["joules"]
        assert float(row["energy_matrix_joules"]) == parts["matrix"]["joules"]
        moved = run["traffic"]
        assert parts["hbm"]["count"] == moved["dram_read_bytes"] + moved["dram_write_bytes"]
        assert parts["l2"]["count"] == moved["l2_read_bytes"] + moved["l2_write_bytes"]
        assert run["energy"]["counted_joules"] == pytest.approx(sum(p["joules"] for p in parts.values()))
        assert run["energy"]["bound_joules"] == pytest.approx(700 * run["time"]["seconds"])


def test_energy_of_several_machines_fits_80_columns(iosim: Iosim) -> None:
    machines = ("--hw", "mp31", "--hw", "h200-calibrated", "--hw", "b200")
    answer = iosim(*SMALL, "--no-check", "--energy", *machines)
    assert max(map(len, answer.out.splitlines())) <= 80
    assert "Energy of flash2 on b200:" in answer.out


def test_energy_without_a_figure_is_one_line(iosim: Iosim, tmp_path: Path) -> None:
    mine = tmp_path / "mine.toml"
    text = (Path(__file__).parents[2] / "hw_profiles/mp31.toml").read_text(encoding="utf-8")
    lines = (
        'exp_pj_per_op = { unknown = "nobody measured it" }' if line.startswith("exp_pj") else line
        for line in text.splitlines()
    )
    mine.write_text("\n".join(lines), encoding="utf-8")
    answer = iosim(*SMALL, "--no-check", "--energy", "--hw", str(mine))
    assert answer.code == 2
    assert answer.err.strip() == (
        "iosim: --energy: the profile mp31 does not know energy.exp_pj_per_op: nobody measured it"
    )
