"""Bad input: one clear line that names the option, the value and what is allowed; exit code 2."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import Iosim

CASES = {
    "zero n": (("run", "-n", "0", "-d", "64"), "--n: 0 is out of range; 1 to 16777216 is allowed"),
    "negative d": (("run", "-n", "64", "-d", "-8"), "--d: -8 is out of range; 1 to 1024 is allowed"),
    "huge n": (("run", "-n", "99999999", "-d", "64"), "--n: 99999999 is out of range"),
    "zero keys": (("run", "-n", "64", "-d", "64", "--n-k", "0"), "--n-k: 0 is out of range"),
    "heads": (("run", "-n", "64", "-d", "64", "-H", "6", "--kv-heads", "4"), "6 is not a multiple of kv_heads (4)"),
    "dataflow": (("run", "-n", "64", "-d", "64", "--dataflow", "flsh2"), "did you mean 'flash2'?"),
    "machine": (
        ("run", "-n", "64", "-d", "64", "--hw", "mp32"),
        "--hw: unknown machine 'mp32' (did you mean 'mp31'?)",
    ),
    "machine of a program": (
        ("show", "flash2", "-n", "64", "-d", "64", "--hw", "mp32"),
        "--hw: unknown machine 'mp32'",
    ),
    "machine that is shown": (("hw", "show", "mp32"), "iosim: unknown machine 'mp32' (did you mean 'mp31'?)"),
    "inputs": (("run", "--inputs", "no.npz"), "--inputs: no.npz: cannot be read: No such file or directory"),
    "inputs' name": (("run", "--inputs", "qkv.pt"), "--inputs: qkv.pt: its name must end in .safetensors or .npz"),
    "layout": (
        ("run", "--inputs", "qkv.npz", "--inputs-layout", "bsdh"),
        "--inputs-layout: 'bsdh' is not one of bhsd, bshd (did you mean",
    ),
    "layout alone": (("run", "-n", "64", "-d", "64", "--inputs-layout", "bshd"), "changes nothing without --inputs"),
    "dtype": (("run", "-n", "64", "-d", "64", "--dtype", "fp61"), "did you mean 'fp16'?"),
    "alignment": (
        ("run", "-n", "64", "-d", "64", "--causal-align", "topleft"),
        "--causal-align: 'topleft' is not one of bottom-right, top-left (did you mean 'top-left'?)",
    ),
    "fidelity": (("run", "-n", "64", "-d", "64", "--fidelity", "fare"), "did you mean 'fair'?"),
    "stages": (("run", "-n", "64", "-d", "64", "--stages", "two"), "--stages: 'two' is not a whole number"),
    "no stage": (("run", "-n", "64", "-d", "64", "--stages", "0"), "--stages: 0 is out of range; 1 to 16 is allowed"),
    "idle option": (
        ("run", "-n", "64", "-d", "64", "--dataflow", "flash2", "--splits", "4"),
        "--splits: changes nothing in flash2",
    ),
    "idle option of a program": (
        ("show", "flash2", "-n", "64", "-d", "64", "--splits", "4"),
        "--splits: changes nothing in flash2",
    ),
    "idle alignment": (
        ("run", "-n", "64", "-d", "64", "--n-k", "99", "--causal-align", "top-left"),
        "--causal-align: changes nothing without --causal or --window",
    ),
    "idle order": (
        ("run", "-n", "512", "-d", "64", "--grid-order", "longest-first"),
        "--grid-order: longest-first changes nothing, as all blocks have as many loop iterations",
    ),
    "idle order of a program": (
        ("show", "flash2", "-n", "512", "-d", "64", "--grid-order", "longest-first"),
        "--grid-order: longest-first changes nothing",
    ),
    "dataflow of a program": (("show", "flsh2", "-n", "64", "-d", "64"), "iosim: DATAFLOW: 'flsh2' is not one of"),
    "format of a program": (
        ("show", "flash2", "-n", "64", "-d", "64", "--dtype", "fp8", "--hw", "a100-sxm-80gb"),
        "--dtype: a100-sxm-80gb has no matrix rate for fp8_e4m3; it takes fp16, bf16, fp32",
    ),
    "format of a machine without rates": (
        ("run", "-n", "64", "-d", "64", "--dtype", "fp8", "--hw", "mp22", "--dataflow", "flash2"),
        "mp22 has no matrix rate for fp8_e4m3; it takes fp16, bf16, fp32",
    ),
    "margin": (("check", "-n", "64", "-d", "64", "--margin", "2"), "--margin: 2 is not a share of SRAM"),
    "both of a kind": (
        ("check", "-n", "64", "-d", "64", "--kernel", "mp31", "--dataflow", "flash2"),
        "--dataflow and --kernel: give one of them",
    ),
    "no result": (("diff", "no.json", "no.json"), "no.json: cannot be read: No such file or directory"),
    "file twice": (("validate", "x.csv", "./x.csv"), "x.csv: is given twice"),
    "missing d": (("run", "-n", "64"), "Missing option '--d'"),
    "not a number": (("run", "-n", "many", "-d", "64"), "'many' is not a valid integer"),
    "option": (("run", "-n", "64", "-d", "64", "--batches", "2"), "--batch"),
    "command": (("rnu",), "no command 'rnu' (did you mean 'run'?)"),
    "twice": (("run", "-n", "64", "-d", "64", "--hw", "mp31", "--hw", "mp31"), "--hw: mp31 is given twice"),
    "both": (("run", "-n", "64", "-d", "64", "--json", "--csv"), "give one of them"),
    "profile": (("hw", "show", "no/such.toml"), "no/such.toml"),
    "dataflow file": (("run", "-n", "64", "-d", "64", "--dataflow", "./no.py"), "no.py is not a file"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_exit_2(iosim: Iosim, case: str) -> None:
    args, words = CASES[case]
    answer = iosim(*args, "--no-check") if args[0] == "run" else iosim(*args)
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.count("\n") == 1, answer.err
    assert words in answer.err


def test_a_terminal_gets_lines_of_80_columns(iosim: Iosim, monkeypatch: pytest.MonkeyPatch) -> None:
    args = ("run", "-n", "64", "-d", "64", "--hw", "mp32")
    line = iosim(*args).err
    assert len(line) > 80
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    monkeypatch.setenv("TERM", "dumb")
    answer = iosim(*args, "--no-check")
    assert (answer.code, answer.err.split()) == (2, line.split())
    assert max(map(len, answer.err.splitlines())) <= 80


def test_a_tile_that_does_not_fit_is_itemised_with_the_nearest_that_does(iosim: Iosim) -> None:
    """Q 256x128x2 B = 65,536; K and V two buffers of 128x128x2 B = 65,536 each; P 256x128x2 B = 65,536."""
    answer = iosim("run", "-n", "4096", "-d", "128", "--dataflow", "flash2", "--block-q", "256", "--block-k", "128",
                   "--stages", "2", "--no-check")  # fmt: skip
    assert answer.code == 2
    assert "needs 262,144 B of SRAM (q 65,536 + k x2 65,536 + v x2 65,536 + p 65,536)" in answer.err
    assert "mp31 gives a block 196,608 B" in answer.err
    assert "would fit" in answer.err


def test_a_file_with_the_name_of_another(iosim: Iosim, tmp_path: Path) -> None:
    root, args = Path(__file__).parents[2], ("run", "-n", "64", "-d", "64", "--no-check")
    machine, flow = tmp_path / "mine.toml", tmp_path / "flash2.py"
    machine.write_text((root / "hw_profiles" / "mp31.toml").read_text())
    flow.write_text((root / "iosim" / "dataflows" / "flash2.py").read_text())
    assert iosim(*args, "--hw", "mp31", "--hw", str(machine)).err == (
        f'iosim: --hw: {machine} has name = "mp31", as another machine here; give it a name of its own\n'
    )
    assert iosim(*args, "--dataflow", str(flow), "--dataflow", "flash2").err == (
        f"iosim: --dataflow: {flow} makes flash2, as another dataflow here; rename the file and its function\n"
    )
    assert iosim(*args, "--hw", str(machine), "--hw", str(machine)).err.endswith("mp31 is given twice\n")


def test_a_dtype_that_the_machine_has_no_rate_for(iosim: Iosim, tmp_path: Path) -> None:
    text = (Path(__file__).parents[2] / "hw_profiles" / "mp31.toml").read_text().splitlines()
    at = next(n for n, line in enumerate(text) if line.startswith("bf16 "))
    mine = tmp_path / "mine.toml"
    mine.write_text("\n".join(text[:at] + text[at + 1 :]))
    answer = iosim("run", "-n", "64", "-d", "64", "--dtype", "bf16", "--hw", str(mine), "--no-check")
    assert answer.code == 2
    assert "no matrix rate for bf16; it takes fp16, fp8_e4m3, fp32" in answer.err


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("raise ValueError('no')", "ValueError in mine.py, line 3: no"),
        ("raise SystemExit(0)", "SystemExit in mine.py, line 3"),
        ("return 42", "returned 42 instead of a Program"),
        ("return Builder('other').done()", "iosim: dataflow mine: mine.py, line 3: other: there is no kernel"),
        (
            "p = Builder('mine')\n    p.tensor('O', (9, 9), 'fp16', 'out')[0, 0, 0].shape",
            "iosim: dataflow mine: mine.py, line 4: O[0, 0]: a view needs an index for each of the 2 axes",
        ),
        ("return (", "mine.py does not load: SyntaxError in mine.py, line 3: '(' was never closed"),
    ],
)
def test_a_dataflow_that_goes_wrong(iosim: Iosim, tmp_path: Path, body: str, words: str) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text(f"from iosim.program import Builder\ndef mine(a, s):\n    {body}\nUSES = ('block_q',)\n")
    answer = iosim("run", "-n", "64", "-d", "64", "--dataflow", str(mine), "--no-check")
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.count("\n") == 1
    assert words in answer.err


def test_what_a_dataflow_file_prints_stays_out_of_the_output(iosim: Iosim, tmp_path: Path) -> None:
    source = (Path(__file__).parents[2] / "iosim" / "dataflows" / "flash2.py").read_text()
    mine = tmp_path / "mine.py"
    mine.write_text(source.replace("def flash2", "print('noise')\n\n\ndef mine"))
    answer = iosim("run", "-n", "64", "-d", "64", "--dataflow", str(mine), "--no-check", "--json")
    assert answer.out.startswith("{")
    assert "noise" not in answer.out


def test_a_dataflow_is_asked_once_for_each_program(iosim: Iosim, tmp_path: Path) -> None:
    source = (Path(__file__).parents[2] / "iosim" / "dataflows" / "flash2.py").read_text()
    mine = tmp_path / "mine.py"
    mine.write_text(source.replace("def flash2", "def mine").replace("    p, bq, bk", "    print(s)\n    p, bq, bk"))
    answer = iosim("run", "-n", "4096", "-d", "128", "--dataflow", str(mine), "--no-check")
    schedules = answer.err.splitlines()
    assert len(set(schedules)) == len(schedules) > 0


def test_the_dataflow_of_gradients_is_looked_for_by_its_name(iosim: Iosim, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def mine(a, s): ...\nUSES = ('block_q',)\nBACKWARD = 'flash-bakward'\n")
    answer = iosim("run", "-n", "64", "-d", "64", "--dataflow", str(mine), "--pass", "training")
    assert answer.err.startswith(f"iosim: --dataflow: BACKWARD of {mine}: 'flash-bakward' is not one of")
    assert "did you mean 'flash-backward'?" in answer.err


def test_uses_must_name_schedule_fields(iosim: Iosim, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("def mine(a, s): ...\nUSES = ('blok_q',)\n")
    assert "names 'blok_q', which is no field" in iosim("run", "-n", "64", "-d", "64", "--dataflow", str(mine)).err


def test_a_dataflow_file_that_does_not_load(iosim: Iosim, tmp_path: Path) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("import nothing_like_this\n")
    answer = iosim("run", "-n", "64", "-d", "64", "--dataflow", str(mine), "--no-check")
    assert answer.code == 2
    assert "does not load: ModuleNotFoundError" in answer.err
    mine.write_text("x = 1\n")
    assert (
        "needs a function mine(attention, schedule)"
        in iosim("run", "-n", "64", "-d", "64", "--dataflow", str(mine)).err
    )
