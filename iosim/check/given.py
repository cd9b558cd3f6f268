"""A user's own tensors as the inputs of a check: from a file or as arrays, with the problem's shape."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from iosim.check.inputs import Normal
from iosim.check.tensors import FLOATS, Stored, listed, read_tensors
from iosim.dtypes import ALIASES, DATA, DTYPES, dtype
from iosim.errors import InputError, nearest
from iosim.problem import SAME, Attention
from iosim.rounding import round_to

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from iosim.interpreters.region import Range

    Array: TypeAlias = NDArray[Any]
    Single: TypeAlias = NDArray[np.float32]

LAYOUTS = ("bhsd", "bshd")
WORDS_OF = {"bhsd": "(batch, heads, n, d)", "bshd": "(batch, n, heads, d)"}
NAMES = {"q": "Q", "query": "Q", "k": "K", "key": "K", "v": "V", "value": "V", "s": "S", "do": "dO"}
NEEDS = {"forward": ("Q", "K", "V"), "backward": ("Q", "K", "V"), "softmax": ("S",)}  # by what is computed
WORDS = {"forward": "attention", "backward": "a backward pass", "softmax": "a softmax alone"}
LARGEST = {"S": 2.0**24}  # magnitude: what float32 makes of an exponent is then no worse than exp(2)
LARGEST_OTHER = 2.0**40  # of the others: the bounds of a check, some of them in float32, then stay finite
MOST_SCORE = 2.0**24 / 6  # |q| |k| / sqrt(d): an exponent is wrong by 6u of it at most (forward.py, 2.), then by 1
_AXES = {  # of tensors (batch, heads, rows, columns): which give a field of the problem
    "n_q": (("Q", 2), ("dO", 2), ("S", 2)),
    "n_k": (("K", 2), ("V", 2), ("S", 3)),
    "d": (("Q", 3), ("K", 3)),
    "d_v": (("V", 3), ("dO", 3)),
    "batch": (("Q", 0), ("K", 0), ("V", 0), ("dO", 0), ("S", 0)),
    "heads": (("Q", 1), ("dO", 1), ("S", 1)),
    "kv_heads": (("K", 1), ("V", 1)),
}
_ROWS = 2**20  # elements that are looked at at a time


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """Tensors that a check is to use: Q, K and V, dO of a backward pass, S of a softmax alone.

    `origin` is the file's name and `sha256` that of its content (None for arrays).  `shape` has the fields of an
    Attention that the tensors give.  Made by `load_inputs`.
    """

    origin: str
    sha256: str | None
    layout: str
    tensors: Mapping[str, Stored]
    others: tuple[str, ...]  # names that are not used
    shape: Mapping[str, int]

    def problem(self, **given: Any) -> Attention:
        """The problem of these tensors; `given` sets what they leave open, and `dtype` to what values are rounded.

        A softmax alone has no d: where S is the only tensor it is 1.
        Raises InputError for a field that the tensors contradict, and for tensors of different formats without `dtype`.
        """
        for name, value in given.items():
            if value is not SAME:
                self._require(name, value)
        made: dict[str, Any] = {} if "dtype" in given else {"dtype": self._dtype()}
        if "d" not in self.shape:
            made["d"] = 1
        try:
            return Attention(**(made | given | dict(self.shape)))
        except InputError as error:
            if (field := str(error).partition(":")[0]) in self.shape:
                words = f"inputs: {self.origin}: {field}{str(error)[len(field) :]}"
                raise InputError(words + turned_hint(self.layout, self.tensors)) from None
            raise

    def require(self, a: Attention, computes: str) -> None:
        """Raise InputError unless these tensors have the problem's shape and are what such a dataflow reads."""
        self.require_tensors(computes)
        for field in fields(Attention):
            self._require(field.name, getattr(a, field.name))

    def require_tensors(self, computes: str) -> None:
        """Raise InputError, with the name of a tensor that is not there, unless such a dataflow can do with these."""
        for name in NEEDS[computes]:
            if name not in self.tensors:
                words = " or ".join(alias for alias, known in NAMES.items() if known == name)
                have = listed([*(t.name for t in self.tensors.values()), *self.others]) or "no tensor"
                raise InputError(
                    f"inputs: {self.origin}: no tensor {words}, which {WORDS[computes]} reads; it has {have}"
                )

    def used(self, computes: str) -> dict[str, Stored]:
        """The tensors that a check of such a dataflow reads."""
        names = (*NEEDS[computes], *(("dO",) if computes == "backward" else ()))
        return {name: self.tensors[name] for name in names if name in self.tensors}

    def source(self, a: Attention, computes: str, seed: int = 0) -> Given:
        """The tensors as a Source: read, and every number looked at.

        Raises InputError for a number that is not finite, or not so once it is rounded, and for a file that is damaged.
        """
        arrays = {name: _canonical(name, t.read(), self.layout) for name, t in self.used(computes).items()}
        given = Given(attention=a, arrays=arrays, other=Normal(attention=a, seed=seed))
        norms = {
            name: _largest_norm(f"inputs: {self.origin}: {self.tensors[name].name}", array, given, name)
            for name, array in arrays.items()
        }
        if computes != "softmax" and (score := a.scale * norms["Q"] * norms["K"]) > MOST_SCORE:
            q, k = (self.tensors[name].name for name in "QK")
            raise InputError(
                f"inputs: {self.origin}: {q} and {k} make scaled scores of up to {score:.3g}; above {MOST_SCORE:.3g} "
                f"their rounding errors alone may change a weight by a factor of e, and no check would say anything"
            )
        return given

    def _require(self, field: str, value: object) -> None:
        for tensor, _ in _AXES.get(field, ()):
            if tensor in self.tensors and value != self.shape[field]:
                stored = self.tensors[tensor]
                raise InputError(
                    f"{field}: {value} was given, and {stored.name} of {self.origin} has {self.shape[field]} "
                    f"(shape {stored.shape}, layout {self.layout})"
                )

    def _dtype(self) -> str:
        """The format of all tensors."""
        first, *rest = self.tensors.values()
        allowed = ", ".join(DATA)
        for t in (first, *rest):
            if t.dtype.name not in ALIASES:
                raise InputError(
                    f"inputs: {self.origin}: {t.name}: {t.dtype.name} is no format of the data of a kernel; give "
                    f"the dtype that it is to be rounded to ({allowed}), such as --dtype fp16"
                )
            if t.dtype.name != first.dtype.name:
                raise InputError(
                    f"inputs: {self.origin}: {t.name} is {t.dtype.name} and {first.name} {first.dtype.name}; give the "
                    f"dtype that all are to be rounded to ({allowed})"
                )
        return dtype(first.dtype.name).name


