"""`iosim trace`: the Trace Event Format, held against its rules, and what the events say."""

from __future__ import annotations

import copy
import json
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import Iosim

SMALL = ("trace", "-n", "512", "-d", "64")
NEEDS = {  # by phase, what the format's documentation asks of an event
    "X": {"name", "cat", "pid", "tid", "ts", "dur"},
    "M": {"name", "pid", "tid", "args"},
    "C": {"name", "pid", "ts", "args"},
    "s": {"name", "cat", "id", "pid", "tid", "ts"},
    "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    "i": {"name", "s", "pid", "tid", "ts"},
}
META = {
    "process_name": "name",
    "thread_name": "name",
    "process_sort_index": "sort_index",
    "thread_sort_index": "sort_index",
}


def breaches(trace: dict[str, Any]) -> Iterator[str]:
    """What in a trace is against the format: fields, types, nesting of slices, pairs of flows, order of counters."""
    events = trace["traceEvents"]
    slices: dict[tuple[int, int], list[tuple[float, float]]] = {}
    named, flows, counters = set(), {}, {}
    for e in events:
        if e["ph"] not in NEEDS or not NEEDS[e["ph"]] <= e.keys():
            yield f"fields of {e}"
            continue
        if e["ph"] != "M" and not (isinstance(e["ts"], int | float) and e["ts"] >= 0):
            yield f"time of {e}"
        if e["ph"] == "M":
            if META.get(e["name"]) not in e["args"]:
                yield f"metadata {e}"
            if e["name"] == "thread_name":
                named.add((e["pid"], e["tid"]))
        elif e["ph"] == "X":
            if e["dur"] <= 0:
                yield f"length of {e}"
            slices.setdefault((e["pid"], e["tid"]), []).append((e["ts"], round(e["ts"] + e["dur"], 3)))
        elif e["ph"] == "C":
            if not e["args"] or not all(isinstance(v, int | float) for v in e["args"].values()):
                yield f"values of {e}"
            counters.setdefault((e["pid"], e["name"]), []).append(e["ts"])
        elif e["ph"] in "sf":
            flows.setdefault(e["id"], []).append(e)
    for track, spans in slices.items():
        if track not in named:
            yield f"track {track} has no name"
        if any(a[1] > b[0] for a, b in pairwise(sorted(spans))):
            yield f"slices of track {track} overlap"
    for id_, ends in flows.items():
        if [e["ph"] for e in ends] != ["s", "f"] or ends[0]["ts"] > ends[1]["ts"]:
            yield f"flow {id_} is no pair, or runs backwards"
        for e in ends:
            if not any(a <= e["ts"] < b for a, b in slices.get((e["pid"], e["tid"]), [])):
                yield f"flow {id_} is in no slice"
    for key, times in counters.items():
        if times != sorted(times):
            yield f"counter {key} goes back in time"


def made(iosim: Iosim, tmp_path: Path, *args: str) -> dict[str, Any]:
    file = tmp_path / "run.json"
    answer = iosim(*args, "-o", str(file))
    assert answer.code == 0, answer.err
    assert "ui.perfetto.dev" in answer.out
    assert max(map(len, answer.out.splitlines())) <= 80 + len(str(file))
    return json.loads(file.read_text())


@pytest.mark.parametrize(
    "args",
    [
        SMALL,
        (*SMALL, "--dataflow", "flash3", "--hw", "h200-sxm", "--iterations", "1..3"),
        (*SMALL, "--dataflow", "standard", "--causal"),
        (*SMALL, "--dataflow", "flash1", "--stages", "1"),
        (*SMALL, "--kernel", "cudnn", "--hw", "h100-sxm"),
        (*SMALL, "--fidelity", "chip", "--block", "3"),
        (*SMALL, "--dataflow", "flash-backward"),
    ],
)
def test_a_trace_keeps_the_rules_of_the_format(iosim: Iosim, tmp_path: Path, args: tuple[str, ...]) -> None:
    trace = made(iosim, tmp_path, *args)
    assert list(breaches(trace)) == []
    phases = {e["ph"] for e in trace["traceEvents"]}
    assert {"X", "M", "C", "s", "f"} <= phases


