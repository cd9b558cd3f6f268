"""`iosim hw list`: the machines that ship."""

from __future__ import annotations

from functools import partial

from iosim.cli.group import command
from iosim.cli.output import Form, answer_options


@command("list")
@answer_options("iosim.hw/1", "machine")
def hw_list(form: Form) -> None:
    """The machines that ship with iosim.

    Example: iosim hw list
    """
    from iosim.hardware import load_hardware, profile_names
    from iosim.report import machines as report

    found = [load_hardware(name) for name in profile_names()]
    form.give(partial(report.list_text, found), partial(report.document, found), partial(report.list_csv, found))
