"""A kernel on a machine, ready to be run as events: what each phase books on each unit, by class of block.

Blocks that differ in nothing that takes time (trips, guarded trips, ragged bytes) are one class.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from math import ceil, prod
from typing import TYPE_CHECKING, Any

from iosim.dtypes import dtype
from iosim.errors import InputError
from iosim.hardware import Hardware
from iosim.index import indices
from iosim.interpreters.engine import Cause, duration
from iosim.interpreters.shapes import (
    Cost,
    Extent,
    Iteration,
    Lengths,
    Shape,
    Shapes,
    Totals,
    Transfer,
    Work,
    active,
    leaves,
    ties,
    value_of,
    visits,
    work_of,
)
from iosim.memory.cache import DramFlow
from iosim.memory.onchip import Footprint, footprint, on_matrix_unit, placement
from iosim.pipeline import Leaf, Phase, Segment, edges, segments
from iosim.program import Compute, Kernel, Load, Store, tile_of
from iosim.schedule import Schedule, Verb

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

IN_STEP = 16  # blocks that load one tile, from which on the L2 merges what they ask for
# Spilled registers, fitted to 43 tiles measured on an H200: stores and loads of each in a turn of the loop, and how
# much of an L1 and of an L2 they can take.
SPILL_TRIPS, L1_USABLE, L2_USABLE = 1.46, 0.7, 0.5
PIECES = 6  # where warp groups contend, a phase books its units in this many pieces, so that they interleave


@dataclass(frozen=True, slots=True)
class Need:
    """What a phase waits for: phase number `before` of `distance` iterations ago; waiting counts as `cause`.

    Iterations of a loop are counted through all visits of a block.
    """

    before: int
    distance: int
    copied: bool
    cause: Cause


@dataclass(frozen=True, slots=True)
class Task:
    """A phase of a segment and what it waits for.

    `needs` are of its own segment.  The others are (segment, phase number), whose last visit counts: `loaded` are
    copies into what the phase reads.  `freed` are what a copy comes after, in all groups: the users of the tile that it
    overwrites, and the stores of the tensor that it loads, which is there once they have been sent.
    `cause` is what others wait for while it runs.
    """

    number: int
    phase: Phase
    cause: Cause
    needs: tuple[Need, ...]
    loaded: tuple[tuple[int, int], ...]
    freed: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Action:
    """A step of an order with its phase's task; `task` is None for take and give."""

    verb: Verb
    task: Task | None
    ahead: int


@dataclass(frozen=True)
class BlockClass:
    """Blocks that behave alike: `env` are the grid indices of one of them, `count` how many there are."""

    env: Mapping[str, int]
    count: int
    shape: Shape


