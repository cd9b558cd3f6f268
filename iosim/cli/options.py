"""Options that commands share: problem, dataflow, machine, schedule; and the objects that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from iosim.errors import InputError

if TYPE_CHECKING:
    from iosim.check.given import Inputs
    from iosim.dataflows import Dataflow
    from iosim.hardware import Hardware
    from iosim.problem import Attention
    from iosim.study.vary import Axis, Case

F = TypeVar("F", bound=Callable[..., Any])


def _stages(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    """One number of buffers, or one for K and one for V."""
    if value is None:
        return None
    parts = value.split(",")
    if len(parts) > 2 or not all(part.strip().isdecimal() for part in parts):
        raise InputError(f"--stages: {value!r} is not a whole number or two of them, like 2 or 2,1")
    return tuple(int(part) for part in parts)


def problem_options(command: F) -> F:
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


def schedule_options(command: F) -> F:
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


def problem_of(options: dict[str, Any]) -> Attention:
    """The problem that the options of `problem_options` make."""
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


def problem_of_inputs(options: dict[str, Any]) -> tuple[Attention, Inputs | None]:
    """The problem, and a user's tensors where there are any; defaults of what these say are then taken out."""
    context = click.get_current_context()
    if options["inputs"] is None:
        if context.get_parameter_source("inputs_layout") is not ParameterSource.DEFAULT:
            raise InputError("--inputs-layout: changes nothing without --inputs")
        return problem_of(options), None
    from iosim.check.given import load_inputs

    for name in ("batch", "heads", "dtype"):
        if context.get_parameter_source(name) is ParameterSource.DEFAULT:
            options[name] = None
    inputs = load_inputs(options["inputs"], layout=options["inputs_layout"])
    return _aligned(inputs.problem(**{k: options[k] for k in _PROBLEM if options[k] is not None})), inputs


def schedule_of(options: dict[str, Any]) -> dict[str, Any]:
    """The fields of the schedule that were given."""
    return {k: options[k] for k in _SCHEDULE if options[k] is not None}


@dataclass(frozen=True, slots=True)
class Subject:
    """What a command that looks into one dataflow on one machine is about."""

    problem: Attention
    flow: Dataflow
    machine: Hardware
    given: Mapping[str, Any]
    fidelity: str


def subject_options(command: F) -> F:
    """The options that make a Subject: a problem, a dataflow or kernel, a machine, fields of the schedule."""
    options = (
        click.option("--dataflow", help="A dataflow by name, or a .py file.  [default: flash2]"),
        click.option("--kernel", help="A kernel that people run, in place of a dataflow."),
        click.option("--hw", default="mp31", show_default=True, help="A machine by name, or a .toml file."),
        schedule_options,
        click.option(
            "--fidelity", default="fair", show_default=True, help="fair: one processor a class of block; chip: all."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return problem_options(command)


def subject_of(options: dict[str, Any]) -> Subject:
    """The Subject of the options of `subject_options`; raises InputError where its parts do not go together."""
    from iosim.dataflows import load_dataflow
    from iosim.kernels import load_kernel
    from iosim.study.run import fields_of, machine_called, require_formats, require_read

    problem, given, machine = problem_of(options), fields_of(schedule_of(options)), machine_called(options["hw"])
    if options["kernel"] is not None and options["dataflow"] is not None:
        raise InputError("--dataflow and --kernel: give one of them")
    kernel = options["kernel"]
    flow = load_kernel(kernel).dataflow() if kernel is not None else load_dataflow(options["dataflow"] or "flash2")
    require_read(given, [flow])
    require_formats(problem, machine, flow)
    return Subject(problem, flow, machine, given, options["fidelity"])


def case_of(
    options: dict[str, Any], vary: Sequence[str] = (), settings: Sequence[str] = ()
) -> tuple[Case, list[Axis], list[Axis]]:
    """The Subject as a Case that can be varied, the fields that --vary varies, and those that --set sets.

    Where --n or --d is varied or set, the option can be left out.
    """
    from iosim.study.vary import Case, Source, axis

    if options["kernel"] is not None and options["dataflow"] is not None:
        raise InputError("--dataflow and --kernel: give one of them")
    source = Source(options["dataflow"] or "flash2", options["kernel"] or "")
    flow = source.load()
    axes = [axis(text, flow) for text in vary], [axis(text, flow, "set") for text in settings]
    for one in (*axes[0], *axes[1]):
        option = {"n": "n_q"}.get(one.name, one.name)
        if option in _PROBLEM and _is_given(option):
            raise InputError(f"{'vary' if one in axes[0] else 'set'}: {one.name}: is given as an option too")
        if option in ("n_q", "d"):
            options[option] = one.values[0]
    subject = subject_of(options)
    return Case(subject.problem, source, subject.machine, subject.given, subject.fidelity), *axes


def _is_given(option: str) -> bool:
    """Whether the command line gives it."""
    return click.get_current_context().get_parameter_source(option) is not ParameterSource.DEFAULT
