"""What a conversation does when its KV cache is full: one method per file, by the names of `--kv-policy`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from edgekit.errors import UnsupportedError, UsageError, one_of
from edgekit.runtime.policies.base import CachePolicy, PolicyOptions
from edgekit.runtime.policies.laq import Laq
from edgekit.runtime.policies.snapkv import SnapKV
from edgekit.runtime.policies.stop import Stop
from edgekit.runtime.policies.window import Window

if TYPE_CHECKING:
    from edgekit.runtime.step import Backend
    from edgekit.spec import DecoderSpec

POLICIES: Mapping[str, type[CachePolicy]] = {
    "stop": Stop,
    "window": Window,
    "snapkv": SnapKV,
    "laq": Laq,
    "laq++": Laq,
}


def make_policy(options: PolicyOptions, spec: DecoderSpec, backend: Backend) -> CachePolicy:
    """Makes the policy of one conversation.

    Raises:
        UsageError: There is no such policy, or its budget is out of range.
        UnsupportedError: The model or its bundle lacks what the policy needs.
    """
    if options.name not in POLICIES:
        raise UsageError(f"KV policy {one_of(options.name, POLICIES)}")
    policy = POLICIES[options.name](options, spec, backend.layout)
    if policy.needs_attention_mass and not backend.has_attention_mass:
        raise UnsupportedError(
            f"KV policy {options.name!r} needs a bundle that says which tokens are attended to; export it with "
            "--attention-scores, or use the policy 'stop' or 'window'"
        )
    return policy


__all__ = ["POLICIES", "CachePolicy", "PolicyOptions", "make_policy"]
