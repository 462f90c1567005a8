"""What every test runs under: CPU, four devices, strict shapes, fixed seeds, offline.

The environment is set before JAX is imported, and only where nothing is set, so that
`JAX_PLATFORMS=cuda pytest -m gpu` runs on a GPU.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=4")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import hypothesis
import jax

jax.config.update("jax_numpy_rank_promotion", "raise")

hypothesis.settings.register_profile(
    "fixed", derandomize=True, deadline=None, database=None, print_blob=True
)
hypothesis.settings.load_profile("fixed")
