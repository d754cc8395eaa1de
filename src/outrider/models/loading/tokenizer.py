"""Text to token ids and back, and which text may become a control token.

Wraps one ``tokenizers.Tokenizer``, built by :mod:`.tokenizer_files` from a ``tokenizer.json`` or
from GGUF metadata. Ordinary text gives the ids that transformers gives. Text from outside that
spells a control token (``<|im_end|>`` in a chat message) stays text: only what a chat template
writes itself turns into control tokens.
"""

from __future__ import annotations

import hashlib
import json
import re
import reprlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, NamedTuple

import tokenizers

from outrider.errors import PromptError
from outrider.models.loading.chat_template import ChatTemplate

Message = Mapping[str, Any]

ROLES = ("system", "developer", "user", "assistant", "tool", "function")

_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerParts:
    """What a checkpoint says about its tokenizer beside the vocabulary.

    ``variables`` are the special tokens that a template may write by name (``bos_token`` and so
    on); ``num_rows`` is the model's vocabulary, which ids must stay under.
    """

    eos_ids: frozenset[int]
    bos_id: int | None
    template: str | None
    variables: Mapping[str, str]
    num_rows: int


class _Marks(NamedTuple):
    """Characters that point into rendered text, and occur in no message.

    A control token behind ``fence`` stays text; none is found across ``seam``.
    """

    fence: str
    seam: str


