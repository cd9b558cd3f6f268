"""`iosim rerun`: a result once more, and whether it is the same."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import click

import iosim
from iosim.cli.group import command
from iosim.cli.output import CheckError, Form, answer_options
from iosim.errors import InputError

RERUN = ("run", "check", "precision")  # commands whose --json has all that was asked for, and can be compared
_WRITTEN = ("plot", "output", "force")  # options that write files, which a stranger's result must not choose


@command()
@click.argument("file", metavar="RESULT.json")
@click.option("--trust", is_flag=True, help="Run the Python files too that the result names as dataflows.")
@answer_options("iosim.diff/1", "value that differs")
@click.pass_context
def rerun(context: click.Context, form: Form, file: str, trust: bool) -> None:
    """Run what a result was made by, and compare.

    RESULT.json is what run, check or precision has printed with --json.  What it asked for is run again with this
    iosim, the machines' profiles and the files that it names as they are now.  Exit code 1 where anything differs.

    \b
    Example: iosim run -n 1024 -d 64 --json -o result.json
             iosim rerun result.json
    """
    from iosim.dataflows import names_code
    from iosim.report import diff as report
    from iosim.study.diff import diff, load

    document = load(file)
    schema = document["schema"]
    name = schema.removeprefix("iosim.").removesuffix("/1")
    request = document.get("request")
    if name not in RERUN or not isinstance(request, dict):
        why = "it has no request" if name in RERUN else f"its schema is {schema}"
        raise InputError(f"{file}: {why}; results of {', '.join(RERUN)} can be run again")
    again = _command(context, name)
    arguments = list(_arguments(again, request, file))
    if not trust and (code := next((a for a in arguments if names_code(a.partition("--dataflow=")[2])), None)):
        raise InputError(f"{file}: request: {code} is code; --trust runs it")
    with TemporaryDirectory() as folder:
        made = os.path.join(folder, "now.json")
        with suppress(CheckError):  # a failed check is part of the result, and compared
            again.main([*arguments, "--json", "--output", made], prog_name=f"iosim {name}", standalone_mode=False)
        found = replace(diff(file, made), files=(file, "now"))
        now = load(made)
    form.give(
        lambda: _provenance(document, now) + report.render(found),
        partial(report.document, found, {"file": file, "command": ["iosim", name, *arguments]}),
        partial(report.rows_as_csv, found),
    )
    if not found.same:
        raise CheckError(f"{file} is not what this iosim makes of it now")


def _command(context: click.Context, name: str) -> click.Command:
    parent = context.parent
    found = parent.command.get_command(parent, name) if parent and isinstance(parent.command, click.Group) else None
    if found is None:
        raise InputError(f"rerun: there is no command {name}")
    return found


def _arguments(again: click.Command, request: Mapping[str, Any], file: str) -> Iterator[str]:
    """The arguments of the command line that make a request; raises InputError for one that is none of this command."""
    options = {p.name: p for p in again.params if isinstance(p, click.Option) and p.name not in _WRITTEN}
    for name, value in request.items():
        if name not in options:
            raise InputError(f"{file}: request: {name} is no option of this iosim's {again.name}")
        option = options[name]
        if value is None or value == [] or value == option.default or (value is False and not option.secondary_opts):
            continue
        said = max(option.opts, key=len)
        if isinstance(value, bool):
            if not option.is_flag:
                raise InputError(f"{file}: request: {name}: {value} is no value of {said}")
            yield said if value else option.secondary_opts[0]
            continue
        values = value if isinstance(value, list) else [value]
        if option.is_flag or not all(isinstance(v, str | int | float) for v in values):
            raise InputError(f"{file}: request: {name}: is no value of {said}")
        for one in values if option.multiple else [",".join(map(str, values))]:
            yield f"{said}={one}"


def _provenance(then: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """A line for another iosim, and one for each machine whose profile has changed."""
    before, after = (d["provenance"] if isinstance(d.get("provenance"), dict) else {} for d in (then, now))
    lines = []
    version = before.get("iosim", then.get("iosim"))
    if version != iosim.__version__:
        lines.append(f"Made by iosim {str(version)[:40]!r}; this is {iosim.__version__}.")
    hashes = [h if isinstance(h := of.get("profile_hash"), dict) else {} for of in (before, after)]
    for machine, found in hashes[1].items():
        if (old := hashes[0].get(machine)) != found:
            lines.append(f"The profile of {machine} has changed: {str(old)[:12]} then, {str(found)[:12]} now.")
    return "".join(f"{line}\n" for line in lines)
