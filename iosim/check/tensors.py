"""Tensors in files that others wrote, .safetensors and .npz: sizes are checked before memory is taken, nothing is run.

A safetensors file is 8 bytes with the length of a JSON header, the header, and the elements, all little-endian; they
are mapped into memory and read when they are used.  An npz file is a zip archive of npy files: a header as a Python
literal, of which three plain fields are taken, and the elements, which are read as a whole when they are used.
"""

from __future__ import annotations

import hashlib
import json
import mmap
import re
import stat
import zipfile
from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeAlias

import ml_dtypes
import numpy as np

from iosim.check.host import available_memory
from iosim.errors import InputError
from iosim.files import Bounded

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Array: TypeAlias = NDArray[Any]

SUFFIXES = (".safetensors", ".npz")
FLOATS = {"F16": np.dtype(np.float16), "BF16": np.dtype(ml_dtypes.bfloat16),
          "F32": np.dtype(np.float32), "F64": np.dtype(np.float64),
          "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn)}  # fmt: skip
_NPY_FLOATS = {f"{order}f{size}": np.dtype(f"{order}f{size}") for size in (2, 4, 8) for order in "<>"}
_MOST_HEADER = 2**24  # bytes of JSON: a checkpoint of 100,000 tensors
_MOST_NPY_HEADER = 10_000  # bytes, as in numpy
_MOST_AXES = 32
_MOST_DIGITS = 18  # of a size: below 2^63
_CHUNK = 2**20
_SHOWN = 8  # names of a file that an error lists


@dataclass(frozen=True, slots=True)
class Stored:
    """A tensor of a file under its name there; `read` gives its elements, of this shape and format."""

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[], Array]


@dataclass(frozen=True, slots=True)
class TensorFile:
    """The tensors that were asked for, and the SHA-256 of the whole file."""

    path: Path
    sha256: str
    tensors: tuple[Stored, ...]
    names: tuple[str, ...]  # of all tensors of the file

    def listed(self) -> str:
        """The names of the file's tensors, or of some, for a message."""
        return listed(self.names)


class _WrongError(Exception):
    """What is wrong with a file or one of its tensors."""


def read_tensors(path: Path, wanted: Collection[str]) -> TensorFile:
    """Open a file and describe the tensors whose lower-case names are `wanted`.

    Raises InputError, with the file's name and the tensor's, for whatever is wrong with them.
    """
    kind = path.suffix.lower()
    if kind not in SUFFIXES:
        raise InputError(f"inputs: {path}: its name must end in {' or '.join(SUFFIXES)}")
    try:
        if not stat.S_ISREG(path.stat().st_mode):
            raise _WrongError("is not a regular file")
        with path.open("rb") as file:
            sha256 = hashlib.file_digest(file, "sha256").hexdigest()
            tensors, names = (_safetensors if kind == ".safetensors" else _npz)(path, file, wanted)
    except _WrongError as error:
        raise InputError(f"inputs: {path}: {error}") from None
    except OSError as error:
        raise InputError(f"inputs: {path}: cannot be read: {error.strerror or error}") from None
    except ValueError as error:  # a path with a NUL byte
        raise InputError(f"inputs: {path}: cannot be read: {error}") from None
    return TensorFile(path, sha256, tuple(tensors), tuple(names))


def listed(names: Collection[str]) -> str:
    """Names for a message, at most some."""
    some = [f"{name:.40}" for name in list(names)[:_SHOWN]]
    return ", ".join(some) + (f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else "")


def _bytes_of(shape: tuple[int, ...], dtype: np.dtype[Any]) -> int:
    return prod(shape) * dtype.itemsize


# ---------------------------------------------------------------- safetensors


