"""The draft vocabulary: its two maps, its constructors, and maps that belong to another head."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider.errors import CheckpointError
from outrider.vocabulary import DraftVocabulary


@st.composite
def vocabularies(draw: st.DrawFn) -> DraftVocabulary:
    target_size = draw(st.integers(1, 20))
    ids = st.lists(st.integers(0, target_size - 1), min_size=1, unique=True)
    return DraftVocabulary(np.array(draw(ids)), target_size)


@given(vocabularies())
def test_the_two_maps_are_each_other_s_inverse(vocabulary: DraftVocabulary) -> None:
    places = range(vocabulary.size)
    others = set(range(vocabulary.target_size)) - set(vocabulary.ids_W.tolist())

    assert list(places) == vocabulary.place_V[vocabulary.ids_W].tolist()
    assert all(vocabulary.place_V[token] == -1 for token in others)
    assert np.int64 == vocabulary.ids_W.dtype == vocabulary.place_V.dtype
    assert vocabulary.size / vocabulary.target_size == vocabulary.coverage


@given(vocabularies())
def test_offsets_lead_to_the_same_vocabulary(vocabulary: DraftVocabulary) -> None:
    offset_W = vocabulary.ids_W - np.arange(vocabulary.size)
    read = DraftVocabulary.from_offsets(offset_W, vocabulary.target_size)

    assert vocabulary.ids_W.tolist() == read.ids_W.tolist()
    assert vocabulary.place_V.tolist() == read.place_V.tolist()


def test_the_first_ids_of_a_padded_vocabulary() -> None:
    vocabulary = DraftVocabulary.first(3, 5)

    assert [0, 1, 2] == vocabulary.ids_W.tolist()
    assert [0, 1, 2, -1, -1] == vocabulary.place_V.tolist()
    assert 0.6 == vocabulary.coverage


@pytest.mark.parametrize("dtype", [np.float32, object])
def test_scatter_puts_each_value_at_its_target_id(dtype: Any) -> None:
    vocabulary = DraftVocabulary(np.array([4, 0]), 5)
    row_V = vocabulary.scatter(np.array([0.25, 0.75], dtype=dtype), 0)

    assert [0.75, 0, 0, 0, 0.25] == row_V.tolist()
    assert dtype == row_V.dtype


def test_scatter_fills_with_what_it_is_told() -> None:
    row_W = np.array([1.0], dtype=np.float32)

    assert [-np.inf, 1.0] == DraftVocabulary(np.array([1]), 2).scatter(row_W, -np.inf).tolist()


def test_a_vocabulary_cannot_be_changed() -> None:
    ids = np.array([1, 0])
    vocabulary = DraftVocabulary(ids, 2)
    ids[0] = 5

    assert [1, 0] == vocabulary.ids_W.tolist()
    with pytest.raises(ValueError, match="read-only"):
        vocabulary.ids_W[0] = 0
    with pytest.raises(ValueError, match="read-only"):
        vocabulary.place_V[0] = 0


@pytest.mark.parametrize(
    ("ids", "expected"),
    [
        ([], "has shape [0]"),
        ([[0, 1]], "has shape [1, 2]"),
        (
            [0, 5],
            "1 of 2 draft tokens are outside the target's vocabulary, draft id 1 as target id "
            "5 first; allowed: 0 .. 4",
        ),
        ([-1, -2, 0], "2 of 3 draft tokens are outside"),
        ([3, 1, 3], "draft ids 0 and 2 both stand for target id 3"),
    ],
)
def test_ids_that_are_no_choice_of_the_target_s_are_refused(ids: list, expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        DraftVocabulary(np.array(ids, dtype=np.int64), 5)

    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("offsets", "expected"),
    [
        ([0, 2, 3, 5], "(the values look like target ids; d2t holds offsets"),  # 3 -> 8
        ([0, 0, 900], "(is this d2t from a head for another vocabulary?)"),
        ([2, 1, 0], "draft ids 0 and 1 both stand for target id 2"),
        ([-1, 0], "draft id 0 as target id -1 first"),
        ([0.0, 1.0], "float64 of shape [2] is not a list of whole numbers"),
        ([[0], [1]], "of shape [2, 1] is not a list of whole numbers"),
        ([], "not a list of whole numbers"),
    ],
)
def test_a_stale_or_absolute_d2t_is_refused_by_name(offsets: list, expected: str) -> None:
    with pytest.raises(CheckpointError) as caught:
        DraftVocabulary.from_offsets(np.array(offsets), 8)

    assert str(caught.value).startswith("d2t: ")
    assert expected in str(caught.value)
