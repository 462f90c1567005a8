"""What a caller asks for: an adapter by name, id and place. Knows no files, no model.

An id is the identity of an adapter; a name is how people call it. Two requests with
one name and different ids are two adapters (vLLM compares names only, and then serves
one of the two).
"""

from dataclasses import dataclass

from lora_jax.errors import RequestError, faults


@dataclass(frozen=True)
class LoRARequest:
    """An adapter to load and use.

    Args:
      lora_name: public name, any non-empty text.
      lora_int_id: identity in the caller's process, >= 1; 0 means the base model.
      lora_path: folder of the adapter: absolute, relative, or starting with `~`.
      base_model_name: the base model that a model list shows as the adapter's parent.
      load_inplace: read the folder again although the id is loaded. Read once for each
        request object given to a worker, never once for each step.
      is_3d_lora_weight: the folder holds all experts fused in one tensor. Taken for
        vLLM's sake: the tensors tell.

    Raises:
      RequestError: naming every field that cannot be used (it is a ValueError).

    Source: vLLM's `LoRARequest`.
    """

    lora_name: str
    lora_int_id: int
    lora_path: str = ""
    base_model_name: str | None = None
    load_inplace: bool = False
    is_3d_lora_weight: bool = False

    def __post_init__(self) -> None:
        found = []
        if self.lora_int_id < 1:
            found.append(f"id must be > 0, got {self.lora_int_id}")
        if not self.lora_name:
            found.append("lora_name cannot be empty")
        if not self.lora_path:
            found.append("lora_path cannot be empty")
        if found:
            raise RequestError(faults("LoRARequest cannot be used:", found))

    @property
    def adapter_id(self) -> int:
        """The id, under the name that managers use."""
        return self.lora_int_id

    @property
    def name(self) -> str:
        """The public name."""
        return self.lora_name

    @property
    def path(self) -> str:
        """The adapter's folder."""
        return self.lora_path
