"""Export: what is trained, what is stored and what is drafted with are the same numbers.

Every method, sharing the target's ends or standing alone: the logits of the head as it was handed
in, against those of the folder loaded as a user would load it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from outrider import LLM
from outrider.commands.head_inspection import inspect_head
from outrider.config import EngineConfig, Method, SamplingParams, SpeculationConfig
from outrider.drafters import DraftSource, create_drafter
from outrider.drafters.autoregressive import AutoregressiveDrafter
from outrider.drafters.draft_model import DraftModel
from outrider.drafters.medusa import MedusaDrafter
from outrider.errors import CheckpointError, ParameterError, UnsupportedModelError
from outrider.models.architecture import DecoderConfig
from outrider.models.decoder import Decoder
from outrider.models.exactness import chain_segment, random_tokens, row_policies
from outrider.models.heads.config import (
    Eagle3Config,
    MedusaConfig,
    MtpConfig,
    SharedEndsConfig,
)
from outrider.models.heads.eagle3 import Eagle3Head
from outrider.models.heads.mtp import MtpHead
from outrider.models.loading import load
from outrider.models.loading.heads import load_head
from outrider.models.loading.heads.mtp import module_layers
from outrider.pairing import OpenedDrafter, TargetFiles, drafter_items, open_drafter
from outrider.training.export import Config, export_head
from outrider.training.store import verify_folder
from tests.models import random_weights
from tests.parity.head_cases import CHAIN, Driver, assert_same, head_weights
from tests.parity.reference_heads import ReferenceEagle3, Rows
from tests.tiny import complaint, write_gguf_checkpoint, write_hf_checkpoint
from tests.tiny_heads import draft_ids

SIZES: dict[str, Any] = {"num_layers": 7, "hidden_size": 48, "head_dim": 12, "mlp_size": 80}
W = 50
FLOAT32 = EngineConfig(dtype="float32", self_test="off", max_model_len=128)
MANIFEST = {"recipe": "a test's", "seeds": [0, 1], "tau": {"coding": 2.5}}


@dataclass(frozen=True)
class Target:
    """A tiny checkpoint on disk, opened, and running."""

    files: TargetFiles
    weights: dict[str, Tensor]

    @property
    def config(self) -> DecoderConfig:
        return self.files.config

    @property
    def output_VD(self) -> Tensor:
        return self.weights["embed.weight" if self.config.tied_embeddings else "lm_head.weight"]

    @cache  # noqa: B019 - a handful of targets, for the length of the tests
    def decoder(self, dtype: torch.dtype = torch.float32) -> Decoder:
        policies = row_policies(self.config, dtype, cache=None)
        return Decoder(self.config, self.weights, dtype=dtype, policies=policies)

    def __hash__(self) -> int:
        return hash(self.files.path)


def open_target(path: Path) -> Target:
    checkpoint = load(path)
    weights = {name: checkpoint.weights[name].clone() for name in checkpoint.weights}
    checkpoint.weights.close()
    return Target(TargetFiles.of(path, checkpoint), weights)


@pytest.fixture(scope="module", params=[True, False], ids=["tied", "untied"])
def target(request, tmp_path_factory) -> Target:
    folder = tmp_path_factory.mktemp("target") / "model"
    return open_target(write_hf_checkpoint(folder, tied=request.param, **SIZES))


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


def one_layer(target: Target, **changes: Any) -> DecoderConfig:
    return replace(module_layers(target.config), **changes)


def eagle3(target: Target, **changes: Any) -> Eagle3Config:
    """Sharing the target's rows of a reduced vocabulary, unless told otherwise."""
    options: dict[str, Any] = {
        "layers": one_layer(target),
        "target_hidden_size": target.config.hidden_size,
        "capture_layers": (2, 3, 4),
        "draft_vocab_size": W,
        "has_own_head": False,
    }
    return Eagle3Config(**{**options, **changes})


def weights_of(config: Config) -> dict[str, Tensor]:
    """Random weights; an EAGLE-3's vocabulary is a scattered choice of tokens."""
    if isinstance(config, DecoderConfig):
        return {n: w for n, w in random_weights(config).items() if n in config.weight_shapes()}
    weights = head_weights(config)
    if "d2t" in weights:
        assert isinstance(config, Eagle3Config)
        ids_W = draft_ids(config.layers.vocab_size, config.draft_vocab_size)
        weights["d2t"] = ids_W - torch.arange(config.draft_vocab_size)
    return weights


