"""Our draft heads against references written from their definitions, in float32, within 1e-5.

Heads run as their drafters run them: true rows in chunks, committed; then a tree layer by layer,
each node on its parent's output, several requests of unequal length in one pass. The references
(:mod:`tests.parity.reference_heads`) compute all rows of one request at once. That these tests can
see a mistake is shown in :mod:`tests.parity.test_wrong_heads`.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from outrider.models.exactness import chain_segment
from outrider.models.heads.config import Eagle3Config, MedusaConfig, MtpConfig
from outrider.models.heads.medusa import MedusaHeads
from outrider.models.layers import Segment
from tests.parity.head_cases import (
    CHAIN,
    CONFIGS,
    EAGLE3,
    EAGLE3_CONFIGS,
    LIVELY,
    MEDUSA,
    MEDUSA_CONFIGS,
    MTP,
    MTP_CONFIGS,
    NARROW,
    NOTHING,
    TOLERANCE,
    WIDE,
    Driver,
    assert_same,
    head_weights,
    join,
    make_head,
    make_medusa,
    make_reference,
    make_request,
    medusa_states,
    part,
    target,
)

BF16_TOLERANCE = 0.02  # of the logits' standard deviation, root mean square

every_config = pytest.mark.parametrize("config", CONFIGS.values(), ids=list(CONFIGS))


@every_config
@pytest.mark.parametrize("chunk", [1, 5, 16, 38])
def test_true_rows_and_tree_equal_the_reference(
    config: Eagle3Config | MtpConfig, chunk: int
) -> None:
    request = make_request(config, length=39)
    expected = make_reference(config).run(*request.rows(0, 38), WIDE)
    driver = Driver(make_head(config))
    pieces = [
        driver.take_in([request.rows(start, min(start + chunk, 38))])[0]
        for start in range(0, 38, chunk)
    ]
    (nodes,) = driver.grow(pieces[-1:], [WIDE])

    assert_same(part(expected, 0, 38), join(pieces))
    assert_same(part(expected, 38), nodes)


@every_config
def test_requests_of_unequal_length_do_not_touch_each_other(
    config: Eagle3Config | MtpConfig,
) -> None:
    """In two steps: the second overwrites the first one's drafted rows with true ones."""
    lengths, accepted, trees = (23, 8, 1), (4, 1, 2), (WIDE, NARROW, CHAIN)
    requests = [make_request(config, length + 7, seed=length) for length in lengths]
    reference = make_reference(config)
    driver = Driver(make_head(config), num_requests=3)
    roots = driver.take_in(
        [request.rows(0, n) for request, n in zip(requests, lengths, strict=True)], is_silent=True
    )
    first = driver.grow(roots, trees)
    ends = [n + more for n, more in zip(lengths, accepted, strict=True)]
    parts = [r.rows(n, end) for r, n, end in zip(requests, lengths, ends, strict=True)]
    true = driver.take_in(parts)
    second = driver.grow(true, trees[::-1])
    for b, request in enumerate(requests):
        before = reference.run(*request.rows(0, lengths[b]), trees[b])
        after = reference.run(*request.rows(0, ends[b]), trees[::-1][b])

        assert_same(part(before, lengths[b] - 1, lengths[b]), roots[b])
        assert_same(part(before, lengths[b]), first[b])
        assert_same(part(after, lengths[b], ends[b]), true[b])
        assert_same(part(after, ends[b]), second[b])


@pytest.mark.parametrize("config", [EAGLE3, MTP], ids=["EAGLE-3", "MTP"])
def test_silent_rows_are_committed_without_output(config: Eagle3Config | MtpConfig) -> None:
    request = make_request(config, length=20)
    driver = Driver(make_head(config))
    tokens, states = request.rows(0, 12)
    segment = Segment(driver.rows[0], tokens, range(12), num_silent=12)
    output = driver.head.forward([segment], torch.cat(states, 1), driver.cache, from_target=True)
    driver.cache.extend(driver.rows[0], 12)
    (rest,) = driver.take_in([request.rows(12, 19)])
    expected = make_reference(config).run(*request.rows(0, 19), NOTHING)

    assert (0, None) == (len(output.logits_RW), output.feature_RD)
    assert_same(part(expected, 12), rest)


def test_a_head_asks_the_target_for_the_states_that_its_reference_reads() -> None:
    """The states come side by side, in the order of ``captures``, from one pass."""
    for config in (EAGLE3, EAGLE3_CONFIGS["four states"], MTP, MTP_CONFIGS["MiMo"]):
        request = make_request(config, length=9)
        kv_cache = target().new_cache(max_batch_size=1, num_slots=9)
        segment = chain_segment(kv_cache.allocate(), request.tokens)
        output = target().forward([segment], kv_cache, capture=make_head(config).captures)

        torch.testing.assert_close(
            output.hidden_RC, torch.cat(request.states, dim=1), rtol=0, atol=TOLERANCE
        )


@pytest.mark.parametrize("config", MEDUSA_CONFIGS.values(), ids=list(MEDUSA_CONFIGS))
def test_medusa_heads_equal_the_reference(config: MedusaConfig) -> None:
    state_RD = medusa_states()
    expected = make_medusa(config).run(state_RD)
    heads = MedusaHeads(config, head_weights(config), target())
    for num_heads in (1, 3):
        for num_rows in (1, 12):
            logits = heads.forward(state_RD[:num_rows], num_heads)

            assert num_heads == len(logits)
            for expected_RV, logits_RV in zip(expected[:num_heads], logits, strict=True):
                assert expected_RV.std() > LIVELY
                torch.testing.assert_close(
                    logits_RV.double(), expected_RV[:num_rows], rtol=0, atol=TOLERANCE
                )


@every_config
def test_bfloat16_stays_close_to_the_reference(config: Eagle3Config | MtpConfig) -> None:
    """The reference gets the same rounded weights and states; only the arithmetic differs."""
    dtype = torch.bfloat16
    request = make_request(config, length=24, dtype=dtype)
    expected = make_reference(config, dtype=dtype).run(*request.rows(0, 23), WIDE)
    driver = Driver(make_head(config, dtype))
    true = driver.take_in([request.rows(0, 23)])
    rows = join([*true, *driver.grow(true, [WIDE])])
    error_RW = rows.logits_RW - expected.logits_RW

    assert (torch.float32, dtype) == (rows.logits_RW.dtype, rows.feature_RD.dtype)
    assert error_RW.square().mean().sqrt() < BF16_TOLERANCE * expected.logits_RW.std()


def test_bfloat16_medusa_stays_close_to_the_reference() -> None:
    dtype, config = torch.bfloat16, replace(MEDUSA, num_layers=2)
    state_RD = medusa_states(dtype)
    expected = make_medusa(config, dtype=dtype).run(state_RD)
    logits = MedusaHeads(config, head_weights(config, dtype), target(dtype)).forward(state_RD, 3)
    for expected_RV, logits_RV in zip(expected, logits, strict=True):
        error_RV = logits_RV - expected_RV

        assert torch.float32 == logits_RV.dtype
        assert error_RV.square().mean().sqrt() < BF16_TOLERANCE * expected_RV.std()
