"""What every dataflow is held against: attention in float64, and bytes counted by hand; no code shared with iosim.

`CHECKS[name](attention, schedule, program)` raises an AssertionError where the program of that dataflow computes, or
moves, anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from math import ceil
from typing import TYPE_CHECKING, TypeAlias

import ml_dtypes
import numpy as np

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

Bytes: TypeAlias = dict[str, dict[str, int]]
Check: TypeAlias = Callable[[Attention, Schedule, Program], None]

# ---------------------------------------------------------------- float64


def suited(name: str, a: Attention) -> Attention:
    """The problem as the dataflow takes it: in latent attention all heads share a latent, of which V is a part."""
    return replace(a, kv_heads=1, d=a.d + a.d_v) if load_dataflow(name).refusal(a) else a


def visible(a: Attention) -> NDArray[np.bool_]:
    """(n_q, n_k): which query sees which key, from the definitions of the masks."""
    query, key = np.arange(a.n_q)[:, None], np.arange(a.n_k)
    aligned = query + (a.n_k - a.n_q if a.causal_align == "bottom-right" else 0)
    seen = np.ones((a.n_q, a.n_k), bool)
    if a.causal:
        seen &= key <= aligned
    if a.window is not None:
        seen &= (key > aligned - a.window) | (key < a.global_tokens)
    if a.block_mask is not None:
        table = np.array([list(row) for row in a.block_mask.rows])
        height, width = ceil(a.n_q / table.shape[0]), ceil(a.n_k / table.shape[1])
        seen &= np.kron(table, np.ones((height, width)))[: a.n_q, : a.n_k] > 0
    return seen


def slope(head: int, heads: int) -> float:
    """ALiBi's, as in its authors' code: of a power of 2, or of the one below, then every second of the one above."""
    if heads & (heads - 1) == 0:
        return float(2 ** (-8 / heads)) ** (head + 1)
    power = 2 ** int(np.log2(heads))
    return slope(head, power) if head < power else slope(2 * (head - power), 2 * power)


def philox(counter: tuple[int, int, int, int], rounds: int = 7) -> list[int]:
    """Philox 4x32 with a key of 0, on Python's integers."""
    (a, b, c, d), k, m, mask = counter, 0, 0, 2**32 - 1
    for _ in range(rounds):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57
        a, b, c, d = (y >> 32) ^ b ^ k, y & mask, (x >> 32) ^ d ^ m, x & mask
        k, m = (k + 0x9E3779B9) & mask, (m + 0xBB67AE85) & mask
    return [a, b, c, d]


def kept(a: Attention) -> Double:
    """(batch, heads, n_q, n_k): 0 where a weight is dropped, else 1 / (1 - p)."""
    out = np.zeros((a.batch, a.heads, a.n_q, ceil(a.n_k / 16) * 16))
    for b, h, q, chunk in np.ndindex(a.batch, a.heads, a.n_q, ceil(a.n_k / 16)):
        numbers = b"".join(word.to_bytes(4, "little") for word in philox((chunk, q, h, b)))
        out[b, h, q, chunk * 16 : chunk * 16 + 16] = [n >= round(256 * a.dropout) for n in numbers]
    return out[..., : a.n_k] / (1 - a.dropout)


def softmax(a: Attention, scores: Double, sinks: Double | None = None) -> tuple[Double, Double]:
    """(probabilities, log-sum-exp) by rows; a row that sees nothing has probabilities 0 and -inf.

    A sink is one more column, that is left out at the end.
    """
    scores = np.where(visible(a), scores, -np.inf)
    if sinks is not None:
        scores = np.concatenate([scores, np.broadcast_to(sinks[:, None, None], (*scores.shape[:-1], 1))], -1)
    top = scores.max(-1, keepdims=True)
    top[np.isneginf(top)] = 0
    weights = np.exp(scores - top)
    total = weights.sum(-1, keepdims=True)
    with np.errstate(divide="ignore"):
        probabilities = weights[..., : a.n_k] / np.where(total, total, 1)
        return probabilities, (top + np.log(total))[..., 0]


