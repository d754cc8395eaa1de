"""Tokenizers built from Hugging Face folders and from GGUF metadata, sound and broken."""

from __future__ import annotations

import json

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import processors

from outrider.errors import CheckpointError, UnsupportedModelError
from outrider.models.loading import Tokenizer, load
from outrider.models.loading.gguf_file import GGUFFile
from outrider.models.loading.gguf_tokenizer import from_gguf
from tests.tiny import (
    SPECIALS,
    complaint,
    tiny_tokenizer,
    write_gguf_checkpoint,
    write_hf_checkpoint,
)


def user(content: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": content}]


def _rewrite(folder, name, **changes):
    path = folder / name
    content = json.loads(path.read_text()) if path.exists() else {}
    path.write_text(json.dumps(content | changes))


def test_end_ids_come_from_generation_config_and_config(tmp_path):
    folder = write_hf_checkpoint(tmp_path)

    assert frozenset({0, 2}) == load(folder).tokenizer.eos_ids
    _rewrite(folder, "generation_config.json", eos_token_id=5)
    assert frozenset({5, 2}) == load(folder).tokenizer.eos_ids
    _rewrite(folder, "generation_config.json", eos_token_id=None)
    _rewrite(folder, "config.json", eos_token_id=None)
    assert frozenset({2}) == load(folder).tokenizer.eos_ids
    _rewrite(folder, "generation_config.json", eos_token_id="x")
    with pytest.raises(CheckpointError, match=r"generation_config.json: eos_token_id is 'x'"):
        load(folder)


def test_what_surrounds_a_text_is_the_post_processors_business(tmp_path):
    folder = write_hf_checkpoint(tmp_path)
    _rewrite(folder, "tokenizer_config.json", add_bos_token=True)
    plain = load(folder).tokenizer.encode("a")
    backend = tiny_tokenizer()
    backend.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|im_end|>",
        special_tokens=[("<|im_start|>", 1), ("<|im_end|>", 2)],
    )
    backend.save(str(folder / "tokenizer.json"))
    tokenizer = load(folder).tokenizer

    assert [1, *plain, 2] == tokenizer.encode("a")
    assert plain == tokenizer.encode("a", add_special_tokens=False)
    assert [1, *plain, 2] == tokenizer.encode("a", allow_special=False)


def test_truncation_and_padding_of_the_file_are_switched_off(tmp_path):
    folder = write_hf_checkpoint(tmp_path)
    backend = tiny_tokenizer()
    whole = backend.encode("a river does not ask").ids
    backend.enable_truncation(3)
    backend.enable_padding(length=99)
    backend.save(str(folder / "tokenizer.json"))

    assert whole == load(folder).tokenizer.encode("a river does not ask")


def test_older_exports_name_their_tokens_in_a_file_of_their_own(tmp_path):
    folder = write_hf_checkpoint(tmp_path)
    _rewrite(folder, "special_tokens_map.json", bos_token={"content": "<|endoftext|>"})

    assert 0 == load(folder).tokenizer.bos_id
    _rewrite(folder, "tokenizer_config.json", added_tokens_decoder={})
    assert 1 == load(folder).tokenizer.bos_id


def test_declared_tokens_are_added_and_named_ones_become_control_tokens(tmp_path):
    folder = write_hf_checkpoint(tmp_path, vocab_size=330)
    settings_ = {
        "added_tokens_decoder": {
            "330": {"content": "<pad>", "special": True},
            "331": {"content": "<think>", "special": False},
        },
        "additional_special_tokens": ["<extra>", {"content": "the"}],
    }
    _rewrite(folder, "tokenizer_config.json", **settings_)
    tokenizer = load(folder).tokenizer
    backend_ids = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}

    assert backend_ids[b"<pad>"] in tokenizer.special_ids
    assert backend_ids[b"<extra>"] in tokenizer.special_ids
    assert backend_ids[b"<think>"] not in tokenizer.special_ids


def test_a_template_file_comes_before_the_settings(tmp_path):
    folder = write_hf_checkpoint(tmp_path)
    (folder / "chat_template.jinja").write_text("file:{{ messages[0].content }}")

    assert "file:a" == load(folder).tokenizer.render_chat(user("a"))


def test_of_several_templates_the_default_counts(tmp_path):
    folder = write_hf_checkpoint(tmp_path)
    templates = [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    _rewrite(folder, "tokenizer_config.json", chat_template=templates)

    assert "d" == load(folder).tokenizer.render_chat(user("a"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"chat_template": 5}, "chat_template is not a string"),
        ({"chat_template": "{% if"}, "chat template is not valid"),
        ({"added_tokens_decoder": {"x": {"content": "a"}}}, "special token is not declared as one"),
        ({"added_tokens_decoder": {"3": 7}}, "special token is not declared as one"),
        ({"added_tokens_decoder": [1]}, "added_tokens_decoder is"),
        ({"additional_special_tokens": 3}, "special token is not declared as one"),
    ],
)
def test_bad_settings_are_named(tmp_path, changes, message):
    folder = write_hf_checkpoint(tmp_path)
    _rewrite(folder, "tokenizer_config.json", **changes)

    with pytest.raises(CheckpointError, match=message) as error:
        load(folder)

    assert "\n" not in str(error.value)


