"""The folder that other engines are given holds the very model that we run."""

from __future__ import annotations

import hf_folder
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider.models.loading import load
from tests.tiny import write_gguf_checkpoint

CHAT = [{"role": "user", "content": "Where does the river go?"}]


def test_it_loads_here_to_the_same_config_weights_and_tokens(tmp_path):
    source = load(write_gguf_checkpoint(tmp_path / "tiny.gguf"))
    hf_folder.write_folder(str(tmp_path / "tiny.gguf"), tmp_path / "out")
    written = load(tmp_path / "out")

    assert source.config == written.config
    assert set(source.weights) == set(written.weights)
    for name in source.weights:
        assert torch.equal(source.weights[name].to(torch.bfloat16), written.weights[name]), name
    assert source.tokenizer.fingerprint == written.tokenizer.fingerprint
    assert source.tokenizer.eos_ids == written.tokenizer.eos_ids


def test_transformers_loads_it_and_renders_the_same_conversation(tmp_path):
    source = load(write_gguf_checkpoint(tmp_path / "tiny.gguf"))
    hf_folder.write_folder(str(tmp_path / "tiny.gguf"), tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out")
    theirs = tokenizer.apply_chat_template(CHAT, add_generation_prompt=True, return_dict=False)

    assert torch.bfloat16 == model.dtype
    assert source.tokenizer.encode_chat(CHAT) == theirs


def test_a_folder_in_use_is_left_alone(tmp_path, capsys):
    write_gguf_checkpoint(tmp_path / "tiny.gguf")
    status = hf_folder.main(["--model", str(tmp_path / "tiny.gguf"), "--out", str(tmp_path)])

    assert 2 == status
    assert "is not empty" in capsys.readouterr().err
    assert ["tiny.gguf"] == [path.name for path in tmp_path.iterdir()]
