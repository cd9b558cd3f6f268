"""Kernels that people run: a dataflow with the schedule that its authors chose.  One TOML file each.

A file names a dataflow and fields of a schedule: [settings] for every problem, and the first [[tile]] that holds the
problem's head dimension (and, where it says so, its mask).  An [[order]] is for a loop; one with `stages` only for
schedules of so many, a `tall` one for those whose warp groups have more than 64 rows each; of several that fit, the
last one counts.  Its `shares` are of the schedule.  In its steps [verb, phase, ahead] an `ahead` of "last" stands for
the stages less one.  A [split] says by which library's rule the keys are cut when a grid is small, and with which
tiles; these are also for up to `rows` queries whose keys are not cut.  `contiguous` names the inputs that the library
copies first where its caller has them strided.  `code_bytes` are what the first kernel of a call reads beside its
tensors: code, constants, parameters.  A [kernels.NAME] has what one kernel of the program has otherwise: fields, the
sizes of a matrix product, by which its library picks a tile, or a list of kernels by the length of a row (library.py).
`compiler` names the one whose registers, spills and waits follow from the tile (iosim/memory/triton.py).  A file that
is `like` another has all of that file which it does not say itself.

What a kernel's code takes beyond the operations of its program (`instructions`, `cycles`; see Schedule) was counted by
hardware or measured; each file says where.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from iosim.dataflows import Dataflow, load_dataflow, names_code
from iosim.dataflows.split_rules import cudnn_splits, flash1_splits, flash2_splits
from iosim.errors import InputError, nearest, show
from iosim.files import read_text, toml
from iosim.index import cdiv
from iosim.kernels.library import Code, Lengths, Product
from iosim.memory.triton import compiled
from iosim.program import Builder, Load, Loop, Node, Program, Tensor, rows
from iosim.schedule import GROUP_ROWS, SEPARATE, Order, Role, Schedule, Step

if TYPE_CHECKING:
    from iosim.dataflows import Also, Rule
    from iosim.hardware import Hardware
    from iosim.problem import Attention

LAST = "last"
COPIED = 512  # elements that a block of a copy kernel takes
SPLIT_RULES = {"flash1": flash1_splits, "flash2": flash2_splits, "cudnn": cudnn_splits}
MOST_BYTES = 2**18  # of a kernel's file
LARGEST = 2**53  # number in it
_FIELDS = {f.name: str(f.type) for f in fields(Schedule) if f.name != "orders"}  # and their kinds


class _Table(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class _Role(_Table):
    name: str
    groups: Literal["all"] | int = 1
    steps: tuple[tuple[str] | tuple[str, str] | tuple[str, str, int | Literal["last"]], ...]


class _Order(_Table):
    loop: str
    stages: int | None = None
    tall: bool | None = None
    slots: Mapping[str, int | Literal["stages"]]
    shares: Mapping[str, str] = {}
    roles: tuple[_Role, ...]


class _Tile(BaseModel):
    """Fields of a schedule for head dimensions up to `d`, and for problems with or without a causal mask."""

    model_config = ConfigDict(frozen=True, extra="allow")
    d: int = 1024
    causal: bool | None = None


class _Split(_Table):
    rule: Literal["flash1", "flash2", "cudnn"]
    dataflow: str
    tile: tuple[_Tile, ...]
    rows: int = 0

    def takes(self, a: Attention, splits: int) -> bool:
        """Whether its tiles are those of a problem."""
        return splits > 1 or a.n_q <= self.rows


class _Part(BaseModel):
    """What one kernel of the program has otherwise."""

    model_config = ConfigDict(frozen=True, extra="allow")
    product: Product | None = None
    code: Code | None = None
    row: tuple[Lengths, ...] = ()

    @model_validator(mode="after")
    def has_both(self) -> _Part:
        if bool(self.row) != (self.code is not None):
            raise ValueError("kernels by the length of a row need a table `code`, and only they")
        return self

    def fields_for(self, a: Attention, hardware: Hardware) -> dict[str, Any]:
        """The fields of its schedule for problem `a`."""
        own = dict(self.model_extra or {})
        if "units" in own:
            own["units"] = tuple(own["units"])
        if self.product is not None:
            own |= self.product.fields(a, hardware)
        if self.row and self.code is not None:
            kind = next((kind for kind in self.row if kind.takes(a.n_k)), None)
            if kind is None:
                raise InputError(f"n_k: no kernel for rows of {a.n_k} elements; the longest is for {self.row[-1].most}")
            own |= kind.fields(a.n_k, hardware, self.code)
        return own


class _File(_Table):
    schema_: Literal["iosim.kernel/1"]
    name: str
    title: str
    dataflow: str
    source: str
    settings: Mapping[str, Any] = {}
    tile: tuple[_Tile, ...]
    order: tuple[_Order, ...] = ()
    split: _Split | None = None
    contiguous: tuple[str, ...] = ()
    code_bytes: int = 0
    compiler: Literal["triton"] | None = None
    kernels: Mapping[str, _Part] = {}


@dataclass(frozen=True)
class Kernel:
    """A kernel as its file describes it."""

    file: _File

    @property
    def name(self) -> str:
        return self.file.name

    @property
    def title(self) -> str:
        return self.file.title

    def value(self, field: str) -> float:
        """The number at a dotted field of the file, such as settings.cycles.softmax."""
        found: Any = self.file.model_dump()
        for key in field.split("."):
            found = found[key]
        return float(found)

    def with_values(self, changes: Sequence[tuple[str, float]]) -> Kernel:
        """The kernel with other numbers at some dotted fields of its file."""
        if not changes:
            return self
        data = self.file.model_dump()
        for field, value in changes:
            *path, last = field.split(".")
            table = data
            for key in path:
                table = table[key]
            table[last] = value
        return Kernel(_File.model_validate(data))

    def fields_for(self, a: Attention, processors: int | None, given: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of the schedule that its authors chose for problem `a`, under those that are `given`.

        Raises InputError for a head dimension or a mask that it does not have.
        """
        splits = given.get("splits", self.splits(a, processors))
        cut = self.file.split
        part = cut if cut is not None and cut.takes(a, splits) else self.file
        tiles = [t for t in part.tile if a.d <= t.d and t.causal in (None, a.causal)]
        if not tiles:
            most = max(t.d for t in part.tile)
            if a.d <= most:
                mask = "a causal mask" if a.causal else "no causal mask"
                parts = f" and {splits} splits" if splits > 1 else ""
                raise InputError(f"causal: kernel {self.name} has no tile for d {a.d} with {mask}{parts}")
            raise InputError(f"d: kernel {self.name} takes head dimensions up to {most}, not {a.d}")
        own = {**self.file.settings, **(tiles[0].model_extra or {}), "splits": splits, **given}
        for name in ("block_q", "block_k"):
            if name not in own:
                raise InputError(f"kernel {self.name}: its tile for d {a.d} has no {name}")
        stages = own.get("stages", (1,))
        own["stages"] = (stages,) if isinstance(stages, int) else tuple(stages)
        for name in ("units", "descending", "separate"):
            own[name] = tuple(own.get(name, ()))
        tall = own["block_q"] > GROUP_ROWS * own.get("groups", 1)
        fitting = [o for o in self.file.order if o.stages in (None, own["stages"][0]) and o.tall in (None, tall)]
        if fitting and "orders" not in given:
            own["orders"] = {o.loop: _order(o, own) for o in fitting}
            shares = {tile: host for o in {o.loop: o for o in fitting}.values() for tile, host in o.shares.items()}
            own["shares"] = {**shares, **own.get("shares", {})}
        if self.file.compiler is not None:
            own |= {name: value for name, value in compiled(a, own).items() if name not in given}
        return own

    def splits(self, a: Attention, processors: int | None) -> int:
        """Into how many splits it cuts the keys: 1 where it has no rule or nobody knows the number of processors."""
        if self.file.split is None or processors is None:
            return 1
        return SPLIT_RULES[self.file.split.rule](a, processors)

    def refuse_unknown(self, flow: Dataflow, a: Attention, schedule: Schedule) -> None:
        """Raise InputError for a [kernels.NAME] that the dataflow has not, whatever it runs as kernels of its own."""
        if not self.file.kernels:
            return
        whole = flow.write(replace(a, causal=True), replace(schedule, separate=SEPARATE))
        known = [k.name for k in whole.kernels]
        for name in self.file.kernels:
            if name not in known:
                raise InputError(f"kernel {self.name}: kernels: {self.file.dataflow} has no kernel {name!r}"
                                 f" (it has {', '.join(known)}){nearest(name, known)}")  # fmt: skip

    def dataflow(self, *, strided: bool = False) -> Dataflow:
        """A dataflow of its name, whose schedules are the authors'; with `strided` inputs, it copies them first."""
        flow = load_dataflow(self.file.dataflow)
        parts = None if self.file.split is None else load_dataflow(self.file.split.dataflow)

        def write(a: Attention, s: Schedule) -> Program:
            cut = self.file.split
            chosen = parts if parts is not None and cut is not None and cut.takes(a, s.splits) else flow
            if refusal := chosen.refusal(a):
                raise InputError(refusal)
            program = chosen.write(a, s)
            return with_copies(program, self.file.contiguous) if strided and self.file.contiguous else program

        def plan(a: Attention, hardware: Hardware, given: Mapping[str, Any], rule: Rule) -> tuple[Schedule, str]:
            own = self.fields_for(a, hardware.processors, given)
            try:
                machine = hardware.with_units(own["units"])
            except InputError as error:
                raise InputError(f"kernel: {self.name} is of another machine: {error}") from None
            if self.file.kernels and "kernels" not in given:
                own["kernels"] = {name: part.fields_for(a, hardware) for name, part in self.file.kernels.items()}
            why = f"as {self.title}" + ("; some fields are given" if given else "")
            cut = self.file.split
            if flow.plan is None or (cut is not None and cut.takes(a, own["splits"])):
                schedule = Schedule(**own)
                self.refuse_unknown(flow, a, schedule)
                return schedule, why

            def settled(also: Also | None = None, *, rows: Sequence[int] = (), **more: Any) -> tuple[Schedule, str]:
                return rule(also, rows=rows, **{**more, **own})

            return flow.plan(a, machine, own, settled)[0], why

        uses = flow.uses if parts is None else tuple(dict.fromkeys((*flow.uses, *parts.uses)))
        takes = tuple(what for what in flow.takes if what != "bias" or not self.file.order)  # no order copies one
        name = f"{self.name} kernel"
        return replace(flow, name=name, help=self.title, uses=uses, write=write, plan=plan, takes=takes)


