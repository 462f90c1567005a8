"""One of two processes over which experts are spread; run by a test, not by pytest.

    python expert_process.py ADDRESS RANK FOLDER

Serves the adapters in FOLDER's subfolders and leaves there what it computed and read.
"""

import json
import sys
from pathlib import Path

import jax
import numpy as np

from expert_files import Sizes
from expert_models import build
from lora_jax import (
    LoRAConfig,
    LoRAMapping,
    LoRARequest,
    LRUCacheLoRAModelManager,
    LRUCacheWorkerLoRAManager,
    forward,
    shard_experts,
    split,
)
from lora_jax.models import local_experts

SIZES, TOP_K, TOKENS = Sizes(8, 12, 10), 2, 24


def inputs() -> np.ndarray:
    shape = (TOKENS, SIZES.d)
    return np.random.default_rng(1).standard_normal(shape).astype(np.float32)


def ids(adapters: int) -> list[int]:
    return [row % (adapters + 1) for row in range(TOKENS)]


def main(address: str, rank: str, folder: Path) -> None:
    jax.distributed.initialize(address, 2, int(rank))
    model = build(SIZES, TOP_K)
    shard_experts(model, jax.make_mesh((jax.device_count(),), ("expert",)))
    held = local_experts(model)
    paths = sorted(path.parent for path in folder.glob("*/adapter_config.json"))
    config = LoRAConfig(max_loras=len(paths), max_lora_rank=8)
    manager = LRUCacheLoRAModelManager(model, config)
    read = {}
    with LRUCacheWorkerLoRAManager(manager) as worker:
        for id_, path in enumerate(paths, start=1):
            worker.add_adapter(LoRARequest(path.name, id_, str(path)))
            read[path.name] = manager.prepared(id_).adapter.report.matched
    manager.set_adapter_mapping(LoRAMapping(ids(len(paths)), []))
    graphdef, weights = split(model)
    routing = jax.tree.map(np.asarray, manager.routing)
    step = jax.jit(lambda w, bank, r, x: forward(graphdef, w, bank, r, x))
    out = np.asarray(step(weights, manager.bank, routing, inputs()))
    np.save(folder / f"out{rank}.npy", out)
    told = {"held": [held.start, held.stop] if held else None, "read": read}
    (folder / f"told{rank}.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
