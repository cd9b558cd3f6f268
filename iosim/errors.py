"""The one family of errors that a user of iosim meets.

Every message is one printable line. This module imports nothing heavy, so any module may use it.
"""

from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar

_SHOWN = 60  # characters of a value
_LONGEST_WORD = 80  # difflib is quadratic: a pasted file must not hang a suggestion


class IosimError(ValueError):
    """Base of all user errors; `exit_code` is what the command line ends with."""

    exit_code: ClassVar[int] = 1

    def __init__(self, message: str) -> None:
        super().__init__(one_line(message))


class InputError(IosimError):
    """The user's input is bad: an option, a problem, a schedule, a profile (exit code 2)."""

    exit_code: ClassVar[int] = 2


class OutputError(IosimError):
    """A result could not be written (exit code 3)."""

    exit_code: ClassVar[int] = 3


def show(value: object) -> str:
    """A value as a message shows it: short, and also when Python refuses to print it."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    except RecursionError:
        return "something nested too deeply"
    return text if len(text) <= _SHOWN else text[: _SHOWN - 3] + "..."


def nearest(word: str, choices: Iterable[str]) -> str:
    """Return `" (did you mean 'x'?)"` for the choice most like `word`, or `""` when none is close.

    Case is ignored. The leading space lets the result be glued to any message.
    """
    by_folded = {choice.casefold(): choice for choice in choices}
    found = get_close_matches(word[:_LONGEST_WORD].casefold(), by_folded, n=1)
    return f" (did you mean {by_folded[found[0]]!r}?)" if found else ""


def one_line(text: str) -> str:
    """Escape whatever would break the line or could not be printed (newlines, NUL, lone surrogates)."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
