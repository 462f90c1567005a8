"""The compilation counter."""

import jax
import jax.numpy as jnp

from lora_jax.serving.compilations import CompilationCounter


def test_it_counts_new_programs_and_only_those():
    program = jax.jit(lambda x: x * 3 + 1)
    x, y = jnp.ones(3), jnp.ones(5)
    with CompilationCounter() as counter:
        program(x)
        first = counter.count
        program(x)
        assert counter.count == first
        program(y)
    assert first >= 1
    assert counter.count > first
    assert counter.seconds > 0
    assert len(counter.programs) == counter.count
    after = counter.count
    program(jnp.ones(7))
    assert counter.count == after