@dataclass(frozen=True, slots=True, kw_only=True)
class Given:
    """A Source of arrays (batch, heads, rows, columns) by name; dO is normal where there is none."""

    attention: Attention
    arrays: Mapping[str, Array]
    other: Normal

    @property
    def values_std(self) -> float | None:
        return None

    def rows(self, name: str, batch: int, head: int, rows: Range) -> Single:
        """See Source; float64 is rounded to float32 first."""
        if name not in self.arrays:
            return self.other.rows(name, batch, head, rows)
        with np.errstate(over="ignore"):
            out = self.arrays[name][batch, head, slice(*rows)].astype(np.float32, order="C")
        if not self.attention.is_fp8:
            round_to(out, DTYPES[self.attention.dtype])
        return out


def load_inputs(source: str | os.PathLike[str] | Mapping[str, Any], *, layout: str = "bhsd") -> Inputs:
    """Tensors of a .safetensors or .npz file, or arrays by name: q, k and v (query, key, value), do, s; in any case.

    `layout` is that of all but s: "bhsd", (batch, heads, n, d) as in PyTorch's SDPA, or "bshd", (batch, n, heads, d).
    Without the batch axis there is one batch, and of two axes, (n, d), one head.  s is (batch, heads, n_q, n_k).

    Raises InputError, with the file's name and the tensor's, for whatever is wrong.
    """
    if layout not in LAYOUTS:
        raise InputError(f"inputs_layout: {layout!r} is not one of {', '.join(LAYOUTS)}{nearest(str(layout), LAYOUTS)}")
    if isinstance(source, Mapping):
        origin, sha256, names = "arrays", None, tuple(map(str, source))
        found = [_array(str(name), x) for name, x in source.items() if str(name).lower() in NAMES]
    elif not isinstance(source, str | os.PathLike):
        raise InputError(f"inputs: {source!r:.80} is neither the name of a file nor arrays by name")
    else:
        if not str(source):
            raise InputError("inputs: the file name is empty")
        file = read_tensors(Path(source), NAMES)
        origin, sha256, found, names = file.path.name, file.sha256, list(file.tensors), file.names
    tensors: dict[str, Stored] = {}
    for stored in found:
        name = NAMES[stored.name.lower()]
        if name in tensors:
            raise InputError(f"inputs: {origin}: {tensors[name].name} and {stored.name} are the same tensor")
        if not 2 <= len(stored.shape) <= 4:
            raise InputError(f"inputs: {origin}: {stored.name} has the shape {stored.shape}; 2 to 4 axes are allowed")
        tensors[name] = stored
    if not tensors:
        raise InputError(f"inputs: {origin}: no tensor q, k, v or s; it has {listed(names) or 'no tensor'}")
    others = tuple(name for name in names if name.lower() not in NAMES)
    shape = _shape(origin, layout, tensors)
    inputs = Inputs(origin=origin, sha256=sha256, layout=layout, tensors=tensors, others=others, shape=shape)
    if "S" not in tensors:  # nothing but attention can be asked for
        inputs.require_tensors("forward")
    return inputs