class Tokenizer:
    """Encodes and decodes for one checkpoint; safe to share between threads."""

    def __init__(self, backend: tokenizers.Tokenizer, parts: TokenizerParts) -> None:
        """Wrap ``backend``.

        Raises:
            CheckpointError: the chat template does not compile.
        """
        self._backend = backend
        self._parts = parts
        self._lock = threading.Lock()  # encode_special_tokens is a switch on the shared backend
        self.eos_ids = parts.eos_ids
        self.bos_id = parts.bos_id
        self._added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in self._added.items() if token.special)
        self._special_id = {self._added[i].content: i for i in self.special_ids}
        self._template = ChatTemplate(parts.template, parts.variables) if parts.template else None

    @property
    def vocab_size(self) -> int:
        """Ids run from 0 to one below this; the model may have a few more rows as padding."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    @property
    def has_chat_template(self) -> bool:
        """Whether :meth:`encode_chat` can work."""
        return self._template is not None

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over every token with its id, and the merges in order."""
        model = json.loads(self._backend.to_str())["model"]
        vocab = sorted((i, token) for token, i in self._backend.get_vocab().items())
        merges = [m if isinstance(m, str) else " ".join(m) for m in model.get("merges", ())]
        return hashlib.sha256(json.dumps([vocab, merges]).encode()).hexdigest()

    def files(self) -> dict[str, bytes]:
        """The same tokeniser as files of a Hugging Face folder, by name."""
        settings = {"tokenizer_class": "PreTrainedTokenizerFast", **self._parts.variables}
        if self._parts.template is not None:
            settings["chat_template"] = self._parts.template
        stops = {"bos_token_id": self.bos_id, "eos_token_id": sorted(self.eos_ids)}
        return {
            "tokenizer.json": self._backend.to_str().encode(),
            "tokenizer_config.json": json.dumps(settings, indent=2).encode(),
            "generation_config.json": json.dumps(stops).encode(),
        }

    def encode(
        self, text: str, *, add_special_tokens: bool = True, allow_special: bool = True
    ) -> list[int]:
        """Token ids of ``text``.

        Bytes that the vocabulary has no token for are dropped, as the original tokenizer drops
        them: in SmolLM2 those of six control characters and of Unicode's unassigned planes.

        Args:
            text: any text without lone surrogates.
            add_special_tokens: put what the checkpoint puts around a text (a BOS, mostly).
            allow_special: a control token spelled in ``text`` becomes that token; otherwise it
                is encoded like any other characters.

        Raises:
            PromptError: ``text`` cannot be encoded as UTF-8, or needs an id the model lacks.
        """
        _check_text(text)
        if allow_special:
            ids = self._encode(text, add_special_tokens=add_special_tokens)
        else:
            ids = self._encode_plain(text, add_special_tokens=add_special_tokens)
        return self._checked_ids(ids)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ``ids``; bytes that are not UTF-8 become U+FFFD."""
        return self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token stands for in the middle of a text.

        Control tokens give their spelling, ids without a token nothing. Joining the bytes of a
        generated continuation and decoding UTF-8 gives its text.
        """
        if token_id in self._added:
            return self._added[token_id].content.encode()
        token = self._backend.id_to_token(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            alphabet = _bytes_by_char()
            if all(char in alphabet for char in token):
                return bytes(alphabet[char] for char in token)
            return token.encode()
        if match := _BYTE_TOKEN.fullmatch(token):
            return bytes([int(match[1], 16)])
        return token.replace("\u2581", " ").encode()

    def render_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> str:
        """The conversation as the model's chat template writes it.

        Raises:
            PromptError: no template, no messages, a malformed message, or the template refuses.
        """
        return self._render(_checked(messages), add_generation_prompt)

    def encode_chat(
        self, messages: Sequence[Message], *, add_generation_prompt: bool = True
    ) -> list[int]:
        """Token ids of the conversation; control tokens come from the template alone.

        Where a message spells a control token, or could complete one with the template's text, a
        character that occurs in no message marks the place, so that it is known after rendering;
        there the spelling is encoded as text.

        Raises:
            PromptError: no template, no messages, a malformed message, or the template refuses.
        """
        checked = _checked(messages)
        texts = [text for message in checked for text in _strings(_outside(message))]
        if not any(self._could_forge(text) for text in texts):
            rendered = self._render(checked, add_generation_prompt)
            return self.encode(rendered, add_special_tokens=False)
        marks = _unused_chars(texts)
        marked = [
            {
                "role": message["role"],
                **_map_strings(_outside(message), lambda text: self._marked(text, marks)),
            }
            for message in checked
        ]
        ids = self._encode_marked(self._render(marked, add_generation_prompt), marks)
        return self._checked_ids(ids)

    def _checked_ids(self, ids: list[int]) -> list[int]:
        beyond = next((i for i in ids if i >= self._parts.num_rows), None)
        if beyond is not None:
            raise PromptError(
                f"token {self._backend.id_to_token(beyond)!r} has id {beyond}, but the model has "
                f"{self._parts.num_rows} rows; remove it from the prompt"
            )
        return ids

    def _render(self, messages: Sequence[Message], add_generation_prompt: bool) -> str:
        if self._template is None:
            raise PromptError(
                "this model has no chat template; give a plain prompt instead of messages"
            )
        return self._template.render(messages, add_generation_prompt=add_generation_prompt)

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        with self._lock:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def _encode_plain(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Encode without looking for control tokens; what surrounds the text may be added."""
        with self._lock:
            self._backend.encode_special_tokens = True
            try:
                encoding = self._backend.encode(text, add_special_tokens=add_special_tokens)
            finally:
                self._backend.encode_special_tokens = False
        ids: list[int] = []
        for token_id, is_added in zip(encoding.ids, encoding.special_tokens_mask, strict=True):
            if is_added or token_id not in self.special_ids:
                ids.append(token_id)
                continue
            # Merges may lead to a control token where the vocabulary lists it; spell it out.
            spelling = self._added[token_id].content
            if len(spelling) == 1:
                raise PromptError(f"{spelling!r} is a control token and cannot be written as text")
            for char in spelling:
                ids += self._encode_between(char, is_first=False)
        return ids

    def _could_forge(self, text: str) -> bool:
        """Whether ``text`` spells a control token, or could complete one with what is around it."""
        return any(self._joins(text)) or any(special in text for special in self._special_id)

    def _joins(self, text: str) -> tuple[bool, bool]:
        """Whether ``text`` could be the end, and whether it could be the start of a control token.

        A text that is a piece out of the middle of one could be both.
        """
        is_piece = bool(text) and any(text in special for special in self._special_id)
        starts, ends = self._fragments
        return is_piece or text.startswith(ends), is_piece or text.endswith(starts)

    def _marked(self, text: str, marks: _Marks) -> str:
        """``text`` with marks before the control tokens it spells and where it could join one."""
        head, tail = (marks.seam * joins for joins in self._joins(text))
        return head + self._any_special.sub(lambda match: marks.fence + match[0], text) + tail

    @cached_property
    def _fragments(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Every proper beginning and every proper end of a control token."""
        cuts = [(special, at) for special in self._special_id for at in range(1, len(special))]
        return tuple({s[:at] for s, at in cuts}), tuple({s[at:] for s, at in cuts})

    @cached_property
    def _any_special(self) -> re.Pattern[str]:
        """Matches a control token; of two that begin at one place, the longer."""
        spellings = sorted(self._special_id, key=len, reverse=True)
        return re.compile("|".join(map(re.escape, spellings)) or "(?!)")

    def _control_pattern(self, marks: _Marks) -> re.Pattern[str]:
        """Matches a mark, with the control token behind it if it is a fence, or a control token.

        A control token may swallow the white space around it, if the vocabulary says so.
        """
        spellings = []
        for special in sorted(self._special_id, key=len, reverse=True):
            flags = self._added[self._special_id[special]]
            left, right = r"\s*" * flags.lstrip, r"\s*" * flags.rstrip
            spellings.append(f"{left}{re.escape(special)}{right}")
        control = "|".join(spellings) or "(?!)"
        fenced = f"{marks.fence}(?P<text>{self._any_special.pattern})?"
        return re.compile(f"{fenced}|{marks.seam}|(?P<control>{control})")

    def _encode_marked(self, rendered: str, marks: _Marks) -> list[int]:
        """Encode template output with marks in it."""
        ids: list[int] = []
        text = ""
        at = 0
        for match in self._control_pattern(marks).finditer(rendered):
            text += rendered[at : match.start()]
            at = match.end()
            if match["control"] is None:
                text += match["text"] or ""
                continue
            ids += self._encode_between(text, is_first=not ids)
            ids.append(self._special_id[match["control"].strip()])
            text = ""
        return ids + self._encode_between(text + rendered[at:], is_first=not ids)

    def _encode_between(self, text: str, *, is_first: bool) -> list[int]:
        """Encode what stands between two control tokens."""
        if not text:
            return []
        if not is_first and self._has_leading_prefix:
            # A SentencePiece vocabulary puts a space before a text, but not after a control token.
            newline = self._encode_plain("\n", add_special_tokens=False)
            behind = self._encode_plain("\n" + text, add_special_tokens=False)
            if behind[: len(newline)] == newline:
                return behind[len(newline) :]
        return self._encode_plain(text, add_special_tokens=False)

    @cached_property
    def _has_leading_prefix(self) -> bool:
        if not self._special_id:
            return False
        alone = self._encode("a", add_special_tokens=False)
        behind = self._encode(next(iter(self._special_id)) + "a", add_special_tokens=False)
        return behind[1:] != alone

    @cached_property
    def _is_byte_level(self) -> bool:
        return "ByteLevel(" in str(self._backend.decoder)


def encode_prompt(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of one prompt as the model expects it: in its chat template, where it has one.

    Raises:
        PromptError: as the tokenizer's own methods.
    """
    if not tokenizer.has_chat_template:
        return tokenizer.encode(text)
    return tokenizer.encode_chat([{"role": "user", "content": text}])


@cache
def _bytes_by_char() -> dict[str, int]:
    """GPT-2's alphabet: each byte as a printable character (Radford et al. 2019)."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    alphabet = {chr(byte): byte for byte in printable}
    return alphabet | {chr(256 + i): byte for i, byte in enumerate(others)}


def _check_text(text: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise PromptError(
            f"the prompt is not valid Unicode text: lone surrogate at character {error.start}; "
            "send well-formed UTF-8"
        ) from None


def _checked(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """The messages as plain dicts without null fields, as templates expect them."""
    if not messages:
        raise PromptError("a conversation needs at least one message")
    checked = []
    for number, message in enumerate(messages):
        if not isinstance(message, Mapping) or message.get("role") not in ROLES:
            role = message.get("role") if isinstance(message, Mapping) else message
            raise PromptError(
                f"message {number} has the role {reprlib.repr(role)}; allowed: {', '.join(ROLES)}"
            )
        if not isinstance(message.get("content"), str) and not message.get("tool_calls"):
            content = reprlib.repr(message.get("content"))
            raise PromptError(f"message {number} has the content {content}; allowed: a string")
        checked.append({key: value for key, value in message.items() if value is not None})
    try:
        for text in _strings(checked):
            _check_text(text)
    except RecursionError:
        raise PromptError("the messages are nested too deeply; flatten their fields") from None
    return checked


def _outside(message: Message) -> dict[str, Any]:
    """What of a message comes from outside: all but the role, which is one of ours."""
    return {key: value for key, value in message.items() if key != "role"}


def _strings(value: Any) -> Iterator[str]:
    """Every string inside ``value``; of dicts, the values."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from _strings(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _strings(item)


def _map_strings(value: Any, change: Callable[[str], str]) -> Any:
    """``value`` with every string inside changed; of dicts, the values."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {key: _map_strings(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_map_strings(item, change) for item in value]
    return value


def _unused_chars(texts: Iterable[str]) -> _Marks:
    """Two private-use characters that occur in none of ``texts``."""
    used = set().union(*texts)
    free = (char for char in map(chr, range(0xF0000, 0x10FFFE)) if char not in used)
    return _Marks(fence=next(free), seam=next(free))
