"""A check that kvstore and its sibling packages come from one installation.

``tiers``, ``policies`` and ``tools`` are general names: a folder of the same
name in the working directory, or another distribution, can shadow them.
"""

from __future__ import annotations

import importlib.util
from pathlib import Path

from kvstore.errors import ShadowedPackageError

__all__ = ["check_siblings"]

SIBLINGS = ("tiers", "policies", "tools")


def check_siblings() -> None:
    """Check that the sibling packages lie beside this one.

    Raises:
        ShadowedPackageError: if one is missing or comes from elsewhere; the
            message names both places.
    """
    home = Path(__file__).resolve().parent.parent
    for name in SIBLINGS:
        try:
            spec = importlib.util.find_spec(name)
        except (ImportError, ValueError) as error:
            raise ShadowedPackageError(f"package {name!r} of kvstore: {error}") from error
        if spec is None:
            raise ShadowedPackageError(
                f"package {name!r} of kvstore is missing beside {home / 'kvstore'}; "
                "install kvstore again"
            )
        found = Path(spec.origin).resolve() if spec.origin else None
        if found is None or found.parent != home / name:
            places = found or ", ".join(spec.submodule_search_locations or ["?"])
            raise ShadowedPackageError(
                f"package {name!r} of kvstore (in {home / name}) is shadowed by {places}; "
                "rename or move that one, or take its folder off sys.path"
            )
