"""The gate and the codec it lets pass, with real engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from examples.rounds import ENGINE, ENVIRONMENT
from examples.tiny_model import CONFIG, write_model
from kvstore.gate import Gate, read_gate
from kvstore.tools import gate as module
from kvstore.tools.cli import main
from kvstore.vllm import trial
from tests.vllm.engines import ENGINE_SECONDS, ONE_PROCESS, run_engine, run_script

ARGUMENTS = {
    name: value
    for name, value in ENGINE.items()
    if name not in ("load_format", "disable_log_stats", "dtype")
}


def prompt(seed: int, length: int) -> list[int]:
    """Token ids that the model knows."""
    return [
        10 + (seed * 7919 + place * 104729) % (CONFIG["vocab_size"] - 10) for place in range(length)
    ]


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[list[str]]:
    """Trials run in forks of a process that has imported vLLM."""
    ran: list[list[str]] = []

    def run(arguments: list[str], log: Path) -> int:
        ran.append(arguments)
        return run_script(
            Path(trial.__file__),
            arguments,
            tmp_path,
            log,
            {**ENVIRONMENT, **ONE_PROCESS},
            timeout=ENGINE_SECONDS,
        )

    monkeypatch.setattr(module, "run_trial", run)
    return ran


def test_a_model_is_tried_and_only_it_may_use_the_file(
    tmp_path: Path, forked: list[list[str]], capsys: pytest.CaptureFixture[str]
) -> None:
    write_model(tmp_path / "model")
    lines = [json.dumps(prompt(seed, 300)) for seed in range(4)]
    (tmp_path / "prompts").write_text("\n".join(lines))
    told = ["gate", str(tmp_path / "model"), str(tmp_path / "model.gate"), "--prompts"]
    told += [str(tmp_path / "prompts"), "--tokens", "8", "--host", "128MiB", "--json"]
    told += ["--disk-bytes", "512MiB", "--engine", json.dumps(ARGUMENTS)]
    status = main([*told, "--most-differing", "1", "--most-error", "1"])
    answer = capsys.readouterr()
    assert status == 0, answer.out
    figures = json.loads(answer.out)["figures"]
    assert len(forked) == 3
    assert figures["prompts"] == 4
    # Rounded numbers do show, and with random weights more than they would with others.
    assert 0 < figures["logprob_error"] < 1
    gate = read_gate(tmp_path / "model.gate")
    assert gate.figures == figures
    assert gate.identity["dtype"] == "bfloat16"
    assert gate.identity["weights"]["fingerprint"]
    # The model itself may use it.
    request, answers = tmp_path / "request.json", tmp_path / "answers.json"
    share = {"type": "object", "url": (tmp_path / "share").as_uri()}
    disk = {"type": "disk", "path": str(tmp_path / "kept"), "capacity_bytes": "512MiB"}
    kept: dict[str, Any] = {"host": "128MiB", "tiers": [disk, share], "max_wait_s": 60}
    kept |= dict.fromkeys(("disk_codec", "store_codec"), str(tmp_path / "model.gate"))
    engine = {"model": str(tmp_path / "model"), **ARGUMENTS}
    prompts = [prompt(1, 300)] * 2
    told_too = {"engine": engine, "kvstore": kept, "prompts": prompts, "tokens": 4}
    request.write_text(json.dumps(told_too))
    assert module.run_trial([str(request), str(answers)], tmp_path / "log") == 0
    assert (tmp_path / "log").read_text().count("int8 of bfloat16") >= 2
    assert [each["cached"] for each in json.loads(answers.read_text())] == [0, 288]
    # Another host may, too: it finds what the first one has stored for all.
    disk["path"] = str(tmp_path / "other")
    request.write_text(json.dumps(told_too))
    assert module.run_trial([str(request), str(answers)], tmp_path / "log") == 0
    assert [each["cached"] for each in json.loads(answers.read_text())] == [288, 288]
    refused(tmp_path, gate)


def refused(folder: Path, gate: Gate) -> None:
    """The tests' other model is another one, and float32 is not encoded."""
    bits = {"engine": {"dtype": "bfloat16"}}
    scenarios: list[tuple[dict[str, Any], str]] = [
        ({"model": "llama", **bits}, "it is of a model with "),
        (
            {"model": "lfm2", **bits},
            "layers of bfloat16, and a KV cache group of this model is MambaSpec",
        ),
        ({"model": "llama"}, "layers of bfloat16, and .* is .*float32"),
    ]
    for scenario, text in scenarios:
        config = {
            "host": "128MiB",
            "disk": str(folder / "cache"),
            "disk_bytes": "512MiB",
            "disk_codec": str(folder / "model.gate"),
        }
        with pytest.raises(AssertionError, match=text):
            run_engine(
                folder / "refused",
                {**scenario, "kvstore": config, "rounds": []},
                ONE_PROCESS,
            )
    assert not (folder / "cache").exists()
