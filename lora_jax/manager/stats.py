"""What the manager has done so far, in numbers."""

from dataclasses import asdict, dataclass


@dataclass
class Stats:
    """Counters since the manager was built; seconds are of the calling thread.

    Attributes:
      added: adapters registered on the host.
      reloaded: adapters replaced under their id.
      host_hits: times that an adapter asked for was registered already.
      host_evictions: adapters that had to leave the host for another.
      device_hits: activations that found the adapter in a slot.
      device_misses: activations that had to write a slot.
      device_evictions: adapters that had to leave their slot for another.
      writes: slots written, cleared ones included.
      copied_writes: writes that copied the bank because somebody held it.
      write_seconds: time spent staging and starting writes.
      loads: adapters read from disk.
      load_failures: attempts to read one that failed.
      load_seconds: time spent reading, checking and packing, on whichever thread.
      last_load_seconds: the same of the latest load.
    """

    added: int = 0
    reloaded: int = 0
    host_hits: int = 0
    host_evictions: int = 0
    device_hits: int = 0
    device_misses: int = 0
    device_evictions: int = 0
    writes: int = 0
    copied_writes: int = 0
    write_seconds: float = 0.0
    loads: int = 0
    load_failures: int = 0
    load_seconds: float = 0.0
    last_load_seconds: float = 0.0

    def as_dict(self) -> dict[str, int | float]:
        """Returns every counter by name."""
        return asdict(self)
