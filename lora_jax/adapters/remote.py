"""Which tensors of a file are of experts that other processes hold.

A process that serves some of a model's experts need not read the others. Only a name
can tell before the values are read: a pair of one expert has the expert's number in it.
Tensors of all experts have none, and are always read.

Source: vLLM's `MoEEPLoadSpec`.
"""

import re

_EXPERT = re.compile(r"\.experts\.(?:(?:gate_up|down)_projs\.)?(\d+)\.")


def expert_of(name: str) -> int | None:
    """Returns the number of the only expert that a tensor is of, None if there is none.

    Example:
      >>> expert_of("model.layers.0.mlp.experts.12.up_proj.lora_A.weight")
      12
    """
    found = _EXPERT.search(name)
    return None if found is None else int(found[1])


def is_remote(name: str, local: range | None) -> bool:
    """Says whether a tensor is of an expert outside `local`; None: all are local."""
    expert = expert_of(name)
    return local is not None and expert is not None and expert not in local
