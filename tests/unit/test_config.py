from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.config import (
    MAX_SEED,
    Accept,
    EngineConfig,
    GrammarKind,
    GrammarSpec,
    Method,
    SamplingParams,
    SpeculationConfig,
)
from outrider.errors import ParameterError, UsageError

INT_MAX = 2**31 - 1
NAN, INF = float("nan"), float("inf")
NUMBERS = {  # name: lowest allowed, highest allowed, values just outside
    "temperature": (0.0, 100.0, [-1e-9, 100.1]),
    "top_p": (1e-9, 1.0, [0, 0.0, -0.1, 1.0000001]),
    "min_p": (0.0, 1.0, [-0.1, 1.0000001]),
    "repetition_penalty": (1e-9, 100.0, [0.0, -1.0, 100.1]),
    "presence_penalty": (-2.0, 2.0, [-2.1, 2.1]),
    "frequency_penalty": (-2.0, 2.0, [-2.1, 2.1]),
}
SAMPLING_WHOLE = {
    "top_k": (0, INT_MAX),
    "seed": (0, MAX_SEED),
    "choice": (0, INT_MAX),
    "max_tokens": (1, INT_MAX),
    "min_tokens": (0, 256),  # up to max_tokens
    "logprobs": (0, 20),
    "max_draft_tokens": (0, INT_MAX),
}
ENGINE_WHOLE = {
    "max_batch_size": (1, 1024),
    "max_model_len": (2, 2**24),
    "prefill_chunk": (1, 65536),
    "threads": (1, 1024),
}
WHOLE = [
    *((SamplingParams, name, *limits) for name, limits in SAMPLING_WHOLE.items()),
    *((EngineConfig, name, *limits) for name, limits in ENGINE_WHOLE.items()),
    (SpeculationConfig, "max_draft_len", 1, 128),
]


def setting(config: type, name: str, value: Any) -> Any:
    """What these settings hold after being given this one."""
    return getattr(config(**{name: value}), name)


