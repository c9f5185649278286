"""The dry form of a benchmark: all of its real work, so small that it takes seconds."""

from __future__ import annotations

import argparse
from typing import Any

__all__ = ["read_options"]


def read_options(parser: argparse.ArgumentParser, **smallest: Any) -> argparse.Namespace:
    """Read the command line; `--dry` puts `smallest` in the place of what was given.

    Args:
        smallest: values of options, by their names. A folder or a choice of what is measured is
            no size and stays as given.
    """
    parser.add_argument(
        "--dry",
        action="store_true",
        help="the same work in its smallest form, in seconds: no figure of it means anything",
    )
    options = parser.parse_args()
    if options.dry:
        unknown = smallest.keys() - vars(options).keys()
        assert not unknown, f"no such options: {unknown}"
        vars(options).update(smallest)
    return options
