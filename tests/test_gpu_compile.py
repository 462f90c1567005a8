"""Compiles every kernel that can be chosen for GPUs that need not be there.

Nothing runs: what is asserted is what the compilers report. A table is printed at the
end (`-s` shows it while the tests run).
"""

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from gpu_cases import DECODE, PREFILL, Case
from gpu_checks import check_kernels, copies_of, print_table
from lora_jax import bank as banks
from lora_jax.bank import empty_bank
from lora_jax.config import LoRAConfig
from lora_jax.forward import merge, split
from lora_jax.layers import wrap
from lora_jax.models import CausalLM, config_from_dict, empty_cache
from lora_jax.routing import routing_from_slots
from lora_jax.staging import buffer_shapes
from lora_kernels import make_routing
from lora_kernels.gpu_targets.compile_only import compile_for, compile_with_thunks
from lora_kernels.lora_delta import api, lora_delta

pytestmark = pytest.mark.gpu_compile

# H100 and H200 differ in nothing that a kernel is compiled for.
TARGETS = ("a100", "h200")
"""An H100 is an H200 with other memory: the same tiles, the same code."""


@pytest.fixture(scope="module")
def table():
    rows = []
    yield rows
    print_table(rows)


def call(case: Case, implementation: str = "triton"):
    def function(arguments):
        rest = dict(arguments)
        routing = make_routing(rest.pop("slot"), case.slots)
        x, y, a, b = (rest.pop(name) for name in "xyab")
        return lora_delta(
            x,
            y,
            a,
            b,
            **rest,
            routing=routing,
            part_widths=case.part_widths,
            implementation=implementation,
        )

    return function


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", DECODE, ids=lambda case: case.name)
def test_every_decode_choice_compiles(target, case, table):
    assert check_kernels(target, case, call(case), table) == ["decode_kernel"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", PREFILL, ids=lambda case: case.name)
def test_every_prefill_choice_compiles(target, case, table):
    names = check_kernels(target, case, call(case), table)
    assert names == ["expand_kernel", "shrink_kernel"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", PREFILL, ids=lambda case: case.name)
def test_every_gradient_compiles(target, case, table):
    # Imported here: Triton is there only where these tests run, pytest collects all.
    from lora_kernels.lora_delta.triton_backward import lora_delta_backward

    def gradients(arguments):
        rest = dict(arguments)
        routing = make_routing(rest.pop("slot"), case.slots)
        x, y, a, b = (rest.pop(name) for name in "xyab")
        return lora_delta_backward(
            x, y, a, b, **rest, routing=routing, part_widths=case.part_widths
        )

    names = check_kernels(target, case, gradients, table)
    assert set(names) == {"expand_kernel", "grouped_kernel", "shrink_kernel"}


@pytest.mark.parametrize("max_rank", [16, 80])
@pytest.mark.parametrize("tokens", [32, 600], ids=["decode", "prefill"])
@pytest.mark.parametrize("widths", [(4096, 1024, 1024), (64,)], ids=str)
def test_mosaic_gpu_compiles(tokens, max_rank, widths):
    case = Case("", tokens, max_rank, 4096, widths, "bfloat16")
    compiled = compile_for("h200", call(case, "mosaic_gpu"), case.arguments)
    assert compiled.as_text().count("mosaic_gpu") >= 2


def test_a_decode_site_is_one_launch_without_temporaries():
    case = Case("", 32, 16, 4096, (4096, 1024, 1024), "bfloat16", slots=32)
    routing = jax.eval_shape(
        lambda slot: make_routing(slot, 32), case.arguments["slot"]
    )

    def site(arguments, routing):
        rest = {name: arguments[name] for name in ("scale", "rank")}
        arrays = (arguments[name] for name in "xyab")
        return lora_delta(
            *arrays,
            **rest,
            routing=routing,
            part_widths=case.part_widths,
            implementation="triton",
        )

    compiled, thunks = compile_with_thunks("h200", site, case.arguments, routing)
    # y is not donated, so it is copied once to be added into.
    assert sorted(thunk.kind for thunk in thunks) == ["kCopy", "kCustomCall"]
    assert compiled.memory_analysis().temp_size_in_bytes < 1024


LAYERS, ROWS, SLOTS = 32, 32, 32

LLAMA_3_8B = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
}

PROJECTIONS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"]


@pytest.fixture(scope="module")
def llama():
    """The model's graph, and its weights and bank as shapes."""
    config = config_from_dict(LLAMA_3_8B, origin="test")
    model = nnx.eval_shape(
        lambda: CausalLM(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    )
    targets = [*PROJECTIONS, "down_proj"]
    sites = wrap(
        model, LoRAConfig(max_lora_rank=16, max_loras=SLOTS, target_modules=targets)
    )
    bank = jax.eval_shape(lambda: empty_bank(sites, SLOTS, jnp.dtype("bfloat16")))
    return config, *split(model), bank


def test_lora_adds_at_most_128_launches_to_a_decode_step(llama, monkeypatch):
    config, graphdef, weights, bank = llama
    # The order of a GPU, for the CPU that traces.
    monkeypatch.setattr(api, "DEFAULT_ORDER", {"cpu": api.DEFAULT_ORDER["gpu"]})

    def step(weights, bank, cache, tokens, positions, slots):
        routing = routing_from_slots(slots, SLOTS)
        model = merge(graphdef, weights, bank, routing)
        hidden, cache = model.decode(tokens, positions, cache)
        return model.logits(hidden), cache

    cache = jax.eval_shape(lambda: empty_cache(config, ROWS, 1024, jnp.bfloat16))
    rows = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    compiled, thunks = compile_with_thunks(
        "h200", step, weights, bank, cache, rows, rows, rows, donate=(2,)
    )
    ours = [thunk for thunk in thunks if thunk.kind == "kCustomCall"]
    print(f"\ndecode step: {len(thunks)} launches, {len(ours)} of LoRA")
    assert len(ours) == 4 * LAYERS
    assert all(thunk.captured for thunk in thunks)
    assert not copies_of(bank, compiled.as_text())


def test_a_slot_is_written_in_place(llama):
    *_, bank = llama
    staged = {
        name: jax.ShapeDtypeStruct(shape, name)
        for name, shape in buffer_shapes(banks.bank_layout(bank)).items()
    }
    slot = jax.ShapeDtypeStruct((), jnp.int32)
    compiled, thunks = compile_with_thunks(
        "h200", banks._write_slot, bank, slot, staged, donate=(0,)
    )
    memory = compiled.memory_analysis()
    print(f"\nslot write: {len(thunks)} launches")
    pointers = 8 * (len(jax.tree.leaves(bank)) + 1)
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes <= pointers
    assert not copies_of(bank, compiled.as_text())
