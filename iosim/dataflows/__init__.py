"""Dataflows: one file each, found by name.

A file `my_flow.py` defines `my_flow(attention, schedule) -> Program` and `USES`, the schedule fields that it reads (and
"grid_order" where its blocks may differ in length); the first line of its docstring is its help.  `COMPUTES` says
"backward" or "softmax" where that is not "forward", and `BACKWARD` of a forward pass names the dataflow of its
gradients, which takes what the forward pass leaves.  `TAKES` says which of a problem's FEATURES (iosim/problem.py),
such as "fp8" data or a "soft-cap", it is written for, if any.
A `refuses(attention) -> str` says, in one line, why a problem's shape is none for it, "" where it is.
A `plan(attention, hardware, given, rule) -> (Schedule, why)` in it chooses the schedule where the general rule
(iosim/study/choose.py) does not do.  Other packages add theirs under the entry point group "iosim.dataflows", and
`--dataflow ./mine.py` takes one from a file.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias, TypeVar

from iosim.errors import InputError, nearest
from iosim.problem import FEATURES
from iosim.strides import strides_of

if TYPE_CHECKING:
    from iosim.hardware import Hardware
    from iosim.problem import Attention
    from iosim.program import Program
    from iosim.schedule import Schedule

    Also: TypeAlias = Callable[[Schedule], Mapping[str, Any]]
    Plan: TypeAlias = Callable[[Attention, Hardware, Mapping[str, Any], "Rule"], tuple[Schedule, str]]

    class Rule(Protocol):
        """The general rule: the schedule and why, with some fields `settled`, where a user has not given others.

        `also` maps every schedule that it tries to fields that are to be changed; `rows` are the heights of a query
        tile that it tries.  Raises CapacityError.
        """

        def __call__(
            self, also: Also | None = None, *, rows: Sequence[int] = ..., **settled: Any
        ) -> tuple[Schedule, str]: ...


T = TypeVar("T")

GROUP = "iosim.dataflows"
PASSES = ("forward", "backward", "softmax")
# Files here that are not dataflows.
SHARED = {"__init__", "elementwise", "narrow_cache", "row_softmax", "split_rules", "tiles"}


@dataclass(frozen=True, slots=True)
class Dataflow:
    """A named way to compute attention: writes the program for a problem under a schedule.

    `plan` chooses the schedule where the dataflow has a rule of its own; `refuses` says why a problem's shape is none
    for it.  `backward` names the dataflow of its gradients, "" where there is none.  `file` is the one that a user gave
    it in.  `written` keeps what was written.
    """

    name: str
    help: str
    uses: tuple[str, ...]
    write: Callable[[Attention, Schedule], Program]
    plan: Plan | None = None
    computes: str = "forward"
    backward: str = ""
    takes: tuple[str, ...] = ()
    file: str = ""
    refuses: Callable[[Attention], str] | None = None
    written: dict[tuple[Attention, Schedule], Program] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def refusal(self, a: Attention) -> str:
        """Why it is not written for what a problem asks; empty where it is."""
        for feature in a.features:
            if feature not in self.takes:
                option, what = FEATURES[feature]
                able = sorted(n for n in _shipped() if feature in (flow := load_dataflow(n)).takes and self._like(flow))
                return f"{option}: {self.name} is not written for {what}; {_listed(able)}"
        return self.refuses(a) if self.refuses is not None else ""

    def _like(self, other: Dataflow) -> bool:
        return other.computes == self.computes

    def flops(self, a: Attention) -> int:
        """FLOPs by convention of what it computes: none are agreed on for a softmax alone."""
        forward, backward = a.flops, a.backward_flops
        return {"forward": forward, "backward": backward, "training": forward + backward}.get(self.computes, 0)

    def __call__(self, attention: Attention, schedule: Schedule) -> Program:
        """The program; raises InputError, with the dataflow's name, for whatever goes wrong in writing it."""
        from iosim.program import Program

        if refusal := self.refusal(attention):
            raise InputError(refusal)
        key = attention, schedule
        if key not in self.written:
            program = _guarded(f"dataflow {self.name}", lambda: self.write(attention, schedule), self.file)
            if not isinstance(program, Program):
                raise InputError(f"dataflow {self.name}: returned {program!r:.80} instead of a Program")
            self.written[key] = _laid_out(program, attention)
        return self.written[key]


def _laid_out(program: Program, a: Attention) -> Program:
    """The program with the strides of the problem's layout; raises InputError where it has nothing that lies so."""
    strides = strides_of(a)
    moved = [t for t in program.tensors if t.role != "scratch" and t.name in strides]
    own = {t.name: strides[t.name] for t in moved if len(t.shape) == len(strides[t.name].steps)}
    if strides and not own:
        raise InputError(f"layout: changes nothing in {program.name}, which has no Q, K, V or O (batch, heads, n, d)")
    return replace(program, strides=own) if own else program


