"""The command line.  Only click is imported here; a command imports what it needs when it runs."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from itertools import chain
from textwrap import wrap
from threading import Timer
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import click
from click.core import ParameterSource

import iosim
from iosim.errors import InputError, IosimError, OutputError

if TYPE_CHECKING:
    from iosim.check.given import Inputs
    from iosim.problem import Attention

F = TypeVar("F", bound=Callable[..., Any])


WIDTH = 80  # of a terminal
PATIENCE = 10  # seconds after which a pipe is told what takes so long


class CheckError(IosimError):
    """A numeric check failed (exit code 1)."""


def _stages(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """One number of buffers, or one for K and one for V."""
    if value is None:
        return None
    parts = value.split(",")
    if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"--stages: {value!r} is not a whole number or two of them, like 2 or 2,1")
    return tuple(int(part) for part in parts)


def _problem_options(command: F) -> F:
    """The options that make an Attention."""
    for option in reversed(
        (
            click.option("--n", "-n", "n_q", type=int, help="Queries (and keys, without --n-k)."),
            click.option("--n-k", type=int, help="Keys.  [default: --n]"),
            click.option("--d", "-d", type=int, help="Head dimension of Q and K (and V)."),
            click.option("--d-v", type=int, help="Head dimension of V and O.  [default: --d]"),
            click.option("--batch", "-b", type=int, default=1, show_default=True, help="Batch size."),
            click.option("--heads", "-H", type=int, default=1, show_default=True, help="Query heads."),
            click.option("--kv-heads", type=int, help="Key/value heads (GQA, MQA).  [default: --heads]"),
            click.option("--dtype", default="fp16", show_default=True, help="fp16, bf16, fp32 or fp8 (e4m3) data."),
            click.option(
                "--accumulator", default="fp32", show_default=True, help="Sums of matrix products: fp32 or fp16."
            ),
            click.option("--causal", is_flag=True, help="Mask keys after the query."),
            click.option(
                "--causal-align",
                default="bottom-right",
                show_default=True,
                help="Which diagonal, when queries and keys differ in number: bottom-right or top-left.",
            ),
            click.option(
                "--window",
                type=int,
                help="Sliding window: hide keys before the last so many up to the query's; --causal hides later ones.",
            ),
            click.option("--lse", is_flag=True, help="Write the log-sum-exp too, as training needs it."),
        )
    ):
        command = option(command)
    return command


def _schedule_options(command: F) -> F:
    """The options that fix fields of the schedule."""
    for option in reversed(
        (
            click.option("--block-q", type=int, help="Query rows of a tile.  [default: by the rule above]"),
            click.option("--block-k", type=int, help="Key rows of a tile."),
            click.option(
                "--stages",
                metavar="N[,N]",
                callback=_stages,
                help="Buffers of each K and V tile: 1 = no prefetch; K,V: 2,1.",
            ),
            click.option(
                "--splits", type=int, help="Runs that split-kv cuts the keys into.  [default: from idle processors]"
            ),
            click.option("--grid-order", help="Launch order of blocks: natural, or longest-first (causal masks)."),
            click.option("--scores", help="S and P of standard in device memory: data (their dtype) or fp32."),
            click.option("--softmax", help="Softmax of standard: safe, naive or online.  [default: safe]"),
        )
    ):
        command = option(command)
    return command


_PROBLEM = ("n_q", "n_k", "d", "d_v", "batch", "heads", "kv_heads", "dtype", "accumulator", "causal", "causal_align",
            "window", "lse")  # fmt: skip
_SCHEDULE = ("block_q", "block_k", "stages", "splits", "softmax", "scores", "grid_order")
_OTHERS = ("n", "queries", "seed", "seeds", "dataflow", "hw", "fidelity", "pass", "inputs", "inputs_layout")


def _problem(options: dict[str, Any]) -> Attention:
    for name, option in (("n_q", "--n"), ("d", "--d")):
        if options[name] is None:
            instead = " or '--inputs'" if "inputs" in options else ""
            raise click.UsageError(f"Missing option '{option}'{instead}.", click.get_current_context())
    from iosim.problem import Attention

    return _aligned(Attention(**{k: options[k] for k in _PROBLEM if options[k] is not None}))


def _aligned(a: Attention) -> Attention:
    """The problem, unless a diagonal was chosen that nothing follows."""
    given = click.get_current_context().get_parameter_source("causal_align") is not ParameterSource.DEFAULT
    if given and not a.causal and a.window is None:
        raise InputError("--causal-align: changes nothing without --causal or --window")
    return a


def _problem_of_inputs(options: dict[str, Any]) -> tuple[Attention, Inputs | None]:
    """The problem, and a user's tensors where there are any; defaults of what these say are then taken out."""
    context = click.get_current_context()
    if options["inputs"] is None:
        if context.get_parameter_source("inputs_layout") is not ParameterSource.DEFAULT:
            raise InputError("--inputs-layout: changes nothing without --inputs")
        return _problem(options), None
    from iosim.check.given import load_inputs

    for name in ("batch", "heads", "dtype"):
        if context.get_parameter_source(name) is ParameterSource.DEFAULT:
            options[name] = None
    inputs = load_inputs(options["inputs"], layout=options["inputs_layout"])
    return _aligned(inputs.problem(**{k: options[k] for k in _PROBLEM if options[k] is not None})), inputs


