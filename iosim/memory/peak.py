"""Peak device memory of a call of known libraries: the tensors that are alive at its peak, as data.

A tensor is one line of a table: its name, its role, its shape by the names of its dimensions, its dtype.  PyTorch's
allocator rounds each up to 512 bytes, so the sums are exact: they repeat all 181 measured calls (iosim/data) to the
byte.  What a library allocates is known from its source (FlashAttention, PyTorch) or was found from those rows (cuDNN).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal, TypeAlias

from iosim.dataflows.split_rules import cudnn_splits, flash2_splits
from iosim.dtypes import dtype
from iosim.errors import InputError
from iosim.index import cdiv
from iosim.problem import Attention

GRANULE = 512  # bytes: PyTorch's caching allocator hands out no less
FLASH1_KEYS = ((64, 256), (1024, 128))  # up to this head dimension: keys that FlashAttention-1 holds in one tile

Role: TypeAlias = Literal["in", "out", "scratch", "old"]
When: TypeAlias = Literal["always", "split", "workspace", "grouped", "many tiles"]


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor that is alive at the peak.

    `shape` names dimensions of `_dimensions`.  `dtype` "" is the data's own.  `when` says in which calls it exists.
    Role "old": it was alive before the call and is released by it, so that its bytes count against the peak.
    """

    name: str
    role: Role
    shape: tuple[str, ...]
    dtype: str = ""
    when: When = "always"


_Q = ("batch", "heads", "n_q", "d")
_K = ("batch", "kv_heads", "n_k", "d")
_V = ("batch", "kv_heads", "n_k", "d_v")
_O = ("batch", "heads", "n_q", "d_v")
_S = ("batch", "heads", "n_q", "n_k")
_ROW = ("batch", "heads", "n_q")
_SMALL = ("granule",)  # a few bytes: takes what the allocator gives least
_NEW = (Held("dQ", "out", _Q), Held("dK", "out", _K), Held("dV", "out", _V))
_OLD = (Held("old dQ", "old", _Q), Held("old dK", "old", _K), Held("old dV", "old", _V))

# What a call holds beyond what was there before it.  Backward calls were measured while the gradients of the call
# before were still referenced; they are released within the call.
EXTRA: Mapping[tuple[str, str], tuple[Held, ...]] = {
    ("standard", "forward"): (
        Held("scaled Q", "scratch", _Q),
        Held("S", "scratch", _S),
        Held("P", "scratch", _S),
    ),
    ("standard", "backward"): (
        Held("dP", "scratch", _S),
        Held("dP * P", "scratch", _S),
        Held("dS", "scratch", _S),
        Held("dV", "out", _V),
        *_OLD,
    ),
    ("flash2", "forward"): (
        Held("O", "out", _O),
        Held("L", "out", _ROW, "fp32"),
        Held("seed", "scratch", _SMALL),
        Held("offset", "scratch", _SMALL),
        Held("O parts", "scratch", ("splits", "batch", "heads", "n_q", "padded d"), "fp32", "split"),
        Held("L parts", "scratch", ("splits", *_ROW), "fp32", "split"),
    ),
    ("flash2", "backward"): (
        Held("O contiguous", "scratch", _O),
        Held("dO contiguous", "scratch", _O),
        Held("dQ sum", "scratch", ("batch", "heads", "padded n_q", "padded d"), "fp32"),
        Held("D", "scratch", ("batch", "heads", "padded n_q"), "fp32"),
        Held("dK by query head", "scratch", ("batch", "heads", "n_k", "d"), "", "grouped"),
        Held("dV by query head", "scratch", ("batch", "heads", "n_k", "d_v"), "", "grouped"),
        *_NEW,
        *_OLD,
    ),
    ("cudnn", "forward"): (
        Held("O", "out", _O),
        Held("seed", "scratch", _SMALL),
        Held("offset", "scratch", _SMALL),
        Held("workspace", "scratch", _SMALL, "", "workspace"),
        Held("O parts", "scratch", ("splits", *_O), "fp32", "split"),
        Held("max parts", "scratch", ("splits", *_ROW), "fp32", "split"),
        Held("sum parts", "scratch", ("splits", *_ROW), "fp32", "split"),
    ),
    ("cudnn", "backward"): (
        Held("dQ sum", "scratch", _Q, "fp32"),
        Held("D", "scratch", _ROW, "fp32"),
        Held("workspace", "scratch", _SMALL),
        Held("dK by query head", "scratch", ("batch", "heads", "n_k", "d"), "", "grouped"),
        Held("dV by query head", "scratch", ("batch", "heads", "n_k", "d_v"), "", "grouped"),
        *_NEW,
        *_OLD,
    ),
    ("efficient", "forward"): (Held("O", "out", _O),),
}

