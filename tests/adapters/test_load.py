"""What `load_adapter` and `adapter_from_tensors` give for sound adapters."""

import math

import ml_dtypes
import numpy as np
import pytest

from adapter_files import PREFIX, UP, Q, V, config, pair, pairs, write
from lora_jax.adapters import LowRank, adapter_from_tensors, load_adapter
from lora_jax.errors import AdapterError, AdapterNotFoundError


def test_a_folder_becomes_its_own_values(tmp_path):
    tensors = pairs()
    adapter = load_adapter(write(tmp_path / "sql", tensors))
    assert (adapter.name, adapter.rank, sorted(adapter.parts)) == ("sql", 4, [UP, Q, V])
    for module, part in adapter.parts.items():
        assert isinstance(part, LowRank)
        assert part.scale == 2.0
        np.testing.assert_array_equal(
            part.a, tensors[f"{PREFIX}{module}.lora_A.weight"]
        )
        np.testing.assert_array_equal(
            part.b, tensors[f"{PREFIX}{module}.lora_B.weight"]
        )
        assert not part.a.flags.writeable
        assert not part.b.flags.writeable


def test_ids_count_and_a_chosen_id_is_not_handed_out_again():
    def make(adapter_id=None):
        return adapter_from_tensors(pairs(), config(), name="a", adapter_id=adapter_id)

    first = make()
    chosen = make(first.id + 1)
    assert make().id not in (first.id, chosen.id)


@pytest.mark.parametrize("adapter_id", [0, -1, 2**31, True])
def test_an_id_that_is_no_positive_int32_is_refused(adapter_id):
    with pytest.raises(AdapterError, match=r"adapter id .* whole number"):
        adapter_from_tensors(pairs(), config(), name="a", adapter_id=adapter_id)


SCALES = [
    ({}, 8 / 4),
    ({"lora_alpha": 16.5}, 16.5 / 4),
    ({"use_rslora": True}, 8 / math.sqrt(4)),
    ({"r": None}, 8 / 4),
    ({"alpha_pattern": {"q_proj": 32}}, 32 / 4),
    ({"r": 8, "rank_pattern": {".*": 4}}, 8 / 4),
    ({"use_rslora": True, "alpha_pattern": {"q_proj": 32}}, 32 / math.sqrt(4)),
]


@pytest.mark.parametrize(("fields", "scale"), SCALES)
def test_the_scale_follows_the_config(fields, scale):
    adapter = adapter_from_tensors(pair(Q, 4), config(**fields), name="a")
    assert adapter.parts[Q].scale == pytest.approx(scale, rel=1e-15)


def test_ranks_may_differ_by_module():
    tensors = pair(Q, 2) | pair(V, 16) | pair(UP, 4)
    fields = config(rank_pattern={"q_proj": 2, r"layers\.1\..*": 16})
    adapter = adapter_from_tensors(tensors, fields, name="a")
    assert {m: p.rank for m, p in adapter.parts.items()} == {Q: 2, V: 16, UP: 4}
    assert {m: p.scale for m, p in adapter.parts.items()} == {Q: 4.0, V: 0.5, UP: 2.0}
    assert adapter.rank == 16


@pytest.mark.parametrize("dtype", ["float64", "float16", ml_dtypes.bfloat16])
def test_the_files_dtype_stays(tmp_path, dtype):
    tensors = {name: array.astype(dtype) for name, array in pairs().items()}
    part = load_adapter(write(tmp_path, tensors)).parts[Q]
    assert part.a.dtype == part.b.dtype == np.dtype(dtype)


@pytest.mark.parametrize("prefix", ["", PREFIX])
@pytest.mark.parametrize("inside", ["", ".default", ".my.adapter-1.5"])
def test_prefix_and_adapter_name_inside_the_key_make_no_difference(prefix, inside):
    plain = adapter_from_tensors(pairs(), config(), name="plain")
    renamed = {
        name.replace(PREFIX, prefix).replace(".weight", f"{inside}.weight"): array
        for name, array in pairs().items()
    }
    other = adapter_from_tensors(renamed, config(), name="other")
    assert list(other.parts) == list(plain.parts)
    assert other.content_hash == plain.content_hash


