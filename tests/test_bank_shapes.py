"""The whole bank of every family of models: each site's arrays, and what a slot costs.

Compared with vLLM's formula (`A (max_rank, d_in)` and `B (d_out, max_rank)` for each
slice of each module): the same for linear layers, less for embeddings and heads, whose
arrays are not there before an adapter needs them.
"""

import jax
import numpy as np
import pytest
from flax import nnx

from lora_jax import LoRAConfig
from lora_jax.bank import empty_bank
from lora_jax.layers import wrap
from lora_jax.manager.memory import memory_needed
from lora_jax.models.encoder_config import ENCODER_FAMILIES
from lora_jax.models.families import FAMILIES
from lora_jax.models.zoo import CONFIGS, build_model

SIZES = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "max_position_embeddings": 32,
    "num_labels": 5,
    "id2label": {str(label): f"label {label}" for label in range(5)},
}
GPT2 = {"n_embd": 16, "n_layer": 2, "n_head": 4, "n_positions": 32, "n_inner": 20}
RANK, SLOTS = 4, 3
BFLOAT16 = np.dtype("bfloat16")

Layer = dict[str, tuple[int, tuple[int, ...]]]
"""Last names of a layer's modules -> input width, output width of each part."""

LLAMA: Layer = {
    "self_attn.qkv_proj": (16, (16, 8, 8)),
    "self_attn.o_proj": (16, (16,)),
    "mlp.gate_up_proj": (16, (20, 20)),
    "mlp.down_proj": (20, (16,)),
}
WIDE_HEADS: Layer = {
    **LLAMA,
    "self_attn.qkv_proj": (16, (24, 12, 12)),
    "self_attn.o_proj": (24, (16,)),
}
PHI: Layer = {
    **LLAMA,
    "self_attn.qkv_proj": (16, (32,)),
    "mlp.gate_up_proj": (16, (40,)),
}
GPT: Layer = {
    "attn.c_attn": (16, (48,)),
    "attn.c_proj": (16, (16,)),
    "mlp.c_fc": (16, (20,)),
    "mlp.c_proj": (20, (16,)),
}
BERT: Layer = {
    "attention.self.qkv": (16, (16, 16, 16)),
    "attention.output.dense": (16, (16,)),
    "intermediate.dense": (16, (20,)),
    "output.dense": (20, (16,)),
}
DECODER = ("model.embed_tokens", "lm_head")
ENCODER = ("embeddings.word_embeddings",)

FAMILY_CASES = {
    "llama": ("LlamaForCausalLM", {}, "model.layers", LLAMA, DECODER),
    "mistral": ("MistralForCausalLM", {}, "model.layers", LLAMA, DECODER),
    "qwen2": ("Qwen2ForCausalLM", {}, "model.layers", LLAMA, DECODER),
    "qwen3": (
        "Qwen3ForCausalLM",
        {"head_dim": 6},
        "model.layers",
        WIDE_HEADS,
        DECODER,
    ),
    "phi3": ("Phi3ForCausalLM", {}, "model.layers", PHI, DECODER),
    "gemma2": (
        "Gemma2ForCausalLM",
        {"head_dim": 6},
        "model.layers",
        WIDE_HEADS,
        DECODER,
    ),
    "gemma3_text": ("Gemma3ForCausalLM", {}, "model.layers", LLAMA, DECODER),
    "gpt2": (
        "GPT2LMHeadModel",
        GPT2,
        "transformer.h",
        GPT,
        ("transformer.wte", "lm_head"),
    ),
    "bert": ("BertModel", {}, "encoder.layer", BERT, ENCODER),
    "roberta": ("RobertaModel", {}, "encoder.layer", BERT, ENCODER),
    "xlm-roberta": ("XLMRobertaModel", {}, "encoder.layer", BERT, ENCODER),
}
"""`model_type` -> architecture, changes, path of the layers, modules of a layer, and
sites that have no factors before an adapter brings some."""

CLASSIFIER_CASES = {
    "llama": ("LlamaForSequenceClassification", "model.layers", "model.embed_tokens"),
    "gpt2": ("GPT2ForSequenceClassification", "transformer.h", "transformer.wte"),
    "bert": (
        "BertForSequenceClassification",
        "bert.encoder.layer",
        "bert.embeddings.word_embeddings",
    ),
    "roberta": (
        "RobertaForSequenceClassification",
        "roberta.encoder.layer",
        "roberta.embeddings.word_embeddings",
    ),
}
HEADS = {
    "llama": ({}, ("score",)),
    "gpt2": ({}, ("score",)),
    "bert": ({"bert.pooler.dense": (16, (16,))}, ("classifier",)),
    "roberta": ({}, ("classifier.dense", "classifier.out_proj")),
}
"""Family -> linear layers outside of the stack; heads, without factors at first."""


def _model(model_type: str, architecture: str, changes: dict) -> nnx.Module:
    values = {**SIZES, "model_type": model_type, "architectures": [architecture]}
    config = CONFIGS[model_type]({**values, **changes}, origin="tiny")
    return build_model(config, dtype="bfloat16", rngs=nnx.Rngs(0))