def test_the_rules_find_what_is_broken(iosim: Iosim, tmp_path: Path) -> None:
    trace = made(iosim, tmp_path, *SMALL)

    def broken(ph: str, **change: Any) -> list[str]:
        other = copy.deepcopy(trace)
        event = [e for e in other["traceEvents"] if e["ph"] == ph][0 if ph == "X" else -1]
        event.update(change)
        return list(breaches(other))

    assert broken("X", dur=10**9)
    assert broken("X", tid=10**6)
    assert broken("f", ts=0)
    assert broken("s", id=10**6)
    assert broken("C", args={"percent": "1"})
    assert broken("M", name="proces_name")


def test_slices_are_on_tracks_of_units_and_warp_groups_and_add_up(iosim: Iosim, tmp_path: Path) -> None:
    """On the matrix unit's track, work and waits fill the time of the blocks, to the rounding to nanoseconds."""
    events = made(iosim, tmp_path, *SMALL, "--iterations", "all")["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {"matrix unit", "exp unit", "copy engine", "DRAM", "L2", "SRAM", "group 0", "load K", "store O"} <= {
        *names.values()
    }
    (track,) = (key for key, name in names.items() if name == "matrix unit")
    spans = sorted((e["ts"], e["dur"]) for e in events if e["ph"] == "X" and (e["pid"], e["tid"]) == track)
    filled = sum(dur for _, dur in spans)
    assert filled == pytest.approx(spans[-1][0] + spans[-1][1] - spans[0][0], abs=1e-6)
    launch = next(e for e in events if e["name"] == "launch" and e["ph"] == "X")
    assert spans[0][0] == launch["ts"] + launch["dur"]  # blocks start when the kernel has been launched


def test_each_load_flows_to_its_first_use_once(iosim: Iosim, tmp_path: Path) -> None:
    """Q once, K and V in each of 4 iterations; K is used by QK, V by PV."""
    events = made(iosim, tmp_path, *SMALL, "--block-q", "64", "--block-k", "128", "--iterations", "all")["traceEvents"]
    slices = [e for e in events if e["ph"] == "X"]
    used = []
    for e in (e for e in events if e["ph"] == "f"):
        at = next(
            s for s in slices
            if (s["pid"], s["tid"]) == (e["pid"], e["tid"]) and s["ts"] <= e["ts"] < s["ts"] + s["dur"]
        )  # fmt: skip
        used.append((e["name"], at["name"]))
    assert sorted(used) == sorted(
        [("q 0", "qk"), *((f"k {n}", "qk") for n in range(4)), *((f"v {n}", "pv") for n in range(4))]
    )


def test_counters_say_what_is_used(iosim: Iosim, tmp_path: Path) -> None:
    events = made(iosim, tmp_path, *SMALL, "--iterations", "all")["traceEvents"]
    values: dict[str, list[float]] = {}
    for e in (e for e in events if e["ph"] == "C"):
        values.setdefault(e["name"], []).extend(e["args"].values())
    assert set(values) == {"SRAM in use", "DRAM used", "L2 used", "copy engine used"}
    assert values["SRAM in use"][-1] == 0
    assert 0 < max(values["SRAM in use"]) <= 192 * 1024
    for name in ("DRAM used", "L2 used", "copy engine used"):
        assert 0 <= min(values[name]) <= max(values[name]) <= 100
        assert max(values[name]) > 0


def test_a_long_loop_is_cut_and_says_so(iosim: Iosim, tmp_path: Path) -> None:
    long = ("trace", "-n", "4096", "-d", "64", "--block-q", "64", "--block-k", "32")
    trace = made(iosim, tmp_path, *long)
    notes = [e["name"] for e in trace["traceEvents"] if e["ph"] == "i"]
    assert notes == ["cut: iterations 0 to 39 of 128 of kernel attention are traced"]
    assert trace["otherData"]["notes"][0] == notes[0]
    turns = {e["args"]["iteration"] for e in trace["traceEvents"] if e["ph"] == "X" and e["name"] == "pv"}
    assert turns == set(range(40))
    assert len(json.dumps(trace)) < 2_000_000


def test_a_trace_needs_a_file_and_iterations_that_there_are(iosim: Iosim, tmp_path: Path) -> None:
    assert "--output" in iosim(*SMALL).err
    answer = iosim(*SMALL, "--iterations", "70..80", "-o", str(tmp_path / "x.json"))
    assert (answer.code, answer.out) == (2, "")
    assert "--iterations: 70..80: no kernel has more than" in answer.err
    assert not list(tmp_path.iterdir())
