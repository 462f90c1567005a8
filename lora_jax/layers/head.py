"""LoRA for a language-model head, whose rows are the sampled tokens.

The same slots and the same delta as a linear layer; only the rows differ. A head sees
one row for each prompt when the next token is sampled, and every token when a whole
sequence is scored, so it takes the routing that was made for the rows it is given.
"""

import jax

from lora_jax.layers.base import LoRARouting
from lora_jax.layers.linear import LoRALinear, add_delta, check_rows, to_rows


class LoRAHead(LoRALinear):
    """Mixin over a head that maps `(..., d_in)` to `(..., vocab)`.

    Attributes:
      lora_routing: of the sampled rows.
      lora_token_routing: of all token rows; taken if the head sees that many.
    """

    lora_token_routing: LoRARouting

    def __call__(self, inputs: jax.Array, *args: object, **kwargs: object) -> jax.Array:
        """Returns the base head's logits plus each row's low-rank update.

        Raises:
          ValueError: if neither sampled rows nor tokens are as many as the inputs.
        """
        outputs = super(LoRALinear, self).__call__(inputs, *args, **kwargs)  # type: ignore[misc]
        routings = (self.lora_routing.get_value(), self.lora_token_routing.get_value())
        made = [routing for routing in routings if routing is not None]
        if not made:
            return outputs
        rows = to_rows(inputs, self.lora_site.shape.in_axes)
        fits = [routing for routing in made if routing.slot.shape[0] == rows.shape[0]]
        if not fits:
            check_rows(self.lora_site, made[0], rows)
        return add_delta(self, fits[0], inputs, outputs)
