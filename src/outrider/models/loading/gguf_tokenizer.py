"""A tokenizer from GGUF metadata, which stores vocabulary and merges but only a name for the rest.

Two kinds: byte-level BPE (``gpt2``), where ``tokenizer.ggml.pre`` names how text is cut into words
before merging, and SentencePiece BPE (``llama``), where merges follow from the scores. Where
llama.cpp and the original ``tokenizer.json`` differ, the original is followed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    normalizers,
    pre_tokenizers,
    processors,
)
from tokenizers.models import BPE

from outrider.errors import CheckpointError, UnsupportedModelError
from outrider.models.loading.fields import Fields
from outrider.models.loading.gguf_file import GGUFFile
from outrider.models.loading.tokenizer import TokenizerParts

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # tokenizer.ggml.token_type

_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

# How each pre-tokeniser cuts: patterns applied one after the other to what is left between cuts.
_DIGITS = "digits"  # every digit by itself, as the tokenizer.json of SmolLM and StarCoder say
_CUTS: dict[str, tuple[str, ...]] = {
    "gpt-2": (_GPT2,),
    "smollm": (_DIGITS, _GPT2),
    "starcoder": (_DIGITS, _GPT2),
    "refact": (_DIGITS, _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "smaug-bpe": (_LLAMA3,),
    "dbrx": (_LLAMA3,),
    "falcon3": (_LLAMA3,),
    "qwen2": (_QWEN2,),
    "deepseek-r1-qwen": (_QWEN2,),
    "tekken": (_TEKKEN,),
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]"),
}
_IGNORE_MERGES = ("llama-bpe", "llama3", "llama-v3", "falcon3", "tekken")
_ADD_BOS = _IGNORE_MERGES  # where the file does not say
_NFC = ("qwen2", "deepseek-r1-qwen")


def from_gguf(file: GGUFFile, num_rows: int) -> tuple[Tokenizer, TokenizerParts]:
    """Build the tokenizer that ``file`` describes; ``num_rows`` is the model's vocabulary.

    Raises:
        CheckpointError: there is none, or its parts contradict each other.
        UnsupportedModelError: a kind or a pre-tokeniser that is not one of ours.
    """
    fields = Fields(file.path, file.metadata, "tokenizer.ggml.")
    tokens = _strings(fields, "tokens")
    if len(tokens) > num_rows:
        raise fields.error("tokens", f"has {len(tokens)} entries for {num_rows} embedding rows")
    vocab = {token: index for index, token in enumerate(tokens)}
    if len(vocab) != len(tokens):
        raise fields.error("tokens", "lists a token twice")
    kinds = fields.raw("token_type", [1] * len(tokens))
    if not isinstance(kinds, list) or len(kinds) != len(tokens):
        raise fields.error("token_type", "does not have one entry per token")
    build = _BUILDERS.get(fields.text("model"))
    if build is None:
        raise UnsupportedModelError(
            f"{file.path}: tokenizer {fields.text('model')!r} is not supported; supported: "
            f"{', '.join(_BUILDERS)}"
        )
    try:
        backend, adds_bos = build(fields, vocab, kinds)
        backend.add_special_tokens(
            [AddedToken(t, normalized=False, special=True) for t in _of(tokens, kinds, _CONTROL)]
        )
        backend.add_tokens(
            [AddedToken(t, normalized=False) for t in _of(tokens, kinds, _USER_DEFINED)]
        )
    except CheckpointError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception
        reason = " ".join(str(error).split())
        raise CheckpointError(f"{file.path}: tokenizer cannot be built: {reason}") from None
    named = {
        name: fields.whole(f"{key}_token_id", 0, len(tokens) - 1, None)
        for name, key in _NAMED.items()
    }
    _surround(backend, fields, tokens, named, adds_bos=adds_bos)
    stops = (named["eos_token"], *(fields.whole(k, 0, len(tokens) - 1, None) for k in _STOPS))
    return backend, TokenizerParts(
        eos_ids=frozenset(stop for stop in stops if stop is not None),
        bos_id=named["bos_token"],
        template=Fields(file.path, file.metadata).text("tokenizer.chat_template", None),
        variables={name: tokens[i] for name, i in named.items() if i is not None},
        num_rows=num_rows,
    )


_NAMED = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}
_STOPS = ("eot_token_id", "eom_token_id")


def _byte_level(
    fields: Fields, vocab: dict[str, int], kinds: Sequence[int]
) -> tuple[Tokenizer, bool]:
    del kinds
    # llama.cpp takes "default" for files older than this key, and warns of bad results.
    pre = fields.text("pre")
    if pre not in _CUTS:
        raise UnsupportedModelError(
            f"{fields.path}: pre-tokenizer {pre!r} is not supported; supported: {', '.join(_CUTS)}"
        )
    merges = []
    for merge in _strings(fields, "merges"):
        left, space, right = merge.partition(" ")
        if not (left and space and right):
            raise fields.error("merges", f"has the malformed entry {merge!r}")
        merges.append((left, right))
    model = BPE(vocab=vocab, merges=merges, ignore_merges=pre in _IGNORE_MERGES)
    backend = Tokenizer(model)
    if pre in _NFC:
        backend.normalizer = normalizers.NFC()
    cuts = [
        pre_tokenizers.Digits(individual_digits=True)
        if cut == _DIGITS
        else pre_tokenizers.Split(Regex(cut), behavior="isolated")
        for cut in _CUTS[pre]
    ]
    as_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.pre_tokenizer = pre_tokenizers.Sequence([*cuts, as_bytes])
    backend.decoder = decoders.ByteLevel()
    return backend, pre in _ADD_BOS


def _sentencepiece(
    fields: Fields, vocab: dict[str, int], kinds: Sequence[int]
) -> tuple[Tokenizer, bool]:
    scores = fields.raw("scores")
    if not isinstance(scores, list) or len(scores) != len(vocab):
        raise fields.error("scores", "does not have one number per token")
    unknown = next((token for token, i in vocab.items() if kinds[i] == _UNKNOWN), None)
    pieces = {t: i for t, i in vocab.items() if kinds[i] not in (_UNKNOWN, _CONTROL, _BYTE)}
    model = BPE(
        vocab=vocab,
        merges=_merges_from_scores(pieces, scores),
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=True,
    )
    backend = Tokenizer(model)
    adds_space = fields.flag("add_space_prefix", True)
    backend.pre_tokenizer = pre_tokenizers.Metaspace(
        replacement="\u2581", prepend_scheme="first" if adds_space else "never", split=False
    )
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    if adds_space:
        steps.append(decoders.Strip(content=" ", left=1))
    backend.decoder = decoders.Sequence(steps)
    if unknown is not None:
        backend.add_special_tokens([AddedToken(unknown, normalized=False, special=True)])
    return backend, True


_Builder = Callable[[Fields, dict[str, int], Sequence[int]], tuple[Tokenizer, bool]]
_BUILDERS: dict[str, _Builder] = {"gpt2": _byte_level, "llama": _sentencepiece}


def _merges_from_scores(vocab: dict[str, int], scores: Sequence[float]) -> list[tuple[str, str]]:
    """SentencePiece merges the pair whose joined piece scores highest; write that as a list.

    Of the ways to cut one piece, longer left halves come first, as transformers orders them.
    """
    merges = []
    for piece, index in vocab.items():
        cuts = [(piece[:at], piece[at:]) for at in range(1, len(piece))]
        known = [(left, right) for left, right in cuts if left in vocab and right in vocab]
        known.sort(key=lambda pair: (vocab[pair[0]], vocab[pair[1]]))
        merges += [(scores[index], left, right) for left, right in known]
    merges.sort(key=lambda merge: (merge[0], len(merge[1]), len(merge[2])), reverse=True)
    return [(left, right) for _, left, right in merges]


def _surround(
    backend: Tokenizer,
    fields: Fields,
    tokens: Sequence[str],
    named: dict[str, int | None],
    *,
    adds_bos: bool,
) -> None:
    """Set what is put before and after every text."""
    bos, eos = named["bos_token"], named["eos_token"]
    before = (
        [(tokens[bos], bos)] if bos is not None and fields.flag("add_bos_token", adds_bos) else []
    )
    after = [(tokens[eos], eos)] if eos is not None and fields.flag("add_eos_token", False) else []
    if before or after:
        single = [*(token for token, _ in before), "$A", *(token for token, _ in after)]
        backend.post_processor = processors.TemplateProcessing(
            single=single, pair=[*single, "$B"], special_tokens=[*before, *after]
        )


def _strings(fields: Fields, name: str) -> list[str]:
    values = fields.raw(name)
    if not isinstance(values, list) or not all(isinstance(value, str) for value in values):
        raise fields.error(name, "is not an array of strings")
    return values


def _of(tokens: Sequence[str], kinds: Sequence[int], wanted: int) -> list[str]:
    return [token for token, kind in zip(tokens, kinds, strict=True) if kind == wanted and token]
