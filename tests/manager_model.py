"""The managers' rules, written down as plainly as possible: lists, no cleverness.

An independent oracle for the state machine: it shares no code with the library.
"""

from dataclasses import dataclass, field


@dataclass
class ManagerModel:
    """What a manager must look like after each operation.

    Attributes:
      lru: whether the least recently used make room.
      capacity: adapters on the host.
      slots: id in each slot, None if no id reaches it.
      contents: what each slot holds, `(id, version)`, None if it must be zeros.
      host: registered ids, oldest first; `device`: active ids, oldest first.
      versions: registered id -> version.
      claims: slot -> number of claims on what it holds.
    """

    lru: bool
    capacity: int
    slots: list[int | None]
    contents: list[tuple[int, int] | None]
    host: list[int] = field(default_factory=list)
    device: list[int] = field(default_factory=list)
    host_pins: set[int] = field(default_factory=set)
    device_pins: set[int] = field(default_factory=set)
    versions: dict[int, int] = field(default_factory=dict)
    claims: dict[int, int] = field(default_factory=dict)

    def held(self, id: int) -> bool:
        return id in self.slots and self.slots.index(id) in self.claims

    def free(self) -> list[int]:
        return [
            slot
            for slot, id in enumerate(self.slots)
            if id is None and slot not in self.claims
        ]

    def oldest(self, order: list[int], pins: set[int]) -> int:
        for id in order:
            if id not in pins and not self.held(id):
                return id
        raise RuntimeError

    def add(self, id: int, version: int) -> bool:
        if id in self.host:
            if self.lru:
                self.host.remove(id)
                self.host.append(id)
            return False
        if len(self.host) >= self.capacity:
            if not self.lru:
                raise RuntimeError
            self.remove(self.oldest(self.host, self.host_pins))
        self.host.append(id)
        self.versions[id] = version
        return True

    def activate(self, id: int) -> bool:
        if id in self.device:
            if self.lru:
                self.device.remove(id)
                self.device.append(id)
            return False
        victim = None
        if not self.free():
            if not self.lru:
                raise ValueError
            victim = self.oldest(self.device, self.device_pins)
        if id not in self.host:
            raise KeyError
        if victim is not None:
            self.deactivate(victim)
        slot = self.free()[0]
        self.slots[slot], self.contents[slot] = id, (id, self.versions[id])
        self.device.append(id)
        self.host.remove(id)
        self.host.append(id)
        return True

    def deactivate(self, id: int) -> bool:
        if id not in self.device:
            return False
        slot = self.slots.index(id)
        self.slots[slot] = None
        if slot not in self.claims:
            self.contents[slot] = None
        self.device.remove(id)
        self.device_pins.discard(id)
        return True

    def remove(self, id: int) -> bool:
        self.deactivate(id)
        if id not in self.host:
            return False
        self.host.remove(id)
        self.host_pins.discard(id)
        del self.versions[id]
        return True

    def remove_all(self) -> None:
        for id in list(self.host):
            self.remove(id)

    def remove_oldest(self) -> bool:
        if not self.host:
            return False
        return self.remove(self.oldest(self.host, self.host_pins))

    def pin(self, id: int) -> bool:
        if not self.lru:
            raise NotImplementedError
        if id not in self.host:
            raise ValueError
        if id not in self.device:
            self.activate(id)
        self.host_pins.add(id)
        self.device_pins.add(id)
        return True

    def get(self, id: int) -> bool:
        if id not in self.host:
            return False
        self.host.remove(id)
        self.host.append(id)
        return True

    def hold(self, id: int) -> int:
        self.activate(id)
        slot = self.slots.index(id)
        self.claims[slot] = self.claims.get(slot, 0) + 1
        return slot

    def release(self, slot: int) -> None:
        self.claims[slot] -= 1
        if not self.claims[slot]:
            del self.claims[slot]
            if self.slots[slot] is None:
                self.contents[slot] = None

    def reload(self, id: int, version: int) -> None:
        if id not in self.host:
            raise KeyError
        was_active, pinned = id in self.device, id in self.device_pins
        if was_active and self.held(id) and not self.free():
            if not self.lru:
                raise ValueError
            self.oldest(self.device, self.device_pins)
        self.versions[id] = version
        self.deactivate(id)
        if was_active:
            self.activate(id)
        if pinned:
            self.device_pins.add(id)
        self.get(id)
