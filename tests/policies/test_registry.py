"""Policies by name: built in, by decorator, by an installed package."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.policies import (
    EvictionPolicy,
    create_filter,
    create_policy,
    filter_names,
    find_filter,
    find_policy,
    parameters_of,
    policy_names,
    register_filter,
    register_policy,
)
from kvstore.policies import registry as registry_module
from kvstore.policies.lru import LRU
from kvstore.policies.reuse import ReuseThreshold
from kvstore.policies.s3fifo import S3FIFO

Install = Callable[..., None]


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers is forgotten after it."""
    for registry in (registry_module.POLICIES, registry_module.FILTERS):
        monkeypatch.setattr(registry, "classes", dict(registry.classes))
        monkeypatch.setattr(registry, "_provided", {})


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """Install a package with one module and one entry point, as pip does."""
    modules: list[str] = []

    def install(
        module: str, source: str, entry_point: str, group: str = "kvstore.policies"
    ) -> None:
        site = tmp_path / f"site-{module}"
        info = site / f"{module}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{module}.py").write_text(source)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{entry_point}\n")
        monkeypatch.syspath_prepend(site)
        modules.append(module)

    yield install
    for module in modules:
        sys.modules.pop(module, None)


RING = """
from kvstore.policies.lru import LRU

class Ring(LRU):
    name = "ring"

    def touch(self, key):
        pass
"""


def test_a_built_in_policy_is_created_by_name_for_its_capacity() -> None:
    policy = create_policy("lru", 7)
    assert type(policy) is LRU
    assert policy.capacity == 7


def test_each_tier_gets_a_policy_of_its_own() -> None:
    assert create_policy("lru", 1) is not create_policy("lru", 1)


def test_an_unknown_name_is_refused_with_those_that_exist() -> None:
    with pytest.raises(ValueError, match="unknown policy 'mru'; known are: .*lru"):
        create_policy("mru", 1)
    with pytest.raises(ValueError, match="unknown policy 'mru'"):
        find_policy("mru")


def test_the_decorator_makes_a_policy_known() -> None:
    @register_policy
    class Mine(LRU):
        name = "mine"

    assert type(create_policy("mine", 1)) is Mine
    assert {"lru", "mine"} <= set(policy_names())


def test_registering_a_class_twice_is_harmless() -> None:
    register_policy(LRU)
    assert type(create_policy("lru", 1)) is LRU


def test_a_name_that_is_taken_is_refused_and_says_by_whom() -> None:
    class Impostor(LRU):
        name = "lru"

    with pytest.raises(ValueError, match="'lru' is already taken by LRU"):
        register_policy(Impostor)
    assert type(create_policy("lru", 1)) is LRU


