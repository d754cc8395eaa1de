"""Hypothesis strategies shared by the tests: draft trees, logits rows, sampling parameters."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import strategies as st
from torch import Tensor

from outrider.config import SamplingParams
from outrider.tree import DraftTree


@st.composite
def trees(
    draw: st.DrawFn, *, vocab_size: int = 8, max_nodes: int = 12, max_depth: int = 6
) -> DraftTree:
    """Trees of every shape, from the root alone to bushy; scores fall along each path."""
    tree = DraftTree.root(draw(st.integers(0, vocab_size - 1)))
    for _ in range(draw(st.integers(0, max_nodes))):
        parent = draw(st.integers(0, len(tree) - 1))
        token = draw(st.integers(0, vocab_size - 1))
        if tree.depth[parent] < max_depth and token not in tree.children()[parent]:
            share = draw(st.sampled_from([0.25, 0.5, 1.0]))
            tree.add(parent, token, tree.score[parent] * share)
    return tree


def logits(vocab_size: int) -> st.SearchStrategy[list[float]]:
    """Rows of float32 logits: ties, wide and narrow ranges, some masked; one at least is finite."""
    value = st.one_of(
        st.sampled_from([-1.0, 0.0, 1.0, 1.0, 2.0]),
        st.floats(-30.0, 30.0, width=32),
        st.just(-np.inf),
    )
    row = st.lists(value, min_size=vocab_size, max_size=vocab_size)
    return row.filter(lambda values: max(values) > -np.inf)


@st.composite
def logits_rows(draw: st.DrawFn, num_rows: int, vocab_size: int) -> Tensor:
    """A matrix of such rows, float32 ``[R, V]``."""
    return torch.tensor([draw(logits(vocab_size)) for _ in range(num_rows)], dtype=torch.float32)


@st.composite
def sampling_params(draw: st.DrawFn, *, vocab_size: int, max_tokens: int = 16) -> SamplingParams:
    """Parameters over their whole meaning; each is switched off about half of the time."""

    def maybe(values: st.SearchStrategy, off: object) -> st.SearchStrategy:
        return st.one_of(st.just(off), values)

    tokens = st.integers(0, vocab_size - 1)
    return SamplingParams(
        temperature=draw(st.one_of(st.just(0.0), st.sampled_from([0.3, 0.7, 1.0, 1.7]))),
        top_k=draw(maybe(st.integers(1, vocab_size + 1), 0)),
        top_p=draw(maybe(st.sampled_from([0.05, 0.3, 0.5, 0.8, 0.95, 0.9999]), 1.0)),
        min_p=draw(maybe(st.sampled_from([0.01, 0.1, 0.3, 0.9, 1.0]), 0.0)),
        repetition_penalty=draw(maybe(st.sampled_from([0.5, 1.1, 1.5, 3.0]), 1.0)),
        presence_penalty=draw(maybe(st.sampled_from([-2.0, -0.5, 0.5, 2.0]), 0.0)),
        frequency_penalty=draw(maybe(st.sampled_from([-1.0, 0.3, 1.5]), 0.0)),
        logit_bias=draw(st.dictionaries(tokens, st.sampled_from([-100.0, -1.0, 2.5]), max_size=3)),
        seed=draw(st.integers(0, 2**64 - 1)),
        choice=draw(st.integers(0, 3)),
        max_tokens=max_tokens,
        min_tokens=draw(maybe(st.integers(1, max_tokens), 0)),
        stop_token_ids=tuple(draw(st.lists(tokens, max_size=2, unique=True))),
        ignore_eos=draw(st.booleans()),
    )
