"""The labels of a classification model, as its config.json names them."""

from lora_jax.models.reader import Reader

DEFAULT_LABELS = 2
"""How many labels transformers gives a model whose config names none."""


def default_labels(count: int) -> tuple[str, ...]:
    """Returns the names of labels that nobody named: `LABEL_0`, `LABEL_1`, ..."""
    return tuple(f"LABEL_{index}" for index in range(count))


def read_labels(reader: Reader) -> tuple[str, ...]:
    """Returns one name for each label, from `id2label` or `num_labels`.

    Args:
      reader: a whole config; gets a fault if the ids are not `0 .. n-1`.
    """
    named = reader.nested("id2label")
    if not named:
        return default_labels(reader.positive_or("num_labels", DEFAULT_LABELS))
    ids = [str(index) for index in range(len(named))]
    if set(named) != set(ids):
        reader.fault(f"id2label has ids {sorted(named)}, expected 0 to {ids[-1]}")
        return default_labels(len(named))
    return tuple(str(named[index]) for index in ids)
