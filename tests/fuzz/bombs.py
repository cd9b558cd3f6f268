"""Small files that ask for much: of time by the square of their size, of memory by what they claim, or without end."""

from __future__ import annotations

import io
import os
import sqlite3
import struct
import zipfile
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from tests.fuzz import kinds

Write = Callable[[Path], object]

MEGABYTE = 2**20


def _text(text: str | bytes) -> Callable[[Path], object]:
    return lambda path: path.write_bytes(text if isinstance(text, bytes) else text.encode())


def _profile(more: str) -> Write:
    return lambda path: _text(more + "\n" + kinds.profiles()[0].decode())(path)


def _safetensors(length: int, header: bytes = b"{}") -> Write:
    return _text(struct.pack("<Q", length) + header)


def _npz(name: str, header: str, data: bytes = b"", claim: int | None = None) -> Write:
    """An archive with one array, of which the directory may `claim` another size."""

    def write(path: Path) -> None:
        out = io.BytesIO()
        text = header.encode() + b"\n"
        with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(name, b"\x93NUMPY\x01\0" + struct.pack("<H", len(text)) + text + data)
        made = bytearray(out.getvalue())
        if claim is not None:
            at = made.rindex(b"PK\x01\x02")
            made[at + 24 : at + 28] = struct.pack("<I", claim)
        path.write_bytes(made)

    return write


def _directory(members: int) -> Write:
    """An archive of empty members: its directory is read whole, and each of them takes a kilobyte then."""

    def write(path: Path) -> None:
        entries = b"".join(b"PK\x01\x02" + bytes(24) + struct.pack("<H", 8) + bytes(16) + b"%08d" % n
                           for n in range(members))  # fmt: skip
        path.write_bytes(entries + b"PK\x05\x06" + struct.pack("<HHHHIIH", 0, 0, 65535, 65535, len(entries), 0, 0))

    return write


def _sparse(size: int) -> Write:
    def write(path: Path) -> None:
        with path.open("wb") as file:
            file.truncate(size)

    return write


def _pipe(path: Path) -> None:
    os.mkfifo(path)


def _endless(path: Path) -> None:
    path.symlink_to("/dev/zero")


def _view(path: Path) -> None:
    """A store whose table is a question that never ends."""
    with closing(sqlite3.connect(path)) as file:
        file.execute(f"PRAGMA application_id = {0x696F5377}")
        file.execute("CREATE VIEW configuration AS WITH RECURSIVE r(key, inputs, result, error) AS (SELECT 1, 2, 3, 4 "
                     "UNION ALL SELECT key + 1, 2, 3, 4 FROM r) SELECT * FROM r")  # fmt: skip


_WIDE = ",".join(f"c{n}" for n in range(100_000))
_PREFIX = "k" * 100_000
_MANY = ",".join(f'"{n}":1' for n in range(20_000))
_TWICE = "{" + ",".join(f'"{n}":1' for n in range(50_000)) + ',"0":1}'
_DEEP = "[" * 100_000 + "]" * 100_000

