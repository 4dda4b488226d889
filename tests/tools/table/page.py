"""The tables as Markdown, and back."""

from __future__ import annotations

from pathlib import Path

from tests.tools.table import away, collectors, observing, trainers
from tests.tools.table.row import Cells, Row

PAGE = Path(__file__).parents[3] / "docs" / "compatibility.md"
ROWS: tuple[Row, ...] = (*collectors.ROWS, *away.ROWS, *trainers.ROWS)
#: How a table writes that nothing was given.
NO_NAME = "none"
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
    """What the page says in a row. Rows with equal cells share a line, which lists their last names."""
    head, width = HEADS[row.table], len(row.name)
    for line in _around(row.table)[1].splitlines():
        cells = tuple(cell.strip() for cell in line[1:-1].split("|"))
        names = cells[width - 1].split(", ")
        if cells[: width - 1] == row.name[:-1] and (row.name[-1] or NO_NAME) in names:
            return dict(zip(head[width:], cells[width:], strict=True))
    return {}


def write() -> None:
    """Observe every row, and replace the tables of the page."""
    for table, head in HEADS.items():
        shared: dict[tuple[tuple[str, ...], tuple[str, ...]], list[str]] = {}
        for row in ROWS:
            if row.table == table:
                cells = row.observe()
                full = tuple(cells.get(column, "") for column in head[len(row.name) :])
                shared.setdefault((row.name[:-1], full), []).append(row.name[-1] or NO_NAME)
        lines = ["| " + " | ".join(head) + " |", "|" + "---|" * len(head)]
        lines += [
            "| " + " | ".join((*first, ", ".join(last), *full)) + " |"
            for (first, full), last in shared.items()
        ]
        before, _, after = _around(table)
        PAGE.write_text(before + "\n".join(lines) + "\n" + after)
