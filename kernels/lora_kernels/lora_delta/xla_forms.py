"""The layouts in which XLA computes the low-rank update of a batch.

flat      all slots in two dense products; the numbers of other slots are selected
          away in between. Few tokens or few slots: reads every slot once.
slots     a loop over the slots, selecting rows. Slow, and nothing can leak.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int32

from lora_kernels.routing import Routing


class Site(NamedTuple):
    """The slot arrays of one site: a `[s, p, r, d_in]`, b `[s, r, d_out]`."""

    a: Float[Array, "slots parts max_rank d_in"]
    b: Float[Array, "slots max_rank d_out"]
    scale: Float[Array, "slots parts"]
    rank: Int32[Array, "slots parts"]
    part_widths: tuple[int, ...]


def flat(
    x: Float[Array, "tokens d_in"], site: Site, routing: Routing
) -> Float[Array, "tokens d_out"]:
    """Returns the float32 update of every row; of base rows, zeros or garbage.

    The second product meets every slot's B with exact zeros, and 0 * NaN is NaN. So if
    the result is not finite everywhere, the rows whose own B is not finite are computed
    again by `slots`, and the others with the non-finite numbers of B replaced by 0: by
    the same products, so to the same bits as without the poison.
    """
    h = _selected_h(x, site, routing)
    delta = _expand_all(h, site.b, site.part_widths)

    def poisoned() -> Float[Array, "tokens d_out"]:
        finite = jnp.where(jnp.isfinite(site.b), site.b, 0)
        clean = _expand_all(h, finite, site.part_widths)
        own = _own_b_is_finite(site)[jnp.maximum(routing.slot, 0)]
        return jnp.where(own[:, None], clean, slots(x, site, routing))

    return jax.lax.cond(jnp.isfinite(delta).all(), lambda: delta, poisoned)


def slots(
    x: Float[Array, "tokens d_in"], site: Site, routing: Routing
) -> Float[Array, "tokens d_out"]:
    """Returns the float32 update of every row, zeros for base rows."""
    tokens = x.shape[0]
    d_out = site.b.shape[-1]

    def add_slot(
        slot: Int32[Array, ""], delta: Float[Array, "tokens d_out"]
    ) -> Float[Array, "tokens d_out"]:
        one = Site(
            site.a[slot][None],
            kept_b(site, slot)[None],
            site.scale[slot][None],
            site.rank[slot][None],
            site.part_widths,
        )
        of_slot = routing.slot == slot
        alone = jnp.where(of_slot, 0, -1)
        h = _select(_shrink_all(x, one), one, alone, routing.weight)
        own = _expand_all(h, one.b, site.part_widths)
        return jnp.where(of_slot[:, None], own, delta)

    zeros = jnp.zeros((tokens, d_out), jnp.float32)
    return jax.lax.fori_loop(0, site.a.shape[0], add_slot, zeros)


def kept_b(site: Site, slot: Int32[Array, ""]) -> Float[Array, "max_rank d_out"]:
    """Returns one slot's B with zeros from each part's rank on."""
    row = jnp.arange(site.b.shape[1])[:, None]
    rank_of_column = site.rank[slot][part_of_column(site.part_widths)]
    return jnp.where(row < rank_of_column[None, :], site.b[slot], 0)


def part_of_column(part_widths: tuple[int, ...]) -> np.ndarray:
    """Returns which part owns each output column, `(d_out,)`."""
    return np.repeat(np.arange(len(part_widths)), part_widths)


def _own_b_is_finite(site: Site) -> Bool[Array, " slots"]:
    kept = jax.vmap(lambda slot: kept_b(site, slot))(jnp.arange(site.b.shape[0]))
    return jnp.isfinite(kept).all(axis=(1, 2))


def _selected_h(
    x: Float[Array, "tokens d_in"], site: Site, routing: Routing
) -> Float[Array, "tokens slots parts max_rank"]:
    return _select(_shrink_all(x, site), site, routing.slot, routing.weight)


def _shrink_all(
    x: Float[Array, "tokens d_in"], site: Site
) -> Float[Array, "tokens slots parts max_rank"]:
    rows = site.a.reshape(-1, site.a.shape[-1])
    h = jax.lax.dot_general(
        x, rows, (((1,), (1,)), ((), ())), preferred_element_type=jnp.float32
    )
    return h.reshape(x.shape[0], *site.a.shape[:3])


def _select(
    h: Float[Array, "tokens slots parts max_rank"],
    site: Site,
    slot: Int32[Array, " tokens"],
    weight: Float[Array, " tokens"],
) -> Float[Array, "tokens slots parts max_rank"]:
    n_slots, _, max_rank = h.shape[1:]
    mine = slot[:, None] == jnp.arange(n_slots)[None, :]
    kept = jnp.arange(max_rank)[None, None, :] < site.rank[:, :, None]
    h = h * site.scale[None, :, :, None] * weight[:, None, None, None]
    return jnp.where(mine[:, :, None, None] & kept[None], h, 0)


def _expand_all(
    h: Float[Array, "tokens slots parts max_rank"],
    b: Float[Array, "slots max_rank d_out"],
    part_widths: tuple[int, ...],
) -> Float[Array, "tokens d_out"]:
    stops = np.cumsum(part_widths)
    products = [
        jax.lax.dot_general(
            h[:, :, part].reshape(h.shape[0], -1),
            b[:, :, stop - width : stop].reshape(-1, width).astype(jnp.float32),
            (((1,), (0,)), ((), ())),
        )
        for part, (width, stop) in enumerate(zip(part_widths, stops, strict=True))
    ]
    return jnp.concatenate(products, axis=1)
