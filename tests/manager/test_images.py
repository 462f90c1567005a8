"""A small vision-language model: tower, connector and language rows, each its own."""

import logging
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from lora_jax.adapters import Adapter, adapter_from_tensors
from lora_jax.config import LoRAConfig
from lora_jax.errors import AdapterError
from lora_jax.manager import LRUCacheLoRAModelManager
from lora_jax.manager.images import ImageRows, default_adapter, image_mappings
from lora_jax.routing import LoRAMapping, LoRAMappingType

WIDTH, PATCHES, MERGE = 6, 4, 2
TOLERANCE = 1e-5
MODULES = ("visual.block", "visual.merger", "language_model.fc")


class Vision(nnx.Module):
    """Patches -> tower -> every two merged -> language model -> one row per image."""

    lora_domains: ClassVar = {"visual": "tower", "visual.merger": "connector"}

    def __init__(self) -> None:
        rngs = nnx.Rngs(0)
        self.visual = nnx.Dict(
            block=nnx.Linear(WIDTH, WIDTH, rngs=rngs),
            merger=nnx.Linear(MERGE * WIDTH, WIDTH, rngs=rngs),
        )
        self.language_model = nnx.Dict(fc=nnx.Linear(WIDTH, WIDTH, rngs=rngs))

    def __call__(self, images: jax.Array) -> jax.Array:
        """`(images, PATCHES, WIDTH)` -> `(images, PATCHES / MERGE, WIDTH)`."""
        patches = nnx.tanh(self.visual["block"](images))
        merged = patches.reshape(len(images), PATCHES // MERGE, MERGE * WIDTH)
        return self.language_model["fc"](nnx.tanh(self.visual["merger"](merged)))


def _adapter(id: int, *modules: str) -> Adapter:
    rng, tensors = np.random.default_rng(id), {}
    for module in modules:
        d_in = MERGE * WIDTH if module.endswith("merger") else WIDTH
        for half, shape in (("A", (2, d_in)), ("B", (WIDTH, 2))):
            values = rng.normal(size=shape).astype(np.float32)
            tensors[f"base_model.model.{module}.lora_{half}.weight"] = values
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2, "target_modules": []}
    return adapter_from_tensors(tensors, config, name=f"a{id}", adapter_id=id)


def _merged(adapter: Adapter | None) -> Vision:
    model = Vision()
    for module, pair in (adapter.parts if adapter else {}).items():
        parent, name = module.split(".")
        kernel = getattr(model, parent)[name].kernel
        kernel.set_value(kernel[...] + pair.scale * pair.a.T @ pair.b.T)
    return model


def _images(count: int) -> jax.Array:
    values = np.random.default_rng(9).normal(size=(count, PATCHES, WIDTH))
    return jnp.asarray(values, jnp.float32)


def _manager(enabled: bool = True, slots: int = 2) -> LRUCacheLoRAModelManager:
    config = LoRAConfig(
        max_loras=slots, max_lora_rank=2, enable_tower_connector_lora=enabled
    )
    return LRUCacheLoRAModelManager(Vision(), config)


def test_each_image_is_seen_by_its_own_requests_adapter_everywhere() -> None:
    manager = _manager()
    assert manager.supports_tower_connector_lora
    adapters = {1: _adapter(1, *MODULES), 2: _adapter(2, "visual.block")}
    for adapter in adapters.values():
        manager.add_adapter(adapter)
        manager.activate_adapter(adapter.id)
    owners, images = (2, 0, 1, 2), _images(4)
    rows = [ImageRows(id, PATCHES, PATCHES // MERGE) for id in owners]
    tokens = [id for id in owners for _ in range(PATCHES // MERGE)]
    for mapping in (*image_mappings(rows), LoRAMapping(tokens, owners)):
        manager.set_adapter_mapping(mapping)
    got = np.asarray(manager.model(images))
    outputs = {id: np.asarray(_merged(adapters.get(id))(images)) for id in (0, 1, 2)}
    assert min(
        np.abs(outputs[a] - outputs[b]).max(axis=(1, 2)).min()
        for a, b in ((0, 1), (0, 2), (1, 2))
    ) > (10 * TOLERANCE)
    for image, id in enumerate(owners):
        np.testing.assert_allclose(
            got[image], outputs[id][image], atol=TOLERANCE, rtol=0
        )


def test_without_the_option_the_tower_is_the_base_model_and_that_is_said(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = _manager(enabled=False)
    assert not manager.supports_tower_connector_lora
    with caplog.at_level(logging.WARNING):
        manager.add_adapter(_adapter(1, *MODULES))
    report = manager.prepared(1).report()
    assert "'a1': 1 of 3 modules served, left out:" in report
    assert "visual.merger: connector; set enable_tower_connector_lora=True" in report
    assert caplog.messages == [report]
    manager.activate_adapter(1)
    manager.set_adapter_mapping(LoRAMapping([1] * 4, [1]))
    images = _images(2)
    expected = _merged(_adapter(1, *MODULES))
    expected.visual = Vision().visual
    np.testing.assert_allclose(
        manager.model(images), expected(images), atol=TOLERANCE, rtol=0
    )


def test_an_adapter_of_the_tower_alone_is_refused_without_the_option() -> None:
    with pytest.raises(AdapterError, match="adapts the tower alone; set enable_tower"):
        _manager(enabled=False).add_adapter(_adapter(1, "visual.block"))


def test_what_is_served_whole_is_reported_and_not_noticed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    manager = _manager()
    manager.add_adapter(_adapter(1, *MODULES))
    assert manager.prepared(1).report() == "adapter 'a1': 3 of 3 modules served."
    assert caplog.messages == []


def test_the_encoders_cache_key_names_only_adapters_that_change_its_output() -> None:
    manager = _manager(slots=4)
    adapters = {
        1: _adapter(1, "visual.block"),
        2: _adapter(2, "visual.merger"),
        3: _adapter(3, "language_model.fc"),
    }
    for adapter in adapters.values():
        manager.add_adapter(adapter)
    keys = {id: manager.prepared(id).encoder_key("image") for id in adapters}
    assert keys[1] == f"{adapters[1].content_hash}:image"
    assert keys[2] == f"{adapters[2].content_hash}:image"
    assert keys[3] == "image"


def test_items_go_modality_by_modality_and_the_connector_needs_every_count() -> None:
    rows = [
        ImageRows(1, 2, 1, "image"),
        ImageRows(2, 3, None, "audio"),
        ImageRows(3, 1, 1, "image"),
    ]
    mappings = image_mappings(rows)
    assert [m.type for m in mappings] == [LoRAMappingType.TOWER]
    assert mappings[0].index_mapping == (2, 2, 2, 1, 1, 3)
    assert mappings[0].prompt_mapping == (2, 1, 3)


@pytest.mark.parametrize(
    ("modalities", "defaults", "chosen"),
    [
        (["image"], ["image", "audio"], "image"),
        (["image", "audio"], ["image", "audio"], None),
        (["image", "video"], ["image", "audio"], "image"),
        (["video"], ["image"], None),
        ([], ["image"], None),
    ],
)
def test_a_default_adapter_needs_exactly_one_of_the_prompts_modalities(
    modalities: list[str], defaults: list[str], chosen: str | None
) -> None:
    assert default_adapter(modalities, defaults) == chosen
