"""`iosim report timeline`: the tile pipeline at 1, 2 and 3 stages."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from iosim.cli.group import command
from iosim.cli.options import subject_of, subject_options, window_of, window_options
from iosim.cli.output import Form, answer_options, progress, write
from iosim.errors import InputError

if TYPE_CHECKING:
    from iosim.study.pipeline import Pipeline

PICTURES = (".png", ".svg")


@command("timeline")
@subject_options
@window_options("0..8")
@answer_options("iosim.timeline/1", "span")
def timeline(form: Form, **options: Any) -> None:
    """Show the tile pipeline of a kernel at 1, 2 and 3 stages.

    Loads in flight, matrix, exp and vector work, and the stalls by cause of one processor with its resident blocks, all
    on one time axis.  -o FILE.png (or .svg) draws it, with SRAM in use and bandwidth used over time below.  --stages
    shows one number of stages.

    \b
    Example: iosim report timeline --n 4096 --d 128
             iosim report timeline -n 4096 -d 128 --hw h200-sxm -o flash2.png
             iosim report timeline -n 1024 -d 64 --dataflow standard
    """
    picture = _picture(form)
    subject = subject_of(options)
    from iosim.study.pipeline import STAGES, pipeline

    with progress() as note:
        found = pipeline(
            subject.problem,
            subject.flow,
            subject.machine,
            subject.given,
            fidelity=subject.fidelity,
            stages=STAGES if options["stages"] is None else [options["stages"]],
            note=note,
            **window_of(options),
        )
        if picture:
            note("drawing")
            write(_drawn(found, picture), form.output)
            return
    from iosim.report import timeline as shown

    form.give(partial(shown.render, found), partial(shown.document, found, options), partial(shown.rows_as_csv, found))


def _picture(form: Form) -> str:
    """The kind of picture that the output is to be, "" for none.  Raises InputError for one that we cannot draw."""
    if form.output is None or form.as_json or form.as_csv:
        return ""
    _, dot, kind = form.output.rpartition(".")
    if dot + kind.lower() in PICTURES:
        return kind.lower()
    if kind.lower() in ("pdf", "jpg", "jpeg", "gif", "webp", "eps"):
        raise InputError(f"output: {form.output}: pictures are {' or '.join(PICTURES)}")
    return ""


def _drawn(found: Pipeline, kind: str) -> bytes:
    from iosim.report.plots import image
    from iosim.report.timeline import plot

    return image(plot(found), kind)
