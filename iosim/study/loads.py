"""How often the keys and values of grouped queries are loaded: for each query head of a group, or once for all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from iosim.index import indices
from iosim.memory.cache import DeviceTraffic
from iosim.problem import Attention
from iosim.program import Compute, Kernel, Load, Loop, Program, Span, View, walk


@dataclass(frozen=True, slots=True)
class Loads:
    """Of K or V: how often each byte is loaded on average, from HBM as the blocks ask and from DRAM behind the L2.

    `per_head`: some block, or iteration, of every query head of a group loads it anew.
    """

    hbm: float
    dram: float
    per_head: bool


def key_loads(a: Attention, program: Program, device: DeviceTraffic) -> dict[str, Loads]:
    """By tensor, K and V if the program takes them; empty where no query heads share any."""
    out: dict[str, Loads] = {}
    for tensor in program.tensors:
        if a.group == 1 or tensor.role != "in" or tensor.name not in ("K", "V"):
            continue
        flows = [f for f in device.flows if f.flow.tensor == tensor.name]
        out[tensor.name] = Loads(
            sum(f.flow.hbm_bytes for f in flows) / tensor.bytes,
            sum(f.dram_read_bytes for f in flows) / tensor.bytes,
            any(_per_head(a, kernel, tensor.name) for kernel in program.kernels),
        )
    return out


def _per_head(a: Attention, kernel: Kernel, name: str) -> bool:
    """Whether a load of the tensor runs for each index that tells apart the query heads of a group."""
    views = list(_views(kernel))
    queries = [view for view, _, _ in views if len(view.tensor.shape) > 1 and view.tensor.shape[1] == a.heads]
    queries = [view for view in queries if not isinstance(view.index[1], Span)]  # heads as rows of a tile share a load
    heads = frozenset[str]().union(*(indices(view.starts[1]) for view in queries))
    wide = {axis for axis, n in kernel.grid if n > 1}
    for view, loads, loops in views:
        if loads and view.tensor.name == name:
            around = wide | {loop.index for loop in loops}
            if (heads - view.indices) & around:
                return True
    return False


def _views(kernel: Kernel) -> Iterator[tuple[View, bool, tuple[Loop, ...]]]:
    """Of each load and store: its view, whether it loads, and the loops around it."""
    for node, loops in walk(kernel.body):
        if not isinstance(node, Compute):
            yield node.view, isinstance(node, Load), loops
