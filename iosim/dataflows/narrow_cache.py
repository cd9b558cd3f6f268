"""K and V from a cache in 8 bits beside a Q in 16: what that changes in a program, whichever dataflow wrote it.

Each token of a K/V head has an fp32 scale for its row of K and one for its row of V.  A block loads rows and scales,
widens the rows and multiplies them before the matrix unit takes them, so values are those of the widened cache.
"""

from __future__ import annotations

from dataclasses import replace

from iosim.program import Compute, Load, Loop, Node, Program, Scales, Tensor, Tile, View, check

CACHED = ("K", "V")
SCALE_BYTES = 4


def narrowed(program: Program, dtype: str) -> Program:
    """The program with K and V in `dtype`; raises ProgramError where the result breaks a rule of the language."""
    tensors: dict[str, Tensor] = {}
    for tensor in program.tensors:
        tensors[tensor.name] = replace(tensor, dtype=dtype) if tensor.name in CACHED else tensor
        if tensor.name in CACHED:
            name = f"S{tensor.name}"
            tensors[name] = Tensor(name, tensor.shape[:-1], "fp32", "in", Scales(tensor.name, 1))
    kernels = tuple(replace(kernel, body=_body(kernel.body, tensors)) for kernel in program.kernels)
    made = replace(program, tensors=tuple(tensors.values()), kernels=kernels)
    check(made)
    return made


def _body(body: tuple[Node, ...], tensors: dict[str, Tensor]) -> tuple[Node, ...]:
    """A body whose loads of the cache are of narrow rows, each widened after the last load that stands beside it."""
    out: list[Node] = []
    waiting: list[Node] = []
    for node in body:
        if isinstance(node, Load) and node.view.tensor.name in CACHED:
            narrow, rows, scale = _loads(node, tensors)
            out += [rows, scale]
            phase = f"widen {node.tile.name}"
            waiting += [
                Compute("cast", node.tile, (narrow,), (), phase, when=node.when),
                Compute("mul", node.tile, (node.tile, scale.tile), (), phase, when=node.when),
            ]
            continue
        if not isinstance(node, Load):
            out += waiting
            waiting = []
        out.append(replace(node, body=_body(node.body, tensors)) if isinstance(node, Loop) else node)
    return tuple(out + waiting)


def _loads(node: Load, tensors: dict[str, Tensor]) -> tuple[Tile, Load, Load]:
    """The narrow tile, its load, and the load of the scales of its rows."""
    tensor, scales = tensors[node.view.tensor.name], tensors[f"S{node.view.tensor.name}"]
    narrow = Tile(f"{node.tile.name}8", node.tile.shape, tensor.dtype)
    column = Tile(f"s{node.tile.name}", (node.tile.shape[0], 1), scales.dtype)
    return (
        narrow,
        Load(narrow, View(tensor, node.view.index), narrow.name, node.when),
        Load(column, View(scales, node.view.index[:-1]), column.name, node.when),
    )
