"""Compiles grouped_dot for GPUs that need not be there, alone and in a whole layer.

Nothing runs: what is asserted is what the compilers report.
"""

import math
import re

import jax
import jax.numpy as jnp
import pytest

from gpu_checks import check_kernels, copies_of
from grouped_gpu_cases import CASES
from lora_kernels import grouped_dot, make_routing
from lora_kernels.gpu_targets.compile_only import compile_for, compile_with_thunks

pytestmark = pytest.mark.gpu_compile

# H100 and H200 differ in nothing that a kernel is compiled for.
TARGETS = ("a100", "h200")


def product(case):
    def function(arguments):
        pairs = make_routing(arguments["group"], case.groups)
        return grouped_dot(
            arguments["x"], arguments["kernel"], pairs, implementation="triton"
        )

    return function


def gradients(case):
    # Imported here: Triton is there only where these tests run, pytest collects all.
    from lora_kernels.grouped_dot.triton_backward import grouped_dot_backward

    def function(arguments):
        x, g, kernel = (arguments[name] for name in ("x", "g", "kernel"))
        pairs = make_routing(arguments["group"], case.groups)
        return grouped_dot_backward(x, g, kernel, pairs)

    return function


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_choice_compiles(target, case, record_property):
    assert check_kernels(target, case, product(case), record_property) == [
        "product_kernel"
    ]
    names = check_kernels(target, case, gradients(case), record_property)
    assert names == ["gradient_kernel", "product_kernel"]


EXPERTS, CHOSEN, D, INNER = 128, 8, 2048, 768
"""A layer of Qwen3-30B-A3B."""


def layer(implementation):
    def function(x, router, gate_up, down):
        chosen_weight, chosen = jax.lax.top_k(x @ router, CHOSEN)
        pairs = make_routing(chosen.reshape(-1), EXPERTS)
        call = dict(implementation=implementation)
        h = grouped_dot(x, gate_up, pairs, **call)
        h = jax.nn.silu(h[:, :INNER]) * h[:, INNER:]
        y = grouped_dot(h, down, pairs, **call).reshape(-1, CHOSEN, D)
        weight = jax.nn.softmax(chosen_weight.astype(jnp.float32))
        return jnp.einsum("tkd,tk->td", y.astype(jnp.float32), weight)

    return function


def layer_arguments(tokens):
    shapes = [(tokens, D), (D, EXPERTS), (EXPERTS, D, 2 * INNER), (EXPERTS, INNER, D)]
    return [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]


def expanded(hlo, tokens):
    """Shapes in a program of at least tokens x experts x the narrowest width."""
    given = {f"[{EXPERTS},{D},{2 * INNER}]", f"[{EXPERTS},{INNER},{D}]"}
    shapes = set(re.findall(r"\b(?:bf16|f32)(\[[\d,]+\])", hlo)) - given
    size = {shape: math.prod(map(int, shape[1:-1].split(","))) for shape in shapes}
    return {shape for shape in shapes if size[shape] >= tokens * EXPERTS * INNER}


@pytest.mark.parametrize("tokens", [8, 512])
def test_a_layer_of_experts_is_two_launches_and_expands_nothing(tokens):
    arguments = layer_arguments(tokens)
    compiled, thunks = compile_with_thunks("h200", layer("triton"), *arguments)
    ours = [thunk for thunk in thunks if thunk.kind == "kCustomCall"]
    print(f"\n{tokens} tokens: {len(thunks)} launches, {len(ours)} of grouped_dot")
    assert len(ours) == 2
    assert all(thunk.captured for thunk in ours)
    hlo = compiled.as_text()
    assert not expanded(hlo, tokens)
    assert not copies_of(arguments[2:], hlo)
    # What passes between the two products, and lists of pairs: no kernel is copied.
    between = tokens * CHOSEN * (2 * INNER + INNER + D) * 2
    assert compiled.memory_analysis().temp_size_in_bytes < 3 * between + 2**20


@pytest.mark.parametrize("tokens", [8, 512])
def test_without_triton_a_layer_copies_few_kernels_at_once(tokens):
    from lora_kernels.grouped_dot.xla_forms import GATHERED_BYTES

    arguments = layer_arguments(tokens)
    compiled = compile_for("h200", layer("xla"), *arguments)
    pairs_bytes = tokens * CHOSEN * (2 * INNER + D) * 4
    limit = 2 * GATHERED_BYTES + 20 * pairs_bytes + 2**20
    assert compiled.memory_analysis().temp_size_in_bytes < limit


def test_the_check_for_an_expansion_finds_the_one_of_ragged_dot():
    tokens = 512

    def ragged(x, kernel, group):
        pairs = make_routing(group, EXPERTS)
        rows = x[pairs.order // CHOSEN]
        return jax.lax.ragged_dot(rows, kernel, pairs.counts)

    x, _, kernel, _ = layer_arguments(tokens)
    group = jax.ShapeDtypeStruct((tokens * CHOSEN,), jnp.int32)
    compiled = compile_for("h200", ragged, x, kernel, group)
    assert expanded(compiled.as_text(), tokens)
