"""Toy drafters: a shape (how many nodes, where) filled with guesses (which tokens, knowing what).

Some are honest draft models, some look at the target's noise, some use it to be wrong on purpose,
to draft only when it suits them, or to choose the tree's shape. None may change what is emitted.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from outrider.tree import DraftTree
from outrider.types import Verdict

if TYPE_CHECKING:
    from tests.exactness.toy import ToyRequest

Guess: TypeAlias = Callable[["ToyRequest", Sequence[int]], Iterator[int]]
"""Tokens in the order in which a request's drafter would propose them after a prefix."""

Rank: TypeAlias = Callable[[Sequence[int]], Iterator[int]]
"""The same for one request, after a path below the root."""

Shape: TypeAlias = Callable[[DraftTree, Rank], None]
"""Adds nodes to a tree of the root alone."""


def blind(request: ToyRequest, prefix: Sequence[int]) -> Iterator[int]:
    """A draft model that does not look at the noise."""
    logits = request.target.draft().logits(prefix)
    return iter(sorted(range(len(logits)), key=lambda token: (-logits[token], token)))


def favourite(request: ToyRequest, prefix: Sequence[int]) -> Iterator[int]:
    """What the target itself likes best, noise aside: often right, and blind to parameters."""
    logits = request.target.logits(prefix)
    return iter(sorted(range(len(logits)), key=lambda token: (-logits[token], token)))


def coupled(request: ToyRequest, prefix: Sequence[int]) -> Iterator[int]:
    """A draft model that adds the target's own noise to its logits."""
    return request.order(request.target.draft().logits(prefix), len(prefix))


def oracle(request: ToyRequest, prefix: Sequence[int]) -> Iterator[int]:
    """The target itself, with its noise but without its parameters."""
    return request.order(request.target.logits(prefix), len(prefix))


def contrary(request: ToyRequest, prefix: Sequence[int]) -> Iterator[int]:
    """The target's order without its first: knows the noise and uses it to be wrong."""
    return islice(oracle(request, prefix), 1, None)


def wavering(request: ToyRequest, prefix: Sequence[int]) -> Iterator[int]:
    """Right or wrong on purpose, depending on the noise of the position before."""
    earlier = next(coupled(request, prefix[:-1]))
    return (oracle if earlier == prefix[-1] else contrary)(request, prefix)


def widths(*num_children: int) -> Shape:
    """The best ``num_children[d]`` guesses below every node of depth d."""

    def shape(tree: DraftTree, rank: Rank) -> None:
        for node in _growing(tree):
            if tree.depth[node] < len(num_children):
                guesses = rank(tree.path_tokens(node))
                for place, token in enumerate(islice(guesses, num_children[tree.depth[node]])):
                    tree.add(node, token, tree.score[node] / (2 + place))

    return shape


def chain(length: int) -> Shape:
    """One guess after another."""
    return widths(*[1] * length)


def merged(*starts: int, length: int) -> Shape:
    """Several chains, each from another first guess, laid into one tree; duplicates merge."""

    def shape(tree: DraftTree, rank: Rank) -> None:
        for start in starts:
            node = 0
            for depth in range(length):
                guesses = rank(tree.path_tokens(node))
                token = next(islice(guesses, start if depth == 0 else 0, None))
                child = tree.children()[node].get(token)
                node = tree.add(node, token, tree.score[node] / 2) if child is None else child

    return shape


def lopsided(length: int) -> Shape:
    """A chain of best guesses with a second-best leaf beside every node."""

    def shape(tree: DraftTree, rank: Rank) -> None:
        node = 0
        for _ in range(length):
            first, *second = islice(rank(tree.path_tokens(node)), 2)
            for token in second:
                tree.add(node, token, tree.score[node] / 4)
            node = tree.add(node, first, tree.score[node] / 2)

    return shape


def adaptive(longest: int) -> Shape:
    """A chain whose length depends on the first guess, and so on the noise where that does."""

    def shape(tree: DraftTree, rank: Rank) -> None:
        chain(longest - next(rank([])) % (longest + 1))(tree, rank)

    return shape


def scattered(seed: int, size: int) -> Shape:
    """Nodes thrown at random places, each a random one of the best few guesses there."""

    def shape(tree: DraftTree, rank: Rank) -> None:
        draw = random.Random(f"{seed} {tree.token[0]}")
        for _ in range(size):
            node = draw.randrange(len(tree))
            guesses = list(islice(rank(tree.path_tokens(node)), 3))
            token = draw.choice(guesses)
            if token not in tree.children()[node]:
                tree.add(node, token, tree.score[node] * draw.choice([0.5, 1.0]))

    return shape


def _growing(tree: DraftTree) -> Iterator[int]:
    """Nodes in order, those included that are added meanwhile."""
    node = 0
    while node < len(tree):
        yield node
        node += 1


@dataclass
class Tally:
    """What happened over all runs: nodes drafted and accepted, steps that rejected a node."""

    drafted: int = 0
    accepted: int = 0
    rejected: int = 0

    @property
    def is_eventful(self) -> bool:
        """Whether a test over these runs has exercised both outcomes of a verification."""
        return bool(self.drafted and self.accepted and self.rejected)


@dataclass
class ToyDrafter:
    """A shape filled with guesses; ``max_nodes`` prunes to the best scores."""

    shape: Shape
    guess: Guess
    max_nodes: int | None = None
    tally: Tally = field(default_factory=Tally)
    captures: ClassVar[tuple[int, ...]] = ()
    num_passes: ClassVar[int] = 0

    def propose(
        self, requests: Sequence[Any], max_depth: Sequence[int], min_score: float = 0.0
    ) -> list[DraftTree]:
        return [self._tree(*pair) for pair in zip(requests, max_depth, strict=True)]

    def _tree(self, request: ToyRequest, max_depth: int) -> DraftTree:
        tree = DraftTree.root(request.token_ids[-1])
        self.shape(tree, lambda path: self.guess(request, [*request.token_ids, *path]))
        return tree.best(len(tree) if self.max_nodes is None else self.max_nodes, max_depth)

    def observe(
        self,
        requests: Sequence[Any],
        trees: Sequence[DraftTree],
        verdicts: Sequence[Verdict],
        hidden: Any,
    ) -> None:
        for tree, verdict in zip(trees, verdicts, strict=True):
            end = verdict.path[-1] if verdict.path else 0
            self.tally.drafted += verdict.num_drafted
            self.tally.accepted += len(verdict.path)
            self.tally.rejected += bool(tree.children()[end])

    def release(self, request: Any) -> None:
        """Keeps no state."""
