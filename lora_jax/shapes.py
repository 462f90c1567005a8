"""Names that every room shares: the base row's slot, and the domains of routing.

Axis names used in annotations: tokens, d_in, d_out, rank, slots, parts, batch, time.
"""

BASE_SLOT = -1
"""Slot of a row that no adapter touches. It is no index: base rows are masked out."""

BASE_ID = 0
"""Adapter id that means "no adapter" in a mapping, as in vLLM."""

TOKENS = "tokens"
PROMPTS = "prompts"
TOWER = "tower"
CONNECTOR = "connector"
DOMAINS = (TOKENS, PROMPTS, TOWER, CONNECTOR)
"""One routing each: language tokens; sampled rows (heads); vision tower; connector."""
