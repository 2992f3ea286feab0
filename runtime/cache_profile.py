"""A cache profile: how many tokens of a prompt each layer keeps, as `edgekit tune-cache` finds them.

{"schema_version": 1, "producer": "edgekit 0.1.0", "bundle": "<digest>", "budgets_tokens": [96, 128, ...],
"method": "snapkv", "score": 0.8, "settings": {...}}
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import msgspec

from edgekit.errors import CorruptArtifactError, StorageError, UnsupportedError, UsageError

SCHEMA_VERSION = 1


class CacheProfile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Budgets of a model's layers.

    Attributes:
        schema_version: Version of this format.
        producer: Name and version of the program that wrote it.
        bundle: Digest of the bundle that it was searched with; others with as many layers may use it.
        budgets_tokens: Tokens that each layer keeps.
        method: The policy that chose the tokens.
        score: What the search reached, of 1.
        settings: What was searched, for the record.
    """

    schema_version: Annotated[int, msgspec.Meta(ge=1)]
    producer: str
    bundle: str
    budgets_tokens: tuple[Annotated[int, msgspec.Meta(ge=1)], ...]
    method: str
    score: float
    settings: dict[str, float | int | str]

    def for_mean(self, mean_tokens: int) -> tuple[int, ...]:
        """Returns the budgets moved to another mean."""
        return completed(self.budgets_tokens, mean_tokens)


def completed(budgets_tokens: Sequence[float], mean_tokens: float) -> tuple[int, ...]:
    """Scales budgets to a mean: kᵢ + (kᵢ / A) · (T − A), rounded up, with A their sum and T = mean · layers.

    Source: EvolKV (Yu and Chai 2025, arXiv 2509.08315), section 3.2, "cache budget completion".
    """
    total = sum(budgets_tokens)
    missing = mean_tokens * len(budgets_tokens) - total
    # Rounding up is meant for true fractions, not for the last bit of a product.
    return tuple(max(1, math.ceil(round(budget + budget / total * missing, 6))) for budget in budgets_tokens)


class _SchemaVersion(msgspec.Struct):
    schema_version: Annotated[int, msgspec.Meta(ge=1)]


def read_profile(path: str | os.PathLike[str], num_layers: int) -> CacheProfile:
    """Reads a profile.

    Raises:
        UsageError: There is no such file, or it is for another number of layers.
        UnsupportedError: A newer EdgeKit wrote it.
        CorruptArtifactError: It is malformed.
    """
    try:
        content = Path(path).read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the cache profile {str(path)!r}: {error.strerror or error}") from error
    try:
        # The version first: a newer one may have any shape.
        version = msgspec.json.decode(content, type=_SchemaVersion).schema_version
        if version > SCHEMA_VERSION:
            raise UnsupportedError(
                f"cache profile {str(path)!r} has schema_version {version}, this EdgeKit reads up to {SCHEMA_VERSION}; "
                "upgrade with: pip install -U edgekit"
            )
        profile = msgspec.json.decode(content, type=CacheProfile)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise CorruptArtifactError(
            f"cache profile {str(path)!r} is not valid: {error}; make one with: edgekit tune-cache"
        ) from error
    if len(profile.budgets_tokens) != num_layers:
        raise UsageError(
            f"cache profile {str(path)!r} has budgets of {len(profile.budgets_tokens)} layers, the model has "
            f"{num_layers}; make one for this model with: edgekit tune-cache"
        )
    return profile


def write_profile(path: Path, profile: CacheProfile) -> None:
    """Writes a profile, whole or not at all.

    Raises:
        StorageError: The disk refused the write.
    """
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    try:
        partial.write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")
        partial.replace(path)
    except OSError as error:
        raise StorageError(f"cannot write {str(path)!r}: {error.strerror or error}") from error
    finally:
        partial.unlink(missing_ok=True)
