"""Runs the examples as a user does, and checks what they say."""

import importlib.util
import json
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

FOLDER = Path(__file__).parent.parent / "examples"


@pytest.fixture(scope="module")
def rerank():
    spec = importlib.util.spec_from_file_location("rerank", FOLDER / "rerank.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["rerank"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules["rerank"]


def test_the_reranker_gives_each_row_its_own_head_in_one_batch(
    rerank, tmp_path, monkeypatch, capsys
):
    made = tmp_path / "made"
    rows = []
    monkeypatch.setattr(
        rerank,
        "show",
        lambda found, show=rerank.show: (rows.extend(found), show(found)),
    )
    monkeypatch.setattr(sys, "argv", ["rerank.py", "--output", str(made)])
    rerank.main()
    new = json.loads((FOLDER / "rerank.json").read_text(encoding="utf-8"))["new"]
    topics = {item["text"]: item["topic"] for item in new}
    states = rerank.pooled_states(rerank.resolve_model(rerank.BASE_NAME), list(topics))
    tensors = {
        name: load_file(made / name / "adapter_model.safetensors")
        for name in rerank.LABELS
    }
    key = "base_model.model.classifier"
    heads = {n: (t[f"{key}.weight"], t[f"{key}.bias"]) for n, t in tensors.items()}
    base = load_file(made / "base/model.safetensors")
    heads[None] = base["classifier.weight"], base["classifier.bias"]
    assert len(rows) == len(topics) * len(heads)
    assert sorted({len(row.scores) for row in rows}) == [1, 2, 3, 4]
    for row in rows:
        weight, bias = heads[row.lora]
        state = states[list(topics).index(row.text)]
        np.testing.assert_allclose(row.scores, weight @ state + bias, atol=1e-4)
        if row.lora is not None:
            assert row.best == rerank.label_of(topics[row.text], row.labels)
    ranked = max((row for row in rows if row.lora is None), key=lambda r: r.scores[0])
    assert topics[ranked.text] == "food"
    printed = capsys.readouterr().out
    assert "16 rows with [1, 2, 3, 4] labels, one batch." in printed
    assert printed.index("Ranked by the base") < printed.index("Adapter newspaper")