@dataclass(frozen=True)
class Model:
    """A kernel with its schedule on a machine."""

    kernel: Kernel
    schedule: Schedule
    hardware: Hardware
    flows: tuple[DramFlow, ...]

    @cached_property
    def parts(self) -> tuple[Segment, ...]:
        return segments(self.kernel, self.schedule)

    @cached_property
    def footprint(self) -> Footprint:
        return footprint(self.kernel, self.schedule, self.hardware)

    @cached_property
    def places(self) -> Mapping[str, str]:
        return placement(self.kernel, self.schedule, self.hardware)

    @cached_property
    def workers(self) -> int:
        """Warp groups that share a block's rows."""
        return self.parts[0].order.roles[-1].count

    @cached_property
    def pieces(self) -> int:
        """Into how many pieces a phase is cut: one where no other work of the processor could come between."""
        issues = any(a.verb == "issue" and a.task and not a.task.phase.copy for part in self.actions for a in part[""])
        return PIECES if issues or self.workers * self.footprint.resident > 1 else 1

    @cached_property
    def dram_bandwidth(self) -> int:
        """Bytes a second that DRAM gives this kernel.

        Between the efficiency of a pure stream and that of a 1:1 mix of reads and writes, in inverse proportion to how
        mixed the kernel's own traffic is: turning the bus round is what costs.
        """
        read = sum(f.dram_read_bytes for f in self.flows)
        write = sum(f.dram_write_bytes for f in self.flows)
        mixed = 2 * min(read, write) / (read + write) if read + write else 0.0
        hbm = self.hardware.hbm
        efficiency = 1 / ((1 - mixed) / hbm.read_efficiency + mixed / hbm.mixed_efficiency)
        return int(hbm.bandwidth * efficiency * self.schedule.dram_share)

    # ------------------------------------------------------------------ orders

    @cached_property
    def tasks(self) -> tuple[tuple[Task, ...], ...]:
        """The phases of each segment with what they wait for."""
        everywhere = [(part, number, phase) for part in self.parts for number, phase in enumerate(part.phases)]
        return tuple(
            tuple(
                Task(
                    number,
                    phase,
                    _cause(phase),
                    needs,
                    tuple((p.number, n) for p, n, by in everywhere if p is not part and _loads_for(by, phase)),
                    tuple((p.number, n) for p, n, by in everywhere if _frees(by, phase, own=p is part)),
                )
                for number, (phase, needs) in enumerate(zip(part.phases, _needs(part), strict=True))
            )
            for part in self.parts
        )

    @cached_property
    def actions(self) -> tuple[dict[str, tuple[Action, ...]], ...]:
        """The steps of each segment by role; the workers have the role ""."""
        out = []
        for part, tasks in zip(self.parts, self.tasks, strict=True):
            by_name = {task.phase.name: task for task in tasks}
            *others, last = part.order.roles
            roles = {**{role.name: role for role in others}, "": last}
            out.append(
                {
                    name: tuple(Action(s.verb, by_name.get(s.phase), s.ahead) for s in role.steps)
                    for name, role in roles.items()
                }
            )
        return tuple(out)

    @cached_property
    def groups(self) -> tuple[tuple[str, int], ...]:
        """(role, rank) of each warp group of a block, workers first."""
        keys = [("", rank) for rank in range(self.workers)]
        for part in self.parts:
            keys += [(role.name, rank) for role in part.order.roles[:-1] for rank in range(role.count)]
        return tuple(dict.fromkeys(keys))

    # ------------------------------------------------------------------ work of a phase

    def cost(self, phase: Phase, nodes: Sequence[Leaf]) -> Cost:
        """What one warp group's share of the nodes of a phase takes.

        A warp issues its instructions in order, and each waits for the one before it in a chain of dependent ones: a
        group alone takes the sum of its times on the units, where several groups overlap them.  Each instruction
        of a lane takes an issue slot, and matrix instructions take a share of all.
        """
        computes = [node for node in nodes if isinstance(node, Compute)]
        more = self._code(phase, nodes)
        if not computes and not more:
            return Cost()
        amounts = dict.fromkeys(("matrix", "vector", "alu", "exp", "sram"), 0)
        amounts["exp"] = self.special(computes)
        lag = self.cycles(phase.name) + (self.cycles("mask") if any(n.op == "mask" for n in computes) else 0)
        for node in computes:
            for unit, amount in self.work(node).items():
                amounts[unit] += amount
            lag += self._lag(node)
            if node.op == "exp" and node.out.shape[1] > 1:
                amounts["sram"] += self._spilled
        rates = self._rates(computes)
        one = {
            unit: duration(-(-amount // self.workers), rates[unit] or 1) for unit, amount in amounts.items() if amount
        }
        chain = sum(length for unit, length in one.items() if unit not in ("sram", "matrix"))
        if "matrix" in one:
            chain += round(one["matrix"] / self.hardware.matrix.lone_share)
        extra, dependent = self._overhead(nodes)
        chain += duration(-(-dependent // self.workers), self.hardware.issue_rate or 1)
        issued = amounts["vector"] + amounts["alu"] + amounts["exp"] + extra + ceil(more)
        if latency := self.schedule.instructions.get("latency"):
            each = issued / (self.workers * self.hardware.group_threads)
            chain = max(chain, round(each * latency * 10**12 / (self.hardware.clock_hz or 1)))
        slots = duration(-(-issued // self.workers), self.hardware.issue_rate or 1)
        slots += round(one.get("matrix", 0) * self.hardware.matrix.issue_share)
        if slots:
            one["issue"] = slots
        return Cost(tuple(one.items()), chain, lag)

    def _code(self, phase: Phase, nodes: Sequence[Leaf]) -> float:
        """Issue slots of lanes that the code of a phase takes by its name; see Schedule."""
        made = [n.tile if isinstance(n, Store) else n.out for n in nodes if not isinstance(n, Load)]
        return self.schedule.instructions.get(phase.name, 0) * prod(made[-1].shape) if made else 0

    def _overhead(self, nodes: Sequence[Leaf]) -> tuple[int, int]:
        """Issue slots of lanes that the code of these nodes takes beyond its operations, and how many in the chain.

        See `instructions` of Schedule.
        """
        each, matrix = self.schedule.instructions, self.hardware.matrix
        computes = [n for n in nodes if isinstance(n, Compute)]
        size = 2 * (matrix.instruction_m_max or 1) * (matrix.instruction_n_max or 1) * (matrix.instruction_k or 1)
        products = sum(self._padded_flops(n) for n in computes if n.op == "matmul" and on_matrix_unit(n)) / size
        stored = sum(prod(n.tile.shape) for n in nodes if isinstance(n, Store)) if "element" in each else 0
        scores = self._scores(computes)
        rounds = self.workers * self.hardware.group_threads if scores else 0
        slots = scores * each.get("score", 0) + rounds * each.get("round", 0) + stored * each.get("element", 0)
        slots += products * each.get("product", 0) * self.hardware.warp_size
        return ceil(slots), ceil(scores * each.get("chain", 0))

    @cached_property
    def spilled(self) -> tuple[float, float, float]:
        """Bytes that spilled registers move in one turn of the loop with the scores, by the level that serves them: L1,
        L2, device memory.

        They live beyond the L1 when those of all resident blocks do not fit there: L1 caches that are read in turn keep
        all or nothing.  What the L2 cannot hold is served by DRAM.
        """
        each = self.schedule.spills * 4 * self.footprint.threads
        held = self.footprint.resident * each
        sram = self.hardware.sram
        if held <= L1_USABLE * (sram.unified_bytes - self.footprint.resident * self.footprint.sram_bytes):
            return each * SPILL_TRIPS, 0.0, 0.0
        last = (self.hardware.l2.capacity_bytes or 0) if self.hardware.l2 is not None else 0
        kept = min(1.0, L2_USABLE * last / (held * (self.hardware.processors or 1)))
        return 0.0, each * SPILL_TRIPS * kept, each * SPILL_TRIPS * (1 - kept)

    @cached_property
    def _spilled(self) -> int:
        """What spilled registers move in one turn of the loop with the scores, in bytes at the bandwidth of SRAM."""
        if not self.schedule.spills:
            return 0
        rates = self.hardware.spill_bytes_per_clock
        if rates is None:
            raise InputError(
                f"spills: {self.schedule.spills} spilled registers have no time on {self.hardware.name}, whose profile "
                "lacks registers.spill_l1_bytes_per_clock, .spill_l2_bytes_per_clock or .spill_hbm_bytes_per_clock"
            )
        clocks = sum(bytes_ / rate for bytes_, rate in zip(self.spilled, rates, strict=True))
        return round(clocks * (self.hardware.sram.bandwidth or 0) / (self.hardware.clock_hz or 1))

    def special(self, nodes: Sequence[Compute]) -> int:
        """Special functions that the code of these nodes takes beyond its operations; see Schedule."""
        return ceil(self._scores(nodes) * self.schedule.instructions.get("special", 0))

    def _scores(self, nodes: Sequence[Compute]) -> int:
        """Elements of which these nodes take exp, row statistics left out."""
        return sum(n.work["exp"] * self.surplus for n in nodes if n.op == "exp" and n.out.shape[1] > 1)

    def _rates(self, nodes: Sequence[Compute]) -> dict[str, int | None]:
        """Operations a second of one processor's units, for the products among these nodes."""
        hardware = self.hardware
        products = [n for n in nodes if n.op == "matmul" and on_matrix_unit(n)]
        return {
            "matrix": hardware.matrix_rate(tile_of(products[-1].args[0]).dtype) if products else None,
            "vector": hardware.vector_rate,
            "alu": hardware.alu_rate,
            "exp": hardware.exp_rate,
            "sram": hardware.sram.bandwidth,
        }

    def _lag(self, node: Compute) -> int:
        """Ps from the end of a node's work to its result.

        Rows are spread over lanes: a maximum is needed by all of them at once, a sum only after the last iteration.
        """
        if node.op == "matmul" and on_matrix_unit(node):
            matrix = self.hardware.matrix
            rows, _ = self.share(node)
            chains = 1 if matrix.issued_by == "warp" else -(-rows // (matrix.instruction_m_max or rows))
            return matrix.drain_ps + matrix.switch_ps * (chains - 1) + self._unhidden(node)
        return self.hardware.reduce_ps if node.op == "rowmax" else 0

    def _unhidden(self, node: Compute) -> int:
        """Ps in which a warp that keeps one set of operands has none, over the steps of a product.

        The next ones take a latency, and come only when the products that read these are through.
        """
        matrix = self.hardware.matrix
        if self.schedule.fragments > 1 or not self.by_warp:
            return 0
        steps = -(-node.args[0].shape[1] // (matrix.instruction_k or 1))
        return steps * ((self.hardware.sram.latency_ps or 0) + matrix.drain_ps)

    def barrier(self, groups: int) -> int:
        """Ps from the arrival of the last of so many warp groups to the first instruction behind a barrier."""
        whole, each = self.hardware.barrier_ps
        return whole + each * groups * self.hardware.warps_per_group

    def cycles(self, name: str) -> int:
        """What the schedule says that the code adds there, in ps."""
        return round(self.schedule.cycles.get(name, 0) * 10**12 / (self.hardware.clock_hz or 1))

    @property
    def by_warp(self) -> bool:
        """Whether each warp issues matrix instructions of its own."""
        return self.hardware.matrix.issued_by == "warp"

    @cached_property
    def has_products(self) -> bool:
        """Whether its blocks use the matrix unit."""
        nodes = (n for part in self.parts for n in leaves(part) if isinstance(n, Compute))
        return any(n.op == "matmul" and on_matrix_unit(n) for n in nodes)

    @cached_property
    def product_flops(self) -> tuple[int, int]:
        """FLOPs of the matrix unit, each product of the kernel once: of the tiles, and in whole instructions."""
        nodes = (n for part in self.parts for n in leaves(part) if isinstance(n, Compute))
        products = [n for n in nodes if n.op == "matmul" and on_matrix_unit(n)]
        return sum(n.work["matrix"] for n in products), sum(map(self._padded_flops, products))

    @cached_property
    def surplus(self) -> int:
        """Warp groups that hold the same rows, because a matrix instruction is higher than a group's share."""
        nodes = [n for part in self.parts for n in leaves(part) if isinstance(n, Compute)]
        products = [n for n in nodes if n.op == "matmul" and on_matrix_unit(n)]
        heights = [n.out.shape[0] for n in products if n.phase not in self.schedule.along_rows]
        least = (self.hardware.matrix.instruction_m or 1) if self.hardware.matrix.issued_by == "group" else 1
        return min(self.workers, max(1, -(-self.workers * least // min(heights)))) if heights else 1

    def work(self, node: Compute) -> dict[str, int]:
        """Work of one node for the whole block: the op's own, and SRAM bytes of operands and results."""
        if node.op == "matmul":
            flops = self._padded_flops(node) if on_matrix_unit(node) else 0
            work = {"matrix": flops} if flops else {"vector": node.work["matrix"] // 2}
            work["sram"] = self._operand_bytes(node)
        else:
            work = {unit: amount * self.surplus for unit, amount in node.work.items()}
            work["sram"] = sum(tile.bytes for tile in map(tile_of, node.args) if self.places[tile.name] == "sram")
        if self.places[node.out.name] == "sram":
            work["sram"] += node.out.bytes
        return work

    def share(self, node: Compute) -> tuple[int, int]:
        """Rows and columns of a product that one warp group computes.

        Surplus groups compute the same rows: each all columns of a product that further code takes by rows, a part of
        the columns of one that is summed up over a loop.
        """
        rows, cols = node.out.shape
        if tall := self.schedule.along_rows.get(node.phase):
            tall = min(self.workers, -(-tall // (self.hardware.warps_per_group if self.by_warp else 1)))
            return -(-rows // tall), -(-cols * tall // self.workers)
        rows = -(-rows * self.surplus // self.workers)
        return rows, -(-cols // self.surplus) if node.add else cols

    def _padded_flops(self, node: Compute) -> int:
        """FLOPs that the matrix unit executes: each group's share in whole instructions.

        `instruction_k` is for operands of two bytes; narrower ones come in steps of as many bytes.
        """
        matrix = self.hardware.matrix
        rows, cols = self.share(node)
        step = (matrix.instruction_k or 1) * 2 // dtype(tile_of(node.args[0]).dtype).bytes
        sizes = (rows, matrix.instruction_m), (cols, matrix.instruction_n), (node.args[0].shape[1], step)
        return 2 * self.workers * prod(-(-size // (unit or 1)) * (unit or 1) for size, unit in sizes)

    def _operand_bytes(self, node: Compute) -> int:
        """SRAM bytes that a matmul reads.

        An instruction of a group reads B once for its height of the group's rows, and A for its width.  Warps that
        issue their own load their rows of A and their columns of B.
        """
        matrix = self.hardware.matrix
        a, b = map(tile_of, node.args)
        if tall := self.schedule.along_rows.get(node.phase):
            issuers = self.workers * (self.hardware.warps_per_group if matrix.issued_by == "warp" else 1)
            times = (a, -(-issuers // tall)), (b, min(tall, issuers))
            return sum(tile.bytes * n for tile, n in times if self.places[tile.name] == "sram")
        rows, cols = self.share(node)
        height, width = matrix.instruction_m_max or rows, matrix.instruction_n_max or cols
        times_b, times_a = -(-rows // height), -(-cols // (-(-width // self.surplus)))
        if matrix.issued_by == "warp":
            times_b, times_a = min(self.hardware.warps_per_group, -(-rows // (matrix.instruction_m or rows))), 1
        read = b.bytes * cols // node.out.shape[1] * self.workers * times_b if self.places[b.name] == "sram" else 0
        if self.places[a.name] == "sram":
            read += a.bytes * self.surplus * times_a
        return read

    # ------------------------------------------------------------------ bytes of a transfer

    @cached_property
    def _dram_share(self) -> dict[int, tuple[int, int]]:
        """{id of node: (DRAM bytes, HBM bytes)} over the whole kernel, as many as a stream has in the same time."""
        out = {}
        for f in self.flows:
            dram = f.dram_read_bytes + f.dram_write_bytes
            slower = 1.0 if f.rows is None else f.rows.cost.time / f.rows.cost.moved
            out[id(f.flow.node)] = (dram if slower == 1 else ceil(dram * slower)), f.flow.hbm_bytes
        return out

    @cached_property
    def _sectors(self) -> dict[int, float]:
        """{id of node: bytes of sectors for each byte asked for}, where a layout makes them more."""
        return {id(f.flow.node): f.rows.cost.sectors for f in self.flows if f.rows is not None}

    @cached_property
    def _l2_rates(self) -> dict[str, int | None]:
        """Bytes a second between processors and L2, by direction."""
        l2 = self.hardware.l2
        if l2 is None:
            return dict.fromkeys(("read", "shared", "write", "add"))
        return {
            "read": l2.bandwidth, "shared": l2.shared_bandwidth, "write": l2.write_bandwidth, "add": l2.add_bandwidth,
        }  # fmt: skip

    def _is_shared(self, node: Load | Store) -> bool:
        """Whether many blocks load the same tile, which those that run together ask for nearly in step."""
        if not isinstance(node, Load):
            return False
        running = self.footprint.resident * (self.hardware.processors or 1)
        alike = prod(n for axis, n in self.kernel.grid if axis not in node.view.indices)
        return min(running, alike) >= IN_STEP

    def transfer(self, node: Load | Store, count: int) -> Transfer:
        """What a load or store of `count` bytes takes."""
        view = node.view
        dram, hbm = self._dram_share[id(node)]
        lengths = {}
        if dram and count:
            lengths["dram"] = -(-count * dram * 10**12 // (hbm * self.dram_bandwidth))
        direction = "read" if isinstance(node, Load) else "add" if node.add else "write"
        if count and (rate := self._l2_rates["shared" if self._is_shared(node) else direction]):
            cluster = self.schedule.multicast.get(node.tile.name, 1) if direction == "read" else 1
            lengths["l2"] = duration(ceil(-(-count // cluster) * self._sectors.get(id(node), 1)), rate)
        if isinstance(node, Load) and count:
            lengths["copy"] = duration(count, self.hardware.copy.bandwidth or 1)
        if count and (isinstance(node, Store) or self.sram_passes(node)):
            lengths["sram"] = duration(count * self.sram_passes(node), self.hardware.sram.bandwidth or 1)
        return Transfer(view.tensor.name, direction, count, tuple(lengths.items()))

    def sram_passes(self, node: Load | Store) -> int:
        """How often SRAM takes or gives what a load or store moves: a reduction passes through it, and what comes by
        way of registers passes the L1, which is the same memory.
        """
        if self.places[node.tile.name] == "sram":
            return 2 if isinstance(node, Load) and node.tile.name in self.schedule.through_registers else 1
        return 2 if isinstance(node, Store) and node.add else 0

    def latency(self, transfer: Transfer) -> int:
        """Ps from the end of a load's transfer to its arrival: of DRAM where any of it comes from there."""
        own = self.hardware.copy.latency_ps
        if any(unit == "dram" for unit, _ in transfer.lengths):
            return own + (self.hardware.hbm.latency_ps or 0)
        return own + ((self.hardware.l2.latency_ps or 0) if self.hardware.l2 is not None else 0)

    # ------------------------------------------------------------------ what the blocks of a class do

    def iteration(self, part: Segment, env: Mapping[str, int]) -> Iteration:
        """What each phase of a segment does with the indices `env`."""
        return tuple(self._phase_work(phase, env) for phase in part.phases)

    def _phase_work(self, phase: Phase, env: Mapping[str, int]) -> Work:
        runs = active(phase.nodes, env)
        key = (id(phase), tuple((id(node), count) for node, count in runs))
        if key not in self._works:
            moves = tuple(self.transfer(n, count) for n, count in runs if not isinstance(n, Compute) and count)
            self._works[key] = work_of(self.cost(phase, tuple(node for node, _ in runs)), moves)
        return self._works[key]

    @cached_property
    def _works(self) -> dict[tuple[int, tuple[tuple[int, int], ...]], Work]:
        return {}

    def cut(self, work: Work, *, whole: bool) -> Sequence[tuple[Lengths, int]]:
        """Each piece of a phase's work, or all of it as one: ps on its units, and ps of its chain."""
        key = work, whole
        if key not in self._cuts:
            pieces = (1 if whole else self.pieces) if work.lengths else 0
            self._cuts[key] = [
                (
                    tuple((name, _share(length, n, pieces)) for name, length in work.lengths),
                    _share(work.cost.chain, n, pieces),
                )
                for n in range(pieces)
            ]
        return self._cuts[key]

    @cached_property
    def _cuts(self) -> dict[tuple[Work, bool], Sequence[tuple[Lengths, int]]]:
        return {}

    def totals(self, shape: Shape) -> Totals:
        """Busy time of each unit and bytes moved by one block: what a simulation must add up to."""
        return self.sum([(1, shape)])

    @cached_property
    def whole(self) -> Totals:
        """The same of the whole grid."""
        return self.sum((kind.count, kind.shape) for kind in self.classes)

    def sum(self, blocks: Iterable[tuple[int, Shape]]) -> Totals:
        """The same of so many blocks of each shape."""
        iterations: dict[Iteration, int] = {}
        for number, shape in blocks:
            for times, visit in visits(shape, number):
                for trips, iteration in visit.stretches:
                    iterations[iteration] = iterations.get(iteration, 0) + times * trips
        busy: Counter[str] = Counter()
        moved: Counter[tuple[str, str]] = Counter()
        for iteration, times in iterations.items():
            one = self._totals_of(iteration)
            for unit, length in one.busy.items():
                busy[unit] += length * times
            for key, bytes_ in one.moved.items():
                moved[key] += bytes_ * times
        return Totals(dict(busy), dict(moved))

    def _totals_of(self, iteration: Iteration) -> Totals:
        """The same of one iteration."""
        if iteration not in self._iteration_totals:
            busy: Counter[str] = Counter()
            moved: Counter[tuple[str, str]] = Counter()
            for work in iteration:
                for unit, length in work.lengths:
                    busy[unit] += length * self.workers
                for move in work.moves:
                    moved[move.tensor, move.direction] += move.bytes
                    ranks = range(0 if move.direction == "read" else self.workers)
                    parts = [move.share(rank, self.workers) for rank in ranks] or [move]
                    for unit, length in (pair for part in parts if part for pair in part.lengths):
                        busy[unit] += length
            self._iteration_totals[iteration] = Totals(busy, moved)
        return self._iteration_totals[iteration]

    @cached_property
    def _iteration_totals(self) -> dict[Iteration, Totals]:
        return {}

    # ------------------------------------------------------------------ classes of blocks

    @cached_property
    def _axes(self) -> tuple[tuple[tuple[str, ...], tuple[Any, ...]], ...]:
        """Grid axes that time depends on, in groups that some expression ties together, with those expressions."""
        limits = {axis: (0, n - 1) for axis, n in self.kernel.grid}
        groups: list[tuple[set[str], list[Any]]] = []
        for e in dict.fromkeys(ties(self.parts, limits)):
            names = (indices(e.axis.start) if isinstance(e, Extent) else indices(e)) & limits.keys()
            if not names:
                continue
            merged = set(names), [e]
            for group in [g for g in groups if g[0] & names]:
                groups.remove(group)
                merged = merged[0] | group[0], group[1] + merged[1]
            groups.append(merged)
        order = [axis for axis, _ in self.kernel.grid]
        return tuple((tuple(sorted(names, key=order.index)), tuple(es)) for names, es in groups)

    @cached_property
    def _labels(
        self,
    ) -> tuple[tuple[tuple[str, ...], NDArray[np.int64], list[dict[str, int]], list[int]], ...]:
        """For each group of axes: its names, the class of each of its cells, a cell of each class, their counts."""
        import numpy as np

        extents = dict(self.kernel.grid)
        out = []
        for names, exprs in self._axes:
            shape = tuple(extents[name] for name in names)
            cells = dict(zip(names, np.unravel_index(np.arange(prod(shape)), shape), strict=True))
            columns = [np.broadcast_to(np.asarray(value_of(e, cells)), (prod(shape),)) for e in exprs]
            _, first, label, counts = np.unique(
                np.stack(columns, 1), axis=0, return_index=True, return_inverse=True, return_counts=True
            )
            samples = [{name: int(cells[name][n]) for name in names} for n in first]
            out.append((names, label.reshape(shape), samples, [int(c) for c in counts]))
        return tuple(out)

    @cached_property
    def classes(self) -> tuple[BlockClass, ...]:
        """The classes of blocks of the grid."""
        import numpy as np

        groups = [(names, np.arange(len(samples)), samples, counts) for names, _, samples, counts in self._labels]
        places = np.meshgrid(*(numbers for _, numbers, _, _ in groups), indexing="ij")
        total = prod(len(numbers) for _, numbers, _, _ in groups)
        cells = {axis: np.zeros(total, np.int64) for axis, _ in self.kernel.grid}
        blocks = np.ones(total, np.int64)
        tied: set[str] = set()
        for (names, _, samples, counts), place in zip(groups, places, strict=True):
            of = place.reshape(-1)
            cells |= {name: np.array([sample[name] for sample in samples])[of] for name in names}
            blocks *= np.array(counts)[of]
            tied |= set(names)
        blocks *= prod(n for axis, n in self.kernel.grid if axis not in tied)
        shapes = Shapes(self.iteration).of(self.parts, cells, total)
        rows = zip(*(values.tolist() for values in cells.values()), strict=True) if cells else iter([()])
        envs = (dict(zip(cells, row, strict=True)) for row in rows)
        return tuple(map(BlockClass, envs, blocks.tolist(), shapes))

    def class_of_blocks(self) -> NDArray[np.int64]:
        """The number of the class of every block, in launch order: see Schedule.grid_order."""
        import numpy as np

        of_grid = self._class_of_grid()
        if self.schedule.grid_order == "natural" or not self.kernel.grid:
            return of_grid
        rows = of_grid.reshape(-1, self.kernel.grid[-1][1])  # a row is a run along the last axis
        lengths = np.array([self.iterations(kind.shape) for kind in self.classes])
        longest_first = np.argsort(-lengths[rows], axis=1, kind="stable")
        return np.take_along_axis(rows, longest_first, axis=1).reshape(-1)

    def iterations(self, shape: Shape) -> int:
        """Iterations of all innermost loops of one block."""
        loops = ((times, visit) for times, visit in visits(shape) if self.parts[visit.part].loop is not None)
        return sum(times * trips for times, visit in loops for trips, _ in visit.stretches)

    def _class_of_grid(self) -> NDArray[np.int64]:
        """The number of the class of every block, the last grid axis fastest."""
        import numpy as np

        total = np.zeros((), np.int64)
        for names, label, samples, _ in self._labels:
            shape = [extent if axis in names else 1 for axis, extent in self.kernel.grid]
            total = total * len(samples) + label.reshape(shape)
        return np.broadcast_to(total, [n for _, n in self.kernel.grid]).reshape(-1)


def _share(length: int, n: int, pieces: int) -> int:
    """Piece number n of a length in so many pieces, as equal as whole numbers can be."""
    return length * (n + 1) // pieces - length * n // pieces


def _cause(phase: Phase) -> Cause:
    """What others wait for while a phase runs."""
    if phase.copy:
        return "data"
    matrix = any(isinstance(node, Compute) and node.op == "matmul" for node in phase.nodes)
    return "matrix" if matrix else "vector"


def _loads_for(by: Phase, phase: Phase) -> bool:
    """Whether `by` is a copy into a tile that `phase` reads."""
    return by.copy and bool(by.writes & phase.reads)


def _frees(by: Phase, phase: Phase, *, own: bool) -> bool:
    """Whether the copy `phase` comes after `by`, see Task; for users of its tile in its `own` segment, edges say so."""
    if not phase.copy or by.copy:
        return False
    tensors = {node.view.tensor.name for node in phase.nodes if isinstance(node, Load)}
    stores = any(isinstance(node, Store) and node.view.tensor.name in tensors for node in by.nodes)
    return stores or (not own and bool(phase.writes & (by.reads | by.writes)))


def _needs(part: Segment) -> Iterator[tuple[Need, ...]]:
    """For each phase of a segment what it waits for.  A phase that is issued also waits for its own last iteration."""
    number = {phase.name: n for n, phase in enumerate(part.phases)}
    issued = {step.phase for role in part.order.roles for step in role.steps if step.verb == "issue"}
    for phase in part.phases:
        needs = []
        for edge in edges(part.phases, part.order.slots):
            before = part.phases[number[edge.before]]
            if edge.after == phase.name:
                cause = "buffer" if phase.copy else _cause(before)
                needs.append(Need(number[edge.before], edge.distance, before.copy, cause))
        if phase.name in issued and not phase.copy:
            needs.append(Need(number[phase.name], 1, False, _cause(phase)))
        yield tuple(needs)
