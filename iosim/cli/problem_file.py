"""`--problem FILE.toml`: the options of a problem, of its cache and of its lengths, from a file."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from iosim.cli.group import OF_LENGTHS, lengths_hint
from iosim.errors import InputError, nearest
from iosim.files import read_text, toml

F = TypeVar("F", bound=Callable[..., Any])
SCHEMA = "iosim.problem/1"
MOST_BYTES = 2**20
BITS = 63  # of TOML's whole numbers, beside the sign
NAMES = ("n", "n_k", "d", "d_v", "batch", "heads", "kv_heads", "dtype", "accumulator", "causal", "causal_align",
         "window", "softcap", "alibi", "bias", "sinks", "global_tokens", "dropout", "block_mask", "lse", "config",
         "phase", "layers", "lengths", "page", "shared_prefix", "cache_dtype", "cache_scales", "split_rule",
         "pack_gqa")  # fmt: skip
LISTS = ("n", "batch", "lengths")  # texts of whole numbers, in some commands; a number is a list of one


def problem_file_option(command: F) -> F:
    """--problem, whose values stand where their options are not given."""
    return click.option(
        "--problem",
        metavar="FILE.toml",
        is_eager=True,
        expose_value=False,
        callback=_read,
        help='Options of the problem from a file with schema = "iosim.problem/1"; those given win.',
    )(command)


def _read(context: click.Context, _: click.Parameter, path: str | None) -> None:
    """Make the values of the file the command's defaults."""
    if path is None:
        return
    options = {max(p.opts, key=len)[2:].replace("-", "_"): p for p in context.command.params if p.opts[0][:1] == "-"}
    found = dict(context.default_map or {})
    for name, value in load_problem(path).items():
        parameter = options.get(name)
        if parameter is None or parameter.name is None:
            hint = f"; {lengths_hint()}" if f"--{name.replace('_', '-')}" in OF_LENGTHS else ""
            raise InputError(f"--problem: {path}: {name} is not taken by {context.command_path}{hint}")
        found[parameter.name] = _checked(parameter.type, name, value, f"--problem: {path}: {name}")
    context.default_map = found


def load_problem(path: str) -> dict[str, Any]:
    """The fields of a problem file, lists of lengths as one text.  Raises InputError with the file and the field."""
    origin = f"--problem: {path}"
    document = toml(read_text(path, MOST_BYTES, "a problem", "TOML", origin), origin)
    if document.pop("schema", None) != SCHEMA:
        raise InputError(f'--problem: {path}: needs schema = "{SCHEMA}"')
    out = {}
    for given, value in document.items():
        name = given.replace("-", "_")
        if name not in NAMES:
            raise InputError(f"--problem: {path}: {given!r:.60} is no field of a problem{nearest(name, NAMES)}")
        if any(isinstance(v, int) and v.bit_length() > BITS for v in (value if isinstance(value, list) else [value])):
            raise InputError(f"--problem: {path}: {given}: is a whole number of more than {BITS} bits")
        if name == "lengths" and isinstance(value, list):
            value = ",".join(map(str, value))
        if not isinstance(value, int | float | str):
            raise InputError(f"--problem: {path}: {given}: {value!r:.60} is not a value")
        out[name] = value
    return out


def _checked(kind: object, name: str, value: float | str, where: str) -> float | str:
    """A value that an option of this kind takes as it stands; raises InputError, said of `where`, for another."""
    number = isinstance(value, int | float) and not isinstance(value, bool)
    whole = number and isinstance(value, int)
    if isinstance(kind, click.types.BoolParamType):
        fits, wanted = isinstance(value, bool), "true or false"
    elif kind is click.INT:
        fits, wanted = whole, "a whole number"
    elif kind is click.FLOAT:
        fits, wanted = number, "a number"
    else:
        fits, wanted = isinstance(value, str) or (whole and name in LISTS), "a text in quotes"
    if not fits:
        said = str(value).lower() if isinstance(value, bool) else repr(value)
        raise InputError(f"{where}: {said:.60} is not {wanted}")
    return str(value) if kind is click.STRING else value
