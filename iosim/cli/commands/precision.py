"""`iosim precision`: errors of number formats."""

from __future__ import annotations

from functools import partial
from typing import Any

import click

from iosim.cli.group import command
from iosim.cli.output import Form, answer_options, progress


@command()
@click.option("--n", "-n", type=int, default=8192, show_default=True, help="Keys.")
@click.option("--d", "-d", type=int, default=128, show_default=True, help="Head dimension.")
@click.option("--queries", type=int, default=512, show_default=True, help="Query rows that are compared.")
@click.option("--dataflow", multiple=True, help="A dataflow; may be repeated.  [default: all that compute O]")
@click.option("--dtype", multiple=True, help="A data format; may be repeated.  [default: fp16, bf16, fp8]")
@click.option("--accumulator", multiple=True, help="fp32 or fp16; may be repeated.  [default: both]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random inputs.")
@click.option("--seeds", type=int, default=1, show_default=True, help="How many, from --seed on.")
@answer_options("iosim.precision/1", "dataflow and format")
def precision(form: Form, **options: Any) -> None:
    """Show each dataflow's error against float64, by number format.

    On normal inputs and on those of FlashAttention-3's Table 3, with its printed figures beside ours.

    Example: iosim precision --dtype fp8 --dataflow flash3
    """
    from iosim.study.precision import precision as compare_formats

    plural = {"dataflow": "dataflows", "dtype": "dtypes", "accumulator": "accumulators"}
    with progress() as note:
        result = compare_formats(
            **{plural.get(name, name): value for name, value in options.items() if value != ()}, note=note
        )
    from iosim.report import precision as report

    form.give(
        partial(report.render, result), partial(report.document, result, options), partial(report.rows_as_csv, result)
    )
