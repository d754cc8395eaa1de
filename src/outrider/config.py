"""What a user may set: sampling, speculation and engine settings, checked on construction.

Owns the ranges and their messages; knows no tensor. Every class is frozen, so a setting that
constructs is valid everywhere below.
"""

from __future__ import annotations

import math
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Any

from outrider.errors import ParameterError

MAX_SEED = 2**64 - 1
MAX_LOGPROBS = 20
MAX_GRAMMAR_CHARS = 2**16

# Prompt tokens that a request's first step computes along with its root and drafts: about as many
# rows as one block of the linears has room for, so they cost next to nothing there.
FIRST_STEP_TOKENS = 23


class Method(StrEnum):
    """The drafting methods; ``off`` is plain decoding."""

    OFF = "off"
    NGRAM = "ngram"
    DRAFT = "draft"
    MEDUSA = "medusa"
    MTP = "mtp"
    EAGLE3 = "eagle3"


class Accept(StrEnum):
    """The acceptance rules.

    ``coupled``: the target's pick under the shared noise, whatever was drafted. ``rejection``: the
    field's classic, a test of target against draft probability with residual correction.
    """

    COUPLED = "coupled"
    REJECTION = "rejection"


class GrammarKind(StrEnum):
    """How a grammar is written down."""

    JSON_SCHEMA = "json_schema"  # the schema, as JSON
    JSON_OBJECT = "json_object"  # any JSON object; the text is empty
    REGEX = "regex"  # the whole answer matches it
    CHOICE = "choice"  # one of the strings of a JSON list
    LARK = "lark"  # a context-free grammar in Lark's notation, from "start"
    TAGGED_JSON = "tagged_json"  # JSON between tags, as :func:`grammar_notation.as_lark` says


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """What an answer must be, word for word; compiled in :mod:`outrider.grammar`.

    Only what needs no compiler is checked here: an unknown kind, a text that is none, or too long.

    Raises:
        ParameterError: names the value and what is allowed.
    """

    kind: GrammarKind
    text: str = ""

    def __post_init__(self) -> None:
        _one_of("grammar kind", self.kind, tuple(GrammarKind))
        object.__setattr__(self, "kind", GrammarKind(self.kind))
        if not isinstance(self.text, str):
            raise ParameterError(
                f"grammar: the text of a {self.kind} is {reprlib.repr(self.text)}, not a string"
            )
        if self.kind is GrammarKind.JSON_OBJECT:
            if self.text:
                raise ParameterError(
                    "grammar: json_object takes no text; leave it out, or use json_schema"
                )
        elif not 0 < len(self.text) <= MAX_GRAMMAR_CHARS:
            raise ParameterError(
                f"grammar: the {self.kind} has {len(self.text)} characters; allowed: "
                f"1 .. {MAX_GRAMMAR_CHARS}"
            )
        try:
            self.text.encode()
        except UnicodeEncodeError as error:
            raise ParameterError(
                f"grammar: the {self.kind} has a lone surrogate at character {error.start}; "
                "send well-formed UTF-8"
            ) from None