def _as_option(message: str) -> str:
    """An error about a field, said of the option that sets it."""
    field, colon, rest = message.partition(":")
    if field not in (*_PROBLEM, *_SCHEDULE, *_OTHERS):
        return message
    return f"--{'n' if field == 'n_q' else field.replace('_', '-')}{colon}{rest}"


def _schedule(options: dict[str, Any]) -> dict[str, Any]:
    return {k: options[k] for k in _SCHEDULE if options[k] is not None}


class _Group(click.Group):
    """Suggests the nearest command."""

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        from iosim.errors import nearest

        if args and self.get_command(ctx, args[0]) is None and not args[0].startswith("-"):
            raise click.UsageError(f"no command {args[0]!r}{nearest(args[0], list(self.commands))}", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH})
@click.version_option(iosim.__version__, prog_name="iosim")
def cli() -> None:
    """Simulate and cost attention on a memory hierarchy.

    Counts the bytes that a dataflow moves through HBM, L2 and SRAM, finds where it stalls, and checks the numbers it
    computes against float64.

    Example: iosim run --n 4096 --d 128
    """


@cli.command()
@_problem_options
@click.option(
    "--dataflow", multiple=True, help="A dataflow by name, or a .py file; may be repeated.  [default: standard, flash2]"
)
@click.option(
    "--pass",
    "pass",
    help="forward, backward, or training: a forward dataflow and the one of its gradients.  [default: forward]",
)
@click.option(
    "--kernel",
    multiple=True,
    help="A kernel that people run: its dataflow with its authors' schedule; may be repeated.",
)
@click.option("--hw", multiple=True, help="A machine by name, or a .toml file; may be repeated.  [default: mp31]")
@_schedule_options
@click.option(
    "--fidelity", default="fair", show_default=True, help="fair: a processor a class of block; chip: all of them."
)
@click.option("--check/--no-check", default=True, show_default=True, help="Check the numbers against float64.")
@click.option(
    "--seed",
    type=click.IntRange(0, 2**32 - 1),
    metavar="INTEGER",
    default=0,
    show_default=True,
    help="Of the random inputs, and of the rows checked where they are too many.",
)
@click.option(
    "--inputs",
    metavar="FILE",
    help="Check your own tensors q, k, v (do, s) of a .safetensors or .npz file, which give the shape and dtype too; "
    "with --dtype they are rounded to it.",
)
@click.option(
    "--inputs-layout",
    metavar="LAYOUT",
    default="bhsd",
    show_default=True,
    help="Axes of q, k, v, do: bhsd (batch, heads, n, d) or bshd (batch, n, heads, d).",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (schema iosim.run/1).")
@click.option("--csv", "as_csv", is_flag=True, help="Print one CSV row a run.")
@click.option("--output", "-o", metavar="FILE", help="Write to this file instead of the terminal; - is the terminal.")
def run(as_json: bool, as_csv: bool, output: str | None, **options: Any) -> None:
    """Compare dataflows on machines: memory, traffic, time, check.

    Without --block-q and --block-k the tile is the largest that gives every processor a block and leaves a tenth of the
    SRAM free with two stages; the output says what was chosen, and why.

    \b
    Example: iosim run --n 4096 --d 128
             iosim run -n 8192 -d 128 -H 32 --kv-heads 8 --causal --hw h200-sxm
    """
    if as_json and as_csv:
        raise InputError("--json and --csv: give one of them")
    _require_writable(output)
    problem, inputs = _problem_of_inputs(options)
    from iosim.kernels import load_kernel
    from iosim.study.run import DATAFLOWS, compare

    options["hw"] = list(options["hw"]) or ["mp31"]
    kernels = options["kernel"] = list(options["kernel"])
    options["dataflow"] = list(options["dataflow"]) or ([] if kernels else list(DATAFLOWS))
    with _progress() as note:
        comparison = compare(
            problem,
            dataflows=[*options["dataflow"], *(load_kernel(name).dataflow() for name in kernels)],
            computes=options["pass"],
            hardware=options["hw"],
            schedule=_schedule(options),
            fidelity=options["fidelity"],
            check=options["check"],
            seed=options["seed"],
            inputs=inputs,
            note=note,
        )
    if as_json:
        import json

        from iosim.report.document import document

        text = json.dumps(document(comparison, options), indent=1, allow_nan=False) + "\n"
    elif as_csv:
        from iosim.report.document import rows_as_csv

        text = rows_as_csv(comparison)
    else:
        from iosim.report.text import render

        text = render(comparison)
    _write(text, output)
    for r in comparison.runs:
        if r.check is not None and r.check.status == "failed":
            raise CheckError(f"check of {r.dataflow.name} failed: {r.check.detail}")


@cli.command()
@click.argument("dataflow")
@_problem_options
@click.option("--hw", default="mp31", show_default=True, help="The machine whose default tile is used.")
@_schedule_options
def show(dataflow: str, **options: Any) -> None:
    """Print a dataflow's tile program as pseudo-code.

    Example: iosim show flash2 --n 4096 --d 128
    """
    from iosim.dataflows import load_dataflow
    from iosim.program import show as text_of
    from iosim.study.choose import choose
    from iosim.study.run import machine_called, require_formats, require_read, require_uneven

    problem, given, machine = _problem(options), _schedule(options), machine_called(options["hw"])
    try:
        flow = load_dataflow(dataflow)
    except InputError as error:
        raise InputError(f"DATAFLOW: {str(error).removeprefix('dataflow: ')}") from None
    require_read(given, [flow])
    require_formats(problem, machine, flow)
    schedule, _ = choose(flow, problem, machine, given)
    program = flow(problem, schedule)
    require_uneven(given, [program])
    _write(text_of(program) + "\n", None)


@cli.command()
@click.argument("files", nargs=-1)
@click.option("--hw", help="The machine of every row.  [default: the one that the row or its file names]")
@click.option("--shape", metavar="N=V,...", help="Shape of all kernels of Nsight Compute's files: n=4096,d=128.")
@click.option("--shapes", metavar="FILE", help="Shapes of Nsight Compute's kernels by ID.  [default: X.shapes.csv]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (schema iosim.validate/1).")
@click.option("--csv", "as_csv", is_flag=True, help="Print one CSV row a measured number.")
@click.option("--plot", metavar="FILE.png", help="Draw predicted against measured into this file.")
@click.option("--output", "-o", metavar="FILE", help="Write to this file instead of the terminal; - is the terminal.")
def validate(
    files: tuple[str, ...], shape: str | None, shapes: str | None, as_json: bool, as_csv: bool, **options: Any
) -> None:
    """Hold predictions against measured rows, and print the errors.

    FILES are CSV files of attention calls, hardware counters, tile sweeps or published numbers, or Nsight Compute's
    own (ncu --csv --page raw); their columns say which.  Without FILES: the measurements that ship with iosim.

    \b
    Example: iosim validate
             iosim validate mine.csv --hw h200-sxm
    """
    if as_json and as_csv:
        raise InputError("--json and --csv: give one of them")
    if shape is not None and shapes is not None:
        raise InputError("--shape and --shapes: give one of them")
    if options["plot"] is not None and not options["plot"].endswith(".png"):
        raise InputError(f"--plot: {options['plot']!r} does not end with .png")
    _require_writable(options["output"])
    if options["plot"] is not None:
        _require_writable(options["plot"], "--plot")
    from pathlib import Path

    from iosim.report.validation import as_csv as csv_text
    from iosim.report.validation import document, plot, render
    from iosim.study.validate import nsight, table
    from iosim.study.validate import validate as hold

    given = (
        [nsight.shape_record(shape)] if shape is not None else table.records(Path(shapes)) if shapes is not None else []
    )
    with _progress() as note:
        note("predicting")
        found = hold(files, hardware=options["hw"], shapes=given)
    if as_json:
        import json

        text = json.dumps(document(found), indent=1, allow_nan=False) + "\n"
    else:
        text = csv_text(found) if as_csv else render(found)
    if options["plot"] is not None:
        _write(plot(found), options["plot"], "--plot")
    _write(text, options["output"])


@cli.command()
@click.option("--n", "-n", type=int, default=8192, show_default=True, help="Keys.")
@click.option("--d", "-d", type=int, default=128, show_default=True, help="Head dimension.")
@click.option("--queries", type=int, default=512, show_default=True, help="Query rows that are compared.")
@click.option("--dataflow", multiple=True, help="A dataflow; may be repeated.  [default: all that compute O]")
@click.option("--dtype", multiple=True, help="A data format; may be repeated.  [default: fp16, bf16, fp8]")
@click.option("--accumulator", multiple=True, help="fp32 or fp16; may be repeated.  [default: both]")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the random inputs.")
@click.option("--seeds", type=int, default=1, show_default=True, help="How many, from --seed on.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object (schema iosim.precision/1).")
@click.option("--csv", "as_csv", is_flag=True, help="Print one CSV row a dataflow and format.")
@click.option("--output", "-o", metavar="FILE", help="Write to this file instead of the terminal; - is the terminal.")
def precision(as_json: bool, as_csv: bool, output: str | None, **options: Any) -> None:
    """Show each dataflow's error against float64, by number format.

    On normal inputs and on those of FlashAttention-3's Table 3, with its printed figures beside ours.

    Example: iosim precision --dtype fp8 --seeds 4
    """
    if as_json and as_csv:
        raise InputError("--json and --csv: give one of them")
    _require_writable(output)
    from iosim.study.precision import precision as compare_formats

    plural = {"dataflow": "dataflows", "dtype": "dtypes", "accumulator": "accumulators"}
    with _progress() as note:
        result = compare_formats(
            **{plural.get(name, name): value for name, value in options.items() if value != ()}, note=note
        )
    from iosim.report import precision as report

    if as_json:
        import json

        text = json.dumps(report.document(result, options), indent=1, allow_nan=False) + "\n"
    else:
        text = report.rows_as_csv(result) if as_csv else report.render(result)
    _write(text, output)


@cli.command()
@click.option("--output", "-o", metavar="FILE.toml", required=True, help="Write the profile to this file.")
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
    _require_writable(output)
    from iosim.gpu.bench import GpuBench
    from iosim.report.profile import profile_toml
    from iosim.study.calibrate import calibrate as measure_gpu

    with _progress() as note:
        found = measure_gpu(GpuBench(), name or Path(output).stem.lower(), date.today(), note)
    _write(profile_toml(found.data), output)
    measured = sum(fact.confidence == "measured" for fact in found.hardware.fields())
    click.echo(f"{output}: {measured} of {len(found.hardware.fields())} numbers measured", err=True)
    for reason in found.failed:
        click.echo(f"could not be measured: {reason}", err=True)


@cli.command()
@click.option("--output", "-o", metavar="FILE.csv", required=True, help="Write the times to this file.")
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
    _require_writable(output)
    from iosim.gpu.calls import AttentionCalls

    with _progress() as note:
        found = study.measure(calls, AttentionCalls(), note)
    if found.timed:
        _write(study.as_csv(found), output)
    click.echo(study.summary(found), err=True, nl=False)
    if not found.timed:
        raise CheckError(f"no call could be measured; {output} is not written")


@cli.group(cls=_Group)
def hw() -> None:
    """List, show and check machine profiles.

    Example: iosim hw show mp31
    """


@hw.command("list")
def hw_list() -> None:
    """The machines that ship with iosim.

    Example: iosim hw list
    """
    from iosim.report.machines import list_text

    _write(list_text(), None)


@hw.command("show")
@click.argument("name")
def hw_show(name: str) -> None:
    """Every number of a profile, with its source and confidence.

    Example: iosim hw show h200-sxm
    """
    from iosim.hardware import load_hardware
    from iosim.report.machines import show_text

    _write(show_text(load_hardware(name)), None)


@hw.command("check")
@click.argument("file")
def hw_check(file: str) -> None:
    """Check a profile file: all its mistakes, or what time prediction would still need.

    Example: iosim hw check mine.toml     (your copy of a file of hw_profiles/)
    """
    from iosim.hardware import ProfileError, load_hardware
    from iosim.report.machines import check_text

    try:
        machine = load_hardware(file)
    except ProfileError as error:
        if len(error.problems) == 1:
            raise
        heading = f"iosim: {error.origin}: {len(error.problems)} mistakes:"
        _fail("\n".join([heading, *(str(InputError(f"  {problem}")) for problem in error.problems)]), error.exit_code)
    _write(check_text(machine), None)


class _progress:  # noqa: N801 - used like a function
    """Says on a terminal what is being done; elsewhere once, on stderr, when it takes long."""

    def __enter__(self) -> Callable[[str], None]:
        self.status: Any = None
        self.timer, self.doing = Timer(PATIENCE, self._still), "starting"
        if sys.stderr is None:
            return lambda _: None
        if not sys.stderr.isatty():
            self.timer.daemon = True
            self.timer.start()
            return lambda text: setattr(self, "doing", text)
        from rich.console import Console

        self.status = Console(stderr=True).status("starting")
        self.status.start()
        return lambda text: self.status.update(text)

    def __exit__(self, *_: object) -> None:
        self.timer.cancel()
        if self.status is not None:
            self.status.stop()

    def _still(self) -> None:
        with suppress(OSError):
            print(f"iosim: after {PATIENCE} s: {self.doing}", file=sys.stderr, flush=True)


def _require_writable(path: str | None, option: str = "--output") -> None:
    """Raise before the work what writing would raise after it; leaves everything as it was."""
    if path is None or path == "-":
        if sys.stdout is None:
            raise OutputError("output: standard output is closed")
        return
    if not path:
        raise InputError(f"{option}: the file name is empty")
    from tempfile import TemporaryFile

    real = os.path.realpath(path)
    try:
        if not os.path.exists(real) or os.path.isfile(real):
            TemporaryFile(dir=os.path.dirname(real)).close()
        elif os.path.isdir(real) or not os.access(real, os.W_OK):
            code = errno.EISDIR if os.path.isdir(real) else errno.EACCES
            raise OSError(code, os.strerror(code))
    except OSError as error:
        raise OutputError(f"{option}: {path}: {error.strerror}") from error


def _write(data: str | bytes, path: str | None, option: str = "--output") -> None:
    """Print text, or write a file as a whole: a failure leaves what was there before."""
    if isinstance(data, str) and (path is None or path == "-"):
        if sys.stdout is None:
            raise OutputError("output: standard output is closed")
        sys.stdout.write(data)
        sys.stdout.flush()
        return
    if not path:
        raise InputError(f"{option}: the file name is empty")
    try:
        _write_file(data.encode() if isinstance(data, str) else data, os.path.realpath(path))
    except OSError as error:
        raise OutputError(f"{option}: {path}: {error.strerror}") from error


def _write_file(data: bytes, path: str) -> None:
    if os.path.exists(path) and not os.path.isfile(path):  # a device or a pipe cannot be replaced
        with open(path, "wb") as file:
            file.write(data)
        return
    from tempfile import NamedTemporaryFile

    with NamedTemporaryFile(dir=os.path.dirname(path), delete=False) as file:
        try:
            file.write(data)
            file.flush()
            os.chmod(file.name, os.stat(path).st_mode & 0o777 if os.path.exists(path) else 0o666 & ~_umask())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def main() -> None:
    """Run the command line; exit codes: 0 answered, 1 a check failed, 2 bad input, 3 output cannot be written.

    A reader that stops reading is no error: 0.
    """
    try:
        cli(standalone_mode=False)
        if sys.stdout is not None:
            sys.stdout.flush()
    except _Stop:
        raise
    except (BrokenPipeError, SystemExit):  # click exits by itself in this case alone, and not with 0
        _silence()  # the reader has gone, and nothing more can be said
    except (click.exceptions.Abort, KeyboardInterrupt):
        _fail("iosim: interrupted", 130)
    except click.exceptions.NoArgsIsHelpError as error:
        _fail(error.format_message(), InputError.exit_code)
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "iosim"
        _fail(f"{where}: {' '.join(error.format_message().split())}", InputError.exit_code)
    except IosimError as error:
        _fail(f"iosim: {_as_option(str(error))}", error.exit_code)
    except OSError as error:
        _silence()
        _fail(f"iosim: output: {error.strerror}", OutputError.exit_code)


def _silence() -> None:
    """Let Python write what it still holds to nowhere at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


class _Stop(SystemExit):
    """The end of the command line with an exit code of ours."""


def _wrapped(line: str) -> list[str]:
    return wrap(line, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def _fail(message: str, code: int) -> NoReturn:
    """Say why and leave, in lines that a terminal gets wrapped; that it cannot be said changes no exit code."""
    try:
        if sys.stderr is not None:
            if sys.stderr.isatty():
                message = "\n".join(chain.from_iterable(map(_wrapped, message.splitlines())))
            print(message, file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    raise _Stop(code)
