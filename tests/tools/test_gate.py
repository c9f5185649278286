"""What the gate makes of two engines' answers, and of what it is given; engines: tests/vllm."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from kvstore.errors import ConfigError, KVStoreError
from kvstore.gate import read_gate
from kvstore.tools import gate as module
from kvstore.tools.gate import compare
from tests.tools.support import error_of, run


def answer(tokens: list[int], logprobs: list[float], cached: int = 32) -> dict[str, Any]:
    """One whose tokens have these log-probabilities, and token 9 another one everywhere."""
    places = [{str(token): value, "9": -3.0} for token, value in zip(tokens, logprobs, strict=True)]
    return {"prompt": 40, "tokens": tokens, "logprobs": places, "cached": cached}


def test_equal_answers_have_no_error() -> None:
    same = [answer([1, 2], [-1.0, -2.0]), answer([3, 4], [-1.0, -2.0])]
    assert compare(same, same) == {
        "prompts": 2,
        "read": 0.8,
        "differing": 0,
        "agreeing": 1,
        "logprob_error": 0,
        "logprob_error_most": 0,
    }


def test_log_probabilities_count_up_to_the_first_other_token() -> None:
    computed = answer([1, 9, 5, 5], [-1.0, -1.0, -1.0, -1.0])
    # The second place has a 9, too, and there it is less likely by 2.
    read = answer([1, 2, 7, 7], [-1.5, -1.0, -9.0, -9.0])
    computed["logprobs"][1]["9"] = -1.0
    found = compare([computed, answer([1], [0.0])], [read, answer([1], [0.0])])
    assert found["differing"] == 0.5
    assert found["agreeing"] == (0.25 + 1) / 2
    assert found["logprob_error_most"] == 2.0
    assert found["logprob_error"] == pytest.approx((0.5 + 2.0 + 0.0) / 3)


def test_a_token_that_is_not_among_the_likeliest_any_more_counts_as_an_error() -> None:
    computed, read = answer([1, 2], [-0.1, -0.1]), answer([1, 4], [-0.1, -0.2])
    # Of 2 it is only known that it is less likely than 9.
    assert compare([computed], [read])["logprob_error_most"] == pytest.approx(2.9)


def test_prompts_that_were_not_read_do_not_count() -> None:
    computed = [answer([1], [0.0]), answer([2], [0.0])]
    read = [answer([1], [0.0]), answer([3], [0.0], cached=19)]
    told = compare(computed, read)
    assert told["prompts"] == 1
    assert told["read"] == (32 + 19) / 80
    with pytest.raises(KVStoreError, match="of 1 of 3 prompts"):
        compare([*computed, computed[1]], [*read, read[1]])
    with pytest.raises(KVStoreError, match="of 0 of 1 prompts half was found"):
        compare(computed[1:], read[1:])


@pytest.mark.parametrize(
    ("content", "told"), [(None, "cannot be read"), ("\n \n", "has no prompts")]
)
def test_prompts_that_cannot_be_used_are_named(
    tmp_path: Path, content: str | None, told: str
) -> None:
    prompts = tmp_path / "prompts"
    if content is not None:
        prompts.write_text(content)
    error = error_of("gate", "m", tmp_path / "gate", "--prompts", prompts)
    assert str(prompts) in error
    assert told in error


@pytest.mark.parametrize(
    ("more", "told"),
    [
        (["--most-differing", "nan"], "at least 0"),
        (["--most-error", "-1"], "at least 0"),
        (["--tokens", "0"], "1 at least"),
        (["--engine", "[" * 100_000], "not JSON"),
        (["--kvstore", '{"disk": "kv"}'], "leave out disk"),
        ([], "cannot be written"),
    ],
)
def test_what_would_fail_at_the_end_is_refused_before_the_engines(
    tmp_path: Path, more: list[str], told: str
) -> None:
    (tmp_path / "prompts").write_text("a")
    file = tmp_path / "gate" if more else tmp_path / "none" / "gate"
    error = error_of("gate", "m", file, "--prompts", tmp_path / "prompts", *more)
    assert told in error
    assert "computing" not in error


def test_an_engine_that_fails_leaves_no_file_and_shows_its_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(arguments: list[str], log: Path) -> int:
        asked = json.loads(Path(arguments[0]).read_text())
        assert asked["prompts"] == ["a text", [1, 2], "3", '{"a": 1}']
        log.write_text("no such model\n")
        return 1

    monkeypatch.setattr(module, "run_trial", fail)
    (tmp_path / "prompts").write_text('a text\n[1, 2]\n\n3\n{"a": 1}\n')
    told = ["gate", "m", str(tmp_path / "gate"), "--prompts", str(tmp_path / "prompts")]
    error = error_of(*told)
    assert "the engine (computing) failed" in error
    assert "no such model" in error
    assert not (tmp_path / "gate").exists()


def test_what_is_beyond_a_limit_is_refused_and_written_down(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = {"model": "m", "dtype": "bfloat16", "weights": {"bytes": 1}, "config.a": 1, "b": 2}

    def read(self: Any, dtype: str | None) -> list[dict[str, Any]]:
        folder = self._folder / "cache-bfloat16" / "m-1"
        folder.mkdir(parents=True)
        (folder / "namespace.json").write_text(json.dumps({"identity": identity}))
        return [answer([1, 3], [-1.0, -1.0])]

    monkeypatch.setattr(module._Trial, "engine", lambda *_: [answer([1, 2], [-1.0, -1.0])])
    monkeypatch.setattr(module._Trial, "read", read)
    monkeypatch.setattr(
        module, "survey", lambda path: [type("Namespace", (), {"identity": identity})()]
    )
    (tmp_path / "prompts").write_text("a")
    told = ["gate", "m", str(tmp_path / "gate"), "--prompts", str(tmp_path / "prompts")]
    assert "BEYOND" in run(*told, status=1)
    gate = read_gate(tmp_path / "gate")
    assert gate.beyond == ["differing", "logprob_error"]
    assert set(gate.identity) == {"dtype", "weights", "config.a"}
    run(*told, "--most-differing", "1", "--most-error", "2")


def test_a_pipe_in_the_place_of_a_gate_holds_nobody_up(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "gate")
    (tmp_path / "prompts").write_text("a")
    told = error_of("gate", "m", tmp_path / "gate", "--prompts", tmp_path / "prompts")
    assert "cannot be written" in told
    with pytest.raises(ConfigError, match="not a file that kvstore gate has written"):
        read_gate(tmp_path / "gate")
