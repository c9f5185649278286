"""``kvstore gate``: try a model with a codec, and write down whether its answers bear it."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

from kvstore.errors import NOT_PARSED, ConfigError, KVStoreError
from kvstore.gate import Gate
from kvstore.maintenance.survey import survey
from kvstore.tiers.codec import CODECS, DTYPES
from kvstore.tools.output import number, print_json, print_table, whole_number

__all__ = ["add_gate_arguments", "compare", "run_gate"]

SETTINGS = ("config.", "model.")
"""Facts of an identity whose names begin so are of the model, as are its weights and dtype."""

FIGURES = {
    "read": "share of the prompts' tokens that was read",
    "differing": "share of prompts with another greedy answer",
    "logprob_error": "mean error of the log-probability of a token, in nats",
    "logprob_error_most": "the largest one",
    "agreeing": "mean share of an answer before its first other token",
}

LENGTH = "model.max_model_len"
"""Of long prompts an engine may take more than another."""

Answer = Mapping[str, Any]
"""See `kvstore.vllm.trial.run`."""


def run_gate(options: argparse.Namespace) -> int:
    """Try the model; 0 if it bears the codec, 1 if not."""
    prompts = _prompts(options.prompts)
    odd = options.file.exists() and not options.file.is_file()
    if odd or not os.access(options.file.parent, os.W_OK):
        raise ConfigError(f"{options.file}: cannot be written, and the trial takes long")
    if taken := {"disk", "tiers", "disk_codec", "store_codec"} & options.kvstore.keys():
        raise ConfigError(f"--kvstore: leave out {min(taken)}: the trial has a disk of its own")
    limits = {"differing": options.most_differing, "logprob_error": options.most_error}
    with tempfile.TemporaryDirectory(prefix="kvstore-gate-", dir=options.folder) as scratch:
        folder = Path(scratch)
        trial = _Trial(options, folder, prompts)
        computed = trial.engine(None, "computing")
        figures = compare(computed, trial.read(options.dtype))
        (namespace,) = survey(folder / f"cache-{options.dtype}")
        identity = namespace.identity
        plain = compare(computed, trial.read(None)) if options.control else None
    gate = Gate(CODECS[0], options.dtype, _of_the_model(identity), figures, limits)
    gate.write(options.file)
    _print(gate, plain, options.json)
    return 1 if gate.beyond else 0


def compare(reference: Sequence[Answer], found: Sequence[Answer]) -> dict[str, float]:
    """Return the figures of answers whose prompts were read, against those that were computed.

    Prompts of which less than half was read do not count. Log-probabilities are compared as long as
    the tokens before are the same.

    Raises:
        KVStoreError: if fewer than half of the prompts were read.
    """
    pairs = [
        (mine, theirs)
        for mine, theirs in zip(found, reference, strict=True)
        if mine["cached"] * 2 >= mine["prompt"]
    ]
    if len(pairs) * 2 < len(reference) or not pairs:
        raise KVStoreError(
            f"of {len(pairs)} of {len(reference)} prompts half was found on disk, and most have to "
            "count: they must be longer than two chunks, and fit"
        )
    errors: list[float] = []
    agreeing: list[float] = []
    for mine, theirs in pairs:
        same = 0
        for token, other in zip(mine["tokens"], theirs["tokens"], strict=False):
            here, there = mine["logprobs"][same], theirs["logprobs"][same]
            # One that is not among the likeliest any more is less likely than all of them.
            now = here.get(str(other), min(here.values()))
            errors.append(abs(now - there[str(other)]))
            if token != other:
                break
            same += 1
        agreeing.append(same / max(1, len(theirs["tokens"])))
    return {
        "prompts": len(pairs),
        "read": sum(mine["cached"] for mine in found) / sum(mine["prompt"] for mine in found),
        "differing": sum(share < 1 for share in agreeing) / len(pairs),
        "agreeing": fmean(agreeing),
        "logprob_error": fmean(errors) if errors else float("inf"),
        "logprob_error_most": max(errors, default=float("inf")),
    }


class _Trial:
    """Runs engines, one after the other."""

    def __init__(self, options: argparse.Namespace, folder: Path, prompts: list[Any]) -> None:
        self._options = options
        self._folder = folder
        self._prompts = prompts

    def read(self, dtype: str | None) -> list[Answer]:
        """Return the answers to prompts that another engine has computed, and this one has read.

        Args:
            dtype: of the numbers, which are encoded; None if they are not.
        """
        name = dtype or "plain"
        config = {
            "host": self._options.host,
            "disk": str(self._folder / f"cache-{name}"),
            "disk_bytes": self._options.disk_bytes,
            # Nothing is computed again because a disk is slow.
            "recompute_s": 0,
            "deadline_s": 60,
            "max_wait_s": 300,
            "shutdown_timeout_s": 300,
            **self._options.kvstore,
        }
        if dtype is not None:
            gate = self._folder / "open.gate"
            Gate(CODECS[0], dtype, {}, {}).write(gate)
            config["disk_codec"] = str(gate)
        self.engine(config, f"storing, {name}")
        return self.engine(config, f"reading, {name}")

    def engine(self, config: Mapping[str, Any] | None, name: str) -> list[Answer]:
        """Return what an engine over kvstore, or without, answers to all prompts.

        Raises:
            KVStoreError: if it fails.
        """
        request, answer = self._folder / "request.json", self._folder / "answer.json"
        request.write_text(
            json.dumps(
                {
                    "engine": {"model": self._options.model, **self._options.engine},
                    "kvstore": config,
                    "prompts": self._prompts,
                    "tokens": self._options.tokens,
                }
            )
        )
        answer.unlink(missing_ok=True)
        print(f"{name} ...", file=sys.stderr, flush=True)
        log = self._folder / "log"
        if run_trial([str(request), str(answer)], log) or not answer.exists():
            last = "\n".join(log.read_text(errors="replace").splitlines()[-30:])
            raise KVStoreError(f"the engine ({name}) failed:\n{last}")
        answers: list[Answer] = json.loads(answer.read_text())
        return answers


def _of_the_model(identity: Mapping[str, Any]) -> dict[str, Any]:
    """The part of an identity that says which model it is; its name where weights do not."""
    names = {"dtype", "weights" if "weights" in identity else "model"}
    return {
        name: value
        for name, value in identity.items()
        if name in names or (name.startswith(SETTINGS) and name != LENGTH)
    }


def run_trial(arguments: list[str], log: Path) -> int:
    """Run `kvstore.vllm.trial` in a process of its own; returns its exit status."""
    command = [sys.executable, "-m", "kvstore.vllm.trial", *arguments]
    with log.open("w") as output:
        return subprocess.run(command, stdout=output, stderr=subprocess.STDOUT).returncode


def _prompts(path: Path) -> list[Any]:
    """Read the prompts of a file: in each line a text, or token ids as JSON."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise ConfigError(f"--prompts {path}: cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"--prompts {path}: cannot be read ({error})") from error
    found: list[Any] = []
    for line in filter(None, map(str.strip, lines)):
        try:
            value = json.loads(line)
        except NOT_PARSED:
            value = line
        found.append(value if isinstance(value, (str, list)) else line)
    if not found:
        raise ConfigError(f"{path}: has no prompts: one in each line, a text or token ids as JSON")
    return found


