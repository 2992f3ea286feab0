"""EdgeKit: language models for small devices, made smaller, exported and run.

The names below load what they need on first use, so that importing the package costs nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from edgekit.version import __version__

if TYPE_CHECKING:
    from edgekit.bundle import Bundle, open_bundle
    from edgekit.errors import EdgeKitError
    from edgekit.export.exporter import ExportOptions, export_bundle
    from edgekit.export.storage_plan import QuantizationOptions
    from edgekit.integrations.causal_lm import EdgeModelForCausalLM
    from edgekit.runtime import LLM, CompletionChunk, CompletionOutput, SamplingParams

__all__ = [
    "LLM",
    "Bundle",
    "CompletionChunk",
    "CompletionOutput",
    "EdgeKitError",
    "EdgeModelForCausalLM",
    "ExportOptions",
    "QuantizationOptions",
    "SamplingParams",
    "__version__",
    "export_bundle",
    "open_bundle",
]

_HOMES = {
    "Bundle": "edgekit.bundle",
    "CompletionChunk": "edgekit.runtime",
    "CompletionOutput": "edgekit.runtime",
    "EdgeKitError": "edgekit.errors",
    "EdgeModelForCausalLM": "edgekit.integrations.causal_lm",
    "ExportOptions": "edgekit.export.exporter",
    "LLM": "edgekit.runtime",
    "QuantizationOptions": "edgekit.export.storage_plan",
    "SamplingParams": "edgekit.runtime",
    "export_bundle": "edgekit.export.exporter",
    "open_bundle": "edgekit.bundle",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)
