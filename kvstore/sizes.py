"""Sizes in bytes, parsed from text and formatted as text."""

from __future__ import annotations

import re

__all__ = ["format_size", "parse_size"]

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", 1):
    _UNITS |= dict.fromkeys((_letter, f"{_letter}b"), 1000**_power)
    _UNITS |= dict.fromkeys((f"{_letter}i", f"{_letter}ib"), 1024**_power)

ALLOWED = 'allowed are bytes or text such as "64GiB", "64Gi", "1.5TB", "512M"'


def parse_size(value: object) -> int:
    """Parse a size in bytes from a whole number, or from text such as ``"64GiB"`` or ``"1.5 TB"``.

    ``Ki``, ``KiB`` and so on are powers of 1024, ``k``, ``kB`` and so on powers of 1000, in either
    case.

    Raises:
        ValueError: for anything else, negative sizes included.
    """
    if isinstance(value, int) and not isinstance(value, bool):
        size = value
    elif isinstance(value, float) and value.is_integer():
        size = int(value)
    elif isinstance(value, str):
        match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", value)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(ALLOWED)
        try:
            number = float(match[1]) if "." in match[1] else int(match[1])
            size = round(number * _UNITS[match[2].lower()])
        except (OverflowError, ValueError) as error:
            raise ValueError(f"{ALLOWED}; this size is too large") from error
    else:
        raise ValueError(ALLOWED)
    if size < 0:
        raise ValueError("a size cannot be negative")
    return size


def format_size(size: float) -> str:
    """Format a size: ``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"
