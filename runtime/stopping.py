"""Stop strings in streamed text."""

from __future__ import annotations


class StopChecker:
    """Cuts streamed text at the first stop string.

    The first is the one that is complete first; of several complete at the same character, the longest. So the
    result does not depend on how the text is split into pieces.
    """

    def __init__(self, stop: tuple[str, ...]) -> None:
        """Starts at the beginning of a text.

        Args:
            stop: Non-empty texts that end the generation; none of them for a checker that passes all through.
        """
        self._stop = stop
        self._held = ""
        self._stopped = False

    def feed(self, piece: str) -> tuple[str, bool]:
        """Adds a piece of text.

        Args:
            piece: What follows the pieces fed before; may be empty.

        Returns:
            The text that is now safe to emit, and whether a stop string was reached. A suffix that could still
            become a stop string is held back. Once stopped, nothing more is emitted.
        """
        if self._stopped:
            return "", True
        text = self._held + piece
        # What was emitted before could not begin a stop string, so the search needs nothing further back.
        matches = [(start + len(stop), start) for stop in self._stop if (start := text.find(stop)) >= 0]
        if matches:
            self._held, self._stopped = "", True
            return text[: min(matches)[1]], True
        keep = len(text) - self._overlap(text)
        self._held = text[keep:]
        return text[:keep], False

    def flush(self) -> str:
        """Returns the text held back at the end of the generation; empty if a stop string was reached."""
        held, self._held = self._held, ""
        return held

    def _overlap(self, text: str) -> int:
        """Returns the length of the longest suffix of `text` that begins a stop string."""
        longest = max(map(len, self._stop), default=0)
        lengths = range(min(longest, len(text)), 0, -1)
        return next((n for n in lengths if any(stop.startswith(text[-n:]) for stop in self._stop)), 0)
