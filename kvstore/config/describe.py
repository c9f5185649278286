"""Describe the configuration: its keys, a JSON schema, a reference page and a sample."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from enum import Enum
from typing import Any

import attrs

from kvstore.config.model import Config, DiskConfig, TierConfig
from kvstore.config.values import SCHEMAS
from kvstore.plugins import Choice
from kvstore.policies.shares import Shares
from kvstore.sizes import format_size

__all__ = ["Key", "json_schema", "keys_of", "reference", "sample", "shown_value"]

SHORT = {
    "host": ("cpu_bytes_to_use", "short for `cpu_bytes_to_use`"),
    "disk": ("path", "short for a disk tier: its `path`"),
    "disk_bytes": ("capacity_bytes", "short for a disk tier: its `capacity_bytes`"),
}
"""Keys that stand for others: whose value they take, and what they mean."""

_SIZES = ("any_size", "positive_size", "recording_size")


@dataclass(frozen=True)
class Key:
    """One key: its name, default, meaning, and the name of what converts its value.

    Attributes:
        default: `attrs.NOTHING` if the key is required.
        text: from the docstring of its class.
    """

    name: str
    default: Any
    text: str
    converter: str

    @property
    def required(self) -> bool:
        """Whether there is no default."""
        return self.default is attrs.NOTHING

    @property
    def is_size(self) -> bool:
        """Whether the value is a number of bytes."""
        return self.converter in _SIZES

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of its value."""
        found = dict(SCHEMAS.get(self.converter, {}))
        if self.default is None:
            found = {"anyOf": [found, {"type": "null"}]}
        return {"description": self.text, **found}


def keys_of(cls: type[attrs.AttrsInstance]) -> dict[str, Key]:
    """The keys of `Config`, `DiskConfig` or `TierConfig`, in their order."""
    texts = _attribute_texts(inspect.getdoc(cls) or "")
    found = {}
    for each in attrs.fields(cls):
        default = each.default
        if isinstance(default, attrs.Factory):  # type: ignore[arg-type]
            default = default.factory()
        text = texts.get(each.name, "")
        found[each.name] = Key(each.name, default, text, _converter(each.converter))
    return found


def _converter(function: Any) -> str:
    """The name of a converter, without what `optional` and the model put around it."""
    if function is None:
        return ""
    function = inspect.unwrap(function)
    inner = inspect.getclosurevars(function).nonlocals.get("converter")
    return str((inner or function).__name__)


def _attribute_texts(doc: str) -> dict[str, str]:
    """The texts of a docstring's section "Attributes", by name."""
    _, _, section = doc.partition("Attributes:\n")
    texts: dict[str, str] = {}
    names: list[str] = []
    for line in section.splitlines():
        if not line.startswith("    "):
            break
        start = re.match(r"    (\w+(?:, \w+)*): (.*)", line)
        if start:
            names = start[1].split(", ")
            texts |= dict.fromkeys(names, start[2])
        else:
            texts |= {name: f"{texts[name]} {line.strip()}" for name in names}
    return texts


def json_schema() -> dict[str, Any]:
    """A JSON schema (2020-12) of what `Config.from_mapping` takes.

    It tells less than `Config` checks: names of policies, and rules that concern several keys.
    """
    disk = _object(keys_of(DiskConfig))
    disk["properties"] = {"type": {"const": "disk"}, **disk["properties"]}
    disk["required"] = ["type", *disk["required"]]
    other = _object(keys_of(TierConfig), closed=False)
    del other["properties"]["parameters"]
    other["properties"]["type"] = {"type": "string", "not": {"const": "disk"}}
    keys = keys_of(Config)
    whole = _object(keys)
    whole["properties"]["tiers"] |= {
        "type": "array",
        "items": {"anyOf": [{"$ref": "#/$defs/disk"}, {"$ref": "#/$defs/other"}]},
    }
    values = {**keys_of(DiskConfig), **keys}
    for name, (like, text) in SHORT.items():
        whole["properties"][name] = {**values[like].schema, "description": text}
    whole["anyOf"] = [{"required": [name]} for name in ("cpu_bytes_to_use", "host")]
    del whole["required"]
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "kvstore",
        **whole,
        "$defs": {"disk": disk, "other": other},
    }


