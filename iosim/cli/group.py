"""Commands, and groups of them: a package, each of whose files is the command of its name."""

from __future__ import annotations

import importlib
import pkgutil
from functools import partial
from typing import Any

import click

from iosim.cli.completion import complete
from iosim.errors import IosimError, nearest

TAKE_LENGTHS = ("run", "whatif", "tune", "sweep", "report memory", "report io")
OF_LENGTHS = ("--lengths", "--page", "--cache-dtype", "--cache-scales", "--shared-prefix", "--split-rule")


def lengths_hint() -> str:
    """The commands that take sequences of different lengths, in words."""
    return f"{', '.join(TAKE_LENGTHS[:-1])} and {TAKE_LENGTHS[-1]} take lengths that differ"


class Command(click.Command):
    """A command whose errors about a field are said of the option or argument that sets it, and values completed."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        complete(self.params)

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """As click does it; a command of one length says who takes several."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as error:
            if error.option_name not in OF_LENGTHS or not any(p.name == "n_q" for p in self.params):
                raise
            words = f"{error.option_name} is not taken, as sequences have one length here; {lengths_hint()}"
            raise click.UsageError(words, ctx) from None

    def invoke(self, ctx: click.Context) -> Any:
        """Run it."""
        try:
            return super().invoke(ctx)
        except IosimError as error:
            field, colon, rest = str(error).partition(":")
            said = {p.name: self._said(p) for p in self.params}.get(field)
            if said is None:
                raise
            error.args = (f"{said}{colon}{rest}",)
            raise

    @staticmethod
    def _said(parameter: click.Parameter) -> str:
        if isinstance(parameter, click.Argument):
            return parameter.human_readable_name
        return next(name for name in parameter.opts if name.startswith("--"))


command = partial(click.command, cls=Command)


class Commands(click.Group):
    """The commands in the files of a package; only the one that is asked for is imported.

    `iosim report io` is the command `io` in the file of that name; a misspelt one is told the nearest.
    """

    def __init__(self, *args: Any, package: str, **options: Any) -> None:
        super().__init__(*args, **options)
        self.package = package

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in alphabetical order."""
        del ctx
        path = importlib.import_module(self.package).__path__
        return sorted(module.name for module in pkgutil.iter_modules(path) if not module.name.startswith("_"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """The command of this name, or None."""
        if cmd_name not in self.list_commands(ctx):
            return None
        found = vars(importlib.import_module(f"{self.package}.{cmd_name}")).values()
        return next(c for c in found if isinstance(c, click.Command) and c.name == cmd_name)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> Any:
        """As click does it, with a suggestion."""
        if (
            args
            and not ctx.resilient_parsing
            and not args[0].startswith("-")
            and self.get_command(ctx, args[0]) is None
        ):
            raise click.UsageError(f"no command {args[0]!r}{nearest(args[0], self.list_commands(ctx))}", ctx)
        return super().resolve_command(ctx, args)
