"""Merged folders of models with experts: PEFT's own merged tensors, and its answers.

transformers 5 saves most families as one tensor for each expert, or, when asked, as the
tensors of all experts that it computes with; gpt-oss has the latter alone.
"""

import copy
import warnings

import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from lora_jax import load_adapter, load_model
from lora_jax.adapters import merge_adapters
from peft_experts import FAMILIES, base_model, tokens, torch_logits, write_adapter

pytestmark = pytest.mark.torch

WEIGHTS = 2e-6
LOGITS = 3e-4
MERGED = ("mixtral", "qwen3_moe", "gpt_oss", "gpt_oss, square")


@pytest.fixture(scope="module", params=MERGED)
def family(request, tmp_path_factory):
    """The base, a folder of it in each layout, and PEFT's adapters with its logits."""
    changes, adapters = FAMILIES[request.param]
    folder = tmp_path_factory.mktemp("merged")
    base = base_model(request.param.split(",")[0], changes)
    base.save_pretrained(folder / "single")
    base.save_pretrained(folder / "fused", save_original_format=False)
    logits = {
        name: write_adapter(base, options, seed, folder / name)
        for seed, (name, options) in enumerate(adapters.items(), start=1)
    }
    return base, folder, logits


def saved_by_peft(base, adapter, folder, layout):
    from peft import PeftModel

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = PeftModel.from_pretrained(copy.deepcopy(base), adapter)
        merged = model.merge_and_unload()
    merged.save_pretrained(folder, save_original_format=layout == "single")
    return load_file(folder / "model.safetensors")


@pytest.mark.parametrize("layout", ["single", "fused"])
def test_tensors_are_those_that_peft_merges(family, layout, tmp_path):
    base, folder, logits = family
    before = load_file(folder / layout / "model.safetensors")
    for name in logits:
        out = tmp_path / "ours" / name
        merge_adapters(folder / layout, [load_adapter(folder / name)], out)
        found = load_file(out / "model.safetensors")
        expected = saved_by_peft(base, folder / name, tmp_path / name, layout)
        assert found.keys() == expected.keys()
        for key, values in expected.items():
            label = f"{name}: {key}"
            np.testing.assert_allclose(found[key], values, atol=WEIGHTS, err_msg=label)
        moved = [np.abs(found[key] - before[key]).max() for key in before]
        assert max(moved) > 1e3 * WEIGHTS


@pytest.mark.parametrize("layout", ["single", "fused"])
def test_the_folder_loads_in_transformers_with_peft_s_answers(family, layout, tmp_path):
    from transformers import AutoModelForCausalLM

    _, folder, logits = family
    for name, expected in logits.items():
        out = tmp_path / name
        merge_adapters(folder / layout, [load_adapter(folder / name)], out)
        model = AutoModelForCausalLM.from_pretrained(out).eval()
        found = torch_logits(model)
        np.testing.assert_allclose(found, expected, atol=LOGITS, rtol=0, err_msg=name)


@pytest.mark.parametrize("layout", ["single", "fused"])
def test_the_folder_loads_here_with_peft_s_answers(family, layout, tmp_path):
    _, folder, logits = family
    merge_adapters(folder / layout, [load_adapter(folder / "both")], tmp_path / "out")
    model = load_model(str(tmp_path / "out"))
    found = np.asarray(model(jnp.asarray(tokens()[None], jnp.int32)))[0]
    np.testing.assert_allclose(found, logits["both"], atol=LOGITS, rtol=0)
