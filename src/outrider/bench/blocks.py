"""Who measures when: the order of all turns of a run. Pure.

Owns the interleaving. A machine drifts (heat, neighbours, clocks), so what is compared stands next
to each other, and each arm goes first as often as last. With two arms A (the baseline) and B::

    index      0      1      2      3      4 ...
    turns     A B    B A    B A    A B    A B       position 0, position 1

With more arms the order turns by one every second index and is mirrored in between, so that every
arm stands at every place. Blocks of the kind ``aa`` (the baseline twice) are spread evenly between
them. :mod:`outrider.bench.run` carries the turns out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from outrider.bench.records import BlockKind, Load
from outrider.bench.workloads import Question


@dataclass(frozen=True, slots=True)
class Turn:
    """One arm's turn. ``number`` counts the blocks of its kind at its load, from 0."""

    index: int
    position: int
    arm: str
    load: Load
    kind: BlockKind
    number: int


def plan_turns(
    arms: Sequence[str], loads: Sequence[Load], num_blocks: int, num_aa_blocks: int
) -> tuple[Turn, ...]:
    """All measured turns in their order; ``arms[0]`` is the baseline. Load after load.

    Warm-up is no part of the plan: it is due whenever a load begins or a server has started.
    """
    turns: list[Turn] = []
    index = 0
    for load in loads:
        for kind, number in _kinds(num_blocks, num_aa_blocks):
            order = [arms[0]] * 2 if kind is BlockKind.AA else arm_order(arms, number)
            turns += [
                Turn(index, position, arm, load, kind, number) for position, arm in enumerate(order)
            ]
            index += 1
    return tuple(turns)


def arm_order(arms: Sequence[str], number: int) -> list[str]:
    """Who goes first, second, ... in the ``number``-th block."""
    shift = (number // 2) % len(arms)
    order = [*arms[shift:], *arms[:shift]]
    return order[::-1] if number % 2 else order


def block_questions(questions: Sequence[Question], number: int, size: int) -> list[Question]:
    """What the ``number``-th block of a load asks: the next ``size`` of the list, round and round.

    Blocks ask different questions while there are any, so that the spread between blocks is also
    that between prompts; the arms of one block ask the same ones. A list that is shorter than a
    block is asked again within it.
    """
    start = number * size
    return [questions[(start + place) % len(questions)] for place in range(size)]


def _kinds(num_blocks: int, num_aa_blocks: int) -> list[tuple[BlockKind, int]]:
    """The blocks of one load, those of the noise floor spread evenly."""
    total = num_blocks + num_aa_blocks
    kinds: list[tuple[BlockKind, int]] = []
    counts = {BlockKind.MEASURE: 0, BlockKind.AA: 0}
    for place in range(total):
        # The share of A/A blocks so far never runs ahead of, or a whole block behind, the plan.
        is_aa = (place + 1) * num_aa_blocks // total > counts[BlockKind.AA]
        kind = BlockKind.AA if is_aa else BlockKind.MEASURE
        kinds.append((kind, counts[kind]))
        counts[kind] += 1
    return kinds
