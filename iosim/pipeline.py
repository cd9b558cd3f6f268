"""What the order of a loop body follows from: its phases, their dependencies, and the default order.

Nothing is declared twice: phases and dependencies come from the program, buffer slots from the schedule.  Only a loop
without inner loops has an order; the body of any other is straight code and loops in turn, like that of a kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby
from typing import Literal, TypeAlias, get_args

from iosim.errors import InputError, nearest
from iosim.program import Compute, Kernel, Load, Loop, Node, Store, reads, walk, writes
from iosim.same import Same
from iosim.schedule import Order, Role, Schedule, Step, Verb

Leaf: TypeAlias = Load | Store | Compute

KEPT = 256  # kernels, and loop bodies with their slots, of which what was found out is kept


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
    """A loop without inner loops, or the straight code between loops (`loop` is None).

    `number` is its place in the kernel, `around` are the loops that it is in, outermost first.
    """

    number: int
    around: tuple[Loop, ...]
    loop: Loop | None
    phases: tuple[Phase, ...]
    order: Order

    @property
    def loops(self) -> tuple[Loop, ...]:
        """All loops that its phases are in."""
        return self.around if self.loop is None else (*self.around, self.loop)

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
    """The kernel as straight code and loops in turn, in program order, each with its order.

    As many warp groups work everywhere as in the loops that the schedule orders, else `schedule.groups`.
    Raises InputError for an order that does not fit its loop, with the phase named.
    """
    groups = _worker_groups(kernel, schedule)
    out: list[Segment] = []
    for loops, loop, cut in _cut(Same(kernel)):
        order = None if loop is None else schedule.orders.get(loop.index)
        if loop is not None and order is not None:
            _check_order(f"kernel {kernel.name}, loop {loop.index}", cut, order)
        slots = {} if loop is None else schedule.slots(tuple(p.name for p in cut if p.copy))
        out.append(Segment(len(out), loops, loop, cut, order or default_order(cut, slots, groups)))
    return tuple(out)


@lru_cache(maxsize=KEPT)
def _cut(kernel: Same[Kernel]) -> tuple[tuple[tuple[Loop, ...], Loop | None, tuple[Phase, ...]], ...]:
    """(loops around, own loop, phases) of each piece of a kernel, which no schedule changes."""
    return tuple((around, loop, phases(body)) for around, loop, body in _pieces(kernel.value.body, ()))


def nests(parts: Sequence[Segment], depth: int = 0) -> Iterator[tuple[Loop | None, tuple[Segment, ...]]]:
    """Parts that are in the same `depth` loops, in turn: None and one part, or a loop around loops and its parts."""

    def nest(part: Segment) -> tuple[int, bool]:
        return (id(part.around[depth]), True) if len(part.around) > depth else (part.number, False)

    for (_, nested), group in groupby(parts, nest):
        inside = tuple(group)
        yield inside[0].around[depth] if nested else None, inside


def _pieces(
    body: Sequence[Node], around: tuple[Loop, ...]
) -> Iterator[tuple[tuple[Loop, ...], Loop | None, tuple[Leaf, ...]]]:
    """(loops around, own loop, nodes) of each loop without inner loops and of each run of straight code."""
    for _, run in groupby(enumerate(body), lambda at: at[0] if isinstance(at[1], Loop) else -1):
        nodes = [node for _, node in run]
        leaves = tuple(node for node in nodes if not isinstance(node, Loop))
        if leaves:
            yield around, None, leaves
        elif isinstance(loop := nodes[0], Loop):
            inner = tuple(node for node in loop.body if not isinstance(node, Loop))
            if len(inner) == len(loop.body):
                yield around, loop, inner
            else:
                yield from _pieces(loop.body, (*around, loop))


def _ordered(kernel: Kernel, schedule: Schedule) -> list[Loop]:
    """The loops of a kernel that the schedule orders.  Raises InputError for one that has loops inside."""
    out: dict[str, Loop] = {}
    for _, loops in walk(kernel.body):
        for loop in loops:
            if loop.index in schedule.orders:
                out[loop.index] = loop
                if loop is not loops[-1]:
                    where = f"kernel {kernel.name}, loop {loop.index}"
                    raise InputError(f"{where}: only a loop without loops inside has an order")
    return list(out.values())


def _worker_groups(kernel: Kernel, schedule: Schedule) -> int:
    """Warp groups that share the rows of a block's tiles."""
    loops = [loop.index for loop in _ordered(kernel, schedule)]
    for index in loops:
        if not schedule.orders[index].roles:
            raise InputError(f"kernel {kernel.name}, loop {index}: the order has no role")
    counts = {index: schedule.orders[index].roles[-1].count for index in loops}
    if len(set(counts.values())) > 1:
        given = ", ".join(f"{count} in loop {index}" for index, count in counts.items())
        raise InputError(f"kernel {kernel.name}: the orders give its rows to different numbers of groups: {given}")
    return next(iter(counts.values()), schedule.groups)


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
            if step.verb in ("take", "give", "sync"):
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
    in the iteration before (distance 1); where a guard may leave that one out, from those before it as well.  A phase
    that writes a tile comes after those that used its last value in the same iteration; a tile with S slots may be
    overwritten once its users of S iterations ago have ended.
    """
    return _edges(Same(cut), tuple(slots.items()))


@lru_cache(maxsize=KEPT)
def _edges(of: Same[Sequence[Phase]], slots_of: tuple[tuple[str, int], ...]) -> tuple[Edge, ...]:
    cut, slots = of.value, dict(slots_of)
    out: list[Edge] = []
    for n, phase in enumerate(cut):
        for tile in sorted(phase.reads):
            before, sure = _last_writers(cut[:n], tile)
            later, _ = _last_writers(cut[n + 1 :], tile)
            out += [Edge(name, phase.name, 0, "raw") for name in before]
            if not sure:
                out += [Edge(name, phase.name, 1, "raw") for name in later]
        for tile in sorted(phase.writes):
            out += [Edge(p.name, phase.name, 0, "war") for p in cut[:n] if tile in p.reads | p.writes]
            if not any(tile in p.writes for p in cut[:n]):
                distance = slots.get(tile, 1)
                out += [Edge(p.name, phase.name, distance, "war") for p in cut[n + 1 :] if tile in p.reads | p.writes]
    known = {(e.before, e.after, e.distance) for e in out if e.kind == "raw"}
    return tuple(dict.fromkeys(e for e in out if e.kind == "raw" or (e.before, e.after, e.distance) not in known))


def _last_writers(cut: Sequence[Phase], tile: str) -> tuple[list[str], bool]:
    """The phases that may have written a tile last, the latest first, and whether one of them does in any case."""
    out = []
    for phase in reversed(cut):
        if tile in phase.writes:
            out.append(phase.name)
            if any(tile in writes(node) and node.when is None for node in phase.nodes):
                return out, True
    return out, False
