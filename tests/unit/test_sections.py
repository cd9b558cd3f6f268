"""What every report is made of: forms of a Section, files of a page, and the directory that they are written to."""

from __future__ import annotations

import csv as csv_module
import io
import json
import os
import re
from collections import Counter
from pathlib import Path

import pytest

from iosim.cli import folder
from iosim.cli.folder import require_replaceable, write_directory
from iosim.errors import InputError, OutputError
from iosim.report import plots
from iosim.report.book import INDEX, SCHEMA, Extra, files
from iosim.report.sections import Column, Plot, Section, Table, csv, document, markdown, picture, text

NASTY = "<script>alert('x')</script> & \"quotes\""


def drawn(canvas: object) -> None:
    axes = canvas.subplots()  # type: ignore[attr-defined]
    plots.series(axes, [(1, 10), (2, 20)], NASTY, plots.BLUE, said=lambda x, y: f"{x} makes {y}")
    axes.bar([1], [5], color=plots.ORANGE, hatch="//", gid=f"{plots.HOVER}a bar")


def section_of(*machines: str) -> Section:
    columns = (
        Column("machine", "machine", words=True),
        Column("bytes", "size", "B", "what it takes", lambda b: f"{b} B"),
        Column("more", "more\nwords", wide=True),
    )
    rows = tuple({"machine": name, "bytes": n, "more": None} for n, name in enumerate(machines))
    return Section(
        name="sample",
        title=f"A title: {NASTY}",
        subject=("About this.",),
        answer=("The answer.",),
        tables=(Table("sample", f"Sizes {NASTY}", columns, rows, by="machine"),),
        plots=(Plot("sample", f"A plot {NASTY}", drawn, 3),),
    )


def test_a_row_without_a_column_is_a_mistake_of_ours() -> None:
    with pytest.raises(ValueError, match="table t"):
        Table("t", "T", (Column("a", "a"),), ({"b": 1},))


def test_a_terminal_gets_a_table_a_machine_and_no_wide_columns() -> None:
    shown = text(section_of("one", "two"))
    assert re.findall(r"^Sizes .*: (\w+)$", shown, re.M) == ["one", "two"]
    assert "more" not in shown
    assert "what it takes" in shown
    assert "machine" not in text(section_of("one"))


def test_csv_and_json_carry_raw_values() -> None:
    s = section_of("one", "two")
    rows = list(csv_module.DictReader(io.StringIO(csv(s))))
    assert rows == [
        {"table": "sample", "machine": m, "bytes": str(n), "more": ""} for n, m in enumerate(("one", "two"))
    ]
    table = document(s)["tables"]["sample"]
    assert table["rows"] == [dict(row) for row in s.tables[0].rows]
    assert [(c["key"], c["unit"]) for c in table["columns"]] == [("machine", ""), ("bytes", "B"), ("more", "")]


def test_markdown_takes_names_as_text() -> None:
    written = markdown(section_of("a|b", "c"), {"sample": "sample.png"})
    assert "<script" not in written.replace("\\<", "")
    assert "| a\\|b | 0 B | - |\n| c | 1 B | - |" in written


def test_pictures_are_the_same_bytes_each_time() -> None:
    s = section_of("one")
    svg = picture(s, "svg")
    assert svg == picture(s, "svg")
    assert b"<title>a bar</title>" in svg


# ---------------------------------------------------------------- the page


@pytest.fixture(scope="module")
def made() -> dict[str, bytes]:
    extra = Extra("timeline", "A timeline", "<div id='tl'></div>", "window.ready = 1;", ".tl { color: red; }")
    return files("Report <b>", [section_of("one")], {"n": [1]}, [extra])


def test_every_file_is_named_by_the_index(made: dict[str, bytes]) -> None:
    index = json.loads(made[INDEX])
    assert index["schema"] == SCHEMA
    assert set(index["files"]) == made.keys()
    assert made.keys() == {"sample.png", "sample.svg", "sample.csv", "index.html", "report.md", INDEX}


def test_names_from_outside_are_no_markup(made: dict[str, bytes]) -> None:
    page = made["index.html"].decode()
    assert "<script>alert" not in page
    assert page.count("<script>") == 1
    assert "&lt;script&gt;alert" in page
    assert "<title>Report &lt;b&gt;</title>" in page


def test_the_page_needs_nothing_from_elsewhere(made: dict[str, bytes]) -> None:
    page = made["index.html"].decode()
    assert not re.findall(r"""(?:src=|@import|url\((?!#)|<link)""", page)
    linked = set(re.findall(r'href="([^"#][^"]*)"', page))
    assert linked <= made.keys()
    named = set(re.findall(r'https?://[^"\s<]+', page))
    assert named <= {"http://www.w3.org/2000/svg", "http://www.w3.org/1999/xlink"}