def _safetensors(_: Path, file: IO[bytes], wanted: Collection[str]) -> tuple[list[Stored], list[str]]:
    file.seek(0, 2)
    size = file.tell()
    file.seek(0)
    length = int.from_bytes(file.read(8), "little")
    if size < 8 or length > size - 8:
        raise _WrongError(f"is not a safetensors file: a header of {length:,} bytes does not fit its {size:,} bytes")
    if length > _MOST_HEADER:
        raise _WrongError(f"has a header of {length:,} bytes; at most {_MOST_HEADER:,} are read")
    header = _header(file.read(length))
    names = [name for name in header if name != "__metadata__"]
    chosen = [name for name in names if name.lower() in wanted]
    if not chosen:
        return [], names
    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    return [_entry(name, header[name], data, 8 + length) for name in chosen], names


def _header(text: bytes) -> dict[str, Any]:
    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len(found := dict(pairs)) < len(pairs):
            raise ValueError("a key is given twice")
        return found

    try:
        header = json.loads(text.decode("utf-8"), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _WrongError(f"is not a safetensors file: its header is not valid JSON: {error!s:.100}") from None
    if not isinstance(header, dict):
        raise _WrongError("is not a safetensors file: its header is not a JSON object")
    return header


def _entry(name: str, entry: object, data: mmap.mmap, start: int) -> Stored:
    """One tensor of the header, checked against the bytes that there are."""
    if not isinstance(entry, dict):
        raise _WrongError(f"{name}: its header entry is not a JSON object")
    dtype = FLOATS.get(code) if isinstance(code := entry.get("dtype"), str) else None
    if dtype is None:
        raise _WrongError(f"{name}: its dtype is {code!r:.40}; {', '.join(FLOATS)} can be read")
    shape, offsets = (_sizes(name, what, entry.get(what)) for what in ("shape", "data_offsets"))
    if len(offsets) != 2 or not offsets[0] <= offsets[1] <= len(data) - start:
        raise _WrongError(f"{name}: its data_offsets {offsets} do not lie in the {len(data) - start:,} bytes of data")
    if offsets[1] - offsets[0] != (need := _bytes_of(shape, dtype)):
        raise _WrongError(
            f"{name}: shape {shape} of {code} takes {need:,} bytes, its data_offsets {offsets} have others"
        )
    first, count = start + offsets[0], prod(shape)
    return Stored(name, shape, dtype, lambda: np.frombuffer(data, dtype, count, first).reshape(shape))


def _sizes(name: str, what: str, found: object) -> tuple[int, ...]:
    """A list of whole numbers from 0 that a file may hold."""
    if not isinstance(found, list) or len(found) > _MOST_AXES:
        raise _WrongError(f"{name}: its {what} is not a list of at most {_MOST_AXES} whole numbers")
    for size in found:
        if type(size) is not int or not 0 <= size < 10**_MOST_DIGITS:
            raise _WrongError(f"{name}: its {what} has {size!r:.40}, which is no size")
    return tuple(found)


# ---------------------------------------------------------------- npz


@dataclass(frozen=True, slots=True)
class _Npy:
    """The header of an npy file."""

    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    fortran: bool
    length: int  # bytes of the header and what stands before it


def _npz(path: Path, file: IO[bytes], wanted: Collection[str]) -> tuple[list[Stored], list[str]]:
    names, out = [], []
    for info in (archive := _archive(file)).infolist():
        name = info.filename.removesuffix(".npy")
        names.append(name)
        if name.lower() in wanted:
            out.append(_member(path, name, info, archive))
    return out, names


def _archive(file: IO[bytes]) -> zipfile.ZipFile:
    try:
        return zipfile.ZipFile(Bounded(file))
    except OSError:
        raise
    except Exception as error:  # zipfile names no family for what a bad file makes it raise
        raise _WrongError(f"is not an npz file: {error!s:.100}") from None


def _member(path: Path, name: str, info: zipfile.ZipInfo, archive: zipfile.ZipFile) -> Stored:
    header = _read_member(name, info, archive, None)
    if (need := header.length + _bytes_of(header.shape, header.dtype)) != info.file_size:
        raise _WrongError(
            f"{name}: shape {header.shape} of {header.dtype} takes {need:,} bytes, the archive has others"
        )

    def read() -> Array:
        if need > (have := available_memory()):
            raise InputError(
                f"inputs: {path}: {name}: {need / 1e9:.1f} GB, and this host has {have / 1e9:.1f} GB of memory free; "
                f"--no-check leaves it unread"
            )
        try:
            with path.open("rb") as file, _archive(file) as again:
                elements = np.empty(prod(header.shape), header.dtype)
                if _read_member(name, info, again, elements.view(np.uint8).data) != header:
                    raise _WrongError(f"{name}: changed while it was read")
        except _WrongError as error:
            raise InputError(f"inputs: {path}: {error}") from None
        except OSError as error:
            raise InputError(f"inputs: {path}: cannot be read: {error.strerror or error}") from None
        return elements.reshape(header.shape[::-1]).T if header.fortran else elements.reshape(header.shape)

    return Stored(name, header.shape, header.dtype, read)


def _read_member(name: str, info: zipfile.ZipInfo, archive: zipfile.ZipFile, into: memoryview | None) -> _Npy:
    """The header of a member and, where there is room for them, its elements."""
    if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
        raise _WrongError(f"{name}: is neither stored nor deflated, or is encrypted")
    try:
        with archive.open(info) as member:
            header = _npy_header(name, member)
            if into is not None:
                _fill(name, member, into)
            return header
    except (OSError, _WrongError):
        raise
    except Exception as error:  # see _archive
        raise _WrongError(f"{name}: cannot be read from the archive: {error!s:.100}") from None


def _fill(name: str, member: IO[bytes], into: memoryview) -> None:
    have = 0
    while part := member.read(min(_CHUNK, len(into) - have + 1)):  # 1 more: the end, where zipfile checks the CRC
        if have + len(part) > len(into):
            raise _WrongError(f"{name}: has more elements than its header says")
        into[have : have + len(part)] = part
        have += len(part)
    if have < len(into):
        raise _WrongError(f"{name}: ends before its last element")


def _plain(descr: str) -> str:
    """numpy's name of a dtype that an npy header describes, where it is a simple one."""
    simple = re.fullmatch(r"'[<>|=]?([biufc]\d{1,2})'", descr)
    try:
        return np.dtype(simple[1]).name if simple else f"{descr:.40}"
    except TypeError:
        return f"{descr:.40}"


def _npy_header(name: str, member: IO[bytes]) -> _Npy:
    """The three fields, taken as plain text: nothing is evaluated."""
    magic = member.read(8)
    width = {1: 2, 2: 4, 3: 4}.get(magic[6] if len(magic) == 8 else 0)
    if not magic.startswith(b"\x93NUMPY") or width is None:
        raise _WrongError(f"{name}: is not an array in npy format")
    length = int.from_bytes(member.read(width), "little")
    if length > _MOST_NPY_HEADER:
        raise _WrongError(f"{name}: has a header of {length:,} bytes; at most {_MOST_NPY_HEADER:,} are read")
    text = member.read(length).decode("latin-1")
    if (found := re.search(r"'descr': *('[^']*'|\[)", text)) is None:
        raise _WrongError(f"{name}: its npy header has no dtype")
    dtype = _NPY_FLOATS.get(found[1].strip("'"))
    if dtype is None:
        hint = "; numpy keeps no bfloat16: save float32 and give the dtype bf16" if found[1].endswith("V2'") else ""
        readable = listed(dict.fromkeys(known.name for known in _NPY_FLOATS.values()))
        raise _WrongError(f"{name}: its dtype is {_plain(found[1])}; {readable} can be read{hint}")
    order = re.search(r"'fortran_order': *(True|False)\b", text)
    sizes = re.search(r"'shape': *\(([0-9, ]{0,400})\)", text)
    if order is None or sizes is None:
        raise _WrongError(f"{name}: its npy header has no order and shape")
    shape = [int(size[: _MOST_DIGITS + 1]) for size in re.findall(r"\d+", sizes[1])]
    return _Npy(dtype, _sizes(name, "shape", shape), order[1] == "True", 8 + width + length)
