"""The adapter of a fine-tuned model, merged again, is the fine-tuned model."""

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from adapter_files import INNER, UP, WIDTH, Q, normal
from lora_jax.adapters import extract_adapter, merge_adapters
from lora_jax.errors import AdapterError

RNG = np.random.default_rng(6)
EMBED, HEAD, NORM = "model.embed_tokens", "lm_head", "model.norm"
BASE = {
    f"{EMBED}.weight": normal(RNG, 100, WIDTH),
    f"{Q}.weight": normal(RNG, WIDTH, WIDTH),
    f"{Q}.bias": normal(RNG, WIDTH),
    f"{UP}.weight": normal(RNG, INNER, WIDTH),
    f"{NORM}.weight": normal(RNG, WIDTH),
}


def low_rank(rows, columns, rank=3):
    return normal(RNG, rows, rank) @ normal(RNG, rank, columns)


def write(folder, tensors, *, tied=True):
    folder.mkdir()
    settings = {"model_type": "llama", "vocab_size": 100, "tie_word_embeddings": tied}
    (folder / "config.json").write_text(json.dumps(settings))
    save_file(dict(tensors), folder / "model.safetensors")
    return folder


CHANGES = {
    "linear": {
        f"{Q}.weight": low_rank(WIDTH, WIDTH),
        f"{UP}.weight": low_rank(INNER, WIDTH),
    },
    "bias": {f"{Q}.weight": low_rank(WIDTH, WIDTH), f"{Q}.bias": normal(RNG, WIDTH)},
    "bias_alone": {f"{Q}.bias": normal(RNG, WIDTH)},
    "norm": {f"{NORM}.weight": normal(RNG, WIDTH)},
    "tied": {f"{EMBED}.weight": low_rank(100, WIDTH)},
}


@pytest.mark.parametrize("case", CHANGES)
def test_merging_the_extract_gives_the_tuned_model(tmp_path, case):
    tuned = {name: a + CHANGES[case].get(name, 0) for name, a in BASE.items()}
    base = write(tmp_path / "base", BASE)
    adapter = extract_adapter(base, write(tmp_path / "tuned", tuned), 4, name="mine")
    assert adapter.rank <= 3
    merge_adapters(base, [adapter], tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    for name, array in tuned.items():
        np.testing.assert_allclose(found[name], array, atol=2e-5)
    if case == "tied":
        np.testing.assert_allclose(
            found[f"{HEAD}.weight"], tuned[f"{EMBED}.weight"], atol=2e-5
        )


def test_an_untied_head_is_compared_with_its_embedding(tmp_path):
    tuned = BASE | {f"{HEAD}.weight": BASE[f"{EMBED}.weight"] + low_rank(100, WIDTH)}
    base = write(tmp_path / "base", BASE)
    adapter = extract_adapter(
        base, write(tmp_path / "tuned", tuned, tied=False), 4, name="a"
    )
    assert list(adapter.parts) == [HEAD]
    assert adapter.rank == 3


def test_a_grown_vocabulary_is_kept_whole(tmp_path):
    tuned = BASE | {f"{EMBED}.weight": normal(RNG, 104, WIDTH)}
    adapter = extract_adapter(
        write(tmp_path / "base", BASE), write(tmp_path / "tuned", tuned), 4, name="a"
    )
    assert adapter.kinds == {"full_module"}


@pytest.mark.parametrize("rank", [1, 5])
def test_the_extract_is_the_nearest_there_is(tmp_path, rank):
    change = normal(RNG, INNER, WIDTH)
    tuned = BASE | {f"{UP}.weight": BASE[f"{UP}.weight"] + change}
    adapter = extract_adapter(
        write(tmp_path / "base", BASE), write(tmp_path / "tuned", tuned), rank, name="a"
    )
    part = adapter.parts[UP]
    values = np.linalg.svd(change, compute_uv=False)
    error = np.linalg.norm(part.scale * part.b @ part.a - change)
    assert error == pytest.approx(np.sqrt((values[rank:] ** 2).sum()), rel=1e-4)
    share = (values[:rank] ** 2).sum() / (values**2).sum()
    (note,) = adapter.report.notes
    assert note == f"{UP}: rank {rank} keeps {share:.2%} of the change"


def test_models_that_do_not_belong_together_are_refused(tmp_path):
    base = write(tmp_path / "base", BASE)
    other = {name: a for name, a in BASE.items() if name != f"{UP}.weight"}
    tuned = write(tmp_path / "tuned", other | {"new.weight": BASE[f"{UP}.weight"]})
    with pytest.raises(
        AdapterError, match=r"up_proj.weight: is missing(?s:.)*new.weight"
    ):
        extract_adapter(base, tuned, 4, name="a")
    with pytest.raises(AdapterError, match="does not differ"):
        extract_adapter(base, base, 4, name="a")
    with pytest.raises(AdapterError, match="rank 0 is not at least 1"):
        extract_adapter(base, base, 0, name="a")
