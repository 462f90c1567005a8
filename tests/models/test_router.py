"""A router's scores become experts and weights, as transformers' routers do it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.models.experts_config import ExpertsConfig
from lora_jax.models.router import CHOICES, choose

FACTS = ExpertsConfig(
    num_experts=6,
    num_experts_per_tok=3,
    intermediate_size=8,
    shared_intermediate_size=0,
    layers=(True,),
    block="gate",
    choice="softmax_top",
    normalized=False,
    rounded=False,
    activation="silu",
    use_bias=False,
    interleaved=False,
    stored_in_out=False,
)


def facts(**changes: object) -> ExpertsConfig:
    return dataclasses.replace(FACTS, **changes)


def scores(dtype: str = "float32", experts: int = 6) -> jax.Array:
    values = np.random.default_rng(0).normal(0, 2, (9, experts))
    return jnp.asarray(values, dtype)


def defined(row: np.ndarray, config: ExpertsConfig) -> tuple[list[int], np.ndarray]:
    """Returns one token's experts and weights by the formula, in float64."""
    best = sorted(range(len(row)), key=lambda e: (-row[e], e))
    best = best[: config.num_experts_per_tok]
    raised = np.exp(row - row.max())
    among = {"softmax_top": raised, "top_softmax": raised[best]}[config.choice]
    weights = raised[best] / among.sum()
    return best, weights / weights.sum() if config.normalized else weights


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("k", "experts"), [(1, 6), (3, 6), (6, 6), (8, 64)])
def test_weights_are_the_largest_probabilities(choice, normalized, k, experts):
    config = facts(choice=choice, normalized=normalized, num_experts_per_tok=k)
    given = scores(experts=experts)
    chosen, weights = choose(given, config)
    assert chosen.dtype == jnp.int32
    assert weights.dtype == jnp.float32
    for token, row in enumerate(np.asarray(given, np.float64)):
        experts_of_token, expected = defined(row, config)
        assert chosen[token].tolist() == experts_of_token
        np.testing.assert_allclose(weights[token], expected, rtol=1e-5)


@pytest.mark.parametrize("choice", CHOICES)
def test_of_equal_scores_the_lower_expert_goes_first(choice):
    chosen, _ = choose(jnp.zeros((2, 6)).at[1, 4].set(1.0), facts(choice=choice))
    assert chosen.tolist() == [[0, 1, 2], [4, 0, 1]]


@pytest.mark.parametrize("choice", CHOICES)
@pytest.mark.parametrize("rounded", [False, True])
def test_narrow_scores_have_wide_weights_rounded_only_if_asked(choice, rounded):
    config = facts(choice=choice, rounded=rounded)
    _, weights = choose(scores("bfloat16"), config)
    assert weights.dtype == jnp.float32
    narrow = weights.astype(jnp.bfloat16).astype(jnp.float32)
    assert bool((weights == narrow).all()) is rounded


@pytest.mark.torch
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_weights_equal_those_of_the_families_routers(family, dtype):
    import torch
    from transformers.models.gpt_oss import modeling_gpt_oss
    from transformers.models.mixtral import modeling_mixtral
    from transformers.models.qwen3_moe import modeling_qwen3_moe

    routers = {
        "mixtral": modeling_mixtral.MixtralTopKRouter,
        "qwen3_moe": modeling_qwen3_moe.Qwen3MoeTopKRouter,
        "gpt_oss": modeling_gpt_oss.GptOssTopKRouter,
    }
    ours = {
        "mixtral": facts(normalized=True),
        "qwen3_moe": facts(normalized=True, rounded=True),
        "gpt_oss": facts(choice="top_softmax", rounded=True),
    }[family]

    class Values:
        num_experts = num_local_experts = hidden_size = 6
        num_experts_per_tok = 3
        norm_topk_prob = True

    router = routers[family](Values())
    given = scores(dtype)
    with torch.no_grad():
        router.weight.copy_(torch.eye(6))
        for name, parameter in router.named_parameters():
            if name == "bias":
                parameter.zero_()
        router = router.to(getattr(torch, dtype))
        x = torch.tensor(np.asarray(given, np.float32)).to(router.weight.dtype)
        _, expected, experts = router(x)
    chosen, weights = choose(given, ours)
    np.testing.assert_array_equal(chosen, experts.numpy())
    # One step of bfloat16: torch rounds inside its softmax, XLA at its end.
    bound = {"float32": 1e-6, "bfloat16": 2**-8}[dtype]
    np.testing.assert_allclose(weights, expected.float().numpy(), rtol=bound)
