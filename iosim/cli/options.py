"""Options that commands share: problem, dataflow, machine, schedule; and the objects that they make."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from iosim.cli.problem_file import problem_file_option
from iosim.errors import InputError

if TYPE_CHECKING:
    from iosim.check.given import Inputs
    from iosim.dataflows import Dataflow
    from iosim.hardware import Hardware
    from iosim.problem import Attention
    from iosim.study.batch import Batch
    from iosim.study.models import ModelCase
    from iosim.study.ragged import Cache
    from iosim.study.vary import Axis, Case

MOST_DIGITS = 18  # of a whole number

F = TypeVar("F", bound=Callable[..., Any])


def all_of(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options as one decorator, in the order in which the help lists them."""

    def decorate(command: F) -> F:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def whole(text: str) -> int | None:
    """The whole number that a text is, or None; one of more than 18 digits is none that anything takes."""
    return int(text) if text.strip().isdecimal() and len(text) <= MOST_DIGITS else None


def wholes(text: str) -> tuple[int, ...] | None:
    """Whole numbers with commas between, or None."""
    found = [number for part in text.split(",") if (number := whole(part)) is not None]
    return tuple(found) if len(found) == text.count(",") + 1 else None


def stages_of(value: str) -> tuple[int, ...]:
    """One number of buffers, or one for K and one for V."""
    found = wholes(value)
    if found is None or len(found) > 2:
        raise InputError(f"--stages: {value!r} is not a whole number or two of them, like 2 or 2,1")
    return found


