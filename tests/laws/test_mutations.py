"""The checks are no rubber stamp: every fault planted in the source of a dataflow is noticed.

Faults by rule: each store left out, each load done twice, each update, mask, product or rescale left out.  And some by
hand that leave the program well-formed: a wrong rescale, a wrong dtype in memory, a wrong range.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import pytest

import iosim.dataflows
from iosim.blockmask import BlockMask
from iosim.dataflows import load_dataflow
from iosim.errors import InputError
from iosim.problem import Attention
from iosim.program import Program
from iosim.schedule import Schedule
from tests.dataflow_checks import CHECKS

HOME = Path(iosim.dataflows.__file__).parent

PROBLEMS = (
    Attention(n_q=23, n_k=31, d=8, d_v=5, heads=4, kv_heads=2, batch=2, causal=True, lse=True, dtype="fp32"),
    Attention(n_q=31, n_k=23, d=8, causal=True, causal_align="top-left", window=9, lse=True),
    Attention(n_q=31, n_k=17, d=8, heads=2, causal=True, window=5, dtype="fp32"),
    Attention(n_q=17, d=8, lse=True),
    Attention(n_q=23, n_k=31, d=8, d_v=5, heads=4, kv_heads=2, lse=True, dtype="fp8", sinks=True, dropout=0.3),
    Attention(
        n_q=11, n_k=17, d=8, heads=3, kv_heads=1, batch=2, lse=True, dtype="fp32", softcap=0.7, alibi=True, bias="full"
    ),
    Attention(
        n_q=23, n_k=31, d=8, heads=2, batch=2, lse=True, causal=True, window=5, global_tokens=9, dtype="fp32",
        sinks=True, dropout=0.3, bias="heads",
    ),
    Attention(n_q=79, n_k=70, d=8, causal=True, dtype="fp32", block_mask=BlockMask.of([[0, 1, 0], [1, 0, 1]])),
    Attention(n_q=1, n_k=31, d=8, d_v=5, heads=9, kv_heads=1, batch=2, lse=True, dtype="fp32"),
    Attention(n_q=23, n_k=31, d=8, d_v=5, heads=2, kv_heads=1, causal=True, window=9, lse=True, dtype="fp32"),
    Attention(n_q=11, n_k=17, d=8, heads=2, batch=2, dtype="fp32", dropout=0.3, bias="shared", causal=True),
    Attention(n_q=11, n_k=17, d=8, heads=2, dtype="fp32", bias="full", causal=True),
)  # fmt: skip
SCHEDULES = (
    Schedule(block_q=8, block_k=6, block_d=7, splits=3, softmax="online", softmax_rows=2, softmax_cols=7),
    Schedule(block_q=5, block_k=8, block_d=4, splits=2, softmax_rows=3, softmax_cols=31, scores="fp32"),
    Schedule(block_q=8, block_k=8, block_d=4, softmax_cols=31, separate=("scale", "copy", "mask", "product"), band=2),
)
SHARED = {  # the dataflows that use a shared file
    "elementwise": ("standard", "standard-backward"),
    "row_softmax": ("softmax-naive", "softmax-safe", "softmax-online", "standard"),
    "tiles": ("flash2", "standard", "flash1", "split-kv", "flash-backward", "softmax-safe"),
}


class Fault(NamedTuple):
    file: str
    what: str
    source: str  # of the file, with the fault


def by_rule(file: str) -> Iterator[Fault]:
    """A fault for each line that is a load, a store or another statement of the program."""
    lines = (HOME / f"{file}.py").read_text().splitlines()
    for n, line in enumerate(lines):
        if re.match(r"\s*[\w, ]+ = p\.load\(", line):
            what, instead = "twice", [line, line]
        elif re.match(
            r"\s*(p\.(store|mul|add|exp|max|copy|matmul|mask|block_mask|softcap|alibi|fma|dropout)|mask_edges|mask_keys|drop"
            r"|scores\.change)\(.*\)$",
            line,
        ):
            what, instead = "without", [re.sub(r"\S.*", "pass", line)]
        else:
            continue
        yield Fault(file, f"{what} line {n + 1}: {line.strip()}", "\n".join([*lines[:n], *instead, *lines[n + 1 :]]))


BY_HAND = {  # by file: (old, new); each `old` is in the file once
    "flash1": [
        ('p.exp("shrink", m, new, scale=a.scale)', 'p.exp("shrink", m, new)'),
        ("p.mul(y, y, grow)", "y"),
        ("p.when(j, 1, k_tiles)", "p.when(j, 0, k_tiles)"),
        ("lo = least(lo, j * q_tiles)", "pass"),
    ],
    "flash2": [
        ('shrink = p.exp("shrink", m, new, scale=scale)', 'shrink = p.exp("shrink", m, new)'),
        ("p.mul(o, o, shrink)", "p.mul(o, o, l)"),
        ("p.loop(name, edges[0], edges[3])", "p.loop(name, 0, edges[3])"),
        ('p.div("out", o, l)', 'p.div("out", o, shrink)'),
        ("h = kv * a.group + g", "h = kv + g"),
        ("p.sub(m, m, lift)", "pass"),
        ("p.div(unit, unit, sv)", "p.div(unit, sv, unit)"),
        ("SQ[b, h, rows(i, 1)]", "SQ[b, h, rows(0, 1)]"),
        ("SK[b, kv, rows(j, 1)]", "SV[b, kv, rows(j, 1)]"),
        ("GAIN if a.is_fp8 else 1)", "1)"),
        ("by=1 / (1 - a.dropout)", "by=1 - a.dropout"),
    ],
    "split_kv": [
        ('Lt = p.tensor("L parts", (s.splits, a.batch, a.heads, a.n_q), "fp32"',
         'Lt = p.tensor("L parts", (s.splits, a.batch, a.heads, a.n_q), a.dtype'),
        ('shrink = p.exp("shrink", m, new)', 'shrink = p.exp("shrink", m, new, scale=a.scale)'),
        ('weight = p.exp("weight", lt, new)', 'weight = p.exp("weight", lt, m)'),
        ("least(edges[3], (t + 1) * run)", "edges[3]"),
        ("value=0 if sinks is None else 1)", "value=0)"),
        ("by=1 / (1 - a.dropout)", "by=1"),
        ("cdiv(cdiv(a.n_k, bk), s.splits)", "cdiv(a.n_k, bk) // s.splits"),
    ],
    "mla": [
        ("(t + 1) * run)", "hi)"),
        ("if L is not O:", "if parts:"),
        ("p.matmul(x, qr, r.T, add=True)", "p.matmul(x, qr, r.T)"),
    ],
    "flash_backward": [
        ("by=1 / by", "by=by"),
        ("p.sub(dp, dp, di)", "dp"),
        ('summed = to.dk.role == "scratch"', "summed = False"),
        ("x if slope is None else p.mul(x, x, slope)", "x"),
        ('x if keep is None else p.mul("kept", x, keep)', "x"),
        ("p.scale(dp, p.mul(dp, dp, keep), by=1 / (1 - a.dropout))", "p.mul(dp, dp, keep)"),
        ("p.scale(dv, dv, by=1 / (1 - a.dropout)) if a.dropout else dv", "dv"),
        ('head = 0 if a.bias == "shared" else h', "head = h * 0"),
        ('b if a.bias == "full" else 0', "0"),
        ("if not whole or is_masked(a)", "if not whole"),
        ('p.exp("weight", sink, top)', 'p.exp("weight", sink, lse)'),
        ("p.scale(dk, dk, by=a.scale)", "dk"),
        ('_convert(p, a, bq, dQs, "dQ", by=a.scale)', '_convert(p, a, bq, dQs, "dQ")'),
        ('dQs = p.tensor("dQ sum", like_q, "fp32"', 'dQs = p.tensor("dQ sum", like_q, a.dtype'),
    ],
    "standard": [
        ("1 if scaled else a.scale)", "1)"),
        ("1 if scaled else a.scale)", "a.scale)"),
        ("by=1 / (1 - a.dropout)", "by=1"),
        ("/ GAIN / (1 - a.dropout)", "/ GAIN"),
        ("P = _dropped(p, a, P)", "_dropped(p, a, P)"),
        ('p.scale("qs", q, by=a.scale)', 'p.scale("qs", q, by=1)'),
        ("masked=separate", "masked=True"),
        ("at[0] * band + at[2]", "at[0] + at[2]"),
        ("matrix, s.scores_dtype(a.score_dtype)", 'matrix, "fp32"'),
        ("matrix, s.scores_dtype(a.score_dtype)", "matrix, a.score_dtype"),
        ("matrix, s.scores_dtype(a.dtype)", 'matrix, "fp32"'),
        ("matrix, s.scores_dtype(a.dtype)", "matrix, a.dtype"),
        ("once=True, gain", "once=False, gain"),
        ("gain = GAIN if a.is_fp8 else 1", "gain = 1"),
        ("cdiv(a.n_k, step)", "a.n_k // step"),
    ],
    "standard_backward": [
        ('p.rowsum(name, dp if product else p.mul("product", pr, dp))', "p.rowsum(name, dp)"),
        ("PdP if product else dP", "dP"),
        ('p.scale("scaled", x, by=a.scale)', 'p.scale("scaled", x, by=1)'),
        ('dP, dS = p.tensor("dP", scores, kept', 'dP, dS = p.tensor("dP", scores, "fp32"'),
        ("s.scores_dtype(a.dtype)", "a.dtype"),
        ("_over_queries(p, a, s, strided, dS, Q, a.scale)", "_over_queries(p, a, s, strided, dS, Q, 1)"),
        ("p.loop(index, 0, times)", "p.loop(index, 1, times)"),
        ('p.tensor("P dropped", scores, kept, "in") if a.dropout else P', "P"),
        ("p.scale(dp, p.mul(dp, dp, keep), by=1 / (1 - a.dropout))", "p.mul(dp, dp, keep)"),
        ("dP = _dropped(p, a, dP)", "_dropped(p, a, dP)"),
        ("dS = _through_cap(p, a, s, Q, K, dS)", "_through_cap(p, a, s, Q, K, dS)"),
        ("dS[b + n, h + m, ", "dS[b, h, "),
    ],
    "elementwise": [
        ("cdiv(n, r)", "n // r"),
    ],
    "row_softmax": [
        ('p.exp("shrink", m, new)', 'p.exp("shrink", new, m)'),
        ("value=0 if kind", "value=0 if True"),
        ('l = p.rowsum("l", e)', 'l = p.rowmax("l", e)'),
        ('p.add("lse", m, p.log("ln", l))', 'p.log("lse", l)'),
    ],
    "tiles": [
        ("least(end + a.diagonal, a.n_k)), block_k)", "least(end + a.diagonal - 1, a.n_k)), block_k)"),
        ("low = a.diagonal + 1 - a.window\n        lo", "low = a.diagonal - a.window\n        lo"),
        ("low = a.window - a.diagonal\n", "low = a.window - a.diagonal - 2\n"),
        ("least(first + a.diagonal + 1, a.n_k)", "least(first + a.diagonal + 2, a.n_k)"),
        ("cdiv(most(0, end - 1 - a.diagonal), block_q)", "cdiv(most(0, end - 2 - a.diagonal), block_q)"),
        ("return lo, left, right, hi\n", "return 0, left, right, hi\n"),
        ("high = a.diagonal if", "high = 0 if"),
        ("None if a.window is None else a.diagonal + 1", "None if a.window is None else a.diagonal + 2"),
        ("kept=a.global_tokens", "kept=a.global_tokens - 1"),
        ("(0, 0, whole, least(hi, tiles))", "(0, 0, least(hi, tiles), least(hi, tiles))"),
        ("(most(lo, tiles), left", "(lo, left"),
        ("b if batch > 1 else 0", "0"),
        ("h if heads > 1 else 0", "0"),
        ("batch=b, head=h", "batch=b, head=0"),
        ("diagonal=a.diagonal, head=h", "diagonal=0, head=h"),
        ("end[0] * tiles for", "end[0] * tiles + end[0] for"),
        ("hi = most(hi, some)", "pass"),
        ("right = most(right, only)", "right = most(right, some)"),
        ("by=-1 / a.softcap**2", "by=-1 / a.softcap"),
    ],
}  # fmt: skip


def by_hand(file: str) -> Iterator[Fault]:
    source = (HOME / f"{file}.py").read_text()
    for old, new in BY_HAND.get(file, []):
        assert source.count(old) == 1, f"{file}.py has {old!r} {source.count(old)} times"
        yield Fault(file, f"{old.strip()} -> {new.strip()}", source.replace(old, new))


FILES = sorted({name.replace("-", "_") for name in CHECKS if not name.startswith("softmax")} | SHARED.keys())
FAULTS = [fault for file in FILES for find in (by_rule, by_hand) for fault in find(file)]


def planted(file: str, source: str, flow: str, patch: pytest.MonkeyPatch) -> Callable[[Attention, Schedule], Program]:
    """The dataflow `flow` from its source, with that of `file` replaced."""
    stem = flow.replace("-", "_")
    sources = {file: source}
    if file == "tiles" and flow.startswith(("softmax", "standard")):
        sources["row_softmax"] = (HOME / "row_softmax.py").read_text()
    sources.setdefault(stem, (HOME / f"{stem}.py").read_text())
    for name, text in sources.items():
        module = ModuleType(f"iosim.dataflows.{name}")
        patch.setitem(sys.modules, module.__name__, module)  # before it runs: dataclasses look there
        exec(compile(text, f"{name}.py", "exec"), module.__dict__)
    write: Callable[[Attention, Schedule], Program] = getattr(module, stem)
    return write


def noticed(flow: str, write: Callable[[Attention, Schedule], Program]) -> bool:
    """Whether the language refuses the program, or the checks of its numbers and bytes fail."""
    for a, s in product(PROBLEMS, SCHEDULES):
        if load_dataflow(flow).refusal(a) or (s.separate and a.is_fp8):
            continue
        try:
            CHECKS[flow](a, s, write(a, s))
        except (AssertionError, InputError):
            return True
    return False


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("fault", FAULTS, ids=[f"{f.file}-{n}" for n, f in enumerate(FAULTS)])
def test_a_planted_fault_is_noticed(fault: Fault, monkeypatch: pytest.MonkeyPatch) -> None:
    flows = SHARED.get(fault.file, (fault.file.replace("_", "-"),))
    assert any(noticed(flow, planted(fault.file, fault.source, flow, monkeypatch)) for flow in flows), fault.what


@pytest.mark.slow
@pytest.mark.parametrize("flow", CHECKS)
def test_without_a_fault_nothing_is(flow: str, monkeypatch: pytest.MonkeyPatch) -> None:
    stem = flow.replace("-", "_")
    assert not noticed(flow, planted(stem, (HOME / f"{stem}.py").read_text(), flow, monkeypatch))
