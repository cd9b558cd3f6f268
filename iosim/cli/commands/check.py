"""`iosim check`: a schedule against the checklist."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from iosim.cli.group import command
from iosim.cli.options import subject_of, subject_options
from iosim.cli.output import CheckError, Form, answer_options, progress


@command()
@subject_options
@click.option("--margin", type=float, default=0.1, show_default=True, help="Share of SRAM that stays free.")
@click.option("--strict", is_flag=True, help="Warnings make the check fail too.")
@answer_options("iosim.check/1", "check")
def check(form: Form, margin: float, strict: bool, **options: Any) -> None:
    """Hold a schedule against a checklist of good kernels.

    Each line of the checklist passes, warns or fails, with its number, its threshold and a remedy that was computed.
    Exit code 1 where one fails. What is not given of the schedule is chosen as in iosim run.

    \b
    Example: iosim check -n 4096 -d 128
             iosim check -n 8192 -d 128 -H 16 --hw h200-sxm --kernel flash2
    """
    subject = subject_of(options)
    from iosim.study.checklist import checklist

    with progress() as note:
        found = checklist(
            subject.problem,
            subject.flow,
            subject.machine,
            subject.given,
            fidelity=subject.fidelity,
            margin=margin,
            note=note,
        )
    from iosim.report import checklist as report

    request = {**options, "margin": margin, "strict": strict}
    form.give(
        partial(report.render, found), partial(report.document, found, request), partial(report.rows_as_csv, found)
    )
    if failed := found.failed(strict=strict):
        raise CheckError(f"check of {subject.flow.name} failed: {', '.join(failed)}")