def test_ids_of_the_page_are_its_own_and_every_reference_has_one(made: dict[str, bytes]) -> None:
    page = made["index.html"].decode()
    ids = Counter(re.findall(r'\bid="([^"]*)"', page))
    assert max(ids.values()) == 1
    assert set(re.findall(r'(?:href="#|url\(#|labelledby=")([^")]+)', page)) <= ids.keys()


def test_plots_take_the_colours_of_the_page_and_keep_their_own(made: dict[str, bytes]) -> None:
    page = made["index.html"].decode()
    svg = page[page.index("<svg") : page.index("</svg>")]
    assert "#ffffff" not in svg
    assert "currentColor" in svg
    assert plots.BLUE.lower() in svg
    assert f'fill="{plots.ORANGE.lower()}"' in svg  # of the hatched bar


def test_an_extra_part_has_its_place(made: dict[str, bytes]) -> None:
    page = made["index.html"].decode()
    assert page.index('<section id="sample"') < page.index('<section id="timeline"') < page.index("<div id='tl'>")
    assert page.index("window.ready = 1;") > page.index("<script>")


# ---------------------------------------------------------------- the directory


def contents(path: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in path.iterdir()}


def report(*names: str) -> dict[str, bytes]:
    listed = [*names, INDEX]
    return dict.fromkeys(names, b"x") | {INDEX: json.dumps({"schema": SCHEMA, "files": listed}).encode()}


def test_a_report_replaces_the_one_before_as_a_whole(tmp_path: Path) -> None:
    place = tmp_path / "deep" / "report"
    for files_ in (report("a", "b"), report("c")):
        require_replaceable(str(place), INDEX, SCHEMA, force=False)
        write_directory(files_, str(place))
        assert contents(place) == files_
        assert [p.name for p in place.parent.iterdir()] == ["report"]
    assert place.stat().st_mode & 0o777 == 0o777 & ~folder.umask()


@pytest.mark.parametrize("exchange", [True, False])
@pytest.mark.parametrize("broken", ["write", "rename"])
def test_a_failure_leaves_the_old_report_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str, exchange: bool
) -> None:
    place, old = tmp_path / "report", report("a")
    write_directory(old, str(place))
    if not exchange or broken == "rename":

        class Nothing:
            def __init__(self, *_: object, **__: object) -> None: ...

        monkeypatch.setattr(folder.ctypes, "CDLL", Nothing)  # a system that cannot exchange
    if broken == "write":
        monkeypatch.setattr(os, "fsync", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    else:
        real, calls = os.rename, []

        def rename(source: str, target: str) -> None:
            calls.append(source)
            if len(calls) == 2:
                raise OSError(5, "Input/output error")
            real(source, target)

        monkeypatch.setattr(os, "rename", rename)
    with pytest.raises(OutputError, match=r"--output: .*report: (No space left|Input/output)"):
        write_directory(report("b"), str(place))
    monkeypatch.undo()
    assert contents(place) == old
    assert [p.name for p in tmp_path.iterdir()] == ["report"]


def test_without_an_exchange_the_new_report_is_there_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder.ctypes, "CDLL", lambda *_, **__: object())
    place = tmp_path / "report"
    for files_ in (report("a"), report("b")):
        write_directory(files_, str(place))
    assert contents(place) == report("b")
    assert [p.name for p in tmp_path.iterdir()] == ["report"]


def test_a_directory_that_is_not_ours_is_kept(tmp_path: Path) -> None:
    place = tmp_path / "thesis"
    place.mkdir()
    require_replaceable(str(place), INDEX, SCHEMA, force=False)  # empty
    (place / "chapter1.tex").write_text("years of work")
    for strange in (None, "no JSON", '{"schema": "other/1", "files": []}', "[]"):
        if strange is not None:
            (place / INDEX).write_text(strange)
        with pytest.raises(OutputError, match=r"thesis: is not a report of iosim's .*; --force replaces"):
            require_replaceable(str(place), INDEX, SCHEMA, force=False)
    require_replaceable(str(place), INDEX, SCHEMA, force=True)


def test_a_file_beside_those_of_a_report_is_kept(tmp_path: Path) -> None:
    place = tmp_path / "report"
    write_directory(report("a"), str(place))
    (place / "notes.txt").write_text("mine")
    with pytest.raises(OutputError, match=r"holds notes.txt, which no report wrote; --force"):
        require_replaceable(str(place), INDEX, SCHEMA, force=False)


def test_a_place_that_cannot_be_a_directory(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(OutputError, match="is not a directory"):
        require_replaceable(str(tmp_path / "file"), INDEX, SCHEMA, force=True)
    with pytest.raises(OutputError, match="cannot be written to"):
        require_replaceable(str(tmp_path / "file" / "below"), INDEX, SCHEMA, force=True)
    with pytest.raises(InputError, match="the directory name is empty"):
        require_replaceable("", INDEX, SCHEMA, force=True)
