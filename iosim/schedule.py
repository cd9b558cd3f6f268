"""The choices a kernel author makes: tile sizes, stages, warp groups, where tiles live, and the order of a loop body.

A schedule changes when, where on chip and by whom, never a value or a byte of HBM traffic beyond what its tile
sizes say.  The order of a loop is a list of steps for each role:

    issue  start a phase and go on (copies always; matrix work on machines that can); what one group issues is done in
           order
    wait   until an issued phase has ended
    run    issue and wait
    take   wait for this group's turn
    give   pass the turn to the next group
    sync   wait until all groups of the role are here (a barrier)

`ahead` gives the iteration, relative to the loop counter, that the step is about; steps that fall outside the
loop are skipped, which makes the prologue and the epilogue of a software pipeline.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any, Literal, TypeAlias, get_args

from iosim.errors import InputError, nearest
from iosim.problem import require_int

Verb: TypeAlias = Literal["issue", "wait", "run", "take", "give", "sync"]
Place: TypeAlias = Literal["sram", "registers", "tmem"]

MAX_BLOCK = 8192
MAX_STAGES = 16
MAX_GROUPS = 8
MAX_SPLITS = 1024
MOST_CYCLES = 10**6  # that code adds to a phase or an element
GROUP_ROWS = 64  # query rows that one warp group takes by default
SOFTMAXES = ("safe", "naive", "online")
SCORES = ("data", "fp32")
SEPARATE = ("scale", "copy", "mask", "product")
GRID_ORDERS = ("natural", "longest-first")


@dataclass(frozen=True, slots=True)
class Step:
    verb: Verb
    phase: str = ""
    ahead: int = 0


@dataclass(frozen=True, slots=True)
class Role:
    """`count` warp groups that run the same steps and share a tile's rows; the first issues the copies for all."""

    name: str
    count: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Order:
    """How a loop body is run: its roles, and the buffers each loaded tile has (1 where it is not named).

    The last role also runs the code outside the loop; roles before it, such as a producer, run in the loop only.
    """

    roles: tuple[Role, ...]
    slots: Mapping[str, int] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """Tile sizes in rows (`block_q`, `block_k`), pipeline depth and warp groups; sizes of `standard`'s kernels.

    `stages` counts the buffers of each loaded tile of a loop, in the order in which the body loads them, the last
    one repeated: (2,) double-buffers all, (2, 1) double-buffers K only.  `groups` warp groups share a block.
    `splits` is the number of blocks that share the keys of a query tile (flash-decoding), or the queries of a head
    (flash1).  With `pack_gqa` the rows of a query tile are those of all query heads that share a K/V head, so that K
    and V are loaded once for them (FlashAttention-3's pack_gqa).
    `block_d` is the depth of one step of a library matrix product, `softmax_rows` and `softmax_cols` the tile of a
    row softmax (all keys in one tile where a row fits), and `softmax` its kind: "safe", "naive" or "online".
    `scores` is the dtype in which S, P and their gradients are kept in device memory: that of the "data", or "fp32".
    `grid_order` is the order in which blocks are launched: that of the grid, whose last axis runs fastest, or, along
    that axis, those with most loop iterations first: in each causal head, query tiles from the last one down.  Heads
    keep their order, so that as many of them are resident at one time and the L2 sees the same traffic.
    `producer`, `pingpong` and `overlap` are what FlashAttention-3 adds to the order of its loop, all of it by default.
    `place` moves a tile between "sram" and "registers" (by default loads are in SRAM and results in registers, unless
    the matrix unit can only read them from SRAM).
    `orders` replaces the default order of a loop, by its index.

    What a compiler or an author has settled beyond that: `units` names the matrix and copy instructions, where the
    machine has several; `registers` is what a thread has, of which `spills` more words live in device memory;
    `shares` names, for a tile, another whose buffer it takes, as the two are never alive together; in a `persistent`
    kernel a processor keeps its blocks and takes the next tile of the grid without a new start, and in one that runs
    `ahead` the first copies for that tile, as many as it has buffers, are there by then; tiles in `multicast` are read
    from the L2 once for so many blocks of a cluster; loops in `descending` are walked from their last iteration to the
    first.  `cycles` is what the
    code adds to its operations, for a warp group: by the name of a phase after it ends, as "mask" to a phase that
    applies a mask, as "enter" and "leave" to a block.  `instructions` are issue slots of a lane that its code takes
    beyond its operations (addresses, moves, the care for small numbers): "score" for each exp of a tile, of which as
    many as "chain" says are in the chain of dependent ones; "round" for each turn of the loop with that tile; "product"
    for each matrix instruction; by the name of a phase for each element of the last tile that it makes or stores.
    `along_rows` says, by phase, how many of those that issue its matrix instructions (warps or warp groups, as the
    unit wants) share the rows of a product, each such part of rows the columns among the others; by default all share
    the rows.
    `fragments` are the sets of operands that a warp keeps in registers: with two it loads the next ones from SRAM under
    the products of these.
    "element" counts for each element stored; "special" are special functions for each exp of a tile beyond its own;
    "latency" is how many cycles a warp alone takes from one instruction to its next.
    `dram_share` is what its pattern of addresses reaches of the bandwidth of DRAM.
    Tiles named in `through_registers` come to SRAM by way of them: out of the L1 and into SRAM, which is one memory.
    `kernels` are fields that single kernels of the program have otherwise, by the kernel's name: see `of`.
    `separate` names elementwise work that a library runs as kernels of its own ("scale", "copy", "mask", "product").
    `band` is how many rows of tiles a product walks column by column before it goes to the next ones.
    """

    block_q: int
    block_k: int
    stages: tuple[int, ...] = (2,)
    groups: int = 1
    splits: int = 1
    pack_gqa: bool = False
    block_d: int = 64
    softmax_rows: int = 1
    softmax_cols: int = 4096
    softmax: str = "safe"
    scores: str = "data"
    grid_order: str = "natural"
    producer: bool = True
    pingpong: bool = True
    overlap: bool = True
    place: Mapping[str, Place] = field(default_factory=dict, hash=False)
    orders: Mapping[str, Order] = field(default_factory=dict, hash=False)
    units: tuple[str, ...] = ()
    registers: int | None = None
    spills: int = 0
    shares: Mapping[str, str] = field(default_factory=dict, hash=False)
    persistent: bool = False
    ahead: bool = False
    multicast: Mapping[str, int] = field(default_factory=dict, hash=False)
    dram_share: float = 1.0
    descending: tuple[str, ...] = ()
    cycles: Mapping[str, int] = field(default_factory=dict, hash=False)
    instructions: Mapping[str, float] = field(default_factory=dict, hash=False)
    along_rows: Mapping[str, int] = field(default_factory=dict, hash=False)
    fragments: int = 2
    kernels: Mapping[str, Mapping[str, Any]] = field(default_factory=dict, hash=False)
    separate: tuple[str, ...] = ()
    band: int = 1
    through_registers: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in ("block_q", "block_k", "block_d", "softmax_rows"):
            object.__setattr__(self, name, require_int(name, getattr(self, name), 1, MAX_BLOCK))
        require_int("softmax_cols", self.softmax_cols, 1, 2**24)
        require_int("band", self.band, 1, 2**24)
        require_int("groups", self.groups, 1, MAX_GROUPS)
        require_int("splits", self.splits, 1, MAX_SPLITS)
        for name, allowed in (("softmax", SOFTMAXES), ("scores", SCORES), ("grid_order", GRID_ORDERS)):
            if (value := getattr(self, name)) not in allowed:
                hint = nearest(str(value), allowed)
                raise InputError(f"{name}: {value!r} is not one of {', '.join(allowed)}{hint}")
        if not isinstance(self.stages, tuple) or not self.stages:
            raise InputError(
                f"stages: {self.stages!r} is not a tuple of one or more whole numbers, like (2,) or (2, 1)"
            )
        for name in ("pack_gqa", "producer", "pingpong", "overlap"):
            if not isinstance(value := getattr(self, name), bool):
                raise InputError(f"{name}: {value!r} is not True or False")
        for stage in self.stages:
            require_int("stages", stage, 1, MAX_STAGES)
        if not 0 < self.dram_share <= 1:
            raise InputError(f"dram_share: {self.dram_share!r} is not above 0 and up to 1")
        if not isinstance(self.through_registers, tuple):
            raise InputError(f"through_registers: {self.through_registers!r} is not a tuple of names of tiles")
        for name in self.separate:
            if name not in SEPARATE:
                hint = nearest(str(name), SEPARATE)
                raise InputError(f"separate: {name!r} is not one of {', '.join(SEPARATE)}{hint}")
        known = [f.name for f in fields(self) if f.name != "kernels"]
        for kernel, own in self.kernels.items():
            for name in own:
                if name not in known:
                    raise InputError(f"kernels: {kernel}: {name!r} is no field of a schedule{nearest(name, known)}")
        for name in ("place", "orders", "shares", "cycles", "instructions", "along_rows", "kernels", "multicast"):
            if not isinstance(value := getattr(self, name), Mapping):
                raise InputError(f"{name}: {value!r} is not a table of names and values")
        for name in ("cycles", "instructions"):
            for key, value in getattr(self, name).items():
                if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= MOST_CYCLES:
                    raise InputError(f"{name} of {key}: {value!r} is not a number from 0 to {MOST_CYCLES:,}")
        if self.registers is not None:
            require_int("registers", self.registers, 1, 1024)
        require_int("spills", self.spills, 0, 2**16)
        for tile, place in self.place.items():
            if place not in get_args(Place):
                raise InputError(f"place of tile {tile}: {place!r} is not one of {', '.join(get_args(Place))}")

    def of(self, kernel: str) -> Schedule:
        """The schedule of one kernel of the program."""
        own = self.kernels.get(kernel)
        return replace(self, kernels={}, **own) if own else self

    def slots(self, loads: tuple[str, ...]) -> dict[str, int]:
        """Buffers for each loaded tile of one loop body."""
        last = len(self.stages) - 1
        return {tile: self.stages[min(n, last)] for n, tile in enumerate(loads)}

    def scores_dtype(self, data: str) -> str:
        """The dtype of stored scores for data of the dtype `data`."""
        return data if self.scores == "data" else self.scores

    def as_dict(self) -> dict[str, Any]:
        """The fields for JSON; a single number of stages is printed as one."""
        out = asdict(self)
        out["stages"] = self.stages[0] if len(set(self.stages)) == 1 else list(self.stages)
        return out
