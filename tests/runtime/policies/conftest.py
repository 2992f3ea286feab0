from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from edgekit.checkpoint import open_checkpoint
from edgekit.compress.decoder import Decoder, load_decoder


@pytest.fixture(scope="session")
def decoder(tiny_checkpoint: Any) -> Callable[[str], Decoder]:
    """The reference decoder of a variant, loaded once."""
    made: dict[str, Decoder] = {}

    def load(variant: str) -> Decoder:
        if variant not in made:
            with open_checkpoint(tiny_checkpoint(variant)) as checkpoint:
                made[variant] = load_decoder(checkpoint)
        return made[variant]

    return load
