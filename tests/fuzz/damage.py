"""Damage to valid files, by what they are: bytes, TOML, JSON, CSV, npy headers, zip archives; the same dice, the same.

Every function takes a random.Random and returns bytes that a reader may accept or must refuse in one line.
"""

from __future__ import annotations

import io
import json
import re
import sqlite3
import struct
import zipfile
from collections.abc import Callable, Sequence
from contextlib import closing, suppress
from copy import deepcopy
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

CHUNKS = (b"", b"\0", b"\xff", b"\xef\xbb\xbf", b"\r\n", b"\r", b"\n", b"\t", b" ", b'"', b"'", b",", b"=", b"[", b"]",
          b"{", b"}", b"-", b".", b"#", b"0", b"1", b"9" * 30, b"e308", b"\x1b[31m", b"\xed\xa0\x80", b"\xe2\x80\xae",
          b"<script>", b"[/x]", b"%s", b"\xd9\xa3", b"nan", b"true", b"null", b"PK\x03\x04", b"\x93NUMPY")  # fmt: skip
NUMBERS = ("0", "-0", "-1", "1", "2", "3", "7", "16", "64", "0.5", "1e-320", "1e-9", "1e9", "1e17", "1e300", "1.7e308",
           "1e999", "-1e999", "nan", "inf", "2147483648", "9223372036854775808", "0.1", "1_000", "9" * 400,
           "9" * 5000)  # fmt: skip
WORDS = ("", " ", "a", "flash2", "mp31", "fp16", "true", "no", "-", "..", "1..2", "1..9:x2", "é", "<script>", "[/x]",
         "[red]x", "\x1b[2J", "\u202e", "\ud800", "\0", "x" * 300, "%(n)s", "{x}", "a,b", "2/1", "\u0663",
         "../x")  # fmt: skip
DEPTHS = (2, 30, 150, 300, 490, 700, 900, 940, 960, 980, 990, 995, 1200, 20_000)


def bytes_of(dice: Random, whole: bytes) -> bytes:
    """Some bytes changed, cut out, put in, doubled or left off at the end."""
    data = bytearray(whole)
    for _ in range(dice.choice((1, 1, 1, 2, 4, 16))):
        at = dice.randrange(len(data) + 1)
        match dice.randrange(7):
            case 0:
                data[at : at + 1] = bytes((dice.randrange(256),))
            case 1:
                del data[at : at + dice.choice((1, 2, 8, 60))]
            case 2:
                data[at:at] = dice.choice(CHUNKS)
            case 3:
                data[at : at + 1] = dice.choice(CHUNKS)
            case 4:
                end = at + dice.choice((1, 4, 40, 400))
                data[at:at] = data[at:end]
            case 5:  # sizes and offsets of archives and headers
                width = dice.choice((1, 2, 4, 8))
                size = dice.choice((0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1, dice.getrandbits(8 * width)))
                data[at : at + width] = (size % 256**width).to_bytes(width, "little")
            case _:
                del data[at:]
    return bytes(data)


# ---------------------------------------------------------------- TOML


def _toml_value(dice: Random) -> str:
    number = dice.choice(NUMBERS)
    depth = dice.choice(DEPTHS)
    return dice.choice((
        number, number, f"-{number}", f'"{number}"', json.dumps(dice.choice(WORDS)), json.dumps(dice.choice(WORDS)),
        "true", "false", "[]", "{}", "1979-05-27", "07:32:00", "1979-05-27T07:32:00Z", "[1, 2]", "[[1], [2]]",
        '["a", 1]', "0x" + "f" * dice.choice((4, 20, 5000)), "0o7", "'''\n\n'''", f"[{number}, {number}]",
        "{ value = 1 }", '{ value = 2, source = "x", confidence = "datasheet" }', '{ unknown = "x" }',
        '{ value = 3, low = 4, high = 2, source = "x", confidence = "estimate" }',
        f'{{ value = {number}, low = {number}, high = {number}, source = "x", confidence = "estimate" }}',
        "[" * depth + "]" * depth, "{a=" * depth + "1" + "}" * depth, '"\\u001b[31m"',
    ))  # fmt: skip


