"""The tables as Markdown, and back."""

from __future__ import annotations

from pathlib import Path

from tests.tools.table import away, collectors, observing, trainers
from tests.tools.table.row import Cells, Row

PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"
ROWS: tuple[Row, ...] = (*collectors.ROWS, *away.ROWS, *trainers.ROWS)
HEADS = {
    "collectors": ("collector", "scheme", *observing.COLUMNS),
    "trainers": ("trainer", *trainers.PLACES),
}


def _around(table: str) -> tuple[str, str, str]:
    """The page before a table, the table, and the page after it."""
    begin, end = f"<!-- table of {table} -->\n", f"<!-- end of table of {table} -->\n"
    before, _, rest = PAGE.read_text().partition(begin)
    inside, _, after = rest.partition(end)
    return before + begin, inside, end + after


def documented(row: Row) -> Cells:
    """What the page says in a row."""
    head, width = HEADS[row.table], len(row.name)
    for line in _around(row.table)[1].splitlines():
        cells = tuple(cell.strip() for cell in line[1:-1].split("|"))
        if cells[:width] == row.name:
            return dict(zip(head[width:], cells[width:], strict=True))
    return {}


def write() -> None:
    """Observe every row, and replace the tables of the page."""
    for table, head in HEADS.items():
        lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        for row in ROWS:
            if row.table == table:
                cells = row.observe()
                full = (*row.name, *(cells.get(column, "") for column in head[len(row.name) :]))
                lines.append("| " + " | ".join(full) + " |")
        before, _, after = _around(table)
        PAGE.write_text(before + "\n".join(lines) + "\n" + after)
