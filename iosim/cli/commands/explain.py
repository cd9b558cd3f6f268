"""`iosim explain`: where each number of a run comes from."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from iosim.cli.group import command
from iosim.cli.options import subject_of, subject_options
from iosim.cli.output import CheckError, Form, answer_options, progress


@command("explain")
@subject_options
@click.option("--check/--no-check", default=True, show_default=True, help="Check the numbers against float64.")
@click.option("--depends/--no-depends", default=True, show_default=True, help="Find out what each line follows.")
@answer_options("iosim.explain/1")
def explain(form: Form, check: bool, depends: bool, **options: Any) -> None:
    """Derive each number of a run in steps, with the values put in.

    The steps are read off the program: change the dataflow, and they follow.  Below each line stand the options and
    numbers of the machine's profile that it follows, found by changing each of them alone.

    \b
    Example: iosim explain --n 4096 --d 128
             iosim explain -n 4096 -d 128 --dataflow ./mine.py --no-check
    """
    subject = subject_of(options)
    from iosim.report.explain import document, render
    from iosim.study.explain import explain as explained
    from iosim.study.run import check_of, evaluate, plan_of, require_uneven

    with progress() as note:
        plan = plan_of(subject.problem, subject.machine, subject.flow, subject.given)
        require_uneven(subject.given, [plan.program])
        note(f"numeric check of {plan.flow.name} (--no-check leaves it out)")
        checked = check_of(plan) if check else None
        note(f"time of {plan.flow.name} on {plan.machine.name}")
        run = evaluate(plan, subject.fidelity, checked)
        found = explained(plan, run, subject.given, depends=depends, note=note)
    form.give(partial(render, found), partial(document, found, {**options, "check": check, "depends": depends}))
    if checked is not None and checked.status == "failed":
        raise CheckError(f"check of {plan.flow.name} failed: {checked.detail}")
