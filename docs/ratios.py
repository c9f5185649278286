"""Draw the table "Measured" of the README as bars: python docs/ratios.py writes docs/ratios.svg."""

from __future__ import annotations

import math
import re
from html import escape
from pathlib import Path

HERE = Path(__file__).parent
PICTURE = HERE / "ratios.svg"

LEAST, MOST = 0.5, 40.0
"""The ends of the axis, which is logarithmic."""

LEFT, WIDTH, ROW = 540, 380, 26
BETTER, WORSE, INK, FAINT = "#2b7a4b", "#b0413e", "#24292f", "#d0d7de"

ROWS = re.compile(r"^\| (?!what|---)(.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)


def speed(told: str) -> tuple[float, float]:
    """How many times as good a row says it is, at least and at most.

    Raises:
        ValueError: if the words say no ratio that is known.
    """
    numbers = [float(number) for number in re.findall(r"\d+(?:\.\d+)?", told)]
    if re.fullmatch(r"[\d.]+ % for [\d.]+ %", told):
        return numbers[0] / numbers[1], numbers[0] / numbers[1]
    if told.endswith("of the time"):
        numbers = [1 / number for number in numbers]
    elif not told.endswith(("sooner", "as fast")):
        raise ValueError(f"no ratio that is known: {told!r}")
    return min(numbers), max(numbers)


def rows_of(readme: str) -> list[tuple[str, str, float, float]]:
    """What, the ratio in words, and both its ends, of each row of the table."""
    table = readme[readme.index("## Measured") :].split("\n## ")[0]
    return [
        (f"{what}, against {other}".replace("`", ""), told, *speed(told))
        for what, other, told in ROWS.findall(table)
    ]


def parts(low: float, high: float) -> list[tuple[float, float, str, float]]:
    """The parts of a bar: from, to, colour and opacity. What not every run has shown is paler."""
    if low >= 1:
        return [(1.0, high, BETTER, 0.45), (1.0, low, BETTER, 1.0)]
    if high <= 1:
        return [(low, 1.0, WORSE, 0.45), (high, 1.0, WORSE, 1.0)]
    return [(low, 1.0, WORSE, 0.45), (1.0, high, BETTER, 0.45)]


def draw(rows: list[tuple[str, str, float, float]]) -> str:
    """The picture: a bar from 1 to the lower end, and a paler one to the upper end."""

    def at(ratio: float) -> float:
        share = math.log(min(max(ratio, LEAST), MOST) / LEAST) / math.log(MOST / LEAST)
        return round(LEFT + share * WIDTH, 1)

    height = ROW * (len(rows) + 2)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {LEFT + WIDTH + 20} {height}" '
        'font-family="sans-serif" font-size="12">',
        "<title>How many times as fast as the other: measured ratios</title>",
        '<rect width="100%" height="100%" fill="#ffffff"/>',
    ]
    for tick in (0.5, 1, 2, 5, 10, 20, 40):
        colour = INK if tick == 1 else FAINT
        lines.append(f'<path d="M{at(tick)} {ROW}V{height - ROW}" stroke="{colour}"/>')
        lines.append(f'<text x="{at(tick)}" y="{height - 8}" text-anchor="middle">{tick:g}x</text>')
    lines.append(f'<text x="{LEFT}" y="16" fill="{INK}">times as fast (hits: times as many)</text>')
    for number, (what, told, low, high) in enumerate(rows):
        top = ROW * (number + 1) + 5
        for first, last, colour, opacity in parts(low, high):
            begin, end = at(first), at(last)
            width = round(max(end - begin, 1.5), 1)
            lines.append(
                f'<rect x="{begin}" y="{top}" width="{width}" height="{ROW - 10}" fill="{colour}" '
                f'opacity="{opacity}"><title>{escape(told)}</title></rect>'
            )
        text = f'<text x="{LEFT - 10}" y="{top + 12}" text-anchor="end" fill="{INK}">'
        lines.append(f"{text}{escape(what.replace(chr(96), ''))}</text>")
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.write_text(draw(rows_of((HERE.parent / "README.md").read_text())))