def shared(a: Attention, x: Double) -> Double:
    """A key/value head for each query head."""
    heads: Double = np.repeat(x, a.group, 1)
    return heads


def forward(a: Attention, x: Mapping[str, Double]) -> dict[str, Double]:
    scores = x["Q"] @ shared(a, x["K"]).swapaxes(-1, -2) / np.sqrt(a.d)
    if a.softcap is not None:
        scores = a.softcap * np.tanh(scores / a.softcap)
    if a.alibi:
        shift = a.n_k - a.n_q if a.causal_align == "bottom-right" else 0
        slopes = np.array([slope(h, a.heads) for h in range(a.heads)])
        scores = scores - slopes[:, None, None] * np.abs(np.arange(a.n_q)[:, None] + shift - np.arange(a.n_k))
    scores = scores + x.get("bias", 0)
    P, L = softmax(a, scores, x.get("sinks"))
    return {"P": P, "L": L, "O": (P * kept(a) if a.dropout else P) @ shared(a, x["V"])}


def backward(a: Attention, x: Mapping[str, Double]) -> dict[str, Double]:
    """The gradients of the sum of dO * O."""
    known = forward(a, x)
    left = kept(a) if a.dropout else 1.0
    dP = x["dO"] @ shared(a, x["V"]).swapaxes(-1, -2) * left
    D = (dP * known["P"]).sum(-1, keepdims=True)
    through = known["P"] * (dP - D)  # what a bias gets
    dS = through / np.sqrt(a.d)
    if a.softcap is not None:
        dS = dS / np.cosh(x["Q"] @ shared(a, x["K"]).swapaxes(-1, -2) / np.sqrt(a.d) / a.softcap) ** 2

    def over_group(y: Double) -> Double:
        return y.reshape(a.batch, a.kv_heads, a.group, *y.shape[2:]).sum(2)

    out = {
        "dQ": dS @ shared(a, x["K"]),
        "dK": over_group(dS.swapaxes(-1, -2) @ x["Q"]),
        "dV": over_group((known["P"] * left).swapaxes(-1, -2) @ x["dO"]),
    }
    if a.bias is not None:
        axes = {"shared": (0, 1), "heads": (0,), "full": ()}[a.bias]
        out["dbias"] = through.sum(axes, keepdims=True)
    if a.sinks:
        out["dsinks"] = -(np.exp(x["sinks"][:, None] - known["L"]) * D[..., 0]).sum((0, 2))
    return out


# ---------------------------------------------------------------- running a program


def rounded(x: Double, name: str) -> NDArray[np.float32]:
    kind = {"fp16": np.float16, "fp8_e4m3": ml_dtypes.float8_e4m3fn}.get(name, np.float32)
    return x.astype(kind).astype(np.float32)


def normal(a: Attention, name: str, shape: tuple[int, ...]) -> Double:
    """Normal random numbers in the data dtype."""
    random = np.random.default_rng([len(name), ord(name[-1]), a.n_q, a.n_k])
    return rounded(random.standard_normal(shape), a.dtype).astype(np.float64)


def forward_inputs(a: Attention) -> dict[str, Double]:
    beside: dict[str, Double] = {}
    if a.bias is not None:
        lead = {"shared": (1, 1), "heads": (1, a.heads), "full": (a.batch, a.heads)}[a.bias]
        beside["bias"] = np.round(4 * normal(a, "bias", (*lead, a.n_q, a.n_k))) / 4  # exact in every format
    if a.sinks:
        beside["sinks"] = np.random.default_rng(a.heads).standard_normal(a.heads).astype(np.float32).astype(np.float64)
        beside["sinks"][0] = 100  # exp of which overflows, unless it is the maximum that is subtracted
    return beside | {
        "Q": normal(a, "Q", (a.batch, a.heads, a.n_q, a.d)),
        "K": normal(a, "K", (a.batch, a.kv_heads, a.n_k, a.d)),
        "V": normal(a, "V", (a.batch, a.kv_heads, a.n_k, a.d_v)),
    }


