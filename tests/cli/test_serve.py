"""`iosim serve` and `iosim run --lengths`: forms, options and bad input."""

from __future__ import annotations

import csv
import io
import json
from importlib.resources import files
from pathlib import Path

import jsonschema
import pytest

from tests.conftest import Iosim
from tests.model_configs import CONFIGS

SCHEMA = json.loads(files("iosim").joinpath("data/report.schema.json").read_text())
SHAPE = ("-d", "64", "-H", "4", "--kv-heads", "2")


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Twelve steps of three requests that decode, one with a chunk of a prompt."""
    lines = [{"step": n, "context": c + n} for n in range(12) for c in (100, 700, 1500)]
    lines.append({"step": 12, "context": 0, "new": 256})
    place = tmp_path / "trace.jsonl"
    place.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(place)


def test_a_trace_in_all_forms(iosim: Iosim, trace: str) -> None:
    shown, document, lines = (iosim("serve", trace, *SHAPE, *form) for form in ((), ("--json",), ("--csv",)))
    assert (shown.code, shown.err) == (document.code, document.err) == (lines.code, lines.err) == (0, "")
    assert max(map(len, shown.out.splitlines())) <= 80
    for words in ("Attention only: no projections, no MLP", "Not validated", "The slowest steps"):
        assert words in shown.out
    found = json.loads(document.out)
    jsonschema.validate(found, SCHEMA)
    assert sum(row["tokens"] for row in found["tables"]["bounds"]["rows"]) == 36 + 256
    rows = list(csv.DictReader(io.StringIO(lines.out)))
    assert [int(row["step"]) for row in rows] == list(range(13))
    assert int(rows[0]["kv_bytes"]) == 2 * 2 * 64 * 2 * (101 + 701 + 1501)


def test_the_layers_of_a_model(iosim: Iosim, trace: str, tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text(json.dumps(CONFIGS["gpt2"]))
    shown = iosim("serve", trace, "--config", str(config))
    assert (shown.code, shown.err) == (0, "")
    assert "12 full layers; 12 heads, d 64" in shown.out


def test_sequences_of_their_own_lengths(iosim: Iosim) -> None:
    args = ("run", "--lengths", "128,300,1:700,1:700", *SHAPE, "--causal")
    shown, document = iosim(*args), iosim(*args, "--json", "--no-check")
    assert (shown.code, shown.err) == (document.code, document.err) == (0, "")
    assert max(map(len, shown.out.splitlines())) <= 80
    assert "Numbers of all 3 classes of sequences are within their bounds" in shown.out
    found = json.loads(document.out)
    jsonschema.validate(found, SCHEMA)
    packed, padded = found["tables"]["packed"]["rows"]
    assert (packed["query_rows"], packed["key_rows"]) == (128 + 300 + 2, 128 + 300 + 1400)
    assert (padded["query_rows"], padded["key_rows"]) == (4 * 300, 4 * 700)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (("run", "--lengths", "4,x", "-d", "64"), "--lengths: '4,x' is neither like 512,4096,1:777 nor a file"),
        (("run", "--lengths", "0", "-d", "64"), "--lengths: '0' is not a length from 1 to 16777216"),
        (("run", "--lengths", "4", "-d", "64", "-b", "2"), "--batch: is not taken with --lengths"),
        (("run", "--lengths", "4"), "Missing option '--d'"),
        (
            ("run", "--lengths", "4", "-d", "64", "--dataflow", "standard"),
            "--dataflow: 'standard' is not one of flash2",
        ),
        (("serve", "none.jsonl"), "none.jsonl: cannot be read"),
        (
            ("report", "serving", "--context", "64", "--shared-prefix", "65"),
            "--shared-prefix: 65 tokens are more than the longest sequence, 64",
        ),
        (("report", "serving", "--context", "0,1024"), "--context: 0 is out of range; it is at least 1"),
        (("report", "serving", "--page", "0"), "--page: 0 is out of range; 1 to 4096 is allowed"),
        (("report", "serving", "--split-rule", "balance"), "(did you mean 'balanced'?)"),
        (("report", "serving", "--cache-dtype", "int8"), "--cache-dtype: 'int8' is not fp8;"),
        (("report", "serving", "--layers", "full"), "--layers: changes nothing without --config"),
        (("report", "serving", "--heads", "5", "--kv-heads", "2"), "--heads: 5 is not a multiple of kv_heads (2)"),
    ],
)
def test_bad_input_is_one_line(iosim: Iosim, args: tuple[str, ...], message: str) -> None:
    answer = iosim(*args)
    assert (answer.code, answer.out) == (2, "")
    assert message in answer.err
    assert "Traceback" not in answer.err
