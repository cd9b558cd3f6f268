"""Shared fixtures: the command line, run in this process."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import NamedTuple

import pytest
from hypothesis import HealthCheck, settings

from iosim.cli import main

# A loaded machine is no fault of the code; CI draws the same cases every time, a developer's run draws new ones.
settings.register_profile(
    "iosim", deadline=None, derandomize="CI" in os.environ, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("iosim")


class Answer(NamedTuple):
    """What a command gave."""

    code: int
    out: str
    err: str


Iosim = Callable[..., Answer]


@pytest.fixture
def iosim(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iosim:
    """Run `iosim ARGS` here; returns its exit code and what it printed, however slow this machine is."""
    monkeypatch.setattr("iosim.cli.output.PATIENCE", 3600)

    def call(*args: str) -> Answer:
        monkeypatch.setattr(sys, "argv", ["iosim", *args])
        capsys.readouterr()
        code = 0
        try:
            main()
        except SystemExit as stop:
            code = int(stop.code or 0)
        return Answer(code, *capsys.readouterr())

    return call
