"""`iosim completion`: the script that lets a shell complete commands, options and their values."""

from __future__ import annotations

import click

from iosim.cli.completion import COMPLETE
from iosim.cli.group import command
from iosim.cli.output import output_option, require_writable, write

INSTALL = {
    "bash": 'To install it, add to ~/.bashrc (bash 4.4 or later):  eval "$(iosim completion bash)"',
    "zsh": 'To install it, add to ~/.zshrc, below compinit:  eval "$(iosim completion zsh)"',
    "fish": "To install it:  iosim completion fish -o ~/.config/fish/completions/iosim.fish",
}


@command()
@click.argument("shell", type=click.Choice(list(INSTALL)))
@output_option
def completion(shell: str, output: str | None) -> None:
    """Print the script that completes iosim in your shell.

    Commands, options, and the names of dataflows, kernels, machines, formats and passes.  The script's first lines say
    how to install it.

    \b
    Example: iosim completion bash
             eval "$(iosim completion bash)"     (now; in ~/.bashrc for always)
    """
    from click.shell_completion import ShellComplete, get_completion_class

    require_writable(output)
    found = get_completion_class(shell)
    if found is None:
        raise click.UsageError(f"this click has no completion for {shell}", click.get_current_context())
    script = ShellComplete.source(found(click.get_current_context().find_root().command, {}, "iosim", COMPLETE))
    first, rest = script.split("\n", 1)
    lines = (
        [first, f"# {INSTALL[shell]}"] if first.startswith("#") else [f"# {INSTALL[shell]}", first]
    )  # zsh's #compdef
    write("\n".join([*lines, rest]), output)
