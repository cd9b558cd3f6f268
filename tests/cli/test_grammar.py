"""One grammar over all commands: options for the answer, examples that run, exit codes, a quick start."""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path

import click
import jsonschema
import pytest

from iosim.cli import cli
from iosim.cli.group import Command
from tests.conftest import Iosim
from tests.model_configs import written

GPU = ("calibrate", "measure")  # they write a file that is asked for, and need a GPU
NO_DOCUMENT = (*GPU, "completion", "trace", "report all")
HEAVY = ("numpy", "pandas", "matplotlib", "pydantic", "rich", "simpy", "ml_dtypes", "scipy", "torch")
FILE = re.compile(r"\.(toml|csv|json|npz|safetensors|py|png|svg|html)$")


def commands(group: click.Command = cli, path: str = "") -> Iterator[tuple[str, click.Command]]:
    """All commands and groups by what is typed after `iosim`."""
    if isinstance(group, click.Group):
        context = click.Context(group)
        for name in group.list_commands(context):
            found = group.get_command(context, name)
            assert found is not None
            yield f"{path}{name}", found
            yield from commands(found, f"{path}{name} ")


ALL = dict(commands())
LEAVES = {name: found for name, found in ALL.items() if not isinstance(found, click.Group)}


def examples(found: click.Command) -> list[list[str]]:
    """The words behind `iosim` of the examples in a help text."""
    block = re.search(r"Example: (.*?)(\n\n|\Z)", found.help or "", re.S)
    lines = [re.split(r"\s{2,}[(#]", line.strip())[0] for line in (block[1] if block else "").splitlines()]
    return [shlex.split(line)[1:] for line in lines if line.startswith("iosim ")]


def needs_a_file(words: list[str]) -> bool:
    """Whether an example reads a file that is not here."""
    written_to = {"-o", "--output", "--plot"}
    return any(
        FILE.search(word) and before not in written_to and not Path(word).exists()
        for before, word in zip(["", *words], words, strict=False)
    )


@pytest.mark.parametrize("name", LEAVES)
def test_an_answer_can_be_json_and_go_to_a_file(name: str) -> None:
    options = {option for parameter in LEAVES[name].params for option in parameter.opts}
    assert {"--output", "-o"} <= options
    assert ("--json" in options) == (name not in NO_DOCUMENT)


def test_a_name_has_one_meaning() -> None:
    """An option that two commands have is spelt alike in both, its short form too, and takes the same kind of value."""
    seen: dict[str, tuple[str, ...]] = {}
    for found in LEAVES.values():
        for parameter in (p for p in found.params if isinstance(p, click.Option)):
            assert seen.setdefault(parameter.opts[0], tuple(parameter.opts)) == tuple(parameter.opts)


@pytest.mark.parametrize("name", ["", *ALL])
def test_every_help_has_an_example_that_parses(iosim: Iosim, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    ran: list[str] = []
    monkeypatch.setattr(Command, "invoke", lambda self, _: ran.append(self.name))
    found = examples(ALL.get(name, cli))
    assert found
    for words in found:
        answer = iosim(*words)
        assert (answer.code, answer.err) == (0, ""), words
    assert ran
    text = iosim(*name.split(), "--help").out
    assert max(map(len, text.splitlines())) <= 80
    assert "Example: iosim " in text


@pytest.mark.long
@pytest.mark.parametrize("name", [name for name in LEAVES if name not in GPU])
def test_the_examples_run_as_they_are_written(
    iosim: Iosim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """But `iosim validate`, which predicts every row that ships: the table of the README is held by it."""
    monkeypatch.chdir(tmp_path)
    Path("config.json").write_text(Path(written(tmp_path, "gpt2")).read_text())
    Path("mine.toml").write_text((Path(__file__).parents[2] / "hw_profiles" / "mp31.toml").read_text())
    for words in examples(LEAVES[name]):
        if words[0] != "validate" and not needs_a_file(words):
            answer = iosim(*words)
            assert answer.code == 0, (words, answer.err)
            assert answer.out or "-o" in words


def test_exit_codes_are_in_the_help(iosim: Iosim) -> None:
    text = " ".join(iosim("--help").out.split())
    assert "Exit codes: 0 answered, 1 a check failed, 2 bad input, 3 output cannot be written." in text
    assert iosim("run", "-n", "0", "-d", "64").code == 2
    assert iosim("hw", "list", "-o", "/nowhere/at/all").code == 3
    assert iosim("hw", "list").code == 0


def schema(name: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(files("iosim").joinpath(f"data/{name}.schema.json").read_text())
    return found


def test_machines_as_json_and_csv(iosim: Iosim, tmp_path: Path) -> None:
    listed = json.loads(iosim("hw", "list", "--json").out)
    jsonschema.validate(listed, schema("hw"))
    assert [m["name"] for m in listed["machines"] if m["default"]] == ["mp31"]
    shown = json.loads(iosim("hw", "show", "mp31", "--json").out)
    jsonschema.validate(shown, schema("hw"))
    (machine,) = shown["machines"]
    count = next(n for n in machine["numbers"] if n["name"] == "processor.count")
    assert (count["value"], machine["processors"]) == (56, 56)
    assert len(machine["numbers"]) == machine["numbers_total"]
    assert len(iosim("hw", "show", "mp31", "--csv").out.splitlines()) == machine["numbers_total"] + 1
    assert len(iosim("hw", "list", "--csv").out.splitlines()) == len(listed["machines"]) + 1
    mine = tmp_path / "mine.toml"
    mine.write_text((Path(__file__).parents[2] / "hw_profiles" / "mp22.toml").read_text())
    checked = json.loads(iosim("hw", "check", str(mine), "--json").out)
    jsonschema.validate(checked, schema("hw"))
    assert "processor.count" in checked["machines"][0]["missing_for_time"]


def test_a_program_as_json(iosim: Iosim) -> None:
    args = ("show", "flash2", "-n", "512", "-d", "64")
    found = json.loads(iosim(*args, "--json").out)
    jsonschema.validate(found, schema("show"))
    assert found["text"] + "\n" == iosim(*args).out
    assert {t["name"]: t["bytes"] for t in found["tensors"]} == dict.fromkeys("QKVO", 512 * 64 * 2)
    (kernel,) = found["kernels"]
    assert kernel["blocks"] == -(-512 // found["schedule"]["block_q"])


def test_nothing_heavy_is_imported_for_a_help_text() -> None:
    """All help texts of one process; a command imports what it needs when it runs."""
    script = f"import sys\nfrom iosim.cli import cli, main\n{WALK}\nprint([m for m in {HEAVY} if m in sys.modules])\n"
    done = subprocess.run([sys.executable, "-c", script], text=True, capture_output=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"


WALK = """
for words in ["--version"], ["run", "--help"]:
    sys.argv = ["iosim", *words]
    main()
import click
def walk(group):
    context = click.Context(group)
    for name in group.list_commands(context):
        found = group.get_command(context, name)
        found.get_help(click.Context(found))
        if isinstance(found, click.Group):
            walk(found)
walk(cli)
"""
