"""Log lines: of modules that have no logger of their own, or that several modules have."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

from kvstore.types import LogLine, about

__all__ = ["warn_of_uncleared", "warn_with"]

logger = logging.getLogger("kvstore")


def warn_with(logger: logging.Logger) -> Callable[[LogLine], None]:
    """Return a function that logs a line as a warning, with its event and attributes."""
    return lambda line: logger.warning("%s", line.text, extra=about(line.event, **line.about))


def warn_of_uncleared(tiers: Sequence[str]) -> None:
    """Tell of tiers that end before they were cleared after a reset, if there are any."""
    if tiers:
        logger.warning(
            "%s could not be cleared after a reset: the next process may find what was stored "
            "before it",
            ", ".join(tiers),
            extra=about("tier.not_cleared", tiers=tiers),
        )
