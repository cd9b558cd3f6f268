"""`iosim hw check`: the mistakes of a profile."""

from __future__ import annotations

from functools import partial

import click

from iosim.cli.group import command
from iosim.cli.output import Form, answer_options, fail
from iosim.errors import InputError


@command("check")
@click.argument("file")
@answer_options("iosim.hw/1")
def hw_check(file: str, form: Form) -> None:
    """Check a profile file: its mistakes, and what time would need.

    Example: iosim hw check mine.toml     (your copy of a file of hw_profiles/)
    """
    from iosim.hardware import ProfileError, load_hardware
    from iosim.report.machines import check_text, document

    try:
        machine = load_hardware(file)
    except ProfileError as error:
        if len(error.problems) == 1:
            raise
        heading = f"iosim: {error.origin}: {len(error.problems)} mistakes:"
        fail("\n".join([heading, *(str(InputError(f"  {problem}")) for problem in error.problems)]), error.exit_code)
    form.give(partial(check_text, machine), partial(document, [machine]))
