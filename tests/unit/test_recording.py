"""Recordings: spells put together, shares of a window, and one small pipeline worked out by hand."""

from __future__ import annotations

import pytest

from iosim.dataflows.flash2 import flash2
from iosim.errors import InputError
from iosim.hardware import load_hardware
from iosim.interpreters.engine import Spell, Who
from iosim.interpreters.ledger import ledger
from iosim.interpreters.recording import Recording, Watch, merged, shares, use_of
from iosim.interpreters.timeline import Fidelity, timeline
from iosim.memory.cache import dram_flows
from iosim.memory.onchip import footprints
from iosim.problem import Attention
from iosim.schedule import Schedule

A, B = (Who(block, "", 0, 1, "qk", 0, 0, 0) for block in (0, 1))


def test_spells_of_one_phase_that_follow_one_another_are_one() -> None:
    parts = [Spell(0, 3, None, A), Spell(3, 5, None, A), Spell(5, 6, None, B), Spell(7, 8, None, B)]
    assert merged(parts) == [Spell(0, 5, None, A), Spell(5, 6, None, B), Spell(7, 8, None, B)]


def test_idling_for_one_cause_is_one_whoever_comes_next() -> None:
    parts = [Spell(0, 3, "data", None), Spell(3, 5, "data", None), Spell(5, 6, "matrix", None)]
    assert merged(parts) == [Spell(0, 5, "data", None), Spell(5, 6, "matrix", None)]


def test_shares_of_a_window_count_what_lies_inside() -> None:
    spells = [Spell(0, 10, None, A), Spell(10, 30, "data", None), Spell(30, 40, None, B)]
    assert shares(spells, 5, 35) == {"busy": 10, "data": 20}


def test_use_of_bandwidth_is_the_covered_share_of_each_bin() -> None:
    """Bins of 10: [0, 10) has 5 of 10 covered, [10, 20) all, [20, 30) 2, [30, 40) nothing."""
    assert use_of([(-5, 5), (10, 22), (90, 99)], 0, 40, 4) == pytest.approx([0.5, 1.0, 0.2, 0.0])


def recorded(stages: int, how: Fidelity = "fair", **watch: int) -> Recording:
    """Four iterations of flash2 with tiles of 64 x 64 and d = 64 (8 KiB each) on four MPs of MP31."""
    hardware = load_hardware("mp31").with_value("processor.count", 4)
    a, s = Attention(n_q=256, n_k=256, d=64), Schedule(block_q=64, block_k=64, stages=(stages,))
    program = flash2(a, s)
    resident = {name: f.resident * 4 for name, f in footprints(program, s, hardware).items()}
    traffic = dram_flows(program, ledger(program), 10**8, resident)
    return timeline(program, s, hardware, traffic, fidelity=how, watch=Watch(**watch)).recordings["attention"]


@pytest.mark.parametrize("stages", [1, 2, 3])
def test_a_buffer_is_filled_again_only_after_its_last_use(stages: int) -> None:
    """K of iteration t comes after QK of t - stages; so at most `stages` tiles of K are alive, of 8 KiB each."""
    made = recorded(stages)
    k = [life for life in made.lives if life.tile == "k"]
    assert [life.bytes for life in k] == [64 * 64 * 2] * 4
    assert all(k[t].start >= k[t - stages].end for t in range(stages, 4))
    assert all(k[t].start < k[t - 1].end for t in range(1, 4)) == (stages > 1)
    for life in k:
        assert life.flight is not None
        assert life.first is not None
        assert life.first.who.phase == "qk"
        assert life.start < (life.flight.arrived or 0) <= life.first.start < life.end
    (q,) = (life for life in made.lives if life.tile == "q")
    assert q.end == max(r.end for r in made.phases if r.who.phase == "qk")


def test_a_window_holds_the_iterations_that_are_asked_for() -> None:
    made = recorded(1)
    assert made.turns == 4
    assert made.window(0, 4) == (0, made.end)
    start, end = made.window(1, 2)
    assert start == min(f.sent for f in made.flights if f.who.turn >= 1 and f.direction == "read")
    assert end == max(r.end for r in made.phases if r.who.turn == 1 and r.who.phase == "pv")


def test_in_chip_a_processor_is_told_apart_and_others_are_nobody() -> None:
    made = recorded(2, "chip", processor=3)
    assert made.blocks == (3,)
    assert {s.who.block for s in made.units["matrix"] if s.who is not None} == {3}
    assert any(s.who is None and s.cause is None for s in made.units["l2"])  # what other processors move
    assert recorded(2, "chip", block=2).processor == 2


@pytest.mark.parametrize(
    ("how", "watch", "words"),
    [
        ("fair", {"processor": 0}, "processor: all are alike"),
        ("fair", {"block": 4}, "block: 4 is not one of 0 to 3"),
        ("chip", {"block": 4}, "block: 4 is not one of 0 to 3"),
        ("chip", {"processor": 4}, "processor: 4 is not one of 0 to 3"),
    ],
)
def test_what_is_not_there_cannot_be_watched(how: Fidelity, watch: dict[str, int], words: str) -> None:
    with pytest.raises(InputError, match=words):
        recorded(1, how, **watch)
