"""What may be a password in an address, mistyped or not, stands in no message and no log line."""

from __future__ import annotations

import traceback
from collections.abc import Iterator
from functools import cache
from importlib.metadata import entry_points
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.config import Config
from kvstore.plugins import create_tier
from kvstore.tiers.remote.object import ObjectTier
from kvstore.tiers.remote.tier import StoreTier
from kvstore.types import TierPlace

pytest.importorskip("redis")
pytest.importorskip("obstore")

SECRET = "S3cr+tPart"

PLACE = TierPlace("place", {}, 8000)

BEFORE_SECRET = st.sampled_from(
    ["user:", ":", "", "us/er:", "user:x/", "user;", "user:%40", "user?", "user:#", "[", "user:[::"]
)
BEHIND_SECRET = st.sampled_from(
    ["@host:6379/0", "/@host/0", "&host", "@", "#@host", "?x=1@host", " @host", "'\"@host", ":6379"]
)
SCHEME = st.sampled_from(
    ["redis", "rediss", "unix", "s3", "gs", "az", "http", "https", "reddis", "redis+tls", "", "S3"]
)
SEPARATOR = st.sampled_from(["://", ":/", ":///", "//", ":", "://bucket/", "://host/0?password="])
ADDRESS = st.builds(
    lambda *parts: "".join((*parts[:3], SECRET, parts[3])),
    SCHEME,
    SEPARATOR,
    BEFORE_SECRET,
    BEHIND_SECRET,
).filter(lambda address: "@" in address or "password=" in address)


@pytest.fixture(autouse=True, scope="module")
def _installed_once() -> Iterator[None]:
    """What is installed is looked up once, not ten times for each address."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("kvstore.policies.registry.entry_points", cache(entry_points))
        yield


def tables(address: str) -> list[Any]:
    """Entries of `tiers` where somebody might write it."""
    return [
        {"type": "redis", "url": address},
        {"type": "redis", "url": [address]},
        {"type": "redis", "ulr": address},
        {"type": "object", "url": address},
        {"type": "object", "url": "s3://bucket", "endpoint": address},
        {"type": "disk", "url": address},
        {"type": address},
        address,
        [address],
    ]


def told(tier: Any) -> str:
    """All that is said of it: why it is refused, or how the log calls it."""
    try:
        config = Config.from_mapping({"cpu_bytes_to_use": 2**20, "tiers": [tier]})
        (checked,) = config.tiers
        made = create_tier(checked.type, PLACE, checked.parameters)  # type: ignore[union-attr]
    except ValueError as error:
        return "".join(traceback.format_exception(error, limit=0))
    assert isinstance(made, StoreTier)
    return made.description + made.address


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("AWS_ENDPOINT_URL", "http://user:s3cret@127.0.0.1:1"),
        ("AWS_ENDPOINT", "http://s3cret:99999"),
        ("AWS_SESSION_TOKEN", "s3cret\n"),
        ("AWS_SECRET_ACCESS_KEY", "s3cret\n"),
    ],
)
def test_what_the_environment_says_wrongly_is_refused_by_its_name_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    monkeypatch.setenv(variable, value)
    with pytest.raises(ValueError, match=f"^{variable}: ") as refused:
        ObjectTier(PLACE, url="s3://bucket", region="eu")
    assert "s3cret" not in str(refused.value)
    if "ENDPOINT" in variable:
        ObjectTier(PLACE, url="s3://bucket", region="eu", endpoint="http://127.0.0.1:1")


@pytest.mark.parametrize(
    "variables",
    [
        {"AWS_USE_FIPS_ENDPOINT": "true", "AWS_S3_US_EAST_1_REGIONAL_ENDPOINT": "regional"},
        {"AZURE_SEARCH_ENDPOINT": "x.search.windows.net", "AWS_SSH_PRIVATE_KEY": "a\nb\n"},
    ],
    ids=["of S3", "of others"],
)
@pytest.mark.parametrize("url", ["s3://bucket/x", "az://container/x"])
def test_what_the_environment_says_to_others_is_nobodys_affair(
    monkeypatch: pytest.MonkeyPatch, variables: dict[str, str], url: str
) -> None:
    for name, value in {**variables, "AZURE_STORAGE_ACCOUNT_NAME": "account"}.items():
        monkeypatch.setenv(name, value)
    ObjectTier(PLACE, url=url)


@settings(max_examples=400, deadline=None)
@given(ADDRESS)
def test_no_message_and_no_description_shows_the_password_of_an_address(address: str) -> None:
    for tier in tables(address):
        said = told(tier)
        assert SECRET not in said, (tier, said)
        assert SECRET[:6] not in said, (tier, said)


@pytest.mark.parametrize(
    ("tier", "shown"),
    [
        ({"type": "redis", "url": "redis://cache.internal:6379/0"}, "redis://cache.internal:6379"),
        ({"type": "redis", "url": "rediss://[::1]:6379"}, "rediss://[::1]:6379"),
        ({"type": "redis", "url": "unix:///run/redis.sock?db=1"}, "unix:///run/redis.sock"),
        ({"type": "object", "url": "s3://bucket/a/b"}, "s3://bucket/a/b"),
    ],
)
def test_an_address_without_a_secret_is_shown(tier: Any, shown: str) -> None:
    assert shown in told(tier)


@pytest.mark.parametrize(
    ("kind", "name", "told"),
    [
        ("redis", "client", r"pip install 'kvstore-offload\[redis\]'"),
        ("object", "obstore", r"pip install 'kvstore-offload\[object\]'"),
        ("mooncake", "Engine", "pip install mooncake-transfer-engine"),
    ],
)
def test_the_package_is_named_where_it_is_missing(
    monkeypatch: pytest.MonkeyPatch, kind: str, name: str, told: str
) -> None:
    monkeypatch.setattr(f"kvstore.tiers.remote.{kind}.{name}", None)
    with pytest.raises(ValueError, match=told):
        create_tier(kind, PLACE, {"url": "s3://bucket"} if kind == "object" else {})