def test_a_folder_with_a_sentencepiece_model_alone_is_refused(tmp_path):
    folder = write_hf_checkpoint(tmp_path)
    (folder / "tokenizer.json").rename(folder / "tokenizer.model")

    with pytest.raises(
        UnsupportedModelError, match=r"only tokenizer\.model; save the tokenizer as"
    ):
        load(folder)


@pytest.fixture(scope="module")
def damaged_folder(tmp_path_factory):
    folder = write_hf_checkpoint(tmp_path_factory.mktemp("damaged"), vocab_size=262)
    return folder, (folder / "tokenizer.json").read_bytes()


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_damage_to_tokenizer_json_is_a_clear_error_or_no_error(damaged_folder, data):
    folder, sound = damaged_folder
    damaged = bytearray(sound)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, len(damaged) - 1))
        damaged[at] = data.draw(st.sampled_from(list(b'0129{}[]",:-nt')))
    (folder / "tokenizer.json").write_bytes(damaged)

    message = complaint(lambda: load(folder).tokenizer.encode("The outrider left <|im_end|>"))

    assert message is None or "\n" not in message


@pytest.fixture
def write_tokenizer(tmp_path):
    """Write a GGUF file with nothing but a tokenizer in it and build that."""

    def write(metadata, num_rows=1000, template=None):
        path = tmp_path / "tokenizer.gguf"
        writer = gguf.GGUFWriter(path, "llama")
        if template is not None:
            writer.add_chat_template(template)
        for key, value in metadata.items():
            if isinstance(value, list):
                writer.add_array(f"tokenizer.ggml.{key}", value)
            elif isinstance(value, bool):
                writer.add_bool(f"tokenizer.ggml.{key}", value)
            elif isinstance(value, int):
                writer.add_uint32(f"tokenizer.ggml.{key}", value)
            else:
                writer.add_string(f"tokenizer.ggml.{key}", value)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.close()
        return Tokenizer(*from_gguf(GGUFFile.open(path), num_rows))

    return write


def byte_level(pre: str = "gpt-2", **changes):
    model = json.loads(tiny_tokenizer().to_str())["model"]
    tokens = sorted(model["vocab"], key=model["vocab"].get)
    return {
        "model": "gpt2",
        "pre": pre,
        "tokens": tokens,
        "token_type": [3 if token in SPECIALS else 1 for token in tokens],
        "merges": [" ".join(merge) for merge in model["merges"]],
        "bos_token_id": 1,
        "eos_token_id": 2,
        **changes,
    }


SENTENCEPIECE = {
    "model": "llama",
    "tokens": [
        *("<unk>", "<s>", "</s>"),
        *(f"<0x{byte:02X}>" for byte in range(256)),
        *("\u2581", "a", "b", "ab", "\u2581a", "\u2581ab", "<", "s", ">", "<s"),
    ],
    "token_type": [2, 3, 3, *[6] * 256, *[1] * 10],
    "scores": [0.0] * 259 + [-9.0, -8.0, -8.0, -1.0, -2.0, -0.5, -9.0, -9.0, -9.0, -5.0],
    "unknown_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@pytest.mark.parametrize(
    ("pre", "pieces"),
    [
        ("gpt-2", ["a", " 1234", " it", "'s", " ", " b"]),
        ("smollm", ["a", " ", "1", "2", "3", "4", " it", "'s", " ", " b"]),
        ("llama-bpe", ["a", " ", "123", "4", " it", "'s", " ", " b"]),
        ("qwen2", ["a", " ", "1", "2", "3", "4", " it", "'s", " ", " b"]),
        ("tekken", ["a", " ", "1", "2", "3", "4", " it", "'s", " ", " b"]),
        ("default", ["a", " ", "123", "4", " it", "'", "s", " ", " b"]),
    ],
)
def test_each_pre_tokenizer_cuts_its_own_way(write_tokenizer, pre, pieces):
    """With every cut piece in the vocabulary and merges to reach it, pieces are tokens."""
    cuts = ["1234", "123", "it", "'s"]
    written = byte_level(pre, add_bos_token=False)
    for piece in (" 1234", " it", " b", *cuts):
        spelled = piece.replace(" ", "\u0120")
        for end in range(2, len(spelled) + 1):
            if (token := spelled[:end]) not in written["tokens"]:
                written["tokens"].append(token)
                written["token_type"].append(1)
                written["merges"].append(f"{token[:-1]} {token[-1]}")
    tokenizer = write_tokenizer(written)

    assert pieces == [tokenizer.token_bytes(i).decode() for i in tokenizer.encode("a 1234 it's  b")]


