"""`LoRARequest`: identity and faults."""

import pytest

from lora_jax.errors import RequestError
from lora_jax.request import LoRARequest


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (("sql", 0, "dir"), "id must be > 0, got 0"),
        (("sql", 1), "lora_path cannot be empty"),
        (("", 1, "dir"), "lora_name cannot be empty"),
        (("", -3, ""), "(?s)got -3.*lora_name.*lora_path"),
    ],
)
def test_a_useless_request_names_every_fault(
    fields: tuple[object, ...], text: str
) -> None:
    with pytest.raises(RequestError, match=text):
        LoRARequest(*fields)  # type: ignore[arg-type]


def test_two_ids_with_one_name_are_two_requests() -> None:
    one, two = LoRARequest("sql", 1, "a"), LoRARequest("sql", 2, "b")
    assert len({one, two, LoRARequest("sql", 1, "a")}) == 2


def test_fields_go_by_the_managers_names_too() -> None:
    request = LoRARequest("sql", 7, "dir")
    assert (request.adapter_id, request.name, request.path) == (7, "sql", "dir")
