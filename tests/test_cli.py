"""The command line on a tiny model: files in, files out, exit codes, messages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from lora_jax import load_adapter
from lora_jax.cli import demo, main
from lora_jax.cli.jsonl import read_input
from tiny_llama import Oracle, tiny_model, write_adapter, write_model

ROOT = Path(__file__).parent.parent
TOKENS = 4


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("cli")
    write_model(root / "model")
    write_adapter(root / "ada", seed=1, rank=4)
    write_adapter(root / "bob", seed=2, rank=2, targets=("self_attn.q_proj",))
    return root


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """No test writes to the user's cache folder."""
    import jax

    monkeypatch.setenv("LORA_JAX_CACHE", str(tmp_path_factory.getbasetemp() / "cache"))
    yield
    jax.config.update("jax_compilation_cache_dir", None)


def write_lines(path, lines):
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def generate(folders, source, target, *options):
    return main(
        [
            "generate",
            *("--model", str(folders / "model")),
            *("--lora", f"ada={folders / 'ada'}", "--lora", f"bob={folders / 'bob'}"),
            *("--input", str(source), "--output", str(target)),
            *options,
        ]
    )


LINES = [
    {"id": "first", "prompt": "w5 w6 w7", "lora": "ada"},
    {"id": 2, "prompt_token_ids": [8, 9], "lora": None, "max_tokens": 2},
    {"id": ["odd", None], "messages": [{"role": "user", "content": "w3 w4"}]},
    {"id": "first", "prompt": "w9", "lora": "bob"},
    {"id": "zero", "prompt": "w9 w8", "lora": "bob", "max_tokens": 0},
]
PROMPTS = [(5, 6, 7), (8, 9), (3, 4, 1), (9,), (9, 8)]


def expected_answers(folders):
    oracle = Oracle(tiny_model())
    adapters = {
        None: None,
        "ada": load_adapter(folders / "ada"),
        "bob": load_adapter(folders / "bob"),
    }
    for line, prompt in zip(LINES, PROMPTS, strict=True):
        adapter = adapters[line.get("lora")]
        tokens = oracle.greedy(prompt, adapter, line.get("max_tokens", TOKENS))
        if 0 in tokens:
            tokens = tokens[: tokens.index(0) + 1]
        yield line, prompt, tokens, oracle.prompt_logprobs(prompt, adapter)


def test_generate_answers_each_line_in_order(folders, tmp_path, capsys):
    source = write_lines(tmp_path / "in.jsonl", LINES)
    target = tmp_path / "out.jsonl"
    options = ["--max-tokens", str(TOKENS), "--max-loras", "1", "--max-num-seqs", "2"]
    assert generate(folders, source, target, *options, "--prompt-logprobs") == 0
    found = [json.loads(line) for line in target.read_text().splitlines()]
    for answer, expected in zip(found, expected_answers(folders), strict=True):
        line, prompt, tokens, logprobs = expected
        assert list(answer) == [
            *("id", "lora", "prompt_token_ids", "token_ids", "text"),
            *("finish_reason", "prompt_logprobs"),
        ]
        assert answer["id"] == line["id"]
        assert answer["lora"] == line.get("lora")
        assert tuple(answer["prompt_token_ids"]) == prompt
        assert tuple(answer["token_ids"]) == tokens
        assert answer["text"] == " ".join(f"w{token}" for token in tokens if token)
        assert answer["finish_reason"] == ("stop" if tokens[-1:] == (0,) else "length")
        assert answer["prompt_logprobs"][0] is None
        scores = np.asarray(answer["prompt_logprobs"][1:], float)
        np.testing.assert_allclose(scores, logprobs, atol=2e-4)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "5 answers" in printed.err


def test_random_answers_do_not_depend_on_the_order_of_lines(folders, tmp_path):
    lines = [{**line, "id": index} for index, line in enumerate(LINES)]
    answers = []
    for name, order in (("a", lines), ("b", lines[::-1])):
        source = write_lines(tmp_path / f"{name}.jsonl", order)
        target = tmp_path / f"{name}.out"
        options = ["--temperature", "1.5", "--top-k", "40", "--seed", "3"]
        assert generate(folders, source, target, *options, "--max-tokens", "4") == 0
        found = [json.loads(line) for line in target.read_text().splitlines()]
        answers.append({answer["id"]: answer["token_ids"] for answer in found})
    assert answers[0] == answers[1]


