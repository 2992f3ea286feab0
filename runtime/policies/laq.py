"""LAQ, Lookahead Q-Cache (Wang et al. 2025, arXiv 2505.20334): of a prompt, keep what its answer will attend to.

The end of a prompt need not ask for what the answer needs. So a few tokens of the answer are drawn first, cheaply:

    1  the prompt is read; SnapKV compresses a copy of its cache to the budget
    2  up to `PSEUDO_TOKENS` tokens are generated greedily over the copy (the first from the prompt's own logits)
    3  one step reads them over the whole prompt; what they attend to scores its tokens, as SnapKV scores them
    4  the whole cache is compressed by these scores; pseudo tokens and copy are dropped

LAQ observes the pseudo tokens only, and keeps no token in any case. LAQ++ observes the last `PROMPT_TOKENS` tokens of
the prompt as well, and keeps them.

The paper caches the queries that step 2 makes over the compressed cache. Step 3 makes them anew over the whole one:
what attention is computed from never leaves the graph, the queries are those of the uncompressed model, and the scores
come with the true causal mask (the released code masks some of the prompt's tail wrongly). It costs one step of at most
16 tokens per prompt. Peak memory is that of the whole prompt and the copy: what is saved is saved while decoding.
"""

from __future__ import annotations

import numpy as np

from edgekit.cache_layout import CacheLayout
from edgekit.runtime.cache import KVCache
from edgekit.runtime.policies.base import PolicyOptions, ReadPrompt
from edgekit.runtime.policies.snapkv import SnapKV
from edgekit.runtime.step import causal_step
from edgekit.spec import DecoderSpec

PSEUDO_TOKENS = 8
PROMPT_TOKENS = 8


class Laq(SnapKV):
    """Compresses every prompt once a few tokens of its answer were looked ahead."""

    def __init__(self, options: PolicyOptions, spec: DecoderSpec, layout: CacheLayout) -> None:
        """As SnapKV, whose budget the copy has."""
        super().__init__(options, spec, layout)
        self._prompt_tokens = PROMPT_TOKENS if options.name == "laq++" else 0

    def after_prompt(self, prompt: ReadPrompt) -> None:
        """Compresses the cache, if a layer holds more than its budget."""
        if not self.exceeds_budget(prompt.cache):
            return
        copied = prompt.cache.selected(self.choose(prompt.cache, prompt.attention_mass, prompt.observed_tokens))
        pseudo = self._look_ahead(prompt, copied)
        # A turn shorter than the observed end: what came before it cannot be dropped and read again.
        repeated = min(self._prompt_tokens, prompt.observed_tokens)
        cache = prompt.cache
        cache.truncate(cache.length - repeated)
        token_ids = np.array([*prompt.token_ids[len(prompt.token_ids) - repeated :], *pseudo], np.int64)
        # The text is as long as it was when the prompt was read: pseudo tokens do not turn its keys otherwise.
        rows = np.array([len(token_ids) - 1])
        inputs = causal_step(token_ids, cache.next_position, rows, prompt.sequence_length)
        outputs = prompt.runner.step(inputs)
        cache.reserve(repeated)
        cache.append(outputs.stacks, range(repeated))
        cache.become(cache.selected(self.choose(cache, outputs.attention_mass, repeated), give_back=True))

    def _look_ahead(self, prompt: ReadPrompt, copied: KVCache) -> list[int]:
        """Generates greedily over a compressed cache, up to the end of the answer."""
        runner, tokens, logits = prompt.start(copied), list[int](), prompt.logits
        while True:
            tokens.append(int(logits.argmax()))
            if tokens[-1] in self.spec.eos_token_ids or copied.room == 0 or len(tokens) == PSEUDO_TOKENS:
                break
            last, row = np.array(tokens[-1:]), np.zeros(1, np.int64)
            outputs = runner.step(causal_step(last, copied.next_position, row, prompt.sequence_length))
            copied.append(outputs.stacks, [0])
            logits = outputs.logits[0]
        return tokens
