"""`iosim calibrate`: a profile of this machine's GPU."""

from __future__ import annotations

import click

from iosim.cli.group import command
from iosim.cli.output import force_option, progress, require_writable, write
from iosim.errors import InputError


@command()
@click.option("--output", "-o", metavar="FILE.toml", required=True, help="Write the profile to this file.")
@force_option
@click.option("--name", help="Of the machine.  [default: the file's name]")
def calibrate(output: str, name: str | None) -> None:
    """Measure your NVIDIA GPU, and write its profile.

    Half a minute of micro-benchmarks: clocks, matrix and vector rates, bandwidths, latencies, launches, power.  Every
    number of the profile says how it was measured, or where else it is from.  Needs pip install 'iosim[gpu]'.

    \b
    Example: iosim calibrate -o my-gpu.toml
             iosim run -n 4096 -d 128 --hw ./my-gpu.toml
    """
    from datetime import date
    from pathlib import Path

    if not output.endswith(".toml"):
        raise InputError(f"--output: {output!r} does not end with .toml")
    require_writable(output)
    from iosim.gpu.bench import GpuBench
    from iosim.report.profile import profile_toml
    from iosim.study.calibrate import calibrate as measure_gpu

    with progress() as note:
        found = measure_gpu(GpuBench(), name or Path(output).stem.lower(), date.today(), note)
    write(profile_toml(found.data), output)
    measured = sum(fact.confidence == "measured" for fact in found.hardware.fields())
    click.echo(f"{output}: {measured} of {len(found.hardware.fields())} numbers measured", err=True)
    for reason in found.failed:
        click.echo(f"could not be measured: {reason}", err=True)