def export(
    target: Target, config: Config, folder: Path, weights: Mapping[str, Tensor], **options: Any
) -> Path:
    kinds = {Eagle3Config: Method.EAGLE3, MtpConfig: Method.MTP, MedusaConfig: Method.MEDUSA}
    method = kinds.get(type(config), Method.DRAFT)
    settings = {"target": target.files, "manifest": MANIFEST, "dtype": torch.float32}
    export_head(method, config, weights, folder, **{**settings, **options})  # type: ignore[arg-type]
    return folder


def opened(target: Target, method: Method, folder: Path) -> OpenedDrafter:
    speculation = SpeculationConfig(method=method, head=str(folder))
    found = open_drafter(speculation, target.files, None)
    assert found is not None
    return found


def logits(target: Target, source: DraftSource, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """What the drafter's module computes: true rows and a drafted chain, or every MEDUSA head."""
    method = {Eagle3Config: Method.EAGLE3, MtpConfig: Method.MTP, MedusaConfig: Method.MEDUSA}
    speculation = SpeculationConfig(
        method=method.get(type(source.config), Method.DRAFT), head="-", max_draft_len=3
    )
    drafter = create_drafter(
        speculation, source=source, target=target.decoder(dtype), max_model_len=64
    )
    tokens = random_tokens(target.config.vocab_size, 9, seed=1)
    if isinstance(drafter, MedusaDrafter):
        return drafter.heads.forward(states(target, 5, dtype), drafter.heads.config.num_heads)
    assert isinstance(drafter, AutoregressiveDrafter)
    module = drafter.module
    if isinstance(module, DraftModel):
        cache = module.new_cache(max_batch_size=1, num_slots=16)
        segment = chain_segment(cache.allocate(), tokens)
        output = module.forward([segment], torch.empty(0), cache, from_target=True)
        return [output.logits_RW]
    assert isinstance(module, Eagle3Head | MtpHead)
    return [rows.logits_RW for rows in run_head(module, target, tokens, dtype)]


def run_head(
    head: Eagle3Head | MtpHead, target: Target, tokens: list[int], dtype: torch.dtype
) -> list[Rows]:
    driver = Driver(head)
    parts = [states(target, len(tokens), dtype, seed) for seed in range(len(head.captures))]
    (roots,) = driver.take_in([(tokens, parts)])
    return [roots, *driver.grow([roots], [CHAIN])]


def states(target: Target, count: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(count, target.config.hidden_size, generator=generator).to(dtype)


def same(expected: list[Tensor], found: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


# Export, load, same logits.


CASES = {
    "EAGLE-3": (Method.EAGLE3, eagle3),
    "EAGLE-3 with its own rows": (Method.EAGLE3, lambda t: eagle3(t, has_own_head=True)),
    "EAGLE-3.1": (Method.EAGLE3, lambda t: eagle3(t, fc_norm=True, norm_output=True)),
    "EAGLE-3 of the whole vocabulary": (
        Method.EAGLE3,
        lambda t: eagle3(t, draft_vocab_size=t.config.vocab_size),
    ),
    "MTP": (Method.MTP, lambda t: MtpConfig(layers=one_layer(t))),
    "MTP as MiMo": (
        Method.MTP,
        lambda t: MtpConfig(layers=one_layer(t), order="hidden_first", reads_raw_state=True),
    ),
    "MEDUSA": (
        Method.MEDUSA,
        lambda t: MedusaConfig(
            hidden_size=t.config.hidden_size,
            vocab_size=t.config.vocab_size,
            num_heads=3,
            num_layers=2,
            has_own_head=False,
        ),
    ),
    "draft model": (
        Method.DRAFT,
        lambda t: SharedEndsConfig.of(replace(t.config, num_layers=2, mlp_size=36)),
    ),
}


@pytest.mark.parametrize("self_contained", [False, True], ids=["shared", "self-contained"])
@pytest.mark.parametrize(("method", "make"), CASES.values(), ids=CASES)
def test_the_folder_drafts_what_the_trained_head_does(
    tmp_path, target, method, make, self_contained
):
    config = make(target)
    weights = weights_of(config)
    folder = export(
        target, config, tmp_path / "head", weights, self_contained=self_contained, acceptance=2.25
    )
    expected = logits(target, DraftSource(config, weights))
    found = opened(target, method, folder)
    seen = logits(target, found.source)

    assert all(part.std() > 0.1 for part in expected)
    for a, b in zip(expected, seen, strict=True):
        torch.testing.assert_close(b, a, rtol=0, atol=0 if not self_contained else 1e-6)
    assert found.recorded_acceptance == 2.25
    if not self_contained:
        assert config == found.source.config
    found.close()


@pytest.mark.parametrize("self_contained", [False, True], ids=["shared", "self-contained"])
def test_nothing_of_the_target_is_stored_unless_asked_for(tmp_path, target, self_contained):
    num_rows = []
    for name, (_, make) in CASES.items():
        config = make(target)
        folder = export(
            target, config, tmp_path / name, weights_of(config), self_contained=self_contained
        )
        stored = [load_file(path) for path in folder.glob("*.safetensors")]
        num_rows.append(
            {len(t) for file in stored for n, t in file.items() if t.ndim == 2 and n != "fc.weight"}
        )

    has_vocabulary = [bool({W, target.config.vocab_size} & rows) for rows in num_rows]
    own = [name == "EAGLE-3 with its own rows" for name in CASES]
    assert ([True] * len(CASES) if self_contained else own) == has_vocabulary


def test_bfloat16_is_what_is_stored_by_default_and_shared_rows_are_the_targets(tmp_path, target):
    config = eagle3(target)
    weights = weights_of(config)
    shared, alone = tmp_path / "shared", tmp_path / "alone"
    export(target, config, shared, weights, dtype=torch.bfloat16)
    export(target, config, alone, weights, dtype=torch.bfloat16, self_contained=True)
    stored = load_file(shared / "model.safetensors")
    heads = [opened(target, Method.EAGLE3, folder) for folder in (shared, alone)]
    both = [logits(target, head.source, torch.bfloat16) for head in heads]
    ids_W = weights["d2t"] + torch.arange(W)

    assert {torch.bfloat16, torch.int64, torch.bool} == {t.dtype for t in stored.values()}
    assert same(*both)
    assert torch.equal(
        heads[1].source.weights["lm_head.weight"], target.output_VD[ids_W].to(torch.bfloat16)
    )


def test_shared_rows_give_the_columns_of_the_whole_vocabulary(target):
    reduced, whole = eagle3(target), eagle3(target, draft_vocab_size=target.config.vocab_size)
    weights = weights_of(reduced)
    ids_W = weights["d2t"] + torch.arange(W)
    few = logits(target, DraftSource(reduced, weights))
    all_of_them = logits(target, DraftSource(whole, weights))

    for some_RW, every_RV in zip(few, all_of_them, strict=True):
        assert W == some_RW.shape[1]
        torch.testing.assert_close(some_RW, every_RV[:, ids_W], rtol=0, atol=1e-5)


@pytest.mark.parametrize("layout", ["safeailab", "speculators"])
def test_a_self_contained_eagle3_is_the_references(tmp_path, target, layout):
    config = eagle3(target)
    weights = weights_of(config)
    folder = export(target, config, tmp_path / "head", weights, self_contained=True, layout=layout)
    head = load_head(folder, target.config)
    assert isinstance(head.config, Eagle3Config)
    tokens = random_tokens(target.config.vocab_size, 7, seed=4)
    seen = run_head(
        Eagle3Head(head.config, head.weights, target.decoder()), target, tokens, torch.float32
    )
    reference = ReferenceEagle3(
        config,
        weights,
        embedding=target.weights["embed.weight"],
        output=target.output_VD[weights["d2t"] + torch.arange(W)],
    )
    parts = [states(target, len(tokens), torch.float32, seed) for seed in range(3)]
    expected = reference.run(tokens, parts, CHAIN)

    assert layout == head.layout.lower()
    assert "outrider.lm_head" not in " ".join(head.conventions)
    assert_same(
        expected,
        Rows(
            torch.cat([rows.logits_RW for rows in seen]),
            torch.cat([rows.feature_RD for rows in seen]),
        ),
    )


def test_safeailab_has_no_words_for_the_targets_rows(tmp_path, target):
    config = eagle3(target)

    with pytest.raises(ParameterError, match="cannot express the target's output head"):
        export(target, config, tmp_path / "head", weights_of(config), layout="safeailab")

    assert ["cache"] == [path.name for path in tmp_path.iterdir()] or not list(tmp_path.iterdir())


def test_published_names(tmp_path, target):
    """Of each family, and no other."""
    mtp, medusa = (CASES[name][1](target) for name in ("MTP", "MEDUSA"))

    def names(config: Config, folder: str, **options: Any) -> set[str]:
        path = export(target, config, tmp_path / folder, weights_of(config), **options)
        (file,) = path.glob("*.safetensors")
        return set(load_file(file))

    qwen = names(mtp, "qwen")
    assert {"mtp.fc.weight", "mtp.norm.weight", "mtp.layers.0.self_attn.q_proj.weight"} <= qwen
    assert {"mtp.pre_fc_norm_embedding.weight", "mtp.pre_fc_norm_hidden.weight"} <= qwen
    deepseek = names(mtp, "deepseek", self_contained=True)
    assert all(name.startswith("model.layers.7.") for name in deepseek)
    assert {"eh_proj", "enorm", "hnorm", "embed_tokens", "shared_head"} <= {
        name.split(".")[3] for name in deepseek
    }
    blocks = {f"{i}.{j}.linear.{kind}" for i in range(3) for j in (0, 1) for kind in WEIGHT_BIAS}
    assert blocks == names(medusa, "legacy")
    assert blocks | {f"{i}.2.weight" for i in range(3)} == names(
        medusa, "medusa", self_contained=True
    )


WEIGHT_BIAS = ("weight", "bias")


# The draft model.


def test_a_shared_draft_model_is_used_by_its_name_and_keeps_no_second_copy(tmp_path, target):
    """All of the target's layers between the target's own ends guess every token."""
    config = SharedEndsConfig.of(target.config)
    weights = {name: target.weights[name] for name in config.weight_shapes()}
    folder = export(target, target.config, tmp_path / "draft", weights)
    speculation = SpeculationConfig(
        method=Method.DRAFT, head=str(folder), max_draft_len=3, adaptive=False
    )
    llm = LLM(target.files.path, speculation=speculation, engine=FLOAT32)
    plain = llm.with_speculation(SpeculationConfig(method=Method.OFF))
    params = SamplingParams(max_tokens=30)
    (drafted,), (expected,) = (one.generate("The outrider", params) for one in (llm, plain))
    plan = {item.what: item.size_bytes for item in llm.memory_plan.items}

    assert expected.token_ids == drafted.token_ids
    assert drafted.speculation is not None
    assert drafted.speculation.drafted > 15
    assert drafted.speculation.drafted == drafted.speculation.accepted
    assert sum(4 * weight.numel() for weight in weights.values()) == plan["draft weights"]


def test_the_ends_are_the_targets_own_tensors(tmp_path, target):
    config = SharedEndsConfig.of(replace(target.config, num_layers=1))
    found = opened(
        target, Method.DRAFT, export(target, config, tmp_path / "draft", weights_of(config))
    )
    decoder = target.decoder()
    drafter = create_drafter(
        SpeculationConfig(method=Method.DRAFT, head="-"),
        source=found.source,
        target=decoder,
        max_model_len=32,
    )
    assert isinstance(drafter, AutoregressiveDrafter)
    assert isinstance(drafter.module, DraftModel)
    model = drafter.module._decoder

    assert decoder._embedding is model._embedding
    assert decoder._head is model._head


@pytest.mark.parametrize("kind", ["folder", "GGUF"])
def test_a_self_contained_draft_model_is_a_model_of_its_own(tmp_path, kind):
    if kind == "folder":
        path = write_hf_checkpoint(tmp_path / "model", tied=True, **SIZES)
    else:
        path = write_gguf_checkpoint(tmp_path / "model.gguf", tied=True, **SIZES)
    target = open_target(path)
    config = SharedEndsConfig.of(replace(target.config, num_layers=2))
    folder = export(target, config, tmp_path / "draft", weights_of(config), self_contained=True)
    model = load(folder)
    ours, theirs = model.tokenizer, target.files.tokenizer
    chat = [{"role": "user", "content": "Where does the road go? <|im_end|>"}]
    completion = LLM(folder, engine=FLOAT32).generate("The road", SamplingParams(max_tokens=4))[0]

    assert replace(target.config, num_layers=2) == model.config
    assert theirs.fingerprint == ours.fingerprint
    assert (theirs.eos_ids, theirs.bos_id) == (ours.eos_ids, ours.bos_id)
    assert theirs.encode_chat(chat) == ours.encode_chat(chat)
    assert theirs.encode("a ford, <|im_start|>") == ours.encode("a ford, <|im_start|>")
    assert completion.error is None
    assert completion.token_ids
    model.weights.close()


def test_a_draft_model_for_another_target_is_refused(tmp_path, target):
    config = SharedEndsConfig.of(replace(target.config, num_layers=1))
    folder = export(target, config, tmp_path / "draft", weights_of(config))

    def refused(error: type[Exception], match: str, **sizes: Any) -> None:
        other = replace(target.files, config=replace(target.config, **sizes))
        with pytest.raises(error, match=match):
            open_drafter(SpeculationConfig(method=Method.DRAFT, head=str(folder)), other, None)

    refused(CheckpointError, "hidden_size is 48, the target's is 96", hidden_size=96)
    refused(CheckpointError, "vocab_size is 320, the target's is 400", vocab_size=400)
    change_config(folder, tokenizer="0123456789abcdef0123")
    refused(UnsupportedModelError, "another tokeniser.*vocabulary 0123456789abcdef is not")
    change_config(folder, lm_head=None)
    refused(CheckpointError, "gives embed_tokens to the target and not lm_head")
    change_config(folder, lm_head="mine")
    refused(CheckpointError, "outrider.lm_head is 'mine'; allowed: 'target'")


def test_a_shared_draft_model_is_no_head_and_no_model(tmp_path, target):
    config = SharedEndsConfig.of(replace(target.config, num_layers=1))
    folder = export(target, config, tmp_path / "draft", weights_of(config))

    with pytest.raises(CheckpointError, match="a draft model, not a head; use method draft"):
        load_head(folder, target.config)
    with pytest.raises(CheckpointError, match=r"missing: embed\.weight"):
        load(folder)


def test_inspect_knows_a_shared_draft_model_and_shared_rows(tmp_path, target):
    for config, drafts, method in (
        (SharedEndsConfig.of(replace(target.config, num_layers=1)), "the target's", Method.DRAFT),
        (eagle3(target), "the target's rows of the draft vocabulary", Method.EAGLE3),
    ):
        weights = weights_of(config)
        folder = export(target, config, tmp_path / method, weights, acceptance=1.75)
        found = inspect_head(str(folder), target.files, max_model_len=64)
        numbers = [tensor.numel() for name, tensor in weights.items() if name != "d2t"]
        names, values = (
            [str(cell) for cell in column.cells] for column in found.tables()[0].columns
        )

        assert method is found.speculation.method
        assert sum(numbers) == found.num_parameters
        assert 1.75 == found.to_json()["recorded_acceptance"]
        assert drafts == values[names.index("output head")]


# What is held in memory.


def test_the_memory_plan_counts_copied_rows_and_packed_heads(target):
    def planned(config: Config) -> int:
        method = Method.DRAFT if isinstance(config, DecoderConfig) else Method.EAGLE3
        items = drafter_items(
            DraftSource(config, {}),
            SpeculationConfig(method=method, head="-"),
            dtype=torch.bfloat16,
            max_batch_size=1,
            max_model_len=64,
        )
        return {item.what: item.size_bytes for item in items}["draft weights"]

    hidden, vocab = target.config.hidden_size, target.config.vocab_size
    ends = 2 * 2 * hidden * vocab  # table and packed head, tied or not
    one = replace(target.config, num_layers=1)

    assert planned(eagle3(target)) == planned(eagle3(target, has_own_head=True))
    assert (
        planned(eagle3(target))
        == 2 * W * hidden + planned(eagle3(target, draft_vocab_size=vocab)) + 2 * W
    )  # the map's line, not kept, as small as this
    assert ends == planned(one) - planned(SharedEndsConfig.of(one))


# The folder.


def test_the_manifest_says_where_the_head_is_from(tmp_path, target):
    config = eagle3(target)
    folder = export(target, config, tmp_path / "head", weights_of(config), acceptance=1.9)
    manifest = verify_folder(folder)

    assert {"config.json", "model.safetensors"} == set(manifest.files)
    assert MANIFEST == manifest.meta["training"]
    assert ("eagle3", 1.9, False) == tuple(
        manifest.meta[key] for key in ("method", "acceptance", "self_contained")
    )
    assert target.files.tokenizer.fingerprint == manifest.meta["target"]["tokenizer"]
    assert "model" == manifest.meta["target"]["name"]


def test_an_earlier_export_is_replaced_and_nothing_else(tmp_path, target):
    config = eagle3(target)
    weights = weights_of(config)
    folder = export(target, config, tmp_path / "head", weights)
    export(target, config, folder, weights, acceptance=2.0)
    used = tmp_path / "used"
    used.mkdir()
    (used / "manifest.json").write_text("{}")

    assert 2.0 == load_head(folder, target.config).recorded_acceptance
    with pytest.raises(ParameterError, match="exists and is not an empty folder"):
        export(target, config, used, weights)
    assert {"head", "used"} == {path.name for path in tmp_path.iterdir()} - {"cache"}
    assert ["manifest.json"] == [path.name for path in used.iterdir()]


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"norm.weight": torch.full((48,), torch.nan)}, "weight norm.weight holds a NaN"),
        ({"norm.weight": None}, r"head: weights do not fit.*missing: norm\.weight"),
        ({"fc.weight": torch.ones(3)}, r"fc\.weight is \[3\]"),
        ({"d2t": torch.zeros(W, dtype=torch.int64) - torch.arange(W)}, "both stand for"),
    ],
)
def test_bad_weights_leave_the_earlier_export(tmp_path, target, change, match):
    config = eagle3(target)
    weights = weights_of(config)
    folder = export(target, config, tmp_path / "head", weights, acceptance=2.0)
    bad = {n: w for n, w in {**weights, **change}.items() if w is not None}

    with pytest.raises(CheckpointError, match=match):
        export(target, config, folder, bad)

    assert 2.0 == load_head(folder, target.config).recorded_acceptance
    assert {"head"} == {path.name for path in tmp_path.iterdir()} - {"cache"}


