"""What the operator may say of kvstore as one of vLLM's own secondary tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vllm.v1.kv_offload.base import Locality

from kvstore.config import Config, DiskConfig
from kvstore.core import Flow
from kvstore.errors import ConfigError
from kvstore.vllm.identity.naming import Naming

__all__ = ["TierOptions"]

STORE_KEYS = (
    "identity",
    "namespace",
    "deadline_s",
    "max_wait_s",
    "write_queue_bytes",
    "shutdown_timeout_s",
    "spans",
)
"""Keys that elsewhere stand beside the tiers."""

OWN_KEYS = ("automatic_identity", "fingerprint_weights", "enable_kv_events", "locality")
"""Keys that only a vLLM server has."""

UNALIGNED_IO = ("buffered", "mmap", "portable")
"""I/O backends that move bytes from and to any address."""


@dataclass(frozen=True)
class TierOptions:
    """The options of one tier, checked; the same names and messages as in `kvstore.config`.

    Attributes:
        config: with one disk tier.
        naming: how the namespace is found.
        events: whether vLLM is told what the tier stores and gives up.
        locality: where the disk is, seen from this server.
    """

    config: Config
    naming: Naming
    events: bool
    locality: Locality

    @classmethod
    def of(
        cls, options: Mapping[str, Any], name: str, memory_bytes: int, *, aligned: bool
    ) -> TierOptions:
        """
        Args:
            name: what the tier is called in messages.
            memory_bytes: size of vLLM's host memory.
            aligned: whether direct I/O can use it.

        Raises:
            ConfigError: for an unknown key or a value that cannot be used.
        """
        values = dict(options)
        try:
            naming = Naming.taken_from(values)
            events = values.pop("enable_kv_events", False)
            if not isinstance(events, bool):
                raise ConfigError(f"enable_kv_events = {events!r}: must be true or false")
            locality = _locality(values.pop("locality", Locality.LOCAL.value))
            beside = {key: values.pop(key) for key in STORE_KEYS if key in values}
            disk = DiskConfig.from_mapping(_io(values, aligned), "", (*STORE_KEYS, *OWN_KEYS))
            if disk.flow is not Flow.WRITE_THROUGH:
                raise ConfigError(
                    f"flow = {disk.flow.value!r}: must be 'write-through', since vLLM says when "
                    "chunks are stored, and not when its host memory gives them up"
                )
            config = Config.from_mapping(
                {"cpu_bytes_to_use": memory_bytes, "tiers": [disk], **beside}
            )
        except ConfigError as error:
            raise ConfigError(f"secondary tier {name}: {error}") from error
        return cls(config, naming, events, locality)


def _locality(value: object) -> Locality:
    try:
        return Locality(value)
    except ValueError:
        allowed = ", ".join(each.value for each in Locality)
        raise ConfigError(f"locality = {value!r}: must be one of: {allowed}") from None


def _io(values: dict[str, Any], aligned: bool) -> dict[str, Any]:
    """`values` with an I/O backend that can use vLLM's host memory."""
    if aligned or values.get("io") in UNALIGNED_IO:
        return values
    if values.get("io", "auto") == "auto":
        return {**values, "io": "buffered"}
    raise ConfigError(
        f"io = {values['io']!r}: vLLM's host memory does not begin at a page here; "
        f"must be one of: auto, {', '.join(UNALIGNED_IO)}"
    )
