"""Sequences of different lengths in one launch: their blocks share a grid, and none crosses a sequence.

Q, K, V and O are packed: the rows of sequence 2 follow those of sequence 1, and nothing is padded.  The tile language
has no tables to look a sequence up in, so each sequence has a program of its own, by an ordinary dataflow, and the
blocks of all of them are one grid (iosim/interpreters/shared_grid.py).  What is modelled so:

- one tile for the whole launch, as one kernel has; the rule takes it for the longest queries, as many as there are;
- the query heads of a K/V head are rows of one tile, which loads K and V once for them (Schedule.pack_gqa); so does
  FlashAttention-3 wherever lengths vary (should_pack_gqa in its heuristics.h).  Where heads differ in more than their
  queries (ALiBi, a bias, sinks, dropout), or on request, each has tiles of its own;
- split-kv cuts the keys of each sequence by a rule, `split_counts`; one more launch combines the parts of those cut;
- no two sequences share data, so each stands behind an L2 of its own, by the closed form;
- K and V may be a cache in pages, see Cache.

    engine = Engine(Attention(n_q=1, d=128, heads=32, kv_heads=8), load_hardware("h200-sxm"))
    engine.step([Lengths(1, 4096), Lengths(1, 777), Lengths(512, 512)]).seconds
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple

from iosim.check import Check, check_all
from iosim.dataflows import Dataflow, load_dataflow
from iosim.dataflows.narrow_cache import KEPT, PER, SCALE_BYTES, narrowed
from iosim.dataflows.split_rules import flash2_splits
from iosim.dataflows.tiles import query_tiles_of, unpackable
from iosim.dtypes import ALIASES, CACHED, dtype
from iosim.errors import InputError, nearest
from iosim.files import read_text
from iosim.hardware import Hardware
from iosim.index import cdiv
from iosim.interpreters.ledger import Ledger, ledger
from iosim.interpreters.shared_grid import Known, Launch, LaunchTime, Member, launch_time
from iosim.interpreters.timeline import Fidelity, Timeline
from iosim.memory.cache import USABLE, DeviceTraffic, dram_flows
from iosim.memory.onchip import Footprint, footprints
from iosim.problem import MAX_N, Attention, require_int
from iosim.program import Program
from iosim.schedule import GRID_ORDERS, MAX_SPLITS, Schedule
from iosim.study.run import Note, fields_of, plan_of, require_formats, require_read

DATAFLOWS = ("flash2", "split-kv")
RULES = ("balanced", "flash2", "none")
MOST_SEQUENCES = 65_536
MOST_SPLITS = 128  # by a rule: results are combined one after another
MAX_PAGE = 4096
LONG_KEYS = 1024  # more change no tile
CHECKED = 8  # classes of sequences whose numbers are checked
MOST_FILE_BYTES = 2**22
ENTRY_BYTES = 4  # of a page in a block table


class Lengths(NamedTuple):
    """Queries and keys of one sequence; with a causal mask its last query sees all keys."""

    q: int
    k: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """K and V in pages of `page` tokens, of which a block table names those of a sequence, 4 bytes each.

    `shared` tokens are the same first ones of all sequences, in the same pages.  In `dtype` fp8 or int8 each K/V head
    has fp32 scales beside it, one for each token or, with `scales` "head", one for K and one for V of a sequence
    (iosim/dataflows/narrow_cache.py); None stands for the dtype of Q.
    """

    page: int = 16
    shared: int = 0
    dtype: str | None = None
    scales: str = PER[0]

    def __post_init__(self) -> None:
        if self.dtype is not None:
            name = ALIASES.get(self.dtype.lower(), self.dtype.lower())
            if name not in CACHED:
                hint = nearest(self.dtype, ("fp8", *CACHED))
                raise InputError(
                    f"cache_dtype: {self.dtype!r} is not fp8 or int8{hint}; without it the cache is in the dtype of Q"
                )
            object.__setattr__(self, "dtype", name)
        if self.scales not in PER:
            raise InputError(f"cache_scales: {self.scales!r} is not one of {', '.join(PER)}{nearest(self.scales, PER)}")
        if self.dtype is None and self.scales != PER[0]:
            raise InputError("cache_scales: changes nothing without a cache_dtype of 8 bits")
        require_int("page", self.page, 1, MAX_PAGE)
        require_int("shared_prefix", self.shared, 0, MAX_N)

    def pages(self, tokens: int) -> int:
        """Of so many tokens of one sequence."""
        return int(cdiv(tokens, self.page))


def require_prefix(cache: Cache, longest: int) -> None:
    """Raise InputError for a shared prefix of more tokens than the longest sequence has."""
    if cache.shared > longest:
        raise InputError(f"shared_prefix: {cache.shared:,} tokens are more than the longest sequence, {longest:,}")


def token_bytes(a: Attention, cache: Cache | None = None) -> int:
    """K and V of one token in one layer, with its scales where a cache in 8 bits has them by token."""
    if cache is None or cache.dtype is None:
        return a.kv_heads * (a.d + a.d_v) * dtype(a.dtype).bytes
    scales = 2 * SCALE_BYTES if cache.scales == "token" else 0
    return a.kv_heads * ((a.d + a.d_v) * dtype(cache.dtype).bytes + scales)


@dataclass(frozen=True, slots=True)
class OneClass:
    """Alike sequences: the program of one of them, and what it moves."""

    problem: Attention
    program: Program
    ledger: Ledger
    device: DeviceTraffic
    members: tuple[Member, ...]  # a kernel each


@dataclass(frozen=True, slots=True)
class Step:
    """What one launch of sequences does (two where keys are split and their parts combined).

    `splits` are those of each sequence.  Bytes are of all sequences; `table_bytes` are what blocks read of the block
    table, in none of the others.  `saved_bytes` are reads of a shared prefix that the L2 gives, taken off
    `dram_read_bytes`.  `launch` is the one with the keys.
    """

    sequences: tuple[Lengths, ...]
    splits: tuple[int, ...]
    schedule: Schedule
    timeline: Timeline
    launch: LaunchTime
    hbm_read_bytes: int
    hbm_write_bytes: int
    dram_read_bytes: int
    dram_write_bytes: int
    extra_bytes: int
    table_bytes: int
    saved_bytes: int
    flops: int
    executed_flops: int

    @property
    def seconds(self) -> float:
        """Predicted time."""
        return self.timeline.seconds

    @property
    def bound(self) -> str:
        """The unit that is busy for the largest share, or "launch"."""
        return self.timeline.bound

    @property
    def queries(self) -> int:
        """Tokens that this computes the attention of."""
        return sum(s.q for s in self.sequences)

    @property
    def dram_bytes(self) -> int:
        """Both ways."""
        return self.dram_read_bytes + self.dram_write_bytes

    @property
    def tail_share(self) -> float:
        """Of the processors' time in the launch with the keys: what they have no block in."""
        time = self.launch.time
        unit = time.units["issue"]
        return unit.stalls_ps["tail"] / (unit.instances * time.makespan_ps)


