"""What the order of a loop body follows from: its phases, their dependencies, and the default order.

Nothing is declared twice: phases and dependencies come from the program, buffer slots from the schedule.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias, get_args

from iosim.errors import InputError, nearest
from iosim.program import Compute, Kernel, Load, Loop, Node, Store, reads, writes
from iosim.schedule import Order, Role, Schedule, Step, Verb

Leaf: TypeAlias = Load | Store | Compute


@dataclass(frozen=True, slots=True)
class Phase:
    """Consecutive nodes with one label, run as a whole.  `copy`: a load, which the copy engine carries out."""

    name: str
    copy: bool
    nodes: tuple[Leaf, ...]
    reads: frozenset[str]
    writes: frozenset[str]


@dataclass(frozen=True, slots=True)
class Segment:
    """A loop without inner loops, or the straight code between loops (`loop` is None)."""

    loop: Loop | None
    phases: tuple[Phase, ...]
    order: Order

    @property
    def copies(self) -> tuple[Phase, ...]:
        return tuple(p for p in self.phases if p.copy)


@dataclass(frozen=True, slots=True)
class Edge:
    """Phase `after` of iteration u waits for phase `before` of iteration u - distance.

    "raw": it reads what `before` wrote; "war": it overwrites what `before` read or wrote.
    """

    before: str
    after: str
    distance: int
    kind: Literal["raw", "war"]


def phases(body: Sequence[Leaf]) -> tuple[Phase, ...]:
    """The body cut into phases: a load is a phase of its own, called by its tile; other nodes go by their labels.

    A name that comes again, which only code outside loops allows, gets a number.
    """
    groups: list[list[Leaf]] = []
    for node in body:
        last = groups[-1][-1] if groups else None
        joins = last is not None and not isinstance(node, Load) and not isinstance(last, Load)
        if joins and last is not None and last.phase == node.phase:
            groups[-1].append(node)
        else:
            groups.append([node])
    out: dict[str, Phase] = {}
    for nodes in groups:
        first = nodes[0]
        name = first.tile.name if isinstance(first, Load) else first.phase
        if name in out:
            name = next(f"{name} {n}" for n in range(2, len(groups) + 2) if f"{name} {n}" not in out)
        out[name] = Phase(
            name=name,
            copy=isinstance(first, Load),
            nodes=tuple(nodes),
            reads=frozenset().union(*map(reads, nodes)),
            writes=frozenset().union(*map(writes, nodes)),
        )
    return tuple(out.values())


def segments(kernel: Kernel, schedule: Schedule) -> tuple[Segment, ...]:
    """The kernel body as straight code and loops in turn, each with its order.

    As many warp groups work everywhere as in the loops that the schedule orders, else `schedule.groups`.
    Raises InputError for a nested loop, and for an order that does not fit its loop, with the phase named.
    """
    groups = _worker_groups(kernel, schedule)
    out: list[Segment] = []
    straight: list[Leaf] = []

    def close() -> None:
        if straight:
            cut = phases(straight)
            out.append(Segment(None, cut, default_order(cut, {}, groups)))
            straight.clear()

    for node in kernel.body:
        if not isinstance(node, Loop):
            straight.append(node)
            continue
        close()
        cut = phases(_leaves(kernel, node.body))
        order = schedule.orders.get(node.index)
        if order is None:
            slots = schedule.slots(tuple(p.name for p in cut if p.copy))
            order = default_order(cut, slots, groups)
        else:
            _check_order(f"kernel {kernel.name}, loop {node.index}", cut, order)
        out.append(Segment(node, cut, order))
    close()
    return tuple(out)


def _worker_groups(kernel: Kernel, schedule: Schedule) -> int:
    """Warp groups that share the rows of a block's tiles."""
    loops = [node.index for node in kernel.body if isinstance(node, Loop) and node.index in schedule.orders]
    for index in loops:
        if not schedule.orders[index].roles:
            raise InputError(f"kernel {kernel.name}, loop {index}: the order has no role")
    counts = {index: schedule.orders[index].roles[-1].count for index in loops}
    if len(set(counts.values())) > 1:
        given = ", ".join(f"{count} in loop {index}" for index, count in counts.items())
        raise InputError(f"kernel {kernel.name}: the orders give its rows to different numbers of groups: {given}")
    return next(iter(counts.values()), schedule.groups)


