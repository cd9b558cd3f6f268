"""Every dataflow against a float64 computation and against bytes counted by hand; neither shares code with iosim."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.dataflows import load_dataflow
from iosim.dtypes import dtype
from iosim.interpreters.ledger import ledger
from iosim.interpreters.replay import replay
from iosim.problem import Attention
from iosim.program import Program, Tensor
from iosim.schedule import Schedule

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Double: TypeAlias = NDArray[np.float64]

Arrays: TypeAlias = "Mapping[str, NDArray[np.float32]]"
Bytes: TypeAlias = dict[str, dict[str, int]]

laws = settings(deadline=None, max_examples=60)

# ---------------------------------------------------------------- problems and schedules


@st.composite
def problems(draw: st.DrawFn, longest: int = 30) -> Attention:
    n_q = draw(st.integers(1, longest))
    kv_heads = draw(st.integers(1, 2))
    return Attention(
        n_q=n_q,
        n_k=draw(st.just(n_q) | st.integers(1, longest)),
        d=draw(st.sampled_from([1, 4, 8])),
        d_v=draw(st.sampled_from([1, 5, 8])),
        batch=draw(st.integers(1, 2)),
        heads=kv_heads * draw(st.integers(1, 3)),
        kv_heads=kv_heads,
        causal=draw(st.booleans()),
        causal_align=draw(st.sampled_from(["bottom-right", "top-left"])),
        window=draw(st.none() | st.integers(1, longest)),
        dtype=draw(st.sampled_from(["fp16", "fp32"])),
        lse=draw(st.booleans()),
    )


@st.composite
def schedules(draw: st.DrawFn, largest: int = 13) -> Schedule:
    size = st.integers(1, largest)
    return Schedule(
        block_q=draw(size),
        block_k=draw(size),
        block_d=draw(size),
        splits=draw(st.integers(1, 5)),
        softmax=draw(st.sampled_from(["safe", "naive", "online"])),
        softmax_rows=draw(st.integers(1, 3)),
        softmax_cols=draw(st.integers(1, 40)),
    )


# ---------------------------------------------------------------- float64


def visible(a: Attention) -> NDArray[np.bool_]:
    """(n_q, n_k): which query sees which key, from the definitions of the masks."""
    query, key = np.arange(a.n_q)[:, None], np.arange(a.n_k)
    aligned = query + (a.n_k - a.n_q if a.causal_align == "bottom-right" else 0)
    seen = np.ones((a.n_q, a.n_k), bool)
    if a.causal:
        seen &= key <= aligned
    if a.window is not None:
        seen &= key > aligned - a.window
    return seen


def softmax(a: Attention, scores: Double) -> tuple[Double, Double]:
    """(probabilities, log-sum-exp) by rows; a row that sees nothing has probabilities 0 and -inf."""
    scores = np.where(visible(a), scores, -np.inf)
    top = scores.max(-1, keepdims=True)
    top[np.isneginf(top)] = 0
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        return weights / np.where(total, total, 1), (top + np.log(total))[..., 0]


def shared(a: Attention, x: Double) -> Double:
    """A key/value head for each query head."""
    return np.repeat(x, a.group, 1)


def forward(a: Attention, x: Mapping[str, Double]) -> dict[str, Double]:
    scores = x["Q"] @ shared(a, x["K"]).swapaxes(-1, -2) / np.sqrt(a.d)
    P, L = softmax(a, scores)
    return {"P": P, "L": L, "O": P @ shared(a, x["V"])}


# ---------------------------------------------------------------- running a program


def rounded(x: Double, name: str) -> NDArray[np.float32]:
    return x.astype(np.float16 if name == "fp16" else np.float32).astype(np.float32)


def normal(a: Attention, name: str, shape: tuple[int, ...]) -> Double:
    """Normal random numbers in the data dtype."""
    random = np.random.default_rng([len(name), ord(name[-1]), a.n_q, a.n_k])
    return rounded(random.standard_normal(shape), a.dtype).astype(np.float64)


def forward_inputs(a: Attention) -> dict[str, Double]:
    return {
        "Q": normal(a, "Q", (a.batch, a.heads, a.n_q, a.d)),
        "K": normal(a, "K", (a.batch, a.kv_heads, a.n_k, a.d)),
        "V": normal(a, "V", (a.batch, a.kv_heads, a.n_k, a.d_v)),
    }


def outputs(program: Program, inputs: Mapping[str, Double]) -> dict[str, NDArray[np.float32]]:
    """The outputs of a program; replay's count of bytes must be the ledger's."""

    def source(tensor: Tensor, box: tuple[tuple[int, int], ...]) -> NDArray[np.float32]:
        whole = rounded(inputs[tensor.name], tensor.dtype)
        assert whole.shape == tensor.shape
        return whole[tuple(slice(lo, hi) for lo, hi in box)]

    done = replay(program, source)
    counted = {(t, way): n for t, ways in ledger(program).by_tensor.items() for way, n in ways.items()}
    assert done.moved == counted
    return dict(done.outputs)


def assert_close(a: Attention, got: NDArray[np.float32], exact: Double, *, roundings: float, name: str) -> None:
    """`got` is `exact` up to `roundings` units of the data dtype's roundoff, relative to the largest element."""
    finite = np.isfinite(exact)
    assert (got[~finite] == exact[~finite]).all(), f"{name}: infinities differ"
    size = max(1.0, float(np.abs(exact[finite]).max(initial=0)))
    error = float(np.abs(got[finite] - exact[finite]).max(initial=0))
    allowed = (roundings * dtype(a.dtype).roundoff + 64 * 2.0**-24) * size
    assert error <= allowed, f"{name}: {error:.3g} away where {allowed:.3g} is allowed"


