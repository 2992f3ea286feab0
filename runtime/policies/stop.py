"""stop: keeps everything; a generation ends, by `finish_reason` "length", when the cache is full."""

from __future__ import annotations

from edgekit.cache_layout import CacheLayout
from edgekit.errors import UsageError
from edgekit.runtime.policies.base import CachePolicy, PolicyOptions
from edgekit.spec import DecoderSpec


class Stop(CachePolicy):
    """Keeps everything."""

    def __init__(self, options: PolicyOptions, spec: DecoderSpec, layout: CacheLayout) -> None:
        """Refuses a budget, which would mean nothing."""
        super().__init__(options, spec, layout)
        if options.budget_tokens is not None or options.layer_budgets_tokens is not None:
            raise UsageError(
                "KV policy 'stop' keeps all tokens and takes no budget of tokens; use window, snapkv, laq or laq++, or "
                "limit the context by the context size"
            )
