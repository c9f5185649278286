"""Parameters of a policy or filter: the keyword-only arguments of its constructor."""

from __future__ import annotations

import inspect
import re
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

__all__ = ["Parameter", "check_parameters", "parameters_of", "shown"]

MAX_SHOWN = 200
"""Most characters of a refused value that an error message repeats."""

_ADDRESS = re.compile(r"@|:/|//")

_SHOWN = {int: "a whole number", float: "a number", bool: "true or false", str: "a string"}


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter: its name, its type (int, float, bool or str) and its default."""

    name: str
    type: type
    default: Any

    def accepts(self, value: object) -> bool:
        """Whether `value` has the right type. A float may be an int, but not a bool."""
        if self.type is float:
            return isinstance(value, int | float) and not isinstance(value, bool)
        if self.type is int:
            return isinstance(value, int) and not isinstance(value, bool)
        return isinstance(value, self.type)

    def __str__(self) -> str:
        return f"{self.name} ({_SHOWN[self.type]}, by default {self.default!r})"


def parameters_of(cls: type) -> dict[str, Parameter]:
    """Return the parameters of a class, by name.

    Raises:
        TypeError: if one of them has no default, or an annotation other than
            int, float, bool and str.
    """
    arguments = inspect.signature(cls).parameters.values()
    ours = {each.name: each for each in arguments if each.kind is inspect.Parameter.KEYWORD_ONLY}
    hints = typing.get_type_hints(cast(Any, cls).__init__) if ours else {}
    found: dict[str, Parameter] = {}
    for name, argument in ours.items():
        kind = hints.get(name)
        if kind not in _SHOWN or argument.default is inspect.Parameter.empty:
            raise TypeError(
                f"parameter {name!r} of {cls.__qualname__} must have a default and be annotated "
                f"as one of: {', '.join(kind.__name__ for kind in _SHOWN)}"
            )
        found[name] = Parameter(name, kind, argument.default)
    return found


def shown(value: object) -> str:
    """Format a value for an error message: shortened, and hidden if it may hold a password.

    Any address, even a mistyped one, may hold a password.
    """
    try:
        text = repr(value)
    except Exception:
        # For example an integer with too many digits to convert.
        return f"<{type(value).__name__}>"
    if _ADDRESS.search(text):
        return f"<{type(value).__name__} that may hold a password>"
    return text if len(text) <= MAX_SHOWN else f"{text[:MAX_SHOWN]}..."


def check_parameters(what: str, cls: type, values: Mapping[str, object]) -> None:
    """Check that `cls` takes these parameters, with values of these types.

    Ranges are left to the constructor.

    Args:
        what: name of `cls` in messages, such as ``policy 'lru'``.

    Raises:
        ValueError: names the parameter, the value and what is allowed.
    """
    allowed = parameters_of(cls) if values else {}
    for name, value in values.items():
        parameter = allowed.get(name)
        if parameter is None:
            known = ", ".join(map(str, allowed.values())) or "none"
            hint = ""
            if name in inspect.signature(cls).parameters:
                hint = "; a parameter is keyword-only: it stands behind a *"
            raise ValueError(f"{what} has no parameter {name!r}; it takes: {known}{hint}")
        if not parameter.accepts(value):
            raise ValueError(f"{what}: {name} = {shown(value)} must be {_SHOWN[parameter.type]}")
