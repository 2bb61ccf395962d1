"""Prompt lookup: draft what followed the last earlier occurrence of the text's own ending."""

from __future__ import annotations


class PromptLookupDrafter:
    """Drafts for one request from its text so far (prompt and continuation).

    The longest ending of ``longest`` down to ``shortest`` bytes that occurred before is looked up, its latest earlier
    occurrence taken, and the bytes after it copied. A copy that reaches the end of the text runs on into what it has
    just drafted, so that a repeating text is continued in its period. No occurrence, no draft.
    """

    def __init__(self, text: bytes = b"", *, shortest: int = 3, longest: int = 12) -> None:
        """Start with ``text``. Raises ``ValueError`` unless 1 <= shortest <= longest."""
        if not 1 <= shortest <= longest:
            raise ValueError(
                f"shortest={shortest}, longest={longest}; allowed is 1 <= shortest <= longest. Choose lengths in bytes."
            )
        self._lengths = range(longest, shortest - 1, -1)
        self._text = bytearray()
        # Position after the latest occurrence of each n-gram that ends before the end of the text.
        self._after: dict[bytes, int] = {}
        self.extend(text)

    @property
    def text(self) -> bytes:
        """The text so far."""
        return bytes(self._text)

    def extend(self, more: bytes) -> None:
        """Append accepted bytes."""
        for byte in more:
            # The ending that was current until now has become an earlier occurrence.
            end = len(self._text)
            for length in self._lengths:
                if length <= end:
                    self._after[bytes(self._text[end - length : end])] = end
            self._text.append(byte)

    def draft(self, count: int) -> bytes:
        """Up to ``count`` bytes that may follow: ``count`` of them when the ending is known, none when it is not."""
        end = len(self._text)
        for length in self._lengths:
            start = self._after.get(bytes(self._text[end - length : end])) if length <= end else None
            if start is not None:
                copied = self._text[start : start + count]
                period = end - start
                while len(copied) < count:
                    copied.append(copied[len(copied) - period])
                return bytes(copied)
        return b""


def accepted_length(fed: bytes, predicted: bytes, drafted: int) -> int:
    """Greedy acceptance: how many of the ``fed`` tokens stand, the root included (at least 1).

    ``fed`` is the root and the drafts, ``predicted[t]`` the model's choice after ``fed[t]``; draft t stands when it
    and all before it are what the model chose. Only the first ``drafted`` drafts count, the rest of ``fed`` is padding.
    """
    accepted = 1
    while accepted <= drafted and fed[accepted] == predicted[accepted - 1]:
        accepted += 1
    return accepted