def test_generate_in_bfloat16(folders, tmp_path):
    source = write_lines(tmp_path / "in.jsonl", LINES[:1])
    target = tmp_path / "out.jsonl"
    options = ["--dtype", "bfloat16", "--max-tokens", "2"]
    assert generate(folders, source, target, *options) == 0
    (answer,) = target.read_text().splitlines()
    assert 1 <= len(json.loads(answer)["token_ids"]) <= 2


BAD_LINES = {
    '{"id": 1, "prompt": "w1"': "not JSON",
    '["id"]': "expected an object, found a list",
    '{"prompt": "w1"}': "there is no 'id'",
    '{"id": 1}': "expected exactly one of prompt, prompt_token_ids, messages",
    '{"id": 1, "prompt": "w1", "messages": []}': "found 'prompt' and 'messages'",
    '{"id": 1, "prompt": ""}': "'prompt' is empty",
    '{"id": 1, "prompt": 5}': "'prompt': expected text, found a number",
    '{"id": 1, "prompt_token_ids": []}': "'prompt_token_ids' is empty",
    '{"id": 1, "prompt_token_ids": "w"}': "expected a list, found text",
    '{"id": 1, "prompt_token_ids": [1, 2.5]}': "expected integers, found 2.5",
    '{"id": 1, "prompt_token_ids": [true]}': "expected integers, found True",
    '{"id": 1, "messages": []}': "expected a list of at least one message",
    '{"id": 1, "messages": [{"role": "user"}]}': "'messages'[0]: expected an object",
    '{"id": 1, "messages": [{"role": "user", "content": [1]}]}': "both text",
    '{"id": 1, "prompt": "w1", "lora": "ada", "lora": null}': "'lora' comes twice",
    '{"id": NaN, "prompt": "w1"}': "NaN is no JSON number",
    '{"id": 1, "prompt": "\\ud800"}': "half of a surrogate pair",
    '{"id": ' + "9" * 5000 + ', "prompt": "w1"}': "not JSON",
    "[" * 100_000: "not JSON",
    '{"id": 1, "prompt": "w1", "lora": "eve"}': "unknown LoRA 'eve'; known: ada, bob",
    '{"id": 1, "prompt": "w1", "lora": 3}': "'lora': expected a name or null",
    '{"id": 1, "prompt": "w1", "laro": "ada"}': "unknown field 'laro'; known: id,",
    '{"id": 1, "prompt": "w1", "max_tokens": -1}': "'max_tokens': expected an integer",
    '{"id": 1, "prompt": "w1", "max_tokens": 1.5}': "'max_tokens': expected an integer",
}


def test_every_bad_line_is_named_with_file_and_number(folders, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    target = tmp_path / "out.jsonl"
    good = '{"id": 0, "prompt": "w1"}\n\n'
    source.write_text(good + "\n".join(BAD_LINES) + "\n")
    assert generate(folders, source, target) == 2
    printed = capsys.readouterr().err
    named = dict(line.split(": ", 1) for line in printed.splitlines()[1:])
    for number, fault in enumerate(BAD_LINES.values(), start=3):
        assert fault in named[f"  {source}:{number}"]
    assert "Traceback" not in printed
    assert not target.exists()


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ({"prompt_token_ids": [61]}, "token ids [61] are outside the vocabulary of 61"),
        ({"prompt_token_ids": [1] * 64}, "the prompt has 64 tokens, the model takes"),
        ({"prompt": "   "}, "the prompt has no tokens"),
    ],
)
def test_a_prompt_that_the_model_cannot_take_is_named(
    folders, tmp_path, capsys, line, fault
):
    source = write_lines(tmp_path / "in.jsonl", [LINES[0], {"id": 1, **line}])
    assert generate(folders, source, tmp_path / "out.jsonl") == 2
    assert f"{source}:2: {fault}" in capsys.readouterr().err


