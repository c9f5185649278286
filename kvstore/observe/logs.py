"""Log the lines of modules that have no logger of their own."""

from __future__ import annotations

import logging
from collections.abc import Callable

from kvstore.types import LogLine, about

__all__ = ["warn_with"]


def warn_with(logger: logging.Logger) -> Callable[[LogLine], None]:
    """Return a function that logs a line as a warning, with its event and attributes."""

    def warn(line: LogLine) -> None:
        logger.warning("%s", line.text, extra=about(line.event, **line.about))

    return warn
