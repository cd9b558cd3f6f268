"""`iosim report all`: every report in one directory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import click

from iosim.cli.group import command
from iosim.cli.output import progress
from iosim.cli.sections import asked, dataflows_option, machines_option, shape_options


@command("all")
@shape_options(n="128,256,512,1024,2048,4096,8192,16384", heads=16)
@dataflows_option
@machines_option
@click.option("--output", "-o", metavar="DIR", required=True, help="The directory to write, or to replace as a whole.")
@click.option("--force", is_flag=True, help="Replace a directory that is not a report of iosim's.")
def report_all(
    lengths: tuple[int, ...],
    shape: Mapping[str, Any],
    dataflow: tuple[str, ...],
    hw: tuple[str, ...],
    output: str,
    force: bool,
) -> None:
    """Write all reports into a directory: a page, pictures, tables.

    index.html needs nothing else: open it in any browser, send it, print it.  Beside it are report.md, a PNG and an SVG
    file of every plot, a CSV file of every table, and report.json.  About half a minute for one machine.

    \b
    Example: iosim report all --hw mp31 -o reports/mp31
    """
    from iosim.cli.folder import require_replaceable, write_directory
    from iosim.report.book import INDEX, SCHEMA, files
    from iosim.report.everything import sections

    machines, dataflows, request = asked(lengths, shape, dataflow, hw)
    require_replaceable(output, INDEX, SCHEMA, force=force)
    with progress() as note:
        made = sections(lengths, shape, machines, dataflows, request, note)
        note("drawing")
        names = " and ".join(machine.name for machine in machines)
        written = files(f"Attention on {names}", made, request)
    write_directory(written, output)
    click.echo(f"{output}: {len(written)} files; open {output.rstrip('/')}/index.html", err=True)
