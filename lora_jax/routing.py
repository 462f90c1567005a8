"""Who asked for what, row by row: LoRAMapping (adapter ids) -> routing (slots).

The routing of a step is a value: one `lora_kernels.Routing` for each domain whose rows
the model sees. A step that was given one cannot be changed by anything that happens to
the slot table afterwards. Knows nothing of weights.
"""

import enum
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from lora_jax.shapes import BASE_ID, BASE_SLOT, CONNECTOR, PROMPTS, TOKENS, TOWER
from lora_kernels import Routing, make_routing

RoutingSet = dict[str, Routing]
"""Domain -> routing of its rows. A domain without an entry does no LoRA work."""


class LoRAMappingType(enum.Enum):
    """Which rows a mapping speaks of. Source: vLLM `lora/layers/utils.py`."""

    LANGUAGE = 1
    TOWER = 2
    CONNECTOR = 3


@dataclass(frozen=True)
class LoRAMapping:
    """Adapter ids of one batch, compared by value; 0 (or negative) is the base model.

    Attributes:
      index_mapping: one id per token row, in the order in which the layers see them.
        An adapter acts where its id stands: for an activated LoRA write 0 before
        `activation_start`.
      prompt_mapping: one id per sampled row (what lm_head and other heads see).
      is_prefill: kept for vLLM's signature; nothing depends on it here.
      type: which part of the model the rows belong to.

    Example:
      >>> LoRAMapping([1, 1, 0], [1, 0]) == LoRAMapping((1, 1, 0), (1, 0))
      True
    """

    index_mapping: tuple[int, ...]
    prompt_mapping: tuple[int, ...]
    is_prefill: bool = False
    type: LoRAMappingType = LoRAMappingType.LANGUAGE

    def __init__(
        self,
        index_mapping: Sequence[int],
        prompt_mapping: Sequence[int],
        is_prefill: bool = False,
        type: LoRAMappingType = LoRAMappingType.LANGUAGE,
    ) -> None:
        object.__setattr__(self, "index_mapping", tuple(index_mapping))
        object.__setattr__(self, "prompt_mapping", tuple(prompt_mapping))
        object.__setattr__(self, "is_prefill", is_prefill)
        object.__setattr__(self, "type", type)


def mapping_to_routing(
    mapping: LoRAMapping, lora_index_to_id: Sequence[int | None]
) -> RoutingSet:
    """Returns the routing of a batch under a slot table.

    A mapping of base rows alone gives no entry: no LoRA work is done.

    Args:
      mapping: adapter ids per row.
      lora_index_to_id: slot -> adapter id, None where a slot is free.
    Raises:
      KeyError: if an id sits in no slot.
    """
    slots = len(lora_index_to_id)
    slot_of = {
        id_: slot for slot, id_ in enumerate(lora_index_to_id) if id_ is not None
    }
    rows = {
        LoRAMappingType.LANGUAGE: {
            TOKENS: mapping.index_mapping,
            PROMPTS: mapping.prompt_mapping,
        },
        LoRAMappingType.TOWER: {TOWER: mapping.index_mapping},
        LoRAMappingType.CONNECTOR: {CONNECTOR: mapping.index_mapping},
    }[mapping.type]
    found = {domain: ids_to_slots(ids, slot_of) for domain, ids in rows.items()}
    if all(np.all(row_slots == BASE_SLOT) for row_slots in found.values()):
        return {}
    return {
        domain: _make_routing(jnp.asarray(row_slots), slots)
        for domain, row_slots in found.items()
    }


def ids_to_slots(ids: Sequence[int], slot_of: Mapping[int, int]) -> np.ndarray:
    """Returns each row's slot as int32, `BASE_SLOT` for the base model's rows.

    Raises:
      KeyError: naming every id that sits in no slot; such a row would get another
        adapter's weights, or none.
    """
    absent = sorted({id_ for id_ in ids if id_ > BASE_ID and id_ not in slot_of})
    if absent:
        raise KeyError(
            f"adapters {absent} of the mapping are in no slot (active: "
            f"{sorted(slot_of)}); activate them before set_adapter_mapping."
        )
    slots = [slot_of[id_] if id_ > BASE_ID else BASE_SLOT for id_ in ids]
    return np.asarray(slots, np.int32)


def routing_from_slots(
    slots: jax.Array,
    num_slots: int,
    *,
    prompt_slots: jax.Array | None = None,
    weight: jax.Array | None = None,
) -> RoutingSet:
    """Returns the routing of token rows from their slots; pure, for use inside jit.

    Args:
      slots: `(tokens,)` int32, -1 or any value outside `[0, num_slots)` for base rows
        and padding.
      num_slots: slots of the bank.
      prompt_slots: `(rows,)` int32 of the sampled rows, if a head carries LoRA.
      weight: `(tokens,)` float32 strength of each token's adapter; 1 if None.
    """
    found = {TOKENS: make_routing(slots, num_slots, weight=weight)}
    if prompt_slots is not None:
        found[PROMPTS] = make_routing(prompt_slots, num_slots)
    return found


def activation_start(
    token_ids: Sequence[int], invocation_tokens: Sequence[int]
) -> int | None:
    """Returns the first token on which an activated LoRA (aLoRA) acts in a prompt.

    That is where the last occurrence of the invocation tokens begins; None if they do
    not occur, and then the adapter acts on no token. 0 for an ordinary adapter. Tokens
    before it are the base model's, bit for bit, so their keys and values are too.

    Example:
      >>> activation_start([7, 5, 6, 7, 5, 6], [5, 6])
      4

    Source: PEFT's `alora_invocation_tokens`; https://arxiv.org/abs/2504.12397.
    """
    tokens, wanted = tuple(token_ids), tuple(invocation_tokens)
    if not wanted:
        return 0
    latest_first = range(len(tokens) - len(wanted), -1, -1)
    return next((i for i in latest_first if tokens[i:][: len(wanted)] == wanted), None)


_make_routing = jax.jit(make_routing, static_argnums=1)