@pytest.mark.parametrize(
    ("pre", "stated", "adds_bos"),
    [("gpt-2", None, False), ("llama-bpe", None, True), ("llama-bpe", False, False)],
)
def test_whether_bos_is_added_is_stated_or_follows_from_the_kind(
    write_tokenizer, pre, stated, adds_bos
):
    changes = {} if stated is None else {"add_bos_token": stated}
    tokenizer = write_tokenizer(byte_level(pre, **changes))

    assert adds_bos == (tokenizer.encode("a")[0] == 1)


def test_end_of_turn_ids_end_a_text_too(write_tokenizer):
    tokenizer = write_tokenizer(byte_level(eot_token_id=0, eom_token_id=7))

    assert frozenset({0, 2, 7}) == tokenizer.eos_ids
    assert 1 == tokenizer.bos_id


def test_user_defined_tokens_are_matched_whole_but_are_no_control_tokens(write_tokenizer):
    written = byte_level()
    written["tokens"].append("<think>")
    written["token_type"].append(4)
    tokenizer = write_tokenizer(written)

    assert [320] == tokenizer.encode("<think>", allow_special=False)
    assert 320 not in tokenizer.special_ids
    assert "<think>" == tokenizer.decode([320])


def test_sentencepiece_merges_by_score_and_falls_back_to_bytes(write_tokenizer):
    tokenizer = write_tokenizer(SENTENCEPIECE)
    ids = tokenizer.encode("abé ab")

    assert [b"<s>", b" ab", b"\xc3", b"\xa9", b" ab"] == [tokenizer.token_bytes(i) for i in ids]
    assert "abé ab" == tokenizer.decode(ids)
    assert frozenset({2}) == tokenizer.eos_ids


def test_sentencepiece_does_not_spell_control_tokens(write_tokenizer):
    tokenizer = write_tokenizer(SENTENCEPIECE)
    ids = tokenizer.encode("a<s>b", allow_special=False, add_special_tokens=False)

    assert tokenizer.special_ids.isdisjoint(ids)
    assert b" a<s>b" == b"".join(map(tokenizer.token_bytes, ids))


def test_sentencepiece_puts_no_space_behind_a_control_token_on_the_careful_path(write_tokenizer):
    template = "<s>{{ messages[0].content }}</s>a"
    tokenizer = write_tokenizer(SENTENCEPIECE, template=template)

    rendered = tokenizer.encode("<s>ab></s>a", add_special_tokens=False)

    assert rendered == tokenizer.encode_chat(user("ab>"))


BAD_TOKENIZERS = {
    "none": ({}, "tokenizer.ggml.tokens is missing"),
    "kind": (byte_level(model="rwkv"), "tokenizer 'rwkv' is not supported; supported: gpt2, llama"),
    "no pre": ({"model": "gpt2", "tokens": ["a"], "merges": ["a a"]}, "ggml.pre is missing"),
    "pre": (byte_level("bloom"), "pre-tokenizer 'bloom' is not supported; supported: gpt-2,"),
    "types": (byte_level(token_type=[1]), "does not have one entry per token"),
    "merge": (byte_level(merges=["ab"]), "has the malformed entry 'ab'"),
    "foreign merge": (byte_level(merges=["\u00e9\u00e9 b"]), "tokenizer cannot be built"),
    "twice": ({"model": "gpt2", "tokens": ["a", "a"]}, "lists a token twice"),
    "not strings": ({"model": "gpt2", "tokens": [1, 2]}, "is not an array of strings"),
    "eos": (byte_level(eos_token_id=5000), "eos_token_id is 5000"),
    "scores": (SENTENCEPIECE | {"scores": [0.5]}, "does not have one number per token"),
}


@pytest.mark.parametrize(("metadata", "message"), BAD_TOKENIZERS.values(), ids=BAD_TOKENIZERS)
def test_a_broken_tokenizer_is_one_clear_line(write_tokenizer, metadata, message):
    with pytest.raises(CheckpointError, match=message) as error:
        write_tokenizer(metadata)

    assert "\n" not in str(error.value)


def test_more_tokens_than_embedding_rows_are_refused(write_tokenizer):
    with pytest.raises(CheckpointError, match="has 320 entries for 300 embedding rows"):
        write_tokenizer(byte_level(), num_rows=300)


def test_a_gguf_file_carries_its_chat_template(tmp_path):
    tokenizer = load(write_gguf_checkpoint(tmp_path / "tiny.gguf")).tokenizer

    assert tokenizer.has_chat_template
    assert [1, 2, 1] == [i for i in tokenizer.encode_chat(user("a")) if i in (1, 2)]