def toml_of(dice: Random, whole: bytes) -> bytes:
    """Lines of a TOML file with other values, keys and headers, doubled, moved, left out; Windows' ends and mark."""
    lines = whole.decode("utf-8", "replace").splitlines()
    for _ in range(dice.choice((1, 1, 1, 2, 5))):
        at = dice.randrange(len(lines))
        key, equals, value = lines[at].partition("=")
        match dice.randrange(10):
            case 0 | 1 | 2:
                lines[at] = f"{key or 'x'}= {_toml_value(dice)}"
            case 3 if equals and (found := list(re.finditer(r"-?\d[\d_.]*", value))):
                one = dice.choice(found)
                lines[at] = f"{key}={value[: one.start()]}{dice.choice(NUMBERS)}{value[one.end() :]}"
            case 4:
                key = dice.choice((*WORDS, "a.b", "a." * 40 + "a", '"a".b', "name"))
                lines[at] = f"{key} = {_toml_value(dice)}"
            case 5:
                del lines[at : at + dice.choice((1, 3, 20))]
            case 6:
                lines.insert(at, lines[dice.randrange(len(lines))])
            case 7:
                lines[at] = dice.choice((f"[{lines[at]}]", f"[[{key.strip('[] ')}]]", f"[{key.strip('[] ')}]"))
            case 8:
                lines.insert(at, dice.choice(("[x]", "[[memory]]", "[[grid]]", "[memory]", "x = 1", "#", '"', "'''")))
            case _:
                lines[at] = dice.choice(WORDS)
        lines = lines or [""]
    end = dice.choice(("\n",) * 6 + ("\r\n", "\r"))
    return dice.choice((b"",) * 8 + (b"\xef\xbb\xbf",)) + (end.join(lines) + end).encode("utf-8", "surrogatepass")


# ---------------------------------------------------------------- JSON


