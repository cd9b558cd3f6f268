"""`iosim run --inputs`: the shape comes from the file, its numbers are what is checked, and the JSON says which."""

from __future__ import annotations

import hashlib
import json
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest

from tests.conftest import Iosim

SCHEMA = json.loads(files("iosim").joinpath("data/run.schema.json").read_text())
RANDOM = np.random.default_rng(3)
Q = RANDOM.standard_normal((2, 4, 100, 32)).astype(np.float16)
K, V = (RANDOM.standard_normal((2, 2, 150, 32)).astype(np.float16) for _ in range(2))
DO = RANDOM.standard_normal((2, 4, 100, 32)).astype(np.float16)
S = RANDOM.standard_normal((2, 4, 100, 150)).astype(np.float16)


@pytest.fixture
def mine(tmp_path: Path) -> str:
    np.savez(tmp_path / "mine.npz", q=Q, key=K, V=V, dO=DO, s=S)
    return str(tmp_path / "mine.npz")


def document(iosim: Iosim, *args: str) -> dict[str, Any]:
    answer = iosim("run", *args, "--json")
    assert (answer.code, answer.err) == (0, "")
    found = json.loads(answer.out)
    jsonschema.validate(found, SCHEMA)
    return found


def test_the_problem_and_where_it_is_from(iosim: Iosim, mine: str) -> None:
    found = document(iosim, "--inputs", mine, "--causal")
    shape = {"batch": 2, "heads": 4, "kv_heads": 2, "n_q": 100, "n_k": 150, "d": 32, "d_v": 32, "dtype": "fp16"}
    assert shape.items() <= found["problem"].items()
    assert found["problem"]["causal"]
    inputs = found["provenance"]["inputs"]
    assert inputs["file"] == "mine.npz"
    assert inputs["sha256"] == hashlib.sha256(Path(mine).read_bytes()).hexdigest()
    assert inputs["tensors"]["key"] == {"dtype": "float16", "shape": [2, 2, 150, 32]}
    assert found["request"]["inputs"] == mine
    assert found["request"]["dtype"] is None  # not given
    assert [r["check"]["status"] for r in found["runs"]] == ["passed", "passed"]
    assert [r["check"]["rows_checked"] for r in found["runs"]] == [800, 800]
    assert f"Inputs: q, key, V of mine.npz (SHA-256 {inputs['sha256'][:12]}" in iosim("run", "--inputs", mine).out


def test_the_layout_changes_which_axis_is_which(iosim: Iosim, tmp_path: Path, mine: str) -> None:
    turned = {name: x.transpose(0, 2, 1, 3) for name, x in (("q", Q), ("k", K), ("v", V))}
    np.savez(tmp_path / "turned.npz", **turned)
    one = document(iosim, "--inputs", mine)
    two = document(iosim, "--inputs", str(tmp_path / "turned.npz"), "--inputs-layout", "bshd")
    assert one["problem"] == two["problem"]
    assert [r["check"] for r in one["runs"]] == [r["check"] for r in two["runs"]]


def test_a_layout_that_looks_turned_is_said(iosim: Iosim, tmp_path: Path) -> None:
    """(batch, n, heads, d): 100 queries and 4 heads look like 100 heads of 4 queries, and 150 K/V heads do not fit."""
    turned = {name: x.transpose(0, 2, 1, 3) for name, x in (("q", Q), ("k", K), ("v", V))}
    np.savez(tmp_path / "x.npz", **turned)
    np.savez(tmp_path / "alike.npz", **dict.fromkeys("qkv", turned["q"]))
    hint = "are their axes (batch, n, heads, d)? Then give --inputs-layout bshd"
    assert hint in iosim("run", "--inputs", str(tmp_path / "x.npz")).err
    alike = ("run", "--inputs", str(tmp_path / "alike.npz"), "--no-check")
    assert hint in " ".join(iosim(*alike).out.split())
    assert "are their axes" not in iosim(*alike, "--inputs-layout", "bshd").out
    assert iosim("run", "--inputs", "").err == "iosim: --inputs: the file name is empty\n"


