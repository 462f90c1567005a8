"""Compiles every kernel that can be chosen for GPUs that need not be there.

Nothing runs: what is asserted is what the compilers report. A run prints at its end a
table of the kernels, and what whole programs launch.
"""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import pytest
from flax import nnx

from gpu_cases import DECODE, DECODE_MIXED, PREFILL, PREFILL_MIXED, Case
from gpu_checks import check_kernels, check_mosaic_kernels, copies_of
from gpu_report import LINE
from lora_jax import bank as banks
from lora_jax.bank import empty_bank
from lora_jax.config import LoRAConfig
from lora_jax.forward import merge, split
from lora_jax.layers import wrap
from lora_jax.models import CausalLM, config_from_dict, empty_cache
from lora_jax.routing import routing_from_slots
from lora_jax.staging import buffer_shapes
from lora_kernels import make_routing
from lora_kernels.gpu_targets.compile_only import compile_with_thunks
from lora_kernels.lora_delta import api, lora_delta

pytestmark = pytest.mark.gpu_compile

TARGETS = ("a100", "h200")
"""An H100 is an H200 with other memory: the same tiles, the same code (test_tiles)."""


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
@pytest.mark.parametrize("implementation", ["triton", "triton_invariant"])
@pytest.mark.parametrize("case", DECODE + DECODE_MIXED, ids=lambda case: case.name)
def test_every_decode_choice_compiles(target, case, implementation, record_property):
    function = call(case, implementation)
    names = check_kernels(target, case, function, record_property)
    assert names == ["decode_kernel"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", PREFILL + PREFILL_MIXED, ids=lambda case: case.name)
def test_every_prefill_choice_compiles(target, case, record_property):
    names = check_kernels(target, case, call(case), record_property)
    assert names == ["expand_kernel", "shrink_kernel"]


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", PREFILL + PREFILL_MIXED, ids=lambda case: case.name)
def test_every_gradient_compiles(target, case, record_property):
    # Imported here: Triton is there only where these tests run, pytest collects all.
    from lora_kernels.lora_delta.triton_backward import lora_delta_backward

    def gradients(arguments):
        rest = dict(arguments)
        routing = make_routing(rest.pop("slot"), case.slots)
        x, y, a, b = (rest.pop(name) for name in "xyab")
        return lora_delta_backward(
            x, y, a, b, **rest, routing=routing, part_widths=case.part_widths
        )

    names = check_kernels(target, case, gradients, record_property)
    assert set(names) == {"expand_kernel", "grouped_kernel", "shrink_kernel"}


@pytest.mark.parametrize("max_rank", [16, 80])
@pytest.mark.parametrize("tokens", [32, 600], ids=["decode", "prefill"])
@pytest.mark.parametrize("widths", [(4096, 1024, 1024), (64,)], ids=str)
def test_mosaic_gpu_compiles(tokens, max_rank, widths, record_property):
    name = f"{tokens}-{max_rank}-{len(widths)}"
    case = Case(name, tokens, max_rank, 4096, widths, "bfloat16")
    function = call(case, "mosaic_gpu")
    assert check_mosaic_kernels("h200", case, function, record_property) == 2


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
def config():
    return config_from_dict(LLAMA_3_8B, origin="test")


def model_of(config):
    return nnx.eval_shape(
        lambda: CausalLM(config, dtype=jnp.bfloat16, rngs=nnx.Rngs(0))
    )


@pytest.fixture(scope="module")
def llama(config):
    """The model's graph, and its weights and bank as shapes."""
    model = model_of(config)
    targets = [*PROJECTIONS, "down_proj"]
    sites = wrap(
        model, LoRAConfig(max_lora_rank=16, max_loras=SLOTS, target_modules=targets)
    )
    bank = jax.eval_shape(lambda: empty_bank(sites, SLOTS, jnp.dtype("bfloat16")))
    return *split(model), bank


def compiled_step(config, model_with, *arguments):
    """A decode step of `model_with(*arguments, slots)`, compiled, and its launches."""

    def step(cache, tokens, positions, slots, *arguments):
        model = model_with(*arguments, slots)
        hidden, cache = model.decode(tokens, positions, cache)
        return model.logits(hidden), cache

    cache = jax.eval_shape(lambda: empty_cache(config, ROWS, 1024, jnp.bfloat16))
    rows = jax.ShapeDtypeStruct((ROWS,), jnp.int32)
    return compile_with_thunks(
        "h200", step, cache, rows, rows, rows, *arguments, donate=(0,)
    )


def kinds_of(thunks):
    """How many launches have each name of XLA's, numbers cut off."""
    return Counter(re.sub(r"[\d_.]*$", "", thunk.name) for thunk in thunks)


ADDED = {"routing": 9, "layers": 111}
"""Launches of XLA's that a decode step has because of LoRA.

Routing is computed once a step: a sort, and what makes the work list of it. In each
layer a custom call reads and writes arrays, where XLA has fused what is before and
after it: the sums of products cut along their long axis (3 a layer) are no longer part
of the launch that reads them, the normed inputs (2) no longer of the product that
reads them, and 1 to 2 residual additions are now part of another launch. None of it is
computed twice, and none is a launch of ours.
"""


def test_lora_adds_at_most_128_launches_to_a_decode_step(
    config, llama, monkeypatch, record_property
):
    graphdef, weights, bank = llama
    # The order of a GPU, for the CPU that traces.
    monkeypatch.setattr(api, "DEFAULT_ORDER", {"cpu": api.DEFAULT_ORDER["gpu"]})

    def adapted(weights, bank, slots):
        return merge(graphdef, weights, bank, routing_from_slots(slots, SLOTS))

    compiled, thunks = compiled_step(config, adapted, weights, bank)
    base_graph, base_weights = nnx.split(model_of(config))
    _, base = compiled_step(
        config, lambda weights, _: nnx.merge(base_graph, weights), base_weights
    )
    ours = [thunk for thunk in thunks if thunk.kind == "kCustomCall"]
    added = kinds_of(thunks)
    added.subtract(kinds_of(base))
    difference = ", ".join(f"{name} {n:+}" for name, n in added.items() if n)
    record_property(LINE, f"decode step of LoRA: {len(ours)} launches of {len(thunks)}")
    record_property(LINE, f"decode step without: {len(base)} launches; {difference}")
    assert len(ours) == 4 * LAYERS
    assert len(thunks) - len(base) - len(ours) == sum(ADDED.values())
    assert all(thunk.captured for thunk in thunks)
    assert not copies_of(bank, compiled.as_text())


def test_a_slot_is_written_in_place(llama, record_property):
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
    temp = memory.temp_size_in_bytes
    record_property(LINE, f"slot write: {len(thunks)} launches, {temp} bytes of temp")
    pointers = 8 * (len(jax.tree.leaves(bank)) + 1)
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes <= pointers
    assert temp == 0
    assert not copies_of(bank, compiled.as_text())