def test_the_hash_knows_values_and_scales_and_nothing_else():
    plain = adapter_from_tensors(pairs(), config(), name="a")
    backwards = dict(reversed(pairs().items()))
    same = adapter_from_tensors(backwards, config(task_type="CAUSAL_LM"), name="b")
    assert same.content_hash == plain.content_hash
    other_scale = adapter_from_tensors(pairs(), config(lora_alpha=9), name="a")
    changed = {
        name: array + (name.endswith("B.weight")) for name, array in pairs().items()
    }
    other_value = adapter_from_tensors(changed, config(), name="a")
    swapped = {name.replace("up_proj", "gate_proj"): a for name, a in pairs().items()}
    other_module = adapter_from_tensors(swapped, config(), name="a")
    hashes = [plain, other_scale, other_value, other_module]
    assert len({adapter.content_hash for adapter in hashes}) == 4


def test_the_report_accounts_for_every_tensor():
    adapter = adapter_from_tensors(
        pairs(), config(rank_pattern={"nowhere": 9}), name="a"
    )
    report = adapter.report
    assert (report.matched, len(report.ignored), report.total) == (6, 0, 6)
    row = next(row for row in report.modules if row.module == UP)
    assert (row.kind, row.rank, row.scale, row.dtype) == ("lora", 4, 2.0, "float32")
    assert row.scale_rule == "alpha 8 / rank 4"
    assert row.nbytes == 4 * 4 * (32 + 64)
    assert sum(row.nbytes for row in report.modules) == adapter.nbytes
    assert report.notes == ("config: pattern 'nowhere' matches no module of the file",)
    assert "6 of 6 tensors in 3 modules" in str(report)
    assert report.to_dict()["matched"] == 6


def test_arrays_given_are_copied():
    tensors = pairs()
    adapter = adapter_from_tensors(tensors, config(), name="a")
    before = adapter.parts[Q].a.copy()
    tensors[f"{PREFIX}{Q}.lora_A.weight"][:] = 0
    np.testing.assert_array_equal(adapter.parts[Q].a, before)


def test_a_missing_folder_is_not_found(tmp_path):
    with pytest.raises(AdapterNotFoundError, match=r"'nothing'.*there is no folder"):
        load_adapter(tmp_path / "nothing")


def test_a_folder_without_config_is_not_found(tmp_path):
    with pytest.raises(AdapterNotFoundError, match=r"holds no adapter_config\.json"):
        load_adapter(tmp_path)


def test_a_folder_without_weights_is_an_error(tmp_path):
    write(tmp_path, pairs())
    (tmp_path / "adapter_model.safetensors").unlink()
    with pytest.raises(AdapterError, match="doesn't contain tensors"):
        load_adapter(tmp_path)


def test_home_and_relative_paths(tmp_path, monkeypatch):
    write(tmp_path / "sql", pairs())
    monkeypatch.setenv("HOME", str(tmp_path))
    assert load_adapter("~/sql").name == "sql"
    monkeypatch.chdir(tmp_path / "sql")
    assert load_adapter(".").name == "sql"
    assert load_adapter("../sql", 5, name="own").name == "own"


def test_a_config_of_too_large_a_rank_is_refused_before_weights_are_read(tmp_path):
    fields = config(r=64, rank_pattern={"q_proj": 128})
    (write(tmp_path, {}, fields) / "adapter_model.safetensors").write_bytes(b"unread")
    with pytest.raises(AdapterError, match="rank 128 exceeds max_lora_rank=32; raise"):
        load_adapter(tmp_path, max_lora_rank=32)


def test_a_large_default_rank_that_no_tensor_has_is_no_fault(tmp_path):
    fields = config(r=64, rank_pattern={".*": 4})
    assert load_adapter(write(tmp_path, pairs(), fields), max_lora_rank=32).rank == 4