def _leaves(kernel: Kernel, body: Sequence[Node]) -> tuple[Leaf, ...]:
    leaves = []
    for node in body:
        if isinstance(node, Loop):
            raise InputError(f"kernel {kernel.name}: the timeline does not cover loop {node.index} inside a loop")
        leaves.append(node)
    return tuple(leaves)


def default_order(cut: Sequence[Phase], slots: dict[str, int], groups: int) -> Order:
    """Iteration t first issues the copies of t + slots - 1, then runs the other phases in program order."""
    copies = tuple(Step("issue", p.name, slots.get(p.name, 1) - 1) for p in cut if p.copy)
    work = tuple(Step("run", p.name) for p in cut if not p.copy)
    return Order((Role("warps", groups, copies + work),), slots)


def _check_order(where: str, cut: Sequence[Phase], order: Order) -> None:
    """Refuse an order that names what the loop does not have, or does not start each phase once where it can run."""
    known = {p.name: p for p in cut}
    if len({role.name for role in order.roles}) < len(order.roles) or any(role.count < 1 for role in order.roles):
        raise InputError(f"{where}: the roles of an order need distinct names and one warp group or more")
    for role in order.roles:
        for step in role.steps:
            if step.verb not in get_args(Verb):
                raise InputError(f"{where}: {step.verb!r} is not one of {', '.join(get_args(Verb))}")
            if step.verb in ("take", "give"):
                continue
            if step.phase not in known:
                raise InputError(f"{where}: the order names phase {step.phase!r}, which the loop does not have"
                                 f" (it has {', '.join(known)}){nearest(step.phase, known)}")  # fmt: skip
            if not known[step.phase].copy and role is not order.roles[-1]:
                raise InputError(f"{where}: role {role.name} cannot {step.verb} phase {step.phase}: "
                                 f"only the last role, {order.roles[-1].name}, holds tiles")  # fmt: skip
    started = [s.phase for role in order.roles for s in role.steps if s.verb in ("issue", "run")]
    for name in known:
        if started.count(name) != 1:
            raise InputError(f"{where}: the order starts phase {name} {started.count(name)} times instead of once")
    for tile, slots in order.slots.items():
        if slots < 1:
            raise InputError(f"{where}: tile {tile} has {slots} buffers; it needs 1 or more")


def edges(cut: Sequence[Phase], slots: Mapping[str, int]) -> tuple[Edge, ...]:
    """Dependencies between the phases of a loop body.

    A tile that a phase reads comes from the phase that last wrote it before in the body (distance 0) or, carried,
    in the iteration before (distance 1).  A phase that writes a tile comes after those that used its last value in
    the same iteration; a tile with S slots may be overwritten once its users of S iterations ago have ended.
    """
    out: list[Edge] = []
    for n, phase in enumerate(cut):
        for tile in sorted(phase.reads):
            before = [p.name for p in cut[:n] if tile in p.writes]
            later = [p.name for p in cut[n + 1 :] if tile in p.writes]
            if before:
                out.append(Edge(before[-1], phase.name, 0, "raw"))
            elif later:
                out.append(Edge(later[-1], phase.name, 1, "raw"))
        for tile in sorted(phase.writes):
            out += [Edge(p.name, phase.name, 0, "war") for p in cut[:n] if tile in p.reads | p.writes]
            if not any(tile in p.writes for p in cut[:n]):
                distance = slots.get(tile, 1)
                out += [Edge(p.name, phase.name, distance, "war") for p in cut[n + 1 :] if tile in p.reads | p.writes]
    known = {(e.before, e.after, e.distance) for e in out if e.kind == "raw"}
    return tuple(dict.fromkeys(e for e in out if e.kind == "raw" or (e.before, e.after, e.distance) not in known))
