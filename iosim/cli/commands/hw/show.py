"""`iosim hw show`: the numbers of a profile."""

from __future__ import annotations

import click

from iosim.cli.group import command
from iosim.cli.output import write


@command("show")
@click.argument("name")
def hw_show(name: str) -> None:
    """Every number of a profile, with its source and confidence.

    Example: iosim hw show h200-sxm
    """
    from iosim.hardware import load_hardware
    from iosim.report.machines import show_text

    write(show_text(load_hardware(name)), None)
