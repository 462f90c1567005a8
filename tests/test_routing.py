"""Mapping to routing: vLLM's recorded examples, base rows, unknown ids."""

import jax.numpy as jnp
import numpy as np
import pytest

from lora_jax.routing import (
    LoRAMapping,
    LoRAMappingType,
    ids_to_slots,
    mapping_to_routing,
    routing_from_slots,
)

TABLE = [None, 7, 5]


def test_recorded_mapping_gives_the_recorded_slots():
    routing = mapping_to_routing(LoRAMapping((5, 5, 0, 7), (5, 0, 7)), [*TABLE, None])
    assert routing["tokens"].slot.tolist() == [2, 2, -1, 1]
    assert routing["prompts"].slot.tolist() == [2, -1, 1]


def test_recorded_order_and_starts():
    slots = jnp.asarray([0, 0, -1, 2, 2, -1, 0])
    routing = routing_from_slots(slots, 4)["tokens"]
    assert routing.order.tolist() == [2, 5, 0, 1, 6, 3, 4]
    assert routing.starts.tolist() == [0, 2, 5, 5, 7, 7]


def test_a_batch_of_base_rows_does_no_lora_work():
    assert mapping_to_routing(LoRAMapping((0, -3, 0), (0,)), TABLE) == {}


def test_rows_that_are_not_sampled_keep_the_routing_of_the_sampled_ones():
    routing = mapping_to_routing(LoRAMapping((5, 0), (0,)), TABLE)
    assert routing["prompts"].slot.tolist() == [-1]


@pytest.mark.parametrize(
    ("kind", "domain"),
    [(LoRAMappingType.TOWER, "tower"), (LoRAMappingType.CONNECTOR, "connector")],
)
def test_tower_and_connector_rows_have_their_own_domain(kind, domain):
    routing = mapping_to_routing(LoRAMapping((5, 7), (), type=kind), TABLE)
    assert routing[domain].slot.tolist() == [2, 1]
    assert set(routing) == {domain}


def test_an_id_in_no_slot_is_an_error_that_names_it():
    with pytest.raises(
        KeyError, match=r"adapters \[9, 11\] of the mapping are in no slot"
    ):
        mapping_to_routing(LoRAMapping((5, 9, 11, 0), (5,)), TABLE)


def test_mappings_compare_by_value():
    assert LoRAMapping([1, 0], [1]) == LoRAMapping((1, 0), (1,))
    assert hash(LoRAMapping([1, 0], [1])) == hash(LoRAMapping((1, 0), (1,)))
    assert LoRAMapping([1], [1]) != LoRAMapping([1], [1], is_prefill=True)


def test_ids_to_slots_is_int32():
    assert ids_to_slots([5, 0, -1], {5: 3}).dtype == np.int32


def test_prompt_rows_and_weights_are_optional():
    routing = routing_from_slots(
        jnp.asarray([0, 9]),
        2,
        prompt_slots=jnp.asarray([1]),
        weight=jnp.asarray([0.5, 1.0]),
    )
    assert routing["tokens"].slot.tolist() == [0, -1]
    assert routing["tokens"].weight.tolist() == [0.5, 1.0]
    assert routing["prompts"].slot.tolist() == [1]
