"""The command line.  Only click is imported here; a command imports what it needs when it runs.

A command is one file in `commands/`, found by its name.
"""

from __future__ import annotations

import io
import os
import sys

import click

import iosim
from iosim.cli.completion import COMPLETE
from iosim.cli.group import Commands
from iosim.cli.output import WIDTH, Stop, Terminated, fail, terminable
from iosim.errors import InputError, IosimError, OutputError


@click.command(
    cls=Commands,
    package="iosim.cli.commands",
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH},
)
@click.version_option(iosim.__version__, prog_name="iosim")
def cli() -> None:
    """Simulate and cost attention on a memory hierarchy.

    Counts the bytes that a dataflow moves through HBM, L2 and SRAM, finds where it stalls, and checks the numbers it
    computes against float64.

    \b
    Example: iosim run --n 4096 --d 128
             iosim run --help

    \b
    Exit codes: 0 answered, 1 a check failed, 2 bad input, 3 output cannot be
    written.  Names of values complete in your shell: iosim completion --help.
    """


def main() -> None:
    """Run the command line; exit codes: 0 answered, 1 a check failed, 2 bad input, 3 output cannot be written.

    A reader that stops reading is no error: 0.  The signal to terminate is 143, and leaves nothing half written.
    """
    _speak_any_encoding()
    try:
        with terminable():
            cli(prog_name="iosim", complete_var=COMPLETE, standalone_mode=False)
            if sys.stdout is not None:
                sys.stdout.flush()
    except Stop:
        raise
    except (BrokenPipeError, SystemExit) as error:  # click exits by itself in this case, with 1, and after completion
        _silence()  # the reader has gone, and nothing more can be said
        if COMPLETE in os.environ and isinstance(error, SystemExit):
            raise
    except Terminated:
        fail("iosim: terminated", 143)
    except (click.exceptions.Abort, KeyboardInterrupt):
        fail("iosim: interrupted", 130)
    except click.exceptions.NoArgsIsHelpError as error:
        fail(error.format_message(), InputError.exit_code)
    except click.ClickException as error:
        where = error.ctx.command_path if isinstance(error, click.UsageError) and error.ctx else "iosim"
        fail(f"{where}: {' '.join(error.format_message().split())}", InputError.exit_code)
    except IosimError as error:
        fail(f"iosim: {error}", error.exit_code)
    except RuntimeError as error:
        if type(error).__name__ != "BrokenProcessPool":  # by name: its module takes long to import
            raise
        fail("iosim: a process that works for it died; it may need more memory than there is", IosimError.exit_code)
    except OSError as error:
        _silence()
        fail(f"iosim: output: {error.strerror}", OutputError.exit_code)


def _speak_any_encoding() -> None:
    """Let a terminal that lacks a character, or gets a file's name that is no text, show its number instead."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _silence() -> None:
    """Let Python write what it still holds to nowhere at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
