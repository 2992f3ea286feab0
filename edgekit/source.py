"""`SourceRecord`: where a model came from, kept in every artifact that is made from it."""

from __future__ import annotations

from typing import Literal

import msgspec


class SourceRecord(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The checkpoint that an artifact was made from.

    Attributes:
        kind: A local directory, a GGUF file or a repository of the Hugging Face hub.
        id: Name of the directory or file (without its parents), or the repository id.
        revision: Commit of the repository; None for local checkpoints.
        digests: SHA-256 in hex of every file that was read, by file name.
    """

    kind: Literal["directory", "gguf", "hub"]
    id: str
    revision: str | None
    digests: dict[str, str]
