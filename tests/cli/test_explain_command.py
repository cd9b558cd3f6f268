"""`iosim explain`: text of 80 columns, the JSON contract, bad input."""

from __future__ import annotations

import json
from importlib.resources import files

import jsonschema

from tests.conftest import Iosim

SMALL = ("explain", "-n", "256", "-d", "64", "--dataflow", "standard")


def test_text_and_json_say_the_same(iosim: Iosim) -> None:
    shown, document = iosim(*SMALL, "--no-depends"), iosim(*SMALL, "--no-depends", "--json")
    assert (shown.code, document.code, shown.err, document.err) == (0, 0, "", "")
    assert max(map(len, shown.out.splitlines())) <= 80
    found = json.loads(document.out)
    jsonschema.validate(found, json.loads(files("iosim").joinpath("data/explain.schema.json").read_text()))
    table = dict(line.split("  ", 1) for line in iosim("run", *SMALL[1:]).out.splitlines() if "  " in line)
    for line in found["lines"].values():
        if line["shown"] is not None:
            assert table[line["label"]].strip() == line["shown"]
            assert f"{line['label']:20}{line['shown']}" in shown.out
    assert found["lines"]["extra_memory"]["value"] == 2 * 256 * 256 * 2


def test_what_each_line_follows_is_in_the_json(iosim: Iosim) -> None:
    found = json.loads(iosim("explain", "-n", "64", "-d", "32", "--no-check", "--json").out)
    jsonschema.validate(found, json.loads(files("iosim").joinpath("data/explain.schema.json").read_text()))
    assert "launch.kernel_us" in found["lines"]["time"]["depends_on"]["profile"]
    assert "--stages" in found["lines"]["hbm_read"]["independent_of"]["options"]


def test_bad_input_is_one_line(iosim: Iosim) -> None:
    for args, message in (
        (("-n", "256"), "Missing option '--d'"),
        (("-n", "8", "-d", "8", "--dataflow", "flsh2"), "flash2"),
    ):
        answer = iosim("explain", *args)
        assert (answer.code, answer.out) == (2, "")
        assert message in answer.err
        assert len(answer.err.splitlines()) == 1
