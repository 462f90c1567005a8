"""`lora-jax embed` and `classify` against transformers and PEFT, one batch of all."""

import copy
import json
import warnings

import numpy as np
import pytest

from lora_jax.cli import main

pytestmark = pytest.mark.torch

VOCAB = 50
SIZES = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 40,
    "pad_token_id": 0,
}
FAMILIES = {
    "bert": (SIZES, ["query", "value", "dense"], "classifier"),
    "roberta": (SIZES, ["query", "key"], "classifier"),
    "llama": (SIZES | {"num_key_value_heads": 2}, ["q_proj", "down_proj"], "score"),
}
"""Family -> sizes, modules to adapt, name of the head."""

HEADS = {"two": 2, "five": 5, "backbone": None, "base": None}
"""Adapter -> labels of its own head; None keeps the base's three."""

TOLERANCE = 2e-4


def _shake(parameters, seed):
    import torch

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in parameters:
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))


def _model(family, labels):
    import torch
    from transformers import AutoConfig, AutoModelForSequenceClassification

    torch.manual_seed(0)
    config = AutoConfig.for_model(family, **FAMILIES[family][0], num_labels=labels)
    model = AutoModelForSequenceClassification.from_config(
        config, attn_implementation="eager"
    )
    _shake(model.parameters(), 0)
    return model.eval()


def _texts():
    rng = np.random.default_rng(3)
    return [rng.integers(3, VOCAB, length).tolist() for length in (5, 12, 1, 9, 20)]


def _run(model, tokens, hidden):
    """One text alone: scores, or hidden states."""
    import torch

    with torch.no_grad():
        ids = torch.tensor([tokens])
        out = model(ids, attention_mask=torch.ones_like(ids), output_hidden_states=True)
    return (out.hidden_states[-1][0] if hidden else out.logits[0]).numpy()


@pytest.fixture(scope="module", params=FAMILIES)
def house(request, tmp_path_factory):
    """The base folder, adapters by name, and what each answers for each text."""
    from peft import LoraConfig, PeftModel, get_peft_model

    family = request.param
    folder = tmp_path_factory.mktemp(family)
    base = _model(family, 3)
    base.save_pretrained(folder / "base")
    _, targets, head = FAMILIES[family]
    models = {"base": base}
    for seed, (name, labels) in enumerate(HEADS.items(), start=1):
        if name == "base":
            continue
        own = copy.deepcopy(base)
        if labels is not None:
            fresh = _model(family, labels)
            setattr(own, head, copy.deepcopy(getattr(fresh, head)))
            own.num_labels = own.config.num_labels = labels
        config = LoraConfig(
            r=4,
            lora_alpha=8,
            target_modules=targets,
            exclude_modules=r".*classifier.*|.*pooler.*",
            modules_to_save=None if labels is None else [head],
        )
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            tuned = get_peft_model(own, config)
            _shake((p for p in tuned.parameters() if p.requires_grad), seed)
            tuned.save_pretrained(folder / name)
            models[name] = PeftModel.from_pretrained(own, folder / name).eval()
    return folder, models


def _lines(house, command, *options):
    """Runs a command over every text with every adapter; returns its answers."""
    folder, models = house
    asked = [(name, text) for text in _texts() for name in models]
    source, answers = folder / "in.jsonl", folder / "out.jsonl"
    source.write_text(
        "".join(
            json.dumps(
                {
                    "id": index,
                    "token_ids": text,
                    "lora": None if name == "base" else name,
                }
            )
            + "\n"
            for index, (name, text) in enumerate(asked)
        )
    )
    words = [command, "--model", str(folder / "base"), "--input", str(source)]
    words += ["--output", str(answers), "--max-loras", "2", "--max-num-seqs", "4"]
    for name in models:
        words += [] if name == "base" else ["--lora", f"{name}={folder / name}"]
    assert main([*words, *options]) == 0
    lines = [json.loads(line) for line in answers.read_text().splitlines()]
    assert [line["id"] for line in lines] == list(range(len(asked)))
    return asked, lines


def test_scores_and_labels_are_those_of_each_rows_own_head(house):
    asked, lines = _lines(house, "classify")
    _, models = house
    seen = {}
    for (name, text), line in zip(asked, lines, strict=True):
        expected = _run(models[name], text, hidden=False)
        np.testing.assert_allclose(line["scores"], expected, atol=TOLERANCE)
        assert line["labels"] == [f"LABEL_{i}" for i in range(HEADS[name] or 3)]
        seen[name] = expected
    assert np.abs(seen["backbone"] - seen["base"]).max() > 10 * TOLERANCE


@pytest.mark.parametrize("pooling", ["mean", "cls", "last"])
def test_embeddings_are_pooled_hidden_states(house, pooling):
    asked, lines = _lines(house, "embed", "--pooling", pooling, "--normalize")
    _, models = house
    pick = {"mean": lambda h: h.mean(0), "cls": lambda h: h[0], "last": lambda h: h[-1]}
    vectors = {}
    for (name, text), line in zip(asked, lines, strict=True):
        expected = pick[pooling](_run(models[name], text, hidden=True))
        expected = expected / np.linalg.norm(expected)
        np.testing.assert_allclose(line["embedding"], expected, atol=TOLERANCE)
        vectors[name] = expected
    assert np.abs(vectors["two"] - vectors["base"]).max() > 10 * TOLERANCE


def test_an_adapters_own_label_names_are_used(house):
    folder, _ = house
    names = {"id2label": {"0": "bad", "1": "good"}}
    (folder / "two" / "config.json").write_text(json.dumps(names))
    try:
        asked, lines = _lines(house, "classify")
    finally:
        (folder / "two" / "config.json").unlink()
    for (name, _), line in zip(asked, lines, strict=True):
        if name == "two":
            assert line["labels"] == ["bad", "good"]


BAD_LINES = {
    '{"id": 1, "token_ids": [4], "text": "a"}': "expected exactly one of text, token_i",
    '{"id": 1}': "expected exactly one of text, token_ids, found none",
    '{"id": 1, "text": ["a"]}': "expected text or a pair of texts, found a list",
    '{"id": 1, "text": ""}': "'text' is empty",
    '{"id": 1, "token_ids": []}': "'token_ids' is empty",
    '{"id": 1, "token_ids": [4], "lora": "nobody"}': "unknown LoRA 'nobody'",
    '{"id": 1, "token_ids": [4, 99]}': r"token ids [99] are outside the vocabulary",
}


def test_bad_lines_are_all_named_and_nothing_is_written(house, capsys):
    folder, _ = house
    source, answers = folder / "bad.jsonl", folder / "none.jsonl"
    words = ["embed", "--model", str(folder / "base"), "--input", str(source)]
    for line, text in BAD_LINES.items():
        source.write_text(line + "\n")
        assert main([*words, "--output", str(answers)]) == 2
        message = " ".join(capsys.readouterr().err.split())
        assert text in message
        assert f"{source.name}:1" in message.replace(" ", "")
    assert not answers.exists()


def test_a_model_without_labels_cannot_classify(tmp_path, capsys):
    import torch
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    BertModel(BertConfig(**SIZES)).save_pretrained(tmp_path)
    source = tmp_path / "in.jsonl"
    source.write_text('{"id": 1, "token_ids": [4]}\n')
    words = ["classify", "--model", str(tmp_path), "--input", str(source)]
    assert main([*words, "--output", str(tmp_path / "out.jsonl")]) == 2
    assert "which has no labels" in " ".join(capsys.readouterr().err.split())
