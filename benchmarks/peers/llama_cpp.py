"""The worker for llama.cpp, through llama-cpp-python; see `peers.protocol`. It needs nothing of this project but that.

The C interface is called as directly as Python can: a decode step is one llama_decode of one token and a look for the
largest logit.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence

import llama_cpp
import numpy as np
import numpy.typing as npt

from peers.protocol import serve

BATCH_TOKENS = 512


# Drops what the library has to say. It is kept here because the library keeps only a pointer to it.
_DISCARD = llama_cpp.llama_log_callback(lambda *_: None)


class LlamaCpp:
    """llama.cpp with its defaults (float16 cache, flash attention where it has it) and our number of threads."""

    version = f"llama.cpp by llama-cpp-python {llama_cpp.__version__}"

    def load(self, model: str, threads: int, max_tokens: int) -> None:
        """Loads a GGUF file and allocates the cache."""
        llama_cpp.llama_log_set(_DISCARD, ctypes.c_void_p())
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(model.encode(), llama_cpp.llama_model_default_params())
        options = llama_cpp.llama_context_default_params()
        options.n_ctx = max_tokens
        options.n_batch = options.n_ubatch = BATCH_TOKENS
        options.n_threads = options.n_threads_batch = threads
        self._context = llama_cpp.llama_init_from_model(self._model, options)
        if not self._context:
            raise RuntimeError(f"llama.cpp cannot load {model!r}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocabulary = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))

    def prefill(self, token_ids: Sequence[int]) -> float:
        """As the protocol has it."""
        self._forget()
        started = time.perf_counter()
        self._read(token_ids)
        return time.perf_counter() - started

    def decode(self, token_ids: Sequence[int], steps: int) -> float:
        """As the protocol has it."""
        self._forget()
        token = int(np.argmax(self._read(token_ids)))
        started = time.perf_counter()
        for _ in range(steps):
            token = int(np.argmax(self._read([token])))
        return time.perf_counter() - started

    def _forget(self) -> None:
        llama_cpp.llama_memory_clear(self._memory, True)  # noqa: FBT003 -- a C function

    def _read(self, token_ids: Sequence[int]) -> npt.NDArray[np.float32]:
        """Appends tokens and returns the last one's logits, the only ones that are computed, shape (V,), float32."""
        for start in range(0, len(token_ids), BATCH_TOKENS):
            part = token_ids[start : start + BATCH_TOKENS]
            tokens = (llama_cpp.llama_token * len(part))(*part)
            if status := llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(tokens, len(part))):
                raise RuntimeError(f"llama_decode failed with {status}")
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        return np.ctypeslib.as_array(logits, (self._vocabulary,))


if __name__ == "__main__":
    serve(LlamaCpp())
