"""Slot writes: pure or donated, one program, nothing of a former occupant left."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from helpers import Toy, make_adapter
from lora_jax import bank as bank_module
from lora_jax.bank import bank_dtype, clear, empty_bank, stage, write, write_donated
from lora_jax.config import LoRAConfig
from lora_jax.layers import wrap
from lora_jax.packing import Packed, pack

FLOAT32 = np.dtype("float32")
RANK, SLOTS = 8, 3


def _setting(dtype=FLOAT32):
    sites = wrap(Toy(), LoRAConfig(max_lora_rank=RANK))
    return sites, empty_bank(sites, SLOTS, dtype)


def _staged(bank, sites, adapter):
    return stage(bank, pack(adapter, sites, FLOAT32))


def _same(left, right):
    return jax.tree.all(
        jax.tree.map(
            lambda a, b: bool((np.asarray(a) == np.asarray(b)).all()), left, right
        )
    )


def test_an_empty_bank_is_zeros_in_the_stated_shapes():
    _, bank = _setting()
    assert bank.num_slots == SLOTS
    assert bank.arrays["blocks.0.qkv_proj"]["a"].shape == (SLOTS, 3, RANK, 16)
    assert bank.arrays["blocks.0.qkv_proj"]["rank"].dtype == jnp.int32
    assert bank.nbytes == sum(leaf.nbytes for leaf in jax.tree.leaves(bank))
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(bank))


def test_a_write_fills_its_slot_and_no_other():
    sites, bank = _setting()
    packed = pack(make_adapter(1, 4), sites, FLOAT32)
    written = write(bank, 1, stage(bank, packed))
    for name, arrays in written.arrays.items():
        for key, array in arrays.items():
            corner = packed.sites[name][key]
            expected = np.zeros(array.shape[1:], array.dtype)
            expected[tuple(slice(size) for size in corner.shape)] = corner
            np.testing.assert_array_equal(array[1], expected)
            assert not np.asarray(array)[[0, 2]].any()


def test_the_old_bank_stays_valid_after_write_and_is_deleted_after_write_donated():
    sites, bank = _setting()
    staged = _staged(bank, sites, make_adapter(1, 4))
    written = write(bank, 0, staged)
    assert not any(np.asarray(leaf).any() for leaf in jax.tree.leaves(bank))
    assert _same(write_donated(bank, 0, staged), written)
    with pytest.raises(RuntimeError, match="deleted"):
        np.asarray(jax.tree.leaves(bank)[0])


def test_a_smaller_adapter_leaves_nothing_of_the_former_one():
    sites, bank = _setting()
    small = make_adapter(2, 2, modules=["blocks.1.k_proj"])
    reused = write(bank, 0, _staged(bank, sites, make_adapter(1, RANK)))
    reused = write(reused, 0, _staged(bank, sites, small))
    assert _same(reused, write(bank, 0, _staged(bank, sites, small)))


def test_values_without_a_place_in_the_bank_are_refused():
    sites, bank = _setting()
    packed = pack(make_adapter(1, 4), sites, FLOAT32)
    del bank.arrays["blocks.0.fc"]["b"]
    with pytest.raises(ValueError, match=r"blocks.0.fc has no room for b \(4, 16\)"):
        stage(bank, packed)


def test_clear_makes_a_slot_zeros():
    sites, bank = _setting()
    written = write(bank, 2, _staged(bank, sites, make_adapter(1, 4)))
    assert _same(clear(written, 2), bank)


def test_writes_compile_once_for_all_slots_ranks_and_target_sets():
    sites, bank = _setting()
    bank = write_donated(bank, 0, _staged(bank, sites, make_adapter(1, 4)))
    before = bank_module._write_donated._cache_size()
    for seed, rank, modules in [(2, 8, None), (3, 1, ["blocks.0.fc"]), (4, 3, None)]:
        adapter = (
            make_adapter(seed, rank, modules=modules)
            if modules
            else make_adapter(seed, rank)
        )
        bank = write_donated(bank, seed % SLOTS, _staged(bank, sites, adapter))
    assert bank_module._write_donated._cache_size() == before


def test_a_donated_write_copies_no_slot_array():
    sites, bank = _setting()
    staged = _staged(bank, sites, make_adapter(1, 4))
    compiled = bank_module._write_donated.lower(bank, jnp.int32(0), staged).compile()
    slot_arrays = {
        f"f32[{','.join(map(str, leaf.shape))}]"
        for leaf in jax.tree.leaves(bank.arrays)
    }
    copies = [
        line
        for line in compiled.as_text().splitlines()
        if " copy(" in line
        and any(shape in line.split("=")[1][:40] for shape in slot_arrays)
    ]
    assert copies == []


@pytest.mark.parametrize(
    ("lora_dtype", "expected"), [("auto", "bfloat16"), ("float32", "float32")]
)
def test_auto_dtype_is_the_models(lora_dtype, expected):
    sites = wrap(Toy(dtype="bfloat16"), LoRAConfig())
    assert bank_dtype(sites, lora_dtype).name == expected


class Deep(nnx.Module):
    """Twelve equal layers: their names do not sort in the order of the model."""

    def __init__(self):
        rngs = nnx.Rngs(0)
        self.layers = nnx.List([nnx.Linear(4, 4, rngs=rngs) for _ in range(12)])


def test_every_layer_of_a_deep_model_gets_its_own_weights_from_the_first_write_on():
    sites = wrap(Deep(), LoRAConfig(max_lora_rank=2))
    bank = empty_bank(sites, SLOTS, FLOAT32)
    a = {name: np.full((1, 2, 4), i + 1, np.float32) for i, name in enumerate(sites)}
    packed = Packed("deep", {name: {"a": value} for name, value in a.items()}, {})
    for slot in (0, 1):
        bank = write(bank, slot, stage(bank, packed))
        for name, value in a.items():
            np.testing.assert_array_equal(bank.arrays[name]["a"][slot], value)
