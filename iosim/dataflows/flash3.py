"""FlashAttention-3: flash2's program in another order: a producer, consumers in turns, softmax under products.

Shah et al. 2024 (arXiv 2407.08608).  One warp group only issues copies and runs ahead as far as there are buffers.
Two or three others, 64 rows each, compute.  They take turns at the matrix unit, so that the softmax of one falls under
the products of another; and within each, the products of two tiles are in flight under the softmax between them.  The
schedule switches each of the three off: `producer`, `pingpong`, `overlap`.  Values and bytes are those of flash2, which
has the scales of fp8 too.  The paper's incoherent processing, which rotates Q and K, is no part of the program: it is
done when they are made, with the rotary embedding, and costs no traffic here (see iosim/check/quantise.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from iosim.dataflows.flash2 import flash2
from iosim.dataflows.tiles import key_runs
from iosim.errors import InputError
from iosim.index import Index
from iosim.problem import Attention
from iosim.program import Program
from iosim.schedule import Order, Role, Schedule, Step

if TYPE_CHECKING:
    from iosim.dataflows import Rule
    from iosim.hardware import Hardware

USES = ("block_q", "block_k", "producer", "pingpong", "overlap", "pack_gqa", "grid_order")
BACKWARD = "flash-backward"
TAKES = ("fp8", "fp16 accumulator", "soft-cap", "ALiBi", "bias", "sinks", "global tokens", "dropout", "block mask")
ROWS = (192, 128, 64, 32, 16)  # 64 for each consumer
TAKE, GIVE = Step("take"), Step("give")


def flash3(a: Attention, s: Schedule) -> Program:
    """The program for problem `a` with the tile sizes of schedule `s`."""
    return replace(flash2(a, s), name="flash3")


def orders(a: Attention, s: Schedule) -> dict[str, Order]:
    """That of each loop over key tiles: one, or several with global tokens or a block mask."""
    loops = key_runs(a, Index("i"), s.block_q, s.block_k)
    return dict.fromkeys((name for name, _ in loops), order(s, a.is_fp8, biased=a.bias is not None))


def order(s: Schedule, scaled: bool = False, *, biased: bool = False) -> Order:
    """The order of a loop over key tiles: QK(t + 1) and PV(t) in flight under softmax(t + 1), if all is on.

    `scaled`: K and V have scales.  `biased`: tiles of a bias come with those of K.
    """
    slots = s.slots(("k", "v"))
    copies: dict[str, tuple[str, ...]] = {"k": ("k", "sk"), "v": ("v", "sv")} if scaled else {"k": ("k",), "v": ("v",)}
    if biased:
        copies["k"] += ("bias",)
    slots = {tile: slots[name] for name, tiles in copies.items() for tile in tiles}
    turn = ((TAKE,), (GIVE,)) if s.pingpong else ((), ())
    qk, pv = int(s.overlap), 0  # iterations ahead in which the products are started
    steps: tuple[Step, ...]
    if s.overlap:
        start, rest = (Step("issue", "qk", 1), Step("issue", "pv")), (Step("run", "softmax", 1), Step("wait", "pv"))
        steps = (*turn[0], *start, *turn[1], Step("wait", "qk", 1), *rest, Step("run", "rescale", 1))
    elif s.pingpong:  # PV of the last tile and QK of this one in one turn
        pv = -1
        start, rest = (Step("run", "pv", -1), Step("issue", "qk")), (Step("run", "softmax"), Step("run", "rescale"))
        steps = (TAKE, *start, GIVE, Step("wait", "qk"), *rest)
    else:
        steps = tuple(Step("run", name) for name in ("qk", "softmax", "rescale", "pv"))
    if s.producer:
        roles = [Role("producer", 1, tuple(Step("issue", tile) for tile in slots))]
    else:  # as early as a buffer is free
        ahead = {tile: slots[tile] - 1 + (qk if tile in copies["k"] else pv) for tile in slots}
        steps = (*(Step("issue", tile, n) for tile, n in ahead.items()), *steps)
        roles = []
    return Order((*roles, Role("consumers", s.groups, steps)), {**slots, "p": 2} if s.overlap else slots)


def plan(a: Attention, hardware: Hardware, given: Mapping[str, Any], rule: Rule) -> tuple[Schedule, str]:
    """The general rule's tile for three, two or one consumers, in this order; the same one whatever is switched off.

    Raises InputError where copies are not asynchronous.
    """
    if not hardware.copy.asynchronous:
        raise InputError(f"flash3: {hardware.name} has no asynchronous copies, on which its order rests")

    def also(s: Schedule) -> Mapping[str, Any]:
        if s.orders:
            return {}
        sized = "block_q" in given or "block_k" in given
        whole = s if sized else replace(s, producer=True, pingpong=True, overlap=True)
        return {"orders": orders(a, whole)}

    s, why = rule(also, rows=ROWS)
    if not given.get("orders"):
        s = replace(s, orders=orders(a, s))
    return s, f"{why}; {_words(s)}"


def _words(s: Schedule) -> str:
    consumers = f"{s.groups} consumer warp group{'s' if s.groups > 1 else ''}"
    turns = " in ping-pong" if s.pingpong and s.groups > 1 else ""
    softmax = "under products" if s.overlap else "after products"
    return f"{'a' if s.producer else 'no'} producer, {consumers}{turns}, softmax {softmax} of its group"
