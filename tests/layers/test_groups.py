"""A projection of four parts whose adapters name one, some, or all of them."""

import itertools
from typing import ClassVar

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_jax import LoRAConfig, LoRAMapping, LoRAModelManager
from lora_jax.adapters import Adapter, DoRA, adapter_from_tensors
from lora_jax.errors import AdapterError
from lora_jax.layers import wrap
from lora_jax.layers.sites import Target
from lora_jax.models.linear import FusedLinear

WIDTH = 8
PARTS = (("in_proj_q", 4), ("in_proj_k", 4), ("in_proj_v", 6), ("in_proj_z", 6))
"""As in Qwen3-Next, values and gates are wider than keys."""

COLUMNS = {
    "in_proj_q": (0, 4),
    "in_proj_k": (4, 8),
    "in_proj_v": (8, 14),
    "in_proj_z": (14, 20),
    "in_proj_qkv": (0, 14),
    "in_proj_qkvz": (0, 20),
    "gate": (14, 20),
}
"""Name in an adapter -> first column and the one after the last."""

TOLERANCE = 1e-5


class Mixer(nnx.Module):
    def __init__(self):
        self.in_proj_qkvz = FusedLinear(
            WIDTH, PARTS, use_bias=True, dtype="float32", rngs=nnx.Rngs(0)
        )

    def __call__(self, x):
        return self.in_proj_qkvz(x)


class Model(nnx.Module):
    packed_modules_mapping: ClassVar = {
        "in_proj_qkvz": ("in_proj_q", "in_proj_k", "in_proj_v", "in_proj_z"),
        "in_proj_qkv": ("in_proj_q", "in_proj_k", "in_proj_v"),
        "gate": ("in_proj_z",),
        "gate_up_proj": ("gate_proj", "up_proj"),
    }

    def __init__(self):
        self.linear_attn = Mixer()

    def __call__(self, x):
        return self.linear_attn(x)


CASES = {
    "each part": {"in_proj_q": 1, "in_proj_k": 3, "in_proj_v": 2, "in_proj_z": 5},
    "a group and the rest": {"in_proj_qkv": 3, "in_proj_z": 2},
    "a group alone": {"in_proj_qkv": 4},
    "the last alone": {"in_proj_z": 1},
    "a part by another name": {"in_proj_qkv": 2, "gate": 3},
    "all as one": {"in_proj_qkvz": 5},
    "two of four": {"in_proj_k": 2, "in_proj_z": 4},
}
"""Name -> module -> rank."""


def _adapter(number: int, ranks: dict[str, int]) -> Adapter:
    rng = np.random.default_rng(number)
    tensors = {}
    for name, rank in ranks.items():
        start, stop = COLUMNS[name]
        key = f"base_model.model.linear_attn.{name}"
        a, b = rng.normal(size=(rank, WIDTH)), rng.normal(size=(stop - start, rank))
        tensors[f"{key}.lora_A.weight"] = a.astype("f4")
        tensors[f"{key}.lora_B.weight"] = b.astype("f4")
    config = {"peft_type": "LORA", "r": 1, "lora_alpha": 1, "target_modules": ["q"]}
    config["rank_pattern"] = config["alpha_pattern"] = ranks
    return adapter_from_tensors(tensors, config, name=f"a{number}", adapter_id=number)


def _merged(adapter: Adapter | None, x: np.ndarray) -> np.ndarray:
    layer = Model().linear_attn.in_proj_qkvz
    kernel = np.array(layer.kernel[...], np.float64)
    for module, part in ({} if adapter is None else adapter.parts).items():
        start, stop = COLUMNS[module.rpartition(".")[2]]
        pair = part.update if isinstance(part, DoRA) else part
        kernel[:, start:stop] += pair.scale * (pair.b.astype("f8") @ pair.a).T
        if isinstance(part, DoRA):
            norm = np.linalg.norm(kernel[:, start:stop], axis=0)
            kernel[:, start:stop] *= part.magnitude / norm
    return x @ kernel


def _served(adapters: list[Adapter]) -> tuple[np.ndarray, list[np.ndarray]]:
    """What a batch of one base row and one row for each adapter gives, and should."""
    x = np.random.default_rng(0).normal(size=(len(adapters) + 1, WIDTH)).astype("f4")
    config = LoRAConfig(max_loras=len(adapters), max_lora_rank=5)
    manager = LoRAModelManager(Model(), config)
    for adapter in adapters:
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter.id)
    ids = [0, *(adapter.id for adapter in adapters)]
    manager.set_adapter_mapping(LoRAMapping(ids, ids))
    wanted = [_merged(adapter, x) for adapter in (None, *adapters)]
    for left, right in itertools.combinations(wanted, 2):
        assert np.abs(left - right).max(axis=-1).min() > 10 * TOLERANCE
    return np.asarray(manager.model(jnp.asarray(x))), wanted


def test_every_way_of_naming_the_parts_in_one_batch():
    adapters = [_adapter(n, ranks) for n, ranks in enumerate(CASES.values(), start=1)]
    got, wanted = _served(adapters)
    for row, outputs in enumerate(wanted):
        np.testing.assert_allclose(got[row], outputs[row], atol=TOLERANCE, rtol=0)


def test_dora_of_a_group_has_the_length_of_each_of_its_columns():
    adapter = _adapter(1, {"in_proj_qkv": 3})
    (module, pair), *_ = adapter.parts.items()
    magnitude = np.linspace(0.5, 2.0, 14, dtype=np.float32)
    object.__setattr__(adapter, "parts", {module: DoRA(pair, magnitude)})
    got, wanted = _served([adapter])
    np.testing.assert_allclose(got[1], wanted[1][1], atol=TOLERANCE, rtol=0)


def test_groups_are_names_of_their_parts():
    targets = wrap(Model(), LoRAConfig()).targets
    site = "linear_attn.in_proj_qkvz"
    assert {
        name.rpartition(".")[2]: target.part for name, target in targets.items()
    } == {
        "in_proj_qkvz": None,
        "in_proj_qkv": (0, 1, 2),
        "gate": (3,),
        "in_proj_q": 0,
        "in_proj_k": 1,
        "in_proj_v": 2,
        "in_proj_z": 3,
    }
    assert targets["linear_attn.in_proj_qkv"] == Target(site, (0, 1, 2))


@pytest.mark.parametrize("target", ["in_proj_qkv", "linear_attn.gate", "in_proj_v"])
def test_a_group_is_a_target_module(target):
    sites = wrap(Model(), LoRAConfig(target_modules=[target]))
    assert list(sites) == ["linear_attn.in_proj_qkvz"]


@pytest.mark.parametrize(
    "names", [("in_proj_qkv", "in_proj_k"), ("in_proj_qkvz", "gate")]
)
def test_two_modules_with_a_part_in_common_are_refused(names):
    manager = LoRAModelManager(Model(), LoRAConfig())
    with pytest.raises(AdapterError, match="another module of the file has this place"):
        manager.add_adapter(_adapter(1, dict.fromkeys(names, 1)))


def test_a_group_of_another_width_is_refused():
    layer = wrap(Model(), LoRAConfig())["linear_attn.in_proj_qkvz"]
    pair = _adapter(1, {"in_proj_qkv": 2}).parts["linear_attn.in_proj_qkv"]
    assert layer.faults((0, 1), pair) == [
        "lora_B has output width 14, the layer has 8."
    ]
