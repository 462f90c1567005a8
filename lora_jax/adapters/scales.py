"""Ranks and scales of modules -> the fields of a PEFT config that give exactly them."""

import re
from collections import Counter
from collections.abc import Mapping

import numpy as np


def scale_fields(facts: Mapping[str, tuple[int, float]]) -> dict[str, object]:
    """Returns `r`, `lora_alpha` and patterns for the modules that are not like most.

    Args:
      facts: module path -> its rank and the factor on its product.
    """
    alphas = {m: (rank, exact_alpha(scale, rank)) for m, (rank, scale) in facts.items()}
    (rank, alpha), _ = Counter(alphas.values() or [(8, 8.0)]).most_common(1)[0]
    others = {m: fact for m, fact in alphas.items() if fact != (rank, alpha)}
    return {
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": False,
        "rank_pattern": {f"^{re.escape(m)}": own for m, (own, _) in others.items()},
        "alpha_pattern": {f"^{re.escape(m)}": own for m, (_, own) in others.items()},
    }


def exact_alpha(scale: float, rank: int) -> float:
    """Returns the number that divided by the rank gives the scale, to the last bit."""
    alpha = scale * rank
    for near in (alpha, np.nextafter(alpha, np.inf), np.nextafter(alpha, -np.inf)):
        if float(near) / rank == scale:
            return float(near)
    return alpha
