"""A subject with some of its fields varied: the fields there are, the values that a text gives them, and the cases.

A field is one of the schedule that the dataflow reads (`stages`), one of the problem (`n`, `causal`), or one of the
machine's profile behind `hw.` (`hw.sram.capacity_kib`).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from itertools import product
from math import isfinite, prod
from typing import TYPE_CHECKING, Any, TypeAlias

from iosim.errors import InputError, nearest
from iosim.problem import Attention
from iosim.schedule import Schedule

if TYPE_CHECKING:
    from iosim.dataflows import Dataflow
    from iosim.hardware import Hardware
    from iosim.study.batch import Batch

Value: TypeAlias = int | float | bool | str | tuple[int, ...]
Kind: TypeAlias = type | tuple[str, ...]  # of a field's values: int, float, bool, str, tuple (of stages), or the words

HW = "hw."
MOST_ROWS = 256
MOST_VALUES = 100_000  # of one field
EXAMPLE = "stages=1,2,3 or block_k=32..256:x2"
READ = ("stages", "groups", "registers", "spills", "persistent", "ahead")  # of a schedule, by every timeline
SWITCHES = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}
TILE = ("block_q", "block_k", "stages")
_KINDS: Mapping[str, Kind] = {
    "int": int, "int | None": int, "bool": bool, "float": float, "float | None": float, "str": str, "str | None": str,
    "tuple[int, ...]": tuple,
}  # fmt: skip
# What a profile gives for the whole chip at its clock goes with how many processors there are, and with the clock.
_CHIP = ("matrix.tflops.", "matrix_warp.tflops.")
IN_PROPORTION: Mapping[str, tuple[str, ...]] = {
    "processor.count": _CHIP,
    "processor.clock_mhz": ("processor.boost_clock_mhz", "processor.matrix_clock_mhz", *_CHIP),
}
BY_AS_MUCH: Mapping[str, tuple[str, ...]] = {"sram.capacity_kib": ("sram.block_capacity_kib", "sram.unified_kib")}


@dataclass(frozen=True, slots=True)
class Source:
    """A dataflow, or the kernel that takes its place, by name: what another process can load."""

    dataflow: str = "flash2"
    kernel: str = ""

    def load(self) -> Dataflow:
        """The dataflow; the same object each time."""
        return _loaded(self)


@lru_cache(maxsize=8)
def _loaded(source: Source) -> Dataflow:
    from iosim.dataflows import load_dataflow
    from iosim.kernels import load_kernel

    return load_kernel(source.kernel).dataflow() if source.kernel else load_dataflow(source.dataflow)


@dataclass(frozen=True, slots=True)
class Case:
    """One dataflow on one machine, with the fields of its schedule that are settled.

    With a `batch`, its sequences have the place of the problem's queries and keys.
    """

    problem: Attention
    source: Source
    machine: Hardware
    given: Mapping[str, Any] = field(default_factory=dict, hash=False)
    fidelity: str = "fair"
    batch: Batch | None = None


@dataclass(frozen=True, slots=True)
class Axis:
    """A field, and the values that it takes."""

    name: str
    values: tuple[Value, ...]


@dataclass(frozen=True, slots=True)
class Variant:
    """The values of the fields varied, by name, and the case that they make; None where `refused` says why not."""

    values: Mapping[str, Value]
    case: Case | None
    refused: str = ""


# ---------------------------------------------------------------- names and values


def kinds(flow: Dataflow | None = None) -> dict[str, Kind]:
    """Every field that can be varied and what its values are; of the schedule those that `flow` reads, or all."""
    from iosim.hardware import settable

    read = (*flow.uses, *READ) if flow is not None else [f.name for f in fields(Schedule)]
    own = {f.name: _KINDS[str(f.type)] for f in fields(Schedule) if f.name in read and str(f.type) in _KINDS}
    return own | problem_kinds() | batch_kinds() | {HW + name: kind for name, kind in settable().items()}


def problem_kinds() -> dict[str, Kind]:
    """The fields of a problem; `n` stands for queries and keys alike."""
    return {"n": int} | {f.name: _KINDS[str(f.type)] for f in fields(Attention) if str(f.type) in _KINDS}


def batch_kinds() -> dict[str, Kind]:
    """The fields of a batch of sequences, beside their lengths."""
    from iosim.study.batch import FIELDS

    return dict(FIELDS)


def axis(text: str, flow: Dataflow, option: str = "vary") -> Axis:
    """The field and the values of NAME=VALUES; raises InputError, about `option`, for what is neither.

    Values are listed (1,2,3), or a range with its ends: 32..256:x2 by a factor, 32..256:+32 in steps, 1..4 in ones.
    Stages of K and V that differ are written 2/1.
    """
    name, _, values = (part.strip() for part in text.partition("="))
    if not name or not values:
        raise InputError(f"{option}: {text!r} is not NAME=VALUES, like {EXAMPLE}")
    name = name if name.startswith(HW) else name.replace("-", "_")
    known = kinds(flow)
    if name not in known:
        if name in kinds():
            raise InputError(f"{option}: {name}: changes nothing in {flow.name}")
        near = nearest(name, known) or nearest(HW + name, known)
        raise InputError(f"{option}: {name!r} is no field of a schedule, of a problem or (hw.) of a machine{near}")
    found = tuple(_values(values, known[name], f"{option}: {name}"))
    seen: set[Value] = set()
    for value in found:
        if value in seen:
            small = f" ({values!r} takes steps too small to tell)" if ".." in values else ""
            raise InputError(f"{option}: {name}: {shown(value)} is given twice{small}")
        seen.add(value)
    if option == "set" and len(found) > 1:
        raise InputError(f"set: {name}: takes one value, not {len(found)}; --vary takes several")
    return Axis(name, found)


def shown(value: Value) -> str:
    """A value as a text gives it."""
    if isinstance(value, bool):
        return str(value).lower()
    return "/".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _values(text: str, kind: Kind, where: str) -> Iterator[Value]:
    for part in map(str.strip, text.split(",")):
        if ".." in part and kind in (int, float, tuple):
            steps = _range(part, float if kind is float else int, where)
            yield from ((int(n),) for n in steps) if kind is tuple else steps
        else:
            yield _value(part, kind, where)


def _value(text: str, kind: Kind, where: str) -> Value:
    if kind is bool:
        if text.casefold() not in SWITCHES:
            raise InputError(f"{where}: {text!r} is not true or false")
        return SWITCHES[text.casefold()]
    if isinstance(kind, tuple):
        if text not in kind:
            raise InputError(f"{where}: {text!r} is not one of {', '.join(kind)}{nearest(text, kind)}")
        return text
    if kind is tuple:
        return tuple(int(_number(part, int, where)) for part in text.split("/"))
    return text if kind is str else _number(text, kind, where)


def _number(text: str, kind: Kind, where: str) -> int | float:
    try:
        number = float(text)
    except ValueError:
        number = float("nan")
    if not isfinite(number) or (kind is int and number != int(number)):
        raise InputError(f"{where}: {text!r} is not a {'whole ' if kind is int else ''}number")
    return int(number) if number == int(number) else number


def _range(text: str, kind: type, where: str) -> Iterator[int | float]:
    """LOW..HIGH:xFACTOR or LOW..HIGH:+STEP, both ends included."""
    ends, _, step = text.partition(":")
    low, high = (_number(end, kind, where) for end in ends.split("..", 1))
    by, size = step[:1] or "+", step[1:]
    if by not in ("x", "+") or (not size and (step or kind is float)):
        raise InputError(f"{where}: {text!r} needs a step, as in {ends}:x2 or {ends}:+32")
    amount = _number(size, float, where) if size else 1
    if low > high or amount <= (1 if by == "x" else 0) or (by == "x" and low <= 0):
        raise InputError(f"{where}: {text!r} goes nowhere: a range goes up, by a factor over 1 or a step over 0")
    for n in range(MOST_VALUES):
        try:
            value = round(low * amount**n if by == "x" else low + amount * n, 9)
        except OverflowError:  # beyond any float
            return
        if value > high:
            return
        yield round(value) if kind is int or value == int(value) else value
    raise InputError(f"{where}: {text!r} has more than {MOST_VALUES:,} values")


# ---------------------------------------------------------------- cases


def variants(case: Case, axes: Sequence[Axis], *, keep: bool = True) -> tuple[Variant, ...]:
    """A case for each combination of values, the last axis fastest.

    Where only the schedule and the machine are varied, all have the tile and stages that the plain case would get,
    unless they are varied, or `keep` is off.  Raises InputError for too many, and for a field that is given twice.
    """
    names = [a.name for a in axes]
    for name in names:
        if names.count(name) > 1 or name in case.given:
            raise InputError(f"vary: {name}: is given twice")
    if (rows := prod(len(a.values) for a in axes)) > MOST_ROWS:
        raise InputError(f"vary: makes {rows:,} rows; {MOST_ROWS} are allowed")
    if keep and not any(name in problem_kinds() | batch_kinds() for name in names):
        case = replace(case, given={**kept(case, names), **case.given})
    return tuple(_variant(case, dict(zip(names, row, strict=True))) for row in product(*(a.values for a in axes)))


def kept(case: Case, names: Iterable[str]) -> dict[str, Any]:
    """The tile and stages of the plain case, without what is varied; nothing where it has none that fits."""
    from iosim.study.choose import choose

    flow = case.source.load()
    try:
        if case.batch is not None:
            from iosim.study.batch import step_of

            chosen = step_of(case)[1].schedule
            return {name: getattr(chosen, name) for name in TILE if name not in names}
        schedule, _ = choose(flow, case.problem, case.machine, case.given)
    except InputError:
        return {}
    return {name: getattr(schedule, name) for name in TILE if name in (*flow.uses, *READ) and name not in names}


def _variant(case: Case, values: Mapping[str, Value]) -> Variant:
    try:
        return Variant(values, varied(case, values))
    except InputError as error:
        return Variant(values, None, str(error))


def varied(case: Case, values: Mapping[str, Value]) -> Case:
    """The case with these values; raises InputError for one that its field cannot have."""
    problem = {name: value for name, value in values.items() if name in problem_kinds()}
    batch = {name: value for name, value in values.items() if name in batch_kinds()}
    made = batch_with(case.batch, batch, problem)
    machine = {name.removeprefix(HW): value for name, value in values.items() if name.startswith(HW)}
    schedule = {
        name: value for name, value in values.items() if not (name in problem or name in batch or name.startswith(HW))
    }
    return replace(
        case,
        batch=made,
        problem=problem_with(case.problem, problem) if problem else case.problem,
        machine=machine_with(case.machine, machine) if machine else case.machine,
        given={**case.given, **schedule},
    )


def batch_with(batch: Batch | None, values: Mapping[str, Value], problem: Mapping[str, Value]) -> Batch | None:
    """A batch with other values, beside other ones of the problem."""
    require_beside(batch, [*values, *problem])
    return None if batch is None else batch.having(values)


def require_beside(batch: Batch | None, names: Iterable[str]) -> None:
    """Raise InputError for a field that makes no sense without lengths, or that they say themselves."""
    from iosim.study.batch import FIELDS, LENGTHS_SAY

    for name in names:
        if batch is None and name in FIELDS:
            raise InputError(f"{name}: changes nothing without lengths")
        if batch is not None and name in LENGTHS_SAY:
            raise InputError(f"{name}: is not varied beside lengths")


def problem_with(a: Attention, values: Mapping[str, Value]) -> Attention:
    """A problem with other values; keys stay as many as queries, and so on, where they were and are not given."""
    new: dict[str, Any] = dict(values)
    if "n" in new:
        new["n_q"] = new.pop("n")
    for name, of in (("n_k", "n_q"), ("d_v", "d"), ("kv_heads", "heads")):
        if of in new and name not in new and getattr(a, name) == getattr(a, of):
            new[name] = new[of]
    return replace(a, **new)


def machine_with(machine: Hardware, values: Mapping[str, Value]) -> Hardware:
    """A machine with other values, by the names of the profile, and what goes with them: see `moved`."""
    new: dict[str, Any] = {}
    for name, value in values.items():
        new |= moved(machine, name, value)
    new |= values
    return machine.with_values(new)


def moved(machine: Hardware, name: str, value: Value) -> dict[str, float]:
    """What changes with a field of the profile, as it would make no sense without.

    More SRAM is there for a block as well; more processors, or a faster clock, do more matrix products in all.
    """
    facts = {fact.name: fact.value for fact in machine.fields() if fact.value is not None}
    old = facts.get(name)
    if not old or isinstance(value, str | tuple):
        return {}
    more = {other: facts[other] + value - old for other in BY_AS_MUCH.get(name, ()) if other in facts}
    starts = IN_PROPORTION.get(name, ())
    return more | {other: facts[other] * value / old for other in facts if starts and other.startswith(starts)}
