"""`iosim whatif` and `iosim sensitivity`: what they print, their JSON, CSV and plots, and bad input."""

from __future__ import annotations

import csv
import io
import json
import re
import shlex
from importlib.resources import files
from pathlib import Path

import click
import jsonschema
import pytest

from iosim.cli.commands import sensitivity as sensitivity_command
from iosim.cli.commands import whatif as whatif_command
from tests.conftest import Iosim

SUBJECT = ("-n", "512", "-d", "64")
STAGES = ("whatif", *SUBJECT, "--vary", "stages=1,2,16", "--block-k", "128")
FIELDS = ("sensitivity", *SUBJECT, "--field", "launch.kernel", "--field", "sram.capacity", "--field", "hw.l2.latency")


def schema(name: str) -> object:
    return json.loads(files("iosim").joinpath(f"data/{name}.schema.json").read_text())


def test_whatif_leads_with_the_answer_and_fits_the_terminal(iosim: Iosim) -> None:
    answer = iosim(*STAGES)
    assert answer.code == 0
    lines = answer.out.splitlines()
    assert max(map(len, lines)) <= 80
    assert re.search(r"^Fastest: stages 2, [\d.]+ us, 1\.\d\dx as fast as stages 1\. 1 row of 3", answer.out, re.M)
    words = " ".join(answer.out.split())
    assert "16 cannot run" in words
    assert "stages 16: flash2: kernel attention needs 548,864 B of SRAM" in words
    assert "Overlap: what the loads of a processor take" in words
    assert "stages 2: 1." in words
    assert "the same in all rows: HBM traffic" in words


def test_whatif_json_follows_the_shipped_schema_and_csv_says_the_same(iosim: Iosim) -> None:
    document = json.loads(iosim(*STAGES, "--json").out)
    jsonschema.validate(document, schema("whatif"))
    assert document["vary"] == {"stages": [1, 2, 16]}
    assert [row["runs"] for row in document["rows"]] == [True, True, False]
    rows = list(csv.DictReader(io.StringIO(iosim(*STAGES, "--csv").out)))
    assert [row["stages"] for row in rows] == ["1", "2", "16"]
    assert [float(row["seconds"]) for row in rows[:2]] == [row["seconds"] for row in document["rows"][:2]]
    assert rows[1]["change"] == document["rows"][1]["change"]


def test_sensitivity_in_words_json_and_csv(iosim: Iosim) -> None:
    answer = iosim(*FIELDS)
    assert answer.code == 0
    assert max(map(len, answer.out.splitlines())) <= 80
    words = " ".join(answer.out.split())
    assert re.search(r"the busiest unit is the launch of kernels \(\d\d %\)\. 1 % more launch\.kernel takes", words)
    assert re.search(r"sram\.capacity: 192 KiB now; one more block is resident from \d+ KiB on", words)
    document = json.loads(iosim(*FIELDS, "--json").out)
    jsonschema.validate(document, schema("sensitivity"))
    assert document["effects"][0]["name"] == "launch.kernel_us"
    rows = list(csv.DictReader(io.StringIO(iosim(*FIELDS, "--csv").out)))
    assert [row["name"] for row in rows] == [e["name"] for e in document["effects"]]