def test_the_files_of_all_packages_are_read_once_for_a_name(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("ring_package", RING, "ring = ring_package:Ring")
    ring = find_policy("ring")
    monkeypatch.delattr(registry_module, "entry_points")
    assert registry_module.POLICIES.has("ring")
    assert find_policy("ring") is ring
    assert type(create_policy("ring", 1)) is ring


@pytest.mark.parametrize("name", [None, "", 7])
def test_a_policy_without_a_name_is_refused(name: object) -> None:
    nameless = type("Nameless", (LRU,), {"name": name})
    with pytest.raises(ValueError, match="Nameless.*name"):
        register_policy(nameless)


def test_the_policy_of_an_installed_package_is_found_without_importing_it_first(
    install: Install,
) -> None:
    install("acme_ring", RING, "ring = acme_ring:Ring")
    assert "ring" in policy_names()
    assert "acme_ring" not in sys.modules
    policy = create_policy("ring", 3)
    assert isinstance(policy, EvictionPolicy)
    assert (type(policy).__module__, policy.name, policy.capacity) == ("acme_ring", "ring", 3)


def test_an_installed_package_cannot_replace_a_built_in_policy(install: Install) -> None:
    install("acme_lru", RING, "lru = acme_lru:Ring")
    assert type(create_policy("lru", 1)) is LRU


def test_an_installed_package_that_offers_no_policy_is_refused(install: Install) -> None:
    install("acme_number", "Seven = 7\n", "seven = acme_number:Seven")
    with pytest.raises(ValueError, match="'seven' is not a subclass of EvictionPolicy: 7"):
        create_policy("seven", 1)


@pytest.mark.parametrize(
    ("source", "entry_point"),
    [
        ("import a_package_that_is_not_there\n", "broken = acme_broken:Ring"),
        (RING, "broken = acme_broken:Other"),
        (RING, "broken = acme_elsewhere:Ring"),
        ("raise RuntimeError('at import')\n", "broken = acme_broken:Ring"),
    ],
)
def test_an_installed_package_that_cannot_be_loaded_is_refused_with_the_reason(
    install: Install, source: str, entry_point: str
) -> None:
    install("acme_broken", source, entry_point)
    with pytest.raises(ValueError, match=r"policy 'broken' \(acme_.*\) cannot be loaded: ."):
        create_policy("broken", 1)


def test_parameters_reach_the_policy() -> None:
    policy = create_policy("s3-fifo", 100, small=0.25)
    assert isinstance(policy, S3FIFO)
    assert policy._small_target == 25
    assert create_filter("reuse", 10, 1, threshold=3, table=7).threshold == 3  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: create_policy("lru", 1, small=0.1), "policy 'lru' has no parameter 'small'.*none"),
        (
            lambda: create_policy("s3-fifo", 1, smal=0.1),
            r"'s3-fifo' has no parameter 'smal'; it takes: small \(a number, by default 0.1\)",
        ),
        (lambda: create_policy("s3-fifo", 1, small="0.1"), "small = '0.1' must be a number"),
        (lambda: create_policy("s3-fifo", 1, small=True), "small = True must be a number"),
        (lambda: create_policy("s3-fifo", 1, small=1), "small must be between 0 and 1, not 1"),
        (lambda: create_policy("hit-density", 1, ghosts=-1.0), "ghosts must lie between 0 and 64"),
        (lambda: create_filter("reuse", 1, 1, threshold=2.0), "threshold = 2.0 must be a whole"),
        (lambda: create_filter("bouncer", 1, 1), "unknown filter 'bouncer'; known are: .*reuse"),
    ],
)
def test_a_parameter_that_cannot_be_used_is_refused_with_what_is_allowed(
    make: Callable[[], object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_policy_tells_its_parameters() -> None:
    assert {name: (each.type, each.default) for name, each in parameters_of(S3FIFO).items()} == {
        "small": (float, 0.1)
    }
    assert parameters_of(LRU) == {}


@pytest.mark.parametrize(
    "bad",
    [
        "def __init__(self, capacity, *, size: list = ()): pass",
        "def __init__(self, capacity, *, size: int): pass",
        "def __init__(self, capacity, *, size=3): pass",
    ],
)
def test_a_parameter_without_a_type_or_default_is_refused(bad: str) -> None:
    space: dict[str, object] = {}
    exec(bad, space)
    odd = type("Odd", (LRU,), {"name": "odd", "__init__": space["__init__"]})
    with pytest.raises(ValueError, match="parameter 'size' of Odd must have a default"):
        register_policy(odd)


def test_a_policy_without_all_methods_or_whose_constructor_raises_is_refused_by_name() -> None:
    without = type("Without", (EvictionPolicy,), {"name": "without", "insert": LRU.insert})
    with pytest.raises(ValueError, match="Without' lacks methods: __contains__, __len__, clear"):
        register_policy(without)

    @register_policy
    class Raising(LRU):
        name = "raising"

        def __init__(self, capacity: int, seed: int = 0) -> None:
            raise KeyError(seed)

    with pytest.raises(ValueError, match=r"policy 'raising': its constructor raised KeyError\(0\)"):
        create_policy("raising", 1)
    with pytest.raises(ValueError, match="it takes: none; a parameter is keyword-only"):
        create_policy("raising", 1, seed=3)


def test_a_filter_is_made_known_by_decorator_or_by_an_installed_package(install: Install) -> None:
    @register_filter
    class Everybody(ReuseThreshold):
        name = "everybody"

    assert type(create_filter("everybody", 1, 1)) is Everybody
    with pytest.raises(ValueError, match="'everybody' is already taken by"):
        register_filter(type("Other", (ReuseThreshold,), {"name": "everybody"}))
    source = (
        "from kvstore.policies.reuse import ReuseThreshold\n"
        "class Two(ReuseThreshold):\n    name = 'two'\n"
    )
    install("acme_two", source, "two = acme_two:Two", "kvstore.filters")
    assert {"everybody", "two", "reuse", "doorkeeper", "endurance"} <= set(filter_names())
    assert find_filter("two").__module__ == "acme_two"


def test_every_built_in_policy_is_known() -> None:
    assert {"lru", "fifo", "arc", "sieve", "s3-fifo", "hit-density"} <= set(policy_names())
