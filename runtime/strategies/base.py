"""What every decoding strategy has in common: propose a tree, run one step over it, accept a path.

The root of a tree is the last accepted token, whose keys and values are not in the cache yet. A strategy hangs
guesses below it; autoregressive decoding hangs none. Sampling at a node either agrees with one of its
children, and the path goes on there, or ends the path; every token is drawn from the model's own
distribution, so the output is distributed as without guesses.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from edgekit.contract import MASKED
from edgekit.runtime.sampling import SampledToken, Sampler
from edgekit.runtime.step import StepInputs


@dataclass(frozen=True, kw_only=True)
class Draft:
    """A tree of tokens.

    Attributes:
        token_ids: shape (n,), int64; the first is the root.
        parents: Index of each node's parent, smaller than its own; −1 for the root.
    """

    token_ids: npt.NDArray[np.int64]
    parents: Sequence[int]

    def step_inputs(self, start: int) -> StepInputs:
        """Lays the tree out as one step: a node sees its ancestors and itself, at the position of its depth.

        Args:
            start: Position of the root.
        """
        count = len(self.token_ids)
        new_bias = np.full((count, count), MASKED, np.float32)
        depths = np.zeros(count, np.int64)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                new_bias[node] = new_bias[parent]
                depths[node] = depths[parent] + 1
            new_bias[node, node] = 0.0
        return StepInputs(
            token_ids=self.token_ids,
            position_ids=start + depths,
            new_bias=new_bias,
            logit_rows=np.arange(count, dtype=np.int64),
            sequence_length=start + int(depths.max()) + 1,
        )


@dataclass(frozen=True, kw_only=True)
class Accepted:
    """What one step yields.

    Attributes:
        nodes: The accepted path, root first; its keys and values may enter the cache.
        tokens: One drawn token per accepted node; the last one is the next root.
    """

    nodes: list[int]
    tokens: list[SampledToken]


class Strategy(Protocol):
    """Proposes what one step computes."""

    def propose(self, token_ids: Sequence[int]) -> Draft:
        """Returns a tree whose root is the last of `token_ids`, the conversation so far."""


def accept(draft: Draft, logits: npt.NDArray[np.float32], sampler: Sampler, token_ids: Sequence[int]) -> Accepted:
    """Follows the sampler down the tree.

    Args:
        draft: The tree.
        logits: shape (n, V), float32.
        sampler: Draws the tokens.
        token_ids: The conversation so far, ending in the root's token.
    """
    nodes, tokens = [0], []
    while True:
        drawn = sampler.sample(logits[nodes[-1]], token_ids)
        tokens.append(drawn)
        children = (node for node, parent in enumerate(draft.parents) if parent == nodes[-1])
        agreeing = next((node for node in children if draft.token_ids[node] == drawn.token_id), None)
        if agreeing is None:
            return Accepted(nodes=nodes, tokens=tokens)
        nodes.append(agreeing)
        token_ids = [*token_ids, drawn.token_id]
