"""What dataflows move between device memory and the chip, over N and over the size of a tile, against lower bounds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from iosim.dataflows import load_dataflow
from iosim.dtypes import dtype
from iosim.hardware import Hardware
from iosim.interpreters.ledger import Ledger, ledger
from iosim.memory.cache import DramFlow
from iosim.memory.onchip import CapacityError
from iosim.problem import Attention
from iosim.schedule import Schedule
from iosim.study.cases import Runs, cases
from iosim.study.run import Note, Run, moved, plan_of

# The tile size on which the traffic of a dataflow depends: FlashAttention-2 reads K and V again for each query tile,
# FlashAttention-1 Q and O again for each key tile.
TILED = {"flash2": "block_q", "flash1": "block_k"}
SIZES = (16, 32, 64, 128, 256, 512)
TILE_N = 4096  # at most: the N at which tiles are compared


@dataclass(frozen=True, slots=True)
class Moved:
    """What a run asks of device memory and what of it reaches DRAM, in bytes, beside the lower bounds.

    `bound_bytes` is None where the compulsory traffic is more, as then it bounds nothing.
    """

    run: Run

    @property
    def asked_bytes(self) -> int:
        """Loads and stores of all blocks, as the L2 sees them where there is one; a reduction is a read and a write."""
        return asked(self.run.ledger)

    @property
    def dram_bytes(self) -> int:
        """What crosses the DRAM interface either way."""
        return self.run.device.dram_read_bytes + self.run.device.dram_write_bytes

    @property
    def least_bytes(self) -> int:
        """Inputs and outputs once."""
        return self.run.ledger.io_bytes

    @property
    def bound_bytes(self) -> int | None:
        """The lower bound for what is asked, with the SRAM of one processor (iosim/study/bounds.py)."""
        b = self.run.bounds
        return b.theta * dtype(self.run.problem.dtype).bytes if b.theta >= b.compulsory else None

    @property
    def flops(self) -> int:
        """By convention."""
        return self.run.dataflow.flops(self.run.problem)


@dataclass(frozen=True, slots=True)
class TensorFlow:
    """Bytes of one tensor that a run's kernels move in one direction, and the size of the tensor."""

    tensor: str
    direction: str
    asked_bytes: int
    dram_read_bytes: int
    dram_write_bytes: int
    tensor_bytes: int


@dataclass(frozen=True, slots=True)
class Tile:
    """Traffic of a dataflow with one size of a tile.  Without a place on chip (`why`), DRAM bytes are not known."""

    dataflow: str
    field: str
    rows: int
    asked_bytes: int
    dram_bytes: int | None
    sram_bytes: int | None
    why: str


@dataclass(frozen=True)
class Io:
    """Runs by (machine, dataflow, N), and the tiles of one problem on the first machine."""

    shape: Mapping[str, Any]
    lengths: tuple[int, ...]
    machines: tuple[Hardware, ...]
    runs: Mapping[tuple[str, str, int], Moved]
    tiled: Attention
    tiles: tuple[Tile, ...]
    left_out: tuple[str, ...]

    @property
    def dataflows(self) -> list[str]:
        """Those that there are runs of."""
        return list(dict.fromkeys(name for _, name, _ in self.runs))


def io(
    lengths: Sequence[int],
    shape: Mapping[str, Any],
    machines: Sequence[Hardware],
    dataflows: Sequence[str],
    runs: Runs,
    note: Note = lambda _: None,
) -> Io:
    """Traffic of dataflows at every length; raises InputError for a problem out of range."""
    found = runs.get(cases(lengths, shape, machines, dataflows))
    note("traffic by tile")
    tiled = Attention(n_q=max((n for n in lengths if n <= TILE_N), default=lengths[0]), **shape)
    names = [name for name in dataflows if name in TILED and any(c.dataflow == name for c in found)]
    return Io(
        shape,
        tuple(lengths),
        tuple(machines),
        {(c.machine.name, c.dataflow, c.problem.n_q): Moved(run) for c, run in found.items()},
        tiled,
        tuple(tile for name in names for tile in _tiles(tiled, machines[0], name)),
        tuple(runs.left_out),
    )


def _tiles(a: Attention, machine: Hardware, name: str) -> Iterator[Tile]:
    flow, field = load_dataflow(name), TILED[name]
    for rows in SIZES:
        if rows >= 2 * a.n_q:
            return
        try:
            plan = plan_of(a, machine, flow, {field: rows})
        except CapacityError as error:
            counted = ledger(flow(a, replace(Schedule(block_q=16, block_k=16), **{field: rows})))  # type: ignore[arg-type]
            yield Tile(name, field, rows, asked(counted), None, None, str(error).partition(": ")[2] or str(error))
            continue
        counted, prints, device = moved(plan)
        sram = max(f.sram_bytes for f in prints.values())
        yield Tile(name, field, rows, asked(counted), device.dram_read_bytes + device.dram_write_bytes, sram, "")


def asked(l: Ledger) -> int:
    """Bytes that all blocks load and store, as an L2 sees them; a reduction is a read and a write."""
    return l.hbm_read_bytes + l.hbm_write_bytes + 2 * l.hbm_add_bytes


def tensor_flows(run: Run) -> list[TensorFlow]:
    """What a run moves, by tensor and direction, all kernels together, in the order of the program."""
    sizes = {t.name: t.bytes for t in run.program.tensors}
    alike: dict[tuple[str, str], list[DramFlow]] = {}
    for f in run.device.flows:
        alike.setdefault((f.flow.tensor, f.flow.direction), []).append(f)
    flows = [
        TensorFlow(
            tensor=name,
            direction=direction,
            asked_bytes=sum(f.flow.hbm_bytes for f in own),
            dram_read_bytes=sum(f.dram_read_bytes for f in own),
            dram_write_bytes=sum(f.dram_write_bytes for f in own),
            tensor_bytes=sizes[name],
        )
        for (name, direction), own in alike.items()
    ]
    return [f for f in flows if f.asked_bytes or f.dram_read_bytes or f.dram_write_bytes]
