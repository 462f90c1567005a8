"""The engine over experts on two devices: the tokens of one device."""

import jax
import numpy as np
from flax import nnx

from lora_jax import LoRAConfig, LRUCacheLoRAModelManager, shard_experts
from lora_jax.adapters import adapter_from_tensors
from lora_jax.models import CausalLM, config_from_dict
from lora_jax.serving import Engine, GenerationRequest
from lora_jax.serving.compilations import CompilationCounter

CONFIG = {
    "model_type": "mixtral",
    "architectures": ["MixtralForCausalLM"],
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
}
RANK, TOKENS = 4, 6
PROMPTS = ((5, 9, 2), (11, 3, 60, 7, 7, 31, 20), (1,), (40, 41, 42, 43, 44))


def _model(devices):
    model = CausalLM(
        config_from_dict(CONFIG, origin="tiny"), dtype="float32", rngs=nnx.Rngs(0)
    )
    table = model.model.embed_tokens.embedding
    table.set_value(table[...] * 6)
    if devices:
        found = jax.devices()[:devices]
        shard_experts(model, jax.make_mesh((devices,), ("expert",), devices=found))
    return model


def _adapter(id_):
    rng = np.random.default_rng(id_)
    widths = {"gate_proj": (32, 24), "up_proj": (32, 24), "down_proj": (24, 32)}
    modules = {
        f"mlp.experts.{expert}.{name}": size
        for expert in range(4)
        for name, size in widths.items()
    } | {"self_attn.q_proj": (32, 32), "mlp.gate": (32, 4)}
    tensors = {}
    for layer in range(1):
        for module, (d_in, d_out) in modules.items():
            path = f"base_model.model.model.layers.{layer}.{module}"
            for factor, shape in (("A", (RANK, d_in)), ("B", (d_out, RANK))):
                values = rng.standard_normal(shape) / np.sqrt(shape[1])
                tensors[f"{path}.lora_{factor}.weight"] = values.astype(np.float32)
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": 8}
    return adapter_from_tensors(tensors, config, name=f"a{id_}", adapter_id=id_)


def _answers(devices):
    model = _model(devices)
    config = LoRAConfig(max_loras=2, max_cpu_loras=3, max_lora_rank=RANK)
    manager = LRUCacheLoRAModelManager(model, config)
    for id_ in (1, 2, 3):
        manager.add_adapter(_adapter(id_))
    engine = Engine(
        model,
        manager,
        max_num_seqs=2,
        max_model_len=16,
        eos_ids=[],
        prefill_lengths=[8],
    )
    names = (None, "a1", "a2", "a3")
    requests = [
        GenerationRequest(f"{lora}-{i}", prompt, max_tokens=TOKENS, lora=lora)
        for i, prompt in enumerate(PROMPTS)
        for lora in names
    ]
    results = engine.generate(requests)
    with CompilationCounter() as counter:
        again = engine.generate(requests[::-1])
    assert counter.programs == []
    answers = [result.token_ids for result in results]
    assert [result.token_ids for result in again[::-1]] == answers
    return answers


def test_two_devices_generate_the_tokens_of_one():
    expected = _answers(0)
    assert len(set(expected)) > len(expected) // 2
    assert _answers(2) == expected