def _stages(_: click.Context, __: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    return None if value is None else stages_of(value)


_OPERATIONS = (
    click.option("--softcap", type=float, metavar="C", help="Scores s become C * tanh(s / C)."),
    click.option("--alibi", is_flag=True, help="ALiBi: scores fall with the distance of query and key."),
    click.option(
        "--bias",
        metavar="KIND",
        help="Add a bias tensor to the scores: shared by all heads, one for all heads, or full.",
    ),
    click.option("--sinks", is_flag=True, help="Attention sinks: a learned logit a head in the softmax's sum."),
    click.option("--global-tokens", type=int, metavar="N", help="With --window: the first N keys stay visible."),
    click.option("--dropout", type=float, metavar="P", help="Probability with which a weight is dropped."),
    click.option(
        "--block-mask",
        metavar="FILE",
        help="Keep only the blocks of scores that are 1 in a table of 0 and 1 (.npy, .npz or text).",
    ),
)


def problem_options(command: F) -> F:
    """The options that make an Attention."""
    return all_of(
        click.option("--n", "-n", "n_q", type=int, help="Queries (and keys, without --n-k)."),
        click.option("--n-k", type=int, help="Keys.  [default: --n]"),
        click.option("--d", "-d", type=int, help="Head dimension of Q and K (and V)."),
        click.option("--d-v", type=int, help="Head dimension of V and O.  [default: --d]"),
        click.option("--batch", "-b", type=int, default=1, show_default=True, help="Batch size."),
        click.option("--heads", "-H", type=int, default=1, show_default=True, help="Query heads."),
        click.option("--kv-heads", type=int, help="Key/value heads (GQA, MQA).  [default: --heads]"),
        click.option("--dtype", default="fp16", show_default=True, help="fp16, bf16, fp32 or fp8 (e4m3) data."),
        click.option("--accumulator", default="fp32", show_default=True, help="Sums of matrix products: fp32 or fp16."),
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
        *_OPERATIONS,
        click.option(
            "--layout",
            default="bhsd",
            show_default=True,
            help="Q, K, V and O in memory: bhsd, bshd, packed (QKV in one), or with padding after each row: bhsd+8.",
        ),
        click.option("--lse", is_flag=True, help="Write the log-sum-exp too, as training needs it."),
        click.option(
            "--config",
            metavar="FILE.json",
            help="A model's config.json (Hugging Face), which gives heads, d, dtype, mask and layers.",
        ),
        click.option(
            "--phase",
            help="With --config: prefill, decode (one query sees --n keys) or training.  [default: prefill]",
        ),
        click.option("--layers", help="With --config: full, sliding or all layers.  [default: all]"),
        problem_file_option,
    )(command)


def cache_options(page: int | None) -> Callable[[F], F]:
    """The options that make a Cache, by default in pages of so many tokens, or none."""
    shown = page is not None
    return all_of(
        click.option("--page", type=int, default=page, show_default=shown, help="Tokens in a page of the K/V cache."),
        click.option("--cache-dtype", help="fp8 or int8: K and V in 8 bits with fp32 scales.  [default: --dtype]"),
        click.option("--cache-scales", help="With --cache-dtype: a scale for each token, or head.  [default: token]"),
        click.option("--shared-prefix", type=int, metavar="N", help="First tokens that all sequences share."),
        click.option(
            "--split-rule",
            help="How split-kv cuts keys: balanced (all blocks have a slot), flash2, none.  [default: balanced]",
        ),
    )


def cache_of(options: Mapping[str, Any]) -> Cache | None:
    """The Cache of the options of `cache_options`; None where none of them is given."""
    from iosim.study.batch import PAGED
    from iosim.study.ragged import Cache

    given = {of: options[name] for name, of in PAGED.items() if options[name] is not None}
    return Cache(**given) if given else None


def batch_options(command: F) -> F:
    """The options that make a Batch."""
    return all_of(
        click.option(
            "--lengths",
            metavar="N,...",
            help="Sequences in one launch, in place of --n and --batch: lengths, queries:keys, or a file of them.",
        ),
        cache_options(None),
    )(command)


def batch_of(options: Mapping[str, Any]) -> Batch | None:
    """The Batch of --lengths and of its cache; None without.

    Raises InputError for options that go with --lengths alone, or are none beside it.
    """
    from iosim.study.batch import FIELDS, Batch
    from iosim.study.ragged import lengths_of

    if options["lengths"] is None:
        for name in FIELDS:
            if options[name] is not None:
                raise InputError(f"{name}: changes nothing without --lengths")
        return None
    for name in WITHOUT_LENGTHS:
        if name in options and (_is_given(name) or options[name] is True):
            raise InputError(f"{name}: is not taken with --lengths")
    rule = {} if options["split_rule"] is None else {"split_rule": options["split_rule"]}
    return Batch(sequences=lengths_of(options["lengths"]), cache=cache_of(options), **rule)


def schedule_options(command: F) -> F:
    """The options that fix fields of the schedule."""
    return all_of(
        click.option("--block-q", type=int, help="Query rows of a tile.  [default: by the rule above]"),
        click.option("--block-k", type=int, help="Key rows of a tile."),
        click.option(
            "--stages",
            metavar="N[,N]",
            callback=_stages,
            help="Buffers of each K and V tile: 1 = no prefetch; K,V: 2,1.",
        ),
        click.option(
            "--splits",
            type=int,
            help="Runs that split-kv cuts the keys into (from idle processors), flash1 the queries.",
        ),
        click.option(
            "--pack-gqa/--no-pack-gqa",
            default=None,
            help="Query heads of a K/V head as rows of one tile.  [default: with --lengths]",
        ),
        click.option("--grid-order", help="Launch order of blocks: natural, or longest-first (causal masks)."),
        click.option("--scores", help="S and P of standard in device memory: data (their dtype) or fp32."),
        click.option("--softmax", help="Softmax of standard: safe, naive or online.  [default: safe]"),
    )(command)


_CHANGES = ("softcap", "alibi", "bias", "sinks", "global_tokens", "dropout", "block_mask", "layout")
_PROBLEM = ("n_q", "n_k", "d", "d_v", "batch", "heads", "kv_heads", "dtype", "accumulator", "causal", "causal_align",
            "window", "lse", *_CHANGES)  # fmt: skip
_SCHEDULE = ("block_q", "block_k", "stages", "splits", "softmax", "scores", "pack_gqa", "grid_order")
WITHOUT_LENGTHS = ("n_q", "n_k", "batch", "causal_align", "lse", "block_mask", "inputs", "inputs_layout",
                   "kernel")  # fmt: skip


_FILLED = ("heads", "kv_heads", "d", "d_v")  # by a model's file, or by the option where the file has no such field


def problem_of(options: dict[str, Any]) -> Attention:
    """The problem that the options of `problem_options` make; of a model's layers, which are said on stderr.

    With lengths it is what the sequences have in common.
    """
    if options.get("lengths") is not None:
        options = {**options, "n_q": _longest(options), "n_k": None, "batch": 1}
    if (case := model_of(options)) is not None:
        return one_layer(case) if options.get("lengths") is None else layer_of_lengths(case)
    for name, option in (("n_q", "--n"), ("d", "--d")):
        if options[name] is None:
            instead = " or '--inputs'" if "inputs" in options else ""
            instead += " or '--config'" if name == "d" else ""
            raise click.UsageError(f"Missing option '{option}'{instead}.", click.get_current_context())
    from iosim.problem import Attention

    return _aligned(Attention(**_fields(options)))


def one_layer(case: ModelCase, tokens: str = "") -> Attention:
    """The problem of one layer of a model, which is said on stderr; `tokens` says of what, where it is not --n."""
    from iosim.report.model import headline

    problem = case.one()
    click.echo(f"iosim: one layer of this model. {headline(case, tokens)}", err=True)
    return problem


def layer_at(lengths: Sequence[int], options: dict[str, Any], batch: Batch | None = None) -> Attention | None:
    """One layer of the model of --config in the prefill of as many tokens as the longest of `lengths`; None without.

    Of a `batch` it is what its sequences have in common.  `options` may lack those of `problem_options` that the
    command does not have.
    """
    longest = max(lengths) if batch is None else max(map(max, batch.sequences))
    case = model_of({**dict.fromkeys((*_PROBLEM, "phase")), **options, "n_q": longest})
    if case is None or batch is not None:
        return None if case is None else layer_of_lengths(case)
    return one_layer(case, f"{', '.join(f'{n:,}' for n in lengths)} tokens")


def layer_of_lengths(case: ModelCase) -> Attention:
    """What sequences of any lengths have in common in a layer of a model; the last query of each sees all keys."""
    from dataclasses import replace

    if case.phase == "training":
        raise InputError("phase: training is not taken with --lengths; prefill and decode are")
    if case.phase == "decode" and case.model.latent is not None:
        raise InputError("phase: decode from a latent is not taken with --lengths, whose dataflows read K and V apart; "
                         "--n with --dataflow mla takes it")  # fmt: skip
    shape = one_layer(case, "sequences of their own lengths")
    return replace(shape, n_q=1, n_k=1, causal=case.model.causal)


def _longest(options: dict[str, Any]) -> int:
    """The most queries or keys of a sequence of --lengths."""
    from iosim.study.ragged import lengths_of

    return max(map(max, lengths_of(options["lengths"])))


def _fields(options: dict[str, Any]) -> dict[str, Any]:
    """The fields of the problem that have a value; a block mask is read from its file."""
    given = {k: options[k] for k in _PROBLEM if options[k] is not None}
    if "block_mask" in given:
        from iosim.blockmask import load_block_mask

        given["block_mask"] = load_block_mask(given["block_mask"])
    return given


def model_of(options: dict[str, Any]) -> ModelCase | None:
    """The model of --config at work, or None without one; raises InputError for options that contradict it."""
    if options["config"] is None:
        for name in ("phase", "layers"):
            if options[name] is not None:
                raise InputError(f"--{name}: changes nothing without --config")
        return None
    if options["n_q"] is None:
        raise click.UsageError("Missing option '--n'.", click.get_current_context())
    from iosim.study.models import ALL, PHASES, load_model

    model = load_model(
        options["config"], dtype=_given(options, "dtype"), **{name: _given(options, name) for name in _FILLED}
    )
    phase = PHASES[0] if options["phase"] is None else options["phase"]
    if options["causal"] and not (model.causal and phase != "decode"):
        raise InputError(f"--causal: the {phase} of {model.origin} has no causal mask")
    if _given(options, "causal_align") is not None:
        raise InputError("--causal-align: the last query of a model sees every key")
    return model.case(
        n=options["n_q"],
        batch=options["batch"],
        phase=phase,
        layers=ALL if options["layers"] is None else options["layers"],
        n_k=options["n_k"],
        window=options["window"],
        dtype=_given(options, "dtype"),
        accumulator=options["accumulator"],
        lse=options["lse"] or None,
        **{name: value for name, value in _fields(options).items() if name in _CHANGES and value},
    )


def _given(options: dict[str, Any], name: str) -> Any:
    """An option's value, or None where it is the default."""
    source = click.get_current_context().get_parameter_source(name)
    return None if source is ParameterSource.DEFAULT else options[name]


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
    if options["config"] is not None:
        raise InputError("--config and --inputs: give one of them")
    from iosim.check.given import load_inputs

    for name in ("batch", "heads", "dtype"):
        if context.get_parameter_source(name) is ParameterSource.DEFAULT:
            options[name] = None
    inputs = load_inputs(options["inputs"], layout=options["inputs_layout"])
    return _aligned(inputs.problem(**_fields(options))), inputs


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
    batch: Batch | None = None


def subject_options(command: F) -> F:
    """The options that make a Subject: a problem, a dataflow or kernel, a machine, fields of the schedule."""
    return all_of(
        problem_options,
        click.option("--dataflow", help="A dataflow by name, or a .py file.  [default: flash2]"),
        click.option("--kernel", help="A kernel that people run, in place of a dataflow."),
        click.option("--hw", default="mp31", show_default=True, help="A machine by name, or a .toml file."),
        schedule_options,
        click.option(
            "--fidelity", default="fair", show_default=True, help="fair: one processor a class of block; chip: all."
        ),
    )(command)


def subject_of(options: dict[str, Any]) -> Subject:
    """The Subject of the options of `subject_options`; raises InputError where its parts do not go together."""
    from iosim.dataflows import load_dataflow
    from iosim.kernels import load_kernel
    from iosim.study.run import fields_of, machine_called, require_formats, require_read

    problem, given, machine = problem_of(options), fields_of(schedule_of(options)), machine_called(options["hw"])
    if options["kernel"] is not None and options["dataflow"] is not None:
        raise InputError("--dataflow and --kernel: give one of them")
    kernel = options["kernel"]
    if options["phase"] == "training" and kernel is None and options["dataflow"] is None:
        raise InputError(
            "--phase: training has two passes, and this takes one: give --dataflow flash2 or flash-backward"
        )
    flow = load_kernel(kernel).dataflow() if kernel is not None else load_dataflow(options["dataflow"] or "flash2")
    require_read(given, [flow])
    require_formats(problem, machine, flow)
    batch = batch_of(options) if "lengths" in options else None
    return Subject(problem, flow, machine, given, options["fidelity"], batch)


def window_options(iterations: str, kernel: str = "the one that takes longest") -> Callable[[F], F]:
    """The options that say which part of a recorded run is shown; with the defaults of iterations and kernel."""

    return all_of(
        click.option(
            "--program-kernel",
            metavar="NAME",
            help=f"Kernel of the program, where it has several.  [default: {kernel}]",
        ),
        click.option(
            "--iterations",
            metavar="A..B",
            default=iterations,
            show_default=True,
            callback=_iterations,
            help="Loop iterations from A to before B, or all.",
        ),
        click.option("--block", type=int, help="Show this block alone, by its number in launch order."),
        click.option("--processor", type=int, help="The processor to show (--fidelity chip)."),
    )


def _iterations(_: click.Context, __: click.Parameter, value: str) -> tuple[int, int | None]:
    """ "0..8" as (0, 8), "all" as (0, None)."""
    if value == "all":
        return 0, None
    first, last = (whole(end) for end in value.partition("..")[::2])
    if first is None or last is None or first >= last:
        raise InputError(f"--iterations: {value!r} is not A..B with A below B, like 0..8, or all")
    return first, last


def window_of(options: dict[str, Any]) -> dict[str, Any]:
    """The arguments of `pipeline` that the options of `window_options` make."""
    if options["block"] is not None and options["processor"] is not None:
        raise InputError("--block and --processor: give one of them")
    names = ("iterations", "block", "processor")
    return {**{name: options[name] for name in names}, "kernel": options["program_kernel"]}


def case_of(
    options: dict[str, Any], vary: Sequence[str] = (), settings: Sequence[str] = ()
) -> tuple[Case, list[Axis], list[Axis]]:
    """The Subject as a Case that can be varied, the fields that --vary varies, and those that --set sets.

    Where --n or --d is varied or set, the option can be left out.
    """
    from iosim.study.batch import FIELDS as BATCH_FIELDS
    from iosim.study.vary import Case, Source, axis

    if options["kernel"] is not None and options["dataflow"] is not None:
        raise InputError("--dataflow and --kernel: give one of them")
    source = Source(options["dataflow"] or "flash2", options["kernel"] or "")
    flow = source.load()
    axes = [axis(text, flow) for text in vary], [axis(text, flow, "set") for text in settings]
    for one in (*axes[0], *axes[1]):
        option = {"n": "n_q"}.get(one.name, one.name)
        if option in (*_PROBLEM, *BATCH_FIELDS) and is_typed(option):
            raise InputError(f"{'vary' if one in axes[0] else 'set'}: {one.name}: is given as an option too")
        if option in ("n_q", "d"):
            options[option] = one.values[0]
    subject = subject_of(options)
    made = Case(subject.problem, source, subject.machine, subject.given, subject.fidelity, subject.batch)
    return made, *axes


def is_typed(option: str) -> bool:
    """Whether the command line gives it; what a file gives, other options may change."""
    return click.get_current_context().get_parameter_source(option) is ParameterSource.COMMANDLINE


def _is_given(option: str) -> bool:
    """Whether the command line or a file gives it."""
    return click.get_current_context().get_parameter_source(option) is not ParameterSource.DEFAULT