def refusal(config: type, **settings: Any) -> str:
    """The one-line message with which these settings are refused."""
    with pytest.raises(ParameterError) as caught:
        config(**settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_refusal_is_a_usage_error_and_a_value_error():
    with pytest.raises(UsageError) as caught:
        SamplingParams(temperature=-1)

    assert isinstance(caught.value, ValueError)
    assert caught.value.exit_status == 2


def test_defaults_are_greedy_and_without_penalties():
    params = SamplingParams()

    assert params.is_greedy
    assert not params.has_penalties
    assert {} == params.logit_bias


@pytest.mark.parametrize("name", ["repetition_penalty", "presence_penalty", "frequency_penalty"])
def test_each_penalty_counts_as_one(name: str):
    assert dataclasses.replace(SamplingParams(), **{name: 0.5}).has_penalties


# --- ranges ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NUMBERS)
def test_a_number_is_accepted_up_to_both_limits_and_refused_beyond(name: str):
    low, high, outside = NUMBERS[name]

    for value in (low, high, 1):
        assert value == setting(SamplingParams, name, value)
    for value in outside:
        message = refusal(SamplingParams, **{name: value})
        assert message.startswith(f"{name}: {value:.8g} is outside ")


@pytest.mark.parametrize("name", NUMBERS)
@pytest.mark.parametrize("value", [NAN, INF, -INF, 10**400, True, "1", None, [1.0], 1j])
def test_what_is_no_finite_number_is_refused(name: str, value: Any):
    assert refusal(SamplingParams, **{name: value}).startswith(f"{name}: {value!r} is ")


def test_the_range_is_named_and_says_whether_its_ends_belong_to_it():
    assert refusal(SamplingParams, top_p=0.0).endswith("(0, 1]")
    assert refusal(SamplingParams, min_p=2).endswith("[0, 1]")
    assert refusal(SamplingParams, presence_penalty="a").endswith("[-2, 2]")


@pytest.mark.parametrize(("config", "name", "low", "high"), WHOLE)
def test_a_whole_number_is_accepted_up_to_both_limits_and_refused_beyond(
    config: type, name: str, low: int, high: int
):
    for value in (low, high):
        assert value == setting(config, name, value)
    for value in (low - 1, high + 1, -(10**400)):
        message = refusal(config, **{name: value})
        assert message.startswith(f"{name}: ")
        assert message.endswith(f"allowed range {low} .. {high}")


@pytest.mark.parametrize(("config", "name", "low", "high"), WHOLE)
@pytest.mark.parametrize("value", [NAN, 1.0, True, False, "1", [1]])
def test_what_is_no_whole_number_is_refused(
    config: type, name: str, low: int, high: int, value: Any
):
    expected = f"{name}: {value!r} is not a whole number; allowed: {low} .. {high}"

    assert expected == refusal(config, **{name: value})


def test_min_tokens_may_not_exceed_max_tokens():
    assert 5 == SamplingParams(max_tokens=5, min_tokens=5).min_tokens
    assert "0 .. 5" in refusal(SamplingParams, max_tokens=5, min_tokens=6)


@pytest.mark.parametrize(
    ("config", "name"),
    [
        (SamplingParams, "ignore_eos"),
        (SpeculationConfig, "use_dynamic_tree"),
        (SpeculationConfig, "adaptive"),
    ],
)
@pytest.mark.parametrize("value", ["no", 0, 1, None])
def test_a_flag_is_true_or_false_and_nothing_else(config: type, name: str, value: Any):
    assert f"{name}: {value!r} is neither True nor False" == refusal(config, **{name: value})


@pytest.mark.parametrize(
    ("name", "allowed"),
    [
        ("dtype", ("auto", "bfloat16", "float32")),
        ("device", ("cpu",)),
        ("self_test", ("auto", "always", "off")),
    ],
)
def test_a_word_is_one_of_those_listed(name: str, allowed: tuple[str, ...]):
    for word in allowed:
        assert word == setting(EngineConfig, name, word)
    for wrong in ("cuda", "", None, 3, ["auto"]):
        message = refusal(EngineConfig, **{name: wrong})
        assert f"{name}: {wrong!r} is not one of {', '.join(allowed)}" == message


# --- stop strings, stop ids, logit bias ------------------------------------------------------


def test_one_stop_string_may_come_without_a_list():
    assert ("END",) == SamplingParams(stop="END").stop  # type: ignore[arg-type]
    assert ("a", "b") == SamplingParams(stop=["a", "b"]).stop  # type: ignore[arg-type]
    assert (3, 4) == SamplingParams(stop_token_ids=[3, 4]).stop_token_ids  # type: ignore[arg-type]


@pytest.mark.parametrize("value", ["", [""], ["a", 3], [None], None, 3, b"ab", {"a": 1}])
def test_a_stop_that_is_no_text_is_refused(value: Any):
    assert refusal(SamplingParams, stop=value).startswith("stop: ")


@pytest.mark.parametrize(
    "value", [None, 3, "12", b"12", {1: 2}, [-1], [2**31], [1.0], [True], ["1"]]
)
def test_stop_token_ids_are_a_list_of_ids(value: Any):
    assert refusal(SamplingParams, stop_token_ids=value).startswith("stop_token_ids: ")


@pytest.mark.parametrize(
    "value",
    [None, [1], "1", {-1: 0.0}, {2**31: 0.0}, {"1": 0.0}, {True: 0.0}, {1.0: 0.0}]
    + [{1: bias} for bias in (NAN, INF, -100.1, 100.1, "1", None, True)],
)
def test_logit_bias_maps_ids_to_numbers_within_100(value: Any):
    assert refusal(SamplingParams, logit_bias=value).startswith("logit_bias")


@pytest.mark.parametrize("value", ["[01]", {"type": "object"}, True, ("regex", "a")])
def test_a_grammar_is_a_spec_or_none(value: Any):
    assert "is not a GrammarSpec; give one, or None" in refusal(SamplingParams, grammar=value)


def test_a_grammar_s_kind_may_be_given_by_name():
    spec = GrammarSpec("regex", "a")  # type: ignore[arg-type]

    assert GrammarKind.REGEX is spec.kind
    assert spec == setting(SamplingParams, "grammar", spec)
    assert {spec: 1} == {GrammarSpec(GrammarKind.REGEX, "a"): 1}


def test_logit_bias_is_copied_and_cannot_be_changed_afterwards():
    given_bias = {3: 100.0, 4: -100}
    params = SamplingParams(logit_bias=given_bias)
    given_bias[3] = 0.0

    assert {3: 100.0, 4: -100} == params.logit_bias
    with pytest.raises(TypeError):
        params.logit_bias[3] = 1.0  # type: ignore[index]


@pytest.mark.parametrize("config", [SamplingParams, SpeculationConfig, EngineConfig])
def test_settings_are_frozen_comparable_and_hashable(config: type):
    settings = config()

    assert settings == dataclasses.replace(settings)
    assert hash(settings) == hash(dataclasses.replace(settings))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(settings, dataclasses.fields(config)[0].name, 1)


def test_params_that_differ_in_one_setting_are_not_equal():
    changed = {"stop": ("a",), "logit_bias": {1: 1.0}, "seed": 0, "ignore_eos": True}

    assert all(SamplingParams() != SamplingParams(**{k: v}) for k, v in changed.items())


# --- speculation -----------------------------------------------------------------------------


def test_a_method_may_be_given_by_name():
    assert [Method.OFF, Method.NGRAM] == [
        SpeculationConfig(method=name).method  # type: ignore[arg-type]
        for name in ("off", "ngram")
    ]


@pytest.mark.parametrize("value", ["eagle", "", None, 3, []])
def test_an_unknown_method_is_refused_with_the_list(value: Any):
    expected = f"method: {value!r} is not one of off, ngram, draft, medusa, mtp, eagle3"

    assert expected == refusal(SpeculationConfig, method=value)


@pytest.mark.parametrize("method", [Method.DRAFT, Method.MEDUSA, Method.MTP, Method.EAGLE3])
def test_a_method_that_reads_a_head_takes_one_or_leaves_it_to_the_target(method: Method):
    assert "x" == SpeculationConfig(method=method, head="x").head
    assert SpeculationConfig(method=method).head is None


@pytest.mark.parametrize("method", [Method.OFF, Method.NGRAM])
def test_a_method_without_a_head_refuses_one_and_ngram_beside_it(method: Method):
    with_head = refusal(SpeculationConfig, method=method, head="folder")
    with_ngram = refusal(SpeculationConfig, method=method, with_ngram=True)

    assert with_head.startswith(f"head: 'folder' cannot be used by method {method}")
    assert with_ngram.startswith(f"with_ngram: method {method} has nothing to add")
    assert all("draft, medusa, mtp, eagle3" in message for message in (with_head, with_ngram))


@pytest.mark.parametrize("head", ["", 3, b"folder"])
def test_a_head_is_named_by_a_string(head: Any):
    message = refusal(SpeculationConfig, method=Method.EAGLE3, head=head)

    assert f"head: {head!r} is not a folder, a file or a name" == message


def test_a_tree_needs_a_method_that_drafts():
    message = refusal(SpeculationConfig, method=Method.OFF, use_dynamic_tree=True)

    assert message.startswith("use_dynamic_tree: method off drafts no tree")


def test_a_chain_is_the_default_and_as_wide_as_it_is_deep():
    config = SpeculationConfig(max_draft_len=5)

    assert not config.use_dynamic_tree
    assert (1, 5) == (config.dynamic_tree_max_topK, config.max_total_draft_tokens)
    assert 5 == config.num_draft_tokens
    assert 0 == SpeculationConfig(method=Method.OFF).num_draft_tokens


def test_a_tree_takes_the_upper_bound_by_default():
    tree = SpeculationConfig(max_draft_len=5, use_dynamic_tree=True)
    wide = SpeculationConfig(max_draft_len=5, use_dynamic_tree=True, dynamic_tree_max_topK=7)

    assert (4, 20) == (tree.dynamic_tree_max_topK, tree.max_total_draft_tokens)
    assert (7, 35) == (wide.dynamic_tree_max_topK, wide.max_total_draft_tokens)


@given(st.integers(1, 128), st.integers(1, 64), st.integers(-5, 128 * 64 + 5))
def test_the_tree_rule(max_draft_len: int, topk: int, total: int):
    """max_draft_len <= max_total_draft_tokens <= dynamic_tree_max_topK * max_draft_len."""
    settings: dict[str, Any] = {
        "max_draft_len": max_draft_len,
        "use_dynamic_tree": True,
        "dynamic_tree_max_topK": topk,
        "max_total_draft_tokens": total,
    }
    if max_draft_len <= total <= topk * max_draft_len:
        assert total == SpeculationConfig(**settings).max_total_draft_tokens
    else:
        assert (
            f"max_total_draft_tokens: {total} breaks max_draft_len <= max_total_draft_tokens <= "
            "dynamic_tree_max_topK * max_draft_len; allowed here: "
            f"{max_draft_len} .. {topk * max_draft_len}"
        ) == refusal(SpeculationConfig, **settings)


@pytest.mark.parametrize("value", [True, 1.0, "1", NAN])
def test_a_total_that_is_no_whole_number_is_refused(value: Any):
    """True would pass for 1 otherwise."""
    message = refusal(SpeculationConfig, max_draft_len=1, max_total_draft_tokens=value)

    assert message.startswith(f"max_total_draft_tokens: {value!r} breaks ")


@pytest.mark.parametrize("value", [0, 65, -1, True, 2.0, "4"])
def test_topk_is_a_whole_number_from_1_to_64(value: Any):
    message = refusal(SpeculationConfig, use_dynamic_tree=True, dynamic_tree_max_topK=value)

    assert message.startswith("dynamic_tree_max_topK: ")
    assert message.endswith("1 .. 64")


def test_topk_above_one_needs_a_tree():
    message = refusal(SpeculationConfig, dynamic_tree_max_topK=2)

    assert "dynamic_tree_max_topK: 2 needs a tree" in message
    assert 1 == SpeculationConfig(dynamic_tree_max_topK=1).dynamic_tree_max_topK


@pytest.mark.parametrize("name", Accept)
def test_an_acceptance_rule_may_be_given_by_name(name: Accept):
    rule = setting(SamplingParams, "accept", str(name))

    assert name is rule
    assert Accept.COUPLED is SamplingParams().accept


@pytest.mark.parametrize("value", ["typical", "", None, 3, ["coupled"], "Rejection"])
def test_an_unknown_acceptance_rule_is_refused_with_the_list(value: Any):
    expected = f"accept: {value!r} is not one of coupled, rejection"

    assert expected == refusal(SamplingParams, accept=value)


def test_the_rejection_rule_is_for_sampling_only():
    rejection = SamplingParams(accept=Accept.REJECTION)

    assert not rejection.uses_rejection
    assert dataclasses.replace(rejection, temperature=0.1).uses_rejection
    assert not SamplingParams(temperature=0.1).uses_rejection


def test_chains_are_verified_as_blocks_unless_that_is_switched_off():
    assert SpeculationConfig().block_verification
    assert not SpeculationConfig(block_verification=False).block_verification
    assert "block_verification: 'no' is neither True nor False" == refusal(
        SpeculationConfig, block_verification="no"
    )


@pytest.mark.parametrize("name", ["max_model_len", "threads"])
def test_none_leaves_the_choice_open(name: str):
    assert setting(EngineConfig, name, None) is None


def test_a_request_without_a_seed_has_none():
    assert SamplingParams().seed is None
