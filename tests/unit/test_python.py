"""The Python interface: what it takes, what it refuses, how its results show."""

from __future__ import annotations

import numpy as np
import pytest

import iosim

PROBLEM = iosim.Attention(n_q=256, d=64)


def test_numpy_integers_are_whole_numbers() -> None:
    problem = iosim.Attention(n_q=np.int64(64), d=np.int32(16))
    assert problem == iosim.Attention(n_q=64, d=16)
    assert type(problem.n_q) is int


@pytest.mark.parametrize("bad", [True, 1.5, "64"])
def test_other_things_are_not(bad: object) -> None:
    with pytest.raises(iosim.InputError, match="is not a whole number"):
        iosim.Attention(n_q=bad, d=16)


def test_one_name_may_stand_for_a_list() -> None:
    one = iosim.compare(PROBLEM, dataflows="flash2", hardware="mp31", check=False)
    assert [r.dataflow.name for r in one.runs] == ["flash2"]


def test_nothing_to_compare_is_refused() -> None:
    with pytest.raises(iosim.InputError, match="at least one"):
        iosim.compare(PROBLEM, hardware=[], check=False)


def test_stages_may_be_a_number() -> None:
    assert iosim.run(PROBLEM, schedule={"stages": 1}, check=False).schedule.stages == (1,)


def test_a_misspelt_schedule_field_is_suggested() -> None:
    with pytest.raises(iosim.InputError, match="did you mean 'block_q'"):
        iosim.run(PROBLEM, schedule={"blok_q": 64}, check=False)


def test_results_show_in_short_and_print_as_the_command_does() -> None:
    both = iosim.compare(PROBLEM, check=False)
    assert len(repr(both)) < 200
    assert "extra memory" in str(both)


def test_frames() -> None:
    both = iosim.compare(PROBLEM, check=False)
    frame = both.to_frame()
    assert list(frame.index.names) == ["hardware", "dataflow"]
    assert set(frame["n_q"]) == {256}
    run = both.runs[1]
    assert run.traffic["hbm_bytes"].sum() == run.ledger.hbm_read_bytes + run.ledger.hbm_write_bytes
    sums = run.stalls.drop(columns="instances").sum(axis=1)
    assert run.timeline is not None
    assert (sums == run.stalls["instances"] * run.timeline.makespan_ps).all()


@pytest.mark.parametrize(("d", "as_d"), [(8, 16), (17, 32), (32, 32)])
def test_the_matrix_unit_works_in_whole_instructions(d: int, as_d: int) -> None:
    """wgmma takes 16 of d at a time (fp16): 8 cost as much as 16, 17 as much as 32."""
    times = []
    for size in (d, as_d):
        problem = iosim.Attention(n_q=1024, d=size, d_v=16)
        timeline = iosim.run(
            problem, hardware="h100-sxm", schedule={"block_q": 64, "block_k": 64, "stages": 2}, check=False
        ).timeline
        assert timeline is not None
        times.append(timeline.units["matrix"].busy_ps)
    assert times[0] == times[1]
