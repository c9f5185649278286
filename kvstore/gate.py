"""Gate: the file that says that a model's answers stay as they are with a codec.

``kvstore gate`` writes it after a run of the model, and `disk_codec` or `store_codec` names it: no
chunk is encoded for a model that was not tried. Builders of servers measure with their own engine,
and write a `Gate` themselves.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from secrets import token_hex
from typing import Any

from kvstore.concurrency import open_at_once
from kvstore.config import Config, DiskConfig, TierConfig
from kvstore.errors import NOT_PARSED, ConfigError
from kvstore.tiers.codec import CODECS, DTYPES, Codec

__all__ = ["Gate", "codecs_of", "read_gate"]

FORMAT = "kvstore gate 1"


@dataclass(frozen=True)
class Gate:
    """What a run of a model with a codec has shown.

    Attributes:
        codec: one of `CODECS`. dtype: of the numbers in a chunk, one of `DTYPES`.
        identity: what must be equal in the identity of a cache for it to be of this model.
        figures: what was measured.
        limits: what each may be at most, by the name of the figure.
    """

    codec: str
    dtype: str
    identity: Mapping[str, Any]
    figures: Mapping[str, float]
    limits: Mapping[str, float] = field(default_factory=dict)

    @property
    def beyond(self) -> list[str]:
        """The figures that are beyond their limits, or were not measured."""
        figures, limits = self.figures, self.limits
        return [name for name in limits if not (name in figures and figures[name] <= limits[name])]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file, which is replaced as a whole.

        Raises:
            OSError: if it cannot be written.
        """
        path = Path(path)
        temporary = path.with_name(f".{path.name}.{token_hex(4)}")
        text = json.dumps({"format": FORMAT, **asdict(self)}, indent=1)
        try:
            temporary.write_text(f"{text}\n")
            os.replace(temporary, path)
        except OSError as error:
            # What a write raises names no file.
            error.filename = error.filename or str(path)
            raise
        finally:
            temporary.unlink(missing_ok=True)

    def codec_for(self, identity: Mapping[str, Any]) -> Codec:
        """Return the codec, for a cache of this identity.

        Raises:
            ConfigError: if the run failed, or was of another model.
        """
        if self.beyond:
            told = ", ".join(
                f"{name} = {self.figures.get(name)}, at most {self.limits[name]}"
                for name in self.beyond
            )
            raise ConfigError(f"this model does not bear the codec {self.codec}: {told}")
        if str(self.identity.get("dtype", self.dtype)).removeprefix("torch.") != self.dtype:
            raise ConfigError(
                f"its codec encodes {self.dtype}, and its model has {self.identity['dtype']}"
            )
        for name, value in self.identity.items():
            # Tuples are lists in a file.
            if name not in identity or json.loads(json.dumps(identity[name])) != value:
                raise ConfigError(
                    f"it is of a model with {name} = {value!r}, and this one has "
                    f"{identity.get(name)!r}: run kvstore gate for this one"
                )
        return Codec(self.dtype)


def read_gate(path: Path) -> Gate:
    """Return what a file of a gate says.

    Raises:
        ConfigError: if it cannot be read, or is no such file.
    """
    try:
        with os.fdopen(open_at_once(path, follows=True), "rb") as file:
            told = json.load(file)
        if told.pop("format") != FORMAT:
            raise ConfigError(f"{path}: not of the format {FORMAT!r}")
        gate = Gate(**told)
        numbers = [*gate.figures.values(), *gate.limits.values()]
        if not all(type(number) in (int, float) for number in numbers):
            raise TypeError("a figure is no number")
        if not isinstance(gate.identity, dict):
            raise TypeError("the identity is no table")
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from error
    except (*NOT_PARSED, AttributeError, KeyError, TypeError) as error:
        raise ConfigError(f"{path}: not a file that kvstore gate has written ({error})") from error
    if gate.codec not in CODECS or gate.dtype not in DTYPES:
        raise ConfigError(
            f"{path}: codec {gate.codec!r} of {gate.dtype!r} is not known; allowed are "
            f"{', '.join(CODECS)} of {', '.join(DTYPES)}"
        )
    return gate


def codecs_of(
    config: Config, chunk_bytes: int, identity: Mapping[str, Any] | None
) -> dict[str, Codec]:
    """Return the codecs of chunks on disk and in stores, if they have some.

    Args:
        identity: of the cache; None if it is not known yet.

    Returns:
        Each by its name in the identity: "codec" of disks, "store_codec" of stores.

    Raises:
        ConfigError: if no gate lets them be encoded.
    """
    disks = any(isinstance(tier, DiskConfig) for tier in config.tiers)
    stores = any(isinstance(tier, TierConfig) and tier.is_store for tier in config.tiers)
    found: dict[str, Codec] = {}
    for name, tier, path, there in (
        ("codec", "disk", config.disk_codec, disks),
        ("store_codec", "store", config.store_codec, stores),
    ):
        if path is None:
            continue
        try:
            gate = read_gate(path)
            if not there:
                raise ConfigError(f"there is no {tier}")
            if identity is not None and name in identity:
                raise ConfigError(
                    f"identity: the name {name} is for what kvstore itself says there"
                )
            if chunk_bytes % 2:
                raise ConfigError(
                    f"chunk_bytes = {chunk_bytes}: must be even, as numbers have 2 bytes"
                )
            found[name] = gate.codec_for(gate.identity if identity is None else identity)
        except ConfigError as error:
            told = str(error).removeprefix(f"{path}: ")
            raise ConfigError(f"{tier}_codec = {str(path)!r}: {told}") from error
    return found
