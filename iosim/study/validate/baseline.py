"""What a plain roofline says of a measured row: FLOPs over the peak, or compulsory bytes over the bandwidth.

Compulsory bytes are each tensor that a call (or one of its kernels) reads and writes, once.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from iosim.dtypes import dtype
from iosim.hardware import Hardware
from iosim.memory.peak import splits
from iosim.problem import Attention
from iosim.study.validate.rows import Row

Names = tuple[str, ...]


class Work(NamedTuple):
    """Tensors read and written once, and matrix products over all (query, key) pairs."""

    reads: Names
    writes: Names
    products: int


CALLS: Mapping[str, Work] = {
    "forward": Work(("Q", "K", "V"), ("O",), 2),
    "backward": Work(("Q", "K", "V", "O", "dO", "L"), ("dQ", "dK", "dV"), 5),
    "both": Work(("Q", "K", "V", "dO"), ("O", "dQ", "dK", "dV"), 7),
}
KERNELS: Mapping[tuple[str, str], Work] = {
    ("forward", "attention"): CALLS["forward"],
    ("forward", "split"): Work(("Q", "K", "V"), ("O parts", "L parts"), 2),
    ("forward", "combine"): Work(("O parts", "L parts"), ("O", "L"), 0),
    ("forward", "scale"): Work(("Q",), ("Q",), 0),
    ("forward", "copy"): Work(("Q",), ("Q",), 0),
    ("forward", "matmul S"): Work(("Q", "K"), ("S",), 1),
    ("forward", "softmax"): Work(("S",), ("P",), 0),
    ("forward", "matmul O"): Work(("P", "V"), ("O",), 1),
    ("backward", "copy"): Work(("O",), ("O",), 0),
    ("backward", "dot"): Work(("O", "dO"), ("D",), 0),
    ("backward", "attention"): Work(("Q", "K", "V", "dO", "L", "D"), ("dQ sum", "dK", "dV"), 5),
    ("backward", "convert dQ"): Work(("dQ sum",), ("dQ",), 0),
    ("backward", "softmax"): Work(("S",), ("P",), 0),
    ("backward", "matmul dV"): Work(("P", "dO"), ("dV",), 1),
    ("backward", "matmul dP"): Work(("dO", "V"), ("dP",), 1),
    ("backward", "product"): Work(("dP", "P"), ("dP",), 0),
    ("backward", "softmax dS"): Work(("dP", "P"), ("dS",), 0),
    ("backward", "matmul dQ"): Work(("dS", "K"), ("dQ",), 1),
    ("backward", "matmul dK"): Work(("dS", "Q"), ("dK",), 1),
}


class Roofline(NamedTuple):
    """The roofline's value of a quantity (time in seconds, bytes), and compulsory bytes over bandwidth for time."""

    roofline: float
    bandwidth: float | None = None


def baselines(row: Row, machine: Hardware) -> dict[str, Roofline]:
    """The roofline by quantity; empty where the row's work or the machine's rate is not known."""
    a = row.problem
    work = CALLS.get(row.direction) if row.kernel is None else KERNELS.get((row.direction, row.kernel.role))
    rate = None if a is None else machine.matrix_rate(a.dtype)
    if a is None or work is None or rate is None or machine.processors is None:
        return {}
    sizes = _sizes(a, splits(row.implementation, row.direction, a, machine.processors))
    read, written = (sum(sizes[name] for name in names) for names in (work.reads, work.writes))
    stream = (read + written) / machine.hbm.bandwidth
    compute = work.products * a.pairs * (a.d + a.d_v) / (rate * machine.processors)
    return {
        "time": Roofline(max(stream, compute), stream),
        "time_estimated": Roofline(max(stream, compute), stream),
        "dram_read_bytes": Roofline(read),
        "dram_write_bytes": Roofline(written),
        "l2_bytes": Roofline(read + written),
    }


def _sizes(a: Attention, parts: int) -> dict[str, int]:
    """Bytes of every tensor by name."""
    element = dtype(a.dtype).bytes
    query, rows = a.batch * a.heads * a.n_q, a.batch * a.n_k * a.kv_heads
    q, o, k, v = (element * n for n in (query * a.d, query * a.d_v, rows * a.d, rows * a.d_v))
    s, line = element * query * a.n_k, 4 * query
    return {
        **dict.fromkeys(("Q", "dQ"), q), **dict.fromkeys(("O", "dO"), o),
        **dict.fromkeys(("K", "dK"), k), **dict.fromkeys(("V", "dV"), v),
        **dict.fromkeys(("S", "P", "dP", "dS"), s), **dict.fromkeys(("L", "D"), line),
        "dQ sum": 4 * query * a.d, "O parts": parts * 4 * query * a.d_v, "L parts": parts * line,
    }  # fmt: skip
