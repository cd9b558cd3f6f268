"""What `iosim serve` and `iosim report serving` share: the options that make a Server."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, TypeVar

import click
from click.core import ParameterSource

from iosim.cli.options import all_of, cache_of, cache_options
from iosim.cli.problem_file import problem_file_option
from iosim.errors import InputError

if TYPE_CHECKING:
    from iosim.study.arrivals import Policy
    from iosim.study.serving import Server

F = TypeVar("F", bound=Callable[..., Any])
POLICY = ("step_tokens", "sequences", "reserve", "beside")  # of requests that arrive
SHAPE = ("d", "d_v", "heads", "kv_heads", "dtype", "window", "softcap", "sinks")


def server_options(command: F) -> F:
    """The options that make a Server."""
    return all_of(
        click.option("--config", metavar="FILE.json", help="A model's config.json: the attention of all its layers."),
        click.option("--layers", help="With --config: full, sliding or all layers.  [default: all]"),
        click.option("--heads", "-H", type=int, default=32, show_default=True, help="Query heads of one layer."),
        click.option("--kv-heads", type=int, help="Key/value heads.  [default: --heads]"),
        click.option("--d", "-d", type=int, default=128, show_default=True, help="Head dimension."),
        click.option("--d-v", type=int, help="Head dimension of V and O.  [default: --d]"),
        click.option("--window", type=int, help="Sliding window: the last so many keys."),
        click.option("--dtype", default="fp16", show_default=True, help="fp16 or bf16 data."),
        click.option("--hw", default="mp31", show_default=True, help="A machine by name, or a .toml file."),
        click.option("--dataflow", default="split-kv", show_default=True, help="split-kv or flash2."),
        click.option("--softcap", type=float, metavar="C", help="Scores s become C * tanh(s / C)."),
        click.option("--sinks", is_flag=True, help="Attention sinks: a learned logit a head in the softmax's sum."),
        click.option(
            "--pack-gqa/--no-pack-gqa",
            default=None,
            help="Query heads of a K/V head as rows of one tile.  [default: wherever some share one]",
        ),
        cache_options(16),
        problem_file_option,
    )(command)


def server_of(options: dict[str, Any]) -> Server:
    """The Server of these options; raises InputError where they contradict one another."""
    from iosim.problem import MAX_N, Attention
    from iosim.study.models import ALL, load_model
    from iosim.study.ragged import RULES, Cache
    from iosim.study.run import machine_called
    from iosim.study.serving import Layer, Server, layers_of

    machine = machine_called(options["hw"])
    if options["config"] is None:
        if options["layers"] is not None:
            raise InputError("--layers: changes nothing without --config")
        shape = {name: options[name] for name in SHAPE if options[name] is not None}
        layers: tuple[Layer, ...] = (Layer("full", 1, Attention(n_q=1, causal=True, **shape)),)
    else:
        own = {name: _given(options, name) for name in ("heads", "kv_heads", "d", "d_v", "dtype")}
        model = load_model(options["config"], **own)
        kinds = ALL if options["layers"] is None else options["layers"]
        layers = layers_of(
            model.case(n=MAX_N, phase="decode", layers=kinds, window=options["window"], dtype=own["dtype"])
        )
    given = {} if options["pack_gqa"] is None else {"pack_gqa": options["pack_gqa"]}
    rule = options["split_rule"] or RULES[0]
    return Server(layers, machine, options["dataflow"], given, rule, cache_of(options) or Cache())


def policy_of(options: dict[str, Any]) -> Policy:
    """How the server batches requests that arrive."""
    from iosim.problem import require_number
    from iosim.study.arrivals import Policy

    given = {name: options[name] for name in POLICY if options[name] is not None}
    reserved = round(require_number("reserve", given.pop("reserve", 0), 0, 10**6) * 1e9)
    beside = require_number("beside", given.pop("beside", 0), 0, 10**9) / 1e6
    return Policy(**given, reserved=reserved, beside=beside)


def request_of(options: dict[str, Any], **more: Any) -> dict[str, Any]:
    """What was asked for, for the document."""
    return {name: value for name, value in options.items() if value is not None} | more


def _given(options: dict[str, Any], name: str) -> Any:
    """An option's value, or None where it is the default."""
    source = click.get_current_context().get_parameter_source(name)
    return None if source is ParameterSource.DEFAULT else options[name]
