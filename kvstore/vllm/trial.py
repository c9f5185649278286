"""Trial: one engine that answers prompts through kvstore, in a process of its own.

    python -m kvstore.vllm.trial REQUEST ANSWER

Two files of JSON. `kvstore gate` compares what two of them say.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

TOP = 5
"""Most likely tokens that are told at each place."""

FORGET_SECONDS = 60.0


def run(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Start an engine and greedily continue all prompts.

    Args:
        request: `engine`, arguments of vLLM's ``LLM``; `kvstore`, its configuration, or None for an
            engine without it; `prompts`, each a text or token ids; `tokens`, how many to generate.

    Returns:
        For each `prompt` its length; the `tokens` that follow; `logprobs`, a table of the likeliest
        tokens at each place; how many tokens of the prompt were `cached`.
    """
    from vllm import LLM, SamplingParams

    arguments = dict(request["engine"])
    if request["kvstore"] is not None:
        arguments["kv_transfer_config"] = {
            "kv_connector": "KVStoreConnector",
            "kv_connector_module_path": "kvstore.vllm",
            "kv_role": "kv_both",
            "kv_connector_extra_config": request["kvstore"],
        }
    llm = LLM(**arguments)
    sampling = SamplingParams(
        temperature=0, max_tokens=request["tokens"], logprobs=TOP, ignore_eos=True, detokenize=False
    )
    prompts = [
        each if isinstance(each, str) else {"prompt_token_ids": each} for each in request["prompts"]
    ]
    answers = []
    for number, prompt in enumerate(prompts, 1):
        # One by one: what shares a batch is rounded otherwise.
        (output,) = llm.generate([prompt], sampling, use_tqdm=False)
        (answer,) = output.outputs
        answers.append(
            {
                "prompt": len(output.prompt_token_ids),
                "tokens": list(answer.token_ids),
                "logprobs": [
                    {str(token): found.logprob for token, found in place.items()}
                    for place in answer.logprobs
                ],
                "cached": output.num_cached_tokens,
            }
        )
        print(f"{number} of {len(prompts)} prompts", flush=True)
        # What the next one finds, it finds in kvstore.
        _forget_on_device(llm)
    # What a step has computed is stored with the next one.
    llm.generate([prompts[0]], SamplingParams(max_tokens=1, detokenize=False), use_tqdm=False)
    llm.llm_engine.engine_core.shutdown()
    return answers


def _forget_on_device(llm: Any) -> None:
    """Empty vLLM's own prefix cache, once nothing is copied from it any more."""
    end = time.monotonic() + FORGET_SECONDS
    while not llm.reset_prefix_cache():
        if time.monotonic() >= end:
            raise RuntimeError("vLLM's prefix cache cannot be emptied")
        time.sleep(0.02)


if __name__ == "__main__":
    told = json.loads(Path(sys.argv[1]).read_text())
    Path(sys.argv[2]).write_text(json.dumps(run(told)))
