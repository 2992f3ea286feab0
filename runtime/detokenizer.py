"""Token ids to text while they are generated."""

from __future__ import annotations

import codecs

from edgekit.runtime.tokenizer import Tokenizer


class StreamingDetokenizer:
    """Emits text as soon as its characters are complete; the pieces add up to `Tokenizer.decode` of all ids.

    Tokens that stand for bytes go through an incremental UTF-8 decoder, which holds back at most the three
    bytes of an unfinished character. Other tokens are decoded together with the token before them, since
    decoders treat the start of a text differently. Either way the work per token is constant.

    Bytes that are not UTF-8 become one U+FFFD per malformed sequence as soon as they are known to be. Whole
    decoding does the same for byte-level tokenizers; with byte fallback it turns every byte of such a run,
    good ones too, into U+FFFD, which a stream cannot take back.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Starts at the beginning of a text.

        Args:
            tokenizer: Of the model that generates the tokens.
        """
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        # What stands for all tokens before the next: the last one that has a text of its own, and the last one.
        self._context: list[int] = []

    def push(self, token_id: int) -> str:
        """Adds a token.

        Args:
            token_id: The token that follows those pushed before.

        Returns:
            The text that is now complete, often empty. Special tokens and unknown ids have none.
        """
        if token_id in self._tokenizer.special_ids or self._tokenizer.id_to_token(token_id) is None:
            return ""
        data = self._tokenizer.token_bytes(token_id)
        if data is not None and (self._context or not data.isascii()):
            self._context = [token_id]
            return self._utf8.decode(data)
        return self.flush() + self._decode_next(token_id)

    def flush(self) -> str:
        """Returns U+FFFD for an unfinished character at the end of the generation, else nothing."""
        return self._utf8.decode(b"", final=True)

    def _decode_next(self, token_id: int) -> str:
        text = self._tokenizer.decode([*self._context, token_id])[len(self._tokenizer.decode(self._context)) :]
        # A token without a text of its own, such as the empty one of some vocabularies, does not show that the text
        # has begun.
        has_text = self._tokenizer.decode([token_id]) != ""
        self._context = [token_id] if has_text else [*self._context[:1], token_id]
        return text
