"""Settings of vLLM: which decide KV bytes, and which are known not to.

In every section each setting counts except those named here, and so does a section that is not
named, so an unknown setting costs hits, but never yields wrong bytes. Variables
of the environment are the exception: of these, the ones that are named count. Reviewed against
vLLM 0.32 and 0.33.
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
    return_dict output_attentions output_hidden_states max_length min_length do_sample
    temperature top_k top_p typical_p num_beams num_return_sequences repetition_penalty
    id2label label2id problem_type task_specific_params finetuning_task tokenizer_class prefix
    """
)
"""Of the model's own configuration: generation, labels and what vLLM has resolved itself."""

TOKEN_IDS = _names("bos_token_id eos_token_id pad_token_id sep_token_id decoder_start_token_id")
"""Of the model's own configuration: for generation, but models of n-grams compute with them."""

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
"""Of `CacheConfig`: sizes and the prefix cache; the layout tells data type and layout, and how
blocks are hashed has a place of its own."""

ATTENTION_IGNORED = _names(
    """
    flash_attn_version flash_attn_max_num_splits_for_cuda_graph tokenspeed_mla_min_split_kv
    tq_max_kv_splits_for_cuda_graph trtllm_ragged_backend
    mla_prefill_backend sparse_mla_prefill_workspace_factor indexer_tp_shard_min_rows
    flex_attn_block_m flex_attn_block_n flex_attn_q_block_size flex_attn_kv_block_size
    """
)
"""Of `AttentionConfig`: how to compute, not what to keep."""

MULTIMODAL_IGNORED = _names(
    """
    limit_per_prompt enable_mm_embeds mm_processor_cache_gb mm_processor_cache_type
    mm_hasher_algorithm mm_shm_cache_max_object_size_mb mm_encoder_only mm_encoder_tp_mode
    interleave_mm_strings skip_mm_profiling mm_tensor_ipc allow_missing_mm_embeddings
    mm_ipc_gpu_memory_gb mm_processor_device mm_encoder_fp8_scale_save_path
    mm_encoder_fp8_scale_save_margin
    """
)
"""Of `MultiModalConfig`: limits, caches and transport; block hashes know the inputs."""

PARALLEL_IGNORED = _names(
    """
    pipeline_parallel_size tensor_parallel_size prefill_context_parallel_size
    decode_context_parallel_size world_size rank data_parallel_size data_parallel_size_local
    data_parallel_rank data_parallel_rank_local data_parallel_index data_parallel_master_ip
    data_parallel_rpc_port dp_sync_interval data_parallel_master_port data_parallel_backend
    data_parallel_external_lb data_parallel_hybrid_lb is_moe_model enable_hc_sp
    enable_expert_parallel enable_batch_sharded_sampling enable_ep_weight_filter enable_eplb
    eplb_config expert_placement_strategy all2all_backend max_parallel_loading_workers
    disable_custom_all_reduce enable_shm_tensor_arena enable_elastic_ep elastic_ep_max_dp_size
    enable_dbo ubatch_size dbo_decode_token_threshold dbo_prefill_token_threshold
    disable_nccl_for_dp_synchronization ray_workers_use_nsight ray_runtime_env placement_group
    distributed_executor_backend worker_cls worker_extension_cls master_addr master_port node_rank
    nnodes numa_bind numa_bind_nodes numa_bind_cpus assigned_physical_gpu_ids
    distributed_timeout_seconds cpu_distributed_timeout_seconds dcp_comm_backend dcp_q_replicate
    enable_fault_tolerance fault_tolerance_config
    """
)
"""Of `ParallelConfig`: addresses, ranks, how parts are exchanged and where experts are computed;
the layout tells the shape that parts the KV."""

KERNEL_IGNORED = _names(
    """
    ir_op_priority enable_flashinfer_autotune enable_rocm_segmented_attn_autotune
    enable_cutedsl_warmup enable_jit_warmup sparse_indexer_topk_backend monokernel
    """
)
"""Of `KernelConfig`; the choice of a backend may decide whether activations are quantised."""

LOAD_IGNORED = _names(
    """
    load_format download_dir safetensors_load_strategy safetensors_prefetch_num_threads
    safetensors_prefetch_block_size device use_tqdm_on_load pt_load_map_location
    """
)
"""Of `LoadConfig`: how files are read; the format decides which files are the weights."""

