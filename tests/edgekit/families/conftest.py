"""Published configs, for the tests of each family."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeAlias

import pytest

from edgekit.families import family_for
from edgekit.spec import DecoderSpec

ReadSpec: TypeAlias = Callable[..., DecoderSpec]


@pytest.fixture
def read_spec() -> ReadSpec:
    """Reads a published config with changes; `...` leaves a key out: ``read_spec("gemma-2-2b", head_dim=...)``."""

    def read(name: str, **changes: Any) -> DecoderSpec:
        path = Path(__file__).parent / "published" / f"{name}.json"
        config = {**json.loads(path.read_text(encoding="utf-8")), **changes}
        config = {key: value for key, value in config.items() if value is not ...}
        return family_for(config).spec(config)

    return read
