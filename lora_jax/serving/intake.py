"""The engine's door: which requests may come in, and what is wrong with the others."""

from collections.abc import Sequence

from lora_jax.errors import RequestError, faults
from lora_jax.serving.adapters import ServedAdapters
from lora_jax.serving.limits import Limits
from lora_jax.serving.requests import GenerationRequest


class Intake:
    """Checks requests before anything is done for them.

    Args:
      limits: sizes of the engine.
      adapters: the names that requests may use.

    Attributes:
      in_flight: ids of the requests that have not yet got their result.
    """

    def __init__(self, limits: Limits, adapters: ServedAdapters) -> None:
        self._limits = limits
        self._adapters = adapters
        self.in_flight: set[str] = set()

    def check(self, request: GenerationRequest) -> None:
        """Raises RequestError, naming everything in it that cannot be served."""
        found = self._faults(request)
        if found:
            raise RequestError(
                faults(f"request {request.request_id!r} cannot be served:", found)
            )

    def check_all(self, requests: Sequence[GenerationRequest]) -> None:
        """Raises one RequestError for all requests that cannot be served together."""
        if self.in_flight:
            raise RequestError(
                "generate: other requests are in flight; use add_request and step."
            )
        found = []
        seen: set[str] = set()
        for request in requests:
            problems = self._faults(request)
            if request.request_id in seen:
                problems.append("another request has this id too; ids must differ.")
            seen.add(request.request_id)
            found += [f"{request.request_id!r}: {problem}" for problem in problems]
        if found:
            raise RequestError(faults("these requests cannot be served:", found))

    def _faults(self, request: GenerationRequest) -> list[str]:
        own = None if request.lora is None else self._adapters.vocabulary(request.lora)
        found = self._limits.faults(request, own)
        if request.request_id in self.in_flight:
            found.append("a request with this id is in flight; choose another id.")
        if request.lora is not None and self._adapters.find(request.lora) is None:
            found.append(self._adapters.unknown(request.lora))
        return found