def _object(keys: Mapping[str, Key], *, closed: bool = True) -> dict[str, Any]:
    found: dict[str, Any] = {
        "type": "object",
        "properties": {name: key.schema for name, key in keys.items()},
        "required": [name for name, key in keys.items() if key.required],
    }
    if closed:
        found["additionalProperties"] = False
    return found


def shown_value(key: Key, value: Any) -> str:
    """A value as a person would write it: sizes with their unit, flags as in TOML."""
    if value is None or value == ():
        return "none"
    if isinstance(value, Shares):
        value = {name: asdict(share) for name, share in (*value.named.items(), ("*", value.others))}
    if isinstance(value, Mapping):
        pairs = ", ".join(f"{name} = {json.dumps(each)}" for name, each in value.items())
        return f"{{{pairs}}}"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return str(value.value)
    if key.is_size:
        return format_size(value).replace(".0 ", " ").replace(" ", "") if value else "0"
    if isinstance(value, float):
        return f"{value:g}"
    if isinstance(value, (tuple, list)):
        return ", ".join(str(each) for each in value)
    return str(value)


SECTIONS: Mapping[str, type[attrs.AttrsInstance]] = {
    "The store": Config,
    "A disk tier": DiskConfig,
    "Any other tier": TierConfig,
}
"""The sections of the reference page."""


def reference() -> str:
    """The tables of docs/configuration.md."""
    parts = []
    for title, cls in SECTIONS.items():
        lines = [f"## {title}", "", "| key | default | meaning |", "|---|---|---|"]
        for name, key in keys_of(cls).items():
            if name == "parameters":
                continue
            default = "required" if key.required else f"`{shown_value(key, key.default)}`"
            lines.append(f"| `{name}` | {default} | {_linked(key.text)} |")
        parts.append("\n".join(lines))
    short = [f"| `{name}` | | {_sentence(text)} |" for name, (_, text) in SHORT.items()]
    parts[0] += "\n" + "\n".join(short)
    return "\n\n".join(parts) + "\n"


SAMPLE: Mapping[type[attrs.AttrsInstance], Mapping[str, Any]] = {
    Config: {"cpu_bytes_to_use": "1GiB", "chunk_bytes": "2MiB", "identity": {"model": "my-model"}},
    DiskConfig: {"path": "/tmp/kv", "capacity_bytes": "10GiB"},
}
"""What the sample sets; everything else is shown as a comment with its default."""


def sample() -> str:
    """A TOML file with every key: those that most set, and as comments the others' defaults."""
    lines = ["# A configuration of kvstore. Set what has no # before it: sizes, path and identity."]
    lines += ["# Keys behind a # show their default, or '...' where there is none.", ""]
    for cls, given in SAMPLE.items():
        if cls is DiskConfig:
            lines += [
                "# Slower tiers, fastest first, stores last.",
                "[[tiers]]",
                'type = "disk"',
                "",
            ]
        for name, key in keys_of(cls).items():
            if name == "tiers":
                continue
            text = _sentence(key.text).replace("``", "")
            lines += [f"# {line}" for line in textwrap.wrap(text, 98)]
            if name in given:
                lines += [f"{name} = {_toml(given[name])}", ""]
            elif key.default is None:
                lines += [f"# {name} = ...", ""]
            else:
                value = shown_value(key, key.default) if key.is_size else key.default
                lines += [f"# {name} = {_toml(value)}", ""]
    return "\n".join(lines)


def _linked(text: str) -> str:
    """The text for a page of docs/, with links to the pages that it names."""
    text = _sentence(text).replace("``", "`").rstrip(".")
    return re.sub(r"\b(\w+\.md)\b", r"[\1](\1)", text)


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def _toml(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Enum):
        return f'"{value.value}"'
    if isinstance(value, Choice):
        return f'"{value.name}"'
    if isinstance(value, (int, float)):
        return f"{value:g}" if isinstance(value, float) else str(value)
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    if isinstance(value, (tuple, list)):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return f'"{value}"'
