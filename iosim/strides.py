"""Layouts: where the elements of Q, K, V and O lie in device memory.

    bhsd      (batch, heads, n, d): the rows of a head follow each other, and are one run
    bshd      (batch, n, heads, d): the heads of a token follow each other, as PyTorch's transposed views and
              FlashAttention's own tensors have it; a head's rows are heads * d elements apart
    packed    Q, K and V of a token follow each other, (batch, n, heads + 2 kv_heads, d), as one projection makes them;
              with other keys than queries, in decoding, K and V do, and Q is bshd.  O is bshd
    bhsd+8    as each of these, and 8 elements that belong to nothing after each row of a head (bhsd), or token

Gradients lie as the tensors that they are of.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from iosim.errors import InputError, nearest

if TYPE_CHECKING:
    from iosim.problem import Attention

LAYOUTS = ("bhsd", "bshd", "packed")
MOST_PAD = 2**20


@dataclass(frozen=True, slots=True)
class Strides:
    """Elements from one index to the next along each axis, from element `first` of an allocation on."""

    first: int
    steps: tuple[int, ...]


def parse(layout: object) -> tuple[str, int]:
    """The name and the padding of a layout; raises InputError for what is none."""
    found = re.fullmatch(r"([a-z]+)(?:\+(\d{1,7}))?", layout) if isinstance(layout, str) else None
    if found is None or found[1] not in LAYOUTS:
        near = nearest(found[1] if found else str(layout), LAYOUTS)
        raise InputError(f"layout: {layout!r} is not {', '.join(LAYOUTS)}, nor one with padding, like bhsd+8{near}")
    pad = int(found[2] or 0)
    if pad > MOST_PAD:
        raise InputError(f"layout: {layout!r}: {pad:,} elements of padding are too many; 0 to {MOST_PAD:,} are allowed")
    return found[1], pad


def strides_of(a: Attention) -> Mapping[str, Strides]:
    """Of the inputs and outputs of a problem, by name; none where all are contiguous bhsd."""
    name, pad = parse(a.layout)
    if (name, pad) == ("bhsd", 0):
        return {}
    rows = {"Q": (a.heads, a.n_q, a.d), "K": (a.kv_heads, a.n_k, a.d), "V": (a.kv_heads, a.n_k, a.d_v)}
    rows["O"] = a.heads, a.n_q, a.d_v
    first = dict.fromkeys(rows, 0)
    token = {tensor: heads * width + pad for tensor, (heads, _, width) in rows.items()}
    if name == "packed":
        together = ("Q", "K", "V") if a.n_q == a.n_k else ("K", "V")
        at = 0
        for tensor in together:
            first[tensor], at = at, at + rows[tensor][0] * rows[tensor][2]
        token |= dict.fromkeys(together, at + pad)
    out = {}
    for tensor, (heads, n, width) in rows.items():
        if name == "bhsd":
            steps = heads * n * (width + pad), n * (width + pad), width + pad, 1
        else:
            steps = n * token[tensor], width, token[tensor], 1
        out[tensor] = out[f"d{tensor}"] = Strides(first[tensor], steps)
    return out
