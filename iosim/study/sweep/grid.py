"""What a sweep is made of: every combination of dataflows, machines, problems and schedules, each with its key.

A key is the SHA-256 of all that a result depends on, as canonical JSON: the problem, the fields of the schedule that
are settled, the dataflow's name and what its files say, the machine's name and profile hash, fidelity, iosim's version.
A change of iosim's own code is seen by its version alone.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import product
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import iosim
from iosim.dataflows import names_code
from iosim.errors import InputError, nearest, show
from iosim.files import read_text, toml
from iosim.interpreters.timeline import FIDELITIES
from iosim.problem import Attention
from iosim.study.batch import LENGTHS_SAY, Batch
from iosim.study.ragged import lengths_of
from iosim.study.run import machines_called, require_read
from iosim.study.vary import (
    HW,
    READ,
    Axis,
    Source,
    axis,
    batch_kinds,
    batch_with,
    kinds,
    machine_with,
    problem_kinds,
    problem_with,
    require_beside,
)

if TYPE_CHECKING:
    from iosim.hardware import Hardware

T = TypeVar("T")

MOST = 1_000_000  # configurations of one sweep: what is held in memory
MOST_BYTES = 2**20  # of a sweep's file
LARGEST = 10**18  # number in it
SCHEMA = "iosim.sweep/1"
LISTS = ("dataflow", "kernel", "hw", "fidelity")


@dataclass(frozen=True, slots=True)
class Job:
    """What a worker needs to run one configuration."""

    problem: Attention
    source: Source
    machine: Hardware
    given: Mapping[str, Any] = field(hash=False)
    fidelity: str
    batch: Batch | None = None


@dataclass(frozen=True, slots=True)
class Configuration:
    """One combination: its key, the canonical JSON of its inputs, and its job; None where `refused` says why not."""

    key: str
    inputs: str
    job: Job | None
    refused: str = ""


@dataclass(frozen=True, slots=True)
class Grid:
    """All combinations of sources, machines, problems and schedules; the last varies fastest.

    `axes` are the fields that are varied.  Of a schedule's, a source gets those that it reads.
    """

    problem: Attention
    sources: tuple[Source, ...]
    machines: tuple[Hardware, ...]
    given: Mapping[str, Any] = field(default_factory=dict, hash=False)
    axes: tuple[Axis, ...] = ()
    fidelities: tuple[str, ...] = ("fair",)
    batch: Batch | None = None

    def __post_init__(self) -> None:
        for one in self.fidelities:
            if one not in FIDELITIES:
                raise InputError(f"fidelity: {one!r} is not one of {', '.join(FIDELITIES)}{nearest(one, FIDELITIES)}")
        if len(self) > MOST:
            raise InputError(f"sweep: makes {len(self):,} configurations; one takes {MOST:,}")

    def __len__(self) -> int:
        shared = len(self.machines) * len(self.fidelities) * prod(
            len(a.values) for a in self.axes if a.name.startswith(HW) or a.name in _problem_names()
        )  # fmt: skip
        return shared * sum(prod(len(a.values) for a in self.schedule_axes(source)) for source in self.sources)

    def schedule_axes(self, source: Source) -> list[Axis]:
        """Those of the axes that are fields of a schedule, and that this dataflow reads."""
        return [a for a in self.axes if a.name in _read(source)]

    def configurations(self) -> Iterator[Configuration]:
        """Every combination."""
        problems = list(self._problems())
        machines = [made for machine in self.machines for made in self._machines(machine)]
        for source in self.sources:
            dataflow = _canonical({"hash": content_hash(source), "name": source.load().name})
            schedules = list(self._schedules(source))
            for machine, problem, (given, schedule), fidelity in product(machines, problems, schedules,
                                                                         self.fidelities):  # fmt: skip
                inputs = (f'{{"dataflow":{dataflow},"fidelity":"{fidelity}","iosim":"{iosim.__version__}",'
                          f'"machine":{machine.said},"problem":{problem.said},"schedule":{schedule}}}')  # fmt: skip
                key = hashlib.sha256(inputs.encode()).hexdigest()
                if problem.of is None or machine.of is None:
                    yield Configuration(key, inputs, None, problem.refused or machine.refused)
                else:
                    of, batch = problem.of
                    yield Configuration(key, inputs, Job(of, source, machine.of, given, fidelity, batch))

    def _problems(self) -> Iterator[_Part[tuple[Attention, Batch | None]]]:
        for values in _rows([a for a in self.axes if a.name in _problem_names()]):
            own = {name: value for name, value in values.items() if name in problem_kinds()}
            try:
                made = problem_with(self.problem, own)
                batch = batch_with(self.batch, {n: v for n, v in values.items() if n not in own}, own)
            except InputError as error:
                yield _Part(None, _canonical({**_said(self.problem, self.batch), **values}), str(error))
            else:
                yield _Part((made, batch), _canonical(_said(made, batch)))

    def _machines(self, machine: Hardware) -> Iterator[_Part[Hardware]]:
        for values in _rows([a for a in self.axes if a.name.startswith(HW)]):
            own = {name.removeprefix(HW): value for name, value in values.items()}
            said = {"hash": machine.profile_hash, "name": machine.name, "values": own}
            try:
                made = machine_with(machine, own) if own else machine
            except InputError as error:
                yield _Part(None, _canonical(said), str(error))
            else:
                yield _Part(made, _canonical({**said, "hash": made.profile_hash}))

    def _schedules(self, source: Source) -> Iterator[tuple[Mapping[str, Any], str]]:
        own = {name: value for name, value in self.given.items() if name in _read(source)}
        for values in _rows(self.schedule_axes(source)):
            given = {**own, **values}
            yield given, _canonical(given)


@dataclass(frozen=True, slots=True)
class _Part(Generic[T]):
    """A problem or a machine with its canonical JSON; None where `refused` says why."""

    of: T | None
    said: str
    refused: str = ""


def _said(a: Attention, batch: Batch | None) -> dict[str, Any]:
    """A problem, or what sequences have in common and the batch, for JSON."""
    if batch is None:
        return a.as_dict()
    return {name: value for name, value in a.as_dict().items() if name not in LENGTHS_SAY} | batch.as_dict()


def _problem_names() -> set[str]:
    """Fields of a problem or of a batch of sequences."""
    return problem_kinds().keys() | batch_kinds().keys()


def _rows(axes: Sequence[Axis]) -> Iterator[dict[str, Any]]:
    for values in product(*(a.values for a in axes)):
        yield dict(zip((a.name for a in axes), values, strict=True))


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False)


def _read(source: Source) -> tuple[str, ...]:
    """The fields of a schedule that a dataflow reads, and those that every timeline reads."""
    return (*source.load().uses, *READ, "place", "orders")


@lru_cache(maxsize=64)
def content_hash(source: Source) -> str:
    """SHA-256 of the files that a dataflow or kernel is made of: a user's own, and all that ship, which share code."""
    import iosim.dataflows
    import iosim.kernels

    folders = [iosim.dataflows.__file__, *([iosim.kernels.__file__] if source.kernel else [])]
    files = [f for folder in folders for kind in ("*.py", "*.toml") for f in sorted(Path(folder).parent.glob(kind))]
    if "/" in source.kernel or source.kernel.endswith(".toml"):
        files.append(Path(source.kernel))
    elif not source.kernel and not source.load().write.__module__.startswith(
        "iosim."
    ):  # a user's, or another package's
        files.append(Path(source.load().write.__code__.co_filename))
    found = hashlib.sha256()
    for file in files:
        found.update(hashlib.sha256(file.read_bytes().replace(b"\r\n", b"\n")).digest())
    return found.hexdigest()


