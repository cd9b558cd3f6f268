"""Index expressions: what a tile program may say about where a block reads and how far its loops run.

    Expr = int | index | e + e | e * const | e // const | least(e, e) | most(e, e) | table[e]

They are small trees, compared and hashed by value.  `at(e, env)` evaluates one over ints or numpy arrays,
or replaces some of its indices and leaves the rest.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias, cast


class Expr:
    """An integer that depends on grid and loop indices."""

    __slots__ = ()

    def __add__(self, other: Ex) -> Ex:
        return plus(self, other)

    def __radd__(self, other: int) -> Ex:
        return plus(self, other)

    def __sub__(self, other: Ex) -> Ex:
        return plus(self, times(other, -1))

    def __rsub__(self, other: int) -> Ex:
        return plus(times(self, -1), other)

    def __mul__(self, factor: int) -> Ex:
        return times(self, factor)

    def __rmul__(self, factor: int) -> Ex:
        return times(self, factor)

    def __floordiv__(self, divisor: int) -> Ex:
        return quotient(self, divisor)


Ex: TypeAlias = int | Expr


@dataclass(frozen=True, slots=True)
class Index(Expr):
    """A grid axis or a loop counter."""

    name: str

    def __str__(self) -> str:
        return self.name


@dataclass(frozen=True, slots=True)
class Plus(Expr):
    a: Ex
    b: Ex

    def __str__(self) -> str:
        if isinstance(self.b, int):
            return f"{self.a} {'-' if self.b < 0 else '+'} {abs(self.b)}"
        return f"{self.a} + {self.b}"


@dataclass(frozen=True, slots=True)
class Times(Expr):
    a: Expr
    factor: int

    def __str__(self) -> str:
        inner = f"({self.a})" if isinstance(self.a, Plus) else f"{self.a}"
        return f"{inner}*{self.factor}"


@dataclass(frozen=True, slots=True)
class Quotient(Expr):
    a: Expr
    divisor: int

    def __str__(self) -> str:
        inner = f"({self.a})" if isinstance(self.a, Plus) else f"{self.a}"
        return f"{inner}//{self.divisor}"


@dataclass(frozen=True, slots=True)
class Least(Expr):
    a: Ex
    b: Ex

    def __str__(self) -> str:
        return f"min({self.a}, {self.b})"


@dataclass(frozen=True, slots=True)
class Most(Expr):
    a: Ex
    b: Ex

    def __str__(self) -> str:
        return f"max({self.a}, {self.b})"


@dataclass(frozen=True, slots=True)
class Lookup(Expr):
    """The value of a table at `a`; `name` is what it is called."""

    name: str
    table: tuple[int, ...]
    a: Expr

    def __str__(self) -> str:
        return f"{self.name}[{self.a}]"


# The constructors fold constants; they also accept numpy arrays, which is how `at` evaluates over a grid.


def plus(a: Ex, b: Ex) -> Ex:
    """a + b."""
    if isinstance(a, Expr) or isinstance(b, Expr):
        if isinstance(a, int):
            a, b = b, a
        if isinstance(b, int):
            if b == 0:
                return a
            if isinstance(a, Plus) and isinstance(a.b, int):
                return plus(a.a, a.b + b)
        return Plus(a, b)
    return a + b


def times(a: Ex, factor: int) -> Ex:
    """a * factor."""
    if not isinstance(a, Expr):
        return a * factor
    if factor in (0, 1):
        return a if factor else 0
    return times(a.a, a.factor * factor) if isinstance(a, Times) else Times(a, factor)


def quotient(a: Ex, divisor: int) -> Ex:
    """Floor of a / divisor, for a positive constant divisor."""
    if divisor < 1:
        raise ValueError(f"an index expression can be divided by a positive constant only, not by {divisor}")
    if not isinstance(a, Expr):
        return a // divisor
    return a if divisor == 1 else Quotient(a, divisor)


def least(a: Any, b: Any) -> Any:
    """min(a, b)."""
    return _extreme(a, b, Least, min, "minimum")


def most(a: Any, b: Any) -> Any:
    """max(a, b)."""
    return _extreme(a, b, Most, max, "maximum")


def _extreme(a: Any, b: Any, node: Any, ints: Any, ufunc: str) -> Any:
    if isinstance(a, Expr) or isinstance(b, Expr):
        if isinstance(a, node) and isinstance(a.b, int) and isinstance(b, int):
            a, b = a.a, ints(a.b, b)
        return a if a == b else node(a, b)
    if isinstance(a, int) and isinstance(b, int):
        return ints(a, b)
    import numpy as np

    return getattr(np, ufunc)(a, b)


def lookup(name: str, table: tuple[int, ...], a: Any) -> Any:
    """table[a]; what is the same everywhere is a number."""
    if len(set(table)) == 1:
        return table[0]
    if isinstance(a, Expr):
        return Lookup(name, table, a)
    if isinstance(a, int):
        return table[a]
    import numpy as np

    return np.array(table)[a]


def cdiv(a: Any, divisor: int) -> Any:
    """a / divisor, rounded up."""
    return (a + (divisor - 1)) // divisor


def at(e: Any, env: Mapping[str, Any]) -> Any:
    """`e` with the indices in `env` replaced by ints, numpy arrays or other expressions.

    Indices that `env` lacks stay, so the result is an int (or array) only when all are given.
    """
    match e:
        case Index(name):
            return env.get(name, e)
        case Plus(a, b):
            return plus(at(a, env), at(b, env))
        case Times(a, factor):
            return times(at(a, env), factor)
        case Quotient(a, divisor):
            return quotient(at(a, env), divisor)
        case Least(a, b):
            return least(at(a, env), at(b, env))
        case Most(a, b):
            return most(at(a, env), at(b, env))
        case Lookup(name, table, a):
            return lookup(name, table, at(a, env))
        case _:
            return e


def named(e: Ex, names: Mapping[Ex, str]) -> Ex:
    """`e` with the subexpressions in `names` replaced by indices of these names, and nothing simplified."""
    if isinstance(e, Expr) and e in names:
        return Index(names[e])
    match e:
        case Plus(a, b) | Least(a, b) | Most(a, b):
            return type(e)(named(a, names), named(b, names))
        case Times(a, n) | Quotient(a, n):
            return type(e)(cast(Expr, named(a, names)), n)
        case Lookup(name, table, a):
            return Lookup(name, table, cast(Expr, named(a, names)))
        case _:
            return e


def indices(e: Ex) -> frozenset[str]:
    """The names of the indices that `e` depends on."""
    match e:
        case Index(name):
            return frozenset((name,))
        case Plus(a, b) | Least(a, b) | Most(a, b):
            return indices(a) | indices(b)
        case Times(a, _) | Quotient(a, _) | Lookup(_, _, a):
            return indices(a)
        case _:
            return frozenset()


def affine(e: Ex) -> tuple[int, dict[str, int]] | None:
    """(constant, {index: coefficient}) of an affine expression, None for any other."""
    match e:
        case int():
            return e, {}
        case Index(name):
            return 0, {name: 1}
        case Times(a, factor):
            inner = affine(a)
            return inner and (inner[0] * factor, {k: c * factor for k, c in inner[1].items()})
        case Plus(a, b):
            left, right = affine(a), affine(b)
            if left is None or right is None:
                return None
            names = left[1] | right[1]
            return left[0] + right[0], {k: left[1].get(k, 0) + right[1].get(k, 0) for k in names}
        case _:
            return None