# Methods that read a checkpoint of their own; MTP's may be inside the target's.
METHODS_WITH_HEAD = (Method.DRAFT, Method.MEDUSA, Method.MTP, Method.EAGLE3)


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the target picks each token, and when it stops.

    Applied in this order, always given the token's own prefix: penalties, logit bias, grammar,
    forbidden ids (``min_tokens``), temperature, top-k, top-p, min-p; then shared noise and argmax.

    Attributes:
        temperature: 0 is greedy; the filters then have no effect.
        top_k: keep the k largest logits (ties with the k-th stay); 0 keeps all.
        top_p: keep the smallest most likely set whose probability reaches this; in (0, 1].
        min_p: keep tokens at least this fraction as likely as the likeliest; in [0, 1].
        repetition_penalty: divides positive and multiplies negative logits of every token seen
            in prompt or output (Keskar et al. 2019); 1 is off.
        presence_penalty: subtracted once from the logit of every token already in the output.
        frequency_penalty: subtracted once per occurrence in the output.
        logit_bias: added to the logits of these token ids.
        seed: 0 .. 2**64 - 1; None draws a fresh private one.
        choice: which of several answers to one prompt; salts the noise.
        max_tokens: most tokens to emit.
        min_tokens: end-of-sequence and stop ids are forbidden before this many tokens, unless
            nothing else is possible.
        stop: strings that end the text; the text is cut before them.
        stop_token_ids: further ids that end the text like an end-of-sequence token.
        ignore_eos: go on past the model's own end-of-sequence tokens.
        accept: how drafts are accepted when sampling; both rules leave the target's law as it is,
            but only under ``coupled`` does a seed give the same text whatever is drafted, whenever
            and in whatever batch.
        logprobs: log-probabilities of each token and of this many likeliest alternatives, 0 .. 20;
            None is off. They are the target's own, before anything above is applied.
        grammar: what the text must be. End-of-sequence is possible only where the grammar may end,
            and a grammar that cannot go on ends the text; under ``ignore_eos`` only that does.
        max_draft_tokens: most nodes this request verifies in a step, within what the engine drafts;
            0 is plain decoding, None leaves it to the engine.

    Raises:
        ParameterError: a value is out of range; the message names it and the range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict, hash=False)
    seed: int | None = None
    choice: int = 0
    max_tokens: int = 256
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    accept: Accept = Accept.COUPLED
    logprobs: int | None = None
    grammar: GrammarSpec | None = None
    max_draft_tokens: int | None = None

    def __post_init__(self) -> None:
        _number("temperature", self.temperature, 0.0, 100.0)
        _whole("top_k", self.top_k, 0, 2**31 - 1)
        _number("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _number("min_p", self.min_p, 0.0, 1.0)
        _number("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        _number("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _number("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        if self.seed is not None:
            _whole("seed", self.seed, 0, MAX_SEED)
        _whole("choice", self.choice, 0, 2**31 - 1)
        _whole("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _whole("min_tokens", self.min_tokens, 0, self.max_tokens)
        if isinstance(self.stop, str):
            object.__setattr__(self, "stop", (self.stop,))
        object.__setattr__(self, "stop", _several("stop", self.stop))
        for text in self.stop:
            if not isinstance(text, str) or not text:
                raise ParameterError(f"stop: {text!r} is not a non-empty string; remove it")
        object.__setattr__(self, "stop_token_ids", _several("stop_token_ids", self.stop_token_ids))
        for token in self.stop_token_ids:
            _whole("stop_token_ids", token, 0, 2**31 - 1)
        _flag("ignore_eos", self.ignore_eos)
        _one_of("accept", self.accept, tuple(Accept))
        object.__setattr__(self, "accept", Accept(self.accept))
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.grammar is not None and not isinstance(self.grammar, GrammarSpec):
            raise ParameterError(
                f"grammar: {reprlib.repr(self.grammar)} is not a GrammarSpec; give one, or None"
            )
        if self.max_draft_tokens is not None:
            _whole("max_draft_tokens", self.max_draft_tokens, 0, 2**31 - 1)
        if not isinstance(self.logit_bias, Mapping):
            raise ParameterError(
                f"logit_bias: {self.logit_bias!r} does not map token ids to numbers"
            )
        for token, bias in self.logit_bias.items():
            _whole("logit_bias token id", token, 0, 2**31 - 1)
            _number(f"logit_bias[{token}]", bias, -100.0, 100.0)
        object.__setattr__(self, "logit_bias", MappingProxyType(dict(self.logit_bias)))

    @property
    def is_greedy(self) -> bool:
        """True when no noise is drawn."""
        return self.temperature == 0.0

    @property
    def uses_rejection(self) -> bool:
        """True when drafts are accepted by the ``rejection`` rule; greedily, both are one walk."""
        return self.accept is Accept.REJECTION and not self.is_greedy

    @property
    def has_penalties(self) -> bool:
        """True when logits depend on which tokens came before."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculationConfig:
    """What drafts and how much, in TensorRT-LLM's names.

    A chain of ``max_draft_len`` tokens, or, with ``use_dynamic_tree``, a tree of at most that
    depth, ``dynamic_tree_max_topK`` children per node and ``max_total_draft_tokens`` nodes (root
    excluded), where ``max_draft_len <= max_total_draft_tokens <= topK * max_draft_len``.
    None chooses the upper bound. ``dynamic_tree_max_topK = 1`` is a chain.

    ``block_verification`` accepts a sampled chain as a whole under the ``rejection`` rule (Sun et
    al. 2025), which keeps a little more of it than token by token.

    ``head`` names the draft head or, for ``draft``, the draft model: a folder, a file or a name.
    None takes the head that ships for the target; for ``mtp`` first of all the module inside the
    target's own checkpoint. Whether there is one is known once the target is. ``with_ngram`` lets
    n-gram add its guesses to the head's, within ``max_total_draft_tokens``.

    Raises:
        ParameterError: names the rule, the value and the allowed range.
    """

    method: Method = Method.NGRAM
    max_draft_len: int = 8
    use_dynamic_tree: bool = False
    dynamic_tree_max_topK: int | None = None
    max_total_draft_tokens: int | None = None
    adaptive: bool = True
    block_verification: bool = True
    head: str | None = None
    with_ngram: bool = False

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "method", Method(self.method))
        except ValueError:
            allowed = ", ".join(Method)
            raise ParameterError(f"method: {self.method!r} is not one of {allowed}") from None
        _flag("use_dynamic_tree", self.use_dynamic_tree)
        _flag("adaptive", self.adaptive)
        _flag("block_verification", self.block_verification)
        _flag("with_ngram", self.with_ngram)
        self._check_head()
        _whole("max_draft_len", self.max_draft_len, 1, 128)
        topk = self.dynamic_tree_max_topK
        if topk is None:
            topk = 4 if self.use_dynamic_tree else 1
        _whole("dynamic_tree_max_topK", topk, 1, 64)
        if topk > 1 and not self.use_dynamic_tree:
            raise ParameterError(
                f"dynamic_tree_max_topK: {topk} needs a tree; set use_dynamic_tree (--tree) or 1"
            )
        object.__setattr__(self, "dynamic_tree_max_topK", topk)
        bound = topk * self.max_draft_len
        total = bound if self.max_total_draft_tokens is None else self.max_total_draft_tokens
        is_whole = isinstance(total, int) and not isinstance(total, bool)
        if not is_whole or not self.max_draft_len <= total <= bound:
            raise ParameterError(
                f"max_total_draft_tokens: {total!r} breaks max_draft_len <= max_total_draft_tokens"
                f" <= dynamic_tree_max_topK * max_draft_len; allowed here: "
                f"{self.max_draft_len} .. {bound}"
            )
        object.__setattr__(self, "max_total_draft_tokens", total)

    def _check_head(self) -> None:
        """What the method cannot use; what it needs, :mod:`outrider.pairing` looks for."""
        readers = ", ".join(METHODS_WITH_HEAD)
        if self.head is not None and (not isinstance(self.head, str) or not self.head):
            raise ParameterError(f"head: {self.head!r} is not a folder, a file or a name")
        if self.head is not None and self.method not in METHODS_WITH_HEAD:
            raise ParameterError(
                f"head: {self.head!r} cannot be used by method {self.method}; choose one of "
                f"{readers}, or leave out the head"
            )
        if self.with_ngram and self.method not in METHODS_WITH_HEAD:
            raise ParameterError(
                f"with_ngram: method {self.method} has nothing to add n-gram to; choose one of "
                f"{readers}"
            )
        if self.method is Method.OFF and self.use_dynamic_tree:
            raise ParameterError(
                "use_dynamic_tree: method off drafts no tree; choose another method"
            )

    @property
    def num_draft_tokens(self) -> int:
        """Most nodes one request verifies in a step, root excluded; 0 for plain decoding."""
        if self.method is Method.OFF:
            return 0
        assert self.max_total_draft_tokens is not None
        return self.max_total_draft_tokens


@dataclass(frozen=True, slots=True, kw_only=True)
class AdmissionLimits:
    """How long the queue may get before further requests are refused; None is without a limit.

    Those at the head for which there are free cache rows, and slots, do not count: they run from
    the next step on.

    Attributes:
        max_waiting: requests that wait.
        max_waiting_tokens: their prompt tokens in all.
    """

    max_waiting: int | None = None
    max_waiting_tokens: int | None = None

    def __post_init__(self) -> None:
        if self.max_waiting is not None:
            _whole("max_waiting", self.max_waiting, 0, 2**31 - 1)
        if self.max_waiting_tokens is not None:
            _whole("max_waiting_tokens", self.max_waiting_tokens, 0, 2**31 - 1)


# Longer contexts are a setting, not a default: the cache is allocated up front.
DEFAULT_MAX_MODEL_LEN = 2048


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How much runs at once, on what, in which precision.

    Attributes:
        max_batch_size: requests decoded together.
        max_model_len: prompt plus output tokens of one request; None takes the model's own
            context, at most 2,048 to keep the cache small.
        max_slots: tokens, prompt and output, of all running requests together; beyond it the one
            admitted last waits again and is recomputed later. At least ``max_model_len``; None
            never makes one wait. Drafted tokens have room of their own and do not count.
        prefill_chunk: prompt tokens that one step computes ahead of the requests' first tokens, of
            all new requests together; the others go on decoding in the same step.
        prefix_cache: a request that begins like an earlier one of the same salt starts on its keys
            and values; a row that is free keeps what it holds until it is needed.
        admission: how long the queue may get.
        dtype: ``auto`` (bfloat16 where the processor multiplies it natively, else float32),
            ``bfloat16`` or ``float32``.
        device: ``cpu``; other devices are refused in this version.
        threads: compute threads; None leaves torch's choice.
        self_test: ``auto`` runs the exactness self-test once per machine and model and caches
            the result; ``always`` ignores the cache; ``off`` skips it and reports exactness as
            unknown. A draft head's self-check goes along with it.
    """

    max_batch_size: int = 1
    max_model_len: int | None = None
    max_slots: int | None = None
    prefill_chunk: int = 256
    prefix_cache: bool = False
    admission: AdmissionLimits = field(default_factory=AdmissionLimits)
    dtype: str = "auto"
    device: str = "cpu"
    threads: int | None = None
    self_test: str = "auto"

    def __post_init__(self) -> None:
        _whole("max_batch_size", self.max_batch_size, 1, 1024)
        if self.max_model_len is not None:
            _whole("max_model_len", self.max_model_len, 2, 2**24)
        if self.max_slots is not None:
            _whole("max_slots", self.max_slots, self.max_model_len or 2, 2**34)
        _flag("prefix_cache", self.prefix_cache)
        if not isinstance(self.admission, AdmissionLimits):
            raise ParameterError(
                f"admission: {self.admission!r} is not an AdmissionLimits; give one"
            )
        _whole("prefill_chunk", self.prefill_chunk, 1, 65536)
        _one_of("dtype", self.dtype, ("auto", "bfloat16", "float32"))
        _one_of("device", self.device, ("cpu",))
        if self.threads is not None:
            _whole("threads", self.threads, 1, 1024)
        _one_of("self_test", self.self_test, ("auto", "always", "off"))


def _number(name: str, value: object, low: float, high: float, *, low_open: bool = False) -> None:
    """Refuse what is not a finite number in the range."""
    allowed = f"{'(' if low_open else '['}{low:g}, {high:g}]"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ParameterError(f"{name}: {value!r} is not a number in {allowed}")
    if isinstance(value, float) and not math.isfinite(value):  # isfinite fails on huge integers
        raise ParameterError(f"{name}: {value!r} is not a number in {allowed}")
    if not low <= value <= high or (low_open and value == low):
        shown = f"{value:.12g}" if isinstance(value, float) else value
        raise ParameterError(f"{name}: {shown} is outside {allowed}")


def _whole(name: str, value: object, low: int, high: int) -> None:
    """Refuse what is not an integer in the range."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(f"{name}: {value!r} is not a whole number; allowed: {low} .. {high}")
    if not low <= value <= high:
        raise ParameterError(f"{name}: {value} is outside the allowed range {low} .. {high}")


def _flag(name: str, value: object) -> None:
    """Refuse what is neither True nor False; a word such as "no" would count as True."""
    if not isinstance(value, bool):
        raise ParameterError(f"{name}: {value!r} is neither True nor False")


def _several(name: str, value: object) -> tuple[Any, ...]:
    """The items of a list; the caller checks each one."""
    if not isinstance(value, Iterable) or isinstance(value, str | bytes | Mapping):
        raise ParameterError(f"{name}: {value!r} is not a list; give one, which may be empty")
    return tuple(value)


def _one_of(name: str, value: object, allowed: tuple[str, ...]) -> None:
    """Refuse what is not one of the words."""
    if value not in allowed:
        raise ParameterError(f"{name}: {value!r} is not one of {', '.join(allowed)}")
