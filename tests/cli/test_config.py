"""`--config`: a model's layers, in `iosim run` and in the commands that take one problem."""

from __future__ import annotations

import csv
import io
import json
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest
from click.testing import CliRunner

from iosim.cli.group import command
from iosim.cli.options import subject_of, subject_options
from tests.conftest import Iosim
from tests.model_configs import written

SCHEMA = json.loads(files("iosim").joinpath("data/run.schema.json").read_text())
FEW = ("--dataflow", "flash2", "--no-check")
HYBRID = {
    "sliding_window": 128,
    "num_hidden_layers": 5,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 64,
}


def words(text: str) -> str:
    return " ".join(text.split())


def test_a_model_of_one_kind_leads_with_the_total(iosim: Iosim, tmp_path: Path) -> None:
    answer = iosim("run", "--config", written(tmp_path, "llama-3-8b"), "-n", "512", *FEW)
    assert (answer.code, answer.err) == (0, "")
    assert max(map(len, answer.out.splitlines())) <= 80 or str(tmp_path) in answer.out
    said = words(answer.out)
    assert "(llama): 32 full-attention layers; prefill of 512 tokens, batch 1 Attention in all 32 layers" in said
    assert (
        "One of the 32 full-attention layers: Attention forward: batch 1, 32 heads over 8 K/V heads, N 512, d 128, "
        in said
    )
    assert "bf16, causal" in said
    assert "K and V of all layers: 67.1 MB." in said  # 32 * 2 * 8 * 512 * 128 * 2 B


def test_a_hybrid_has_a_table_a_kind_and_one_total(iosim: Iosim, tmp_path: Path) -> None:
    path = written(tmp_path, "gemma-2-9b", **HYBRID)
    said = words(iosim("run", "--config", path, "-n", "512", *FEW).out)
    assert "3 sliding-window (128)" in said
    assert "Not modelled: soft-capped scores" in said
    assert "One of the 2 full-attention layers: Attention forward: batch 1, 2 heads over 1 K/V head, N 512" in said
    assert "One of the 3 sliding-window (128) layers: Attention forward" in said
    several = iosim("run", "--config", path, "-n", "512", *FEW, "--hw", "mp31", "--hw", "h200-sxm").out
    assert "flash2 on h200-sxm" in words(several)
    assert max(len(line) for line in several.splitlines() if str(tmp_path) not in line) <= 80


def test_json_and_csv(iosim: Iosim, tmp_path: Path) -> None:
    args = ("run", "--config", written(tmp_path, "gemma-2-9b", **HYBRID), "-n", "512", "-b", "2", *FEW)
    found = json.loads(iosim(*args, "--json").out)
    jsonschema.validate(found, SCHEMA)
    model = found["model"]
    assert {part["kind"]: part["count"] for part in model["layers"]} == {"full": 2, "sliding": 3}
    assert [run["layers"] for run in found["runs"]] == [part["kind"] for part in model["layers"]]
    counted = zip(found["runs"], model["layers"], strict=True)
    assert model["totals"][0]["makespan_ps"] == sum(r["time"]["makespan_ps"] * p["count"] for r, p in counted)
    assert model["batch"] == found["problem"]["batch"] == 2
    rows = list(csv.DictReader(io.StringIO(iosim(*args, "--csv").out)))
    assert [(row["layers"], row["count"]) for row in rows] == [(p["kind"], str(p["count"])) for p in model["layers"]]


def test_phases_of_a_run(iosim: Iosim, tmp_path: Path) -> None:
    path = written(tmp_path, "gpt2")
    decode = words(iosim("run", "--config", path, "-n", "512", "--phase", "decode", *FEW).out)
    assert "decode of one token that sees 512 tokens, batch 1. It names no dtype: fp16 is taken" in decode
    assert "12 heads, 1 query, 512 keys, d 64, fp16 mp31" in decode
    training = json.loads(iosim("run", "--config", path, "-n", "256", "--phase", "training", *FEW, "--json").out)
    jsonschema.validate(training, SCHEMA)
    assert training["runs"][0]["parts"][1]["dataflow"] == "flash-backward"
    assert training["model"]["totals"][0]["flops"] == 12 * training["runs"][0]["flops"]["convention"]


def test_a_sliding_window_of_a_decode_has_no_later_keys(iosim: Iosim, tmp_path: Path) -> None:
    path = written(tmp_path, "mistral-7b", sliding_window=128)
    said = words(iosim("run", "--config", path, "-n", "512", "--phase", "decode", *FEW).out)
    assert "bf16, window 128 mp31" in said


