"""The policy in docs/policies.md is one, and the page names every policy and filter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from kvstore.policies import (
    create_policy,
    filter_names,
    find_filter,
    find_policy,
    parameters_of,
    policy_names,
)
from kvstore.policies import registry as registry_module
from kvstore.testing.policy import keys_of
from tests.patience import PATIENCE

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "policies.md").read_text()


def test_the_policy_of_the_example_works(monkeypatch: pytest.MonkeyPatch) -> None:
    known = registry_module.POLICIES
    monkeypatch.setattr(known, "classes", dict(known.classes))
    space: dict[str, Any] = {}
    exec(re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)[0], space)
    policy = create_policy("random", 8, seed=3)
    keys = keys_of(8)
    policy.restore(keys)
    assert len(policy.evict(3, {keys[0]}.__contains__) or ()) == 3
    assert len(policy) == 5
    assert keys[0] in policy
    policy.clear()
    assert len(policy) == 0


def test_the_policy_of_the_example_breaks_the_contract_only_where_the_page_says_so(
    tmp_path: Path,
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "test_random.py").write_text(f"{blocks[0]}\n{blocks[1]}")
    command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, "test_random.py"], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE
    )
    failed = re.findall(r"FAILED .*::(\w+)", done.stdout)
    assert sorted(failed) == [
        "test_keys_in_use_are_not_asked_about_again_and_again",
        "test_keys_in_use_that_were_used_before_cost_no_more",
    ], done.stdout


def test_every_policy_and_filter_is_on_the_page_with_its_parameters() -> None:
    for name in policy_names():
        assert f"| `{name}` |" in PAGE
        for parameter in parameters_of(find_policy(name)).values():
            assert f"`{parameter.name}` = {parameter.default}" in PAGE
    for name in filter_names():
        assert f"| `{name}` |" in PAGE
        for parameter in parameters_of(find_filter(name)).values():
            default = f"{parameter.default:g}" if parameter.name == "burst_s" else parameter.default
            assert f"`{parameter.name}` = {default}" in PAGE
