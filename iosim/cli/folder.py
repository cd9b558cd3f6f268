"""A report's directory is written as a whole: a crash or a full disk leaves the old one as it was."""

from __future__ import annotations

import ctypes
import json
import os
import shutil
from collections.abc import Mapping
from contextlib import suppress
from tempfile import TemporaryFile, mkdtemp

from iosim.cli.output import umask
from iosim.errors import InputError, OutputError
from iosim.files import read_text

OPTION = "--output"
MOST_BYTES = 2**24  # of the index of a report
_HERE, _EXCHANGE = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of Linux


def require_replaceable(path: str, index: str, schema: str, *, force: bool) -> None:
    """Raise where `path` is something other than a new name, an empty directory, or a report that may be replaced.

    A report has a file `index` of JSON with the `schema`, which names its files; any other file in it is not ours.
    With `force` every directory may be replaced.
    """
    if not path:
        raise InputError(f"{OPTION}: the directory name is empty")
    real = os.path.realpath(path)
    if os.path.lexists(real) and not os.path.isdir(real):
        raise OutputError(f"{OPTION}: {path}: is not a directory")
    if os.path.isdir(real) and not force and (strange := _not_ours(real, index, schema)):
        raise OutputError(f"{OPTION}: {path}: {strange}; --force replaces the whole directory")
    above = os.path.dirname(real)
    while not os.path.exists(above):
        above = os.path.dirname(above)
    try:
        TemporaryFile(dir=above).close()  # what a mode says is not what root, and a file system, may do
    except OSError:
        raise OutputError(f"{OPTION}: {path}: {above} cannot be written to") from None


def _not_ours(real: str, index: str, schema: str) -> str:
    """Why a directory is no report of ours; empty where it is one, or has nothing in it."""
    there = set(os.listdir(real))
    if not there:
        return ""
    try:
        found = json.loads(read_text(os.path.join(real, index), MOST_BYTES, "an index", "JSON"))
        ours = set(found["files"]) if found["schema"] == schema else None
    except (ValueError, KeyError, TypeError, RecursionError):
        ours = None
    if ours is None:
        return f"is not a report of iosim's (no {index} of one)"
    return f"holds {min(there - ours)}, which no report wrote" if there - ours else ""


def write_directory(files: Mapping[str, bytes], path: str) -> None:
    """Write files into a new directory beside `path`, and put it in the place of `path`."""
    real = os.path.realpath(path)
    try:
        os.makedirs(os.path.dirname(real), exist_ok=True)
        made = mkdtemp(prefix=f".{os.path.basename(real)}.", dir=os.path.dirname(real))
        try:
            for name, data in files.items():
                with open(os.path.join(made, name), "xb") as file:
                    file.write(data)
                    file.flush()
                    os.fsync(file.fileno())
            os.chmod(made, 0o777 & ~umask())
            _replace(made, real)
        finally:
            shutil.rmtree(made, ignore_errors=True)  # the old report after an exchange, else what could not be finished
    except OSError as error:
        raise OutputError(f"{OPTION}: {path}: {error.strerror}") from error


def _replace(made: str, real: str) -> None:
    """Put `made` in the place of `real`; what was there is then in `made`."""
    if not os.path.exists(real):
        os.rename(made, real)
        return
    with suppress(AttributeError):  # where the system can, in one step
        call = ctypes.CDLL(None, use_errno=True).renameat2
        if call(_HERE, os.fsencode(made), _HERE, os.fsencode(real), _EXCHANGE) == 0:
            return
    old = f"{made}.old"
    os.rename(real, old)
    try:
        os.rename(made, real)
    except BaseException:
        os.rename(old, real)
        raise
    shutil.rmtree(old)
