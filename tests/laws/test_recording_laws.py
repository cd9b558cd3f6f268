"""What is recorded adds up to what the timeline reports, on random small machines, problems and schedules."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from iosim.interpreters.engine import CAUSES, Spell
from iosim.interpreters.model import Model
from iosim.interpreters.recording import Recording, Watch
from iosim.interpreters.timeline import SHARED, Fidelity
from tests.laws.test_timeline_laws import BOTH, Case, cases


def sums(spells: tuple[Spell, ...]) -> Counter[str]:
    out: Counter[str] = Counter()
    for spell in spells:
        out[spell.cause or "busy"] += spell.end - spell.start
    return out


def recordings(case: Case, kernel: str) -> list[Recording]:
    """Of every processor that gets a block, one after another."""
    made = []
    for n in range(
        min(case.hardware.processors or 1, next(k for k in case.program.kernels if k.name == kernel).blocks)
    ):
        made.append(case.run("chip", watch=Watch(kernel, processor=n)).recordings[kernel])
    return made


@given(cases())
@settings(max_examples=3, deadline=None)
def test_recorded_spells_add_up_to_busy_time_and_stalls_of_the_timeline(case: Case) -> None:
    adds_up(case)


@pytest.mark.long
@given(cases())
@settings(max_examples=10, deadline=None)
def test_recorded_spells_add_up_on_more_cases(case: Case) -> None:
    adds_up(case)


def adds_up(case: Case) -> None:
    """Of `chip`, over all processors; those that get no block stand idle to the end, which is its tail."""
    kernel = case.run("chip").kernels[-1]
    made = recordings(case, kernel.name)
    for name, unit in kernel.units.items():
        seen: Counter[str] = Counter()
        for recording in made[:1] if name in SHARED else made:
            seen += sums(recording.units[name])
        idle = 0 if name in SHARED else (unit.instances - len(made)) * made[0].end
        booked = Counter({**unit.stalls_ps, "busy": unit.busy_ps})
        booked["launch"] -= kernel.launch_ps * unit.instances
        assert seen["busy"] == booked["busy"], name
        assert sum(seen.values()) + idle == sum(booked.values()), name
        if not idle:
            assert all(seen[cause] == booked[cause] for cause in CAUSES), name


@given(cases())
@settings(max_examples=3, deadline=None)
def test_a_fair_recording_has_the_work_of_its_blocks(case: Case) -> None:
    """Each block books what the model's arithmetic says, on which the reported busy time rests."""
    made = case.run("fair", watch=Watch()).recordings
    assert list(made) == [kernel.name for kernel in case.program.kernels]
    for kernel in case.program.kernels:
        recording = made[kernel.name]
        flows = tuple(f for f in case.device.flows if f.flow.kernel == kernel.name)
        model = Model(kernel, case.schedule, case.hardware.at_clock(recording.clock_hz), flows)
        shape = max((kind.shape for kind in model.classes), key=model.iterations)
        busy = model.totals(shape).busy
        for name, spells in recording.units.items():
            assert sums(spells)["busy"] == busy.get(name, 0) * len(recording.blocks), name
        moved = sum(f.bytes for f in recording.flights)
        assert moved == sum(model.totals(shape).moved.values()) * len(recording.blocks)


@given(cases(), st.sampled_from(BOTH))
@settings(max_examples=3, deadline=None)
def test_spells_follow_one_another_without_a_gap(case: Case, how: Fidelity) -> None:
    for recording in case.run(how, watch=Watch()).recordings.values():
        assert recording.whole
        for spells in (*recording.units.values(), *recording.groups.values()):
            assert spells[0].start == 0
            assert all(a.end == b.start for a, b in pairwise(spells))
            assert all(s.end > s.start for s in spells)
            assert max(s.end for s in spells) == recording.end
        for bandwidth in recording.chip.values():
            assert all(a[1] <= b[0] for a, b in pairwise(bandwidth))


@given(cases(), st.sampled_from(BOTH))
@settings(max_examples=3, deadline=None)
def test_recording_changes_nothing(case: Case, how: Fidelity) -> None:
    watched, plain = case.run(how, watch=Watch()), case.run(how)
    assert watched.kernels == plain.kernels
    assert plain.recordings == {}


@given(cases(), st.sampled_from(BOTH), st.integers(1, 6))
@settings(max_examples=3, deadline=None)
def test_a_recording_that_stops_early_begins_like_the_whole(case: Case, how: Fidelity, until: int) -> None:
    name = case.program.kernels[-1].name
    short = case.run(how, watch=Watch(name, until=until)).recordings[name]
    long = case.run(how, watch=Watch(name)).recordings[name]
    assert short.end <= long.end
    assert short.window(0, until)[1] == long.window(0, until)[1] or short.whole
    for key, spells in short.groups.items():
        assert spells[:-1] == long.groups[key][: len(spells) - 1]
    for unit, spells in short.units.items():
        assert spells == long.units[unit][: len(spells)]


@given(cases(), st.sampled_from(BOTH))
@settings(max_examples=3, deadline=None)
def test_sram_in_use_is_never_more_than_the_blocks_have(case: Case, how: Fidelity) -> None:
    """A buffer holds one tile at a time, so that live tiles fit in what the footprint counts."""
    for recording in case.run(how, watch=Watch()).recordings.values():
        held = [bytes_ for _, bytes_ in recording.sram()]
        assert held[-1] == 0
        assert min(held) >= 0
        slots = len({slot for slot, _, _ in recording.groups})
        assert max(held) <= recording.sram_bytes * slots
        assert recording.sram_bytes * slots <= recording.sram_capacity
