"""flash3: flash2's program in another order, each part of which can be switched off."""

from __future__ import annotations

from functools import cache
from itertools import product

import pytest

from iosim import Attention, run
from iosim.errors import InputError
from iosim.schedule import Order, Role, Step
from iosim.study.run import Run

SWITCHES = ("producer", "pingpong", "overlap")
ALL = tuple(product((True, False), repeat=3))


@cache
def timed(*on: bool, hardware: str = "h200-sxm", fidelity: str = "fair", n: int = 8192, heads: int = 16) -> Run:
    a = Attention(n_q=n, d=128, heads=heads)
    fields = dict(zip(SWITCHES, on, strict=True))
    return run(a, dataflow="flash3", hardware=hardware, schedule=fields, fidelity=fidelity, check=False)


def seconds(*on: bool) -> float:
    return timed(*on).seconds or 0


@pytest.mark.slow
def test_all_three_together_are_the_fastest_of_the_ablation() -> None:
    """On H200, n = 8192, d = 128.  What counts most is that softmax falls under products, though the power limit takes
    a part of it back.  Turns cost what a barrier costs and bring little, as groups fall out of step by themselves."""
    best = seconds(True, True, True)
    assert all(best <= 1.02 * seconds(*on) for on in ALL)
    assert best < 0.96 * seconds(True, True, False)
    assert best < 0.86 * seconds(False, False, False)
    assert seconds(True, False, False) < 0.97 * seconds(False, False, False)


def test_without_any_it_is_flash2() -> None:
    r = timed(False, False, False)
    plain = run(
        r.problem,
        dataflow="flash2",
        hardware="h200-sxm",
        schedule={"block_q": 128, "block_k": 128, "stages": (2,)},
        check=False,
    )
    assert r.seconds == plain.seconds
    assert r.ledger.by_tensor == plain.ledger.by_tensor


@pytest.mark.slow
@pytest.mark.parametrize("on", ALL)
@pytest.mark.parametrize("hardware", ["h200-sxm", "mp31", "a100-sxm-80gb"])
def test_every_part_can_be_switched_off(hardware: str, on: tuple[bool, ...]) -> None:
    whole = timed(True, True, True, hardware=hardware, n=1024)
    for fidelity in ("fair", "chip"):
        r = timed(*on, hardware=hardware, n=1024, heads=2, fidelity=fidelity)
        assert r.timeline is not None
        ledger = {(t, way): n for t, ways in r.ledger.by_tensor.items() for way, n in ways.items()}
        assert r.timeline.moved == ledger
        for unit in r.timeline.units.values():
            assert unit.busy_ps + sum(unit.stalls_ps.values()) == unit.instances * r.timeline.makespan_ps
    r = timed(*on, hardware=hardware, n=1024)
    assert (r.schedule.block_q, r.schedule.block_k) == (whole.schedule.block_q, whole.schedule.block_k)


def test_it_says_what_is_on() -> None:
    assert timed(True, True, True).why.endswith(
        "; a producer, 2 consumer warp groups in ping-pong, softmax under products of its group"
    )
    assert timed(False, False, False).why.endswith(
        "; no producer, 2 consumer warp groups, softmax after products of its group"
    )


def test_three_consumers_where_they_fit() -> None:
    r = run(Attention(n_q=8192, d=64, heads=32), dataflow="flash3", hardware="h200-sxm", check=False)
    assert (r.schedule.block_q, r.schedule.groups) == (192, 3)
    assert r.footprint.threads == 4 * 128


def test_a_given_order_is_kept() -> None:
    steps = tuple(Step("run", name) for name in ("k", "v", "qk", "softmax", "rescale", "pv"))
    order = Order((Role("groups", 2, steps),))
    r = run(
        Attention(n_q=256, d=64),
        dataflow="flash3",
        hardware="h200-sxm",
        schedule={"orders": {"j": order}},
        check=False,
    )
    assert r.schedule.orders == {"j": order}


@pytest.mark.parametrize("hardware", ["mi300x", "mp22"])
def test_it_is_refused_where_copies_are_not_asynchronous(hardware: str) -> None:
    with pytest.raises(InputError, match=f"flash3: {hardware} has no asynchronous copies, on which its order rests"):
        run(Attention(n_q=256, d=64), dataflow="flash3", hardware=hardware, check=False)


def test_a_switch_is_true_or_false() -> None:
    with pytest.raises(InputError, match="overlap: 1 is not True or False"):
        run(Attention(n_q=256, d=64), dataflow="flash3", schedule={"overlap": 1}, check=False)
