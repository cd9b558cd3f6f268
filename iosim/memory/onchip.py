"""What a block occupies on a processor: SRAM by item, registers, threads, and so how many blocks are resident."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from iosim.errors import InputError
from iosim.hardware import Hardware
from iosim.pipeline import KEPT, Leaf, Segment, nests, segments
from iosim.program import Compute, Kernel, Load, Program, reads, tile_of, tiles, walk, writes
from iosim.same import Same
from iosim.schedule import Place, Schedule

# Registers of a thread that hold addresses, counters and temporaries rather than tiles: 20 to 40 in the Triton
# kernels measured on an H200.
OTHER_REGISTERS = 32

Places = Mapping[str, Place]  # by tile name, of one kernel


class CapacityError(InputError):
    """A block that does not fit on a processor."""


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one block of a kernel takes, and how many blocks are resident on a processor.

    `items` are SRAM bytes by tile ("k x2" is two buffers).  `registers` estimates the need of one thread: the tiles
    alive at one time spread over the threads that hold them, and addresses; `block_registers` that of all threads, of
    which a producer's hold addresses only.  `limit` names what keeps one more block away.
    """

    kernel: str
    items: Mapping[str, int]
    sram_bytes: int
    sram_capacity: int
    tmem_bytes: int
    threads: int
    registers: int
    max_registers: int | None
    block_registers: int
    resident: int
    limit: str

    @property
    def fits(self) -> bool:
        """Whether a block can run at all, without spilling registers."""
        return self.resident > 0 and (self.max_registers is None or self.registers <= self.max_registers)

    def complaint(self, hardware: Hardware) -> str:
        """Why the block does not fit, itemised, in one line."""
        if self.sram_bytes > self.sram_capacity:
            sum_ = " + ".join(f"{name} {bytes_:,}" for name, bytes_ in self.items.items())
            return (f"kernel {self.kernel} needs {self.sram_bytes:,} B of SRAM ({sum_}); "
                    f"{hardware.name} gives a block {self.sram_capacity:,} B")  # fmt: skip
        if hardware.tmem is not None and self.tmem_bytes > hardware.tmem.capacity_bytes:
            return (f"kernel {self.kernel} needs {self.tmem_bytes:,} B of tensor memory; "
                    f"{hardware.name} has {hardware.tmem.capacity_bytes:,} B")  # fmt: skip
        if self.threads > hardware.max_threads_per_block:
            return (f"kernel {self.kernel} needs {self.threads} threads; "
                    f"{hardware.name} gives a block {hardware.max_threads_per_block}")  # fmt: skip
        if self.max_registers is not None and self.registers > self.max_registers:
            return (f"kernel {self.kernel} keeps about {self.registers} registers a thread in its tiles "
                    f"({self.threads} threads); {hardware.name} has {self.max_registers} a thread")  # fmt: skip
        need = f"{self.block_registers:,} registers (up to {self.registers} for each of {self.threads} threads)"
        return (f"kernel {self.kernel} needs about {need}; "
                f"a {hardware.called} of {hardware.name} has {hardware.registers:,}")  # fmt: skip


def placement(kernel: Kernel, schedule: Schedule, hardware: Hardware) -> dict[str, Place]:
    """Where each tile of a kernel lives.

    Loaded tiles live in SRAM and computed ones in registers, unless the schedule says otherwise.  What the matrix
    unit cannot take from registers is staged where it can: operands in SRAM or tensor memory, accumulators in tensor
    memory.  Raises InputError where the schedule keeps an operand in registers that the unit cannot read there.
    """
    schedule = schedule.of(kernel.name)
    hardware = hardware.with_units(schedule.units)
    places: dict[str, Place] = {}
    for node, _ in walk(kernel.body):
        for tile in tiles(node):
            places.setdefault(tile.name, "sram" if isinstance(node, Load) else "registers")
    for node, _ in walk(kernel.body):
        if not isinstance(node, Compute) or node.op != "matmul" or not on_matrix_unit(node):
            continue
        if hardware.matrix.accumulator == "tmem":
            places[node.out.name] = "tmem"
        for tile in map(tile_of, node.args):
            if places[tile.name] == "registers" and not _reads_registers(hardware):
                if schedule.place.get(tile.name) == "registers":
                    raise InputError(
                        f"place: tile {tile.name} cannot stay in registers on {hardware.name}: "
                        f"{hardware.matrix.name} reads operands from {hardware.matrix.operand_a}"
                    )
                places[tile.name] = "sram" if hardware.staged_operand else "tmem"
    return places | {name: place for name, place in schedule.place.items() if name in places}


