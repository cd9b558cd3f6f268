"""The README is true: its example output, its commands, its Python."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import numpy as np
import pytest

from tests.conftest import Iosim
from tests.model_configs import CONFIGS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()


def test_the_example_output_is_what_the_command_prints(iosim: Iosim) -> None:
    """Regenerate with: iosim run --n 4096 --d 128.  The last digits of numeric errors may differ elsewhere."""
    found = re.search(r"<!-- example: iosim ([^\n]*) -->\n```text\n(.*?)```", README, re.S)
    assert found is not None
    answer = iosim(*shlex.split(found[1]))

    def without_errors(text: str) -> list[str]:
        return re.sub(r"\d\.\d+e-\d+", "E", " ".join(text.split())).split(" ")

    assert without_errors(answer.out) == without_errors(found[2])


@pytest.mark.slow
def test_every_iosim_command_of_the_readme_runs(iosim: Iosim, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    np.savez("qkv.npz", **{name: np.ones((1, 2, 300, 64), np.float16) for name in "qkv"})
    Path("config.json").write_text(json.dumps(CONFIGS["gpt2"]))
    part = README[README.index("Any dataflow, problem and machine:") : README.index("## From Python")]
    lines = [line for block in part.split("```sh\n")[1:] for line in block.split("```")[0].splitlines()]
    commands = [command.strip() for line in lines for command in line.split("#")[0].split(";")]
    assert len(commands) >= 30
    for command in commands:
        words = shlex.split(command)
        assert words[0] == "iosim"
        assert iosim(*words[1:], *(["--no-check"] if words[1] == "run" else [])).code == 0, command


def test_the_python_of_the_readme_runs() -> None:
    code = README.split("```python\n")[1].split("```")[0]
    exec(compile(code, "README.md", "exec"), {})


def test_ci_runs_the_readme_command() -> None:
    command = re.search(r"^python3 -m venv .*tests\.gate$", README, re.M)
    assert command is not None
    assert command[0] in (ROOT / ".ci" / "run").read_text()
