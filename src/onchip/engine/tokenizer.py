"""Text to tokens and back, and chats to prompts, from tokenizer.json or a GGUF file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from onchip.engine.config import reject
from onchip.engine.weights import Checkpoint, GGUFCheckpoint, read_json

_CONTRACTIONS = "(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_LLAMA3_WORDS = (
    rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
# How a text is cut before BPE, by llama.cpp's name; None is GPT-2's own rule.
_SPLITS: dict[str, str | None] = {
    "default": None,
    "gpt-2": None,
    "smollm": r"\p{N}",
    "llama-bpe": _LLAMA3_WORDS,
    "qwen2": _LLAMA3_WORDS.replace(r"\p{N}{1,3}", r"\p{N}"),
}
_CONTROL, _USER_DEFINED = 3, 4
_UNFINISHED = "\ufffd"  # what a tokenizer writes for the first bytes of a longer character

Messages = Sequence[Mapping[str, str]]


class Tokenizer:
    """A `tokenizers.Tokenizer` with what a chat needs.

    Args:
        backend: encodes and decodes.
        chat_template: Jinja source; None when the model has none.
        variables: special tokens by the names that templates use (bos_token, ...).
        prefix: tokens put before every plain prompt.
    """

    def __init__(
        self,
        backend: Any,
        chat_template: str | None,
        variables: Mapping[str, str],
        prefix: Sequence[int] = (),
    ):
        self.backend = backend
        self.chat_template = chat_template
        self.variables = dict(variables)
        self.prefix = list(prefix)

    def encode(self, text: str) -> list[int]:
        """Tokens of a plain prompt, with what the model wants before it."""
        return self.prefix + self.backend.encode(text).ids

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special ones left out."""
        return self.backend.decode(list(token_ids), skip_special_tokens=True)

    def encode_chat(self, messages: Messages, add_generation_prompt: bool = True) -> list[int]:
        """Tokens of a chat, by the model's own template.

        Args:
            messages: {"role": ..., "content": ...} each, oldest first.
            add_generation_prompt: end with the words that let the model answer.

        Raises:
            ValueError: if the model has no template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("messages: the model has no chat template. Use generate with a text.")
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        def raise_exception(message: str):
            raise TemplateError(message)

        jinja = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        jinja.globals["raise_exception"] = raise_exception
        try:
            text = jinja.from_string(self.chat_template).render(
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                **self.variables,
            )
        except (TemplateError, TypeError) as error:
            raise ValueError(
                f"messages: the model's chat template refuses them: {error}. Give a list of "
                f"{{'role': 'user' or 'assistant' or 'system', 'content': text}}."
            ) from error
        return self.backend.encode(text, add_special_tokens=False).ids


class TextStream:
    """One sequence's text as its tokens come, cut at the first stop string.

    Characters whose bytes are not all there, and text that may turn out to be the beginning of
    a stop string, are held back until it is clear.

    Args:
        tokenizer: decodes.
        stop: strings that end the text; they are not part of it.

    Attributes:
        text: what is out so far.
        stopped: whether a stop string came.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()):
        self._tokenizer = tokenizer
        self._stop = tuple(stop)
        self._window: list[int] = []  # tokens that may change how the next ones read
        self._num_shown = 0  # characters of the window's text that are in _pending or text
        self._pending = ""
        self.text = ""
        self.stopped = False

    def push(self, token_id: int) -> str:
        """Adds a token.

        Returns:
            The text that became final.

        Mutates: this stream.
        """
        if self.stopped:
            return ""
        self._window.append(token_id)
        window = self._tokenizer.decode(self._window)
        if not window.endswith(_UNFINISHED):
            self._pending += window[self._num_shown :]
            # One token stays: some tokenizers drop the space before the first word.
            self._window = self._window[-1:]
            self._num_shown = len(self._tokenizer.decode(self._window))
        self._cut_at_stop()
        return self._release(self._held())

    def flush(self) -> str:
        """Gives out what was held back, at the end.

        Mutates: this stream.
        """
        if not self.stopped:
            self._pending += self._tokenizer.decode(self._window)[self._num_shown :]
            self._window, self._num_shown = [], 0
            self._cut_at_stop()
        return self._release(0)

    def _cut_at_stop(self) -> None:
        """Drops everything from the first stop string on."""
        found = [at for stop in self._stop if (at := self._pending.find(stop)) >= 0]
        if found:
            self._pending = self._pending[: min(found)]
            self.stopped = True

    def _held(self) -> int:
        """Characters at the end that may begin a stop string."""
        if self.stopped:
            return 0
        beginnings = (stop[:n] for stop in self._stop for n in range(1, len(stop)))
        return max((len(b) for b in beginnings if self._pending.endswith(b)), default=0)

    def _release(self, num_held: int) -> str:
        cut = len(self._pending) - num_held
        ready, self._pending = self._pending[:cut], self._pending[cut:]
        self.text += ready
        return ready