@pytest.mark.parametrize("computes", ["backward", "training"])
def test_a_gradient_that_is_not_given_is_said_to_be_random(iosim: Iosim, tmp_path: Path, computes: str) -> None:
    for name, more in (("with", {"do": DO}), ("without", {})):
        np.savez(tmp_path / f"{name}.npz", q=Q, k=K, v=V, **more)
        answer = iosim("run", "--inputs", str(tmp_path / f"{name}.npz"), "--pass", computes, "--no-check")
        assert answer.code == 0
        assert ("dO is random" in answer.out) == (name == "without")


def test_a_softmax_alone_has_no_d(iosim: Iosim, mine: str) -> None:
    text = " ".join(iosim("run", "--inputs", mine, "--dataflow", "softmax-safe", "--no-check").out.split())
    assert text.startswith("Softmax of the scores: batch 2, 4 heads over 2 K/V heads, 100 queries, 150 keys, fp16 ")


def test_every_kind_of_dataflow_reads_what_it_needs(iosim: Iosim, mine: str) -> None:
    for names in (("flash-backward", "standard-backward"), ("softmax-safe", "softmax-online")):
        found = document(iosim, "--inputs", mine, *(word for name in names for word in ("--dataflow", name)))
        assert [r["check"]["status"] for r in found["runs"]] == ["passed", "passed"]


def test_a_program_fails_on_the_file_where_it_fails(iosim: Iosim, tmp_path: Path) -> None:
    """Scores of 200 overflow where no maximum is subtracted, those of normal random inputs do not."""
    np.savez(tmp_path / "large.npz", s=np.full((40, 50), 200, np.float16))
    assert iosim("run", "-n", "40", "--n-k", "50", "-d", "8", "--dataflow", "softmax-naive").code == 0
    answer = iosim("run", "--inputs", str(tmp_path / "large.npz"), "--dataflow", "softmax-naive")
    assert answer.code == 1
    assert "exp overflowed" in answer.err


def test_a_dtype_that_is_given_is_rounded_to(iosim: Iosim, tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", q=Q.astype(np.float64), k=K, v=V)
    answer = iosim("run", "--inputs", str(tmp_path / "x.npz"))
    assert answer.code == 2
    assert "q: float64 is no format of the data of a kernel; give the dtype that it is to be" in answer.err
    assert document(iosim, "--inputs", str(tmp_path / "x.npz"), "--dtype", "bf16")["problem"]["dtype"] == "bf16"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("--n", "99"), "--n: 99 was given, and q of mine.npz has 100 (shape (2, 4, 100, 32), layout bhsd)"),
        (("--d", "64"), "--d: 64 was given, and q of mine.npz has 32"),
        (("--n-k", "100"), "--n-k: 100 was given, and key of mine.npz has 150"),
        (("--batch", "1"), "--batch: 1 was given, and q of mine.npz has 2"),
        (("--heads", "1"), "--heads: 1 was given, and q of mine.npz has 4"),
        (("--kv-heads", "4"), "--kv-heads: 4 was given, and key of mine.npz has 2"),
        (
            ("--inputs-layout", "bshd"),
            "s with shape (2, 4, 100, 150) has n_q 100, q with shape (2, 4, 100, 32) has 4 (layout",
        ),
    ],
)
def test_what_the_file_contradicts(iosim: Iosim, mine: str, args: tuple[str, ...], words: str) -> None:
    answer = iosim("run", "--inputs", mine, *args)
    assert (answer.code, answer.out, answer.err.count("\n")) == (2, "", 1)
    assert words in answer.err


def test_what_agrees_may_be_given(iosim: Iosim, mine: str) -> None:
    assert iosim("run", "--inputs", mine, "-n", "100", "-d", "32", "-b", "2", "-H", "4", "--no-check").code == 0


def test_a_number_that_is_none(iosim: Iosim, tmp_path: Path) -> None:
    v = V.copy()
    v[1, 1, 149, 31] = np.nan
    np.savez(tmp_path / "x.npz", q=Q, k=K, v=v)
    answer = iosim("run", "--inputs", str(tmp_path / "x.npz"))
    assert answer.code == 2
    assert "v at batch 1, head 1, row 149, column 31 is nan; every number must be finite" in answer.err
