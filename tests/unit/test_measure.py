"""`iosim measure`: which calls, what is written, and that `iosim validate` reads it; with times that were made up."""

from __future__ import annotations

import csv
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import as_file, files
from pathlib import Path

import pytest

from iosim.errors import InputError
from iosim.problem import Attention
from iosim.study import measure as study
from iosim.study.measure import Call, CallError, Measured, Timed
from iosim.study.validate import validate
from iosim.study.validate.readers import read

SHIPPED = list(csv.DictReader(files("iosim").joinpath("data/h200_attention.csv").read_text().splitlines()))
TIMED = Timed(ms=1.25, ms_p20=1.2, ms_p80=1.3, peak_extra_bytes=4096)


class Fake:
    """A caller that answers by a function."""

    def __init__(self, answer: Callable[[Call], Timed]) -> None:
        self._answer = answer

    def time(self, call: Call) -> Timed:
        return self._answer(call)


def shapes(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "shapes.csv"
    file.write_text(text)
    return file


def test_the_columns_are_those_of_the_shipped_file_and_the_alignment() -> None:
    assert (*SHIPPED[0], "causal_align") == study.COLUMNS


def test_the_calls_are_those_that_were_measured() -> None:
    calls = study.planned()
    assert len(calls) == len(SHIPPED) == 181
    assert [(c.section, c.implementation, c.problem.n_q) for c in calls] == [
        (r["section"], r["impl"], int(r["n_q"])) for r in SHIPPED
    ]
    decode = study.planned(["decode", "cross"])
    assert {c.section for c in decode} == {"decode", "cross"}


def test_an_unknown_section_is_named() -> None:
    with pytest.raises(InputError, match=r"^--sections: 'forwards' is not one of forward, .*did you mean 'forward'\?"):
        study.planned(["forwards"])


def test_a_line_of_shapes_stands_for_all_implementations(tmp_path: Path) -> None:
    calls = study.planned_from(shapes(tmp_path, "n,d,heads,causal\n256,64,8,1\n"))
    assert [c.implementation for c in calls] == ["flash2", "cudnn", "efficient", "standard"]
    problem = Attention(n_q=256, d=64, heads=8, causal=True, causal_align="top-left")
    assert {(c.section, c.direction, c.problem) for c in calls} == {("shapes", "forward", problem)}


def test_a_line_may_name_its_implementation_and_pass(tmp_path: Path) -> None:
    (call,) = study.planned_from(shapes(tmp_path, "impl,pass,dtype,n_q,d\nfa2,bwd,bf16,256,64\n"))
    assert (call.implementation, call.direction, call.problem.dtype) == ("flash2", "backward", "bf16")


BAD = {
    "implementation": (
        "impl,n,d\nflash3,256,64\n",
        "shapes.csv:2: impl: 'flash3' can't be measured; these can: flash2",
    ),
    "both passes": ("pass,n,d\nboth,256,64\n", "shapes.csv:2: pass: 'both' can't be measured; fwd and bwd can"),
    "window": ("n,d,window\n256,64,8\n", "shapes.csv:2: window: can't be measured"),
    "no d": ("n\n256\n", "shapes.csv:2: d: the file has no such column"),
    "column": ("n,dd\n256,64\n", "shapes.csv:1: column 'dd' is not known"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_shapes_are_one_line(tmp_path: Path, case: str) -> None:
    text, words = BAD[case]
    with pytest.raises(InputError) as caught:
        study.planned_from(shapes(tmp_path, text))
    assert str(caught.value).startswith(words)


def test_what_is_written_is_what_validate_reads(tmp_path: Path) -> None:
    """The shipped rows, answered by a fake: written and read, they are the same rows."""
    rows = iter(SHIPPED)

    def answer(call: Call) -> Timed:
        row = next(rows)
        aligned = "top-left" if call.problem.causal else ""
        return Timed(
            float(row["ms"]), float(row["ms_p20"]), float(row["ms_p80"]), int(row["peak_extra_bytes"]), aligned
        )

    file = tmp_path / "calls.csv"
    file.write_text(study.as_csv(study.measure(study.planned(), Fake(answer))))
    written = list(csv.DictReader(file.read_text().splitlines()))
    assert [{k: v for k, v in row.items() if k != "causal_align"} for row in written] == SHIPPED
    with as_file(files("iosim").joinpath("data/h200_attention.csv")) as shipped:
        assert [replace(r, file="", machine="") for r in read(file)] == [
            replace(r, file="", machine="") for r in read(shipped)
        ]


def test_validate_scores_a_written_file(tmp_path: Path) -> None:
    """O and the log-sum-exp of 4 heads, and two numbers of the generator: 4 x 256 x (64 x 2 + 4) + 2 x 512 bytes."""
    call = study.planned_from(shapes(tmp_path, "impl,n,d,heads\nflash2,256,64,4\n"))[0]
    file = tmp_path / "calls.csv"
    file.write_text(study.as_csv(study.measure([call], Fake(lambda _: replace(TIMED, peak_extra_bytes=136192)))))
    scores = validate([file], hardware="h200-calibrated").scores
    (peak,) = [s for s in scores if s.quantity.name == "peak_extra_bytes"]
    assert (peak.status, peak.measured, peak.predicted) == ("scored", 136192, 136192)


def test_the_alignment_that_ran_is_read_back(tmp_path: Path) -> None:
    """Two queries and four keys: 2 + 1 pairs aligned at the top left, 4 + 3 at the bottom right."""
    call = study.planned_from(shapes(tmp_path, "impl,n_q,n_k,d,causal\nflash2,2,4,64,1\n"))[0]
    file = tmp_path / "calls.csv"
    for align, pairs in (("top-left", 3), ("bottom-right", 7)):
        timed = Timed(1.0, 1.0, 1.0, 512, align)
        file.write_text(study.as_csv(Measured(((call, timed),), ())))
        problem = read(file)[0].problem
        assert problem is not None
        assert (problem.causal_align, problem.pairs) == (align, pairs)


def test_a_call_that_fails_is_left_out_and_said(tmp_path: Path) -> None:
    def answer(call: Call) -> Timed:
        if call.implementation == "efficient":
            raise CallError("no grouped heads")
        return TIMED

    calls = study.planned_from(shapes(tmp_path, "n,d,heads,kv_heads\n256,64,8,2\n"))
    seen: list[str] = []
    found = study.measure(calls, Fake(answer), seen.append)
    assert [c.implementation for c, _ in found.timed] == ["flash2", "cudnn", "standard"]
    assert len(study.as_csv(found).splitlines()) == 4
    assert study.summary(found) == (
        "3 calls measured, 1 left out\n  efficient forward 1 x 8 heads, N 256, d 64: no grouped heads\n"
    )
    assert seen[0] == "1 of 4: flash2 forward 1 x 8 heads, N 256, d 64"
