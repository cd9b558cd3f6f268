"""Units, books and turns: each a few requests with their times worked out."""

from __future__ import annotations

from collections.abc import Callable

import simpy
from hypothesis import given
from hypothesis import strategies as st

from iosim.interpreters.engine import (
    CAUSES,
    Arbiter,
    Bucket,
    Cause,
    FairShare,
    Log,
    Progress,
    Turns,
    Unit,
    duration,
    later,
)


def log(*spans: tuple[int, Cause], state: Cause = "tail") -> Log:
    out = Log()
    for end, cause in spans:
        out.state = cause
        out.mark(end)
    out.state = state
    return out


def served(unit: Unit, requests: list[tuple[int, int, int]]) -> dict[int, int]:
    """Ends by number of request; a request is (when, block, length)."""
    env, ends = simpy.Environment(), {}

    def note(n: int) -> Callable[[int], None]:
        return lambda end: ends.__setitem__(n, end)

    for n, (when, block, length) in enumerate(requests):
        later(env, when, lambda n=n, block=block, length=length: unit.serve(env, str(n), block, length, Log(), note(n)))  # type: ignore[misc]
    env.run()
    return ends


# ---------------------------------------------------------------- durations and logs


def test_a_duration_is_rounded_up_once() -> None:
    assert duration(3, 10**12) == 3
    assert duration(1, 3 * 10**12) == 1
    assert duration(10**12, 10**12 - 1) == 10**12 + 2


def test_a_log_tells_the_causes_of_a_span_of_time() -> None:
    entries = log((10, "data"), (15, "matrix"), (30, "vector"), state="barrier")
    assert list(entries.between(5, 20)) == [("data", 5), ("matrix", 5), ("vector", 5)]
    assert list(entries.between(25, 40)) == [("vector", 5), ("barrier", 10)]
    assert list(entries.between(10, 10)) == []


def test_like_spans_of_a_log_are_one() -> None:
    entries = log((10, "data"), (20, "data"), (20, "matrix"))
    assert (entries.ends, entries.causes) == ([0, 20], ["launch", "data"])


@given(
    st.lists(st.tuples(st.integers(1, 50), st.sampled_from(CAUSES)), max_size=8), st.integers(0, 99), st.integers(0, 99)
)
def test_the_causes_of_a_span_add_up_to_its_length(spans: list[tuple[int, Cause]], start: int, length: int) -> None:
    entries, end = Log(), 0
    for step, cause in spans:
        end += step
        entries.state = cause
        entries.mark(end)
    assert sum(n for _, n in entries.between(start, start + length)) == length


# ---------------------------------------------------------------- units


def test_a_unit_serves_in_the_order_of_arrival() -> None:
    assert served(Unit("u"), [(0, 1, 10), (3, 2, 5), (40, 1, 1)]) == {0: 10, 1: 15, 2: 41}


def test_idle_time_of_a_unit_is_blamed_on_what_its_next_user_did() -> None:
    unit = Unit("u")
    unit.book(0, 10, Log())
    assert unit.book(30, 5, log((18, "matrix"), (30, "data"))) == 35
    assert {c: n for c, n in unit.stalls.items() if n} == {"matrix": 8, "data": 12}
    unit.idle(50, log((50, "tail")))
    assert unit.busy + sum(unit.stalls.values()) == 50


def test_an_arbiter_serves_blocks_in_turns() -> None:
    """Block 1 asks three times at once, block 2 once a little later: block 2 waits for one request only."""
    assert served(Arbiter("dram"), [(0, 1, 10), (0, 1, 10), (0, 1, 10), (1, 2, 10)]) == {0: 10, 1: 20, 3: 30, 2: 40}


# ---------------------------------------------------------------- scripts


def test_a_script_repeats_the_order_in_which_a_unit_was_asked() -> None:
    made: list[str] = []
    requests = [(5, 1, 10), (0, 2, 10), (2, 3, 10)]
    first = served(Unit("u", Turns(made, scripted=False)), requests)
    assert made == ["1", "2", "0"]
    assert served(Unit("u", Turns(made, scripted=True)), requests) == first


def test_in_a_script_one_that_comes_early_waits_for_its_turn() -> None:
    assert served(Unit("u", Turns(["0", "1"], scripted=True)), [(7, 1, 10), (0, 2, 10)]) == {0: 17, 1: 27}


def test_an_arbiter_keeps_to_a_script_too() -> None:
    made: list[str] = []
    requests = [(0, 1, 10), (0, 1, 10), (1, 2, 10)]
    first = served(Arbiter("dram", Turns(made, scripted=False)), requests)
    assert made == ["0", "1", "2"] or made == ["0", "2", "1"]
    assert served(Arbiter("dram", Turns(made, scripted=True)), requests) == first


# ---------------------------------------------------------------- fair shares


def fair(weight: int, depth: int = 0, level: int = 0, *, alone: bool = True) -> FairShare:
    return FairShare("l2", bucket=Bucket(depth, level), weight=weight, alone=alone)


def test_a_processor_of_four_gets_a_quarter_of_the_bandwidth() -> None:
    assert served(fair(4), [(0, 1, 10), (0, 1, 10), (0, 1, 10)]) == {0: 40, 1: 80, 2: 120}


def test_a_request_that_comes_alone_takes_its_time_at_the_full_rate() -> None:
    assert served(fair(1), [(0, 1, 10), (50, 1, 10)]) == {0: 10, 1: 60}


def test_a_share_that_stood_idle_makes_up_for_its_depth() -> None:
    """At 100 the bucket may be 25 behind: the 40 of four processors are done at 115; without depth, at 140."""
    assert served(fair(4, depth=25), [(100, 1, 10)]) == {0: 115}
    assert served(fair(4), [(100, 1, 10)]) == {0: 140}


def test_processors_that_fell_out_of_step_begin_with_their_depth() -> None:
    assert served(fair(4, depth=25, level=-25), [(0, 1, 10)]) == {0: 15}


def test_blocks_pour_into_a_bucket_in_turns() -> None:
    """Block 1 asks twice at once for two processors, then block 2: it comes second."""
    assert served(fair(2, alone=False), [(0, 1, 10), (0, 1, 10), (1, 2, 10)]) in (
        {0: 20, 1: 40, 2: 60},
        {0: 20, 2: 40, 1: 60},
    )


@given(st.lists(st.tuples(st.integers(0, 100), st.integers(1, 3), st.integers(1, 30)), max_size=8), st.integers(1, 5))
def test_a_fair_share_never_carries_more_than_the_chip(requests: list[tuple[int, int, int]], weight: int) -> None:
    for alone in (True, False):
        ends = served(fair(weight, alone=alone), requests)
        assert len(ends) == len(requests)
        assert max(ends.values(), default=0) >= weight * sum(length for _, _, length in requests)


# ---------------------------------------------------------------- progress


def test_who_waits_for_an_iteration_goes_on_when_it_has_ended() -> None:
    env, progress, seen = simpy.Environment(), Progress(), []
    progress.reach(env, 2).callbacks.append(lambda _: seen.append(env.now))
    later(env, 5, lambda: progress.end(0))
    later(env, 9, lambda: progress.end(1))
    env.run()
    assert seen == [9]


def test_an_iteration_that_overtakes_counts_when_those_before_it_have_ended() -> None:
    progress = Progress()
    progress.end(1)
    assert progress.count == 0
    progress.end(0)
    assert progress.count == 2
