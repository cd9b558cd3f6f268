"""`iosim hw show`: the numbers of a profile."""

from __future__ import annotations

from functools import partial

import click

from iosim.cli.group import command
from iosim.cli.output import Form, answer_options


@command("show")
@click.argument("hw", metavar="NAME")
@answer_options("iosim.hw/1", "number")
def hw_show(hw: str, form: Form) -> None:
    """Every number of a profile, with its source and confidence.

    NAME is a machine's, or a .toml file.

    Example: iosim hw show h200-sxm
    """
    from iosim.hardware import load_hardware
    from iosim.report import machines as report

    found = load_hardware(hw)
    form.give(
        partial(report.show_text, found),
        partial(report.document, [found], numbers=True),
        partial(report.numbers_as_csv, found),
    )
