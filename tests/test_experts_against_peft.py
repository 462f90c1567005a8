"""Every adapter that PEFT can write for a mixture of experts, in one batch, as PEFT.

On each family of models; a row's adapter may change who is routed where.
"""

import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax import (
    LoRAConfig,
    LoRAMapping,
    LRUCacheLoRAModelManager,
    load_adapter,
    load_model,
)
from peft_experts import (
    FAMILIES,
    TIME,
    base_model,
    tokens,
    torch_logits,
    write_adapter,
)

pytestmark = pytest.mark.torch

TOLERANCE = 3e-4


@pytest.fixture(scope="module", params=FAMILIES)
def answers(request, tmp_path_factory):
    """The served model's logits and PEFT's, by name of the adapter."""
    family = request.param.split(",")[0]
    changes, adapters = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("moe")
    base = base_model(family, changes)
    base.save_pretrained(folder / "base")
    expected = {"base": torch_logits(base)}
    for seed, (name, options) in enumerate(adapters.items(), start=1):
        expected[name] = write_adapter(base, options, seed, folder / f"a{seed}")
    model = load_model(str(folder / "base"))
    number = len(adapters)
    config = LoRAConfig(max_loras=number, max_lora_rank=8)
    manager = LRUCacheLoRAModelManager(model, config)
    for seed in range(1, number + 1):
        manager.add_adapter(load_adapter(folder / f"a{seed}", adapter_id=seed))
        manager.activate_adapter(seed)
    ids = np.random.default_rng(1).permutation(number + 1)
    manager.set_adapter_mapping(
        LoRAMapping(np.repeat(ids, TIME).tolist(), ids.tolist())
    )
    batch = jnp.asarray(np.tile(tokens(), (number + 1, 1)), jnp.int32)
    logits = np.asarray(model(batch))
    names = list(expected)
    return {names[id_]: logits[i] for i, id_ in enumerate(ids)}, expected


def test_each_row_is_peft_s_answer(answers):
    found, expected = answers
    for name, logits in expected.items():
        np.testing.assert_allclose(
            found[name], logits, atol=TOLERANCE, rtol=0, err_msg=name
        )


def test_each_adapter_is_visible(answers):
    _, expected = answers
    names = list(expected)
    for i, first in enumerate(names):
        for second in names[i + 1 :]:
            moved = np.abs(expected[first] - expected[second]).max(axis=-1)
            assert moved.max() > 10 * TOLERANCE, (first, second)
