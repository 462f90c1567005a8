"""Experts of every kind find their tensors, in one tensor or one for each expert."""

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from lora_jax.models.checkpoint import list_tensors
from lora_jax.models.experts import Experts
from lora_jax.models.fill import fill
from lora_jax.models.names import Naming, checkpoint_table

NAMING = Naming(left_out="", put_before=(), tied={}, unused=())


class Block(nnx.Module):
    """A module around experts, so that their tensors have a path."""

    def __init__(self, rngs: nnx.Rngs, **changes: object):
        options = {
            "gated": True,
            "activation": "silu",
            "use_bias": False,
            "interleaved": False,
            "stored_in_out": False,
            **changes,
        }
        self.experts = Experts(3, 4, 6, **options, dtype="float32", rngs=rngs)


def table_of(present: set[str], **changes: object) -> dict[str, tuple[int, ...]]:
    model = nnx.eval_shape(lambda: Block(nnx.Rngs(0), **changes))
    table = checkpoint_table(model, present)
    return {name: target.shape for name, target in table.items()}


FUSED = {"experts.gate_up_proj": (3, 12, 4), "experts.down_proj": (3, 4, 6)}
OAI = {
    "experts.gate_up_proj": (3, 4, 12),
    "experts.gate_up_proj_bias": (3, 12),
    "experts.down_proj": (3, 6, 4),
    "experts.down_proj_bias": (3, 4),
}
UP = {"experts.up_proj": (3, 6, 4), "experts.down_proj": (3, 4, 6)}
GPT_OSS = {"use_bias": True, "interleaved": True, "stored_in_out": True}
PLAIN = {"gated": False, "activation": "relu2"}


def one_by_one(**shapes: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    return {
        f"experts.{expert}.{name}.weight": shape
        for expert in range(3)
        for name, shape in shapes.items()
    }


W, DOWN = (6, 4), (4, 6)
LAYOUTS = {
    "nothing is there": (set(), {}, FUSED),
    "in one": ({"experts.down_proj"}, {}, FUSED),
    "one by one": (set(one_by_one(gate_proj=W, up_proj=W, down_proj=DOWN)), {},
                   one_by_one(gate_proj=W, up_proj=W, down_proj=DOWN)),
    "one by one, few left": ({"experts.2.up_proj.weight"}, {},
                             {**one_by_one(gate_proj=W, up_proj=W),
                              "experts.down_proj": (3, 4, 6)}),
    "in Mixtral's words": (set(one_by_one(w1=W, w3=W, w2=DOWN)), {},
                           one_by_one(w1=W, w3=W, w2=DOWN)),
    "interleaved": (set(), GPT_OSS, OAI),
    "without a gate": (set(), PLAIN, UP),
    "without a gate, one by one": (set(one_by_one(up_proj=W, down_proj=DOWN)), PLAIN,
                                   one_by_one(up_proj=W, down_proj=DOWN)),
}  # fmt: skip


@pytest.mark.parametrize("case", LAYOUTS)
def test_the_layout_is_the_one_that_the_file_has(case):
    present, changes, expected = LAYOUTS[case]
    assert table_of(present, **changes) == expected


@pytest.mark.parametrize("changes", [{}, PLAIN], ids=["gated", "without a gate"])
def test_all_layouts_fill_the_same_parameters(tmp_path, changes):
    random = np.random.default_rng(0)
    first = "gate_up_proj" if changes == {} else "up_proj"
    children = ("gate_proj", "up_proj") if changes == {} else ("up_proj",)
    up = random.normal(size=(3, 6 * len(children), 4)).astype(np.float32)
    down = random.normal(size=(3, 4, 6)).astype(np.float32)
    apart = {f"experts.{e}.down_proj.weight": down[e] for e in range(3)}
    for expert in range(3):
        parts = np.split(up[expert], len(children))
        for child, part in zip(children, parts, strict=True):
            apart[f"experts.{expert}.{child}.weight"] = part
    for tensors in ({f"experts.{first}": up, "experts.down_proj": down}, apart):
        save_file(
            {name: np.ascontiguousarray(value) for name, value in tensors.items()},
            tmp_path / "model.safetensors",
        )
        model = fill(
            lambda rngs: Block(rngs, **changes),
            NAMING,
            list_tensors(tmp_path),
            origin="a test",
            progress=lambda _: None,
        )
        experts = model.experts
        layer = experts.gate_up_proj if experts.gated else experts.up_proj
        np.testing.assert_array_equal(layer.kernel[...], np.swapaxes(up, 1, 2))
        np.testing.assert_array_equal(
            experts.down_proj.kernel[...], np.swapaxes(down, 1, 2)
        )


@pytest.mark.torch
def test_experts_without_a_gate_equal_those_of_nemotron_h(tmp_path):
    import torch
    from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts

    class Values:
        n_routed_experts, hidden_size, moe_intermediate_size = 3, 4, 6
        moe_latent_size, mlp_hidden_act = None, "relu2"
        _experts_implementation = "eager"

    theirs = NemotronHExperts(Values())
    random = np.random.default_rng(1)
    tensors = {
        f"experts.{name}": random.normal(size=parameter.shape).astype(np.float32)
        for name, parameter in theirs.named_parameters()
    }
    theirs.load_state_dict(
        {name.removeprefix("experts."): torch.tensor(v) for name, v in tensors.items()}
    )
    save_file(tensors, tmp_path / "model.safetensors")
    ours = fill(
        lambda rngs: Block(rngs, **PLAIN),
        NAMING,
        list_tensors(tmp_path),
        origin="a test",
        progress=lambda _: None,
    )
    x = random.normal(size=(7, 4)).astype(np.float32)
    chosen = np.stack([random.permutation(3)[:2] for _ in range(7)])
    weights = random.uniform(size=(7, 2)).astype(np.float32)
    with torch.no_grad():
        expected = theirs(*map(torch.tensor, (x, chosen, weights))).numpy()
    found = ours.experts(
        jnp.asarray(x), jnp.asarray(chosen, jnp.int32), jnp.asarray(weights)
    )
    assert np.abs(expected).max() > 1
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)
