"""The numeric check: replay a program, and compare every element with float64 under a bound that has a derivation.

What a program computes is known by the names and shapes of its inputs and outputs, from one table, `KNOWN`; the bounds
stand in the modules that it names.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from iosim.check.backward import backward_memory, check_backward
from iosim.check.forward import check_forward, forward_memory
from iosim.check.host import available_memory
from iosim.check.inputs import Latent, Normal, Source, large_logits
from iosim.check.outcome import Check, skipped
from iosim.check.softmax import check_softmax, softmax_memory
from iosim.errors import InputError

if TYPE_CHECKING:
    from iosim.problem import Attention
    from iosim.program import Program

__all__ = [
    "BUDGET",
    "KNOWN",
    "Check",
    "Normal",
    "Source",
    "check",
    "check_all",
    "large_logits",
    "memory_needed",
    "skipped",
]

LATENT_ELEMENTS, LATENT_ROWS = 2**27, 32  # copies of K and V that are made; above, so many rows of the budget
BUDGET = 2**25  # (query, key) pairs checked: two heads of n = 4096


BESIDE = {"bias", "sinks", "P dropped", "kept"}


@dataclass(frozen=True, slots=True)
class Known:
    """A computation whose result is known: of these outputs, the optional ones left out or not, from these inputs.

    A problem may have inputs beside them, which change scores and weights.
    """

    inputs: str
    outputs: str
    optional: str
    compare: Callable[[Attention, Sequence[Program], Source, int, int], list[Check]]
    memory: Callable[[Attention, Sequence[Program]], int]

    def fits(self, program: Program) -> bool:
        """Whether the program has these inputs and outputs."""
        made = _names(program, "out")
        return _names(program, "in") - BESIDE == set(self.inputs.split()) and set(self.outputs.split()) <= made <= set(
            self.outputs.split() + self.optional.split()
        )


def _check_latent(a: Attention, programs: Sequence[Program], source: Source, seed: int, budget: int) -> list[Check]:
    """As check_forward, for programs that take the first columns of K for V.

    All heads read one K, of which float64 takes a copy for each: where that is much, some heads stand for all.
    """
    if a.batch * a.heads * a.n_k * (a.d + a.d_v) > LATENT_ELEMENTS:
        budget = min(budget, LATENT_ROWS * a.n_k)
    return check_forward(a, programs, Latent(source, a.d_v), seed, budget)


KNOWN = (
    Known("Q K V", "O", "L", check_forward, forward_memory),
    Known("Q K", "O", "L", _check_latent, forward_memory),
    Known("S", "P", "L", check_softmax, softmax_memory),
    Known("Q K V O dO L", "dQ dK dV", "dbias dsinks", check_backward, backward_memory),
    Known("Q K V dO P", "dQ dK dV", "dbias", check_backward, backward_memory),
)


def check(
    attention: Attention, program: Program, *, seed: int = 0, budget: int = BUDGET, inputs: Source | None = None
) -> Check:
    """Replay `program` and compare its outputs with float64; see `check_all`."""
    return check_all(attention, (program,), seed=seed, budget=budget, inputs=inputs)[0]


def check_all(
    attention: Attention,
    programs: Sequence[Program],
    *,
    seed: int = 0,
    budget: int = BUDGET,
    inputs: Source | None = None,
) -> tuple[Check, ...]:
    """Check several programs of one problem, those that compute the same against one float64 computation.

    All rows are checked while they have no more than `budget` (query, key) pairs; above that, half as many: blocks of
    rows of sampled heads, last, first, then random ones.  A program whose outputs are not known is skipped, with a
    reason.  Raises InputError when the host's memory cannot hold one head.
    """
    source = Normal(attention=attention, seed=seed) if inputs is None else inputs
    unknown = {n: _unknown(attention, program) for n, program in enumerate(programs)}
    out = {n: skipped(attention, why) for n, why in unknown.items() if why}
    for known in KNOWN:
        chosen = [n for n, program in enumerate(programs) if n not in out and known.fits(program)]
        if chosen:
            group = [programs[n] for n in chosen]
            _require_memory(known.memory(attention, group))
            out |= zip(chosen, known.compare(attention, group, source, seed, budget), strict=True)
    return tuple(out[n] for n in range(len(programs)))


def memory_needed(attention: Attention, programs: Sequence[Program] = ()) -> int:
    """Bytes that a check of these programs holds at least, of flash2's kind where there are none."""
    groups = [(known, [p for p in programs if known.fits(p)]) for known in KNOWN]
    return max(
        (known.memory(attention, group) for known, group in groups if group or known is KNOWN[0]),
        default=0,
    )


def _names(program: Program, role: str) -> set[str]:
    return {t.name for t in program.tensors if t.role == role and t.scales is None}


def _unknown(a: Attention, program: Program) -> str:
    """Why it is not known what a program should compute; empty where it is."""
    takes, gives = (", ".join(sorted(_names(program, role))) or "nothing" for role in ("in", "out"))
    if not any(known.fits(program) for known in KNOWN):
        have = "; ".join(f"{k.outputs} from {k.inputs}" for k in KNOWN)
        return f"not checked: it is not known what {gives} from {takes} should be (known are {have})"
    query, key = (a.batch, a.heads, a.n_q), (a.batch, a.kv_heads, a.n_k)
    shapes = {"L": query, "S": (*query, a.n_k), "P": (*query, a.n_k)}
    shapes |= {prefix + "Q": (*query, a.d) for prefix in ("", "d")} | {
        prefix + "O": (*query, a.d_v) for prefix in ("", "d")
    }
    shapes |= {prefix + "K": (*key, a.d) for prefix in ("", "d")} | {
        prefix + "V": (*key, a.d_v) for prefix in ("", "d")
    }
    shapes |= {"bias": a.bias_shape, "dbias": a.bias_shape, "sinks": (a.heads,), "dsinks": (a.heads,)}
    shapes |= dict.fromkeys(("P dropped", "kept"), (*query, a.n_k))
    for t in program.tensors:
        if t.role != "scratch" and t.scales is None and t.shape != shapes[t.name]:
            return f"not checked: {t.name} has the shape {t.shape}, that of the problem is {shapes[t.name]}"
    return ""


def _require_memory(need: int) -> None:
    if need > (have := available_memory()):
        raise InputError(
            f"the numeric check of one head needs {need / 1e9:.1f} GB of memory and this host has {have / 1e9:.1f} GB "
            f"free; --no-check leaves it out"
        )
