"""Every layout of an adapter merged into every layout of a folder, against float64."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from expert_files import ALPHA, BLOCK, EXPERTS, FILES, Sizes
from lora_jax.adapters import LowRank, adapter_from_tensors, merge_adapters
from lora_jax.adapters.expert_tensors import expert_places
from lora_jax.adapters.merge_experts import find_experts
from lora_jax.errors import AdapterError

TOLERANCE = 1e-5
"""Of weights of order 1, float32 against float64."""


def dense(sizes):
    """Returns the base's experts as `(experts, d_out, d_in)`, and its router."""
    rng = np.random.default_rng(7)
    e, d, w = sizes.experts, sizes.d, sizes.width
    shapes = {"gate": (e, w, d), "up": (e, w, d), "down": (e, d, w), "router": (e, d)}
    return {k: rng.standard_normal(s).astype(np.float32) for k, s in shapes.items()}


def fused(weights, sizes):
    """transformers 5; gpt-oss where gate and up are interleaved."""
    both = np.concatenate([weights["gate"], weights["up"]], axis=1)
    if sizes.interleaved:
        order = np.arange(2 * sizes.width).reshape(2, -1).T.reshape(-1)
        both, down = both[:, order].swapaxes(1, 2), weights["down"].swapaxes(1, 2)
        bias = {f"{EXPERTS}.gate_up_proj_bias": both[:, 0].copy()}
    else:
        down, bias = weights["down"], {}
    return {
        f"{EXPERTS}.gate_up_proj": np.ascontiguousarray(both),
        f"{EXPERTS}.down_proj": np.ascontiguousarray(down),
        f"{BLOCK}.gate.weight": weights["router"],
        **bias,
    }


def _one_by_one(weights, names, block):
    tensors = {
        f"{block}.experts.{expert}.{name}.weight": matrix
        for role, name in zip(("gate", "up", "down"), names, strict=True)
        for expert, matrix in enumerate(weights[role])
    }
    return tensors | {f"{block}.gate.weight": weights["router"]}


def one_by_one(weights, sizes):
    """transformers 4, and what transformers 5 saves."""
    return _one_by_one(weights, ("gate_proj", "up_proj", "down_proj"), BLOCK)


def of_mixtral(weights, sizes):
    names = ("w1", "w3", "w2")
    return _one_by_one(weights, names, "model.layers.0.block_sparse_moe")


LAYOUTS = [
    (fused, Sizes(4, 12, 10)),
    (one_by_one, Sizes(4, 12, 10)),
    (of_mixtral, Sizes(4, 12, 10)),
    (one_by_one, Sizes(3, 8, 8)),
    (fused, Sizes(3, 8, 8)),
    (fused, Sizes(4, 12, 10, interleaved=True)),
]
OF_HALVES = ("shared_outer", "doubled_rank")
"""Files that cut gate and up in the middle, which no interleaved model's are."""
VERSIONLESS = ("down_only",)
"""Files that do not say which way round a square expert's factors are."""


