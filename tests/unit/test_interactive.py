"""The page's timeline: its data are those of `iosim report timeline --json`, and nothing in them becomes markup."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from importlib.resources import files

import jsonschema
import pytest

from iosim.dataflows import load_dataflow
from iosim.hardware import load_hardware
from iosim.problem import Attention
from iosim.report.everything import extras
from iosim.report.interactive import part
from iosim.report.timeline import document
from iosim.study.pipeline import Pipeline, pipeline

SCHEMA = json.loads(files("iosim").joinpath("data/timeline.schema.json").read_text())


@pytest.fixture(scope="module")
def small() -> Pipeline:
    return pipeline(Attention(n_q=256, d=64), load_dataflow("flash2"), load_hardware("mp31"), {}, iterations=(0, 2))


def data_of(html: str) -> dict[str, object]:
    found = re.search(r'<script type="application/json" id="[\w-]+">(.*?)</script>', html)
    assert found is not None
    out: dict[str, object] = json.loads(found[1])
    return out


def test_the_page_has_the_spans_of_the_command(small: Pipeline) -> None:
    found = data_of(part(small).html)
    colours, waits = found.pop("colours"), found.pop("waits")
    jsonschema.validate(found, SCHEMA)
    assert found == json.loads(json.dumps(document(small, {})))
    names = [(n["kind"], n["name"]) for n in document(small, {})["names"]]
    assert {name for kind, name in names if kind == "wait"} <= set(waits)  # type: ignore[call-overload]
    units = {t["name"] for s in document(small, {})["stages"] for t in s.get("tracks", []) if t["kind"] == "unit"}
    assert units <= set(colours)  # type: ignore[call-overload]


def test_stages_that_do_not_fit_cannot_be_chosen() -> None:
    a, machine = Attention(n_q=512, d=128), load_hardware("mp31")
    found = pipeline(a, load_dataflow("flash2"), machine, {"block_q": 64, "block_k": 128}, iterations=(0, 2))
    radios = re.findall(r'value="(\d)"( checked| disabled)?>', part(found).html)
    assert radios == [("0", ""), ("1", " checked"), ("2", " disabled")]
    (whole,) = extras([512], {"d": 128}, [machine], ["flash2"])  # the page takes a tile of which all three fit
    assert re.findall(r'value="(\d)"( checked| disabled)?>', whole.html) == [("0", ""), ("1", " checked"), ("2", "")]


def test_several_machines_have_a_timeline_each_and_one_script() -> None:
    machines = [load_hardware(name) for name in ("mp31", "mp22", "h200-sxm")]  # mp22 has no time
    made = extras([256], {"d": 64}, machines, ["flash2"])
    assert [e.name for e in made] == ["timeline", "timeline-2"]
    assert [bool(e.script) for e in made] == [True, False]
    ids = re.findall(r' id="([^"]+)"', "".join(e.html for e in made))
    assert len(ids) == len(set(ids)) == 4


def test_a_name_cannot_end_the_script(small: Pipeline) -> None:
    named = replace(small, kernel="</script><i>", kernels=("</script><i>", "other"))
    html = part(named).html
    assert html.count("</script>") == 1
    assert "<i>" not in html
    assert data_of(html)["kernel"] == "</script><i>"
