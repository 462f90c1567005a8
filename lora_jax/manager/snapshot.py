"""Everything that a step needs of the manager, as one value that nothing can change."""

from dataclasses import dataclass

import jax

from lora_jax.bank import Bank
from lora_jax.routing import RoutingSet


@jax.tree_util.register_dataclass
@dataclass(frozen=True, eq=False)
class Snapshot:
    """Slots and routing at one moment; a pytree, so it may enter a jitted step whole.

    Loading, evicting or reloading afterwards changes nothing in it. While it exists the
    next write copies the bank instead of updating it in place: drop it after the step.

    Attributes:
      bank: all slots.
      routing: domain -> routing of the mapping that was current; empty for the base
        model alone.
    """

    bank: Bank
    routing: RoutingSet