def _listed(names: Sequence[str]) -> str:
    """Which dataflows are written for something."""
    if not names:
        return "no dataflow of its kind is"
    return f"{', '.join(names)} {'are' if len(names) > 1 else 'is'}"


def _guarded(what: str, call: Callable[[], T], file: str = "") -> T:
    """Run code that is not ours: what it prints goes to stderr, what it raises becomes one line.

    To what we raise ourselves, the line of the user's `file` is added where there is one.
    """
    try:
        with redirect_stdout(sys.stderr):
            return call()
    except InputError as error:
        lines = [f.lineno for f in traceback.extract_tb(error.__traceback__) if f.filename == file]
        if not file or not lines:
            raise
        raise InputError(f"{what}: {Path(file).name}, line {lines[-1]}: {error}") from error
    except (Exception, SystemExit) as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        name, line, words = last.filename, last.lineno, str(error)
        if isinstance(error, SyntaxError) and error.filename is not None:
            name, line, words = error.filename, error.lineno, error.msg
        place = "" if name.startswith("<frozen") else f" in {Path(name).name}, line {line}"
        words = " ".join(words.split())
        raise InputError(f"{what}: {type(error).__name__}{place}: {words:.200}") from error


def dataflow_names() -> list[str]:
    """Names of the dataflows that can be loaded without a path: shipped ones first."""
    shipped = sorted(_shipped())
    return shipped + sorted(_entries().keys() - set(shipped))


def _shipped() -> dict[str, str]:
    """Module name of each dataflow of this folder."""
    stems = (p.stem for p in Path(__file__).parent.glob("*.py"))
    return {stem.replace("_", "-"): stem for stem in stems if stem not in SHARED}


def _entries() -> dict[str, str]:
    """Module of each dataflow that another package adds."""
    from importlib.metadata import entry_points  # slow to import, and seldom needed

    return {e.name: e.module for e in entry_points(group=GROUP)}


def names_code(name: str) -> bool:
    """Whether a dataflow's name is a Python file's, which loading it would run."""
    return name.endswith(".py") or "/" in name


def load_dataflow(name: str) -> Dataflow:
    """The dataflow called `name`, or the one in the Python file at that path.

    Raises InputError for an unknown name, with the nearest one, and for a file that does not define a dataflow.
    """
    if names_code(name):
        stem = Path(name).stem.replace("-", "_")
        if not stem.isidentifier():
            raise InputError(f"dataflow: {name}: the file's name must be a Python name, as that of its function is")
        return replace(_from_module(module := _load_file(Path(name)), stem), file=str(module.__file__))
    if name in (shipped := _shipped()):
        return _from_module(importlib.import_module(f"iosim.dataflows.{shipped[name]}"), shipped[name])
    if name in (entries := _entries()):
        return _from_module(importlib.import_module(entries[name]), name.replace("-", "_"))
    names = dataflow_names()
    raise InputError(f"dataflow: {name!r} is not one of {', '.join(names)}{nearest(name, names)}")


def _load_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InputError(f"dataflow: {path} is not a file")
    spec = importlib.util.spec_from_file_location(f"iosim_dataflow_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise InputError(f"dataflow: {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    loader = spec.loader
    _guarded(f"dataflow: {path} does not load", lambda: loader.exec_module(module))
    return module


def _from_module(module: ModuleType, stem: str) -> Dataflow:
    write, uses = getattr(module, stem, None), getattr(module, "USES", None)
    if not callable(write) or not isinstance(uses, tuple):
        raise InputError(
            f"dataflow: {module.__file__} needs a function {stem}(attention, schedule) -> Program and "
            f"a tuple USES of the schedule fields that it reads"
        )
    from iosim.schedule import Schedule

    known = [f.name for f in fields(Schedule)]
    for name in uses:
        if name not in known:
            raise InputError(f"dataflow: USES of {module.__file__} names {name!r}, which is no field of a schedule "
                             f"({', '.join(known)})")  # fmt: skip
    first = (module.__doc__ or stem).strip().splitlines()[0]
    computes = getattr(module, "COMPUTES", "forward")
    if computes not in PASSES:
        raise InputError(f"dataflow: COMPUTES of {module.__file__} is {computes!r}; {', '.join(PASSES)} are allowed")
    plan, backward, takes = (getattr(module, name, None) for name in ("plan", "BACKWARD", "TAKES"))
    if not isinstance(backward or "", str):
        raise InputError(f"dataflow: BACKWARD of {module.__file__} is {backward!r}, which is no dataflow's name")
    if unknown := [name for name in takes or () if name not in FEATURES]:
        raise InputError(
            f"dataflow: TAKES of {module.__file__} names {unknown[0]!r}; {', '.join(FEATURES)} are allowed"
        )
    return Dataflow(stem.replace("_", "-"), first, uses, write, plan, computes, backward or "", tuple(takes or ()),
                    refuses=getattr(module, "refuses", None))  # fmt: skip