def test_a_folder_that_cannot_be_written_is_named(tmp_path, target):
    (tmp_path / "file").write_text("")
    config = eagle3(target)
    weights = weights_of(config)
    message = complaint(lambda: export(target, config, tmp_path / "file" / "head", weights))

    assert message is not None
    assert f"{tmp_path / 'file' / 'head'}" in message


def test_an_mtp_module_that_no_family_has_is_refused(tmp_path, target):
    config = MtpConfig(layers=one_layer(target), order="hidden_first")

    with pytest.raises(ParameterError, match=r"no published layout has.*order hidden_first"):
        export(target, config, tmp_path / "head", weights_of(config))
    config = MtpConfig(layers=one_layer(target, mlp_size=40))
    with pytest.raises(ParameterError, match="the module's layer is not one of its target's"):
        export(target, config, tmp_path / "head", weights_of(config))


# What the loader says about the target's rows.


def test_the_word_for_the_targets_rows_must_fit_the_weights(tmp_path, target):
    config = eagle3(target)
    folder = export(target, config, tmp_path / "head", weights_of(config))
    path = folder / "model.safetensors"
    weights = load_file(path)
    sentence = "outrider.lm_head: the target's rows of the draft vocabulary are used"
    assert sentence in load_head(folder, target.config).conventions

    save_file(weights | {"lm_head.weight": torch.ones(W, 48)}, path)
    with pytest.raises(CheckpointError, match="is 'target', but the weights hold lm_head"):
        load_head(folder, target.config)
    save_file(weights, path)
    change_config(folder, lm_head=None)
    with pytest.raises(CheckpointError, match=r"missing: lm_head\.weight"):
        load_head(folder, target.config)


def change_config(folder: Path, **ours: str | None) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["outrider"] |= ours
    path.write_text(json.dumps(config))
