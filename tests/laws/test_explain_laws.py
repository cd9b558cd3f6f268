"""The explanation's products are the ledger's numbers, whatever the dataflow, the problem and the schedule."""

from __future__ import annotations

from itertools import product
from math import prod

import pytest
from hypothesis import assume, given, settings

from iosim.dataflows import load_dataflow
from iosim.dtypes import dtype
from iosim.index import at
from iosim.interpreters.ledger import ledger, parts
from iosim.problem import Attention
from iosim.program import Compute, extent, walk
from iosim.schedule import Schedule
from iosim.study.explain import hbm_steps
from tests.dataflow_checks import CHECKS, suited
from tests.laws.test_dataflow_laws import problems, schedules


@pytest.mark.parametrize("name", CHECKS)
@settings(max_examples=10)
@given(a=problems(longest=20), s=schedules())
def test_steps_give_the_bytes_of_the_ledger(name: str, a: Attention, s: Schedule) -> None:
    a = suited(name, a)
    assume(not load_dataflow(name).refusal(a))
    program = load_dataflow(name)(a, s)
    counted = ledger(program)
    for direction, whole in (
        ("read", counted.hbm_read_bytes),
        ("write", counted.hbm_write_bytes),
        ("add", counted.hbm_add_bytes),
    ):
        steps = hbm_steps(program, counted, direction)
        assert sum(prod(step.factors) for step in steps) == whole
        named = [code.partition(", in loop")[0] for step in steps for code in step.program]
        assert sorted(named) == sorted(f.text for f in counted.flows if f.direction == direction and f.hbm_bytes)


@pytest.mark.parametrize("name", ["flash2", "flash-backward", "split-kv"])
@settings(max_examples=5)
@given(a=problems(longest=6), s=schedules(largest=4))
def test_the_parts_of_a_load_are_what_counting_one_by_one_finds(name: str, a: Attention, s: Schedule) -> None:
    """Their product is the number of elements inside the tensor, added up over every iteration of every block."""
    program = load_dataflow(name)(a, s)
    counted = ledger(program)
    for kernel in program.kernels:
        for node, loops in walk(kernel.body):
            if isinstance(node, Compute):
                continue
            total = 0
            for values in product(*(range(n) for _, n in kernel.grid)):
                envs = [dict(zip((axis for axis, _ in kernel.grid), values, strict=True))]
                for loop in loops:
                    envs = [e | {loop.index: v} for e in envs for v in range(at(loop.lo, e), at(loop.hi, e))]
                when = node.when
                for env in envs:
                    if when is None or at(when.lo, env) <= env[when.index] < at(when.hi, env):
                        sizes = [getattr(ix, "size", 1) for ix in node.view.index]
                        each = zip(node.view.starts, sizes, node.view.tensor.shape, strict=True)
                        total += prod(extent(start, size, limit, env) for start, size, limit in each)
            assert prod(p.amount for p in parts(kernel, node, loops)) == total
            assert dtype(node.view.tensor.dtype).bytes * total == counted.flow(kernel.name, node).hbm_bytes