@pytest.mark.parametrize(("command", "kind"), [(STAGES, "png"), (FIELDS, "svg")], ids=["whatif png", "tornado svg"])
def test_plots_are_the_same_bytes_each_time(iosim: Iosim, tmp_path: Path, command: tuple[str, ...], kind: str) -> None:
    drawn = []
    for name in ("a", "b"):
        file = tmp_path / f"{name}.{kind}"
        assert iosim(*command, "--plot", str(file)).code == 0
        drawn.append(file.read_bytes())
    assert drawn[0] == drawn[1]
    assert drawn[0].startswith(b"\x89PNG" if kind == "png" else b"<?xml")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("whatif", *SUBJECT), "--vary: give at least one field with its values, like stages=1,2,3"),
        (("whatif", *SUBJECT, "--vary", "stage=1,2"),
         "--vary: 'stage' is no field of a schedule, of a problem or (hw.) of a machine (did you mean 'stages'?)"),
        (("whatif", *SUBJECT, "--vary", "n=1,2"), "--vary: n: is given as an option too"),
        (("whatif", *SUBJECT, "--vary", "stages=1,2", "--stages", "2"), "--vary: stages: is given twice"),
        (("whatif", *SUBJECT, "--vary", "stages=17,18"), "--vary: stages: 17 is out of range; 1 to 16 is allowed"),
        (("whatif", *SUBJECT, "--vary", "block_q=1..300"), "--vary: makes 300 rows; 256 are allowed"),
        (("whatif", *SUBJECT, "--vary", "stages=1", "--set", "block_k=1,2"),
         "--set: block_k: takes one value, not 2; --vary takes several"),
        (("whatif", *SUBJECT, "--vary", "stages=1", "--plot", "x.pdf"),
         "--plot: 'x.pdf' does not end with .png or .svg"),
        (("sensitivity", *SUBJECT, "--field", "exp.op"),
         "--field: exp.op: is no number of this profile (did you mean 'exp.ops'?)"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line_and_exit_2(iosim: Iosim, args: tuple[str, ...], said: str) -> None:
    answer = iosim(*args)
    assert answer.code == 2
    assert not answer.out
    assert answer.err == f"iosim: {said}\n"


def test_a_varied_size_needs_no_option(iosim: Iosim) -> None:
    document = json.loads(iosim("whatif", "-d", "64", "--vary", "n=128,256", "--set", "causal=yes", "--json").out)
    assert document["problem"]["causal"] is True
    assert [row["values"] for row in document["rows"]] == [{"n": 128}, {"n": 256}]


@pytest.mark.parametrize(("begun", "wanted"), [("hw.sram.cap", "hw.sram.capacity_kib="), ("sta", "stages=")])
def test_field_names_complete_in_the_shell(begun: str, wanted: str) -> None:
    option = next(p for p in whatif_command.whatif.params if p.name == "vary")
    found = option.shell_complete(click.Context(whatif_command.whatif), begun)
    assert [item.value for item in found] == [wanted]
    field = next(p for p in sensitivity_command.sensitivity.params if p.name == "field")
    named = field.shell_complete(click.Context(sensitivity_command.sensitivity), "exp.")
    assert [item.value for item in named] == ["exp.ops_per_clock"]


@pytest.mark.long
@pytest.mark.parametrize("command", [whatif_command.whatif, sensitivity_command.sensitivity], ids=["whatif", "sens"])
def test_the_examples_of_the_help_run(iosim: Iosim, command: click.Command) -> None:
    examples = re.findall(r"iosim (\w+ .*)", (command.help or "").split("Example:")[1])
    assert len(examples) >= 2
    for example in examples:
        answer = iosim(*shlex.split(example))
        assert answer.code == 0, example
        assert max(map(len, answer.out.splitlines())) <= 80


def test_energy_in_whatif_and_sensitivity(iosim: Iosim) -> None:
    """It is that of the plain run; more bandwidth moves no byte, and the elasticities add up to one."""
    plain = json.loads(iosim("run", *SUBJECT, "--dataflow", "flash2", "--energy", "--no-check", "--json").out)
    joules = plain["runs"][0]["energy"]["joules"]
    bandwidths = ("--vary", "hw.hbm.bandwidth_gb_per_s=1600,3200")
    document = json.loads(iosim("whatif", *SUBJECT, *bandwidths, "--energy", "--json").out)
    jsonschema.validate(document, schema("whatif"))
    assert [row["energy"]["joules"] for row in document["rows"]] == pytest.approx([joules, joules])
    found = json.loads(iosim("sensitivity", *SUBJECT, "--field", "exp.ops", "--energy", "--json").out)
    jsonschema.validate(found, schema("sensitivity"))
    assert found["energy"]["joules"] == pytest.approx(joules)
    assert sum(found["energy"]["elasticities"].values()) == pytest.approx(1)
    for command in (("whatif", "--vary", "stages=1,2"), ("sensitivity", "--field", "exp.ops")):
        text = iosim(command[0], *SUBJECT, *command[1:], "--energy").out
        assert "Energy is an estimate" in text
        assert max(map(len, text.splitlines())) <= 80
    assert "energy_joules" in iosim("whatif", *SUBJECT, "--vary", "stages=1,2", "--energy", "--csv").out