def _print(gate: Gate, plain: Mapping[str, float] | None, as_json: bool) -> None:
    if as_json:
        told = {"figures": gate.figures, "limits": gate.limits, "beyond": gate.beyond}
        print_json({**told, "plain": plain})
        return
    rows = [
        (
            text,
            f"{gate.figures[name]:.4g}",
            "" if plain is None else f"{plain[name]:.4g}",
            f"{gate.limits[name]:.4g}" if name in gate.limits else "",
            "BEYOND" if name in gate.beyond else "",
        )
        for name, text in FIGURES.items()
    ]
    print_table(["figure", ">with the codec", ">without", ">at most", ""], rows)
    print(f"{gate.figures['prompts']:.0f} prompts; {'refused' if gate.beyond else 'passed'}")


def _arguments(text: str) -> dict[str, Any]:
    try:
        told = json.loads(text)
    except NOT_PARSED as error:
        raise argparse.ArgumentTypeError(f"not JSON: {error}") from error
    if not isinstance(told, dict) or {"model", "kv_transfer_config"} & told.keys():
        raise argparse.ArgumentTypeError("an object, without model and kv_transfer_config")
    return told


def add_gate_arguments(command: argparse.ArgumentParser) -> None:
    """Add the arguments of the command."""
    limit = number(lambda value: value >= 0, "a number of at least 0")
    command.add_argument("model", help="the model, as vLLM takes it")
    command.add_argument(
        "file", type=Path, help="the file to write, for disk_codec and store_codec"
    )
    command.add_argument(
        "--prompts",
        type=Path,
        required=True,
        metavar="FILE",
        help="prompts as your users send them, longer than a chunk: in each line a text, or token "
        "ids as JSON",
    )
    command.add_argument("--dtype", choices=DTYPES, default=DTYPES[0], help="of the KV cache")
    command.add_argument(
        "--engine",
        type=_arguments,
        default={},
        metavar="JSON",
        help="more arguments of the engine, such as '{\"tensor_parallel_size\": 2}'",
    )
    command.add_argument(
        "--kvstore",
        type=_arguments,
        default={},
        metavar="JSON",
        help="more of kvstore's configuration, as the server has it: what its identity depends on",
    )
    command.add_argument(
        "--tokens", type=whole_number, default=32, help="to generate for each prompt"
    )
    command.add_argument(
        "--most-differing",
        type=limit,
        default=0.1,
        metavar="SHARE",
        help="share of prompts whose greedy answer may be another one",
    )
    command.add_argument(
        "--most-error",
        type=limit,
        default=0.02,
        metavar="NATS",
        help="mean error that a log-probability may have",
    )
    command.add_argument(
        "--control",
        action="store_true",
        help="try it without the codec, too: what differs then is none of its doing",
    )
    command.add_argument("--host", default="4GiB", help="host memory of the engines")
    command.add_argument("--disk-bytes", default="64GiB", help="most bytes on disk meanwhile")
    command.add_argument("--folder", type=Path, help="where to keep them meanwhile")
    command.add_argument("--json", action="store_true", help="print JSON instead of a table")
