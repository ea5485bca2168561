"""Text in and out: chat templates, streaming text, stop strings, tokenizers of GGUF files."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from onchip.engine.tokenizer import TextStream, Tokenizer, load_tokenizer
from onchip.engine.weights import open_checkpoint
from tests.engine_models import TEMPLATE, make_model, save_folder, save_gguf

pytest.importorskip("transformers")
pytest.importorskip("gguf")
TEXTS = [
    "hello world",
    "  two spaces, 1234 and\n\ttabs",
    "ünïcode 漢字 🙂 end",
    "<|im_start|>user",
    "",
]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    model = make_model("llama", tied=True)
    root = tmp_path_factory.mktemp("tokenizers")
    return save_folder(model, root / "folder"), save_gguf(model, root / "model.gguf")


@pytest.fixture(scope="module")
def tokenizer(paths):
    return load_tokenizer(open_checkpoint(paths[0]))


def test_gguf_tokenizer_equals_the_folders(paths, tokenizer):
    other = load_tokenizer(open_checkpoint(paths[1]))
    for text in TEXTS:
        ids = tokenizer.encode(text)
        assert other.encode(text) == ids
        assert other.decode(ids) == tokenizer.decode(ids)
    assert tokenizer.encode("hel") == [261]  # both merges were used
    assert tokenizer.encode("<|im_end|>") == [259]
    messages = [{"role": "user", "content": "hello"}]
    assert other.encode_chat(messages) == tokenizer.encode_chat(messages)


def test_chat_template(tokenizer):
    messages = [{"role": "system", "content": "be\nbrief"}, {"role": "user", "content": "hello"}]
    chat = "<|im_start|>system\nbe\nbrief<|im_end|><|im_start|>user\nhello<|im_end|>"
    answer = "<|im_start|>assistant\n"
    assert tokenizer.encode_chat(messages) == tokenizer.encode(chat + answer)
    without = tokenizer.encode_chat(messages, add_generation_prompt=False)
    assert without == tokenizer.encode(chat)


def test_chat_errors(tokenizer):
    user = [{"role": "user", "content": "x"}]
    without = Tokenizer(tokenizer.backend, None, {})
    with pytest.raises(ValueError, match="messages: the model has no chat template. Use generate"):
        without.encode_chat(user)
    strict = Tokenizer(tokenizer.backend, "{{ raise_exception('roles must alternate') }}", {})
    with pytest.raises(ValueError, match="refuses them: roles must alternate"):
        strict.encode_chat(user)
    with pytest.raises(ValueError, match="messages: .*refuses"):
        tokenizer.encode_chat([{"role": 3, "content": None}])
    sandboxed = Tokenizer(tokenizer.backend, "{{ ''.__class__.__mro__[1].__subclasses__() }}", {})
    with pytest.raises(ValueError, match="messages: .*refuses"):
        sandboxed.encode_chat(user)


def test_templates_of_a_folder(paths, tmp_path):
    folder = paths[0]
    settings_file = folder / "tokenizer_config.json"
    before = settings_file.read_text()
    user = [{"role": "user", "content": "x"}]
    checkpoint = open_checkpoint(folder)
    named = {
        "chat_template": [{"name": "default", "template": "{{ bos_token }}A"}],
        "bos_token": {"content": "<|bos|>"},
    }
    try:
        settings_file.write_text(json.dumps(named))
        tokenizer = load_tokenizer(checkpoint)
        assert tokenizer.encode_chat(user) == tokenizer.encode("<|bos|>A")
        own_file = folder / "chat_template.jinja"
        own_file.write_text("B")
        assert load_tokenizer(checkpoint).encode_chat(user) == tokenizer.encode("B")
        own_file.unlink()
    finally:
        settings_file.write_text(before)
    assert load_tokenizer(checkpoint).chat_template == TEMPLATE


def test_prefix_comes_before_plain_prompts_only(tokenizer):
    with_bos = Tokenizer(tokenizer.backend, TEMPLATE, {}, prefix=[256])
    assert with_bos.encode("a") == [256, *tokenizer.encode("a")]
    assert with_bos.encode_chat([]) == tokenizer.encode_chat([])


@given(text=st.text(max_size=30))
@settings(max_examples=60)
def test_streamed_text_is_the_whole_text(tokenizer, text):
    ids = tokenizer.encode(text)
    stream = TextStream(tokenizer)
    pieces = [stream.push(i) for i in ids] + [stream.flush()]
    assert "".join(pieces) == stream.text == tokenizer.decode(ids)


def test_a_character_comes_whole(tokenizer):
    stream = TextStream(tokenizer)
    pieces = [stream.push(i) for i in tokenizer.encode("a🙂b")]
    assert pieces == ["a", "", "", "", "🙂", "b"]
    cut = TextStream(tokenizer)
    assert [cut.push(i) for i in tokenizer.encode("🙂")[:2]] == ["", ""]
    assert cut.flush() == "\ufffd"  # what is left of a character at the end


@given(
    text=st.text(alphabet="ab\n", max_size=24),
    stop=st.lists(st.text(alphabet="ab\n", min_size=1, max_size=4), max_size=3),
)
@settings(max_examples=150)
def test_stop_strings_cut_where_they_would_in_the_whole_text(tokenizer, text, stop):
    stream = TextStream(tokenizer, stop)
    pieces = []
    for token_id in tokenizer.encode(text):
        pieces.append(stream.push(token_id))
        if stream.stopped:
            break
    pieces.append(stream.flush())
    # The stop string that ends first; of several that end there, the one that begins first.
    ends = [(text.find(s) + len(s), text.find(s)) for s in stop if s in text]
    want = text[: min(ends)[1]] if ends else text
    assert "".join(pieces) == stream.text == want
    assert stream.stopped == bool(ends)
    assert stream.push(0) == "" or not stream.stopped


def test_text_that_may_begin_a_stop_string_is_held(tokenizer):
    stream = TextStream(tokenizer, ["END"])
    assert [stream.push(i) for i in tokenizer.encode("aENbE")] == ["a", "", "", "ENb", ""]
    assert stream.flush() == "E"