# ---------------------------------------------------------------- from texts


def axes_of(texts: Sequence[str], sources: Sequence[Source]) -> tuple[Axis, ...]:
    """The fields and values of texts NAME=VALUES; raises InputError for a field that no source reads, or twice."""
    flows = [source.load() for source in sources]
    found = []
    for text in texts:
        name = text.partition("=")[0].strip().replace("-", "_")
        found.append(axis(text, next((flow for flow in flows if name in kinds(flow)), flows[0])))
    names = [a.name for a in found]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"vary: {twice}: is given twice")
    return tuple(found)


def sources_of(dataflows: Sequence[str], kernels: Sequence[str]) -> tuple[Source, ...]:
    """Dataflows and kernels by name, or by absolute path, so that another process finds them; flash2 without any."""
    asked = [*(Source(dataflow=_found(name, ".py")) for name in dataflows),
             *(Source(kernel=_found(name, ".toml")) for name in kernels)] or [Source()]  # fmt: skip
    names = [source.load().name for source in asked]
    if twice := next((name for name in names if names.count(name) > 1), None):
        raise InputError(f"dataflow: {twice} is given twice")
    return tuple(asked)


def _found(name: str, end: str) -> str:
    return str(Path(name).resolve()) if name.endswith(end) or "/" in name else name


def grid_of(
    problem: Attention,
    sources: Sequence[Source],
    hw: Sequence[str],
    *,
    given: Mapping[str, Any],
    axes: Sequence[Axis] = (),
    fidelities: Sequence[str] = ("fair",),
    batch: Batch | None = None,
) -> Grid:
    """A grid; raises InputError for parts that do not go together."""
    require_read(given, [source.load() for source in sources])
    if twice := next((a.name for a in axes if a.name in given), None):
        raise InputError(f"vary: {twice}: is given as an option too")
    try:
        require_beside(batch, [a.name for a in axes])
    except InputError as error:
        raise InputError(f"vary: {error}") from None
    return Grid(problem, tuple(sources), tuple(machines_called(list(hw) or ["mp31"])), given, tuple(axes),
                tuple(fidelities) or ("fair",), batch)  # fmt: skip


