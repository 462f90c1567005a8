"""`python -m lora_jax.cli` is `lora-jax`."""

import sys

from lora_jax.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