def _array(name: str, given: Any) -> Stored:
    try:
        x = np.asarray(given)
    except (TypeError, ValueError) as error:
        raise InputError(f"inputs: {name} does not make a numpy array: {error!s:.100}") from None
    if x.dtype not in FLOATS.values():
        raise InputError(f"inputs: {name} is {x.dtype}; {', '.join(f.name for f in FLOATS.values())} are allowed")
    return Stored(name, x.shape, x.dtype, lambda: x)


def _shape(origin: str, layout: str, tensors: Mapping[str, Stored]) -> dict[str, int]:
    """The fields of the problem, on which all tensors must agree."""
    out: dict[str, int] = {}
    whole = {name: _whole(name, t.shape, layout) for name, t in tensors.items()}
    for field, axes in _AXES.items():
        first = ""
        for name, axis in axes:
            if name not in tensors:
                continue
            size, first = whole[name][axis], first or name
            if out.setdefault(field, size) != size:
                a, b = tensors[first], tensors[name]
                raise InputError(
                    f"inputs: {origin}: {b.name} with shape {b.shape} has {field} {size}, {a.name} with shape "
                    f"{a.shape} has {out[field]} (layout {layout}){turned_hint(layout, tensors)}"
                )
    return out


def turned_hint(layout: str, tensors: Mapping[str, Stored]) -> str:
    """Another layout, where it looks like that of these tensors: no head has as many rows as there are heads."""
    other = LAYOUTS[1 - LAYOUTS.index(layout)]
    found = {name: _whole(name, t.shape, layout) for name, t in tensors.items() if len(t.shape) > 2 and name != "S"}
    if found and all(heads > rows for _, heads, rows, _ in found.values()):
        return f"; are their axes {WORDS_OF[other]}? Then give --inputs-layout {other}"
    return ""


def _whole(name: str, shape: tuple[int, ...], layout: str) -> tuple[int, ...]:
    """A shape as (batch, heads, rows, columns)."""
    if len(shape) > 2 and layout == "bshd" and name != "S":
        shape = (*shape[:-3], shape[-2], shape[-3], shape[-1])
    return (1,) * (4 - len(shape)) + shape


def _canonical(name: str, x: Array, layout: str) -> Array:
    """A view (batch, heads, rows, columns)."""
    if x.ndim > 2 and layout == "bshd" and name != "S":
        x = x.swapaxes(-2, -3)
    return x[(None,) * (4 - x.ndim)]


def _largest_norm(where: str, x: Array, given: Given, name: str) -> float:
    """The largest |row|; raises InputError for a number that the check cannot take, as it is or rounded."""
    step, most, out = max(1, _ROWS // x.shape[3]), LARGEST.get(name, LARGEST_OTHER), 0.0
    for batch, head in np.ndindex(*x.shape[:2]):
        for first in range(0, x.shape[2], step):
            rounded = given.rows(name, batch, head, (first, min(first + step, x.shape[2])))
            if (bad := ~(np.abs(rounded) <= most)).any():
                row, column = (int(n) for n in np.argwhere(bad)[0])
                place = f"{where} at batch {batch}, head {head}, row {first + row}, column {column}"
                value = float(x[batch, head, first + row, column])
                raise InputError(f"{place} is {value:.9g}; {_why(value, float(rounded[row, column]), given, most)}")
            out = max(out, float(np.einsum("rc,rc->r", rounded, rounded).max()))
    return float(np.sqrt(out))


def _why(value: float, rounded: float, given: Given, most: float) -> str:
    if not np.isfinite(value):
        return "every number must be finite"
    if not np.isfinite(rounded):
        data = DTYPES[given.attention.dtype]
        return f"the largest number of {data.name} is {data.largest:.6g}"
    return f"the check takes magnitudes up to {most:.3g}"
