"""Cases that repeat on another model, size or dtype what a quicker case shows.

`make test` leaves them out and `make test-slow` runs them, as CI does; `conftest.py`
gives them the mark `slow`.
"""

SLOW_CASES = {
    "layers/test_embed.py": [
        r"test_every_kind_in_one_batch.*\[True\]",
        "test_a_reused_slot",
        r"own_tables\[False",
    ],
    "layers/test_experts.py": [
        r"test_every_layout_in_one_batch\[sizes[123]",
        r"test_experts_without_a_gate\[(False-names1|True-names0)\]",
        "test_gradients_are_those",
        r"one_batch\[sizes4",
        "test_an_adapter_without_experts",
    ],
    "layers/test_extras.py": [
        "test_every_kind_equals_its_changed",
    ],
    "layers/test_linear.py": [
        r"test_a_rank_may_exceed.*\[24-24\]",
        r"a_rank_may_exceed.*\[4-256\]",
    ],
    "layers/test_placement.py": [
        r"test_a_batch_on_devices.*-4-",
        r"test_gradients_of_the_slots.*fused",
    ],
    "layers/test_stacked.py": [
        "test_each_layer_has_its_own_update",
    ],
    "layers/test_stacked_kinds.py": [
        "test_every_kind_equals_the_layers",
    ],
    "lora_kernels/grouped_dot/test_backward.py": [
        r"equal_float64\[.*float16",
    ],
    "lora_kernels/grouped_dot/test_xla.py": [
        r"test_every_size.*float16\]",
        r"float64\[.*reference",
        "test_the_form_for_accelerators.*float16",
        r"larger_than_a_tile_equal_float64\[24",
        r"never_reaches_a_pair\[.*reference",
        r"same_bits.*\[.*float16",
    ],
    "lora_kernels/lora_delta/test_backward.py": [
        "test_gradients_equal_those_of_the_reference_in_float64.*(zipf|uniform|t23)",
        "test_adapters_train_together_under_vmap",
        r"(gradient_alone|same_gradients)\[reference",
        r"never_met\[xla_partitioned",
        r"block_by_block\[33",
    ],
    "lora_kernels/lora_delta/test_xla.py": [
        "test_forms_for_accelerators.*float16",
        r"never_reaches_a_row\[.*-inf-",
    ],
    "lora_kernels/lora_experts/test_api.py": [
        r"in_float64\[(top-8-of-64|many-rows)-xla",
        r"never_reaches_a_pair.*\[shared-rows-(flat|few|batched)",
        "test_forms_for_few_and_for_many",
        r"in_float64\[.*-reference\]",
        r"never_reaches_a_pair.*\[.*reference",
    ],
    "lora_kernels/lora_experts/test_backward.py": [
        r"in_float64\[many-rows",
    ],
    "manager/test_holds.py": [
        r"goes_on_in_its_slot\[deactivated\]",
        "test_a_reload_without_a_second_slot",
    ],
    "manager/test_memory.py": [
        "test_memory_is_flat",
    ],
    "models/test_attend.py": [
        r"what_is_before_it\[None-1-None-None\]",
    ],
    "models/test_experts.py": [
        r"a_loop_over_experts\[sixty-four",
        r"a_loop_over_experts\[.*bfloat16",
    ],
    "models/test_load.py": [
        "capital_of_france",
    ],
    "models/test_moe_block.py": [
        r"test_logits_equal_transformers\[olmoe",
        r"decode_equals_transformers\[qwen2_moe",
        r"test_logits_equal_transformers\[.* .*\]",
        "test_bfloat16_stays_close",
        r"equals_transformers\[(olmoe|qwen3_moe|.* .*)",
        "test_a_classifier_may_have_experts",
        r"decode_equals_transformers\[gpt_oss",
    ],
    "models/test_tensor_parallel.py": [
        r"one_device\[.*-4\]",
    ],
    "serving/test_activated.py": [
        "test_each_row_equals_the_model_with_ids",
    ],
    "serving/test_engine.py": [
        "test_nothing_compiles_after_warmup_of_a_new_engine",
    ],
    "serving/test_engine_expert_parallel.py": [
        "two_devices_generate",
    ],
    "serving/test_engine_moe.py": [
        r"chooses\[(qwen2_moe|gpt_oss)\]",
    ],
    "serving/test_engine_tensor_parallel.py": [
        "",
    ],
    "serving/test_generate_bench.py": [
        "test_the_command",
    ],
    "serving/test_head.py": [
        r"merged_head\[1\]",
    ],
    "serving/test_sampling.py": [
        "test_a_draw_depends_on_its_own",
    ],
    "serving/test_vocabulary.py": [
        "test_draws_of_base_rows_stay",
        "test_each_row_draws_from_its_own",
    ],
    "test_bank_shapes.py": [
        r"family_with_experts\[qwen2_moe",
    ],
    "test_cli.py": [
        "test_generate_in_bfloat16",
        "test_random_answers_do_not_depend",
    ],
    "test_cli_texts.py": [
        r"test_scores_and_labels_are_those_of_each_rows_own_head\[bert",
        r"test_embeddings_are_pooled_hidden_states\[(llama|roberta|bert-(cls|last))",
        r"test_scores_and_labels_are_those_of_each_rows_own_head\[(llama|roberta)",
        r"own_label_names_are_used\[(roberta|llama)",
        r"hidden_states\[bert-mean",
    ],
    "test_end_to_end.py": [
        "test_a_reused_slot",
        "test_more_adapters_than_host_places",
    ],
    "test_examples.py": [
        "test_the_reranker_gives_each_row_its_own_head",
    ],
    "test_expert_parallel.py": [
        r"\[4\]",
        "test_tokens_of_one_device_alone",
        "test_every_layout_in_one_batch",
    ],
    "test_expert_processes.py": [
        "test_two_processes_serve",
    ],
    "test_experts_against_peft.py": [
        r"\[(qwen|olmoe|gpt_oss, square)",
        r"\[gpt_oss\]",
        r"\[mixtral\]",
    ],
    "test_kinds_against_peft.py": [
        r"\[untied\]",
        "test_base_rows_are_bit_for_bit",
    ],
    "test_merged_experts_against_peft.py": [
        "loads_here",
        r"\[(mixtral|gpt_oss)",
    ],
    "test_models_against_peft.py": [
        r"beside_a_base_row\[(phi3|gemma3|bert body)\]",
        r"beside_a_base_row\[(mistral|qwen2|gemma2|roberta.*)\]",
        r"beside_a_base_row\[(qwen3|bert) scores\]",
        r"beside_a_base_row\[qwen3\]",
    ],
    "test_other_models.py": [
        r"checkpoints_of_the_other\[base-scan",
        r"types_and_values\[einsum",
        r"however_it_is_run\[scan\]",
        r"however_it_is_run\[einsum\]",
        r"types_and_values\[scan\]",
    ],
    "test_quantized.py": [
        r"dequantised_base\[(int8|nf4)\]",
        r"dequantised_base\[int4\]",
    ],
    "test_quantized_experts.py": [
        "test_long_texts",
        r"dequantised_base\[2\]",
    ],
    "test_tensor_parallel.py": [
        r"(gathers_no_slot_array|no_other_adapter_compiles_again)\[True",
        r"\[4",
        "test_swaps_leave",
        r"share_of_a_slot\[(False-shares0|True-shares1)",
        r"\[2-True\]",
        "test_every_kind_of_adapter",
        "share_of_a_slot",
    ],
    "test_two_mesh_axes.py": [
        "",
    ],
    "test_vocabulary.py": [
        "test_the_soft_cap",
    ],
    "worker/test_loading.py": [
        "test_eight_threads_load",
    ],
    "worker/test_workers.py": [
        r"from_requests\[WorkerLoRAManager",
    ],
}
"""File -> patterns found in the names of its slow cases."""
