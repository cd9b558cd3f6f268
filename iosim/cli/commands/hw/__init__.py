"""`iosim hw`: machine profiles."""

from __future__ import annotations

import click

from iosim.cli.group import Commands


@click.command(cls=Commands, package="iosim.cli.commands.hw")
def hw() -> None:
    """List, show and check machine profiles.

    Example: iosim hw show mp31
    """
