"""Images of a batch -> mappings of the rows that the vision tower and connector see.

The tower runs over all images of the step in one pass, image after image; each image's
rows use the adapter of the request that it belongs to.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from lora_jax.routing import LoRAMapping, LoRAMappingType


@dataclass(frozen=True)
class ImageRows:
    """One image (or other item) of a batch.

    Attributes:
      adapter_id: of the request that it belongs to; 0 for the base model.
      tower: exactly how many rows the tower's linear layers see of it.
      connector: the same of the connector's; None if that cannot be told.
      modality: items are passed through the tower modality by modality.
    """

    adapter_id: int
    tower: int
    connector: int | None = None
    modality: str = "image"


def image_mappings(images: Sequence[ImageRows]) -> list[LoRAMapping]:
    """Returns the mappings to set before the tower and the connector run.

    Images are taken modality by modality in alphabetical order, else in the given
    order. Without a count for every image there is no mapping for the connector, which
    then must not carry LoRA.

    Example:
      >>> images = [ImageRows(7, tower=2, connector=1), ImageRows(0, 1, 1)]
      >>> [(m.type.name, m.index_mapping) for m in image_mappings(images)]
      [('TOWER', (7, 7, 0)), ('CONNECTOR', (7, 0))]

    Source: vLLM, `_execute_mm_encoder`.
    """
    ordered = sorted(images, key=lambda image: image.modality)
    rows = [(image.adapter_id, image.tower) for image in ordered]
    mappings = [_mapping(rows, LoRAMappingType.TOWER)]
    counted = [
        (image.adapter_id, image.connector)
        for image in ordered
        if image.connector is not None
    ]
    if len(counted) == len(ordered):
        mappings.append(_mapping(counted, LoRAMappingType.CONNECTOR))
    return mappings


def default_adapter(modalities: Sequence[str], defaults: Sequence[str]) -> str | None:
    """Returns the modality whose default adapter a prompt uses, None for none.

    It is used if exactly one of the prompt's modalities has a default; with several
    there is no telling which, and a request that names an adapter has its own.

    Args:
      modalities: of the prompt's items, e.g. `["image", "audio"]`.
      defaults: those that have a default adapter (`LoRAConfig.default_mm_loras`).

    Example:
      >>> default_adapter(["image", "audio", "audio"], ["audio"])
      'audio'
    """
    found = set(modalities) & set(defaults)
    return found.pop() if len(found) == 1 else None


def _mapping(rows: Sequence[tuple[int, int]], kind: LoRAMappingType) -> LoRAMapping:
    ids = [id for id, count in rows for _ in range(count)]
    return LoRAMapping(ids, [id for id, _ in rows], type=kind)
