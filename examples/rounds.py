"""Run rounds of prompts through a real vLLM engine and report every request.

    python examples/rounds.py scenario.json report.json

The scenario names a tiny model that is made on the spot with random weights,
the engine's arguments, kvstore's configuration (or none) and the rounds. The
demo, the tests and the benchmarks all drive vLLM through this file.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
    "hidden_act": "silu",
}
"""float32 wherever vLLM can: without AVX-512, bfloat16 takes five times as long, and with it the
order in which requests share a batch changes some tokens."""

GEMMA = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "sliding_window": 256,
    "layer_types": ["sliding_attention"] * 2
    + ["full_attention"]
    + ["sliding_attention"] * 2
    + ["full_attention"],
    "query_pre_attn_scalar": 64,
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
    "hidden_activation": "gelu_pytorch_tanh",
}

LFM2 = {
    "architectures": ["Lfm2ForCausalLM"],
    "model_type": "lfm2",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "layer_types": ["conv", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "conv_L_cache": 3,
    "conv_dim": 256,
    "conv_dim_out": 256,
    "conv_bias": False,
    "block_dim": 256,
    "block_ff_dim": 512,
    "block_auto_adjust_ff_dim": False,
    "block_multiple_of": 256,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "norm_eps": 1e-5,
    "rope_theta": 1000000.0,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": True,
}
"""Short convolutions, whose states are kept at the ends of blocks, between layers of attention."""

QWEN = {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "mlp_only_layers": [],
    "moe_intermediate_size": 64,
    "shared_expert_intermediate_size": 64,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}
"""Gated delta nets, which vLLM computes on a CPU in bfloat16 only, between layers of attention."""

MAMBA2 = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 32000,
    "max_position_embeddings": 8192,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
"""What the models with Mamba2 have in common."""

GRANITE = {
    **MAMBA2,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
    "shared_intermediate_size": 512,
    "num_local_experts": 0,
    "num_experts_per_tok": 0,
    "num_hidden_layers": 4,
    "layer_types": ["mamba", "attention"] * 2,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 32,
    "mamba_chunk_size": 64,
}

FALCON = {
    **MAMBA2,
    "architectures": ["FalconH1ForCausalLM"],
    "model_type": "falcon_h1",
    "num_hidden_layers": 2,
    "head_dim": 64,
    "mamba_d_ssm": 512,
    "mamba_n_heads": 8,
    "mamba_d_head": 64,
    "mamba_d_state": 32,
    "mamba_chunk_size": 64,
}
"""Attention and Mamba2 side by side in each layer."""

NEMOTRON = {
    **MAMBA2,
    "architectures": ["NemotronHForCausalLM"],
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "M*-M*-",
    "num_hidden_layers": 6,
    "head_dim": 64,
    "ssm_state_size": 32,
    "mamba_num_heads": 8,
    "mamba_head_dim": 64,
    "n_groups": 2,
    "chunk_size": 64,
}

MODELS = {
    "llama": LLAMA,
    "gemma": GEMMA,
    "lfm2": LFM2,
    "qwen": QWEN,
    "granite": GRANITE,
    "falcon": FALCON,
    "nemotron": NEMOTRON,
}

ENGINE = {
    "load_format": "dummy",
    "skip_tokenizer_init": True,
    "seed": 0,
    "enforce_eager": True,
    # "auto" would compute a float32 model in 16 bits.
    "dtype": "float32",
    "block_size": 32,
    "num_gpu_blocks_override": 160,
    "max_model_len": 4608,
    "disable_log_stats": False,
}
"""Arguments that make a tiny engine start quickly and answer the same every time."""


ENVIRONMENT = {
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
"""What vLLM and what it uses read, unless it is set already."""


def over_kvstore(options: dict[str, Any]) -> dict[str, Any]:
    """The `kv_transfer_config` of an engine over kvstore with these options."""
    return {
        "kv_connector": "KVStoreConnector",
        "kv_connector_module_path": "kvstore.vllm",
        "kv_role": "kv_both",
        "kv_connector_extra_config": dict(options),
    }


def prompt(seed: int, length: int) -> list[int]:
    """Token ids of a prompt: the same for the same seed, unlike any other seed's."""
    state = (seed * 2654435761 + 12345) % 2**32
    ids = []
    for _ in range(length):
        state = (state * 1664525 + 1013904223) % 2**32
        ids.append(10 + (state >> 8) % 30000)
    return ids


def _input(seed: int, length: int, config: dict[str, Any], wanted: dict[str, Any]) -> Any:
    """A prompt as vLLM takes it: tokens, or embeddings that nobody has tokens for."""
    if wanted.get("embeddings"):
        import torch

        random = torch.Generator().manual_seed(seed)
        asked: dict[str, Any] = {
            "prompt_embeds": torch.randn(length, config["hidden_size"], generator=random)
        }
    else:
        asked = {"prompt_token_ids": prompt(seed, length)}
    if wanted.get("salt"):
        asked["cache_salt"] = wanted["salt"]
    return asked


