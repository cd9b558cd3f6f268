"""`iosim measure`: times of attention calls on this machine's GPU."""

from __future__ import annotations

import click

from iosim.cli.group import command
from iosim.cli.output import CheckError, force_option, progress, require_writable, write
from iosim.errors import InputError


@command()
@click.option("--output", "-o", metavar="FILE.csv", required=True, help="Write the times to this file.")
@force_option
@click.option(
    "--sections", metavar="NAME,...", help="Calls of these sections of iosim's own measurements.  [default: all]"
)
@click.option(
    "--shapes", metavar="FILE.csv", help="Calls of this file: columns n_q, d, and others of the file written."
)
def measure(output: str, sections: str | None, shapes: str | None) -> None:
    """Time attention calls on your NVIDIA GPU, for iosim validate.

    PyTorch's fused attention by backend (flash2, cudnn, efficient), and standard: scaling Q, a product, a softmax and a
    product.  The numbers of each call are checked; a call that fails is left out, and said.  Needs PyTorch with CUDA.

    \b
    Example: iosim measure -o calls.csv --sections forward,backward
             iosim validate calls.csv --hw ./my-gpu.toml
    """
    if sections is not None and shapes is not None:
        raise InputError("--sections and --shapes: give one of them")
    from pathlib import Path

    from iosim.study import measure as study

    wanted = [part.strip() for part in sections.split(",")] if sections is not None else []
    calls = study.planned(wanted) if shapes is None else study.planned_from(Path(shapes))
    require_writable(output)
    from iosim.gpu.calls import AttentionCalls

    with progress() as note:
        found = study.measure(calls, AttentionCalls(), note)
    if found.timed:
        write(study.as_csv(found), output)
    click.echo(study.summary(found), err=True, nl=False)
    if not found.timed:
        raise CheckError(f"no call could be measured; {output} is not written")
