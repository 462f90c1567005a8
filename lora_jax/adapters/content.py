"""An adapter's parts -> a hash of what they mean, whatever the file looked like."""

import dataclasses
import hashlib
from collections.abc import Mapping, Sequence

import numpy as np

from lora_jax.adapters.parts import AdapterPart


def hash_content(
    parts: Mapping[str, AdapterPart], invocation_tokens: Sequence[int]
) -> str:
    """Returns the SHA-256 of all modules, values and scales, as hexadecimal text.

    Name, id, order of tensors and file format do not enter; every value does.
    """
    digest = hashlib.sha256()
    for module in sorted(parts):
        _add_text(digest, module)
        _add_value(digest, parts[module])
    if invocation_tokens:
        _add_text(digest, repr(tuple(invocation_tokens)))
    return digest.hexdigest()


def _add_value(digest, value: object) -> None:
    if isinstance(value, np.ndarray):
        _add_text(digest, f"{value.dtype} {value.shape}")
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    elif isinstance(value, AdapterPart):
        _add_text(digest, value.kind)
        for field in dataclasses.fields(value):
            _add_text(digest, field.name)
            _add_value(digest, getattr(value, field.name))
    else:
        _add_text(digest, repr(value))


def _add_text(digest, text: str) -> None:
    encoded = text.encode()
    digest.update(len(encoded).to_bytes(8, "little") + encoded)
