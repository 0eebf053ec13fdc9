"""Rows that a notebook shows as a table."""

from html import escape


class Table(list):
    """A list of dicts, one a row, shown as HTML by Jupyter; a value that is missing stays empty."""

    def _repr_html_(self) -> str:
        if not self:
            return "<p>(no rows)</p>"
        columns = dict.fromkeys(column for row in self for column in row)
        head = "".join(f"<th>{escape(column)}</th>" for column in columns)
        body = "".join(
            "<tr>"
            + "".join(f"<td>{escape(_text(row.get(column, '')))}</td>" for column in columns)
            + "</tr>"
            for row in self
        )
        return f"<table><tr>{head}</tr>{body}</table>"


def _text(cell) -> str:
    if isinstance(cell, bool):
        return "yes" if cell else "-"
    return f"{cell:.3g}" if isinstance(cell, float) else str(cell)
