"""How compare.py talks to the process of an engine: one JSON object per line, first a greeting, then one per call.

worker   {"version": "onnxruntime-genai 0.18.0"}                          or ends, when it cannot be imported
caller   {"call": "prefill", "arguments": [[5, 17, 3]]}
worker   {"result": 0.43}                                                 seconds
"""

from __future__ import annotations

import json
import os
import re
import resource
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

CALLS = ("load", "prefill", "decode")


class AbsentError(Exception):
    """A peer, or what it needs, is not installed."""


class Engine(Protocol):
    """A runtime under measurement.

    Attributes:
        version: The package's name and version, and those of what it computes with.
    """

    version: str

    def load(self, model: str, threads: int, max_tokens: int) -> None:
        """Loads a model with room for a text of `max_tokens`."""

    def prefill(self, token_ids: Sequence[int]) -> float:
        """Reads tokens into an empty cache and returns the seconds until the last one's logits are there."""

    def decode(self, token_ids: Sequence[int], steps: int) -> float:
        """Reads tokens and returns the seconds of the greedy steps after that.

        The token that the prompt's logits choose is drawn before the clock starts; each step runs the model on one
        token and draws the next.
        """


def peak_memory_bytes() -> int:
    """Returns the largest resident set of this process so far: VmHWM, or getrusage's where /proc has no such line."""
    found = re.search(r"^VmHWM:\s+(\d+) kB$", Path("/proc/self/status").read_text(), re.MULTILINE)
    return (int(found[1]) if found else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss) * 1024


def serve(engine: Engine) -> None:
    """Answers calls until stdin ends."""
    # What a native library prints must not come between the lines of the protocol.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def answer(message: object) -> None:
        answers.write(json.dumps(message) + "\n")
        answers.flush()

    answer({"version": engine.version})
    for line in sys.stdin:
        request = json.loads(line)
        if request["call"] == "peak_memory":
            answer({"result": peak_memory_bytes()})
        else:
            assert request["call"] in CALLS
            answer({"result": getattr(engine, request["call"])(*request["arguments"])})