# name: the kind of file, and what writes it
BOMBS: dict[str, tuple[str, Write]] = {
    "a key of 300,000 parts": ("profile", _profile("a." * 300_000 + "a = 1")),
    "headers of 90 parts": ("profile", _profile("\n".join("[" + "a." * 90 + f"x{n}]" for n in range(700)))),
    "8,000 unknown keys": ("profile", _profile("\n".join(f"a{n}=1" for n in range(8_000)))),
    "8,000 tables": ("profile", _profile("\n".join(f"[x{n}]" for n in range(8_000)))),
    "8,000 memories": ("profile", _text("[[memory]]\n" * 8_000)),
    "lists in lists": ("profile", _profile(f"a = {_DEEP}")),
    "60,000 escapes": ("profile", _profile('title = "' + "\\n" * 60_000 + '"')),
    "a hexadecimal number": ("profile", _profile("a = 0x" + "f" * 900_000)),
    "a large profile": ("profile", _sparse(10 * 2**30)),
    "a profile without end": ("profile", _endless),
    "a profile that is a pipe": ("profile", _pipe),
    "a key of 100,000 parts in a kernel": ("kernel", _text("a." * 100_000 + "a = 1")),
    "a kernel without end": ("kernel", _endless),
    "a key of parts in a sweep": ("sweep", _text("a." * 300_000 + "a = 1")),
    "a grid of 10^18": ("sweep", _text('schema = "iosim.sweep/1"\n[[grid]]\nn = "1..99999"\nd = "1..99999"\n'
                                       'heads = "1..99999"\n')),
    "a range without end": ("sweep", _text('schema = "iosim.sweep/1"\n[[grid]]\nn = "1..1e300:x1.00000001"\nd = 1\n')),
    "8,000 grids": ("sweep", _text('schema = "iosim.sweep/1"\n' + "[[grid]]\n" * 8_000)),
    "a header of 2^60 bytes": ("safetensors", _safetensors(2**60)),
    "a header of lists": ("safetensors", _safetensors(len(_DEEP), _DEEP.encode())),
    "tensors of 2^60 elements": ("safetensors", _text(
        (lambda text: struct.pack("<Q", len(text)) + text)(
            b'{"q":{"dtype":"F16","shape":[1152921504606846976,8],"data_offsets":[0,18446744073709551616]}}'))),
    "an array of 10^15 bytes": ("npz", _npz("q.npy", "{'descr': '<f4', 'fortran_order': False, "
                                            "'shape': (1000000000000000, 1), }")),
    "an archive that claims 4 GB": ("npz", _npz("q.npy", "{'descr': '<f4', 'fortran_order': False, 'shape': (1, 4), }",
                                                bytes(16), 2**32 - 1)),
    "a directory of 100,000": ("npz", _directory(100_000)),
    "no directory": ("npz", _sparse(50 * MEGABYTE)),
    "a mask of 100,000 members": ("mask of numpy", _directory(100_000)),
    "a mask that unpacks to more": ("mask of numpy", _npz("m.npy", "{'descr': '|b1', 'fortran_order': False, 'shape': "
                                                          "(1024, 1024), }", bytes(2**25))),
    "a mask of many rows": ("mask", _text("1\n" * 8_000_000)),
    "a wide mask": ("mask", _text("1" * 16_000_000)),
    "a mask without end": ("mask", _endless),
    "a header of 100,000 columns": ("measurements", _text(f"{_WIDE}\n{_WIDE}\n")),
    "a table without lines": ("measurements", _text("x" * 5_000_000)),
    "a table of commas": ("measurements", _text(("impl," * 3999 + "x\n") + ("," * 3999 + "\n") * 1500)),
    "a table without end": ("measurements", _endless),
    "a table that is a pipe": ("measurements", _pipe),
    "a large table": ("measurements", _sparse(10 * 2**30)),
    "a config of lists": ("config", _text(f'{{"a":{_DEEP}}}')),
    "a config with a key twice": ("config", _text(_TWICE[: MEGABYTE - 100].rpartition(",")[0] + ',"0":1}')),
    "a million layers": ("config", _text('{"model_type":"llama","hidden_size":4096,"num_attention_heads":32,'
                                         '"num_hidden_layers":1000000000}')),
    "a trace of one line": ("trace", _text(b'{"context": 1' + b" " * 50_000_000)),
    "a trace without end": ("trace", _endless),
    "lengths without end": ("lengths", _endless),
    "lengths that are a pipe": ("lengths", _pipe),
    "2,000,000 lengths": ("lengths", _text("1," * 2_000_000)),
    "a result with a key twice": ("result", _text(_TWICE)),
    "long names": ("result", _text('{"schema":"iosim.run/1","problem":{"' + _PREFIX + '":{' + _MANY + '}},"runs":[]}')),
    "many differences": ("result", _text('{"schema":"iosim.run/1","problem":{' + _MANY + '},"runs":[]}')),
    "many runs": ("result", _text('{"schema":"iosim.run/1","runs":[' + ",".join(
        f'{{"hardware":"a","dataflow":"{n}"}}' for n in range(20_000)) + "]}")),
    "a large result": ("result", _sparse(10 * 2**30)),
    "a result of lists": ("result", _text("[" * 8_000_000)),
    "an index of lists": ("index", _text(_DEEP)),
    "a large index": ("index", _sparse(10 * 2**30)),
    "a store without end": ("store", _view),
    "a store of zeros": ("store", _sparse(10 * 2**30)),
}  # fmt: skip
