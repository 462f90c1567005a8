"""Experts spread over two processes: each reads and holds its own, both agree."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import jax.numpy as jnp
import numpy as np
from safetensors.numpy import save_file

import expert_process
from expert_files import ALPHA, FILES
from expert_models import build, make, serve
from expert_process import SIZES, TOP_K
from lora_jax import LoRAMapping

TESTS = Path(__file__).parent
LAYOUTS = ("fused", "pairs", "router_and_experts", "some_experts")
SECONDS = 300


def test_two_processes_serve_what_one_serves(tmp_path):
    for seed, name in enumerate(LAYOUTS, start=1):
        _save(tmp_path / name, name, seed)
    address = _free_address()
    processes = [_start(address, rank, tmp_path) for rank in (0, 1)]
    try:
        outputs = [process.communicate(timeout=SECONDS)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(outputs)

    model = build(SIZES, TOP_K)
    adapters = [
        make(name, SIZES, 3, seed=seed, adapter_id=seed)[0]
        for seed, name in enumerate(LAYOUTS, start=1)
    ]
    manager = serve(model, adapters, max_rank=8)
    manager.set_adapter_mapping(LoRAMapping(expert_process.ids(len(LAYOUTS)), []))
    expected = np.asarray(model(jnp.asarray(expert_process.inputs())))
    for rank, held in ((0, [0, 4]), (1, [4, 8])):
        found = np.load(tmp_path / f"out{rank}.npy")
        np.testing.assert_allclose(found, expected, atol=2e-5, rtol=2e-5)
        told = json.loads((tmp_path / f"told{rank}.json").read_text())
        assert told["held"] == held
        whole = {a.name: a.report.matched for a in adapters}
        assert told["read"]["pairs"] == whole["pairs"] // 2
        assert told["read"]["some_experts"] < whole["some_experts"]
        assert told["read"]["fused"] == whole["fused"]


def _save(folder, name, seed):
    folder.mkdir()
    file = FILES[name](np.random.default_rng(seed), SIZES, 3)
    tensors = {f"base_model.model.{n}": array for n, array in file.tensors.items()}
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "lora_alpha": ALPHA, **file.config}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def _free_address():
    with socket.socket() as one:
        one.bind(("localhost", 0))
        return f"localhost:{one.getsockname()[1]}"


def _start(address, rank, folder):
    root = TESTS.parent
    paths = os.pathsep.join(map(str, (root, root / "kernels", TESTS)))
    flags = "--xla_force_host_platform_device_count=2"
    here = {"PYTHONPATH": paths, "XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    return subprocess.Popen(
        [sys.executable, TESTS / "expert_process.py", address, str(rank), folder],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=os.environ | here,
    )
