"""Latent attention with absorbed matrices and without: what prefill and decoding read of keys and values, and take.

Three forms of one computation (DeepSeek-AI 2024, arXiv 2405.04434, section 2.1), of a latent of `rank` numbers and
`rope` rotated ones a token:

    absorbed   queries meet the latent itself (dataflow mla); the matrices that make keys and values of it are
               absorbed into queries and outputs: a product for each query and head
    expanded   the cache has keys and values of every head, made once, when their token came
    anew       the cache has the latent, of which each step makes keys and values of all tokens that it sees; in a
               prefill, where all tokens are new, that is what expanded does

The attention is a run.  The products beside it are bounds from below: FLOPs at the matrix unit's peak, or bytes at that
of DRAM, whichever takes longer; their weights are read once in a step, in every form.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from iosim.dataflows import load_dataflow
from iosim.dtypes import dtype
from iosim.problem import Attention
from iosim.study.run import evaluate, plan_of, require_formats

if TYPE_CHECKING:
    from iosim.hardware import Hardware
    from iosim.study.models import Latent
    from iosim.study.run import Run

FORMS = ("absorbed", "expanded", "anew")


@dataclass(frozen=True, slots=True)
class Products:
    """What turns latents into keys and values, or absorbs that: FLOPs, bytes, and seconds at least (None: unknown)."""

    flops: int
    bytes: int
    seconds: float | None


@dataclass(frozen=True, slots=True)
class Form:
    """One form of one step: `queries` new tokens a sequence that see `keys`; `cache_bytes` are those of a token."""

    form: str
    queries: int
    keys: int
    cache_bytes: int
    run: Run
    products: Products

    @property
    def asked_bytes(self) -> int:
        """Bytes of K and V (or of the latent) that all blocks load."""
        read = self.run.ledger.by_tensor
        return sum(read[name].get("read", 0) for name in "KV" if name in read)

    @property
    def dram_bytes(self) -> int:
        """What of them comes from DRAM."""
        return sum(f.dram_read_bytes for f in self.run.device.flows if f.flow.tensor in ("K", "V"))

    @property
    def seconds(self) -> float | None:
        """The attention's time and the products' least one."""
        own, more = self.run.seconds, self.products.seconds
        return None if own is None or more is None else own + more


@dataclass(frozen=True, slots=True)
class LatentStudy:
    """Decoding at several contexts and a prefill, in each form."""

    sizes: Latent
    heads: int
    batch: int
    machine: Hardware
    decode: tuple[Form, ...]
    prefill: tuple[Form, ...]


def latent(
    sizes: Latent,
    heads: int,
    batch: int,
    contexts: Sequence[int],
    prompt: int,
    machine: Hardware,
    data: str = "bf16",
    note: Callable[[str], None] = lambda _: None,
) -> LatentStudy:
    """Run all forms; raises InputError for sizes that a problem cannot have, or formats that the machine lacks."""

    def form(name: str, queries: int, keys: int) -> Form:
        note(f"{name}, {queries:,} queries of {keys:,} keys")
        absorbed = name == FORMS[0]
        a = Attention(
            n_q=queries, n_k=keys, batch=batch, heads=heads, causal=queries > 1, dtype=data,
            d=sizes.cached if absorbed else sizes.d, d_v=sizes.rank if absorbed else sizes.value,
            kv_heads=1 if absorbed else heads,
        )  # fmt: skip
        flow = load_dataflow("mla" if absorbed else "split-kv" if queries == 1 else "flash2")
        require_formats(a, machine, flow)
        run = evaluate(plan_of(a, machine, flow, {}))
        numbers = heads * (sizes.d + sizes.value) if name == FORMS[1] else sizes.cached
        return Form(name, queries, keys, numbers * dtype(a.dtype).bytes, run, _products(name, a, sizes, machine))

    decode = tuple(form(name, 1, keys) for keys in contexts for name in FORMS)
    return LatentStudy(sizes, heads, batch, machine, decode, tuple(form(name, prompt, prompt) for name in FORMS[::2]))


def _products(name: str, a: Attention, sizes: Latent, machine: Hardware) -> Products:
    """The products of a form: of each query, of each new token (as many), or of each token that is seen.

    With absorbed matrices a query of `nope` numbers becomes one of `rank`, and an output of `rank` numbers one of
    `value`; else `rank` numbers become `nope` and `value`: the same FLOPs for a query as for a token.
    """
    size, tokens = dtype(a.dtype).bytes, a.n_k if name == FORMS[2] else a.n_q
    made = a.heads * (sizes.nope + sizes.value)
    flops = 2 * a.batch * tokens * sizes.rank * made
    moved = a.heads * 2 * sizes.rank if name == FORMS[0] else sizes.rank  # numbers on the latent's side
    bytes_ = size * (sizes.rank * made + a.batch * tokens * (moved + made))
    rate, count = machine.matrix_rate(a.dtype), machine.processors
    if rate is None or count is None:
        return Products(flops, bytes_, None)
    memory = machine.hbm.bandwidth * machine.hbm.read_efficiency
    return Products(flops, bytes_, max(flops / (rate * count), bytes_ / memory))
