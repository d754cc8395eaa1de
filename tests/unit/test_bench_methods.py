"""What a method's name stands for."""

from __future__ import annotations

import pytest

from outrider.bench.methods import ArmName
from outrider.config import Method, SpeculationConfig
from outrider.errors import ParameterError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("ngram", SpeculationConfig()),
        ("draft", SpeculationConfig(method=Method.DRAFT, max_draft_len=5)),
        ("mtp+ngram", SpeculationConfig(method=Method.MTP, max_draft_len=5, with_ngram=True)),
        (
            "medusa-tree",
            SpeculationConfig(
                method=Method.MEDUSA,
                max_draft_len=5,
                use_dynamic_tree=True,
                max_total_draft_tokens=16,
            ),
        ),
        (
            "eagle3-tree+ngram",
            SpeculationConfig(
                method=Method.EAGLE3,
                max_draft_len=5,
                use_dynamic_tree=True,
                max_total_draft_tokens=16,
                with_ngram=True,
            ),
        ),
        ("ngram-tree", SpeculationConfig(use_dynamic_tree=True, max_total_draft_tokens=16)),
    ],
)
def test_a_name_says_method_shape_and_company(text, expected):
    name = ArmName.parse(text)

    assert text == str(name)
    assert expected == name.speculation(None)


@pytest.mark.parametrize("text", ["eagle2", "ngram+ngram", "eagle3+ngram-tree", "off-tree", ""])
def test_an_unknown_name_is_refused_with_those_there_are(text):
    with pytest.raises(ParameterError) as refused:
        ArmName.parse(text)

    assert str(refused.value).startswith(
        f"--methods: {text!r} is not one of off, ngram, ngram-tree, "
    )
    assert "eagle3-tree+ngram" in str(refused.value)
