"""Several sections as the files of one report: a page that needs nothing else, Markdown, pictures, CSV and JSON.

The page is made from page/page.html by jinja2, which escapes whatever is put in, so that names and texts from outside
(profiles, dataflow files) cannot become markup.  page.css and page.js become part of it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import iosim
from iosim.report.sections import Plot, Section, document, markdown, plain, plot_images, table_csv

SCHEMA = "iosim.reports/1"
INDEX = "report.json"  # names the files of a report, which marks its directory as ours
_PAGE = Path(__file__).parent / "page"


@dataclass(frozen=True, slots=True)
class Extra:
    """A part of the page that is more than a Section, such as an interactive timeline.

    `html` is markup that its maker has escaped, `script` runs at the end of the page, `style` joins the page's own.
    """

    name: str
    title: str
    html: str
    script: str = ""
    style: str = ""


def files(
    title: str, sections: Sequence[Section], request: Mapping[str, Any], extras: Sequence[Extra] = ()
) -> dict[str, bytes]:
    """Every file of the report by its name; the same bytes for the same sections."""
    out: dict[str, bytes] = {}
    pictures: dict[tuple[str, str], str] = {}
    for section in sections:
        for plot in section.plots:
            stem = _stem(section.name, plot.name)
            pictures[section.name, plot.name] = f"{stem}.png"
            out[f"{stem}.png"], out[f"{stem}.svg"] = plot_images(plot, ("png", "svg"))
        for table in section.tables:
            out[f"{_stem(section.name, table.name)}.csv"] = table_csv(table).encode()
    out["index.html"] = page(title, sections, out, extras).encode()
    out["report.md"] = _markdown(title, sections, pictures).encode()
    out[INDEX] = (json.dumps(_index(title, sections, request, out), indent=1, allow_nan=False) + "\n").encode()
    return out


def _stem(section: str, part: str) -> str:
    return section if section == part else f"{section}-{part}"


def _markdown(title: str, sections: Sequence[Section], pictures: Mapping[tuple[str, str], str]) -> str:
    parts = [f"# {plain(title)}\n"]
    for section in sections:
        parts.append(markdown(section, {p.name: pictures[section.name, p.name] for p in section.plots}))
    return "\n".join([*parts, f"iosim {iosim.__version__}\n"])


def _index(
    title: str, sections: Sequence[Section], request: Mapping[str, Any], made: Mapping[str, bytes]
) -> dict[str, Any]:
    machines = {m.name: m.profile_hash for section in sections for m in section.machines}
    return {
        "schema": SCHEMA,
        "title": title,
        "request": dict(request),
        "provenance": {"iosim": iosim.__version__, "profile_hash": machines},
        "files": sorted([*made, INDEX]),
        "reports": {section.name: document(section) for section in sections},
    }


def page(title: str, sections: Sequence[Section], made: Mapping[str, bytes], extras: Sequence[Extra] = ()) -> str:
    """The page; `made` has the SVG files of the plots."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined
    from markupsafe import Markup

    def drawn(section: Section, plot: Plot) -> Markup:
        stem = _stem(section.name, plot.name)
        return Markup(inline(made[f"{stem}.svg"].decode(), stem, plot.title))  # noqa: S704 - our own SVG, escaped

    environment = Environment(
        loader=FileSystemLoader(_PAGE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["stem"] = lambda part, section: _stem(section.name, part.name)
    return environment.get_template("page.html").render(
        title=title,
        sections=sections,
        extras=[{"name": e.name, "title": e.title, "html": Markup(e.html)} for e in extras],  # noqa: S704
        drawn=drawn,
        css=Markup("\n".join([_text("page.css"), *(e.style for e in extras)])),  # noqa: S704
        js=Markup("\n".join([_text("page.js"), *(e.script for e in extras)])),  # noqa: S704
        version=iosim.__version__,
        machines={m.name: m for section in sections for m in section.machines},
    )


def _text(name: str) -> str:
    return (_PAGE / name).read_text(encoding="utf-8")


# Colours that the page sets, so that a plot is readable in light and dark.
_COLOURS = {"#000000": "currentColor", "#ffffff": "var(--paper)", "#d9d9d9": "var(--rule)", "#cccccc": "var(--rule)"}


def inline(svg: str, name: str, title: str) -> str:
    """An SVG file as an element of a page, with ids of its own, the page's colours, and `title` for a screen reader."""
    from html import escape

    body = svg[svg.index("<svg") :]
    body = re.sub(r"<metadata>.*?</metadata>", "", body, flags=re.S)
    body = re.sub(r'\bid="([^"]*)"', rf'id="{name}-\1"', body)
    body = re.sub(r'href="#([^"]*)"', rf'href="#{name}-\1"', body)
    body = re.sub(r"url\(#([^)]*)\)", rf"url(#{name}-\1)", body)
    body = re.sub("|".join(_COLOURS), lambda found: _COLOURS[found[0]], body)
    body = re.sub(r'(<svg [^>]*?)width="[^"]*" height="[^"]*"|(<svg [^>]*?)height="[^"]*"', r"\1\2", body, count=1)
    return body.replace("<svg ", f'<svg role="img" aria-label="{escape(title)}" ', 1)
