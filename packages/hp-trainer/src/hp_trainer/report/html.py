"""HTML of reports: one file that loads nothing. Whatever comes from a run is escaped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 84rem; padding: 0 1rem; color: #222; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.15rem; margin-top: 2rem; border-bottom: 1px solid #ddd; }
table { border-collapse: collapse; } td, th { padding: .15rem .6rem; text-align: left; border: 1px solid #ddd; }
th { background: #f5f5f5; font-weight: 600; } td { font-variant-numeric: tabular-nums; }
table.layout td { text-align: center; padding: .15rem .35rem; } table.layout { display: block; overflow-x: auto; }
pre { background: #f7f7f7; padding: 1rem; overflow-x: auto; font-size: .85rem; }
.curves { display: flex; flex-wrap: wrap; gap: 1rem; } .curves svg { max-width: 100%; height: auto; width: 26rem; }
"""


def page(title: str, sections: Iterable[tuple[str, str]]) -> str:
    """Return a whole page; `sections` are headings and the HTML below them."""
    body = "".join(f"<h2>{escape(heading)}</h2>\n{content}\n" for heading, content in sections)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f"<style>{_STYLE}</style></head>\n<body><h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def table(rows: Iterable[Sequence[object]], header: Sequence[object] = ()) -> str:
    """Return a table of texts; the first column of one without a header is bold."""
    head = "".join(f"<th>{escape(str(each))}</th>" for each in header)
    lines = [f"<tr>{head}</tr>"] if head else []
    for row in rows:
        cells = [escape(str(each)) for each in row]
        first = f"<td>{cells[0]}</td>" if header else f"<th>{cells[0]}</th>"
        lines.append(f"<tr>{first}{''.join(f'<td>{cell}</td>' for cell in cells[1:])}</tr>")
    return f"<table>{''.join(lines)}</table>"


def preformatted(text: str) -> str:
    """Return a text as it is."""
    return f"<pre>{escape(text)}</pre>"
