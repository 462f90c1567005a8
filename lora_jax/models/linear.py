"""A linear layer whose output columns belong to several named projections.

Fusing q, k, v (and gate, up) makes one product of several; checkpoints and adapters
keep the children's names, and `parts` says which columns are whose.
"""

from collections.abc import Mapping

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike

PACKED_MODULES: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""The fused modules of a decoder and the children that each replaces."""


class FusedLinear(nnx.Linear):
    """An `nnx.Linear` whose columns are the outputs of `parts`, side by side.

    Args:
      in_features: width of the input.
      parts: name and width of each child projection, in column order.
      use_bias, dtype, rngs: as in `nnx.Linear`; `dtype` is also the parameters' dtype.

    Attributes:
      parts: static, for instance `(("q_proj", 576), ("k_proj", 192), ("v_proj", 192))`.

    Example:
      >>> from flax import nnx
      >>> layer = FusedLinear(4, (("q", 4), ("k", 2)), use_bias=False,
      ...                     dtype="float32", rngs=nnx.Rngs(0))
      >>> layer.kernel.shape, layer.part_widths
      ((4, 6), (4, 2))
    """

    def __init__(
        self,
        in_features: int,
        parts: tuple[tuple[str, int], ...],
        *,
        use_bias: bool,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            sum(width for _, width in parts),
            use_bias=use_bias,
            dtype=jnp.dtype(dtype),
            param_dtype=jnp.dtype(dtype),
            rngs=rngs,
        )
        self.parts = parts

    @property
    def part_widths(self) -> tuple[int, ...]:
        """Returns the number of output columns of each part."""
        return tuple(width for _, width in self.parts)


class Conv1D(nnx.Linear):
    """GPT-2's linear layer: always with a bias, and stored as our kernels are.

    It has a type of its own only because its checkpoint tensor is `(d_in, d_out)`.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        dtype: DTypeLike,
        rngs: nnx.Rngs,
    ):
        super().__init__(
            in_features,
            out_features,
            use_bias=True,
            dtype=jnp.dtype(dtype),
            param_dtype=jnp.dtype(dtype),
            rngs=rngs,
        )


def linear_of_parts(
    in_features: int,
    parts: tuple[tuple[str, int], ...],
    *,
    use_bias: bool,
    dtype: DTypeLike,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """Returns a `FusedLinear`, or a plain layer if there is only one part."""
    if len(parts) != 1:
        return FusedLinear(
            in_features, parts, use_bias=use_bias, dtype=dtype, rngs=rngs
        )
    _, width = parts[0]
    return plain_linear(in_features, width, use_bias=use_bias, dtype=dtype, rngs=rngs)


def plain_linear(
    in_features: int,
    out_features: int,
    *,
    use_bias: bool,
    dtype: DTypeLike,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """Returns an `nnx.Linear` that computes in its parameters' dtype."""
    return nnx.Linear(
        in_features,
        out_features,
        use_bias=use_bias,
        dtype=jnp.dtype(dtype),
        param_dtype=jnp.dtype(dtype),
        rngs=rngs,
    )


def plain_embed(
    num_embeddings: int, features: int, *, dtype: DTypeLike, rngs: nnx.Rngs
) -> nnx.Embed:
    """Returns an `nnx.Embed` that gives rows in its table's dtype."""
    return nnx.Embed(
        num_embeddings,
        features,
        dtype=jnp.dtype(dtype),
        param_dtype=jnp.dtype(dtype),
        rngs=rngs,
    )
