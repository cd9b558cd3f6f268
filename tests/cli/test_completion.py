"""Completion in a shell, through the process that the shell runs."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from iosim import dataflow_names, profile_names
from iosim.check.given import LAYOUTS
from iosim.cli.completion import FILES, VALUES
from iosim.interpreters.timeline import FIDELITIES
from iosim.kernels import kernel_names
from iosim.study.run import PASSES
from tests.conftest import Iosim


def completed(line: str, shell: str = "bash") -> tuple[int, list[str], str]:
    """The exit code, answer and errors of the process that completes the last word of `line`."""
    count = len(line.split()) - (not line.endswith(" "))
    env = {**os.environ, "_IOSIM_COMPLETE": f"{shell}_complete", "COMP_WORDS": line, "COMP_CWORD": str(count)}
    done = subprocess.run([sys.executable, "-m", "iosim"], env=env, text=True, capture_output=True, check=False)
    return done.returncode, done.stdout.split(), done.stderr


@pytest.mark.parametrize(
    ("line", "names"),
    [
        ("iosim ru", ["run"]),
        ("iosim hw ", ["check", "list", "show"]),
        ("iosim run --fid", ["--fidelity"]),
        ("iosim run --hw h100", ["h100-sxm"]),
        ("iosim run --n many --dataflow flash2 --dataflow split", ["split-kv"]),
        ("iosim run --dtype nothing-like-it", []),
    ],
)
def test_bash(line: str, names: list[str]) -> None:
    code, found, errors = completed(line)
    assert (code, errors) == (0, "")
    assert found == [f"plain,{name}" for name in names]


def test_a_line_with_mistakes_is_completed_without_a_word_about_them() -> None:
    code, found, errors = completed("iosim rnu --hw ")
    assert (code, errors) == (0, "")
    assert "plain,run" in found


def test_files_are_the_shells_own_business() -> None:
    assert completed("iosim run --config ")[1] == ["file,"]
    assert completed("iosim run --hw ./mine")[1] == ["file,./mine"]


def test_zsh_and_fish() -> None:
    """zsh gets a type, a value and a description, each on a line; fish, whose last word is COMP_CWORD, as bash does."""
    assert completed("iosim run --phase t", "zsh") == (0, ["plain", "training", "_"], "")
    env = {**os.environ, "_IOSIM_COMPLETE": "fish_complete", "COMP_WORDS": "iosim hw show mp3", "COMP_CWORD": "mp3"}
    done = subprocess.run([sys.executable, "-m", "iosim"], env=env, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["plain,mp31", "plain,mp31-liquid"])


def test_an_unknown_instruction_is_no_success() -> None:
    env = {**os.environ, "_IOSIM_COMPLETE": "tcsh_complete"}
    done = subprocess.run([sys.executable, "-m", "iosim"], env=env, text=True, capture_output=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (1, "", "")


def test_the_values_are_those_that_iosim_has() -> None:
    known = {"dataflow": dataflow_names(), "kernel": kernel_names(), "hw": profile_names(), "pass": PASSES,
             "fidelity": FIDELITIES, "inputs_layout": LAYOUTS}  # fmt: skip
    assert {name: list(VALUES[name]()) for name in known} == {name: list(names) for name, names in known.items()}
    assert all(list(names()) for names in VALUES.values())
    assert not {"dtype", "pass"} & FILES


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_says_how_to_install_it(iosim: Iosim, tmp_path: Path, shell: str) -> None:
    answer = iosim("completion", shell)
    assert (answer.code, answer.err) == (0, "")
    assert f"iosim completion {shell}" in "".join(answer.out.splitlines()[:2])
    assert "_IOSIM_COMPLETE" in answer.out
    assert iosim("completion", shell, "-o", str(tmp_path / "script")).out == ""
    assert (tmp_path / "script").read_text() == answer.out


def test_another_shell_is_refused(iosim: Iosim) -> None:
    answer = iosim("completion", "tcsh")
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert "'tcsh' is not one of 'bash', 'zsh', 'fish'" in answer.err


def test_bash_completes_with_the_script(tmp_path: Path) -> None:
    """bash itself loads the script, and calls its function as it would after a tab."""
    shim = tmp_path / "iosim"
    shim.write_text(f'#!/bin/sh\nexec {sys.executable} -m iosim "$@"\n')
    shim.chmod(0o755)
    script = (
        'eval "$(iosim completion bash)"; COMP_WORDS=(iosim run --phase ""); COMP_CWORD=3; '
        '_iosim_completion iosim; printf "%s " "${COMPREPLY[@]}"; complete -p iosim'
    )
    env = {**os.environ, "PATH": f"{tmp_path}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=env, text=True, capture_output=True, check=False)
    assert done.stdout == "prefill decode training complete -o nosort -F _iosim_completion iosim\n", done.stderr