@dataclass(eq=False)
class Engine:
    """Steps of sequences on one machine, all with one head layout and mask: those of `shape`, whose n do not count.

    `given` are fields of the schedule; what is left is chosen for each step.  `rule` says how split-kv cuts keys, and
    `fidelity` is that of the timeline.
    What has been computed is kept, so that steps that repeat cost little.  `long`: see Known.
    """

    shape: Attention
    hardware: Hardware
    dataflow: str = "split-kv"
    given: Mapping[str, Any] = field(default_factory=dict)
    rule: str = "balanced"
    cache: Cache | None = None
    fidelity: Fidelity = "fair"
    long: int = 16
    _classes: dict[tuple[Lengths, Schedule], OneClass] = field(default_factory=dict, init=False, repr=False)
    _known: dict[Schedule, Known] = field(default_factory=dict, init=False, repr=False)
    _schedules: dict[Attention, Schedule] = field(default_factory=dict, init=False, repr=False)

    def __post_init__(self) -> None:
        if self.shape.lse or self.shape.causal_align != "bottom-right":
            raise InputError("lengths: the log-sum-exp is not written, and the last query sees all keys")
        if self.dataflow not in DATAFLOWS:
            hint = nearest(self.dataflow, DATAFLOWS)
            raise InputError(f"dataflow: {self.dataflow!r} is not one of {', '.join(DATAFLOWS)}, which run sequences "
                             f"of different lengths{hint}")  # fmt: skip
        if self.rule not in RULES:
            raise InputError(f"split_rule: {self.rule!r} is not one of {', '.join(RULES)}{nearest(self.rule, RULES)}")
        if self.cache is not None and self.cache.dtype is not None and dtype(self.shape.dtype).bytes == 1:
            raise InputError(f"cache_dtype: {self.cache.dtype} with scales is not modelled beside a Q in "
                             f"{self.shape.dtype}; leave it out, or give dtype fp16, bf16 or fp32")  # fmt: skip
        if missing := self.hardware.missing_for_time():
            raise InputError(f"hw: {self.hardware.name}: no time without {', '.join(missing)}, which its profile lacks")
        self.given = fields_of(self.given)
        if "grid_order" in self.given:
            raise InputError("grid_order: sequences are timed in each order, so it is not given")
        require_read(self.given, (self.flow,))
        require_formats(self.shape, self.hardware, self.flow)

    @cached_property
    def flow(self) -> Dataflow:
        """The dataflow of every sequence, from the cache as it is stored."""
        plain, cache = load_dataflow(self.dataflow), self.cache
        if cache is None or (kept := cache.dtype) is None:
            return plain
        return replace(plain, write=lambda a, s: narrowed(plain(a, s), kept, cache.scales))

    @property
    def packed(self) -> bool:
        """Whether the query heads of a K/V head are rows of one tile."""
        able = self.shape.group > 1 and not unpackable(self.shape)
        return bool(self.given.get("pack_gqa", able))

    def problem(self, s: Lengths) -> Attention:
        """The problem of one sequence.

        One query sees all keys, or the last of its window; packed query heads are then what queries are elsewhere.
        """
        if s.q > 1 or not self.packed or self.shape.global_tokens:
            return replace(self.shape, n_q=s.q, n_k=s.k, batch=1)
        seen = s.k if self.shape.window is None else min(s.k, self.shape.window)
        rows, heads = self.shape.group, self.shape.kv_heads
        return replace(self.shape, n_q=rows, n_k=seen, batch=1, heads=heads, causal=False, window=None)

    def alike(self, sequences: Sequence[Lengths]) -> Attention:
        """What a tile is chosen for: a batch of the sequence with most query rows, and about as many rows as all."""
        times = Counter(sequences)
        problems = {s: self.problem(s) for s in times}
        rows = sum(problems[s].n_q * n for s, n in times.items())
        tall = max(problems.values(), key=lambda a: (a.n_q * (a.group if self.packed else 1), a.n_k))
        n_q = 1 << (tall.n_q - 1).bit_length()  # steps that differ little have one tile
        n_k = max(n_q, min(LONG_KEYS, max(a.n_k for a in problems.values())))
        return replace(tall, n_q=n_q, n_k=n_k, batch=max(1, min(MOST_SEQUENCES, round(rows / n_q))))

    def schedule(self, sequences: Sequence[Lengths]) -> Schedule:
        """The tile, by the general rule for `alike` sequences."""
        alike = self.alike(sequences)
        if alike not in self._schedules:
            given = {**self.given, "pack_gqa": self.packed and alike.group > 1}
            given |= {"splits": 1} if self.dataflow == "split-kv" else {}
            made = plan_of(alike, self.hardware, self.flow, given).schedule
            plain = {
                name: getattr(Schedule(block_q=1, block_k=1), name)
                for name in ("softmax_rows", "softmax_cols", "block_d")
            }
            self._schedules[alike] = replace(made, **plain)
        return self._schedules[alike]

    def step(self, sequences: Sequence[Lengths], order: str = "natural", *, persistent: bool = False) -> Step:
        """What a launch of these sequences does, its blocks in an `order`: see Schedule.

        Raises InputError for no sequence, too many, or a length out of range.
        """
        sequences = tuple(sequences)
        if not 1 <= len(sequences) <= MOST_SEQUENCES:
            raise InputError(f"lengths: {len(sequences)} sequences; 1 to {MOST_SEQUENCES} are allowed")
        for s in set(sequences):
            require_lengths(s, causal=self.shape.causal)
        schedule = self.schedule(sequences)
        splits = self.splits(sequences, schedule)
        parts = [self.one(s, replace(schedule, splits=n)) for s, n in zip(sequences, splits, strict=True)]
        timed = replace(self._entering(schedule), grid_order=order, persistent=persistent)
        return self._timed(sequences, splits, timed, parts)

    def own(self, s: Lengths, schedule: Schedule) -> Schedule:
        """The launch's schedule as the program of one sequence has it."""
        return replace(schedule, pack_gqa=self.packed and self.problem(s).group > 1)

    def blocks(self, s: Lengths, schedule: Schedule) -> int:
        """Of one sequence whose keys are not cut."""
        return query_tiles_of(self.problem(s), self.own(s, schedule))

    def one(self, s: Lengths, schedule: Schedule) -> OneClass:
        """The class of a sequence, its keys split as the schedule says."""
        key = s, schedule
        if key not in self._classes:
            problem, schedule = self.problem(s), self.own(s, schedule)
            program = self.flow(problem, schedule)
            counted = ledger(program)
            resident = {n: f.resident * (self.hardware.processors or 1) for n, f in self.prints(program, schedule)}
            last = self.hardware.caches[0] if self.hardware.caches else None
            device = dram_flows(
                program, counted, None if last is None else last.capacity_bytes, resident, method="closed form",
                partitions=1 if last is None else last.partitions or 1,
            )  # fmt: skip
            members = tuple(
                Member(kernel, tuple(f for f in device.flows if f.flow.kernel == kernel.name))
                for kernel in program.kernels
            )
            self._classes[key] = OneClass(problem, program, counted, device, members)
        return self._classes[key]

    def prints(self, program: Program, schedule: Schedule) -> Any:
        """Footprints of a program by kernel, as pairs."""
        return footprints(program, schedule, self.hardware).items()

    def footprints(self, program: Program, schedule: Schedule) -> list[Footprint]:
        """What a block of each of its kernels takes on chip."""
        return [f for _, f in self.prints(program, schedule)]

    def io_bytes(self, sequences: Sequence[Lengths]) -> int:
        """Q and O of all sequences, packed, and their K and V as the cache keeps them."""
        a = self.shape
        rows, keys = (sum(column) for column in zip(*sequences, strict=True))
        row = a.d * dtype(a.dtype).bytes + a.d_v * dtype(a.out_dtype).bytes
        return int(rows * a.heads * row + keys * token_bytes(a, self.cache))

    def splits(self, sequences: Sequence[Lengths], schedule: Schedule) -> tuple[int, ...]:
        """Into how many runs the keys of each sequence are cut."""
        if self.dataflow != "split-kv" or ("splits" not in self.given and self.rule == "none"):
            return (1,) * len(sequences)
        problems = {s: self.problem(s) for s in set(sequences)}
        each = {s: (self.blocks(s, schedule), cdiv(a.n_k, schedule.block_k)) for s, a in problems.items()}
        blocks, tiles = zip(*(each[s] for s in sequences), strict=True)
        if "splits" in self.given:
            counts = [min(self.given["splits"], n) for n in tiles]
        elif self.rule == "flash2":
            longest = max(problems.values(), key=lambda a: (a.n_q, a.n_k))
            one = flash2_splits(replace(longest, n_k=max(a.n_k for a in problems.values()), batch=len(sequences)),
                                self.hardware.processors or 1)  # fmt: skip
            counts = [min(one, n) for n in tiles]
        else:
            a = max(problems.values(), key=lambda a: a.n_k)
            two = replace(schedule, splits=2, pack_gqa=self.packed and a.group > 1)
            resident = min(f.resident for _, f in self.prints(self.flow(a, two), two))
            counts = split_counts(blocks, tiles, max(1, resident) * (self.hardware.processors or 1))
        return tuple(cdiv(n, cdiv(n, count)) for n, count in zip(tiles, counts, strict=True))  # none without a key

    def _entering(self, schedule: Schedule) -> Schedule:
        """With a block table a block knows where its keys are one access to it later."""
        if self.cache is None:
            return schedule
        h = self.hardware
        level = h.l2.latency_ps if h.l2 is not None else h.hbm.latency_ps
        wait = round((h.copy.latency_ps + (level or 0)) * (h.clock_hz or 0) / 10**12)
        return replace(schedule, cycles={"enter": wait})

    def _timed(
        self, sequences: tuple[Lengths, ...], splits: tuple[int, ...], schedule: Schedule, parts: Sequence[OneClass]
    ) -> Step:
        known = self._known.setdefault(replace(schedule, grid_order="natural"), Known(long=self.long))
        first = Launch("attention", tuple(part.members[0] for part in parts))
        saved, first = self._shared(sequences, parts, first)
        launches = [launch_time(first, schedule, self.hardware, known, self.fidelity)]
        if cut := tuple(part.members[1] for part in parts if len(part.members) > 1):
            plain = replace(schedule, cycles={}, persistent=False, grid_order="natural")
            own = self._known.setdefault(replace(plain, splits=2), Known(long=self.long))
            launches.append(launch_time(Launch("combine", cut), plain, self.hardware, own, self.fidelity))
        moved = Counter[tuple[str, str]]()
        for launch in launches:
            moved.update(launch.moved)
        times = Counter(map(id, parts))
        each = [(part, times[key]) for key, part in {id(part): part for part in parts}.items()]
        return Step(
            sequences, splits, schedule,
            Timeline(self.fidelity, tuple(launch.time for launch in launches), dict(moved)),
            launches[0],
            hbm_read_bytes=sum(n * p.ledger.hbm_read_bytes for p, n in each),
            hbm_write_bytes=sum(n * p.ledger.hbm_write_bytes for p, n in each),
            dram_read_bytes=sum(n * p.device.dram_read_bytes for p, n in each) - saved,
            dram_write_bytes=sum(n * p.device.dram_write_bytes for p, n in each),
            extra_bytes=sum(n * p.ledger.extra_bytes for p, n in each),
            table_bytes=self._table_bytes(sequences, schedule),
            saved_bytes=saved,
            flops=sum(n * p.problem.flops for p, n in each),
            executed_flops=sum(n * p.ledger.executed_flops for p, n in each),
        )  # fmt: skip

    def _table_bytes(self, sequences: Sequence[Lengths], schedule: Schedule) -> int:
        """Each query tile walks the entries of its pages once, in however many runs."""
        if self.cache is None:
            return 0
        each = Counter(sequences).items()
        pages = {s: self.cache.pages(self.problem(s).n_k) for s, _ in each}
        return ENTRY_BYTES * sum(times * self.blocks(s, schedule) * pages[s] for s, times in each)

    @cached_property
    def prefix_tensors(self) -> tuple[str, ...]:
        """What of a shared prefix is the same for all sequences: not the scales by head, which a sequence has."""
        by_token = self.cache is not None and self.cache.dtype is not None and self.cache.scales == "token"
        return (*KEPT, *(f"S{name}" for name in KEPT)) if by_token else KEPT

    def _shared(self, sequences: Sequence[Lengths], parts: Sequence[OneClass], launch: Launch) -> tuple[int, Launch]:
        """DRAM bytes that a shared prefix saves, and the launch without them.

        Its blocks read the prefix at about one time.  Where the L2 has room for its K and V, with their
        scales by token, all but one sequence find them there; where it has not, none does.
        """
        if self.cache is None or not self.cache.shared or len(sequences) < 2 or self.hardware.l2 is None:
            return 0, launch
        if self.cache.shared * token_bytes(self.shape, self.cache) > USABLE * (self.hardware.l2.capacity_bytes or 0):
            return 0, launch
        saved, members, read, longest = 0, [], False, max(s.k for s in sequences)
        for s, part, member in zip(sequences, parts, launch.sequences, strict=True):
            if s.k == longest and not read:  # one reads it for all
                read = True
                members.append(member)
                continue
            asked = sum(f.dram_read_bytes for f in member.flows if f.flow.tensor in self.prefix_tensors)
            gone = asked * min(self.cache.shared, part.problem.n_k) // part.problem.n_k
            saved += gone
            members.append(self._lighter(member, asked, gone))
        return saved, Launch(launch.name, tuple(members))

    def _lighter(self, member: Member, asked: int, gone: int) -> Member:
        """A member whose K and V, with scales by token, come from DRAM but for `gone` of `asked` bytes."""
        key = member, gone
        if key not in self._light:
            flows = tuple(
                replace(f, dram_read_bytes=f.dram_read_bytes * (asked - gone) // asked)
                if f.flow.tensor in self.prefix_tensors and asked
                else f
                for f in member.flows
            )
            self._light[key] = Member(member.kernel, flows)
        return self._light[key]

    @cached_property
    def _light(self) -> dict[tuple[Member, int], Member]:
        return {}


@dataclass(frozen=True)
class Ragged:
    """One batch of sequences: as it is given, in other orders, and padded to the longest.

    `orders` has the same launch by (order of the blocks, whether the grid is persistent); `padded` is all sequences as
    long as the longest queries and keys.  `checks` are those of one sequence of each class that was checked.
    """

    engine: Engine
    step: Step
    orders: Mapping[tuple[str, bool], Step]
    padded: Step
    checks: Mapping[Lengths, Check]

    @property
    def shape(self) -> Attention:
        """Heads, head dimension, dtype and mask of all sequences."""
        return self.engine.shape

    @property
    def best(self) -> tuple[str, bool]:
        """The order that takes least time."""
        return min(self.orders, key=lambda key: self.orders[key].seconds)

    def rows(self, step: Step) -> tuple[int, int]:
        """Query rows and key rows of all sequences of a step, packed."""
        return sum(s.q for s in step.sequences), sum(s.k for s in step.sequences)


def ragged(
    engine: Engine, sequences: Sequence[Lengths], *, check: bool = True, seed: int = 0, note: Note = lambda _: None
) -> Ragged:
    """Study one batch; `check` compares a sequence of each class with float64, the longest CHECKED ones at most."""
    note(f"{len(sequences)} sequences in one launch")
    orders = {}
    for order in GRID_ORDERS:
        for persistent in (False, True):
            note(f"blocks in the order {order}{', persistent' if persistent else ''}")
            orders[order, persistent] = engine.step(sequences, order, persistent=persistent)
    step = orders[GRID_ORDERS[0], False]
    note("the same padded to the longest")
    longest = engine.step(padded(sequences))
    checks = {}
    if check:
        splits = dict(zip(step.sequences, step.splits, strict=True))
        for s in sorted(splits, key=lambda s: s.q * s.k, reverse=True)[:CHECKED]:
            note(f"numeric check of {s.q:,} queries on {s.k:,} keys (--no-check leaves it out)")
            one = engine.one(s, replace(step.schedule, splits=splits[s], grid_order="natural", cycles={}))
            checks[s] = check_all(one.problem, [one.program], seed=seed)[0]
    return Ragged(engine, step, orders, longest, checks)


def padded(sequences: Sequence[Lengths]) -> list[Lengths]:
    """As many, all as long as the longest queries and keys."""
    return [Lengths(max(s.q for s in sequences), max(max(s) for s in sequences))] * len(sequences)


def lengths_of(text: str) -> tuple[Lengths, ...]:
    """Sequences of "512,4096,1:777", or of the file of that name with the same on its lines (# begins a comment).

    A number is as many queries as keys, q:k are queries and keys.  Raises InputError with the place of what is wrong.
    """
    where, lines = "lengths", [(0, text)]
    if not set(text) <= set("0123456789:, "):
        try:
            content = read_text(text, MOST_FILE_BYTES, "one of lengths", "text", "it")
        except InputError as error:
            why = str(error).removeprefix("it: ").removeprefix("cannot be read: ")
            raise InputError(f"lengths: {text!r:.80} is neither like 512,4096,1:777 nor a file that can be read: "
                             f"{why}") from None  # fmt: skip
        lines = [(n, line.partition("#")[0]) for n, line in enumerate(content.splitlines(), start=1)]
        where = f"lengths: {text}"
    out: list[Lengths] = []
    for number, line in lines:
        place = f"{where}, line {number}" if number else where
        if len(out) <= MOST_SEQUENCES:
            items = line.split(",", MOST_SEQUENCES + 1)[: MOST_SEQUENCES + 1]
            out += [_pair(place, item.strip()) for item in items if item.strip() or not number]
    if not 1 <= len(out) <= MOST_SEQUENCES:
        raise InputError(f"{where}: {'too many' if out else 'no'} sequences; 1 to {MOST_SEQUENCES} are allowed")
    return tuple(out)


def _pair(place: str, item: str) -> Lengths:
    q, colon, k = item.partition(":")
    values = (q, k) if colon else (q, q)
    for value in values:
        if not value.isdecimal() or not 1 <= int(value[:20]) <= MAX_N:
            raise InputError(f"{place}: {item!r:.60} is not a length from 1 to {MAX_N}, or queries:keys")
    return Lengths(int(values[0]), int(values[1]))


def require_lengths(s: Lengths, *, causal: bool) -> None:
    """Raise InputError for lengths out of range; a causal mask needs a key for every query."""
    for value in s:
        require_int("lengths", value, 1, MAX_N)
    if causal and s.k < s.q:
        raise InputError(f"lengths: {s.q}:{s.k} has fewer keys than queries, and with a causal mask some see none")


def split_counts(blocks: Sequence[int], tiles: Sequence[int], slots: int) -> list[int]:
    """Splits of each sequence: the smallest run of key tiles, one length for all, with which all blocks have a slot.

    `blocks` are those of a sequence with its keys whole, `tiles` its key tiles.  1 where no run does it.  FlashInfer's
    scheduler searches the same way (PrefillBinarySearchKVChunkSize, scheduler.cuh).
    """
    each = Counter(zip(blocks, tiles, strict=True))
    longest = max(tiles)

    def needed(run: int) -> int:
        return sum(times * b * cdiv(t, run) for (b, t), times in each.items())

    low, high = cdiv(longest, min(MOST_SPLITS, MAX_SPLITS)), longest
    if needed(high) > slots:
        return [1] * len(tiles)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if needed(middle) <= slots else (middle + 1, high)
    return [cdiv(t, low) for t in tiles]