def on_matrix_unit(node: Compute) -> bool:
    """Whether a matmul runs on the matrix unit; fp32 products run on the vector lanes (no silent TF32)."""
    return all(tile_of(a).dtype != "fp32" for a in node.args)


def _reads_registers(hardware: Hardware) -> bool:
    return hardware.matrix.operand_a in ("registers", "either")


def footprint(kernel: Kernel, schedule: Schedule, hardware: Hardware) -> Footprint:
    """SRAM, registers, threads and resident blocks of one kernel."""
    return _footprint(Same(kernel), schedule.of(kernel.name), Same(hardware))


@lru_cache(maxsize=4096)
def _footprint(of: Same[Kernel], schedule: Schedule, on: Same[Hardware]) -> Footprint:
    kernel, hardware = of.value, on.value.with_units(schedule.units)
    places = placement(kernel, schedule, hardware)
    parts = segments(kernel, schedule)
    items = _sram_items(parts, places, schedule)
    used = sum(items.values())
    groups = max(sum(role.count for role in part.order.roles) for part in parts)
    workers = parts[0].order.roles[-1].count
    threads = groups * hardware.group_threads
    alive = _peak_bytes(parts, places, "registers")
    registers = schedule.registers or OTHER_REGISTERS + -(-alive // (4 * workers * hardware.group_threads))
    tmem = _peak_bytes(parts, places, "tmem")
    held = min(registers, hardware.max_registers_per_thread or registers)
    beside = schedule.registers or OTHER_REGISTERS  # of a producer's threads
    block_registers = hardware.warps_per_group * (
        workers * _warp_registers(held, hardware) + (groups - workers) * _warp_registers(beside, hardware)
    )
    resident, limit = resident_blocks(hardware, used, tmem, block_registers, threads)
    return Footprint(
        kernel=kernel.name,
        items=items,
        sram_bytes=used,
        sram_capacity=hardware.sram.block_capacity_bytes,
        tmem_bytes=tmem,
        threads=threads,
        registers=registers,
        max_registers=hardware.max_registers_per_thread,
        block_registers=block_registers,
        resident=resident,
        limit=limit,
    )


def _warp_registers(each: int, hardware: Hardware) -> int:
    """Registers that a warp takes of which each thread has so many."""
    unit = hardware.registers_per_warp_unit
    return -(-each * hardware.warp_size // unit) * unit


def footprints(program: Program, schedule: Schedule, hardware: Hardware) -> dict[str, Footprint]:
    """The footprint of each kernel, by name.

    Raises InputError where the schedule places a tile that no kernel has.
    """
    known = {name for k in program.kernels for name in _tile_names(Same(k))} if schedule.place else set()
    if unknown := sorted(schedule.place.keys() - known):
        raise InputError(f"place: the program has no tile {unknown[0]!r} (it has {', '.join(sorted(known))})")
    return {k.name: footprint(k, schedule.of(k.name), hardware) for k in program.kernels}


@lru_cache(maxsize=KEPT)
def _tile_names(kernel: Same[Kernel]) -> frozenset[str]:
    return frozenset(tile.name for node, _ in walk(kernel.value.body) for tile in tiles(node))


def resident_blocks(hardware: Hardware, sram: int, tmem: int, registers: int, threads: int) -> tuple[int, str]:
    """How many blocks fit on a processor at one time, and the limit that binds (0 when one does not fit).

    `sram`, `tmem` (bytes), `registers` and `threads` are what one block takes.
    """
    if sram > hardware.sram.block_capacity_bytes or threads > hardware.max_threads_per_block:
        return 0, "SRAM" if sram > hardware.sram.block_capacity_bytes else "threads"
    limits = {what: has // takes for what, (has, takes) in shared(hardware, sram, tmem, registers, threads).items()}
    limit = min(limits, key=lambda name: limits[name])
    return limits[limit], limit


def shared(hardware: Hardware, sram: int, tmem: int, registers: int, threads: int) -> dict[str, tuple[int, int]]:
    """What resident blocks share: how much of it a processor has, and how much one block takes."""
    out = {}
    if held := sram + hardware.sram.reserved_per_block_bytes:
        out["SRAM"] = hardware.sram.capacity_bytes, held
    if tmem and hardware.tmem is not None:
        out["tensor memory"] = hardware.tmem.capacity_bytes, tmem
    if hardware.registers is not None:
        out["registers"] = hardware.registers, registers
    if hardware.max_threads is not None:
        out["threads"] = hardware.max_threads, threads
    if hardware.max_blocks is not None:
        out["blocks"] = hardware.max_blocks, 1
    return out or {"threads": (hardware.max_threads_per_block, threads)}  # a block without SRAM, and no limit known


def _sram_items(parts: Sequence[Segment], places: Places, schedule: Schedule) -> dict[str, int]:
    """SRAM bytes by tile, its buffers with it; tiles that share a buffer are one item, of the larger one's size."""
    items = _in_sram(parts, places, 0)
    out: dict[str, tuple[int, int]] = {}
    for name, (slots, bytes_) in items.items():
        host = schedule.shares.get(name, name)
        if host not in items or host == name:
            out[name] = slots, bytes_
    for name, host in schedule.shares.items():
        if name in items and host in out and host != name:
            slots, bytes_ = out.pop(host)
            both = items[name][0] * items[name][1]
            out[f"{host} or {name}"] = (slots, bytes_) if slots * bytes_ >= both else items[name]
    return {name if slots == 1 else f"{name} x{slots}": slots * bytes_ for name, (slots, bytes_) in out.items()}


def _in_sram(parts: Sequence[Segment], places: Places, depth: int) -> dict[str, tuple[int, int]]:
    """Buffers and their bytes by tile: what outlives a loop, and the largest loop's own tiles; loops nest."""
    common: dict[str, tuple[int, int]] = {}
    loops: list[dict[str, tuple[int, int]]] = [{}]
    for nest, inside in nests(parts, depth):
        if nest is not None:
            loops.append(_in_sram(inside, places, depth + 1))
            continue
        (part,) = inside
        touched = [tile for phase in part.phases for node in phase.nodes for tile in tiles(node)]
        own = {t.name: (part.order.slots.get(t.name, 1), t.bytes) for t in touched if places[t.name] == "sram"}
        if part.loop is not None:
            loops.append(own)
        else:
            common |= own
    own_of_loops = [{name: item for name, item in items.items() if name not in common} for items in loops]
    return common | max(own_of_loops, key=lambda items: sum(slots * bytes_ for slots, bytes_ in items.values()))


def _lines(parts: Sequence[Segment]) -> Iterator[tuple[Segment, Leaf]]:
    for part in parts:
        for phase in part.phases:
            for node in phase.nodes:
                yield part, node


def _peak_bytes(parts: Sequence[Segment], places: Places, place: Place) -> int:
    """Most bytes of tiles in `place` that are alive at one time.

    A tile lives from its first write to its last use, through the whole of a loop that it is not made in or that gives
    it several buffers.  An elementwise result takes the room of an argument that ends there; a matrix product cannot.
    """
    if place not in places.values():
        return 0
    lines = list(_lines(parts))
    around: dict[int, tuple[int, int]] = {}  # first and last line of each loop, by its id
    for at, (part, _) in enumerate(lines):
        for loop in part.loops:
            around[id(loop)] = around.get(id(loop), (at, at))[0], at
    span: dict[str, tuple[int, int]] = {}
    size: dict[str, int] = {}
    home: dict[str, set[int]] = {}  # the loops that a tile is made in
    for at, (part, node) in enumerate(lines):
        for tile in tiles(node):
            if places[tile.name] != place:
                continue
            slots = part.order.slots.get(tile.name, 1)
            size[tile.name] = tile.bytes * slots
            inside = home.setdefault(tile.name, {id(loop) for loop in part.loops})
            first, last = span.get(tile.name, (at, at))[0], at
            for loop in part.loops:
                if id(loop) not in inside or (slots > 1 and loop is part.loop):
                    first, last = min(first, around[id(loop)][0]), max(last, around[id(loop)][1])
            span[tile.name] = first, max(last, span.get(tile.name, (at, at))[1])
    change = [0] * (len(lines) + 1)  # bytes that come alive at a line, less those that end before it
    for name, (first, last) in span.items():
        change[first] += size[name]
        change[last + (0 if _gives_room(lines[last][1], name) else 1)] -= size[name]
    return max(accumulate(change))


def _gives_room(node: Leaf, name: str) -> bool:
    """Whether a tile that `node` is the last to use is gone while it runs."""
    return isinstance(node, Compute) and node.op != "matmul" and name not in writes(node) - reads(node)
