"""`iosim show` and `iosim hw`."""

from __future__ import annotations

from pathlib import Path

import pytest

from iosim import dataflow_names, profile_names
from tests.conftest import Iosim


@pytest.mark.parametrize("name", dataflow_names())
def test_show_prints_a_program(iosim: Iosim, name: str) -> None:
    latent = ("--kv-heads", "1", "--d-v", "96") if name == "mla" else ()
    answer = iosim("show", name, "--n", "4096", "--n-k", "3000", "--d", "128", "--causal", "--window", "1024", *latent)
    assert answer.code == 0
    assert answer.out.startswith(f"program {name}\n")
    assert "kernel " in answer.out
    assert "matmul" not in answer.out  # products are written with @
    assert max(map(len, answer.out.splitlines())) <= 80


def test_flash2_reads_like_the_paper(iosim: Iosim) -> None:
    text = iosim("show", "flash2", "-n", "4096", "-d", "128").out
    order = [
        "q = load Q",
        "for j in",
        "k = load K",
        "x = q @ k.T",
        "m, rowmax(x)",
        "o += p @ v",
        "out = o / l",
        "store O",
    ]
    at = [text.find(words) for words in order if words != "m, rowmax(x)"]
    assert -1 not in at
    assert at == sorted(at)


def test_bounds_are_named_once_and_guards_that_never_hold_are_left_out(iosim: Iosim) -> None:
    both = iosim("show", "flash2", "-n", "4096", "-d", "128", "--causal", "--window", "1024").out
    assert "  j_edge2 = max(j_edge, min(j_end, max(0, min(i*64 + 1, 4096))//128))\n" in both
    window = iosim("show", "flash2", "-n", "4096", "-d", "128", "--window", "1024").out
    assert window.count("mask(") == 1  # all queries of a tile see its last keys


def test_hw_list_names_every_machine(iosim: Iosim) -> None:
    out = iosim("hw", "list").out
    assert [line.split()[0] for line in out.splitlines()] == profile_names()
    assert max(map(len, out.splitlines())) <= 80
    assert out.count("(default)") == 1


def test_help_says_what_every_command_does_and_gives_an_example(iosim: Iosim) -> None:
    assert "..." not in iosim("-h").out.split("Commands:")[1]
    for command in ("run", "show", "validate", "whatif", "sensitivity", "precision", "hw list", "hw show", "hw check"):
        assert "Example: iosim " + command in iosim(*command.split(), "-h").out


def test_a_machine_has_one_size_of_sram(iosim: Iosim) -> None:
    assert "164 KiB" in next(line for line in iosim("hw", "list").out.splitlines() if line.startswith("a100"))
    run = iosim("run", "-n", "64", "-d", "64", "--hw", "a100-sxm-80gb", "--no-check").out
    assert "with 164 KiB SRAM each" in " ".join(run.split())


def test_hw_show_gives_source_and_confidence(iosim: Iosim) -> None:
    out = iosim("hw", "show", "mp31").out
    assert "processor.count" in out
    assert "[estimate, " in out
    assert "[datasheet" in out
    assert max(map(len, out.splitlines())) <= 80


def test_hw_check_takes_a_file(iosim: Iosim, tmp_path: Path) -> None:
    source = Path(__file__).parents[2] / "hw_profiles" / "mp31.toml"
    assert iosim("hw", "check", str(source)).out.startswith("mp31: valid")
    bad = tmp_path / "bad.toml"
    bad.write_text(source.read_text().replace("bandwidth_gb_per_s", "bandwidth_gib_per_s", 1))
    answer = iosim("hw", "check", str(bad))
    assert answer.code == 2
    assert answer.err.count("\n") == 1
    assert "did you mean 'bandwidth_gb_per_s'?" in answer.err


def test_hw_check_lists_every_mistake_and_the_file_once(iosim: Iosim, tmp_path: Path) -> None:
    source = (Path(__file__).parents[2] / "hw_profiles" / "mp31.toml").read_text()
    bad = tmp_path / "bad.toml"
    bad.write_text(source.replace("bandwidth_gb_per_s", "bandwidth_gib_per_s", 1).replace("clock_mhz", "clok_mhz", 1))
    answer = iosim("hw", "check", str(bad))
    assert (answer.code, answer.out) == (2, "")
    first, *others = answer.err.splitlines()
    assert first == f"iosim: {bad}: 2 mistakes:"
    assert [line for line in others if "bad.toml" in line] == []
    for hint in ("did you mean 'bandwidth_gb_per_s'?", "did you mean 'clock_mhz'?"):
        assert sum(hint in line for line in others) == 1
    answer = iosim("run", "-n", "64", "-d", "64", "--hw", str(bad))
    assert answer.err.count("\n") == 1
    assert "(and 1 more: see iosim hw check)" in answer.err