def scaled(program: Program, inputs: Mapping[str, Double]) -> tuple[dict[str, Double], dict[str, Double]]:
    """The inputs with random scales where the program wants some, and what they stand for."""
    given, true = dict(inputs), dict(inputs)
    random = np.random.default_rng(len(program.tensors))
    for t in program.tensors:
        if t.scales is not None:
            given[t.name] = random.uniform(0.5, 2, t.shape).astype(np.float32).astype(np.float64)
            each = np.repeat(given[t.name], t.scales.rows, -1)[..., : inputs[t.scales.tensor].shape[-2]]
            true[t.scales.tensor] = inputs[t.scales.tensor] * each[..., None]
    return given, true


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
    inputs, true = scaled(program, forward_inputs(a))
    exact, got = forward(a, true), outputs(program, inputs)
    if a.is_fp8:  # P once, by 2^-4 of each weight, and S in fp16
        weights = exact["P"] * kept(a) if a.dropout else exact["P"]
        size = weights @ np.abs(shared(a, true["V"]))
        assert (np.abs(got["O"] - exact["O"]) <= (2**-4 + 0.01) * size + 2**-100).all()
    else:
        assert_close(a, got["O"], exact["O"], roundings=roundings, name="O")
    assert ("L" in got) == a.lse
    if a.lse:  # in fp32, of scores that only `standard` rounds
        stored = any(t.name == "S" for t in program.tensors)
        assert_close(a, got["L"], exact["L"], roundings=roundings * stored / (2**7 if a.is_fp8 else 1), name="L")


# ---------------------------------------------------------------- bytes by hand


# Reads of a row that does not fit on chip (Milakov & Gimelshein 2018, sections 2 and 3): with its write, 3, 4 and 3.
PASSES = {"naive": 2, "safe": 3, "online": 2}


def pieces(n: int, size: int) -> list[int]:
    """Rows of each tile of n rows."""
    return [min(size, n - start) for start in range(0, n, size)]


def score(a: Attention, s: Schedule) -> int:
    """Bytes of a stored score."""
    return 4 if s.scores == "fp32" else dtype(a.dtype).bytes


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
        "O": {"write": heads * a.n_q * a.d_v * max(e, 2)},
        "L": {"write": heads * a.n_q * 4 if a.lse else 0},
    }
    if a.bias is not None:  # the part of the matrix in the tiles that are visited
        elements = pieces(a.n_q, s.block_q) @ visits(a, s) @ pieces(a.n_k, s.block_k)
        expected["bias"] = {"read": heads * int(elements) * max(e, 2)}
    if a.sinks:
        expected["sinks"] = {"read": 4 * heads * len(visits(a, s))}
    if a.is_fp8:  # a scale of four bytes with each tile
        expected["SQ"] = {"read": 4 * heads * len(visits(a, s))}
        expected["SK"] = expected["SV"] = {"read": 4 * heads * int(visits(a, s).sum())}
    assert_bytes(program, expected)


