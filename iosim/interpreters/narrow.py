"""A program cut down to what some of its outputs need, inside its blocks too.

A block that loops over rows and stores them one tile after another (FlashAttention's first form, or the dQ of its
backward pass) would compute them all for a few.  Here stores that nobody reads go, then what only they needed, and then
the iterations of a loop that reach no wanted element, where iterations hand nothing on.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from iosim.index import least, most
from iosim.interpreters.region import Box, Ranges, add_loads, bounds, narrow, needed_cells, nodes, within
from iosim.program import Compute, Kernel, Load, Loop, Node, Program, Store, reads, walk, writes


def narrowed(program: Program, demand: Mapping[str, Box]) -> Program:
    """A program that computes the boxes in `demand` alike, and perhaps no more; what it moves is not the program's."""
    wanted = dict(demand)
    kernels = []
    for kernel in reversed(program.kernels):
        while True:
            before = dict(wanted)
            new = _cut(_live(kernel, wanted), wanted)
            if (box := needed_cells(new, wanted)) is not None:
                add_loads(new, box, wanted)
            if wanted == before:
                break
        kernels.append(new)
    return replace(program, kernels=tuple(reversed(kernels)))


def _live(kernel: Kernel, wanted: Mapping[str, Box]) -> Kernel:
    """The kernel with the stores into tensors that are wanted, and what these need."""
    every = [node for node, _ in walk(kernel.body)]
    needed: set[str] = set()
    for node in every:
        if isinstance(node, Store) and node.view.tensor.name in wanted:
            needed |= reads(node)
    while True:
        more = {name for node in every if writes(node) & needed for name in reads(node)} - needed
        if not more:
            break
        needed |= more

    def body(some: Sequence[Node]) -> Iterator[Node]:
        for node in some:
            if isinstance(node, Loop):
                if inner := tuple(body(node.body)):
                    yield replace(node, body=inner)
            elif node.view.tensor.name in wanted if isinstance(node, Store) else writes(node) & needed:
                yield node

    return replace(kernel, body=tuple(body(kernel.body)))


def _cut(kernel: Kernel, wanted: Mapping[str, Box]) -> Kernel:
    """The kernel with the loops whose iterations hand nothing on cut to those that store into a wanted box."""
    every = [node for node, _ in walk(kernel.body)]

    def body(some: Sequence[Node], ranges: Ranges) -> Iterator[Node]:
        for node in some:
            if not isinstance(node, Loop):
                yield node
                continue
            extent = bounds(node.lo, ranges)[0], bounds(node.hi, ranges)[1]
            if extent[0] >= extent[1]:
                continue
            lo, hi = node.lo, node.hi
            if _independent(node, every):
                hits = [
                    hit[node.index]
                    for store, inner in nodes(node.body, {**ranges, node.index: extent})
                    if isinstance(store, Store) and (hit := _hit(store, wanted, inner)) is not None
                ]
                if not hits:
                    continue
                extent = min(hit[0] for hit in hits), max(hit[1] for hit in hits)
                lo, hi = most(lo, extent[0]), least(hi, extent[1])
            yield replace(node, lo=lo, hi=hi, body=tuple(body(node.body, {**ranges, node.index: extent})))

    return replace(kernel, body=tuple(body(kernel.body, {axis: (0, n) for axis, n in kernel.grid})))


def _hit(store: Store, wanted: Mapping[str, Box], ranges: Ranges) -> Ranges | None:
    name = store.view.tensor.name
    return narrow(store.view, within(wanted[name], store.view.tensor), ranges) if name in wanted else None


def _independent(loop: Loop, every: Sequence[Load | Store | Compute]) -> bool:
    """Whether each iteration writes its tiles before it reads them, and nothing outside of the loop reads them."""
    inside = [node for node, _ in walk(loop.body)]
    mine = {id(node) for node in inside}
    made: set[str] = set()
    written = frozenset().union(*(writes(node) for node in inside))
    for node in inside:
        if (reads(node) & written) - made:
            return False
        if node.when is None or node.when.index != loop.index:
            made |= writes(node)
    return not any((reads(node) | writes(node)) & written for node in every if id(node) not in mine)