def test_bytes_that_are_no_text_are_a_bad_line(folders, tmp_path, capsys):
    source = tmp_path / "in.jsonl"
    source.write_bytes(b'{"id": 1, "prompt": "\xff"}\n')
    assert generate(folders, source, tmp_path / "out.jsonl") == 2
    assert f"{source}:1: not UTF-8" in capsys.readouterr().err


def test_an_empty_file_gives_an_empty_file(folders, tmp_path):
    source, target = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text("\n")
    assert generate(folders, source, target) == 0
    assert target.read_text() == ""


@pytest.mark.parametrize(
    ("options", "fault"),
    [
        (["--temperature", "-1"], "temperature -1.0: expected a number >= 0"),
        (["--top-p", "0"], "top_p 0.0"),
        (["--lora", "ada=/nowhere"], "the names ada are given twice"),
        (["--max-lora-rank", "3"], "rank 4"),
        (["--max-loras", "2", "--max-cpu-loras", "1"], "max_cpu_loras"),
        (["--lora", "eve=/nowhere"], "/nowhere"),
    ],
)
def test_options_that_cannot_work_are_one_message(
    folders, tmp_path, capsys, options, fault
):
    source = write_lines(tmp_path / "in.jsonl", LINES)
    assert generate(folders, source, tmp_path / "out.jsonl", *options) == 2
    printed = capsys.readouterr().err
    assert fault in printed
    assert "Traceback" not in printed


@pytest.mark.parametrize(
    ("target", "fault"),
    [("in.jsonl", "is the input file"), (".", "is a folder"), ("no/x", "not exist")],
)
def test_an_output_that_cannot_be_written_is_found_first(
    folders, tmp_path, capsys, target, fault
):
    source = write_lines(tmp_path / "in.jsonl", LINES)
    assert generate(folders, source, tmp_path / target) == 2
    assert fault in capsys.readouterr().err
    assert source.read_text().count("\n") == len(LINES)


def test_a_missing_input_or_model_is_one_message(folders, tmp_path, capsys):
    assert generate(folders, tmp_path / "none.jsonl", tmp_path / "out.jsonl") == 2
    assert "there is no such file" in capsys.readouterr().err
    source = write_lines(tmp_path / "in.jsonl", LINES[1:2])
    words = ["--model", "no-such-model", "--input", str(source)]
    assert main(["generate", *words, "--output", str(tmp_path / "out.jsonl")]) == 2
    assert "no-such-model" in capsys.readouterr().err


@pytest.mark.parametrize(
    "words", [[], ["fly"], ["generate"], ["generate", "--lora", "ada"], ["inspect"]]
)
def test_wrong_words_are_a_usage_error(words, capsys):
    with pytest.raises(SystemExit) as error:
        main(words)
    assert error.value.code == 2
    assert "usage: lora-jax" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["generate", "--help"], ["--version"]])
def test_help_and_version_print_and_succeed(words, capsys):
    with pytest.raises(SystemExit) as error:
        main(words)
    assert error.value.code == 0
    assert "lora-jax" in capsys.readouterr().out


def test_inspect_says_what_an_adapter_is(folders, capsys):
    assert main(["inspect", str(folders / "ada")]) == 0
    printed = capsys.readouterr().out
    for fact in ("28 of 28", "q_proj", "down_proj", "alpha 8 / rank 4"):
        assert fact in printed


