"""Runs of many problems that several reports share: each case is made once, many of them on all cores."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from typing import Any

from iosim.dataflows import dataflow_names, load_dataflow
from iosim.errors import InputError
from iosim.hardware import Hardware
from iosim.problem import Attention
from iosim.study.run import Note, Run, evaluate, plan_of, require_formats

MANY = 6  # cases from which on it pays to start processes
FIRST = ("standard", "flash1", "flash2", "flash3", "split-kv")  # the order in which people know them


@dataclass(frozen=True, slots=True)
class Case:
    """One dataflow, by name, on one problem and machine, its schedule chosen."""

    problem: Attention
    dataflow: str
    machine: Hardware


def forward_dataflows() -> list[str]:
    """Names of all dataflows that compute O."""
    names = [name for name in dataflow_names() if load_dataflow(name).computes == "forward"]
    return sorted(names, key=lambda name: (FIRST.index(name) if name in FIRST else len(FIRST), name))


def cases(
    lengths: Sequence[int], shape: Mapping[str, Any], machines: Sequence[Hardware], dataflows: Sequence[str]
) -> list[Case]:
    """Every dataflow at every length on every machine; `shape` has the fields of Attention but n_q."""
    problems = [Attention(n_q=n, **shape) for n in lengths]
    return [Case(a, name, machine) for machine, name, a in product(machines, dataflows, problems)]


class Runs:
    """Runs by case; those of cases that a dataflow or machine cannot do are missing, and `left_out` says why."""

    def __init__(self, note: Note = lambda _: None) -> None:
        self._note = note
        self._made: dict[Case, Run | None] = {}
        self.left_out: list[str] = []

    def get(self, wanted: Iterable[Case]) -> dict[Case, Run]:
        """The runs of cases in their order, without those that are left out; raises InputError where none is left."""
        wanted = list(wanted)
        self._make([case for case in wanted if case not in self._made])
        found = {case: run for case in wanted if (run := self._made[case]) is not None}
        if not found:
            raise InputError(self.left_out[0])
        return found

    def _make(self, missing: Sequence[Case]) -> None:
        workers = os.cpu_count() or 1
        if len(missing) < MANY or workers == 1:
            for case in missing:
                self._note(f"{case.dataflow} at N = {case.problem.n_q:,} on {case.machine.name}")
                self._keep(case, made(case))
            return
        # Long ones first, so that no core is left with one at the end.
        self._note(f"{len(missing)} runs")
        order = sorted(missing, key=lambda case: case.problem.n_q, reverse=True)
        with ProcessPoolExecutor(workers, mp_context=get_context("spawn")) as pool:
            doing = {pool.submit(made, case): case for case in order}
            for number, done in enumerate(as_completed(doing), start=1):
                self._note(f"{number} of {len(doing)} runs are there")
                self._keep(doing[done], done.result())

    def _keep(self, case: Case, done: Run | str) -> None:
        if isinstance(done, str):
            self.left_out += [] if done in self.left_out else [done]
        self._made[case] = done if isinstance(done, Run) else None


def made(case: Case) -> Run | str:
    """The run of a case without a numeric check, or why it cannot be."""
    flow = load_dataflow(case.dataflow)
    if refusal := flow.refusal(case.problem):
        return refusal.partition(": ")[2].partition(";")[0]
    require_formats(case.problem, case.machine, flow)
    try:
        return evaluate(plan_of(case.problem, case.machine, flow, {}))
    except InputError as error:  # it does not fit, or rests on what the machine does not have
        return str(error)
