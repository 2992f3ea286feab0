"""The cache behind `EdgeModelForCausalLM`: one conversation for each row of a batch.

To transformers a batch is a rectangle, and padding makes its rows equally long. Here padding does not exist: a row's
conversation holds the row's own tokens, at positions that count them from 0, so that each row computes exactly what it
would compute alone.

    column   0  1  2  3  4
    row 0    ·  ·  a  b  c     conversation of 3 tokens
    row 1    d  e  f  g  h     conversation of 5 tokens
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import numpy.typing as npt
import torch
from transformers import Cache

from edgekit.errors import DoesNotFitError, UnsupportedError, UsageError
from edgekit.runtime.cache import BUCKET_TOKENS, KVCache
from edgekit.runtime.memory_plan import cache_bytes
from edgekit.runtime.prefill import ReadOptions, read_chunks
from edgekit.runtime.session import SessionLimits
from edgekit.runtime.step import Backend
from edgekit.sizes import format_size
from edgekit.spec import DecoderSpec

if TYPE_CHECKING:
    from edgekit.runtime.llm import LLM

Tokens = npt.NDArray[np.int64]
Flags = npt.NDArray[np.bool_]


class Conversation:
    """The tokens of one row."""

    def __init__(self, backend: Backend, spec: DecoderSpec, limits: SessionLimits) -> None:
        """Starts empty.

        Args:
            backend: Runs the steps.
            spec: The decoder.
            limits: What the conversation may take.
        """
        self._backend = backend
        self._spec = spec
        self._limits = limits
        self._cache = KVCache(backend.layout, limits.max_tokens, limits.max_positions)
        self._runner = backend.runner(self._cache)
        self._token_ids: Tokens = np.zeros(0, np.int64)
        self._rope_range = 0

    @property
    def length(self) -> int:
        """Tokens so far."""
        return self._cache.length

    def check_room(self, tokens: int) -> None:
        """Refuses more tokens than the context has room for.

        Raises:
            DoesNotFitError: The row would become longer than the context, or than there is room for.
        """
        self._cache.check_room(tokens)

    def largest_bytes(self, tokens: int) -> int:
        """Returns the most bytes that the keys and values may take with so many more tokens."""
        # A cache that has to grow grows by an eighth, and everything comes in buckets.
        slots = (self.length + tokens) * 9 // 8 + BUCKET_TOKENS
        return cache_bytes(self._backend.layout, min(slots, self._limits.max_tokens))

    def read(self, token_ids: Tokens, wanted: Tokens, logits: npt.NDArray[np.float32]) -> None:
        """Appends tokens.

        Args:
            token_ids: The next tokens, shape (n,), int64.
            wanted: Those of them whose logits are wanted, ascending, shape (w,), int64.
            logits: Where these go, shape (w, V), float32.

        Raises:
            DoesNotFitError: The row becomes longer than the context, or than there is room for.
        """
        end = self.length + len(token_ids)
        if self._spec.rope_range(end) != self._rope_range:
            # The keys in the cache carry rotations that a text of this length does not have.
            self._rope_range = self._spec.rope_range(end)
            token_ids, wanted = np.concatenate([self._token_ids, token_ids]), wanted + self.length
            self.forget(self.length)
        done = 0
        options = ReadOptions(sequence_length=end, chunk_tokens=self._limits.chunk_tokens)
        for chunk in read_chunks(self._runner, self._cache, token_ids, wanted, options):
            self._token_ids = np.concatenate([self._token_ids, chunk.token_ids])
            logits[done : done + len(chunk.logits)] = chunk.logits
            done += len(chunk.logits)

    def forget(self, tokens: int) -> None:
        """Drops the last tokens."""
        kept = self.length - tokens
        self._cache.truncate(kept)
        self._token_ids = self._token_ids[:kept]

    def copy(self) -> Conversation:
        """Returns a conversation of its own that goes on from here."""
        twin = copy.copy(self)
        twin._cache = copy.deepcopy(self._cache)
        twin._runner = self._backend.runner(twin._cache)
        return twin


class ConversationCache(Cache):
    """What `EdgeModelForCausalLM` returns as cache, and takes back.

    transformers may ask it for its length, reorder its rows for beam search and drop its last columns; the keys and
    values themselves are EdgeKit's.
    """

    def __init__(self, llm: LLM) -> None:
        """Starts without rows; the first call of `read` says how many there are.

        Args:
            llm: Its backend runs the steps, and its plan says what the rows may take together.
        """
        super().__init__(layers=[])
        self.backend = llm.backend
        self._spec = llm.bundle.manifest.spec
        self._limits = llm.limits
        self._memory = llm.plan.memory
        self._rows: list[Conversation] = []
        self._present: Flags = np.zeros((0, 0), np.bool_)

    @property
    def present(self) -> Flags:
        """Where the rows have tokens rather than padding, shape (B, columns), bool."""
        return self._present

    def positions(self, present: Flags) -> Tokens:
        """Returns the positions of the next columns' tokens, shape (B, S), int64; those of padding mean nothing.

        Args:
            present: Where the next columns have tokens, shape (B, S), bool.

        Raises:
            UsageError: The batch has another number of rows than before.
        """
        if self._rows:
            self._check_rows(len(present))
        lengths = np.array([row.length for row in self._rows] or [0] * len(present), np.int64)
        positions: Tokens = lengths[:, None] + present.cumsum(axis=1) - 1
        return positions

    def read(self, token_ids: Tokens, present: Flags, columns: Tokens) -> npt.NDArray[np.float32]:
        """Appends columns.

        Args:
            token_ids: shape (B, S), int64.
            present: Where they are tokens rather than padding, shape (B, S), bool.
            columns: Columns whose logits are wanted, in any order, shape (C,), int64.

        Returns:
            Logits, shape (B, C, V), float32; 0 where there is padding.

        Raises:
            UsageError: The batch has another number of rows than before.
            DoesNotFitError: A row becomes longer than the context or than there is room for, or all of them together
                do not fit into the memory budget.
        """
        is_new = not self._rows
        if is_new:
            self._rows = [Conversation(self.backend, self._spec, self._limits) for _ in token_ids]
            self._present = np.zeros((len(token_ids), 0), np.bool_)
        self._check_rows(len(token_ids))
        try:  # before any row is read, so that a refusal changes none
            for row, here in zip(self._rows, present, strict=True):
                row.check_room(int(here.sum()))
            self._check_memory(self._rows, [int(here.sum()) for here in present])
        except DoesNotFitError:
            if is_new:
                self.reset()
            raise
        logits = np.zeros((len(token_ids), len(columns), self._spec.vocab_size), np.float32)
        order = np.argsort(columns)
        read: dict[bytes, int] = {}
        for index, (ids, here) in enumerate(zip(token_ids, present, strict=True)):
            first = read.setdefault(ids.tobytes() + here.tobytes(), index)
            if is_new and first != index:  # the same prompt again, as beam search has it
                self._rows[index], logits[index] = self._rows[first].copy(), logits[first]
                continue
            found = order[here[columns[order]]]
            kept = np.empty((len(found), self._spec.vocab_size), np.float32)
            self._rows[index].read(ids[here], here.cumsum()[columns[found]] - 1, kept)
            logits[index, found] = kept
        self._present = np.concatenate([self._present, present], axis=1)
        return logits

    def _check_memory(self, rows: Sequence[Conversation], tokens: Sequence[int]) -> None:
        """Refuses rows that take more than the plan's one conversation and what is left of the budget."""
        needed = sum(row.largest_bytes(more) for row, more in zip(rows, tokens, strict=True))
        left = self._memory.budget_bytes - self._memory.total_bytes + self._memory.cache_bytes
        if len(rows) > 1 and needed > left:
            raise DoesNotFitError(
                f"the KV caches of {len(rows)} rows take up to {format_size(needed)}, and {format_size(left)} of the "
                "memory budget are left for them; use smaller batches or fewer beams, or give more memory"
            )

    def _check_rows(self, count: int) -> None:
        if len(self._rows) != count:
            raise UsageError(
                f"input_ids has {count} rows, but the cache {len(self._rows)}; give each batch its own cache"
            )

    def get_seq_length(self, layer_idx: int = 0) -> int:  # noqa: ARG002 - all layers have the same
        """Returns the number of columns, padding included."""
        return int(self._present.shape[1])

    def crop(self, tokens_to_remove: int) -> None:
        """Drops the last columns.

        Args:
            tokens_to_remove: How many, negated, as transformers counts them.

        Raises:
            UsageError: It is positive, or there are fewer columns.
        """
        count = -tokens_to_remove
        if not 0 <= count <= self.get_seq_length():
            raise UsageError(
                f"crop({tokens_to_remove}) of {self.get_seq_length()} columns; give how many to remove, negated"
            )
        kept = self.get_seq_length() - count
        for row, dropped in zip(self._rows, self._present[:, kept:].sum(axis=1), strict=True):
            row.forget(int(dropped))
        self._present = self._present[:, :kept]

    def reset(self) -> None:
        """Forgets all rows."""
        self._rows, self._present = [], np.zeros((0, 0), np.bool_)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        """Makes row i what row ``beam_idx[i]`` was."""
        self._select(beam_idx.tolist())

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keeps the rows with these indices, or those where a mask is true."""
        self._select(np.arange(len(self._rows))[indices.numpy()].tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeats each row."""
        self._select([index for index in range(len(self._rows)) for _ in range(repeats)])

    def _select(self, indices: Iterable[int]) -> None:
        chosen, taken = list(indices), set[int]()
        self._check_memory([self._rows[index] for index in chosen], [0] * len(chosen))
        rows = []
        for index in chosen:
            # Copying is only for those that go on in more than one way.
            rows.append(self._rows[index].copy() if index in taken else self._rows[index])
            taken.add(index)
        self._rows, self._present = rows, self._present[chosen]

    def update(self, *_: Any, **__: Any) -> NoReturn:
        """Refuses keys and values of other models."""
        raise UnsupportedError("this cache belongs to an EdgeModelForCausalLM; give other models a DynamicCache")

    def __len__(self) -> int:
        return len(self._spec.layers)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(rows={len(self._rows)}, columns={self.get_seq_length()})"

    @property
    def batch_size(self) -> int:
        """Rows, or -1 before there are any."""
        return len(self._rows) or -1

    @property
    def is_initialized(self) -> bool:
        """Whether there are rows."""
        return bool(self._rows)

    @property
    def is_compileable(self) -> bool:
        """False: torch compiles nothing here."""
        return False

    @property
    def is_croppable(self) -> bool:
        """True: what was dropped leaves no trace."""
        return True

    @property
    def is_sliding(self) -> list[bool]:
        """False for every layer: windows are EdgeKit's own business."""
        return [False] * len(self)

    @property
    def is_linear(self) -> list[bool]:
        """False for every layer."""
        return [False] * len(self)
