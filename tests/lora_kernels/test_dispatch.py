"""Which implementation runs where: arrays are not always on JAX's default backend."""

import sys
from types import ModuleType

import jax
import jax.numpy as jnp
import pytest

from lora_kernels.dispatch import first_accepting, names_to_try

TABLE = {"triton": "fake_gpu", "picky": "fake_picky", "xla": "fake_xla"}


def of_gpu(x):
    return jax.ffi.ffi_call("of_no_cpu", jax.ShapeDtypeStruct(x.shape, x.dtype))(x)


def picky(x):
    raise NotImplementedError("never")


@pytest.fixture(autouse=True)
def modules(monkeypatch):
    functions = {"fake_gpu": of_gpu, "fake_picky": picky, "fake_xla": jnp.negative}
    for name, function in functions.items():
        module = ModuleType(name)
        module.op = function
        monkeypatch.setitem(sys.modules, name, module)


def chosen_and_jitted(names):
    choices = []

    @jax.jit
    def op(x):
        choice, out = first_accepting(names, TABLE, "op", lambda function: function(x))
        choices.append(choice)
        return out

    return choices, op


@pytest.mark.parametrize("names", [("triton", "xla"), ("picky", "triton", "xla")])
def test_arrays_on_a_cpu_take_the_next_implementation_that_runs_there(names):
    choices, op = chosen_and_jitted(names)
    x = jax.device_put(jnp.arange(3.0), jax.devices("cpu")[1])
    assert op(x).tolist() == [0.0, -1.0, -2.0]
    assert choices[0].name == "triton"
    gpu = op.trace(x).lower(lowering_platforms=("cuda",)).as_text()
    assert "of_no_cpu" in gpu
    assert "negate" not in gpu
    assert "of_no_cpu" not in op.lower(x).as_text()


def test_an_implementation_asked_for_alone_is_not_replaced():
    _, op = chosen_and_jitted(("triton",))
    assert "of_no_cpu" in op.lower(jnp.arange(3.0)).as_text()


def test_all_refusals_are_told():
    with pytest.raises(
        NotImplementedError, match=r"op: no implementation.*\n  picky: n"
    ):
        first_accepting(("picky",), TABLE, "op", lambda function: function(jnp.ones(3)))


def test_the_default_device_decides_what_is_tried():
    order = ("triton", "mosaic_gpu", "xla")

    def tried(implementation=None):
        table = dict.fromkeys(order, "")
        return names_to_try(implementation, default=order, table=table)

    assert tried() == order
    for device in ("cpu", jax.devices("cpu")[0]):
        with jax.default_device(device):
            assert tried() == ("xla",)
            assert tried("triton") == ("triton",)
    with jax.default_device("gpu"):
        assert tried() == order
