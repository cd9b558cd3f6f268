"""`iosim report`: tables and plots."""

from __future__ import annotations

import click

from iosim.cli.group import Commands


@click.command(cls=Commands, package="iosim.cli.commands.report")
def report() -> None:
    """Reports and pictures: tables and plots for a design review.

    Example: iosim report memory
    """
