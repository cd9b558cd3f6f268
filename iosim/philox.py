"""Which weights dropout keeps: Philox 4x32 with 7 rounds, a counter-based generator, as FlashAttention uses it.

Salmon, Moraes, Dror and Shaw 2011 (Parallel random numbers: as easy as 1, 2, 3).  The numbers are a function of a
weight's place, so that a kernel makes them where it needs them, again in its backward pass, and no mask is stored.
One call makes 16 bytes, those of 16 keys in a row; a weight is dropped where its byte is below 256 times the
probability, rounded.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

ROUNDS = 7
BYTES = 16  # of a call
_FACTORS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_MASK = 0xFFFFFFFF


def philox(counter: tuple[Any, Any, Any, Any], key: tuple[int, int] = (0, 0), rounds: int = ROUNDS) -> NDArray[Any]:
    """Four 32-bit words, along a last axis, for counters of four words (arrays that broadcast)."""
    import numpy as np

    c0, c1, c2, c3 = (np.asarray(c, np.uint64) for c in counter)
    shift, mask = np.uint64(32), np.uint64(_MASK)
    k0, k1 = key
    for _ in range(rounds):
        p0, p1 = c0 * np.uint64(_FACTORS[0]), c2 * np.uint64(_FACTORS[1])
        c0, c1, c2, c3 = (p1 >> shift) ^ c1 ^ np.uint64(k0), p1 & mask, (p0 >> shift) ^ c3 ^ np.uint64(k1), p0 & mask
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), -1).astype(np.uint32)


def kept(
    batch: Any, head: Any, query: NDArray[Any], first_key: Any, keys: int, probability: float
) -> NDArray[np.bool_]:
    """Whether the weights of `keys` keys from `first_key` on are kept: (..., queries, keys).

    `batch`, `head` and `first_key` are numbers or arrays (...), `query` is (..., queries).
    """
    import numpy as np

    first = np.asarray(first_key)[..., None, None]
    chunk = first // BYTES + np.arange((keys + BYTES - 2) // BYTES + 1)
    counter = chunk, np.asarray(query)[..., None], np.asarray(head)[..., None, None], np.asarray(batch)[..., None, None]
    words = philox(counter)
    numbers = words.astype("<u4").view(np.uint8).reshape(*words.shape[:-2], -1)
    offset = first % BYTES
    if offset.size == 1:
        start = int(offset.item())
        numbers = numbers[..., start : start + keys]
    else:
        numbers = np.take_along_axis(
            numbers, np.broadcast_to(offset + np.arange(keys), (*numbers.shape[:-1], keys)), -1
        )
    out: NDArray[np.bool_] = numbers >= round(256 * probability)
    return out
