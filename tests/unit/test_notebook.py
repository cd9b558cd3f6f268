"""Results in a notebook: well-formed HTML that says what the terminal says, and lets no name become markup."""

from __future__ import annotations

from html import unescape
from xml.etree import ElementTree

import pytest

import iosim
from iosim.dataflows import load_dataflow
from iosim.hardware import load_hardware
from iosim.problem import Attention
from iosim.report.memory import section
from iosim.report.text import rows
from iosim.study.checklist import checklist
from iosim.study.explain import explain
from iosim.study.memory import memory
from iosim.study.pipeline import pipeline
from iosim.study.run import compare, evaluate, plan_of
from iosim.words import size

SMALL = Attention(n_q=128, d=32)


def cells(html: str) -> list[list[str]]:
    """The rows of the tables; raises for markup that is not well-formed."""
    root = ElementTree.fromstring(f"<div>{html}</div>")  # noqa: S314 - our own
    return [["".join(cell.itertext()) for cell in row] for row in root.iter("tr")]


def test_a_comparison_shows_the_lines_of_run() -> None:
    found = compare(SMALL, hardware=("mp31", "h200-sxm"), check=False)
    table = cells(found._repr_html_())
    names = [f"{flow} on {hw}" for hw in ("mp31", "h200-sxm") for flow in ("standard", "flash2")]
    assert table[0] == ["", *names]
    assert table[1:] == [[label, *(cell(r) for r in found.runs)] for label, cell, _ in rows(found.runs)]


def test_one_run_has_one_column() -> None:
    table = cells(iosim.run(SMALL, check=False)._repr_html_())
    assert table[0] == ["", "flash2"]
    assert {len(row) for row in table} == {2}
    training = iosim.run(SMALL, computes="training", check=False)
    assert ["extra memory", size(training.ledger.extra_bytes)] in cells(training._repr_html_())


def test_a_name_from_outside_is_no_markup() -> None:
    machine = load_hardware("mp31").with_value("title", "<script>alert(1)</script>")
    html = iosim.run(SMALL, hardware=machine, check=False)._repr_html_()
    assert "<script" not in html
    assert "<script>alert(1)</script>" in unescape(html)


def test_a_section_shows_all_of_its_tables() -> None:
    found = section(memory([512, 1024], {"d": 64}, [load_hardware("mp31")]), {})
    assert len(cells(found._repr_html_())) == sum(1 + len(t.rows) for t in found.tables)


@pytest.mark.parametrize("what", ["checklist", "explanation", "pipeline"])
def test_other_results_show_what_their_command_prints(what: str) -> None:
    machine, flow = load_hardware("mp31"), load_dataflow("flash2")
    plan = plan_of(SMALL, machine, flow, {})
    found, module = {
        "checklist": (lambda: checklist(SMALL, flow, machine, {}), "checklist"),
        "explanation": (lambda: explain(plan, evaluate(plan), {}, depends=False), "explain"),
        "pipeline": (lambda: pipeline(SMALL, flow, machine, {}), "timeline"),
    }[what]
    made = found()
    render = __import__(f"iosim.report.{module}", fromlist=["render"]).render
    root = ElementTree.fromstring(made._repr_html_())  # noqa: S314 - our own
    assert (root.tag, "".join(root.itertext())) == ("pre", render(made))
