"""Autoregressive decoding: one token per step, the tree with a single node."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from edgekit.runtime.strategies.base import Draft


class Autoregressive:
    """Guesses nothing."""

    def propose(self, token_ids: Sequence[int]) -> Draft:
        """Returns the last token alone."""
        return Draft(token_ids=np.array(token_ids[-1:], np.int64), parents=[-1])