def read_grids(path: str, *, trust: bool = False) -> tuple[Grid, ...]:
    """The grids of a TOML file: one for each [[grid]] table, and for each batch of sequences in it.

    `dataflow`, `kernel`, `hw` and `fidelity` are names or lists of them; every other entry is a field of a problem, a
    schedule or (in quotes: "hw.sram.capacity_kib") a machine, with a value, a list, or a text as --vary takes it.
    `lengths` is as `_batches` says.
    A dataflow of a Python file is code, and taken with `trust` alone.  Raises InputError, which names the file.
    """
    document = toml(read_text(path, MOST_BYTES, "a sweep", "TOML"), path)
    if document.pop("schema", None) != SCHEMA:
        raise InputError(f'{path}: needs schema = "{SCHEMA}"')
    tables = document.pop("grid", None)
    if document or not isinstance(tables, list) or not tables or not all(isinstance(t, dict) for t in tables):
        wrong = f"{next(iter(document))!r} is unknown" if document else "there is no grid"
        raise InputError(f"{path}: {wrong}; it has one or more tables [[grid]], and schema above them")
    grids = []
    for number, table in enumerate(tables, 1):
        try:
            grids += _grids(table, trust=trust)
        except InputError as error:
            words = str(error).removeprefix("vary: ").replace("; --vary takes several", "")
            raise InputError(f"{path}: grid {number}: {words}") from None
    if (total := sum(map(len, grids))) > MOST:
        raise InputError(f"{path}: makes {total:,} configurations; one sweep takes {MOST:,}")
    return tuple(grids)


def _grids(table: Mapping[str, Any], *, trust: bool) -> list[Grid]:
    names = {name: _names(name, table[name]) for name in LISTS if name in table}
    if not trust and (code := next(filter(names_code, names.get("dataflow", [])), None)):
        raise InputError(f"dataflow: {code!r} is code; --trust runs it")
    sources = sources_of(names.get("dataflow", []), names.get("kernel", []))
    rest = {name: value for name, value in table.items() if name not in (*LISTS, "lengths")}
    axes = axes_of([f"{name}={_text(name, value)}" for name, value in rest.items()], sources)
    batches = _batches(table["lengths"]) if "lengths" in table else [None]
    made = grid_of(_base(axes, batches[0]), sources, names.get("hw", []), given={}, axes=axes,
                   fidelities=names.get("fidelity", []), batch=batches[0])  # fmt: skip
    return [replace(made, batch=batch) for batch in batches]


def _batches(given: Any) -> Sequence[Batch | None]:
    """The batches of `lengths`.

    A value is one, and so is a list of sequences (512, "1:777").  A list is one of batches where an item can be no
    sequence: a list itself, or a text with a comma or the name of a file.
    """
    several = isinstance(given, list) and any(
        isinstance(one, list) or (isinstance(one, str) and not set(one) <= set("0123456789: ")) for one in given
    )
    made: dict[Batch, None] = {}  # in their order
    for one in given if several else [given]:
        batch = Batch(sequences=lengths_of(",".join(map(str, one)) if isinstance(one, list) else str(one)))
        if batch in made:
            raise InputError(f"lengths: {show(one)} is given twice")
        made[batch] = None
    return list(made)


def _base(axes: Sequence[Axis], batch: Batch | None) -> Attention:
    """A problem of the first sizes: all else that is not a default is varied."""
    sizes: dict[str, Any] = {{"n": "n_q"}.get(a.name, a.name): a.values[0] for a in axes}
    if batch is not None:
        sizes["n_q"] = 1
    for name in ("n_q", "d"):
        if name not in sizes:
            raise InputError(f"{'n' if name == 'n_q' else name}: is missing; every grid needs n and d")
    return Attention(n_q=sizes["n_q"], d=sizes["d"])


def _names(name: str, value: Any) -> list[str]:
    found = value if isinstance(value, list) else [value]
    if not found or not all(isinstance(one, str) for one in found):
        more = (
            '; a field of the machine is written in quotes: "hw.sram.capacity_kib"' if isinstance(value, dict) else ""
        )
        raise InputError(f"{name}: is not a name or a list of names{more}")
    return found


def _text(name: str, value: Any) -> str:
    """A value of TOML as --vary takes it."""
    if isinstance(value, list) and not any(isinstance(one, list) for one in value):
        return ",".join(_text(name, one) for one in value)
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, int | float) and abs(value) >= LARGEST:
        raise InputError(f"{name}: {show(value)} is out of range; a number here is below 10^{len(str(LARGEST)) - 1}")
    if isinstance(value, str | int | float):
        return str(value)
    raise InputError(f"{name}: is not a value, a list of values or a text like 1024..65536:x2")
