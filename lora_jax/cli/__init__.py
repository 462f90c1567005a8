"""The command line `lora-jax`: one file for each command, errors as one message."""

from lora_jax.cli.main import main as main