def load_tokenizer(checkpoint: Checkpoint) -> Tokenizer:
    """The tokenizer that came with a checkpoint.

    Raises:
        ValueError: if it is missing, damaged, or of a kind that is not implemented.
    """
    if isinstance(checkpoint, GGUFCheckpoint):
        return _from_gguf(checkpoint.file.metadata, str(checkpoint.path))
    return _from_folder(checkpoint.path)


def _from_folder(path: Path) -> Tokenizer:
    from tokenizers import Tokenizer as Backend

    file = path / "tokenizer.json"
    if not file.is_file():
        raise ValueError(
            f"{file}: missing; allowed: a tokenizer of the tokenizers library. Download it; a "
            f"tokenizer.model alone is converted by transformers' AutoTokenizer.save_pretrained."
        )
    try:
        backend = Backend.from_file(str(file))
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f"{file}: not a tokenizer ({error}). Download it again.") from None
    settings = path / "tokenizer_config.json"
    options = read_json(settings) if settings.is_file() else {}
    variables = {}
    for name, token in options.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            variables[name] = text
    template = options.get("chat_template")
    if isinstance(template, list):  # several by name
        template = {entry["name"]: entry["template"] for entry in template}.get("default")
    own_file = path / "chat_template.jinja"
    if own_file.is_file():
        template = own_file.read_text(encoding="utf-8")
    return Tokenizer(backend, template, variables)


def _from_gguf(metadata: Mapping[str, Any], where: str) -> Tokenizer:
    from tokenizers import AddedToken, decoders, models
    from tokenizers import Tokenizer as Backend

    def of(key: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{key}", default)

    kind, tokens, merges = of("model"), of("tokens"), of("merges")
    if kind != "gpt2" or tokens is None or merges is None:
        fix = "For others give the model as a Hugging Face folder with tokenizer.json."
        reject(where, "tokenizer.ggml.model", kind, "gpt2, with tokens and merges", fix)
    split = of("pre", "default")
    if split not in _SPLITS:
        fix = "Give the model as a Hugging Face folder with tokenizer.json."
        reject(where, "tokenizer.ggml.pre", split, ", ".join(_SPLITS), fix)
    backend = Backend(
        models.BPE(
            vocab={token: i for i, token in enumerate(tokens)},
            merges=[tuple(merge.split(" ", 1)) for merge in merges],
            ignore_merges=split == "llama-bpe",
        )
    )
    backend.pre_tokenizer = _pre_tokenizer(_SPLITS[split], bool(of("add_space_prefix", False)))
    backend.decoder = decoders.ByteLevel()
    kinds = of("token_type", [])
    for special in (_CONTROL, _USER_DEFINED):
        named = [t for t, k in zip(tokens, kinds, strict=False) if k == special]
        added = [AddedToken(t, special=special == _CONTROL, normalized=False) for t in named]
        (backend.add_special_tokens if special == _CONTROL else backend.add_tokens)(added)
    variables = {}
    for name, key in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding")):
        if (token_id := of(f"{key}_token_id")) is not None:
            variables[f"{name}_token"] = tokens[token_id]
    adds_bos = of("add_bos_token", split == "llama-bpe")  # llama.cpp's own default
    prefix = [of("bos_token_id")] if adds_bos else []
    return Tokenizer(backend, metadata.get("tokenizer.chat_template"), variables, prefix)


def _pre_tokenizer(split: str | None, add_prefix_space: bool):
    from tokenizers import Regex, pre_tokenizers

    if split is None or split == r"\p{N}":
        words = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=True)
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, words]) if split else words
    return pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(split), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=False),
        ]
    )
