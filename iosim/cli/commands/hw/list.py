"""`iosim hw list`: the machines that ship."""

from __future__ import annotations

from iosim.cli.group import command
from iosim.cli.output import write


@command("list")
def hw_list() -> None:
    """The machines that ship with iosim.

    Example: iosim hw list
    """
    from iosim.report.machines import list_text

    write(list_text(), None)