def write_base(folder, layout, sizes, weights=None):
    folder.mkdir()
    model_type = "gpt_oss" if sizes.interleaved else "qwen3_moe"
    settings = {"model_type": model_type, "tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(settings))
    tensors = layout(dense(sizes) if weights is None else weights, sizes)
    save_file(tensors, folder / "model.safetensors")
    return folder


def make(name, sizes, rank=3, seed=1):
    file = FILES[name](np.random.default_rng(seed), sizes, rank)
    return adapter(file.tensors, **file.config), file.deltas


def adapter(tensors, **fields):
    named = {f"base_model.model.{n}": array for n, array in tensors.items()}
    config = {"peft_type": "LORA", "lora_alpha": ALPHA, **fields}
    return adapter_from_tensors(named, config, name="a")


def check(folder, layout, sizes, deltas):
    """Compares a folder with the base and the sum of `deltas`; names and shapes too."""
    before = dense(sizes)
    after = {
        role: values + sum(delta.get(role, 0) for delta in deltas)
        for role, values in before.items()
    }
    expected = layout(after, sizes)
    biases = {n: a for n, a in layout(before, sizes).items() if n.endswith("_bias")}
    found = load_file(folder / "model.safetensors")
    assert found.keys() == expected.keys()
    for name, array in (expected | biases).items():
        assert found[name].dtype == np.float32
        np.testing.assert_allclose(found[name], array, atol=TOLERANCE, err_msg=name)


CASES = [
    (name, layout, sizes)
    for layout, sizes in LAYOUTS
    for name in FILES
    if not (sizes.interleaved and name in OF_HALVES)
]


@pytest.mark.parametrize(("name", "layout", "sizes"), CASES)
def test_each_layout_is_added_where_the_folder_keeps_it(tmp_path, name, layout, sizes):
    one, deltas = make(name, sizes)
    base = write_base(tmp_path / "base", layout, sizes)
    if name in VERSIONLESS and sizes.d == sizes.width:
        with pytest.raises(AdapterError, match=r"square .* write the peft_version"):
            merge_adapters(base, [one], tmp_path / "out")
        return
    report = merge_adapters(base, [one], tmp_path / "out")
    check(tmp_path / "out", layout, sizes, [deltas])
    assert report.modules
    assert all(0.01 < row.change < 100 for row in report.modules)
    assert report.loss < 1e-4


@pytest.mark.parametrize(("layout", "sizes"), LAYOUTS[:3])
def test_adapters_of_several_layouts_add_by_their_weights(tmp_path, layout, sizes):
    weights = {"fused_by_old_peft": 0.5, "pairs": -1.5, "shared_outer": 2.0}
    made = [make(name, sizes, seed=i) for i, name in enumerate(weights)]
    scaled = [
        {role: weight * delta for role, delta in deltas.items()}
        for (_, deltas), weight in zip(made, weights.values(), strict=True)
    ]
    base = write_base(tmp_path / "base", layout, sizes)
    adapters = [one for one, _ in made]
    merge_adapters(base, adapters, tmp_path / "out", weights=list(weights.values()))
    check(tmp_path / "out", layout, sizes, scaled)


def test_the_dtype_asked_for_is_the_dtype_of_all_tensors(tmp_path):
    sizes = Sizes(4, 12, 10)
    one, _ = make("fused", sizes)
    base = write_base(tmp_path / "base", fused, sizes)
    report = merge_adapters(base, [one], tmp_path / "out", dtype="bfloat16")
    kinds = {
        a.dtype.name for a in load_file(tmp_path / "out/model.safetensors").values()
    }
    assert kinds == {"bfloat16"}
    assert 1e-4 < report.loss < 0.1
    assert {row.module for row in report.modules} == {
        f"{EXPERTS}.gate_up_proj",
        f"{EXPERTS}.down_proj",
    }


def test_an_overflow_of_the_dtype_asked_for_is_refused(tmp_path):
    file = FILES["pairs"](np.random.default_rng(1), Sizes(4, 12, 10), 3)
    wild = adapter(file.tensors, r=3, lora_alpha=1e6)
    base = write_base(tmp_path / "base", fused, Sizes(4, 12, 10))
    with pytest.raises(
        AdapterError, match=r"gate_up_proj: overflows float16"
    ) as caught:
        merge_adapters(base, [wild], tmp_path / "out", dtype="float16")
    assert "down_proj: overflows float16" in str(caught.value)


def test_other_kinds_are_merged_where_an_expert_has_layers_of_its_own(tmp_path):
    """But not beside a low-rank update of the same layer, by another adapter."""
    base = write_base(tmp_path / "base", one_by_one, Sizes(4, 12, 10))
    module = f"{EXPERTS}.2.up_proj"
    lengths = {f"{module}.lora_magnitude_vector": np.ones(10, np.float32)}
    dora = adapter(pair(module, 12, 10) | lengths, r=3, use_dora=True)
    merge_adapters(base, [dora], tmp_path / "out")
    found = load_file(tmp_path / "out/model.safetensors")[f"{module}.weight"]
    np.testing.assert_allclose(np.linalg.norm(found, axis=1), 1, atol=1e-5)
    plain = adapter(pair(module, 12, 10), r=3)
    with pytest.raises(AdapterError, match="low-rank ones cannot be merged together"):
        merge_adapters(base, [dora, plain], tmp_path / "other")


@pytest.mark.parametrize("names", [("up_proj", "down_proj"), ("w1", "w2")])
@pytest.mark.parametrize("is_fused", [True, False])
def test_experts_without_a_gate(tmp_path, names, is_fused):
    rng = np.random.default_rng(0)
    before = {
        "up_proj": rng.standard_normal((3, 10, 12)).astype(np.float32),
        "down_proj": rng.standard_normal((3, 12, 10)).astype(np.float32),
    }
    tensors = {f"{EXPERTS}.{role}": values for role, values in before.items()}
    if not is_fused:
        tensors = {
            f"{EXPERTS}.{expert}.{name}.weight": matrix
            for name, values in zip(names, before.values(), strict=True)
            for expert, matrix in enumerate(values)
        }
    update = pair(f"{EXPERTS}.1.{names[0]}", 12, 10) | pair(f"{EXPERTS}.2.w2", 10, 12)
    base = write_base(tmp_path / "base", lambda *_: tensors, Sizes(3, 12, 10))
    merge_adapters(base, [adapter(update, r=3)], tmp_path / "out")
    found = load_file(tmp_path / "out/model.safetensors")
    assert found.keys() == tensors.keys()
    before["up_proj"][1] += ALPHA
    before["down_proj"][2] += ALPHA
    for name, values in found.items():
        end = name.removeprefix(f"{EXPERTS}.").removesuffix(".weight").split(".")
        role = "down_proj" if end[-1] in ("down_proj", "w2") else "up_proj"
        expected = before[role] if is_fused else before[role][int(end[0])]
        np.testing.assert_allclose(values, expected, atol=TOLERANCE)


def pair(module, d_in, d_out, rank=3):
    return {
        f"{module}.lora_A.weight": np.ones((rank, d_in), np.float32),
        f"{module}.lora_B.weight": np.ones((d_out, rank), np.float32),
    }


FAULTS = [
    (fused, pair(f"{EXPERTS}.9.up_proj", 12, 10), {}, "up_proj: is no module of the"),
    (fused, pair(f"{EXPERTS}.1.up_proj", 12, 9), {}, r"update of shape \(9, 12\), an "),
    (one_by_one, pair(f"{EXPERTS}.1.w3", 11, 10), {}, "an expert has .10, 12."),
    (fused, pair(EXPERTS, 13, 20, 12), {}, "its shapes fit no parameter; add target_p"),
    (fused, pair(EXPERTS, 12, 20, 15), {}, "its shapes fit no parameter; add target_p"),
    (fused, pair(f"{EXPERTS}.base_layer", 13, 20, 12), {}, r"have widths \(13, 20\), "),
    (
        fused,
        pair(f"{EXPERTS}.2.up_proj", 12, 10) | pair(f"{EXPERTS}.2.w3", 12, 10),
        {},
        "another module of the file has this place too",
    ),
    (
        fused,
        pair(f"{EXPERTS}.2.up_proj", 12, 10)
        | {f"{EXPERTS}.2.up_proj.lora_magnitude_vector": np.ones(10, np.float32)},
        {"use_dora": True},
        "a part of kind 'dora' cannot be merged into experts",
    ),
]


@pytest.mark.parametrize(("layout", "tensors", "fields", "text"), FAULTS)
def test_what_has_no_place_is_refused_by_name(tmp_path, layout, tensors, fields, text):
    base = write_base(tmp_path / "base", layout, Sizes(4, 12, 10))
    with pytest.raises(AdapterError, match=text) as caught:
        merge_adapters(base, [adapter(tensors, r=3, **fields)], tmp_path / "out")
    assert "experts" in str(caught.value)
    assert not (tmp_path / "out").exists()


def test_a_model_of_one_expert_takes_factors_of_all(tmp_path):
    sizes = Sizes(1, 12, 10)
    one, deltas = make("fused", sizes)
    merge_adapters(write_base(tmp_path / "base", fused, sizes), [one], tmp_path / "out")
    check(tmp_path / "out", fused, sizes, [deltas])


def test_what_fits_two_parameters_is_refused(tmp_path):
    """Without a gate both projections have the same two widths."""
    shapes = {f"{EXPERTS}.up_proj": (4, 10, 12), f"{EXPERTS}.down_proj": (4, 12, 10)}
    base = write_base(
        tmp_path / "base",
        lambda *_: {
            name: np.zeros(shape, np.float32) for name, shape in shapes.items()
        },
        Sizes(4, 12, 10),
    )
    with pytest.raises(AdapterError, match="fit several parameters; add target_param"):
        merge_adapters(
            base, [adapter(pair(EXPERTS, 12, 10, 12), r=3)], tmp_path / "out"
        )


def test_a_pair_of_one_expert_names_it():
    shapes = {f"{EXPERTS}.up_proj": (4, 10, 12), f"{EXPERTS}.down_proj": (4, 12, 10)}
    part = LowRank(np.ones((3, 12), np.float32), np.ones((10, 3), np.float32), 1.0)
    found = find_experts({f"{EXPERTS}.w1": part}, 1.0, expert_places(shapes, "any"))
    assert "at the place of all; name the expert" in found.faults[0]
    assert not found.updates
