"""Ids in order of last use, some of them pinned. Standard library only.

    oldest -> [ 4 | 2 | 7* | 1 ] -> newest        * pinned: `oldest` skips it

Knows no capacity and evicts nothing: it answers who would have to go.
"""

from collections import OrderedDict
from collections.abc import Container, Iterator


class LRU:
    """An ordered set of ids, from oldest to newest use, with pins.

    Example:
      >>> lru = LRU()
      >>> for id in (1, 2, 3):
      ...     lru.add(id)
      >>> lru.touch(1)
      >>> lru.pin(2)
      >>> list(lru), lru.oldest()
      ([2, 3, 1], 3)
    """

    def __init__(self) -> None:
        self._order: OrderedDict[int, None] = OrderedDict()
        self._pinned: set[int] = set()

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, id: object) -> bool:
        return id in self._order

    def __iter__(self) -> Iterator[int]:
        return iter(self._order)

    @property
    def pinned(self) -> frozenset[int]:
        """The pinned ids."""
        return frozenset(self._pinned)

    def is_pinned(self, id: int) -> bool:
        """Says whether `id` is pinned."""
        return id in self._pinned

    def add(self, id: int) -> None:
        """Adds `id` as the newest."""
        self._order[id] = None
        self._order.move_to_end(id)

    def touch(self, id: int) -> None:
        """Makes `id` the newest. Raises KeyError if it is absent."""
        self._order.move_to_end(id)

    def remove(self, id: int) -> None:
        """Removes `id` and its pin. Raises KeyError if it is absent."""
        del self._order[id]
        self._pinned.discard(id)

    def pin(self, id: int) -> None:
        """Pins `id`. Raises KeyError if it is absent."""
        if id not in self._order:
            raise KeyError(id)
        self._pinned.add(id)

    def oldest(self, kept: Container[int] = ()) -> int | None:
        """Returns the oldest id that is neither pinned nor in `kept`; None if none."""
        for id in self._order:
            if id not in self._pinned and id not in kept:
                return id
        return None
