"""Configuration files, as operators give them to vLLM, SGLang, LMCache or the library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from kvstore.config import Config, read_environment, read_toml
from kvstore.connector.spec import ENGINE_KEYS, VLLM_KEYS, check_vllm_values
from kvstore.errors import NOT_PARSED, ConfigError

__all__ = ["read_config"]

SPEC = "KVStoreOffloadingSpec"

VLLM_NAMES: Mapping[str, Mapping[str, Sequence[str | None]]] = {
    "KVStoreConnector": {
        "kv_connector_module_path": ("kvstore.vllm", "kvstore.vllm.connector"),
        "spec_name": (SPEC, None),
    },
    "OffloadingConnector": {
        "kv_connector_module_path": (None,),
        "spec_name": (SPEC,),
        "spec_module_path": ("kvstore.vllm", "kvstore.vllm.spec"),
    },
}
"""For each connector what vLLM must be told beside its name; None: or not told."""

ROLES = ("kv_both", "kv_producer", "kv_consumer")

OTHERS_NAMES = ("kvstore", "adapter_params")
"""Below what SGLang, and LMCache, have a configuration."""


def read_config(file: Path | None) -> tuple[Mapping[str, Any], Config]:
    """Return the values that were said, and the configuration that they make.

    Args:
        file: TOML, or JSON as given to vLLM, SGLang or LMCache; None for the environment.

    Raises:
        ConfigError: if it cannot be read, or if the server would refuse it.
    """
    if file is None:
        values: Any = read_environment()
        return values, Config.from_mapping(values)
    if file.suffix != ".json":
        values = read_toml(file)
        return values, Config.from_mapping(values)
    try:
        values = json.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read ({error.strerror})") from error
    except NOT_PARSED as error:
        raise ConfigError(f"{file}: not JSON ({error})") from error
    given, through = values, None
    for name in ("", "kv_connector_extra_config", *OTHERS_NAMES):
        # What vLLM, SGLang or LMCache is given.
        if name and name in values:
            values = values[name]
        if not isinstance(values, Mapping):
            raise ConfigError(f"{file}: {name or 'it'} must be a table of keys")
        if "kv_connector" in values:
            through, values = values, {"kv_connector_extra_config": {}, **values}
    if "secondary_tiers" in values:
        raise ConfigError(
            f"{file}: secondary_tiers belong to vLLM's own tiering, which checks them at its start"
        )
    if through is not None:
        _check_names(file, through, values)
    if "kv_connector" in given and (taken := ENGINE_KEYS & values.keys()):
        key = min(taken)
        raise ConfigError(f"{file}: unknown key {key} = {values[key]!r}: vLLM decides it")
    check_vllm_values(values)
    config = Config.from_mapping(values, ignore=VLLM_KEYS)
    if through is not None and (needs := _not_told(through["kv_connector"], values, config)):
        raise ConfigError(f"{file}: {needs}")
    return values, config


def _not_told(connector: str, values: Mapping[str, Any], config: Config) -> str | None:
    """What a server would refuse for want of what vLLM tells its connector, if anything."""
    automatic = values.get("automatic_identity", True)
    if config.tiers and not automatic and not config.identity:
        return "automatic_identity = false needs identity: what engines must have in common"
    if connector != "OffloadingConnector":
        return None
    if config.disk_codec is not None or config.store_codec is not None:
        return "codecs need KVStoreConnector: OffloadingConnector does not tell what a page holds"
    if config.tiers and automatic:
        return "tiers need KVStoreConnector, or automatic_identity = false with identity"
    return None


def _check_names(file: Path, told: Mapping[str, Any], extra: Mapping[str, Any]) -> None:
    """
    Raises:
        ConfigError: if vLLM would load another connector or spec, or none.
    """
    connector = told["kv_connector"]
    names = VLLM_NAMES.get(str(connector))
    wanted = {"kv_connector": tuple(VLLM_NAMES)} if names is None else {"kv_role": ROLES, **names}
    for key, allowed in wanted.items():
        its = extra if key.startswith("spec_") else told
        # A null of vLLM's own is its default. That of a spec it takes for a name.
        absent = key not in its or (its is told and its[key] is None)
        if None not in allowed if absent else its[key] is None or its[key] not in allowed:
            said = f"{key} is missing" if absent else f"{key} = {its[key]!r}"
            right = ", ".join(filter(None, allowed)) or "none: leave it out"
            raise ConfigError(f"{file}: {said}: allowed are {right}")
