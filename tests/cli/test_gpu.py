"""`iosim calibrate` and `iosim measure` where there is no GPU: one clear line, and no file."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.conftest import Iosim

COMMANDS = {"calibrate": "my-gpu.toml", "measure": "calls.csv"}


@pytest.mark.skipif(find_spec("torch") is not None, reason="PyTorch is installed: its GPU would be measured")
@pytest.mark.parametrize("command", COMMANDS)
def test_without_pytorch(iosim: Iosim, tmp_path: Path, command: str) -> None:
    file = tmp_path / COMMANDS[command]
    answer = iosim(command, "-o", str(file))
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == "iosim: PyTorch is not installed: pip install 'iosim[gpu]'\n"
    assert not file.exists()


CASES = {
    "no output": (("calibrate",), 2, "Missing option '--output'"),
    "ending": (("calibrate", "-o", "gpu.json"), 2, "--output: 'gpu.json' does not end with .toml"),
    "directory": (("calibrate", "-o", "no/such/gpu.toml"), 3, "--output: no/such/gpu.toml: No such file or directory"),
    "file is a directory": (("measure", "-o", "."), 3, "--output: .: Is a directory"),
    "section": (("measure", "-o", "c.csv", "--sections", "forwrd"), 2, "did you mean 'forward'?"),
    "both": (("measure", "-o", "c.csv", "--sections", "gqa", "--shapes", "s.csv"), 2, "--shapes: give one of them"),
    "shapes": (
        ("measure", "-o", "c.csv", "--shapes", "no.csv"),
        2,
        "no.csv: cannot be read: No such file",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_bad_input(iosim: Iosim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: str) -> None:
    monkeypatch.chdir(tmp_path)
    args, code, words = CASES[case]
    answer = iosim(*args)
    assert answer.code == code
    assert words in answer.err
    assert answer.err.count("\n") == 1
    assert not list(tmp_path.iterdir())