def check_standard(a: Attention, s: Schedule, program: Program) -> None:
    # S is rounded to the data dtype before the softmax, if it is stored in that; the scores are below 16.
    check_forward(a, program, roundings=64 if s.scores == "data" else 4)
    # scores: every (query tile, key tile) reads its rows of Q and K in full.  softmax: S once where a row is one tile,
    # else in each pass.  output: every (query tile, column tile) reads its rows of P and V in full.
    e, heads = dtype(a.dtype).bytes, a.batch * a.heads
    q_tiles, k_tiles = ceil(a.n_q / s.block_q), ceil(a.n_k / s.block_k)
    matrix, passes = heads * a.n_q * a.n_k * score(a, s), 1 if s.softmax_cols >= a.n_k else PASSES[s.softmax]
    scores = matrix * 2 if a.is_fp8 and s.scores == "data" else matrix  # S has two bytes then, as O has
    expected = {
        "Q": {"read": heads * a.n_q * a.d * k_tiles * e},
        "K": {"read": heads * a.n_k * a.d * q_tiles * e},
        "V": {"read": heads * a.n_k * a.d_v * q_tiles * e},
        "S": {"write": scores, "read": scores * passes},
        "P": {"write": matrix, "read": matrix * ceil(a.d_v / min(s.block_k, a.d_v))},
        "O": {"write": heads * a.n_q * a.d_v * max(e, 2)},
        "L": {"write": heads * a.n_q * 4 if a.lse else 0},
    }
    once = 0  # bytes of further operands, by the papers' count
    if a.bias is not None:
        expected["bias"] = {"read": heads * a.n_q * a.n_k * max(e, 2)}
        once += expected["bias"]["read"] // {"shared": heads, "heads": a.batch, "full": 1}[a.bias]
    if a.sinks:
        expected["sinks"] = {"read": 4 * heads * ceil(a.n_q / s.softmax_rows)}
    if a.dropout:  # P once, and what is left of it in its place; a byte that says what is kept
        expected["P dropped"] = {"write": matrix, "read": expected["P"]["read"]}
        expected["P"]["read"] = matrix
        expected["kept"] = {"write": heads * a.n_q * a.n_k}
        once += 2 * matrix + heads * a.n_q * a.n_k
    if a.is_fp8:  # one scale of a head, read by every output tile
        expected["SQ"] = expected["SK"] = {"read": 4 * heads * q_tiles * k_tiles}
        expected["SV"] = {"read": 4 * heads * q_tiles * ceil(a.d_v / min(s.block_k, a.d_v))}
    more = separate_kernels(a, s, expected)
    assert_bytes(program, expected)
    # The papers: S and P written and read once, Q and O once a query head, K and V once a key/value head.
    rows = a.heads * a.n_q * (a.d * e + a.d_v * max(e, 2)) + a.kv_heads * a.n_k * (a.d + a.d_v) * e
    assert ledger(program).paper_hbm_bytes == 2 * (scores + matrix) + a.batch * rows + more + once


def separate_kernels(a: Attention, s: Schedule, expected: Bytes) -> int:
    """Change the bytes of `standard` to those with kernels of their own, which read a tensor and write it under another
    name; returns how many more that are by the papers' count."""
    before = dict.fromkeys(("Q", "K", "V", "S"), "")
    made = [(t, "copied") for t in "QKV" if "copy" in s.separate]
    made += [("Q", "scaled")] if "scale" in s.separate else []
    made += [("S", "masked")] if "mask" in s.separate and not visible(a).all() else []
    more = 0
    for tensor, done in made:
        count = a.batch * {"Q": a.heads * a.n_q * a.d, "K": a.kv_heads * a.n_k * a.d, "V": a.kv_heads * a.n_k * a.d_v,
                           "S": a.heads * a.n_q * a.n_k}[tensor]  # fmt: skip
        bytes_ = count * (score(a, s) if tensor == "S" else dtype(a.dtype).bytes)
        source = f"{tensor}{before[tensor]}"
        used = expected[source].pop("read")
        expected[source]["read"] = bytes_
        before[tensor] = f" {done}"
        expected[f"{tensor} {done}"] = {"write": bytes_, "read": used}
        more += 2 * bytes_
    return more


