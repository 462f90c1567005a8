"""`LRU`: order of use and pins."""

import pytest

from lora_jax.lru import LRU


def _lru(*ids: int, pinned: tuple[int, ...] = ()) -> LRU:
    lru = LRU()
    for id in ids:
        lru.add(id)
    for id in pinned:
        lru.pin(id)
    return lru


def test_touch_makes_an_id_the_newest() -> None:
    lru = _lru(1, 2, 3)
    lru.touch(1)
    assert list(lru) == [2, 3, 1]


@pytest.mark.parametrize(
    ("pinned", "kept", "oldest"),
    [((), (), 1), ((1,), (), 2), ((1,), (2,), 3), ((1, 2), (3,), None)],
)
def test_oldest_skips_pinned_and_kept(
    pinned: tuple[int, ...], kept: tuple[int, ...], oldest: int | None
) -> None:
    assert _lru(1, 2, 3, pinned=pinned).oldest(kept) == oldest


def test_removal_drops_the_pin() -> None:
    lru = _lru(1, pinned=(1,))
    lru.remove(1)
    lru.add(1)
    assert lru.pinned == frozenset()


@pytest.mark.parametrize("method", ["touch", "remove", "pin"])
def test_an_absent_id_is_a_key_error(method: str) -> None:
    with pytest.raises(KeyError, match="7"):
        getattr(_lru(1), method)(7)
