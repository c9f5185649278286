"""Name the namespace of a vLLM engine, and explain a cold start.

A start is cold when other namespaces of the model lie on the same paths; the log says how they
differ.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvstore.connector.spec import NAMING_KEYS, flag_of
from kvstore.errors import ConfigError, KVStoreError
from kvstore.tiers.disk.namespace import read_namespace

if TYPE_CHECKING:
    from kvstore.vllm.engine import Engine

__all__ = ["Naming", "siblings"]

UNSEEN = (
    "the configuration of the engine is not known here, so nobody can tell whose chunks may be used"
)
UNTOLD = (
    "the workers have not told the attention backends of their layers, as beside other connectors "
    "in vLLM's MultiConnector, so nobody can tell whose chunks may be used"
)
TOLD_BY_HAND = (
    "Set automatic_identity = false and name in identity what engines must have in common, such "
    'as {"model": "m", "weights": "v1"}'
)
BY_HAND = (
    'Use the connector KVStoreConnector, which is given it ("kv_connector": "KVStoreConnector", '
    '"kv_connector_module_path": "kvstore.vllm"); or set automatic_identity = false and name in '
    'identity what engines must have in common, such as {"model": "m", "weights": "v1"}'
)


@dataclass(frozen=True)
class Naming:
    """How much of the identity is found out, and how much is told: see `identity.py`.

    Attributes:
        automatic: everything is found out that decides the bytes.
        fingerprint: the weights are read for it.
    """

    automatic: bool
    fingerprint: bool

    @classmethod
    def taken_from(cls, values: MutableMapping[str, Any]) -> Naming:
        """Take its two keys out of a configuration.

        Raises:
            ConfigError: for a value that is no flag.
        """
        switches = [flag_of(values, key, default=True) for key in NAMING_KEYS]
        for key in NAMING_KEYS:
            values.pop(key, None)
        return cls(*switches)

    def whole(
        self,
        layout: Mapping[str, Any],
        config: Any,
        engine: Engine | None,
        told: Mapping[str, Any],
    ) -> dict[str, Any]:
        """Return the identity: the layout, what is found out, and what the operator adds.

        What is told under a name that is known already stands beside it, as `told.NAME`: an
        operator may part engines by it, and joins none.

        Raises:
            ConfigError: as `engine_identity`.
        """
        known = {**layout, **self.engine_identity(config, engine, told)}
        beside = {
            key if known.get(key) is None else f"told.{key}": value for key, value in told.items()
        }
        return {**known, **beside}

    def engine_identity(
        self, config: Any, engine: Engine | None, told: Mapping[str, Any]
    ) -> dict[str, Any]:
        """Return the facts that, besides the layout, decide the bytes of persistent chunks.

        Args:
            config: vLLM's `OffloadingConfig`.
            engine: what vLLM gave, if it gave anything.
            told: the identity that the operator has written.

        Raises:
            ConfigError: if it cannot be found out, or is neither to be found out nor told.
        """
        from kvstore.vllm.formats import page_formats
        from kvstore.vllm.identity.identity import engine_identity

        if not self.automatic:
            if not told:
                raise ConfigError(
                    "automatic_identity = false: name in identity what engines must have in "
                    'common to share chunks, such as {"model": "m", "weights": "v1"}'
                )
            return {}
        if engine is None:
            raise ConfigError(f"{UNSEEN}. {BY_HAND}")
        if engine.layers is None:
            raise ConfigError(f"{UNTOLD}. {TOLD_BY_HAND}")
        try:
            return {
                **engine_identity(engine.vllm_config, fingerprint_weights=self.fingerprint),
                **page_formats(config, engine.kv_cache_config, engine.layers),
            }
        except (AttributeError, TypeError) as error:
            raise ConfigError(f"{UNSEEN} ({error}). {BY_HAND}") from error


MAX_TOLD = 6
"""Most of the settings in which two engines differ that are named."""


def siblings(identity: Mapping[str, Any], paths: Iterable[Path]) -> list[str]:
    """One line for each namespace of the same model that differs; none if one is the same."""
    lines = []
    for path in paths:
        for folder in _folders(path):
            try:
                theirs = read_namespace(folder)["identity"]
            except (KVStoreError, OSError):
                continue
            if theirs.get("model") != identity.get("model"):
                continue
            names = sorted(
                name
                for name in identity.keys() | theirs.keys()
                if name not in ("chunk_bytes", "slot_bytes")
                and identity.get(name) != theirs.get(name)
            )
            if not names:
                return []
            rest = f" and {len(names) - MAX_TOLD} more" if len(names) > MAX_TOLD else ""
            told = ", ".join(names[:MAX_TOLD])
            lines.append(f"{folder} is of the same model and differs in {told}{rest}")
    return lines


def _folders(path: Path) -> list[Path]:
    try:
        return sorted(folder for folder in path.iterdir() if folder.is_dir())
    except OSError:
        return []
