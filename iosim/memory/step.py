"""Device memory over a training step: which tensors are alive when, of a forward pass and of its backward pass.

The lifetime rule is that of a library with automatic differentiation.  A step is a sequence of calls: each kernel of an
unfused library (those whose operands the papers count once) is one, and so is a fused pass with all its kernels.

 1. A call has all its tensors from beginning to end, its scratch included.
 2. Inputs are there for the whole step.  A tensor that a call makes is there from then on: outputs to the end of the
    step, others to the last call of either pass that touches them.  So S goes when P is there, and P is kept for dS.
 3. What the library holds beside the programs' tensors is listed in `HELD`, and nowhere else.

The step is one of many, as in training and in a benchmark: gradients of the step before are still there.

This reproduces Table 21 of the FlashAttention paper (Dao et al. 2022, arXiv 2205.14135), whose MB are MiB: per head, in
elements of the data dtype, 4 N^2 + 10 N d for the unfused library and 13 N d and two fp32 row statistics for the fused
one.  The lists are our reading, as the paper does not give any; the sums leave little choice:

     4 N^2   P, dP, dS and P * dP, in the softmax's gradient
    10 N d   Q, K, V, O, dO and dV; Q.grad, K.grad and V.grad; K / sqrt(d)
    13 N d   Q, K, V, O, dO, dQ, dK and dV; Q.grad, K.grad and V.grad; dQ's sum in fp32, which is two

Up to 256 keys the paper's kernel has one block of keys and no sum of dQ: two less, which is what the table shows there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from iosim.errors import InputError
from iosim.program import Compute, Kernel, Program, Tensor, walk


@dataclass(frozen=True, slots=True)
class Held:
    """A tensor of the size of `like` that a library holds beside those of the programs.

    It is there from the call that has the kernel `since` to the one that has `until`, where a step has both; None is
    the beginning or the end of the step.
    """

    name: str
    like: str
    since: str | None
    until: str | None
    why: str


_GRAD = "of the step before: the new gradient is added to it"
HELD = (
    Held("Q.grad", "Q", None, None, _GRAD),
    Held("K.grad", "K", None, None, _GRAD),
    Held("V.grad", "V", None, None, _GRAD),
    # The paper's benchmark takes q @ (k / sqrt(d)), and the product keeps its operands for the gradient dQ.
    Held("K / sqrt(d)", "K", "scores", "dQ", "the scaled operand of S, kept for dQ"),
    # PyTorch's softmax gradient begins with grad * output; S kept until then would take as much.
    Held("P * dP", "P", "dS", "dS", "made by the library's softmax gradient"),
)


@dataclass(frozen=True, slots=True)
class Alive:
    """A tensor that is in device memory at one time; `why` for what no program has, whose role is "held"."""

    tensor: str
    bytes: int
    role: str
    why: str = ""


@dataclass(frozen=True, slots=True)
class StepMemory:
    """The most that a training step holds at one time, first in the call of `kernels`: `alive` adds up to it."""

    kernels: tuple[str, ...]
    alive: tuple[Alive, ...]

    @property
    def peak_bytes(self) -> int:
        """Bytes of all that is alive."""
        return sum(t.bytes for t in self.alive)

    @property
    def allocated_bytes(self) -> int:
        """The same without the inputs."""
        return sum(t.bytes for t in self.alive if t.role != "in")


def joined(forward: Program, backward: Program) -> tuple[Tensor, ...]:
    """The tensors of both passes; what the backward pass takes from the forward pass is one tensor.

    Raises InputError where it takes what the other does not make, or where two tensors or kernels have one name.
    """
    made = {t.name: t for t in forward.tensors}
    outputs = {f"d{t.name}" for t in forward.tensors if t.role == "out"}
    both = f"{forward.name} and {backward.name}"
    if twice := sorted({k.name for k in forward.kernels} & {k.name for k in backward.kernels}):
        raise InputError(f"{both}: both have a kernel {twice[0]}")
    for t in backward.tensors:
        known = made.get(t.name)
        if known is None and t.role == "in" and t.name not in outputs:
            raise InputError(f"{both}: the backward pass takes {t.name}, which the forward pass does not make")
        if known is not None and (t.role != "in" or (known.shape, known.dtype) != (t.shape, t.dtype)):
            raise InputError(f"{both}: both have a tensor {t.name}, and it is not the same")
    return forward.tensors + tuple(t for t in backward.tensors if t.name not in made)


def step_memory(forward: Program, backward: Program) -> StepMemory:
    """What is alive when most is, see the rule above; raises InputError as `joined` does."""
    tensors = joined(forward, backward)
    calls = [*_calls(forward), *_calls(backward)]
    return _most(calls, [*_own(tensors, calls), *_held(tensors, calls)])


def pass_memory(program: Program) -> StepMemory:
    """The same of one pass alone, of which a library keeps nothing beside the program's tensors."""
    calls = list(_calls(program))
    return _most(calls, list(_own(program.tensors, calls)))


def _most(calls: Sequence[Sequence[Kernel]], lives: Sequence[tuple[Alive, int, int]]) -> StepMemory:
    """What is alive in the call with most, of tensors with their first and last call."""
    at = [tuple(alive for alive, first, last in lives if first <= n <= last) for n in range(len(calls))]
    most = max(range(len(calls)), key=lambda n: sum(t.bytes for t in at[n]))
    return StepMemory(tuple(k.name for k in calls[most]), at[most])


def _calls(program: Program) -> Iterator[tuple[Kernel, ...]]:
    for library, kernels in groupby(program.kernels, key=lambda k: k.operands_once):
        if library:
            yield from ((kernel,) for kernel in kernels)
        else:
            yield tuple(kernels)


def _own(tensors: Sequence[Tensor], calls: Sequence[Sequence[Kernel]]) -> Iterator[tuple[Alive, int, int]]:
    """The tensors of the programs, each with its first and last call."""
    end = len(calls) - 1
    touched = [{name for kernel in call for name in _touched(kernel)} for call in calls]
    for t in tensors:
        used = [n for n, names in enumerate(touched) if t.name in names]
        yield Alive(t.name, t.bytes, t.role), 0 if t.role == "in" else used[0], used[-1] if t.role == "scratch" else end


def _touched(kernel: Kernel) -> set[str]:
    return {node.view.tensor.name for node, _ in walk(kernel.body) if not isinstance(node, Compute)}


def _held(tensors: Sequence[Tensor], calls: Sequence[Sequence[Kernel]]) -> Iterator[tuple[Alive, int, int]]:
    """What applies of `HELD`, each with its first and last call."""
    sizes = {t.name: t.bytes for t in tensors}
    place = {kernel.name: n for n, call in enumerate(calls) for kernel in call}
    for held in HELD:
        first = 0 if held.since is None else place.get(held.since)
        last = len(calls) - 1 if held.until is None else place.get(held.until)
        if held.like in sizes and first is not None and last is not None:
            yield Alive(held.name, sizes[held.like], "held", held.why), first, last