def check_forward(a: Attention, program: Program, *, roundings: float) -> None:
    inputs = forward_inputs(a)
    exact, got = forward(a, inputs), outputs(program, inputs)
    assert_close(a, got["O"], exact["O"], roundings=roundings, name="O")
    assert ("L" in got) == a.lse
    if a.lse:  # in fp32, of scores that only `standard` rounds
        stored = any(t.name == "S" for t in program.tensors)
        assert_close(a, got["L"], exact["L"], roundings=roundings * stored, name="L")


# ---------------------------------------------------------------- bytes by hand


def pieces(n: int, size: int) -> list[int]:
    """Rows of each tile of n rows."""
    return [min(size, n - start) for start in range(0, n, size)]


def visits(a: Attention, s: Schedule) -> NDArray[np.bool_]:
    """(query tiles, key tiles): whether some query of the one sees some key of the other."""
    seen = visible(a)
    bq, bk = s.block_q, s.block_k
    return np.array(
        [
            [seen[q : q + bq, k : k + bk].any() for k in range(0, a.n_k, bk)]
            for q in range(0, a.n_q, bq)
        ]
    )  # fmt: skip


def assert_bytes(program: Program, expected: Bytes) -> None:
    wanted = {name: {way: n for way, n in row.items() if n} for name, row in expected.items()}
    assert ledger(program).by_tensor == {name: row for name, row in wanted.items() if row}


def check_flash2(a: Attention, s: Schedule, program: Program) -> None:
    check_forward(a, program, roundings=4)
    # Q once and O once; every query tile streams the keys and values of the tiles that it sees.
    e, heads = dtype(a.dtype).bytes, a.batch * a.heads
    keys = heads * int((visits(a, s) @ pieces(a.n_k, s.block_k)).sum()) * e
    expected = {
        "Q": {"read": heads * a.n_q * a.d * e},
        "K": {"read": keys * a.d},
        "V": {"read": keys * a.d_v},
        "O": {"write": heads * a.n_q * a.d_v * e},
        "L": {"write": heads * a.n_q * 4 if a.lse else 0},
    }
    assert_bytes(program, expected)


def check_flash1(a: Attention, s: Schedule, program: Program) -> None:
    # O is rounded to the data dtype in each pass, and what is kept of it shrinks from pass to pass.
    check_forward(a, program, roundings=4 + ceil(a.n_k / s.block_k))
    # K and V once.  A pass j visits the query tiles that see a key of tile j, the first one all of them: it reads
    # their Q, writes their O, m and l, and reads what the pass before left of them, except in the first.
    e, heads = dtype(a.dtype).bytes, a.batch * a.heads
    visited = visits(a, s)
    visited[:, 0] = True
    rows = heads * np.array(pieces(a.n_q, s.block_q))
    every, later = int((rows @ visited).sum()), int((rows @ visited[:, 1:]).sum())
    lse = heads * a.n_q * 4 if a.lse else 0
    expected = {
        "Q": {"read": every * a.d * e},
        "K": {"read": heads * a.n_k * a.d * e},
        "V": {"read": heads * a.n_k * a.d_v * e},
        "O": {"read": later * a.d_v * e, "write": every * a.d_v * e},
        "m": {"read": 4 * later + lse, "write": 4 * every},
        "l": {"read": 4 * later + lse, "write": 4 * every},
        "L": {"write": lse},
    }
    assert_bytes(program, expected)
    # The paper's convention: row statistics left out.
    data = sum(n for name in "QKVO" for n in expected[name].values())
    assert ledger(program).paper_hbm_bytes == data


@laws
@given(problems(), schedules())
def test_flash2(a: Attention, s: Schedule) -> None:
    check_flash2(a, s, load_dataflow("flash2")(a, s))


@laws
@given(problems(), schedules())
def test_flash1(a: Attention, s: Schedule) -> None:
    check_flash1(a, s, load_dataflow("flash1")(a, s))


@laws
@given(problems(), schedules())
def test_standard(a: Attention, s: Schedule) -> None:
    # S is rounded to the data dtype before the softmax; the scores are below 16.
    check_forward(a, load_dataflow("standard")(a, s), roundings=64)


def check_softmax(a: Attention, s: Schedule, program: Program, kind: str) -> None:
    S = normal(a, "S", (a.batch, a.heads, a.n_q, a.n_k))
    exact, lse = softmax(a, S)
    got = outputs(program, {"S": S})
    assert_close(a, got["P"], exact, roundings=2, name="P")
    if a.lse:
        assert_close(a, got["L"], lse, roundings=0, name="L")
    # Milakov & Gimelshein 2018, section 2 and 3: accesses an element.  One read and one write where a row is one tile.
    accesses = 2 if s.softmax_cols >= a.n_k else {"naive": 3, "safe": 4, "online": 3}[kind]
    matrix = S.size * dtype(a.dtype).bytes
    statistics = S[..., 0].size * 4 if a.lse else 0
    assert_bytes(program, {"S": {"read": (accesses - 1) * matrix}, "P": {"write": matrix}, "L": {"write": statistics}})
    assert ledger(program).paper_hbm_bytes == accesses * matrix


@pytest.mark.parametrize("kind", ["naive", "safe", "online"])
@laws
@given(a=problems(), s=schedules())
def test_softmax(kind: str, a: Attention, s: Schedule) -> None:
    check_softmax(a, s, load_dataflow(f"softmax-{kind}")(a, s), kind)
