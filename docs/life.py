"""Writes the tables of a chunk's life into docs/design.md, from the code."""

from __future__ import annotations

from pathlib import Path

from kvstore.core.chunk import HOST, TIER, Table

PAGE = Path(__file__).with_name("design.md")
BEGIN, END = "<!-- life: begin -->\n", "<!-- life: end -->\n"


def table(title: str, life: Table) -> str:
    """One table: a row for each state, what may happen in it and what follows."""
    rows = [f"| {title} | what may happen, and what the chunk is then |", "|---|---|"]
    for state, following in life.items():
        events = ", ".join(f"{event} → *{after}*" for event, after in following.items())
        rows.append(f"| *{state}* | {events} |")
    return "\n".join(rows) + "\n"


def page(text: str) -> str:
    """The page with its tables as the code has them."""
    before, rest = text.split(BEGIN)
    _, after = rest.split(END)
    tables = f"{table('in host memory', HOST)}\n{table('on a tier', TIER)}"
    return f"{before}{BEGIN}{tables}{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