def check_flash1(a: Attention, s: Schedule, program: Program) -> None:
    # O is rounded to the data dtype in each pass, and what is kept of it shrinks from pass to pass.
    check_forward(a, program, roundings=4 + ceil(a.n_k / s.block_k))
    # K and V once for each block of a head.  A pass j visits the query tiles that see a key of tile j, the first one
    # all of them: it reads their Q, writes their O, m and l, and reads what the pass before left of them, except in the
    # first.
    e, heads = dtype(a.dtype).bytes, a.batch * a.heads
    q_tiles = ceil(a.n_q / s.block_q)
    parts = ceil(q_tiles / ceil(q_tiles / s.splits))
    visited = visits(a, s)
    visited[:, 0] = True
    rows = heads * np.array(pieces(a.n_q, s.block_q))
    every, later = int((rows @ visited).sum()), int((rows @ visited[:, 1:]).sum())
    lse = heads * a.n_q * 4 if a.lse else 0
    expected = {
        "Q": {"read": every * a.d * e},
        "K": {"read": parts * heads * a.n_k * a.d * e},
        "V": {"read": parts * heads * a.n_k * a.d_v * e},
        "O": {"read": later * a.d_v * e, "write": every * a.d_v * e},
        "m": {"read": 4 * later + lse, "write": 4 * every},
        "l": {"read": 4 * later + lse, "write": 4 * every},
        "L": {"write": lse},
    }
    assert_bytes(program, expected)
    # The paper's convention: row statistics left out.
    data = sum(n for name in "QKVO" for n in expected[name].values())
    assert ledger(program).paper_hbm_bytes == data


def check_split_kv(a: Attention, s: Schedule, program: Program) -> None:
    if s.splits == 1:
        return check_flash2(a, s, program)
    check_forward(a, program, roundings=4)
    # As flash2, but every split reads Q.  Each leaves O and L in fp32, which are read again once.
    e, heads = dtype(a.dtype).bytes, a.batch * a.heads
    keys = heads * int((visits(a, s) @ pieces(a.n_k, s.block_k)).sum()) * e
    parts = s.splits * heads * a.n_q * 4
    expected = {
        "Q": {"read": s.splits * heads * a.n_q * a.d * e},
        "K": {"read": keys * a.d},
        "V": {"read": keys * a.d_v},
        "O parts": {"write": parts * a.d_v, "read": parts * a.d_v},
        "L parts": {"write": parts, "read": parts},
        "O": {"write": heads * a.n_q * a.d_v * e},
        "L": {"write": heads * a.n_q * 4 if a.lse else 0},
    }
    if a.bias is not None:
        elements = pieces(a.n_q, s.block_q) @ visits(a, s) @ pieces(a.n_k, s.block_k)
        expected["bias"] = {"read": heads * int(elements) * e}
    if a.sinks:  # where the parts are combined
        expected["sinks"] = {"read": 4 * heads * len(visits(a, s))}
    assert_bytes(program, expected)
    assert ledger(program).extra_bytes == parts * (a.d_v + 1)
    return None


def check_mla(a: Attention, s: Schedule, program: Program) -> None:
    # V is the first columns of K, which is loaded once for both products: in decoding by each tile of heads, else by
    # each head; a split reads Q again, and leaves O and L in fp32, which are read again once.
    inputs = forward_inputs(a)
    inputs["V"] = inputs["K"][..., : a.d_v]
    exact, got = forward(a, inputs), outputs(program, inputs)
    assert_close(a, got["O"], exact["O"], roundings=4, name="O")
    assert ("L" in got) == a.lse
    if a.lse:
        assert_close(a, got["L"], exact["L"], roundings=0, name="L")
    e, heads = dtype(a.dtype).bytes, a.batch * a.heads
    keys = a.batch * ceil(a.heads / s.block_q) * a.n_k
    if a.n_q > 1:
        keys = heads * int((visits(a, s) @ pieces(a.n_k, s.block_k)).sum())
    parts = s.splits * heads * a.n_q * 4 if s.splits > 1 else 0
    expected = {
        "Q": {"read": s.splits * heads * a.n_q * a.d * e},
        "K": {"read": keys * a.d * e},
        "O parts": {"write": parts * a.d_v, "read": parts * a.d_v},
        "L parts": {"write": parts, "read": parts},
        "O": {"write": heads * a.n_q * a.d_v * e},
        "L": {"write": heads * a.n_q * 4 if a.lse else 0},
    }
    assert_bytes(program, expected)


def check_backward(a: Attention, program: Program) -> None:
    inputs = forward_inputs(a) | {"dO": normal(a, "dO", (a.batch, a.heads, a.n_q, a.d_v))}
    exact = backward(a, inputs)
    known = forward(a, inputs)
    left = kept(a) if a.dropout else np.ones_like(known["P"])
    got = outputs(program, inputs | known | {"P dropped": known["P"] * left, "kept": (left > 0).astype(np.float64)})
    assert got.keys() == exact.keys()
    for name, gradient in got.items():
        assert_close(a, gradient, exact[name], roundings=32, name=name)