def run(scenario: dict[str, Any]) -> dict[str, Any]:
    """Start an engine, run the rounds, shut it down."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    from vllm import LLM, SamplingParams
    from vllm.lora.request import LoRARequest

    folder = Path(scenario["model_dir"])
    folder.mkdir(parents=True, exist_ok=True)
    config = {**MODELS[scenario.get("model", "llama")], **scenario.get("config", {})}
    work_around(config)
    (folder / "config.json").write_text(json.dumps(config))
    arguments = {**ENGINE, "dtype": config["torch_dtype"], **scenario.get("engine", {})}
    if scenario.get("kvstore") is not None:
        arguments["kv_transfer_config"] = over_kvstore(scenario["kvstore"])
    if scenario.get("kv_transfer_config") is not None:
        arguments["kv_transfer_config"] = scenario["kv_transfer_config"]
    started = time.monotonic()
    llm = LLM(**{"model": str(folder), **arguments})
    report: dict[str, Any] = {"start_seconds": time.monotonic() - started, "rounds": []}
    for number, wanted in enumerate(scenario["rounds"]):
        if wanted.get("replace"):
            # Files that change while the engine runs.
            shutil.copytree(wanted["replace"][0], wanted["replace"][1], dirs_exist_ok=True)
        # As an HTTP client sends them.
        params = wanted.get("kv_transfer_params")
        sampling = SamplingParams(
            temperature=0,
            max_tokens=scenario.get("max_tokens", 8),
            detokenize=False,
            ignore_eos=True,
            extra_args={"kv_transfer_params": params} if params else None,
        )
        adapter = LoRARequest(**wanted["lora"]) if wanted.get("lora") else None
        prompts = [_input(seed, n, config, wanted) for seed, n in wanted["prompts"]]
        began = time.monotonic()
        if wanted.get("kv_hints"):
            outputs = _hinted(llm, prompts, sampling, wanted["kv_hints"])
        elif wanted.get("together"):
            outputs = llm.generate(prompts, sampling, use_tqdm=False, lora_request=adapter)
        else:
            outputs = [
                llm.generate([one], sampling, use_tqdm=False, lora_request=adapter)[0]
                for one in prompts
            ]
        seconds = time.monotonic() - began
        report["rounds"].append(
            {
                "name": wanted.get("name", str(number)),
                "seconds": seconds,
                "metrics": _metrics(llm),
                "requests": [
                    {
                        "tokens": list(output.outputs[0].token_ids),
                        "cached": output.num_cached_tokens,
                        "ttft": getattr(output.metrics, "first_token_latency", None),
                    }
                    for output in outputs
                ],
            }
        )
        time.sleep(wanted.get("pause", 0.0))
        for command in wanted.get("commands", ()):
            # As an operator does, while the engine is idle.
            module = [sys.executable, "-m", "kvstore.tools"]
            subprocess.run([*module, *command], check=True, stdout=sys.stderr)
        if wanted.get("sleep"):
            _sleep(llm, **wanted["sleep"])
        if wanted.get("reset", True):
            # Stores of the last step are only begun with the next one.
            _forget_on_device(llm, bool(wanted.get("reset_connector", False)))
    return report


def work_around(config: dict[str, Any]) -> None:
    """Let vLLM compute a model that it otherwise does not on a CPU, for engines in this process.

    Its Mamba2 has no states from the middle of a step there (0.32: `IndexError`). Here it ends a
    step of a prompt wherever it keeps a state.
    """
    if config["model_type"] in ("granitemoehybrid", "falcon_h1", "nemotron_h"):
        from vllm.model_executor.layers.mamba.abstract import MambaBase
        from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

        MambaMixer2.get_kv_cache_spec = MambaBase.get_kv_cache_spec


def _hinted(llm: Any, prompts: list[Any], sampling: Any, actions: list[list[Any]]) -> list[Any]:
    """One request after the other, each with an envelope of hints: `LLM.generate` takes none.

    Args:
        actions: the type, the version and the payload of each.
    """
    from vllm.v1.kv_hints import KvHintAction, KvHintsEnvelope

    told = [KvHintAction(f"action-{n}", *action) for n, action in enumerate(actions)]
    engine, outputs = llm.llm_engine, []
    for number, one in enumerate(prompts):
        envelope = KvHintsEnvelope("1.0", f"message-{number}", told)
        engine.add_request(f"hinted-{id(told)}-{number}", one, sampling, kv_hints=envelope)
        while engine.has_unfinished_requests():
            outputs += [output for output in engine.step() if output.finished]
    return outputs


def _metrics(llm: Any) -> dict[str, float]:
    """kvstore's metrics as vLLM tells them, totals since the start.

    Of several tiers the sum; of histograms the number and the sum of what was observed.
    """
    prefix = "vllm:kvstore_"
    totals: dict[str, float] = {}
    for each in llm.get_metrics():
        if not each.name.startswith(prefix):
            continue
        name = each.name.removeprefix(prefix)
        if hasattr(each, "value"):
            parts = {name: each.value}
        else:
            parts = {f"{name}_count": each.count, f"{name}_sum": each.sum}
        for part, value in parts.items():
            totals[part] = totals.get(part, 0) + value
    return totals


def _sleep(llm: Any, level: int = 1, weights: str | None = None) -> None:
    """Let the engine sleep, perhaps give it other weights, and wake it up."""
    llm.sleep(level)
    if weights is not None:
        llm.collective_rpc("reload_weights", kwargs={"weights_path": weights})
    llm.wake_up()


def _forget_on_device(llm: Any, everywhere: bool) -> None:
    for _ in range(200):
        if llm.reset_prefix_cache(reset_connector=everywhere):
            return
        time.sleep(0.02)
    raise RuntimeError("the device's prefix cache cannot be reset")


def main() -> None:
    """Read the scenario, run it, write the report."""
    scenario = json.loads(Path(sys.argv[1]).read_text())
    report = run(scenario)
    Path(sys.argv[2]).write_text(json.dumps(report))


if __name__ == "__main__":
    main()