def test_inspect_counts_what_a_model_applies(folders, capsys):
    words = ["inspect", str(folders / "bob"), "--model", str(folders / "model")]
    assert main([*words, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert facts["servable"] is True
    assert facts["tensors_applied"] == facts["tensors_total"] == 4
    assert facts["ranks"] == [2]
    assert main(words) == 0
    assert "4 of 4" in capsys.readouterr().out


def test_inspect_names_every_reason_that_a_model_cannot_serve(
    folders, tmp_path, capsys
):
    from safetensors.numpy import load_file, save_file

    folder = write_adapter(tmp_path / "broken", seed=3)
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    layer = "base_model.model.model.layers.0.self_attn"
    tensors[f"{layer}.q_proj.lora_A.weight"] = np.ones((4, 31), np.float32)
    for factor, shape in (("A", (4, 32)), ("B", (32, 4))):
        name = f"{layer}.z_proj.lora_{factor}.weight"
        tensors[name] = np.ones(shape, np.float32)
    save_file(tensors, path)
    words = ["inspect", str(folder), "--model", str(folders / "model")]
    assert main(words) == 2
    printed = capsys.readouterr()
    assert "0 of 30" in printed.out
    for reason in ("layers.0.self_attn.q_proj", "layers.0.self_attn.z_proj"):
        assert reason in printed.err
    assert main([*words, "--json"]) == 2
    facts = json.loads(capsys.readouterr().out)
    assert facts["servable"] is False
    assert len(facts["reasons"]) >= 2


def test_inspect_of_what_is_no_adapter_is_one_message(tmp_path, capsys):
    assert main(["inspect", str(tmp_path / "none"), "--json"]) == 2
    printed = capsys.readouterr()
    assert "error:" in printed.err
    assert "Traceback" not in printed.err
    facts = json.loads(printed.out)
    assert facts["servable"] is False
    assert facts["reasons"]


def test_demo_shows_answers_proof_and_compilations(folders, tmp_path, capsys):
    write_adapter(tmp_path / "ada", seed=1, rank=4)
    write_adapter(tmp_path / "bob", seed=2, rank=2)
    lines = [
        {"id": 1, "prompt": "w5 w6", "lora": "ada"},
        {"id": 2, "prompt": "w5 w6", "lora": None},
        {"id": 3, "messages": [{"role": "user", "content": "w7"}], "lora": "bob"},
    ]
    write_lines(tmp_path / "prompts.jsonl", lines)
    words = ["demo", "--model", str(folders / "model"), "--adapters", str(tmp_path)]
    assert main([*words, "--max-tokens", "4"]) == 0
    printed = capsys.readouterr()
    for fact in ("(base)", "ada", "bob", "28 of 28", "0 afterwards", "tokens/s"):
        assert fact in printed.out
    assert "changed with the row order: 0" in printed.out
    assert "loading" in printed.err


def test_the_package_brings_adapters_and_prompts_for_the_demo():
    folders = demo.find_adapters(demo.ADAPTERS)
    lines = read_input(demo.ADAPTERS / demo.PROMPTS, folders)
    assert {line.lora for line in lines} == {None, *folders}
    assert all(load_adapter(folder).rank > 0 for folder in folders.values())


def test_demo_without_adapters_is_one_message(folders, tmp_path, capsys):
    assert main(["demo", "--adapters", str(tmp_path)]) == 2
    assert "holds no adapter folders" in capsys.readouterr().err


def test_an_unexpected_error_shows_no_traceback_unless_asked(
    monkeypatch, capsys, tmp_path
):
    from lora_jax.cli import inspect

    def fail(_):
        raise TypeError("oh")

    monkeypatch.setattr(inspect, "run", fail)
    assert main(["inspect", str(tmp_path)]) == 2
    printed = capsys.readouterr().err
    assert "unexpected TypeError: oh" in printed
    assert "Traceback" not in printed
    monkeypatch.setenv("LORA_JAX_DEBUG", "1")
    assert main(["inspect", str(tmp_path)]) == 2
    assert "Traceback" in capsys.readouterr().err


def test_interrupting_is_no_traceback(monkeypatch, capsys, tmp_path):
    from lora_jax.cli import inspect

    def interrupt(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(inspect, "run", interrupt)
    assert main(["inspect", str(tmp_path)]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_the_module_runs_as_a_program(folders):
    done = subprocess.run(
        [sys.executable, "-m", "lora_jax.cli", "inspect", str(folders / "none")],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'kernels'}"},
    )
    assert done.returncode == 2
    # A CUDA plugin without a GPU has its own words on stderr, before ours.
    assert "error:" in [line[:6] for line in done.stderr.splitlines()]
    assert "Traceback" not in done.stderr
    assert done.stdout == ""