def check_flash_backward(a: Attention, s: Schedule, program: Program) -> None:
    check_backward(a, program)
    # First D = rowsum(dO * O), and zeros in the fp32 sum of dQ.  Then a query head reads its K and V once, and in each
    # key tile the Q, dO, L and D of the query tiles that see it, and adds their dQ.  dK and dV are stored, or, where
    # query heads share them, added to zeros.  At the end the fp32 sums are read and written in the data dtype.
    e, heads = dtype(a.dtype).bytes, a.batch * a.heads
    queries = heads * int((pieces(a.n_q, s.block_q) @ visits(a, s)).sum())
    rows, keys = heads * a.n_q, a.batch * a.kv_heads * a.n_k
    expected = {
        "Q": {"read": queries * a.d * e},
        "K": {"read": keys * a.group * a.d * e},
        "V": {"read": keys * a.group * a.d_v * e},
        "O": {"read": rows * a.d_v * e},
        "dO": {"read": (rows + queries) * a.d_v * e},
        "L": {"read": queries * 4},
        "D": {"write": rows * 4, "read": queries * 4},
        "dQ sum": {"write": rows * a.d * 4, "add": queries * a.d * 4, "read": rows * a.d * 4},
        "dQ": {"write": rows * a.d * e},
        "dK": {"write": keys * a.d * e},
        "dV": {"write": keys * a.d_v * e},
    }
    for name, d in (("dK sum", a.d), ("dV sum", a.d_v)):
        once = keys * d * 4 if a.group > 1 else 0
        expected[name] = {"write": once, "add": once * a.group, "read": once}
    if a.bias is not None:  # tiles that are visited; of a bias for each head and batch stored, after zeros under a mask
        elements = heads * int(pieces(a.n_q, s.block_q) @ visits(a, s) @ pieces(a.n_k, s.block_k))
        whole = a.n_q * a.n_k * {"shared": 1, "heads": a.heads, "full": heads}[a.bias]
        expected["bias"] = {"read": elements * e}
        if a.bias == "full":
            zeros = 0 if visible(a).all() and a.window is None and not a.causal else whole
            expected["dbias"] = {"write": (elements + zeros) * e}
        else:
            expected["dbias sum"] = {"write": whole * 4, "add": elements * 4, "read": whole * 4}
            expected["dbias"] = {"write": whole * e}
    if a.sinks:  # L and D once more
        expected |= {"sinks": {"read": 4 * a.heads}, "dsinks": {"write": 4 * a.heads}}
        for name in "LD":
            expected[name]["read"] += rows * 4
    assert_bytes(program, expected)
    statistics = sum(n for name in ("L", "D", "sinks", "dsinks") for n in expected.get(name, {}).values())
    assert ledger(program).paper_hbm_bytes == sum(n for row in expected.values() for n in row.values()) - statistics