def _json_value(dice: Random) -> Any:
    value: Any = dice.choice((None, True, False, 0, 1, -1, 2, 1.5, 2**31, 2**63, 2**64, 10**400, 1e308, 1e-320, [], {},
                              [1], ["a"], [[1]], {"a": 1}, {"name": "x"}, *WORDS))  # fmt: skip
    if dice.random() < 0.05:
        for _ in range(dice.choice(DEPTHS[:-5])):
            value = [value] if dice.random() < 0.5 else {"a": value}
    return value


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Every container inside with each of its keys."""
    found, todo = [], [value]
    while todo:
        one = todo.pop()
        pairs = list(one.items() if isinstance(one, dict) else enumerate(one) if isinstance(one, list) else ())
        found += [(one, key) for key, _ in pairs]
        todo += [inner for _, inner in pairs]
    return found


def json_of(dice: Random, whole: bytes) -> bytes:
    """Values replaced, left out and moved; keys renamed and doubled; numbers and depths at the edge of JSON."""
    made = json.loads(whole)
    for _ in range(dice.choice((1, 1, 1, 2, 4))):
        places = _places(made)
        if not places:
            return json.dumps(_json_value(dice)).encode()
        owner, key = dice.choice(places)
        match dice.randrange(6):
            case 0 | 1 | 2:
                owner[key] = _json_value(dice)
            case 3:
                del owner[key]
            case 4:
                other, name = dice.choice(places)
                with suppress(RecursionError):
                    owner[key] = deepcopy(other.get(name) if isinstance(other, dict) else other[:3])
            case _ if isinstance(owner, dict):
                owner[dice.choice((*WORDS, *map(str, owner)))] = owner.pop(key)
    text = _dumped(made)
    at = dice.choice([m.start() for m in re.finditer(r"[:,\[{]", text)] or [0]) + 1
    depth = dice.choice(DEPTHS)
    deep = ("[" * depth + "]" * depth, '{"a":' * depth + "1" + "}" * depth, "[" * depth)
    more = dice.choice(("",) * 12 + ("NaN,", "-Infinity", "1e999", "9" * 5000, '"a":1,"a":2,', *deep))
    encoding = dice.choice(("utf-8",) * 9 + ("utf-8-sig", "utf-16"))
    return (text[:at] + more + text[at:]).encode(encoding, "surrogatepass")


def _dumped(made: Any) -> str:
    try:
        return json.dumps(made, ensure_ascii=False)
    except (RecursionError, ValueError):
        return "[" * 600 + "]" * 600


# ---------------------------------------------------------------- CSV


def csv_of(dice: Random, whole: bytes) -> bytes:
    """Cells, columns and lines changed, doubled and left out; other quotes, ends and marks."""
    rows = [line.split(",") for line in whole.decode().splitlines()]
    for _ in range(dice.choice((1, 1, 1, 2, 6))):
        row = dice.choice(rows) if dice.random() < 0.8 else rows[0]
        at = dice.randrange(len(row)) if row else 0
        value = dice.choice((dice.choice(NUMBERS), dice.choice(WORDS), dice.choice(rows[0] or [""]), "fwd", "float16"))
        match dice.randrange(9):
            case 0 | 1 | 2 | 3:
                row[at : at + 1] = [value]
            case 4:
                row.insert(at, value)
            case 5:
                del row[at : at + 1]
            case 6:  # the same column of every line
                for one in rows:
                    del one[at : at + 1]
            case 7:
                rows.insert(dice.randrange(len(rows) + 1), list(row))
            case _:
                row[at : at + 1] = [dice.choice(('"', '""', '"a""b"', '"a\nb"', "1,234", "==", "=1+1", "x" * 200_000))]
    end = dice.choice(("\n",) * 5 + ("\r\n", "\r", "\n\n"))
    mark = dice.choice((b"",) * 8 + (b"\xef\xbb\xbf",))
    return mark + (end.join(",".join(row) for row in rows) + end).encode("utf-8", "surrogatepass")


def numbers_of(dice: Random, whole: bytes) -> bytes:
    """Numbers below the header as nobody measures them."""
    head, *rest = whole.decode().splitlines()
    size = dice.choice((1, 1e-320, 1e-9, 1e-3, 1, 7, 1e6, 1e15, 1e18, 1e300))
    found = list(re.finditer(r"(?<![\w.])[\d.]+(?![\w.])", rest[0]))
    one = dice.choice(found)
    return f"{head}\n{rest[0][: one.start()]}{size:g}{rest[0][one.end() :]}\n".encode()


def lines_of(dice: Random, whole: bytes) -> bytes:
    """Lines of a text with other words in the places of some."""
    words = re.split(rb"([\s,:]+)", whole)
    for _ in range(dice.choice((1, 1, 2, 4))):
        at = dice.randrange(len(words))
        word = dice.choice((*NUMBERS, *WORDS, ":", ",", "\r\n", "#", "1:", ":1", "1:2:3"))
        words[at] = word.encode("utf-8", "ignore")
    return dice.choice((b"",) * 8 + (b"\xef\xbb\xbf",)) + b"".join(words)


def json_lines_of(dice: Random, whole: bytes) -> bytes:
    """One line of JSON damaged, the others kept."""
    lines = whole.splitlines()
    at = dice.randrange(len(lines))
    lines[at] = json_of(dice, lines[at]).replace(b"\n", b" ")
    return dice.choice((b"\n", b"\n", b"\r\n")).join(lines)


# ---------------------------------------------------------------- tensors


def safetensors_of(dice: Random, whole: bytes) -> bytes:
    """The JSON header damaged, or the size that it is said to have."""
    length = int.from_bytes(whole[:8], "little")
    header = whole[8 : 8 + length]
    if dice.random() < 0.6:
        made = json.loads(header)
        name = dice.choice(list(made))
        field = dice.choice(("dtype", "shape", "data_offsets"))
        big = dice.choice((0, -1, 1, 2**31, 2**40, 2**62, 2**63, 10**18, 10**30, True, None, "1", 1.0))
        made[name] = dict(made[name]) | {field: dice.choice((big, [big], [big, big], [0, big], [1, 2, 2, big], "F32"))}
        header = _dumped(made).encode("utf-8", "surrogatepass")
    else:
        header = json_of(dice, header)
    said = dice.choice((len(header),) * 6 + (0, 1, len(whole), 2**24, 2**25, 2**40, 2**63, 2**64 - 1))
    return struct.pack("<Q", said) + header + whole[8 + length :]


DESCR = ("'<f4'", "'<f2'", "'>f8'", "'|O'", "'<i8'", "'|V2'", "'|b1'", "[('a', '<f4')]", "'<U9'", "'<M8[s]'", "'f'",
         "0", "'<f4' * 9", "'<c16'", "'<g16'", "'<f16'", "'|S100000000'", "'\\d'", "1_0 or 2", "'<f4',")  # fmt: skip
SHAPES = ("()", "(2,)", "(2, 4)", "(1, 2, 2, 4)", "(2L, 4L)", "(-2, 4)", "(99999999999,)", "(1099511627776, 1)",
          "(2, 4", "(4611686018427387904, 4)", "(1e9,)", "2", "(2, True)", "(0, 4)", "(0xFFFFFFFF, 1)",
          "(" + "1, " * 70 + "1)", "(" + "9" * 5000 + ",)", "(" + "(" * 300 + ")" * 300 + ")")  # fmt: skip


def npy(dice: Random, data: bytes) -> bytes:
    """An npy file whose header says what is not so."""
    order = dice.choice(("False", "True", "0", "None"))
    text = f"{{'descr': {dice.choice(DESCR)}, 'fortran_order': {order}, 'shape': {dice.choice(SHAPES)}, }}"
    if dice.random() < 0.2:
        text = bytes_of(dice, text.encode("latin-1")).decode("latin-1")
    header = text.encode("latin-1", "replace") + b"\n"
    version = dice.choice((1, 1, 1, 2, 3, 4, 0, 255))
    width = 2 if version == 1 else 4
    said = dice.choice((len(header),) * 5 + (0, 9, 65535, 2**31 - 1)) % 256**width
    return b"\x93NUMPY" + bytes((version, 0)) + said.to_bytes(width, "little") + header + data


def zip_of(dice: Random, whole: bytes) -> bytes:
    """An archive with members that lie, are doubled, nested, packed otherwise, or are none."""
    with zipfile.ZipFile(io.BytesIO(whole)) as old:
        members = {name: old.read(name) for name in old.namelist()}
    for _ in range(dice.choice((0, 1, 1, 2))):
        name = dice.choice(list(members))
        match dice.randrange(6):
            case 0 | 1:
                members[name] = npy(dice, dice.choice((b"", bytes(32), bytes(64), bytes(200_000))))
            case 2:
                members[name] = whole  # an archive in an archive
            case 3:
                members[name] = b"cos\nsystem\n(S'touch /tmp/no'\ntR."  # a pickle
            case 4:
                members[dice.choice(("q.npy", "Q", "../q.npy", "/q.npy", "k.NPY", "x" * 60_000, "é.npy"))] = b"x"
            case _:
                members.pop(name)
                members = members or {"x.npy": b""}
    out = io.BytesIO()
    packing = dice.choice((zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2))
    with zipfile.ZipFile(out, "w", packing) as new:
        for name, data in members.items():
            new.writestr(name, data)
    made = out.getvalue()
    return bytes_of(dice, made) if dice.random() < 0.5 else made


Damage = Callable[[Random, bytes], bytes]


def damaged(dice: Random, seeds: Sequence[bytes], ways: Sequence[Damage]) -> bytes:
    """One of the seeds, damaged in one of the ways; seldom whole, or bytes of no format."""
    seed, luck = dice.choice(seeds), dice.random()
    if luck < 0.01:
        return seed
    if luck < 0.03:
        return dice.randbytes(dice.choice((0, 1, 8, 100, 3000)))
    if luck < 0.25:
        return bytes_of(dice, seed)
    return dice.choice(ways)(dice, seed)


# ---------------------------------------------------------------- stores of a sweep


def store_of(dice: Random, whole: bytes) -> bytes:
    """A row, a column, a table or a mark of a SQLite file as iosim does not write it."""
    with TemporaryDirectory() as folder:
        path = Path(folder) / "a.db"
        path.write_bytes(whole)
        with closing(sqlite3.connect(path, isolation_level=None)) as file:
            column = dice.choice(("inputs", "result"))
            (key, text) = dice.choice(file.execute(f"SELECT key, {column} FROM configuration").fetchall())  # noqa: S608
            match dice.randrange(8):
                case 0 | 1 | 2 | 3 if text:
                    made: Any = json_of(dice, text.encode()).decode("utf-8", "replace")
                case 4:
                    made = dice.choice((None, 1, 1.5, b"\xff", "", "null", "[]", "1", "{}", "NaN"))
                case 5:
                    file.execute(f"ALTER TABLE configuration {dice.choice(TABLES)}")
                    made = text
                case 6:
                    file.execute(f"PRAGMA application_id = {dice.getrandbits(31)}")
                    made = text
                case _:
                    file.execute(dice.choice(("DROP TABLE configuration", "DELETE FROM configuration",
                                              "CREATE VIEW other AS SELECT 1", "CREATE TRIGGER t AFTER INSERT ON "
                                              "configuration BEGIN DELETE FROM configuration; END")))  # fmt: skip
                    return _closed(file, path)
            with suppress(sqlite3.IntegrityError, sqlite3.OperationalError):  # the table may have another shape by now
                file.execute(f"UPDATE configuration SET {column} = ? WHERE key = ?", (made, key))  # noqa: S608
            return _closed(file, path)


TABLES = ("RENAME TO other", "ADD COLUMN more TEXT", "RENAME COLUMN error TO e", "RENAME COLUMN key TO k")


def _closed(file: sqlite3.Connection, path: Path) -> bytes:
    file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    file.close()
    return path.read_bytes()


# ---------------------------------------------------------------- machines


def machine_of(dice: Random, whole: bytes) -> bytes:
    """A profile that loads, with numbers as no machine has them."""
    lines = whole.decode().splitlines()
    numbers = [n for n, line in enumerate(lines) if re.match(r"\w+ = \{ (value|unknown)", line)]
    for at in dice.sample(numbers, dice.choice((1, 1, 2, 3, 8))):
        value = dice.choice(("0", "0.001", "0.5", "1", "2", "3", "7", "1000", "123457", "1000000", "1000000000"))
        given = f'{{ value = {value}, source = "x", confidence = "measured" }}'
        lines[at] = f"{lines[at].partition('=')[0]}= " + dice.choice((given, given, given, '{ unknown = "x" }'))
    return "\n".join(lines).encode()
