from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from edgekit.blocks import QuantizedBlocks
from edgekit.checkpoint import open_checkpoint
from edgekit.compress.decoder import stream_logits

Tiny = Callable[..., Any]
VARIANTS = ("llama", "llama_tied", "llama_bias", "llama_wide_heads", "llama_linear_rope", "llama_llama3_rope", "qwen3", "qwen3_bias", "gpt_neox", "gpt_neox_sequential", "gpt_neox_tied")

@pytest.mark.parametrize("variant", VARIANTS)
def test_f32(variant, tiny_gguf, tiny_checkpoint, hugging_face, token_ids) -> None:
    with open_checkpoint(tiny_gguf(variant, "F32")) as c:
        got = stream_logits(c, token_ids)
    with torch.no_grad():
        want = hugging_face(tiny_checkpoint(variant))(torch.from_numpy(token_ids)).logits.numpy()
    print(np.abs(got-want).max(), np.abs(want).max())
    np.testing.assert_allclose(got, want, atol=1e-4)
