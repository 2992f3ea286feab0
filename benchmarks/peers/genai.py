"""The worker for onnxruntime-genai; see `peers.protocol`. It needs nothing of this project but that."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

import onnxruntime_genai as og

from peers.protocol import serve


class GenAI:
    """onnxruntime-genai's generator with the options of its model's genai_config.json, and our number of threads."""

    version = f"onnxruntime-genai {og.__version__}, onnxruntime {version('onnxruntime')}"

    def load(self, model: str, threads: int, max_tokens: int) -> None:
        """Loads a directory that its builder wrote; every generator allocates its cache for `max_tokens`."""
        config = og.Config(model)
        options = {"intra_op_num_threads": threads}
        config.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = og.Model(config)
        self._max_tokens = max_tokens

    def prefill(self, token_ids: Sequence[int]) -> float:
        """As the protocol has it: appending tokens runs the model on them."""
        generator = self._generator()
        started = time.perf_counter()
        generator.append_tokens(token_ids)
        return time.perf_counter() - started

    def decode(self, token_ids: Sequence[int], steps: int) -> float:
        """As the protocol has it: the first token comes from the prompt's logits, each other one from a step."""
        generator = self._generator()
        generator.append_tokens(token_ids)
        generator.generate_next_token()
        started = time.perf_counter()
        for _ in range(steps):
            generator.generate_next_token()
        return time.perf_counter() - started

    def _generator(self) -> Any:
        parameters = og.GeneratorParams(self._model)
        # The least length keeps an end token from ending the measurement.
        parameters.set_search_options(do_sample=False, max_length=self._max_tokens, min_length=self._max_tokens)
        return og.Generator(self._model, parameters)


if __name__ == "__main__":
    og.disable_telemetry_events()
    serve(GenAI())
