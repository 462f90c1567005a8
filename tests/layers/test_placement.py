"""Slots of layers whose kernels are cut over devices, against the same on one."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from lora_jax import LoRAConfig, LoRAMapping, LRUCacheLoRAModelManager
from lora_jax.adapters import Adapter, DoRA, LoRABias, LowRank, Report
from lora_jax.errors import ConfigError, ModelError
from lora_jax.forward import forward, merge, split
from lora_jax.models.linear import FusedLinear

RANK, SLOTS, ROWS = 4, 3, 12
TOLERANCE = {"atol": 2e-5, "rtol": 2e-5}
UNEQUAL = (("q_proj", 8), ("k_proj", 4), ("v_proj", 4))
P = PartitionSpec


class Model(nnx.Module):
    """One layer, on a mesh."""

    packed_modules_mapping = {"proj": ("q_proj", "k_proj", "v_proj")}  # noqa: RUF012

    def __init__(self, layer, mesh=None, spec=None):
        self.proj = layer
        if mesh is not None:
            for variable in (layer.kernel, *([layer.bias] if layer.bias else [])):
                own = spec if variable is layer.kernel else P()
                value = variable.get_value()
                variable.set_value(jax.device_put(value, NamedSharding(mesh, own)))

    def __call__(self, x):
        return self.proj(x)


@dataclass(frozen=True)
class Case:
    """A layer, where its kernel is cut, and which axis of A and of B is then.

    `a`, `b`: axes of `(slots, parts, rank, d_in)` and `(slots, rank, d_out)`, None:
    whole; `full` the same of fully sharded slots.
    """

    make: object
    spec: P
    inputs: tuple[int, ...]
    cut: tuple[int | None, int | None]
    full: tuple[int | None, int | None]


def linear(d_in, d_out, **options):
    return lambda: nnx.Linear(d_in, d_out, rngs=nnx.Rngs(0), **options)


def einsum(equation, shape):
    return lambda: nnx.Einsum(equation, shape, rngs=nnx.Rngs(0))


def fused():
    return FusedLinear(8, UNEQUAL, use_bias=False, dtype="float32", rngs=nnx.Rngs(0))


CASES = {
    "column": Case(linear(8, 12), P(None, "t"), (8,), (None, 2), (2, 2)),
    "row": Case(linear(8, 12), P("t"), (8,), (3, None), (3, 2)),
    "row, odd width": Case(linear(8, 6), P("t"), (8,), (3, None), (3, None)),
    "whole": Case(linear(8, 12), P(), (8,), (None, None), (None, None)),
    "fused, unequal": Case(fused, P(None, "t"), (8,), (None, 2), (2, 2)),
    "fused row": Case(fused, P("t", None), (8,), (3, None), (3, 2)),
    "heads out": Case(
        einsum("BTD,DNH->BTNH", (8, 4, 3)), P(None, "t"), (8,), (None, 2), (2, 2)
    ),
    "heads in": Case(
        einsum("BTNH,NHD->BTD", (4, 2, 12)), P("t"), (4, 2), (3, None), (3, 2)
    ),
    "heads first": Case(
        einsum("BTD,NDH->BTNH", (4, 8, 3)), P("t"), (8,), (None, 2), (2, 2)
    ),
    "inside heads": Case(
        einsum("BTD,DNH->BTNH", (8, 3, 4)),
        P(None, None, "t"),
        (8,),
        (None, None),
        (None, None),
    ),
    "general": Case(
        lambda: nnx.LinearGeneral((4, 2), 12, axis=(-2, -1), rngs=nnx.Rngs(0)),
        P("t"),
        (4, 2),
        (3, None),
        (3, 2),
    ),
}


GRID = [
    *((name, 4) for name in CASES),
    *((name, 2) for name in ("column", "row", "fused, unequal", "heads in")),
]


def mesh(devices):
    return Mesh(np.array(jax.devices()[:devices]), ("t",))


def adapters(model):
    """Pairs of ranks 1 and 4, and one with a bias, or DoRA where it is possible."""
    manager = LRUCacheLoRAModelManager(Model(model), LoRAConfig(max_lora_rank=RANK))
    site = manager.sites["proj"].lora_site
    children = [c for c, _ in site.parts] if len(site.parts) > 1 else ["proj"]
    found = []
    for number, rank in enumerate((1, RANK, 2), start=1):
        rng = np.random.default_rng(number)
        parts = {}
        for child, width in zip(children, site.part_widths, strict=True):
            a = rng.normal(0, 0.4, (rank, site.d_in)).astype("f4")
            b = rng.normal(0, 0.4, (width, rank)).astype("f4")
            part = LowRank(a, b, 1.5)
            if number == 3:
                magnitude = 1 + rng.random(width).astype("f4")
                is_dora = site.shape.kernel_in_order
                part = DoRA(part, magnitude) if is_dora else part
                part = part if is_dora else LoRABias(part, magnitude)
            parts[child] = part
        if number == 2:
            parts.pop("k_proj", None)
        report = Report((), (), 0)
        found.append(Adapter(f"a{number}", number, parts, str(number), report))
    return found


def served(case, devices, *, full=False):
    """A model, its manager with a batch of all adapters, and its base outputs."""
    over = None if not devices else mesh(devices)
    model = Model(case.make(), over, case.spec)
    config = LoRAConfig(
        max_loras=SLOTS, max_lora_rank=RANK, fully_sharded_loras=bool(full)
    )
    manager = LRUCacheLoRAModelManager(model, config)
    for adapter in adapters(case.make()):
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter.id)
    manager.set_adapter_mapping(LoRAMapping([row % 4 for row in range(ROWS)], []))
    return model, manager


def inputs(case):
    rng = np.random.default_rng(9)
    return jnp.asarray(rng.normal(size=(2, ROWS // 2, *case.inputs)), jnp.float32)


@pytest.mark.parametrize("full", [False, True], ids=["", "full"])
@pytest.mark.parametrize(("name", "devices"), GRID)
def test_a_batch_on_devices_is_the_batch_on_one(name, devices, full):
    case, x = CASES[name], inputs(CASES[name])
    single, _ = served(case, 0)
    expected = np.asarray(single(x))
    model, manager = served(case, devices, full=full)
    graphdef, weights = split(model)
    step = jax.jit(forward, static_argnums=0)
    jitted = step(graphdef, weights, manager.bank, manager.routing, x)
    base = step(graphdef, weights, manager.bank, {}, x)
    for found in (np.asarray(jitted), np.asarray(model(x))):
        np.testing.assert_allclose(found, expected, **TOLERANCE)
    plain = np.arange(ROWS) % 4 == 0
    by_row = [np.asarray(v).reshape(ROWS, -1) for v in (jitted, base)]
    np.testing.assert_array_equal(by_row[0][plain], by_row[1][plain])
    assert np.abs(by_row[0] - by_row[1])[~plain].max(axis=1).min() > 1e-3
    eager, alone = np.asarray(model(x)), Model(case.make(), mesh(devices), case.spec)(x)
    own = np.asarray(alone).reshape(ROWS, -1)
    np.testing.assert_array_equal(eager.reshape(ROWS, -1)[plain], own[plain])


@pytest.mark.parametrize("full", [False, True], ids=["", "full"])
@pytest.mark.parametrize(("name", "devices"), GRID)
def test_each_device_holds_its_share(name, devices, full):
    case = CASES[name]
    _, manager = served(case, devices, full=full)
    arrays = dict(manager.bank.arrays["proj"])
    cut = dict(zip("ab", case.full if full else case.cut, strict=True))
    outputs = case.cut[1] is not None
    cut |= {"bias": 1 if outputs else None, "gain": 1 if outputs else None}
    for key, array in arrays.items():
        expected = list(array.shape)
        if cut.get(key) is not None:
            expected[cut[key]] //= devices
        shards = array.addressable_shards
        assert {shard.data.shape for shard in shards} == {tuple(expected)}, key
        assert len(shards) == devices
    assert {"scale", "rank", "a", "b"} < set(arrays)
    memory = manager.memory()
    each = sum(array.addressable_shards[0].data.nbytes for array in arrays.values())
    assert memory.each_device == each


@pytest.mark.parametrize("name", ["column", "row", "fused, unequal", "heads out"])
def test_gradients_of_the_slots_are_those_of_one_device(name):
    case, x = CASES[name], inputs(CASES[name])
    found = []
    for devices, full in ((0, False), (4, False), (4, True)):
        model, manager = served(case, devices, full=full)
        graphdef, weights = split(model)

        def loss(bank, graphdef=graphdef, weights=weights, manager=manager):
            merged = merge(graphdef, weights, bank, manager.routing)
            return jnp.sum(jnp.sin(merged(x)))

        grad = jax.jit(jax.grad(loss, allow_int=True))(manager.bank)
        found.append(grad.arrays["proj"])
    for key in ("a", "b", "scale"):
        expected = np.asarray(found[0][key])
        assert np.abs(expected).max() > 1e-3
        for ours in found[1:]:
            np.testing.assert_allclose(ours[key], expected, atol=1e-4, rtol=1e-3)


def test_a_kernel_that_is_cut_along_both_axes():
    both = Mesh(np.array(jax.devices()[:4]).reshape(2, 2), ("i", "o"))
    case = Case(linear(8, 12), P("i", "o"), (8,), (None, None), (None, None))
    expected = np.asarray(served(case, 0)[0](inputs(case)))
    for full, rank in ((False, RANK), (True, RANK // 2)):
        model = Model(case.make(), both, case.spec)
        config = LoRAConfig(max_loras=1, max_lora_rank=RANK, fully_sharded_loras=full)
        manager = LRUCacheLoRAModelManager(model, config)
        a, b = (manager.bank.arrays["proj"][key] for key in "ab")
        assert a.addressable_shards[0].data.shape == (1, 1, rank, 4)
        assert b.addressable_shards[0].data.shape == (1, RANK, 6)
        manager.add_adapter(adapters(case.make())[1])
        manager.activate_adapter(2)
        manager.set_adapter_mapping(
            LoRAMapping([2 * (r % 4 == 2) for r in range(12)], [])
        )
        rows = np.asarray(model(inputs(case))).reshape(ROWS, -1)
        chosen = np.isin(np.arange(ROWS) % 4, (0, 2))
        own = expected.reshape(ROWS, -1)
        np.testing.assert_allclose(rows[chosen], own[chosen], **TOLERANCE)


def test_the_rank_must_be_a_multiple_of_the_devices():
    config = LoRAConfig(max_lora_rank=6, fully_sharded_loras=True)
    text = r"proj: .* over 4 devices \(mesh axis 't'\).* multiple of 4, got 6"
    with pytest.raises(ConfigError, match=text):
        LRUCacheLoRAModelManager(Model(linear(8, 12)(), mesh(4), P(None, "t")), config)
    row = Model(linear(8, 12)(), mesh(4), P("t"))
    assert LRUCacheLoRAModelManager(row, config).sites


def test_meshes_that_cannot_be_computed_on_are_refused():
    kinds = jax.make_mesh((2,), ("t",), (AxisType.Explicit,), devices=jax.devices()[:2])
    model = Model(linear(8, 12)(), kinds, P(None, "t"))
    with pytest.raises(ModelError, match=r"mesh axes \['t'\], whose type is not"):
        LRUCacheLoRAModelManager(model, LoRAConfig())
    layers = [Model(linear(8, 12)(), mesh(n), P(None, "t")) for n in (2, 4)]
    with pytest.raises(ModelError, match=r"lie on 2 meshes: .*put all of them on one"):
        LRUCacheLoRAModelManager(nnx.List(layers), LoRAConfig())
