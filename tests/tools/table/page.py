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
    "next trainers": ("trainer of TorchRL 0.15", *trainers.PLACES),
}


def _around(table: str) -> tuple[str, str, str]:
    """The page before a table, the table, and the page after it."""
    begin, end = f"<!-- table of {table} -->\n", f"<!-- end of table of {table} -->\n"
    before, _, rest = PAGE.read_text().partition(begin)
    inside, _, after = rest.partition(end)
    return before + begin, inside, end + after


def documented(row: Row) -> Cells:
    """What the page says in a row. Rows with equal cells share a line, which lists their names."""
    head, width = HEADS[row.table], len(row.name)
    for line in _around(row.table)[1].splitlines():
        cells = tuple(cell.strip() for cell in line[1:-1].split("|"))
        if all((name or NO_NAME) in cell.split("; ") for name, cell in zip(row.name, cells, strict=False)):
            return dict(zip(head[width:], cells[width:], strict=True))
    return {}


def write() -> None:
    """Observe every row, and replace the tables of the page."""
    for table, head in HEADS.items():
        lines = [(row.name, row.observe()) for row in ROWS if row.table == table]
        if not lines:  # those of a TorchRL that is not installed
            continue
        before, _, after = _around(table)
        PAGE.write_text(before + as_table(head, lines) + after)


def as_table(head: tuple[str, ...], rows: list[tuple[tuple[str, ...], Cells]]) -> str:
    """The table as Markdown. Rows that differ in one name alone become one line."""
    width = len(rows[0][0])
    lines = [
        (*(name or NO_NAME for name in names), *(cells.get(column, "") for column in head[width:]))
        for names, cells in rows
    ]
    for place in reversed(range(width)):
        shared: dict[tuple[str, ...], list[str]] = {}
        for line in lines:
            shared.setdefault((*line[:place], *line[place + 1 :]), []).append(line[place])
        lines = [(*rest[:place], "; ".join(names), *rest[place:]) for rest, names in shared.items()]
    first, *others = ("| " + " | ".join(line) + " |\n" for line in (head, *lines))
    return "".join((first, "|" + "---|" * len(head) + "\n", *others))