# All that a forward and a backward hold, inputs too: FlashAttention (v1), Table 21.
_LAYER = tuple(Held(f"N x d tensor {n}", "scratch", _Q) for n in range(1, 11))
TOTAL: Mapping[tuple[str, str], tuple[Held, ...]] = {
    ("standard", "both"): (
        *_LAYER,
        Held("S", "scratch", _S),
        Held("P", "scratch", _S),
        Held("dP", "scratch", _S),
        Held("dS", "scratch", _S),
    ),
    ("flash1", "both"): (
        *_LAYER,
        Held("N x d tensor 11", "scratch", _Q),
        Held("dQ sum", "scratch", _Q, "fp32", "many tiles"),
        Held("L", "out", _ROW, "fp32"),
        Held("D", "scratch", _ROW, "fp32"),
    ),
}

SPLITS = {"flash2": flash2_splits, "cudnn": cudnn_splits}  # libraries that split the keys, by their rule


def splits(implementation: str, direction: str, a: Attention, processors: int | None) -> int:
    """Into how many splits `implementation` cuts the keys; 1 for those that never do.

    Raises InputError where its rule needs the number of processors and it is None.
    """
    if implementation not in SPLITS or direction != "forward":
        return 1
    if processors is None:
        raise InputError(f"splits of {implementation}: the number of processors is not known")
    return SPLITS[implementation](a, processors)


def held_bytes(tensors: tuple[Held, ...], a: Attention, parts: int = 1) -> dict[str, int]:
    """Bytes of each tensor by name, as the allocator rounds them; below zero for what the call releases."""
    sizes = _dimensions(a, parts)
    cases = _cases(a, parts)
    out = {}
    for t in tensors:
        if t.when in cases:
            element = 1 if t.shape == _SMALL else dtype(t.dtype or a.dtype).bytes
            rounded = cdiv(prod(sizes[name] for name in t.shape) * element, GRANULE) * GRANULE
            out[t.name] = -rounded if t.role == "old" else rounded
    return out


def peak_extra_bytes(implementation: str, direction: str, a: Attention, processors: int | None) -> int | None:
    """The most that a call holds at one time beyond what was allocated before it; None where no list is known.

    Raises InputError where a split rule needs the number of processors and it is None.
    """
    if (tensors := EXTRA.get((implementation, direction))) is None:
        return None
    return sum(held_bytes(tensors, a, splits(implementation, direction, a, processors)).values())


def peak_total_bytes(implementation: str, direction: str, a: Attention) -> int | None:
    """The same with the inputs, of a forward and a backward; None where no list is known."""
    tensors = TOTAL.get((implementation, direction))
    return None if tensors is None else sum(held_bytes(tensors, a).values())


def lacks_dq_sum(implementation: str, direction: str, a: Attention) -> bool:
    """Whether the call keeps its sum of dQ on chip, where iosim's own program of it (flash-backward) does not."""
    held = TOTAL.get((implementation, direction), ())
    return any(t.when == "many tiles" for t in held) and "many tiles" not in _cases(a, 1)


def _dimensions(a: Attention, parts: int) -> dict[str, int]:
    names = ("batch", "heads", "kv_heads", "n_q", "n_k", "d", "d_v")
    return {name: getattr(a, name) for name in names} | {
        "splits": parts,
        "padded n_q": cdiv(a.n_q, 128) * 128,  # FlashAttention-2 pads its own scratch so
        "padded d": cdiv(a.d_v, 32) * 32 if a.d_v <= 192 else cdiv(a.d_v, 256) * 256,
        "granule": GRANULE,
    }


def _cases(a: Attention, parts: int) -> set[str]:
    """Which conditions of `When` hold for a call."""
    one_tile = next(keys for most, keys in FLASH1_KEYS if a.d <= most)
    holds = {
        "always": True,
        "split": parts > 1,
        "workspace": a.n_q > 1 or parts > 1,  # found: cuDNN takes none for one query without splits
        "grouped": a.group > 1,
        "many tiles": a.n_k > one_tile,  # FlashAttention-1 sums dQ in device memory when the keys are several tiles
    }
    return {name for name, true in holds.items() if true}
