"""What a command says and writes: progress, answers, files, and the line with which it fails."""

from __future__ import annotations

import errno
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import wraps
from itertools import chain
from textwrap import wrap
from threading import Timer
from typing import Any, NoReturn, TypeVar

import click

from iosim.errors import InputError, IosimError, OutputError, one_line

F = TypeVar("F", bound=Callable[..., Any])

WIDTH = 80  # of a terminal
_HARMLESS = {n: f"\\x{n:02x}" for n in (*range(32), *range(127, 160)) if chr(n) not in "\t\n"}  # that a terminal obeys
PATIENCE = 10  # seconds after which a pipe is told what takes so long


class CheckError(IosimError):
    """A check failed (exit code 1)."""


@dataclass(frozen=True, slots=True)
class Form:
    """The form in which an answer is wanted, and where."""

    as_json: bool
    as_csv: bool
    output: str | None

    def give(
        self, text: Callable[[], str], document: Callable[[], Mapping[str, Any]], csv: Callable[[], str] | None = None
    ) -> None:
        """Write the answer: one of `text`, a JSON `document` and `csv` (of a command that has it) is called."""
        if self.as_json:
            import json

            write(json.dumps(document(), indent=1, allow_nan=False) + "\n", self.output)
        else:
            write(csv() if self.as_csv and csv is not None else text(), self.output)


_FORCE = f"{__name__}.force"
_MARKS = (
    b'{\n "schema": "iosim.',
    b'{"otherData": {"schema": "iosim.',
    b"Software\0iosim",
    b"<dc:title>iosim</dc:title>",
)
_HEAD = 4096  # bytes of a file in which its mark stands

force_option = click.option(
    "--force", is_flag=True, expose_value=False, help="Replace a file that may not be an answer of iosim's.",
    callback=lambda context, _, value: context.meta.__setitem__(_FORCE, value),
)  # fmt: skip


def output_option(command: F) -> F:
    """The options --output, given to the command as `output`, and --force, which `require_writable` heeds."""
    option = click.option(
        "--output", "-o", metavar="FILE", help="Write to this file instead of the terminal; - is the terminal."
    )
    return option(force_option(command))


def answer_options(schema: str, row: str = "") -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """The options --json (of the `schema`), --csv (one line a `row`) and --output, given to the command as a `form`.

    An answer that is no table has no `row`, and no --csv.
    """
    json_option = click.option("--json", "as_json", is_flag=True, help=f"Print one JSON object (schema {schema}).")
    csv_option = click.option("--csv", "as_csv", is_flag=True, help=f"Print one CSV row a {row}.")

    def decorate(command: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(command)
        def with_form(as_json: bool, output: str | None, as_csv: bool = False, **options: Any) -> Any:
            if as_json and as_csv:
                raise InputError("--json and --csv: give one of them")
            require_writable(output)
            return command(form=Form(as_json, as_csv, output), **options)

        answered: Callable[..., Any] = output_option(with_form)
        return json_option(csv_option(answered) if row else answered)

    return decorate


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """Says on a terminal what is being done; elsewhere once, on stderr, when it takes long."""
    if sys.stderr is None:
        yield lambda _: None
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True).status("starting") as status:
            yield lambda text: status.update(Text(one_line(text)))  # a name may look like rich's markup
    else:
        doing = ["starting"]
        timer = Timer(PATIENCE, lambda: _still(doing[-1]))
        timer.daemon = True
        timer.start()
        try:
            yield lambda text: doing.__setitem__(-1, text)
        finally:
            timer.cancel()


def _still(doing: str) -> None:
    with suppress(OSError):
        print(f"iosim: after {PATIENCE} s: {doing}", file=sys.stderr, flush=True)


def require_writable(path: str | None, option: str = "--output") -> None:
    """Raise before the work what writing would raise after it, and, without --force, for a file that is not ours.

    Ours are JSON answers and pictures, which bear a mark, and empty files.  Leaves everything as it was.
    """
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
        if os.path.isfile(real) and not _is_forced() and not _is_ours(real):
            raise OutputError(f"{option}: {path}: is there already, and no answer of iosim's; --force replaces it")
    except OSError as error:
        raise OutputError(f"{option}: {path}: {error.strerror}") from error


def _is_forced() -> bool:
    context = click.get_current_context(silent=True)
    return context is not None and bool(context.meta.get(_FORCE))


def _is_ours(path: str) -> bool:
    with open(path, "rb") as file:
        head = file.read(_HEAD)
    return not head or any(mark in head for mark in _MARKS)


def require_image(path: str) -> str:
    """The kind of image, png or svg, that a --plot file's name asks for; raises before the work, as above."""
    kind = path.rpartition(".")[2]
    if kind not in ("png", "svg") or "." not in path:
        raise InputError(f"--plot: {path!r} does not end with .png or .svg")
    require_writable(path, "--plot")
    return kind


def write(data: str | bytes, path: str | None, option: str = "--output") -> None:
    """Print text, or write a file as a whole: a failure leaves what was there before."""
    if isinstance(data, str) and (path is None or path == "-"):
        if sys.stdout is None:
            raise OutputError("output: standard output is closed")
        sys.stdout.write(data.translate(_HARMLESS))
        sys.stdout.flush()
        return
    if not path:
        raise InputError(f"{option}: the file name is empty")
    try:
        _write_file(data.encode("utf-8", "backslashreplace") if isinstance(data, str) else data, os.path.realpath(path))
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
            os.chmod(file.name, os.stat(path).st_mode & 0o777 if os.path.exists(path) else 0o666 & ~umask())
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def umask() -> int:
    """The bits that new files do not get."""
    mask = os.umask(0)
    os.umask(mask)
    return mask


class Terminated(BaseException):
    """The signal to terminate came; nothing but the command line catches it, and every `finally` is run."""


@contextmanager
def terminable() -> Iterator[None]:
    """Raises Terminated where the signal to terminate comes, in the main thread."""

    def end(*_: object) -> NoReturn:
        raise Terminated

    try:
        before = signal.signal(signal.SIGTERM, end)
    except ValueError:  # not in the main thread
        yield
        return
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


class Stop(SystemExit):
    """The end of the command line with an exit code of ours."""


def _wrapped(line: str) -> list[str]:
    return wrap(line, WIDTH, subsequent_indent="    ", break_long_words=False, break_on_hyphens=False)


def fail(message: str, code: int) -> NoReturn:
    """Say why and leave, in lines that a terminal gets wrapped; that it cannot be said changes no exit code."""
    try:
        if sys.stderr is not None:
            if sys.stderr.isatty():
                message = "\n".join(chain.from_iterable(map(_wrapped, message.splitlines())))
            print("\n".join(map(one_line, message.splitlines())), file=sys.stderr, flush=True)
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    raise Stop(code)
