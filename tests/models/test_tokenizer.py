"""Tokenizer folders as transformers writes them: settings, templates, end tokens."""

import json

import pytest
import tokenizers
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing

from lora_jax.errors import ModelError
from lora_jax.models import load_tokenizer

VOCAB = {"<s>": 0, "</s>": 1, "<pad>": 2, "hello": 3, "world": 4, "user": 5, "bot": 6}
CHAT = (
    "{{ bos_token }}{% for m in messages %}{{ m.role }} {{ m.content }} {% endfor %}"
    "{% if add_generation_prompt %}bot{% endif %}"
)
HELLO = [{"role": "user", "content": "hello"}]


def folder(path, *, backend=None, **files: object):
    """Writes a tokenizer folder; `files` maps a file's stem to its JSON object."""
    backend = backend or make_backend()
    backend.save(str(path / "tokenizer.json"))
    for name, content in files.items():
        (path / f"{name}.json").write_text(json.dumps(content))
    return path


def make_backend() -> tokenizers.Tokenizer:
    backend = tokenizers.Tokenizer(WordLevel(VOCAB, unk_token="<pad>"))
    backend.pre_tokenizer = Whitespace()
    backend.add_special_tokens(["<s>", "</s>", "<pad>"])
    backend.post_processor = TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 0)]
    )
    return backend


def test_special_tokens_are_added_unless_not_wanted(tmp_path):
    tokenizer = load_tokenizer(folder(tmp_path))
    assert tokenizer.encode("hello world") == [0, 3, 4]
    assert tokenizer.encode("hello world", add_special_tokens=False) == [3, 4]
    assert tokenizer.decode([0, 3, 4, 1]) == "hello world"
    assert tokenizer.decode([0, 3], skip_special_tokens=False) == "<s> hello"
    assert tokenizer.vocab_size == 7


def test_padding_and_truncation_of_a_training_run_are_switched_off(tmp_path):
    backend = make_backend()
    backend.enable_padding(length=8, pad_id=2, pad_token="<pad>")
    backend.enable_truncation(2)
    tokenizer = load_tokenizer(folder(tmp_path, backend=backend))
    assert tokenizer.encode("hello world hello") == [0, 3, 4, 3]


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"generation_config": {"eos_token_id": [1, 2]},
          "config": {"eos_token_id": 0}}, {1, 2}),
        ({"generation_config": {}, "config": {"eos_token_id": 1}}, {1}),
        ({"tokenizer_config": {"eos_token": "</s>"}}, {1}),
        ({"tokenizer_config": {"eos_token": {"content": "<pad>"}}}, {2}),
        ({"tokenizer_config": {"eos_token": "absent"}}, set()),
        ({}, set()),
    ],
)  # fmt: skip
def test_end_tokens_come_from_the_first_file_that_names_them(tmp_path, files, expected):
    assert load_tokenizer(folder(tmp_path, **files)).eos_ids == expected


def test_a_chat_is_rendered_without_doubling_the_first_token(tmp_path):
    settings = {"chat_template": CHAT, "bos_token": "<s>"}
    tokenizer = load_tokenizer(folder(tmp_path, tokenizer_config=settings))
    assert tokenizer.apply_chat_template(HELLO) == [0, 5, 3, 6]
    assert tokenizer.apply_chat_template(HELLO, add_generation_prompt=False) == [
        0,
        5,
        3,
    ]


def test_a_template_file_goes_before_the_settings(tmp_path):
    (tmp_path / "chat_template.jinja").write_text("world")
    tokenizer = load_tokenizer(
        folder(tmp_path, tokenizer_config={"chat_template": CHAT})
    )
    assert tokenizer.render_chat(HELLO) == "world"


def test_the_default_of_named_templates_is_used(tmp_path):
    named = [{"name": n, "template": n} for n in ("tool_use", "default")]
    tokenizer = load_tokenizer(
        folder(tmp_path, tokenizer_config={"chat_template": named})
    )
    assert tokenizer.render_chat(HELLO) == "default"


def test_templates_have_what_transformers_gives_them(tmp_path):
    template = (
        "{% for m in messages %}{% if loop.index > 1 %}{% break %}{% endif %}"
        "{{ m | tojson }}{% endfor %}{{ strftime_now('%Y') | length }}"
    )
    tokenizer = load_tokenizer(
        folder(tmp_path, tokenizer_config={"chat_template": template})
    )
    chat = [{"role": "é", "content": "<b>"}, {"role": "x", "content": "y"}]
    assert tokenizer.render_chat(chat) == '{"role": "é", "content": "<b>"}4'


@pytest.mark.parametrize(
    ("template", "match"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% for %}", "refuses the messages"),
        ("{{ messages.append(1) }}", "refuses the messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses the messages"),
    ],
)
def test_a_template_that_refuses_or_breaks_out_is_an_error(tmp_path, template, match):
    tokenizer = load_tokenizer(
        folder(tmp_path, tokenizer_config={"chat_template": template})
    )
    with pytest.raises(ModelError, match=match):
        tokenizer.apply_chat_template(HELLO)


def test_a_folder_without_a_template_says_what_to_do(tmp_path):
    with pytest.raises(ModelError, match=r"has no chat template .* give plain prompts"):
        load_tokenizer(folder(tmp_path)).apply_chat_template(HELLO)


def test_a_folder_without_a_tokenizer_says_what_to_do(tmp_path):
    with pytest.raises(ModelError, match=r"has no tokenizer\.json; save the tokenizer"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_a_malformed_file_is_named(tmp_path, name):
    folder(tmp_path)
    (tmp_path / name).write_text("{")
    with pytest.raises(ModelError, match=name):
        load_tokenizer(tmp_path)


def test_settings_that_are_no_object_are_refused(tmp_path):
    with pytest.raises(ModelError, match="holds list, expected an object"):
        load_tokenizer(folder(tmp_path, tokenizer_config=[]))
