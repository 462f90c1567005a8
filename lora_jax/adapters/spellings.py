"""Spellings of one module path by different libraries and versions -> one form.

transformers has nested its models differently over time, headless classes drop the
outer name, and Mixtral's block was renamed; so one layer is `model.layers.0...`,
`layers.0...`, `model.language_model.layers.0...` or `language_model.model.layers.0...`.
The table lists the whole prefixes that are documented; a path under no listed prefix is
its own form.
"""

from collections.abc import Mapping

TEXT = (
    "model.language_model.model.",
    "model.language_model.",
    "language_model.model.",
    "language_model.",
    "thinker.model.",
    "model.",
    "",
)
"""Prefixes of a decoder's stack; the longest that fits counts."""

TEXT_ROOTS = ("layers.", "embed_tokens", "norm")
"""What follows such a prefix; other paths under it are not the decoder's stack."""

ALIASES: Mapping[str, tuple[str, ...]] = {
    "lm_head": (
        "lm_head",
        "language_model.lm_head",
        "model.lm_head",
        "thinker.lm_head",
    ),
    "visual": ("visual", "model.visual", "thinker.visual"),
    "vision_tower": (
        "vision_tower",
        "vision_tower.vision_model",
        "model.vision_tower",
        "model.vision_tower.vision_model",
    ),
    "multi_modal_projector": ("multi_modal_projector", "model.multi_modal_projector"),
    "encoder": ("encoder", "bert.encoder", "roberta.encoder"),
    "embeddings": ("embeddings", "bert.embeddings", "roberta.embeddings"),
    "pooler": ("pooler", "bert.pooler", "roberta.pooler"),
    "transformer": ("transformer", "distilbert.transformer"),
    "h": ("h", "transformer.h"),
    "wte": ("wte", "transformer.wte"),
    "wpe": ("wpe", "transformer.wpe"),
}
"""One form -> the whole prefixes that mean it."""

_FORMS = sorted(
    ((alias, form) for form, aliases in ALIASES.items() for alias in aliases),
    key=lambda pair: -len(pair[0]),
)


def canonical(module: str) -> str:
    """Returns the form that all spellings of one module share.

    Example:
      >>> canonical("model.language_model.layers.0.mlp.up_proj")
      'text:layers.0.mlp.up_proj'
    """
    for prefix in TEXT:
        rest = module.removeprefix(prefix)
        if module.startswith(prefix) and _is_text(rest):
            return "text:" + rest.replace(".block_sparse_moe.", ".mlp.", 1)
    for alias, form in _FORMS:
        if module == alias or module.startswith(alias + "."):
            return f"{form}:" + module.removeprefix(alias)
    return module


def _is_text(rest: str) -> bool:
    return any(
        rest.startswith(root) if root.endswith(".") else rest == root
        for root in TEXT_ROOTS
    )
