"""An adapter's parts -> a hash of what they mean, whatever the file looked like."""

import dataclasses
import hashlib
from collections.abc import Mapping

import numpy as np

from lora_jax.adapters.adapter import AdapterPart


def hash_parts(parts: Mapping[str, AdapterPart]) -> str:
    """Returns the SHA-256 of all modules, values and scales, as hexadecimal text.

    Name, id, order of tensors and file format do not enter; every value does.
    """
    digest = hashlib.sha256()
    for module in sorted(parts):
        part = parts[module]
        _add(digest, module, part.kind)
        for field in dataclasses.fields(part):
            _add_value(digest, field.name, getattr(part, field.name))
    return digest.hexdigest()


def _add(digest, *texts: str) -> None:
    for text in texts:
        encoded = text.encode()
        digest.update(len(encoded).to_bytes(8, "little") + encoded)


def _add_value(digest, name: str, value: object) -> None:
    if isinstance(value, np.ndarray):
        _add(digest, name, str(value.dtype), str(value.shape))
        digest.update(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    else:
        _add(digest, name, repr(value))
