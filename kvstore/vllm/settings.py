"""Which settings of vLLM decide KV bytes, and which are known not to.

In most sections every setting counts except those named here, so a setting that nobody has
thought of costs hits, but never yields wrong bytes. Reviewed against vLLM 0.32 and 0.33.
"""

from __future__ import annotations


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


MODEL_IGNORED = _names(
    """
    model model_weights tokenizer tokenizer_mode tokenizer_revision seed hf_config hf_text_config
    hf_config_path hf_token hf_overrides config_format allowed_local_media_path
    allowed_media_domains max_model_len spec_target_max_model_len enforce_eager max_logprobs
    logprobs_mode return_sampling_mask use_fp64_gumbel enable_trace_replay disable_cascade_attn
    skip_tokenizer_init enable_prompt_embeds served_model_name generation_config
    override_generation_config enable_sleep_mode sleep_preserve_parameter_names sleep_mode_backend
    sleep_mode_offload_cudagraph enable_nccl_comm_suspend enable_cumem_allocator logits_processors
    io_processor_plugin renderer_num_workers pooler_config multimodal_config trust_remote_code
    allow_deprecated_quantization model_arch_config
    """
)
"""Of `ModelConfig`: sampling, tokens and the server; what follows has a place of its own."""

HF_IGNORED = _names(
    """
    _name_or_path name_or_path _commit_hash transformers_version torch_dtype dtype use_cache
    return_dict output_attentions output_hidden_states bos_token_id eos_token_id pad_token_id
    sep_token_id decoder_start_token_id max_length min_length do_sample temperature top_k top_p
    typical_p num_beams num_return_sequences repetition_penalty id2label label2id problem_type
    task_specific_params finetuning_task tokenizer_class prefix
    """
)
"""Of the model's own configuration: generation, labels and what vLLM has resolved itself."""

CACHE_IGNORED = _names(
    """
    cache_dtype kv_cache_layout user_specified_block_size prefix_match_unit
    gpu_memory_utilization is_attention_free num_gpu_blocks_override enable_prefix_caching
    prefix_caching_hash_algo prefix_cache_retention_interval num_gpu_blocks num_cpu_blocks
    effective_attention_block_size kv_cache_size_tokens kv_cache_max_concurrency hash_block_size
    cache_hit_alignment_tokens kv_cache_memory_bytes kv_offloading_size kv_offloading_backend
    simple_cpu_offload_num_blocks
    """
)
"""Of `CacheConfig`: sizes and the prefix cache; the layout tells data type and layout."""

ATTENTION_IGNORED = _names(
    """
    flash_attn_version flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv
    tq_max_kv_splits_for_cuda_graph use_trtllm_attention trtllm_ragged_backend
    disable_flashinfer_q_quantization mla_prefill_backend use_prefill_query_quantization
    sparse_mla_prefill_workspace_factor indexer_tp_shard_min_rows flex_attn_block_m
    flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size
    """
)
"""Of `AttentionConfig`: how to compute, not what to keep."""

MULTIMODAL_IGNORED = _names(
    """
    limit_per_prompt enable_mm_embeds mm_processor_cache_gb mm_processor_cache_type
    mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode
    interleave_mm_strings skip_mm_profiling mm_tensor_ipc allow_missing_mm_embeddings
    mm_ipc_gpu_memory_gb mm_processor_device
    """
)
"""Of `MultiModalConfig`: limits, caches and transport; block hashes know the inputs."""

PARALLEL_COUNTS = ("cp_kv_cache_interleave_size", "dcp_kv_cache_interleave_size")
"""Of `ParallelConfig`, beside the shape that the layout tells."""

ENVIRONMENT_COUNTS = (
    "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE",
    "VLLM_HUMMING_INPUT_QUANT_CONFIG",
    "VLLM_HUMMING_ONLINE_QUANT_CONFIG",
    "VLLM_MARLIN_INPUT_DTYPE",
    "VLLM_MLA_DISABLE",
    "VLLM_PP_LAYER_PARTITION",
    "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT",
    "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT",
    "VLLM_ROCM_USE_AITER",
    "VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION",
    "VLLM_SSM_CONV_STATE_LAYOUT",
)
"""Variables that change the KV or its order in a page, where they are set."""

DRAFT_COUNTS = (
    "method",
    "revision",
    "code_revision",
    "quantization",
    "kv_cache_dtype",
    "attention_backend",
    "num_speculative_tokens",
    "draft_tensor_parallel_size",
    "use_heterogeneous_vocab",
)
"""Of `SpeculativeConfig`, where a draft model has layers of its own in the cache."""

WITHOUT_DRAFT = _names("ngram ngram_gpu suffix")
"""Methods whose draft model is none, or the target under another name."""

PLAIN_ROPE = frozenset({"default", "llama3", "linear", "yarn", "mrope", "proportional"})
PLAIN_MODELS = _names(
    """
    llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3 gemma3_text
    gpt_oss phi olmo2 granite starcoder2
    """
)
"""Models and kinds of RoPE whose KV does not depend on the longest request that is allowed."""

LORA_COUNTS = (
    "lora_dtype",
    "target_modules",
    "enable_tower_connector_lora",
    "enable_mixed_moe_lora_format",
    "enable_moe_shared_loras",
)
"""Of `LoRAConfig`: what changes the KV of a request with an adapter."""
