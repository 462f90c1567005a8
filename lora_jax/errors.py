"""One exception for each mistake that a user can mend. Knows nothing else.

Every text says where, what was found against what was expected, and what to do; a
caller who finds several faults collects them and raises once (`faults`).
"""

from collections.abc import Sequence


class LoRAError(Exception):
    """Root of the errors that this library raises on purpose."""


class ConfigError(LoRAError, ValueError):
    """An option has a value that cannot work."""


class AdapterError(LoRAError, ValueError):
    """An adapter cannot be read, or cannot be served by this model."""


class AdapterNotFoundError(AdapterError, FileNotFoundError):
    """There is no adapter at the path."""


class ModelError(LoRAError, ValueError):
    """A checkpoint or model cannot be loaded or wrapped."""


class RequestError(LoRAError, ValueError):
    """A request asks for what is not there: an unknown adapter, too long a prompt."""


def faults(headline: str, found: Sequence[str]) -> str:
    """Returns `headline` followed by one indented line for each fault.

    Example:
      >>> print(faults("adapter 'sql' cannot be served:", ["q_proj: rank 64"]))
      adapter 'sql' cannot be served:
        q_proj: rank 64
    """
    return "\n".join([headline, *(f"  {fault}" for fault in found)])
