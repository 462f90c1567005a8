"""Many feed-forward blocks of one shape, of which each token uses the few it chose.

A token with k chosen experts makes k *pairs*; pair `p` is token `p // k`. Rows are
never sorted here: who belongs to which expert is a `Routing` over experts. Knows
nothing of how experts are chosen (`router.py`) or of checkpoints (`names.py`).

Experts may be spread over devices (`expert_parallel.py`): each device then computes the
pairs of its own experts, and the tokens' sums are added up.
"""

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from lora_jax.models.activations import ACTIVATIONS, gated
from lora_jax.models.expert_mesh import (
    EXPERT_AXIS,
    ExpertMesh,
    own_experts,
    sum_over_devices,
)
from lora_kernels import Routing, grouped_dot, make_routing

GATE_UP_NAMES = (("gate_proj", "w1"), ("up_proj", "w3"))
UP_NAMES = (("up_proj", "w1"),)
DOWN_NAMES = (("down_proj", "w2"),)
"""For each part the names that a checkpoint of one tensor per expert may use."""


class ExpertLinear(nnx.Module):
    """One linear layer for each expert, all of the same shape.

    Args:
      num_experts: number of layers.
      in_features: width of the input.
      parts: name and width of each projection, in column order.
      use_bias: whether each expert adds a bias.
      fused_name: the checkpoint's name of the tensor of all experts.
      expert_names: for each part its names in checkpoints of one tensor per expert.
      interleaved: whether a checkpoint's columns alternate between the two parts;
        those of `kernel` never do.
      stored_in_out: whether a checkpoint keeps `(experts, d_in, d_out)`, as `kernel`,
        instead of `(experts, d_out, d_in)`.
      dtype: of parameters and products.
      rngs: for random weights.

    Attributes:
      kernel: `(experts, d_in, d_out)`.
      bias: `(experts, d_out)`, or `None`.
      scale: `(experts, d_out)`, by which a kernel of int8 numbers is multiplied
        (`quantize.py`), or `None`.
      num_experts, in_features, out_features: static, as are all the arguments.
      expert_mesh: over which devices the experts are spread (static), or `None`. The
        arrays that one device sees hold its own experts only.
    """

    def __init__(
        self,
        num_experts: int,
        in_features: int,
        parts: tuple[tuple[str, int], ...],
        *,
        use_bias: bool,
        fused_name: str,
        expert_names: tuple[tuple[str, ...], ...],
        interleaved: bool,
        stored_in_out: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.num_experts = num_experts
        self.in_features = in_features
        self.out_features = sum(width for _, width in parts)
        self.parts = parts
        self.use_bias = use_bias
        self.fused_name = fused_name
        self.expert_names = expert_names
        self.interleaved = interleaved
        self.stored_in_out = stored_in_out
        self.expert_mesh: ExpertMesh | None = None
        shape = (num_experts, in_features, self.out_features)
        draw = jax.nn.initializers.lecun_normal(batch_axis=0)
        kernel = draw(rngs.params(), shape, jnp.dtype(dtype))
        self.kernel = nnx.Param(kernel, expert_axis=0)
        self.bias: nnx.Param | None
        if use_bias:
            bias = jnp.zeros(shape[::2], jnp.dtype(dtype))
            self.bias = nnx.Param(bias, expert_axis=0)
        else:
            self.bias = nnx.data(None)
        self.scale: nnx.Param | None = nnx.data(None)

    @property
    def part_widths(self) -> tuple[int, ...]:
        """Returns the number of output columns of each part."""
        return tuple(width for _, width in self.parts)

    def __call__(
        self, x: Float[Array, "rows d_in"], pairs: Routing
    ) -> Float[Array, "pairs d_out"]:
        """Returns each pair's product with its expert's kernel, and its bias added.

        Args:
          x: `rows` divides the number of pairs; pair `p` reads row
            `p // (pairs / rows)`.
          pairs: expert of each pair; a pair without one gives exact zeros.
        """
        y = self._product(x, pairs)
        if self.bias is None:
            return y
        return y + jnp.where(_has_expert(pairs), self.bias[...][pairs.slot], 0)

    def _product(
        self, x: Float[Array, "rows d_in"], pairs: Routing
    ) -> Float[Array, "pairs d_out"]:
        if self.scale is None:
            return grouped_dot(x, self.kernel[...], pairs)
        # Before they are scaled, the sums may be wider than x's dtype can hold.
        wide = x.astype(jnp.promote_types(jnp.float32, x.dtype))
        sums = grouped_dot(wide, self.kernel[...], pairs)
        scale = jnp.where(_has_expert(pairs), self.scale[...][pairs.slot], 0)
        return (sums * scale).astype(x.dtype)


class Experts(nnx.Module):
    """The feed-forward blocks: `down(act(gate(x)) * up(x))`, or `down(act(up(x)))`.

    Args:
      num_experts: number of blocks.
      hidden_size: width of tokens.
      intermediate_size: width inside a block.
      gated: whether a block has a gate.
      activation: a key of `ACTIVATIONS`, or if gated of `GATES`.
      use_bias, interleaved, stored_in_out, dtype, rngs: as in `ExpertLinear`.

    Attributes:
      gate_up_proj: only if gated; columns are the gate's, then up's.
      up_proj: only if not gated.
      down_proj: in both kinds.
      expert_mesh: as in `ExpertLinear`.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        gated: bool,
        activation: str,
        use_bias: bool,
        interleaved: bool,
        stored_in_out: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        self.num_experts = num_experts
        self.gated = gated
        self.activation = activation
        self.expert_mesh: ExpertMesh | None = None

        def linear(d_in, parts, fused_name, expert_names, interleaved) -> ExpertLinear:
            return ExpertLinear(
                num_experts,
                d_in,
                parts,
                use_bias=use_bias,
                fused_name=fused_name,
                expert_names=expert_names,
                interleaved=interleaved,
                stored_in_out=stored_in_out,
                dtype=dtype,
                rngs=rngs,
            )

        d, width = hidden_size, intermediate_size
        up = ("up_proj", width)
        if gated:
            both = (("gate_proj", width), up)
            self.gate_up_proj = linear(
                d, both, "gate_up_proj", GATE_UP_NAMES, interleaved
            )
        else:
            self.up_proj = linear(d, (up,), "up_proj", UP_NAMES, False)
        down = (("down_proj", d),)
        self.down_proj = linear(width, down, "down_proj", DOWN_NAMES, False)

    def __call__(
        self,
        x: Float[Array, "tokens d"],
        chosen: Int[Array, "tokens k"],
        weights: Float[Array, "tokens k"],
    ) -> Float[Array, "tokens d"]:
        """Returns each token's weighted sum of its experts' outputs.

        Args:
          x: the tokens.
          chosen: expert of each pair; one outside `[0, num_experts)` adds nothing.
          weights: float32; applied once, to the output, and summed in float32.
        """
        place = self.expert_mesh
        if place is None:
            mixed = _mixed(self, x, chosen, weights)
        else:
            mixed = sum_over_devices(place, self, _mixed_here, x, chosen, weights)
        return mixed.astype(x.dtype)

    def _hidden(
        self, x: Float[Array, "tokens d"], pairs: Routing
    ) -> Float[Array, "pairs width"]:
        if not self.gated:
            return ACTIVATIONS[self.activation](self.up_proj(x, pairs))
        gate, up = jnp.split(self.gate_up_proj(x, pairs), 2, axis=-1)
        return gated(self.activation, gate, up)


def _mixed(
    experts: Experts,
    x: Float[Array, "tokens d"],
    chosen: Int[Array, "tokens k"],
    weights: Float[Array, "tokens k"],
) -> Float[Array, "tokens d"]:
    """Returns in float32 what the experts that `experts` holds add to each token."""
    down = experts.down_proj
    pairs = _make_routing(chosen.reshape(-1), down.kernel.shape[0])
    outputs = down(experts._hidden(x, pairs), pairs)
    by_token = outputs.reshape(*chosen.shape, x.shape[-1]).astype(jnp.float32)
    return jnp.sum(by_token * weights.astype(jnp.float32)[..., None], axis=1)


def _mixed_here(
    experts: Experts,
    part: Int[Array, ""],
    x: Float[Array, "tokens d"],
    chosen: Int[Array, "tokens k"],
    weights: Float[Array, "tokens k"],
) -> Float[Array, "tokens d"]:
    """`_mixed` on one of the devices; pairs of experts elsewhere add exact zeros."""
    held, place = experts.down_proj.kernel.shape[0], experts.expert_mesh
    if place is None or held * place.size != experts.num_experts:
        raise ValueError(
            f"a device holds {held} of {experts.num_experts} experts that are spread "
            f"as {place}; restore parameters with their metadata ({EXPERT_AXIS})."
        )
    return _mixed(experts, x, own_experts(chosen, part, held), weights)


def _has_expert(pairs: Routing) -> Array:
    return pairs.slot[:, None] >= 0


_make_routing = jax.jit(make_routing, static_argnums=1)
