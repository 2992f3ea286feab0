"""The worker for this runtime; see `peers.protocol`."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import edgekit
from edgekit.ort import ort
from edgekit.runtime.llm import LLM
from edgekit.runtime.sampling import SampledToken, SamplingParams
from peers.protocol import serve


class EdgeKit:
    """EdgeKit, generating without text: token ids in, token ids out."""

    version = f"EdgeKit {edgekit.__version__}, onnxruntime {ort.__version__}"

    def load(self, model: str, threads: int, max_tokens: int) -> None:
        """Loads a bundle; its cache grows with the text, so there is no room to set aside."""
        del max_tokens
        self._llm = LLM(model, threads=threads)

    def prefill(self, token_ids: Sequence[int]) -> float:
        """As the protocol has it."""
        tokens = self._generate(token_ids)
        started = time.perf_counter()
        next(tokens)
        return time.perf_counter() - started

    def decode(self, token_ids: Sequence[int], steps: int) -> float:
        """As the protocol has it."""
        tokens = self._generate(token_ids)
        next(tokens)
        started = time.perf_counter()
        for _ in range(steps):
            next(tokens)
        return time.perf_counter() - started

    def _generate(self, token_ids: Sequence[int]) -> Iterator[SampledToken]:
        # A new conversation, whose cache has not grown to the longest text so far.
        return self._llm.new_session().generate(token_ids, SamplingParams(), self._llm.vocab_size)


if __name__ == "__main__":
    serve(EdgeKit())