def test_a_command_of_one_problem_says_which_layer_it_takes(iosim: Iosim, tmp_path: Path) -> None:
    path = written(tmp_path, "gemma-2-9b", **HYBRID)
    refused = iosim("show", "flash2", "--config", path, "-n", "512")
    assert refused.code == 2
    assert refused.err.endswith("this takes one kind: give --layers full or --layers sliding\n")
    answer = iosim("show", "flash2", "--config", path, "-n", "512", "--layers", "sliding")
    assert answer.code == 0
    assert answer.err.startswith("iosim: one layer of this model. Model ")
    assert "key >= query - 127" in answer.out


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ("--heads 16", "--heads: 16 was given, and {} has num_attention_heads 32"),
        ("--kv-heads 4", "--kv-heads: 4 was given, and {} has num_key_value_heads 8"),
        ("--window 9", "--window: {} has no sliding-window layers"),
        ("--layers sliding", "--layers: {} has no sliding layers; it has 32 full"),
        ("--layers slide", "--layers: 'slide' is not one of full, sliding, all (did you mean 'sliding'?)"),
        ("--phase decod", "--phase: 'decod' is not one of prefill, decode, training (did you mean 'decode'?)"),
        ("--phase decode --causal", "--causal: the decode of {} has no causal mask"),
        ("--phase decode --n-k 9", "--n-k: decode sees so many keys as --n says"),
        ("--n-k 9", "--n-k: 9 is less than --n 64"),
        ("--causal-align top-left", "--causal-align: the last query of a model sees every key"),
        ("--pass backward", "--pass: backward was given, and --phase prefill computes forward"),
        ("--inputs qkv.npz", "--config and --inputs: give one of them"),
        ("--batch 0", "--batch: 0 is out of range"),
        ("--dtype fp61", "--dtype: 'fp61' is not one of"),
    ],
)
def test_contradictions_are_one_line(iosim: Iosim, tmp_path: Path, args: str, words: str) -> None:
    path = written(tmp_path, "llama-3-8b")
    answer = iosim("run", "--config", path, "-n", "64", *args.split(), "--no-check")
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert words.format(path) in answer.err


def test_what_the_file_leaves_open_or_may_be_another(iosim: Iosim, tmp_path: Path) -> None:
    args = ("-n", "64", "--no-check", "--json", "--dataflow", "flash2")
    gemma = json.loads(
        iosim("run", "--config", written(tmp_path, "gemma-3-4b"), "--heads", "8", "--kv-heads", "4", *args).out
    )
    assert (gemma["problem"]["heads"], gemma["problem"]["kv_heads"], gemma["problem"]["d"]) == (8, 4, 256)
    llama = json.loads(
        iosim("run", "--config", written(tmp_path, "llama-3-8b"), "--dtype", "fp16", "--n-k", "96", *args).out
    )
    assert (llama["problem"]["dtype"], llama["problem"]["n_q"], llama["problem"]["n_k"]) == ("fp16", 64, 96)


@pytest.mark.parametrize("option", ["--phase", "--layers"])
def test_options_of_a_model_without_one(iosim: Iosim, option: str) -> None:
    answer = iosim("run", "-n", "64", "-d", "64", option, "decode")
    assert (answer.code, answer.err) == (2, f"iosim: {option}: changes nothing without --config\n")


def test_a_model_needs_n(iosim: Iosim, tmp_path: Path) -> None:
    answer = iosim("run", "--config", written(tmp_path, "gpt2"))
    assert (answer.code, answer.err) == (2, "iosim run: Missing option '--n'.\n")


def test_a_command_of_one_dataflow_is_told_which_pass_of_training(tmp_path: Path) -> None:
    @command()
    @subject_options
    def probe(**options: object) -> None:
        subject = subject_of(options)
        print(subject.flow.name, subject.problem.lse, subject.problem.heads)

    args = ["--config", written(tmp_path, "gpt2"), "-n", "64", "--phase", "training"]
    refused = CliRunner().invoke(probe, args)
    assert str(refused.exception) == (
        "--phase: training has two passes, and this takes one: give --dataflow flash2 or flash-backward"
    )
    answer = CliRunner().invoke(probe, [*args, "--dataflow", "flash-backward"])
    assert answer.stdout == "flash-backward True 12\n"
    assert "12 full-attention layers; training on 64 tokens" in answer.stderr


@pytest.mark.parametrize("report", ["memory", "io", "trend", "roofline"])
def test_reports_of_one_layer(iosim: Iosim, tmp_path: Path, report: str) -> None:
    """A model's file, also one that a problem's file names, stands for the options of its layer."""
    config = written(tmp_path, "llama-3-8b", num_attention_heads=4, num_key_value_heads=2, head_dim=64)
    problem = tmp_path / "problem.toml"
    problem.write_text(f'schema = "iosim.problem/1"\nconfig = "{config}"\nn = 128\n')
    rest = ("--json", *(() if report == "memory" else ("--dataflow", "flash2")))
    shape = ("-d", "64", "-H", "4", "--kv-heads", "2", "--dtype", "bf16", "--causal")
    plain = json.loads(iosim("report", report, "-n", "128", *shape, *rest).out)
    for args in (("--config", config, "-n", "128"), ("--problem", str(problem))):
        made = iosim("report", report, *args, *rest)
        assert (made.code, "32 full-attention layers; prefill of 128 tokens" in made.err) == (0, True)
        found = json.loads(made.out)
        assert (found["tables"], found["request"]["config"]) == (plain["tables"], config)


def test_a_report_is_of_one_kind_of_layer(iosim: Iosim, tmp_path: Path) -> None:
    args = ("report", "memory", "--config", written(tmp_path, "gemma-2-9b", **HYBRID), "-n", "512")
    refused = iosim(*args)
    assert (refused.code, "this takes one kind: give --layers full or --layers sliding" in refused.err) == (2, True)
    assert iosim(*args, "--layers", "sliding").code == 0
    alone = iosim("report", "all", "--layers", "full", "-o", str(tmp_path / "r"))
    assert (alone.code, alone.err) == (2, "iosim: --layers: changes nothing without --config\n")
