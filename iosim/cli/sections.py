"""What the commands of `iosim report` share: their options, and how a Section is given out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import TYPE_CHECKING, Any

import click

from iosim.cli.options import all_of, batch_of, batch_options, layer_at, whole
from iosim.cli.output import answer_options, progress, require_writable, write
from iosim.cli.problem_file import problem_file_option
from iosim.errors import InputError

if TYPE_CHECKING:
    from iosim.hardware import Hardware
    from iosim.report.sections import Section
    from iosim.study.batch import Batch
    from iosim.study.packed import Packed
    from iosim.study.run import Note

KINDS = (".png", ".svg")
_SHAPE = ("d", "batch", "heads", "kv_heads", "dtype", "causal")
_MODEL = ("config", "layers")


def lengths_of(context: click.Context, parameter: click.Parameter, value: str) -> tuple[int, ...]:
    """Whole numbers with commas between, in rising order."""
    del context
    parts = [part.strip() for part in value.split(",")]
    wrong = next((part for part in parts if whole(part) is None), None)
    option = next(name for name in parameter.opts if name.startswith("--"))
    if wrong is not None:
        raise InputError(f"{option}: {wrong!r} in {value!r} is not a whole number; like 512,2048,4096")
    numbers = [int(part) for part in parts]
    if twice := next((n for n, times in Counter(numbers).items() if times > 1), None):
        raise InputError(f"{option}: {twice} is given twice")
    return tuple(sorted(numbers))


def shape_options(n: str, heads: int, *, batches: bool = False) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options of a problem at several lengths, given to the command as `lengths` and `shape`.

    With `batches` there are those of a Batch too, given as `batch`; None where --lengths is not.
    """

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @click.option(
            "--n", "-n", "n_q", metavar="N,...", default=n, show_default=True, callback=lengths_of,
            help="Queries and keys, one or several numbers.",
        )  # fmt: skip
        @click.option("--d", "-d", type=int, default=128, show_default=True, help="Head dimension.")
        @click.option("--batch", "-b", type=int, default=1, show_default=True, help="Batch size.")
        @click.option("--heads", "-H", type=int, default=heads, show_default=True, help="Query heads.")
        @click.option("--kv-heads", type=int, help="Key/value heads (GQA, MQA).  [default: --heads]")
        @click.option("--dtype", default="fp16", show_default=True, help="fp16, bf16, fp32 or fp8 (e4m3) data.")
        @click.option("--causal", is_flag=True, help="Mask keys after the query.")
        @click.option("--config", metavar="FILE.json", help="A model's config.json: the shape of one of its layers.")
        @click.option("--layers", help="With --config: full, sliding or all layers.  [default: all]")
        @problem_file_option
        @all_of(*([batch_options] if batches else []))
        @wraps(command)
        def with_shape(n_q: tuple[int, ...], **options: Any) -> Any:
            batch = None
            if batches:
                from iosim.study.batch import FIELDS

                batch = batch_of({"n_q": n_q, **options})
                options = {name: value for name, value in options.items() if name not in ("lengths", *FIELDS)}
            own = {name: options.pop(name) for name in (*_SHAPE, *_MODEL)}
            options |= {"batch": batch} if batches else {}
            return command(lengths=n_q, shape=_shape_of(n_q, own, batch), **options)

        return with_shape

    return decorate


def _shape_of(lengths: tuple[int, ...], options: dict[str, Any], batch: Batch | None) -> dict[str, Any]:
    """Fields of Attention but the lengths: those of the options, or of one layer of the model that they name."""
    layer = layer_at(lengths, options, batch)
    if layer is None:
        return {name: value for name in _SHAPE if (value := options[name]) is not None}
    return {name: value for name in (*_SHAPE, "d_v", "window") if (value := getattr(layer, name)) is not None}


def machines_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """--hw, which may be repeated, given to the command as `hw`."""
    return click.option(
        "--hw", multiple=True, help="A machine by name, or a .toml file; may be repeated.  [default: mp31]"
    )(command)


def dataflows_option(command: Callable[..., Any]) -> Callable[..., Any]:
    """--dataflow, which may be repeated, given to the command as `dataflow`."""
    return click.option("--dataflow", multiple=True, help="By name; may be repeated.  [default: all that compute O]")(
        command
    )


def asked(
    lengths: tuple[int, ...], shape: Mapping[str, Any], dataflow: tuple[str, ...], hw: tuple[str, ...]
) -> tuple[list[Hardware], list[str], dict[str, Any]]:
    """The machines and dataflows of a report (by default mp31, and all that compute O), and what was asked for.

    Raises InputError for unknown ones, and for dataflows that do not compute O.
    """
    from iosim.dataflows import load_dataflow
    from iosim.study.cases import forward_dataflows
    from iosim.study.run import machines_called

    machines = machines_called(hw or ("mp31",))
    names = list(dataflow) or forward_dataflows()
    for name in names:
        if (computes := load_dataflow(name).computes) != "forward":
            raise InputError(f"dataflow: {name} computes {computes}; reports compare dataflows that compute O")
        if names.count(name) > 1:
            raise InputError(f"dataflow: {name} is given twice")
    given = click.get_current_context().params
    model = {name: value for name in _MODEL if (value := given.get(name)) is not None}
    request = {**model, **({"n": list(lengths)} if lengths else {}), **shape, "hw": [m.name for m in machines]}
    return machines, names, request | ({"dataflow": list(dataflow)} if dataflow else {})


def packed_of(
    batch: Batch, shape: Mapping[str, Any], dataflow: tuple[str, ...], hw: tuple[str, ...], note: Note
) -> tuple[list[Packed], dict[str, Any]]:
    """A batch on the machines by the dataflows (by default mp31, and all that can), and what was asked for."""
    from iosim.study.packed import dataflows, packed

    machines, names, request = asked((), shape, dataflow or dataflows(shape), hw)
    return list(packed(batch, shape, machines, names, note)), {**request, **batch.as_dict(), "dataflow": names}


def section_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """The options --plot, --json, --csv and --output of a command that returns `make(note) -> Section`."""

    @click.option("--plot", metavar="FILE", help="Draw the plots into this .png or .svg file.")
    @answer_options("iosim.report/1", "table row")
    @wraps(command)
    def with_forms(form: Any, plot: str | None, **options: Any) -> None:
        if plot is not None:
            if not plot.endswith(KINDS):
                raise InputError(f"--plot: {plot!r} does not end with {' or '.join(KINDS)}")
            require_writable(plot, "--plot")
        make: Callable[[Note], Section] = command(**options)
        with progress() as note:
            section = make(note)
        from iosim.report import sections

        if plot is not None:
            write(sections.picture(section, plot[-3:]), plot, "--plot")
        form.give(partial(sections.text, section), partial(sections.document, section), partial(sections.csv, section))

    return with_forms
