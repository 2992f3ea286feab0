"""The runtime: loads a bundle and generates tokens with numpy and one backend."""

from __future__ import annotations

from edgekit.runtime.llm import LLM
from edgekit.runtime.output import CompletionChunk, CompletionOutput, Timings, Usage
from edgekit.runtime.sampling import SampledToken, SamplingParams
from edgekit.runtime.session import Session

__all__ = [
    "LLM",
    "CompletionChunk",
    "CompletionOutput",
    "SampledToken",
    "SamplingParams",
    "Session",
    "Timings",
    "Usage",
]
