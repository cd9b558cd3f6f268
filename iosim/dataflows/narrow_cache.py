"""K and V from a cache in 8 bits beside a Q in 16: what that changes in a program, whichever dataflow wrote it.

Each K/V head has fp32 scales beside its K and its V, one for each token or one for all tokens.  A block loads rows and
scales, widens the rows and multiplies them before the matrix unit takes them, so that values are those of the widened
cache, rounded to the dtype of Q.  One scale for all is loaded once, before the first row.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from iosim.index import cdiv
from iosim.program import Compute, Load, Loop, Node, Program, Scales, Span, Tensor, Tile, View, check, walk

KEPT = ("K", "V")
SCALE_BYTES = 4
PER = ("token", "head")


def narrowed(program: Program, dtype: str, per: str = "token") -> Program:
    """The program with K and V in `dtype`, and a scale `per` token or head.

    Raises ProgramError where the result breaks a rule of the language.
    """
    tensors: dict[str, Tensor] = {}
    for tensor in program.tensors:
        tensors[tensor.name] = replace(tensor, dtype=dtype) if tensor.name in KEPT else tensor
        if tensor.name in KEPT:
            name, rows = f"S{tensor.name}", 1 if per == "token" else tensor.shape[-2]
            shape = (*tensor.shape[:-2], cdiv(tensor.shape[-2], rows))
            tensors[name] = Tensor(name, shape, "fp32", "in", Scales(tensor.name, rows))
    kernels = tuple(replace(kernel, body=_Narrower(tensors, per).body(kernel.body)) for kernel in program.kernels)
    made = replace(program, tensors=tuple(tensors.values()), kernels=kernels)
    check(made)
    return made


@dataclass(frozen=True, slots=True)
class _Narrower:
    """What changes loads of the cache, of which `tensors` has the narrow forms."""

    tensors: dict[str, Tensor]
    per: str

    def body(self, body: tuple[Node, ...], depth: int = 0) -> tuple[Node, ...]:
        """A body whose loads of the cache are of narrow rows, each widened after the last load that stands beside it.

        Scales that do not change from row to row are loaded before the outermost loop.
        """
        out: list[Node] = []
        waiting: list[Node] = []
        for node in body:
            if isinstance(node, Load) and node.view.tensor.name in KEPT:
                loads, widening = self._loads(node)
                out += loads if self.per == "token" or not depth else loads[:1]
                waiting += widening
                continue
            if not isinstance(node, Load):
                out += waiting
                waiting = []
            if isinstance(node, Loop):
                if self.per == "head" and not depth:
                    out += self._scales(node)
                node = replace(node, body=self.body(node.body, depth + 1))
            out.append(node)
        return tuple(out + waiting)

    def _scales(self, loop: Loop) -> Iterator[Load]:
        """The loads of the scales that a loop needs."""
        for node, _ in walk(loop.body):
            if isinstance(node, Load) and node.view.tensor.name in KEPT:
                yield self._loads(node)[0][1]

    def _loads(self, node: Load) -> tuple[tuple[Load, Load], tuple[Node, ...]]:
        """The loads of a narrow tile and of the scales of its rows; and what makes the wide tile of them."""
        tensor, scales = self.tensors[node.view.tensor.name], self.tensors[f"S{node.view.tensor.name}"]
        narrow = Tile(f"{node.tile.name}8", node.tile.shape, tensor.dtype)
        each = self.per == "token"
        column = Tile(f"s{node.tile.name}", (node.tile.shape[0] if each else 1, 1), scales.dtype)
        of_scales = node.view.index[:-1] if each else (*node.view.index[:-2], Span(0, 1))
        loads = (
            Load(narrow, View(tensor, node.view.index), narrow.name, node.when),
            Load(column, View(scales, of_scales), column.name, node.when if each else None),
        )
        phase = f"widen {node.tile.name}"
        return loads, (
            Compute("cast", node.tile, (narrow,), (), phase, when=node.when),
            Compute("mul", node.tile, (node.tile, column), (), phase, when=node.when),
        )
