"""LoRA for the experts of a mixture: each pair of token and expert has its own update.

Slot layout, for `experts` linear layers of `parts` fused children each:

    a      (slots, experts, parts, max_rank, d_in)
    b      (slots, experts, max_rank, d_out)
    scale  (slots, experts, parts) float32
    rank   (slots, experts, parts) int32      0: this expert is not adapted

so every layout of a file has the same arrays: a pair for each expert, flat factors of
all experts, factors that experts share (repeated here). The router chooses first; the
update is added to the pair's output, before the activation in the first projection and
before the router's weight in the second.

A part key counts the parts of all experts in turn: `expert * parts + part`.

Where the base layer's experts are spread over devices, so are the arrays above, along
their axis of experts. A forward pass then sees a device's own experts alone.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from lora_jax.adapters import AdapterPart, ExpertPairs, ExpertsLowRank, LowRank
from lora_jax.adapters.expert_layout import ExpertShape, expert_factors, layout_faults
from lora_jax.adapters.parts import scale_of
from lora_jax.config import LoRAConfig
from lora_jax.errors import ConfigError
from lora_jax.layers.base import HostSlot, LoRALayer, PartKey, Shape, SlotSpec, zero
from lora_jax.models.expert_mesh import EXPERT_AXIS
from lora_jax.models.expert_parallel import process_experts
from lora_jax.models.experts import ExpertLinear, Experts
from lora_kernels import Routing, lora_experts, pair_routing


class LoRAExperts(LoRALayer):
    """Mixin over an `ExpertLinear`, which maps rows and their pairs to pairs."""

    slots_metadata: ClassVar[Mapping[str, Any]] = MappingProxyType({EXPERT_AXIS: 1})

    def __call__(self, inputs: jax.Array, pairs: Routing) -> jax.Array:
        """Returns the base layer's output plus each pair's low-rank update.

        Args:
          inputs: `(tokens or pairs, d_in)`.
          pairs: expert of each pair, as many pairs for each of the routing's rows.
        Raises:
          ValueError: if the pairs are no multiple of the routing's rows.
        """
        outputs = super().__call__(inputs, pairs)  # type: ignore[misc]
        routing = self.lora_routing.get_value()
        if routing is None:
            return outputs
        site, slots = self.lora_site, self.lora_slots.get_value()
        tokens, number = routing.slot.shape[0], pairs.slot.shape[0]
        if number % max(tokens, 1) or (number and not tokens):
            raise ValueError(
                f"{site.name}: the routing names {tokens} rows, but the layer sees "
                f"{number} pairs; give one id per token ({site.domain})."
            )
        experts = slots["rank"].shape[1]
        return lora_experts(
            inputs,
            outputs,
            slots["a"],
            slots["b"],
            scale=slots["scale"],
            rank=slots["rank"],
            routing=_pair_routing(routing, pairs.slot, experts),
            part_widths=site.part_widths,
        )

    def slot_spec(self, dtype: jax.typing.DTypeLike) -> SlotSpec:
        """Returns the layout in this file's docstring, less the slot axis."""
        site = self.lora_site
        experts, parts = self._experts, len(site.parts)
        stack = () if site.layers is None else (site.layers,)
        shapes = {
            "a": ((experts, parts, site.max_rank, site.d_in), dtype),
            "b": ((experts, site.max_rank, site.d_out), dtype),
            "scale": ((experts, parts), jnp.float32),
            "rank": ((experts, parts), jnp.int32),
        }
        base: ExpertLinear = self  # type: ignore[assignment]
        place = base.expert_mesh
        sharding = None if place is None else place.spread(0)
        return {
            key: jax.ShapeDtypeStruct((*stack, *shape), kind, sharding=sharding)
            for key, (shape, kind) in shapes.items()
        }

    def extra_spec(self, key: str, values: np.ndarray) -> SlotSpec:
        """Returns `{}`: no kind brings arrays of its own here."""
        return {}

    def overlap(self, first: PartKey, second: PartKey) -> bool:
        """Says whether the two adapt the same part of the same expert."""
        return not set(self._numbers(first)).isdisjoint(self._numbers(second))

    def faults(self, part: PartKey, weights: AdapterPart) -> list[str]:
        """Returns why a part cannot sit here: its kind, its shapes, its rank."""
        shape = self._shape_of(part)
        if isinstance(weights, ExpertsLowRank | ExpertPairs):
            if shape.experts != self._experts:
                return ["factors of all experts, at the place of one; name all."]
            found = layout_faults(weights, shape)
        elif isinstance(weights, LowRank):
            if shape.experts != 1:
                return ["a pair for one expert, at the place of all; name the expert."]
            found = _pair_faults(weights, shape)
        else:
            kind = type(weights).__name__
            return [f"a {kind} cannot be served by experts; low-rank pairs can."]
        if weights.rank > self.lora_site.max_rank:
            found.append(
                f"rank {weights.rank} exceeds max_lora_rank={self.lora_site.max_rank}; "
                "raise max_lora_rank or retrain."
            )
        return found

    def pack(
        self,
        weights: Mapping[PartKey, AdapterPart],
        dtype: np.dtype,
        *,
        layer: int | None = None,
    ) -> HostSlot:
        """Returns one slot's host arrays at this adapter's own largest rank.

        Experts and projections that the adapter leaves out keep rank 0. Factors for
        several parts lend their A to each of them and their B rows to their owners.

        Experts that other processes hold stay zeros of rank 0: nothing of a file is
        copied for them, and pages that nobody writes take no memory. The arrays have
        their places all the same, so `nbytes` counts them.
        """
        site, experts, parts = self.lora_site, self._experts, len(self.lora_site.parts)
        most = max(weight.rank for weight in weights.values())
        a = np.zeros((experts, parts, most, site.d_in), dtype)
        b = np.zeros((experts, most, site.d_out), dtype)
        scale = np.zeros((experts, parts), np.float32)
        ranks = np.zeros((experts, parts), np.int32)
        starts, held = np.cumsum([0, *site.part_widths]), self.held_experts
        for key, weight in weights.items():
            named = sorted(self._experts_of(key))  # One expert, or all of them.
            begin = max(named[0], held.start)
            owners = slice(begin, max(begin, min(named[-1] + 1, held.stop)))
            own = slice(owners.start - named[0], owners.stop - named[0])
            first, second = (factor[own] for factor in self._factors(key, weight))
            row = 0
            for part in self._parts_of(key):
                width = site.part_widths[part]
                columns = slice(starts[part], starts[part + 1])
                rows = second[:, row : row + width].swapaxes(1, 2)
                a[owners, part, : weight.rank] = first
                b[owners, : weight.rank, columns] = rows
                scale[owners, part] = scale_of(weight)
                ranks[owners, part] = weight.rank
                row += width
        return {"a": a, "b": b, "scale": scale, "rank": ranks}

    def zeros(self, part: PartKey, rank: int) -> AdapterPart | None:
        """Returns an update of zeros of all experts; None for a part of them."""
        if part is not None:
            return None
        site = self.lora_site
        a, b = zero(1, rank, site.d_in), zero(1, site.d_out, rank)
        return ExpertPairs(a, b, 1.0)

    @property
    def _experts(self) -> int:
        return self.lora_site.shape.experts

    @property
    def held_experts(self) -> range:
        """Experts of which this process keeps copies."""
        base: ExpertLinear = self  # type: ignore[assignment]
        place = base.expert_mesh
        held = None if place is None else process_experts(place, self._experts)
        return range(self._experts) if held is None else held

    def _numbers(self, key: PartKey) -> tuple[int, ...]:
        if key is None:
            return tuple(range(self._experts * len(self.lora_site.parts)))
        return key if isinstance(key, tuple) else (key,)

    def _experts_of(self, key: PartKey) -> set[int]:
        return {number // len(self.lora_site.parts) for number in self._numbers(key)}

    def _parts_of(self, key: PartKey) -> list[int]:
        parts = len(self.lora_site.parts)
        return sorted({number % parts for number in self._numbers(key)})

    def _shape_of(self, key: PartKey) -> ExpertShape:
        """What the factors at a key must be like."""
        widths = self.lora_site.part_widths
        d_out = sum(widths[part] for part in self._parts_of(key))
        experts = len(self._experts_of(key))
        base: ExpertLinear = self  # type: ignore[assignment]
        return ExpertShape(experts, self.lora_site.d_in, d_out, base.stored_in_out)

    def _factors(
        self, key: PartKey, weight: AdapterPart
    ) -> tuple[np.ndarray, np.ndarray]:
        """Factors of each expert, the rows of B in the order of the parts."""
        if isinstance(weight, ExpertsLowRank | ExpertPairs):
            a, b = expert_factors(weight, self._shape_of(key))
        else:
            assert isinstance(weight, LowRank), "faults() refuses other kinds"
            a, b = weight.a[None], weight.b[None]
        base: ExpertLinear = self  # type: ignore[assignment]
        if base.interleaved and len(self._parts_of(key)) > 1:
            b = np.concatenate([b[:, 0::2], b[:, 1::2]], axis=1)
        return a, b


def describe_experts(layer: ExpertLinear, name: str) -> Shape:
    """Returns the shape of an `ExpertLinear`, and every name of its projections.

    After the path of the experts: `3.gate_proj`, `3.w1` (one of one expert),
    `3.gate_up_proj`, `gate_up_projs.3` (all of one), `gate_proj`, `w1` (one of all).
    """
    parts, names = len(layer.parts), layer.expert_names
    keys: dict[str, PartKey] = {}
    for expert in range(layer.num_experts):
        own = tuple(range(expert * parts, (expert + 1) * parts))
        keys[f"{expert}.{name}"] = keys[f"{name}s.{expert}"] = own
        for part, spellings in enumerate(names):
            keys |= {f"{expert}.{spelling}": own[part] for spelling in spellings}
    total = layer.num_experts * parts
    for part, spellings in enumerate(names):
        every = tuple(range(part, total, parts))
        keys |= {spelling: every for spelling in spellings if spelling != name}
    return Shape(
        layer.in_features,
        layer.parts,
        groups=tuple(keys.items()),
        experts=layer.num_experts,
    )


def check_spread(model: nnx.Module, config: LoRAConfig) -> None:
    """Refuses options that do not fit where a model's experts lie.

    Raises:
      ConfigError: if `enable_expert_parallel` is set and no expert is spread over
        devices, or `fully_sharded_loras` and experts are.
    """
    spread = any(
        isinstance(module, Experts) and module.expert_mesh is not None
        for _, module in nnx.iter_modules(model)
    )
    name = type(model).__name__
    if config.enable_expert_parallel and not spread:
        raise ConfigError(
            f"enable_expert_parallel=True, but no experts of {name} are spread over "
            "devices; call shard_experts(model, mesh) first."
        )
    if config.fully_sharded_loras and spread:
        raise ConfigError(
            f"fully_sharded_loras=True, but the experts of {name} are spread over "
            "devices; the two cannot be combined, leave the option out."
        )


def _pair_faults(weights: LowRank, shape: ExpertShape) -> list[str]:
    found = []
    if weights.a.shape[1] != shape.d_in:
        found.append(
            f"lora_A has input width {weights.a.shape[1]}, an expert has {shape.d_in}."
        )
    if weights.b.shape[0] != shape.d_out:
        found.append(
            f"lora_B has output width {weights.b.shape[0]}, an expert has "
            f"{shape.d_out}."
        )
    return found


_pair_routing = jax.jit(pair_routing, static_argnums=2)
