"""What JAX does to a call, compiled for GPUs that need not be there.

Every choice of tiles is compiled in `tests/test_gpu_compile.py`.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from delta_cases import TOLERANCE, call_arguments, expected, small
from gpu_cases import Case
from lora_kernels import lora_delta, make_routing
from lora_kernels.gpu_targets import building_for, described_gpu
from lora_kernels.gpu_targets.compile_only import compile_for, compile_with_thunks
from lora_kernels.lora_delta import which_implementation
from lora_kernels.lora_delta.specs import arrays_of

pytestmark = pytest.mark.gpu_compile

BACKENDS = ("triton", "mosaic_gpu")
TOKENS = {"decode": 32, "prefill": 600}
KERNEL = {"triton": "triton_kernel_call_ffi", "mosaic_gpu": "mosaic_gpu_v2"}


def case_of(tokens):
    return Case("", tokens, 16, 4096, (4096, 1024, 1024), "bfloat16")


def call(case, implementation, arguments):
    rest = dict(arguments)
    routing = make_routing(rest.pop("slot"), case.slots)
    arrays = [rest.pop(name) for name in "xyab"]
    return lora_delta(
        *arrays,
        **rest,
        routing=routing,
        part_widths=case.part_widths,
        implementation=implementation,
    )


def kernels(compiled, implementation):
    return len(re.findall(f'custom_call_target="{KERNEL[implementation]}"', compiled))


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
def test_vmap_compiles(tokens, implementation):
    case = case_of(tokens)
    batch = {
        name: jax.ShapeDtypeStruct((2, *array.shape), array.dtype)
        for name, array in case.arguments.items()
    }
    function = jax.vmap(functools.partial(call, case, implementation))
    compiled = compile_for("h200", function, batch).as_text()
    # Triton's in a loop over the batch.
    assert kernels(compiled, implementation) >= 1


@pytest.mark.parametrize("implementation", BACKENDS)
@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
def test_gradients_of_a_checkpointed_call_compile(tokens, implementation):
    case = case_of(tokens)

    def gradients(y, arguments):
        def total(y, x, a, b):
            changed = arguments | {"x": x, "y": y, "a": a, "b": b}
            site = jax.checkpoint(functools.partial(call, case, implementation))
            return jnp.sum(jnp.sin(site(changed).astype(jnp.float32)))

        return jax.grad(total, range(4))(y, *(arguments[name] for name in "xab"))

    arguments = case.arguments
    y = arguments.pop("y")
    compiled = compile_for("h200", gradients, y, arguments, donate=(0,))
    # The sine makes backward compute the forward pass again, in y's memory or not.
    assert kernels(compiled.as_text(), implementation) >= 1
    assert "input_output_alias={" in compiled.as_text()


@pytest.mark.parametrize("tokens", TOKENS.values(), ids=TOKENS)
def test_a_program_that_could_run_on_a_cpu_launches_the_same(tokens):
    case = case_of(tokens)

    def launches(implementation):
        function = functools.partial(call, case, implementation)
        compiled, thunks = compile_with_thunks("h200", function, case.arguments)
        kinds = [(thunk.kind, thunk.captured) for thunk in thunks]
        return kinds, compiled.memory_analysis().temp_size_in_bytes

    assert launches(("triton", "xla")) == launches("triton")


@pytest.mark.parametrize("first", BACKENDS)
def test_arrays_on_a_cpu_take_xla_where_there_is_a_gpu(first):
    spec = small(
        d_in=128, part_widths=(64, 128), ranks=(16, 7), max_rank=16, dtype="bfloat16"
    )
    arrays = arrays_of(spec)
    positional, keywords = call_arguments(arrays, spec.part_widths)
    positional = jax.device_put(positional, jax.devices("cpu")[1])
    order = {"implementation": (first, "xla")}

    def total(x):
        out = lora_delta(x, *positional[1:], **keywords, **order)
        return out.astype(jnp.float32).sum()

    jax.clear_caches()
    with building_for(described_gpu("h200")):
        assert which_implementation(*positional, **keywords, **order).name == first
        out = lora_delta(*positional, **keywords, **order)
        dx = jax.grad(total)(positional[0])
    jax.clear_caches()
    want = expected(arrays, spec.part_widths)
    np.testing.assert_allclose(
        np.asarray(out, np.float64), want, **TOLERANCE["bfloat16"]
    )
    assert dx.shape == arrays.x.shape


# Changed shapes or dtypes -> why Triton refuses.
REFUSALS = {
    "h": (
        {"tokens": 1_500_000, "max_rank": 512, "d_in": 576, "widths": (576, 192, 192)},
        r"h \(1, 1500000, 1536\) has 2304000000 numbers to address",
    ),
    "a": ({"d_in": 2**24, "max_rank": 128}, r"a \(1, 128, 16777216\) has 2147483648"),
    "mixed": (
        {"weight_dtype": "float16"},
        "x is bfloat16, y bfloat16, a float16 and b float16; supported: the same",
    ),
}


@pytest.mark.parametrize("fault", REFUSALS)
def test_what_is_not_supported_is_refused_by_name(fault):
    change, reason = REFUSALS[fault]
    change = {"tokens": 8, "max_rank": 16, "d_in": 64, "widths": (64,)} | change
    case = Case(
        "",
        change["tokens"],
        change["max_rank"],
        change["d_in"],
        change["widths"],
        "bfloat16",
        weight_dtype=change.get("weight_dtype", ""),
        slots=2,
    )
    arguments = case.arguments
    slot = arguments.pop("slot")
    arrays = [arguments.pop(name) for name in "xyab"]
    routing = jax.eval_shape(lambda slot: make_routing(slot, 2), slot)
    with (
        building_for(described_gpu("h200")),
        pytest.raises(NotImplementedError, match=reason),
    ):
        which_implementation(
            *arrays,
            **arguments,
            routing=routing,
            part_widths=case.part_widths,
            implementation="triton",
        )