def _arrays(d_in: int, widths: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    parts = len(widths)
    return {
        "a": (SLOTS, parts, RANK, d_in),
        "b": (SLOTS, RANK, sum(widths)),
        "scale": (SLOTS, parts),
        "rank": (SLOTS, parts),
    }


def _check(model, path, layer, outside, bare) -> None:
    linear = {
        f"{path}.{number}.{name}": sizes
        for number in range(2)
        for name, sizes in layer.items()
    } | outside
    expected = {name: _arrays(*sizes) for name, sizes in linear.items()}
    expected |= {name: {"rank": (SLOTS, 1)} for name in bare}
    needed = memory_needed(model, LoRAConfig(max_loras=SLOTS, max_lora_rank=RANK))
    sites = wrap(model, LoRAConfig(max_lora_rank=RANK))
    bank = empty_bank(sites, SLOTS, BFLOAT16)
    assert jax.tree.map(lambda array: array.shape, bank.arrays) == expected
    factors = sum(
        2 * RANK * (len(widths) * d_in + sum(widths))
        for d_in, widths in linear.values()
    )
    facts = sum(8 * len(widths) for _, widths in linear.values()) + 4 * len(bare)
    assert needed.slot == factors + facts
    assert bank.nbytes == SLOTS * needed.slot
    sizes = {name: sites[name].lora_site for name in bare}
    theirs = sum(2 * RANK * (site.d_in + site.d_out) for site in sizes.values())
    assert needed.slot < factors + theirs + facts


@pytest.mark.parametrize("model_type", FAMILY_CASES)
def test_the_bank_of_a_family(model_type):
    architecture, changes, path, layer, bare = FAMILY_CASES[model_type]
    outside: Layer = {"pooler.dense": (16, (16,))} if layer is BERT else {}
    _check(_model(model_type, architecture, changes), path, layer, outside, bare)


@pytest.mark.parametrize("model_type", CLASSIFIER_CASES)
def test_the_bank_of_a_classifier(model_type):
    architecture, path, embedding = CLASSIFIER_CASES[model_type]
    changes, layer = FAMILY_CASES[model_type][1], FAMILY_CASES[model_type][3]
    outside, heads = HEADS[model_type]
    model = _model(model_type, architecture, changes)
    _check(model, path, layer, outside, (embedding, *heads))


ATTENTION: Layer = {name: LLAMA[name] for name in list(LLAMA)[:2]}
GATE: Layer = {**ATTENTION, "mlp.gate": (16, (4,))}
SHARED: Layer = {
    **GATE,
    "mlp.shared_expert.gate_up_proj": (16, (12, 12)),
    "mlp.shared_expert.down_proj": (12, (16,)),
    "mlp.shared_expert_gate": (16, (1,)),
}
EXPERT_CASES = {
    "mixtral": ("MixtralForCausalLM", {"num_local_experts": 4}, GATE, 20),
    "qwen2_moe": (
        "Qwen2MoeForCausalLM",
        {
            "num_experts": 4,
            "moe_intermediate_size": 10,
            "shared_expert_intermediate_size": 12,
        },
        SHARED,
        10,
    ),
    "qwen3_moe": (
        "Qwen3MoeForCausalLM",
        {"num_experts": 4, "moe_intermediate_size": 10},
        GATE,
        10,
    ),
    "olmoe": ("OlmoeForCausalLM", {"num_experts": 4}, GATE, 20),
    "gpt_oss": (
        "GptOssForCausalLM",
        {"num_local_experts": 4},
        {**ATTENTION, "mlp.router": (16, (4,))},
        20,
    ),
}
"""`model_type` -> architecture, changes, linear layers, width inside an expert."""


@pytest.mark.parametrize("model_type", EXPERT_CASES)
def test_the_bank_of_a_family_with_experts(model_type):
    architecture, changes, layer, width = EXPERT_CASES[model_type]
    model = _model(model_type, architecture, {"num_experts_per_tok": 2, **changes})
    projections = {"gate_up_proj": (16, (width, width)), "down_proj": (width, (16,))}
    expected = {name: {"rank": (SLOTS, 1)} for name in DECODER}
    for path in ("model.layers.0", "model.layers.1"):
        for name, sizes in layer.items():
            expected[f"{path}.{name}"] = _arrays(*sizes)
        for name, sizes in projections.items():
            one = _arrays(*sizes)
            of_experts = {key: (SLOTS, 4, *shape[1:]) for key, shape in one.items()}
            expected[f"{path}.mlp.experts.{name}"] = of_experts
    bank = empty_bank(wrap(model, LoRAConfig(max_lora_rank=RANK)), SLOTS, BFLOAT16)
    assert jax.tree.map(lambda array: array.shape, bank.arrays) == expected
    config = LoRAConfig(max_loras=SLOTS, max_lora_rank=RANK)
    assert bank.nbytes == SLOTS * memory_needed(model, config).slot


def test_every_family_is_in_a_table():
    assert {*FAMILY_CASES, *EXPERT_CASES} == {*FAMILIES, *ENCODER_FAMILIES}