def with_copies(program: Program, names: Sequence[str]) -> Program:
    """The program with a kernel before it for each input named, which makes a contiguous copy that it reads instead.

    Blocks are those of PyTorch's elementwise kernels: 128 threads, 4 elements each.
    """
    p = Builder(program.name)
    copies: dict[str, Tensor] = {}
    inputs = {t.name: t for t in program.tensors if t.role == "in"}
    for given in (inputs[name] for name in names):
        p.tensor(given.name, given.shape, given.dtype, given.role)
        made = p.tensor(f"contiguous {given.name}", given.shape, given.dtype, "scratch")
        copies[given.name] = made
        *outer, n, d = given.shape
        block = max(1, COPIED // d)
        grid = {f"a{axis}": size for axis, size in enumerate(outer)}
        with p.kernel(f"copy {given.name}", operands_once=False, **grid, i=cdiv(n, block)) as (*at, i), p.phase("copy"):
            p.store(made[(*at, rows(i, block))], p.load("x", given[(*at, rows(i, block))]))
    kernels = tuple(replace(k, body=tuple(_reading(copies, node) for node in k.body)) for k in program.kernels)
    return replace(program, tensors=(*program.tensors, *copies.values()), kernels=(*p.done().kernels, *kernels))


def _reading(copies: Mapping[str, Tensor], node: Node) -> Node:
    """A node that loads the copies of tensors in place of these."""
    if isinstance(node, Loop):
        return replace(node, body=tuple(_reading(copies, inside) for inside in node.body))
    if isinstance(node, Load) and node.view.tensor.name in copies:
        return replace(node, view=replace(node.view, tensor=copies[node.view.tensor.name]))
    return node


def _order(order: _Order, own: Mapping[str, Any]) -> Order:
    stages = own["stages"]

    def step(parts: tuple[Any, ...]) -> Step:
        verb, phase, ahead = parts[0], parts[1] if len(parts) > 1 else "", parts[2] if len(parts) > 2 else 0
        return Step(verb, phase, stages[0] - 1 if ahead == LAST else int(ahead))

    def role(r: _Role) -> Role:
        return Role(r.name, own.get("groups", 1) if r.groups == "all" else int(r.groups), tuple(map(step, r.steps)))

    slots = {tile: stages[0] if n == "stages" else int(n) for tile, n in order.slots.items()}
    return Order(tuple(map(role, order.roles)), slots)


def kernel_names() -> list[str]:
    """Names of the kernels that ship with iosim."""
    return sorted(path.stem for path in Path(__file__).parent.glob("*.toml"))


def load_kernel(name: str) -> Kernel:
    """The kernel called `name`, or the one in the TOML file at that path.

    Raises InputError for an unknown name, with the nearest one, and for a file that is not a kernel's.
    """
    if name.endswith(".toml") or "/" in name:
        path = Path(name)
    else:
        path = Path(__file__).parent / f"{name}.toml"
        if name not in (names := kernel_names()):
            raise InputError(f"kernel: {name!r} is not one of {', '.join(names)}{nearest(name, names)}")
    origin = f"kernel: {path}"
    data = toml(read_text(path, MOST_BYTES, "a kernel", "TOML", origin), origin)
    if isinstance(other := data.pop("like", None), str):
        data = _over(_like(path, other), data)
    data["schema_"] = data.pop("schema", None)
    try:
        file = _File.model_validate(data)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])).replace("schema_", "schema")
        raise InputError(f"kernel: {path}: {where}: {first['msg']}") from None
    for name in (file.dataflow, file.split.dataflow if file.split else ""):
        if names_code(name):
            raise InputError(f"{origin}: dataflow: {name!r} is a file; a kernel is data, and runs no code of others")
    for table in _settings(file):
        for key, value in table.items():
            if key not in _FIELDS:
                raise InputError(f"{origin}: {key!r} is no field of a schedule{nearest(key, _FIELDS)}")
            if not _is(_FIELDS[key], value):
                raise InputError(f"{origin}: {key}: {show(value)} is no {_said(_FIELDS[key])}")
    return Kernel(file)


