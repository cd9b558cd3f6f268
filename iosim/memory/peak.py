"""Peak device memory of a call of known libraries: the tensors that are alive at its peak, as data.

A tensor is one line of a table: its name, its role, its shape by the names of its dimensions, its dtype.  PyTorch's
allocator rounds each up to 512 bytes, so the sums are exact: they repeat all 181 measured calls (iosim/data) to the
byte.  What a library allocates is known from its source (FlashAttention, PyTorch) or was found from those rows (cuDNN).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal, TypeAlias

from iosim.dataflows import load_dataflow
from iosim.dataflows.split_rules import cudnn_splits, flash2_splits
from iosim.dtypes import dtype
from iosim.errors import InputError
from iosim.index import cdiv
from iosim.memory.step import step_memory
from iosim.problem import Attention
from iosim.schedule import Schedule

GRANULE = 512  # bytes: PyTorch's caching allocator hands out no less
FLASH1_KEYS = ((64, 256), (1024, 128))  # up to this head dimension: keys that FlashAttention-1 holds in one tile

Role: TypeAlias = Literal["in", "out", "scratch", "old"]
When: TypeAlias = Literal["always", "split", "workspace", "grouped"]


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

# Measured steps of forward and backward, and the dataflows whose tensors they hold (iosim/memory/step.py).
STEPS = {"standard": ("standard", "standard-backward"), "flash1": ("flash2", "flash-backward")}

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
    """The most that a forward and its backward hold, inputs too; None where no dataflows stand for them."""
    if direction != "both" or implementation not in STEPS:
        return None
    tile = Schedule(block_q=64, block_k=64)  # no tensor depends on it
    forward, backward = (load_dataflow(name) for name in STEPS[implementation])
    after = backward(a, tile)
    step = step_memory(forward(replace(a, lse=any(t.name == "L" for t in after.tensors)), tile), after)
    less = sum(t.bytes for t in step.alive if t.tensor == "dQ sum") if lacks_dq_sum(implementation, direction, a) else 0
    return step.peak_bytes - less


def lacks_dq_sum(implementation: str, direction: str, a: Attention) -> bool:
    """Whether the call keeps its sum of dQ on chip, where iosim's own program of it (flash-backward) does not.

    FlashAttention-1 sums dQ in device memory only when the keys are several tiles.
    """
    one_tile = next(keys for most, keys in FLASH1_KEYS if a.d <= most)
    return (implementation, direction) == ("flash1", "both") and a.n_k <= one_tile


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
    holds = {
        "always": True,
        "split": parts > 1,
        "workspace": a.n_q > 1 or parts > 1,  # found: cuDNN takes none for one query without splits
        "grouped": a.group > 1,
    }
    return {name for name, true in holds.items() if true}
