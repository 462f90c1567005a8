"""Which layers get a LoRA layer, under which names, and what wrapping leaves alone."""

from typing import ClassVar

import jax
import pytest
from flax import nnx

from helpers import Toy, slots_from_scratch
from lora_jax.config import LoRAConfig
from lora_jax.errors import ConfigError, ModelError
from lora_jax.layers import LoRALayer, unwrap, wrap
from lora_jax.layers.sites import Target
from lora_jax.models.linear import FusedLinear


def test_every_linear_layer_is_wrapped_once_and_keeps_its_place():
    model = Toy()
    paths = [path for path, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))]
    sites = wrap(model, LoRAConfig(max_lora_rank=8))
    assert slots_from_scratch(sites) == {
        f"blocks.{layer}.{name}": shapes
        for layer in range(2)
        for name, shapes in {
            "fc": {"a": (1, 8, 16), "b": (8, 16), "scale": (1,), "rank": (1,)},
            "o_proj": {"a": (1, 8, 20), "b": (8, 16), "scale": (1,), "rank": (1,)},
            "qkv_proj": {"a": (3, 8, 16), "b": (8, 20), "scale": (3,), "rank": (3,)},
        }.items()
    }
    assert [p for p, _ in nnx.to_flat_state(nnx.state(model, nnx.Param))] == paths
    assert isinstance(model.blocks[0].qkv_proj, FusedLinear)
    assert model.blocks[0].fc.kernel.shape == (16, 16)
    assert model.shared is model.blocks[0].fc


def test_an_alias_is_another_name_of_the_same_site():
    sites = wrap(Toy(), LoRAConfig())
    assert sites.targets["shared"] == sites.targets["blocks.0.fc"]


def test_a_fused_layer_is_reached_by_its_own_name_and_by_each_child():
    targets = wrap(Toy(), LoRAConfig()).targets
    assert targets["blocks.1.qkv_proj"] == Target("blocks.1.qkv_proj", None)
    assert targets["blocks.1.k_proj"] == Target("blocks.1.qkv_proj", 1)


def test_unwrap_restores_types_and_the_state():
    model = Toy()
    graphdef = nnx.graphdef(model)
    wrap(model, LoRAConfig())
    unwrap(model)
    assert nnx.graphdef(model) == graphdef
    assert type(model.blocks[0].fc) is nnx.Linear


def test_wrapping_again_starts_afresh():
    model = Toy()
    wrap(model, LoRAConfig(max_lora_rank=4))
    sites = wrap(model, LoRAConfig(max_lora_rank=8, target_modules=["fc"]))
    assert set(sites) == {"blocks.0.fc", "blocks.1.fc"}
    assert not isinstance(model.blocks[0].o_proj, LoRALayer)


@pytest.mark.parametrize(
    ("target_modules", "expected"),
    [
        (["o_proj"], {"blocks.0.o_proj", "blocks.1.o_proj"}),
        (["blocks.1.fc"], {"blocks.1.fc"}),
        (["k_proj"], {"blocks.0.qkv_proj", "blocks.1.qkv_proj"}),
        (["qkv_proj"], {"blocks.0.qkv_proj", "blocks.1.qkv_proj"}),
        (["blocks.0.v_proj", "1.fc"], {"blocks.0.qkv_proj", "blocks.1.fc"}),
        (["shared"], {"blocks.0.fc"}),
        ([], set()),
    ],
)
def test_target_modules_match_suffix_full_path_parent_or_child(
    target_modules, expected
):
    assert set(wrap(Toy(), LoRAConfig(target_modules=target_modules))) == expected


def test_targets_that_cannot_be_used_are_all_named_at_once():
    with pytest.raises(ConfigError) as caught:
        wrap(Toy(), LoRAConfig(target_modules=["roj", "norm", "fc"]))
    assert str(caught.value).splitlines() == [
        "target_modules cannot be used:",
        "  'roj' matches no module; layers that can carry LoRA: fc, o_proj, "
        "qkv_proj, shared.",
        "  norm (LayerNorm) matches 'norm' but cannot be wrapped by any LoRA layer; "
        "name linear layers.",
    ]


def test_a_model_without_linear_layers_is_refused():
    class Bare(nnx.Module):
        def __init__(self):
            self.norm = nnx.LayerNorm(4, rngs=nnx.Rngs(0))

    with pytest.raises(ModelError, match="Bare has no layer that can carry LoRA"):
        wrap(Bare(), LoRAConfig())


def test_a_subclass_keeps_its_own_forward():
    class Doubling(nnx.Linear):
        def __call__(self, inputs):
            return 2 * super().__call__(inputs)

    class Model(nnx.Module):
        def __init__(self):
            self.fc = Doubling(3, 3, rngs=nnx.Rngs(0))

    model = Model()
    x = jax.numpy.ones((2, 3))
    before = model.fc(x)
    wrap(model, LoRAConfig())
    assert (model.fc(x) == before).all()
    assert isinstance(model.fc, Doubling)


class Vision(nnx.Module):
    """A tower, a connector inside of its path, and a language layer named alike."""

    lora_domains: ClassVar = {"visual": "tower", "visual.merger": "connector"}

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.visual = nnx.Dict(
            proj=nnx.Linear(2, 2, rngs=rngs), merger=nnx.Linear(2, 2, rngs=rngs)
        )
        self.visualizer = nnx.Linear(2, 2, rngs=rngs)


def test_domains_follow_the_longest_prefix():
    sites = wrap(Vision(), LoRAConfig(enable_tower_connector_lora=True))
    assert {name: layer.lora_site.domain for name, layer in sites.items()} == {
        "visual.merger": "connector",
        "visual.proj": "tower",
        "visualizer": "tokens",
    }
    assert sites.left_out == {}


def test_tower_and_connector_stay_as_they_are_unless_enabled():
    sites = wrap(Vision(), LoRAConfig())
    assert list(sites) == ["visualizer"]
    assert sites.left_out == {"visual.merger": "connector", "visual.proj": "tower"}