def _settings(file: _File) -> list[Mapping[str, Any]]:
    """The tables of a file that hold fields of a schedule."""
    tiles = (*file.tile, *(file.split.tile if file.split else ()))
    tables = [file.settings, *(part.model_extra or {} for part in (*tiles, *file.kernels.values()))]
    kernels = [own for table in tables if isinstance(own := table.get("kernels"), dict)]
    return [*tables, *(own for table in kernels for own in table.values() if isinstance(own, dict))]


def _said(kind: str) -> str:
    """A field's kind in words."""
    for start, words in (("int", "whole number"), ("float", "number"), ("bool", "true or false"), ("str", "text"),
                         ("tuple[int", "whole number or list of them"), ("tuple", "list of texts")):  # fmt: skip
        if kind.startswith(start):
            return words
    inner = kind.partition(", ")[2]
    return "table of tables" if inner.startswith("Map") else "table of " + ("texts" if inner[0] in "sP" else "numbers")


def _is(kind: str, value: object) -> bool:
    """Whether a value of TOML is of a kind, as the fields of a schedule name theirs."""
    if kind.startswith("tuple["):
        one = kind.removeprefix("tuple[").removesuffix(", ...]")
        return all(_is(one, x) for x in value) if isinstance(value, list) else one == "int" and _is(one, value)
    if kind.startswith("Mapping["):
        inner = kind.partition(", ")[2].removesuffix("]")
        return isinstance(value, dict) and all(_is(inner, x) for x in value.values())
    if kind in ("bool", "str", "Place", "Any"):
        return isinstance(value, {"bool": bool, "Any": object}.get(kind, str))
    whole = isinstance(value, int) and not isinstance(value, bool) and abs(value) < LARGEST
    return whole or (kind == "float" and isinstance(value, float) and abs(value) < LARGEST)


def _like(path: Path, name: str) -> dict[str, Any]:
    """What the shipped kernel `name`, which the file at `path` is like, says."""
    if name not in (names := kernel_names()):
        raise InputError(f"kernel: {path}: like: {name!r} is not one of {', '.join(names)}{nearest(name, names)}")
    return tomllib.loads((Path(__file__).parent / f"{name}.toml").read_text(encoding="utf-8"))


def _over(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Both tables as one; what `above` says is taken."""
    merged = {**below, **above}
    for key, value in above.items():
        if isinstance(value, dict) and isinstance(below.get(key), dict):
            merged[key] = _over(below[key], value)
    return merged
