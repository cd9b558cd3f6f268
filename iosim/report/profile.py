"""A profile's data as a TOML file."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

HEAD = "# Keys, units and rules: iosim/hardware.py. Check a file with `iosim hw check FILE`.\n"


def profile_toml(data: Mapping[str, Any]) -> str:
    """The text of a profile: tables in the order of `data`, one line a number."""
    return HEAD + "\n".join(_table(data, ""))


def _table(table: Mapping[str, Any], path: str) -> Iterator[str]:
    """Lines of a table: what fits on a line, then the tables in it."""
    nested = {key: value for key, value in table.items() if _is_table(value)}
    for key, value in table.items():
        if key not in nested:
            yield f"{_key(key)} = {_value(value)}"
    for key, value in nested.items():
        name = f"{path}{_key(key)}"
        for each in value if isinstance(value, list) else [value]:
            yield ""
            yield f"[[{name}]]" if isinstance(value, list) else f"[{name}]"
            yield from _table(each, f"{name}.")
    if not path:
        yield ""


def _is_table(value: Any) -> bool:
    """Whether a value is written under a header: a list of tables, or a table that is not one number."""
    if isinstance(value, list):
        return True
    return isinstance(value, dict) and not {"source", "unknown"} & value.keys()


def _key(key: str) -> str:
    return key if key.isascii() and key.replace("_", "").replace("-", "").isalnum() else _quoted(key)


def _value(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):
        return _text(value)
    return repr(value)


def _text(text: str) -> str:
    """A string; one that ends its lines is written over several."""
    if not text.endswith("\n"):
        return _quoted(text)
    return '"""\n' + "\n".join(_quoted(line)[1:-1] for line in text.split("\n")) + '"""'


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False).replace("\x7f", "\\u007f")