SECTIONS_IGNORED = _names(
    """
    scheduler_config device_config offload_config aux_output_config engram_config
    watermark_config structured_outputs_config observability_config logging_config quant_config
    compilation_config profiler_config kv_transfer_config kv_events_config ec_transfer_config
    ec_manager_config reasoning_config instance_id optimization_level performance_mode
    weight_transfer_config shutdown_timeout watchdog_config lora_config
    """
)
"""Of `VllmConfig`: order and time, where tables and weights are kept, what becomes of tokens, how a
graph is compiled, and what follows from settings that count (`quant_config`) or counts for
adapters alone (`lora_config`)."""

ENVIRONMENT_COUNTS = _names(
    """
    VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE VLLM_B12X_MOE_FP4_FORCE_A16
    VLLM_CPU_INT4_W4A8 VLLM_DEEPEPLL_NVFP4_DISPATCH VLLM_DISABLED_KERNELS
    VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE VLLM_FLOAT32_MATMUL_PRECISION
    VLLM_HUMMING_INPUT_QUANT_CONFIG VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_HUMMING_USE_F16_ACCUM
    VLLM_MARLIN_INPUT_DTYPE VLLM_MLA_DISABLE VLLM_MOE_ROUTING_SIMULATION_STRATEGY
    VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_PLUGINS
    VLLM_PP_LAYER_PARTITION VLLM_ROCM_FP8_MFMA_PAGE_ATTN VLLM_ROCM_MUSE_MOE_ONLINE_QUANT
    VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16
    VLLM_ROCM_QUICK_REDUCE_QUANTIZATION VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT VLLM_ROCM_USE_AITER
    VLLM_ROCM_USE_AITER_FP4BMM VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_ROCM_USE_AITER_FP8BMM
    VLLM_ROCM_USE_AITER_MHA VLLM_ROCM_USE_AITER_MLA VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4
    VLLM_ROCM_USE_AITER_MOE_SITUV2 VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION
    VLLM_SSM_CONV_STATE_LAYOUT VLLM_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_E8M0
    VLLM_XPU_INC_WNA16_BACKEND
    """
)
"""Variables that change the KV or its order in a page, where they are set: those that quantise,
round or replace what is computed, choose a page's layout, part layers among ranks, or load code."""

DRAFT_IGNORED = _names(
    """
    enforce_eager model tensor_parallel_size max_model_len disable_padded_drafter_batch
    disable_eagle_block_drop use_local_argmax_reduction prompt_lookup_max prompt_lookup_min
    target_model_config target_parallel_config num_speculative_tokens_per_batch_size
    draft_model_config draft_parallel_config suffix_decoding_max_tree_depth
    suffix_decoding_max_cached_requests suffix_decoding_max_spec_factor
    suffix_decoding_min_token_prob draft_load_config rejection_sample_method
    synthetic_acceptance_rates synthetic_acceptance_length enable_adaptive_verification
    draft_sample_method dspark_draft_topk disable_lookahead_block_hashes fly_entropy_threshold
    fly_entropy_top_k fly_window_size xpress_topc draft_lm_head_quantization
    """
)
"""Of `SpeculativeConfig`, where a draft model has layers of its own in the cache: how guesses are
sampled and judged; the model has a place of its own."""

WITHOUT_DRAFT = _names("ngram ngram_gpu suffix medusa mlp_speculator")
"""Methods whose draft model is none, is the target under another name, or has no layers in the
cache."""

PLAIN_ROPE = frozenset({"default", "llama3", "linear", "yarn", "mrope", "proportional"})
PLAIN_MODELS = _names(
    """
    llama mistral mixtral qwen2 qwen2_moe qwen3 qwen3_moe gemma gemma2 gemma3 gemma3_text
    gpt_oss phi olmo2 granite starcoder2
    """
)
"""Models and kinds of RoPE whose KV does not depend on the longest request that is allowed; no
such model computes with `TOKEN_IDS` either."""

LORA_IGNORED = _names(
    """
    max_lora_rank max_loras fully_sharded_loras max_cpu_loras default_mm_loras
    specialize_active_lora max_lora_cls_labels
    """
)
"""Of `LoRAConfig`: sizes, and which adapter a request has; block hashes know that."""