def check_standard_backward(a: Attention, s: Schedule, program: Program) -> None:
    check_backward(a, program)
    # Five products and a row kernel.  In a product every output tile reads its rows of both operands in full.
    e, heads = dtype(a.dtype).bytes, a.batch * a.heads
    q_tiles, k_tiles = ceil(a.n_q / s.block_q), ceil(a.n_k / s.block_k)
    d_tiles, v_tiles = ceil(a.d / min(s.block_k, a.d)), ceil(a.d_v / min(s.block_k, a.d_v))
    matrix, q, o = heads * a.n_q * a.n_k * score(a, s), heads * a.n_q * a.d * e, heads * a.n_q * a.d_v * e
    k, v = heads * a.n_k * a.d * e, heads * a.n_k * a.d_v * e  # as often as there are query heads
    passes = 1 if s.softmax_cols >= a.n_k else 2
    expected = {
        "P": {"read": matrix * (v_tiles + passes)},  # dV, dS
        "dO": {"read": o * k_tiles * 2},  # dV and dP
        "V": {"read": v * q_tiles},  # dP
        "dP": {"write": matrix, "read": matrix * passes},
        "dS": {"write": matrix, "read": matrix * d_tiles * 2},  # dQ and dK
        "K": {"read": k * q_tiles},  # dQ
        "Q": {"read": q * k_tiles},  # dK
        "dQ": {"write": q},
        "dK": {"write": k // a.group},
        "dV": {"write": v // a.group},
    }
    more = 0
    if "product" in s.separate:  # P * dP takes the place of dP in dS
        expected["P"]["read"] += matrix
        expected["dP"]["read"] = matrix
        expected["P dP"] = {"write": matrix, "read": matrix * passes}
        more += 3 * matrix
    if a.dropout:  # dV is made of what is left of P; a kernel takes what is dropped out of dP
        expected["P dropped"] = {"read": matrix * v_tiles}
        expected["P"]["read"] -= matrix * v_tiles
        expected["dP dropped"] = {"write": matrix, "read": expected["dP"]["read"]}
        expected["dP"]["read"] = matrix
        expected["kept"] = {"read": heads * a.n_q * a.n_k}
        more += 2 * matrix + heads * a.n_q * a.n_k
    if a.softcap is not None:  # the product of Q and K again
        expected["dS through cap"] = {"write": matrix, "read": expected["dS"]["read"]}
        expected["dS"]["read"] = matrix
        expected["Q"]["read"] += q * k_tiles
        expected["K"]["read"] += k * q_tiles
        more += 2 * matrix + q + k // a.group
    if a.bias is not None:
        expected["dS"]["read"] += matrix
        shares = {"shared": heads, "heads": a.batch, "full": 1}[a.bias]
        expected["dbias"] = {"write": heads * a.n_q * a.n_k * e // shares}
        more += matrix + expected["dbias"]["write"]
    if "copy" in s.separate:
        expected["dK strided"] = {"write": k // a.group, "read": k // a.group}
        more += 2 * k // a.group
    if "scale" in s.separate:
        expected["dQ unscaled"] = {"write": q, "read": q}
        more += 2 * q
    assert_bytes(program, expected)
    # The papers: P, dP and dS seven times (dV reads P; dP is written; dS reads two and writes one; dQ and dK read dS),
    # dO twice, the rest once; K, V and their gradients once a key/value head.
    assert ledger(program).paper_hbm_bytes == 7 * matrix + 2 * o + 2 * q + 2 * (k + v) // a.group + more


def check_softmax(a: Attention, s: Schedule, program: Program, kind: str) -> None:
    S = normal(a, "S", (a.batch, a.heads, a.n_q, a.n_k))
    exact, lse = softmax(a, S)
    got = outputs(program, {"S": S})
    assert_close(a, got["P"], exact, roundings=2, name="P")
    if a.lse:
        assert_close(a, got["L"], lse, roundings=0, name="L")
    # Accesses an element: its reads and one write.
    accesses = 1 + (1 if s.softmax_cols >= a.n_k else PASSES[kind])
    matrix = S.size * dtype(a.dtype).bytes
    statistics = S[..., 0].size * 4 if a.lse else 0
    assert_bytes(program, {"S": {"read": (accesses - 1) * matrix}, "P": {"write": matrix}, "L": {"write": statistics}})
    assert ledger(program).paper_hbm_bytes == accesses * matrix


CHECKS: Mapping[str, Check] = {
    "flash-backward": check_flash_backward,
    "flash1": check_flash1,
    "flash2": check_flash2,
    "flash3": check_flash2,
    "mla": check_mla,
    "softmax-naive": partial(check_softmax, kind="naive"),
    "softmax-online": partial(check_softmax, kind="online"),
    "softmax-safe": partial(check_softmax, kind="safe"),
    "split-kv": check_split_kv,
    "standard": check_standard,
    "standard-backward": check_standard_backward,
}
