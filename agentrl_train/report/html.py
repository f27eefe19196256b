"""Parts of the pages: the document, tiles, headings, folds, and the format of shares and durations."""

from __future__ import annotations

from html import escape
from pathlib import Path


def document(title: str, body: str) -> str:
    """Return a self-contained page that loads no files and runs no script."""
    style = "".join(
        Path(__file__).with_name(name).read_text(encoding="utf-8") for name in ("chart.css", "page.css")
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        '<meta http-equiv="Content-Security-Policy" content="default-src \'none\'; '
        "style-src 'unsafe-inline'\">"
        f"<title>{escape(title)}</title><style>\n{style}</style></head>"
        f"<body><main>\n{body}\n</main></body></html>\n"
    )


def tile(name: str, value: str, note: str) -> str:
    """Return a card with one value."""
    return (
        f'<div class="card tile"><div class="name">{escape(name)}</div>'
        f'<div class="value">{escape(value)}</div><div class="note">{escape(note)}</div></div>'
    )


def section_head(anchor: str, title: str, note: str) -> str:
    """Return a heading and the note below it."""
    return f'<h2 id="{anchor}">{escape(title)}</h2><p class="dim small">{escape(note)}</p>'


def fold(title: str, cards: str, *, is_open: bool = False) -> str:
    """Return a section that opens and closes."""
    return (
        f'<details class="card fold"{" open" if is_open else ""}><summary>{escape(title)}</summary>'
        f'<div class="inside pair">{cards}</div></details>'
    )


def percent(value: float | None) -> str:
    """Return a share as a percentage with one digit."""
    return "–" if value is None else f"{100 * value:.1f}%"


def duration(seconds: float) -> str:
    """Return seconds as hours, minutes and seconds."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02d} min" if hours else f"{minutes} min {rest:02d} s"
