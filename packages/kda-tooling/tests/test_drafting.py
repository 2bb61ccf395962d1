"""Prompt lookup against a search by hand, and greedy acceptance."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kda_tooling.demo.drafting import PromptLookupDrafter, accepted_length


def search(text: bytes, count: int, shortest: int, longest: int) -> bytes:
    """The same lookup by scanning the text."""
    for length in range(longest, shortest - 1, -1):
        at = text.rfind(text[-length:], 0, len(text) - 1) if length < len(text) else -1
        if at >= 0:
            grown = bytearray(text)
            for i in range(count):
                grown.append(grown[at + length + i])
            return bytes(grown[len(text) :])
    return b""


@given(st.lists(st.binary(max_size=12).map(lambda b: bytes(97 + x % 3 for x in b)), max_size=5), st.integers(0, 7))
def test_draft_is_what_followed_the_latest_longest_match(parts: list[bytes], count: int) -> None:
    drafter = PromptLookupDrafter(shortest=2, longest=4)
    for part in parts:
        drafter.extend(part)
    assert drafter.text == b"".join(parts)
    assert drafter.draft(count) == search(drafter.text, count, 2, 4)


@pytest.mark.parametrize(
    ("text", "draft"),
    [
        (b"self.name = name\nself.", b"name"),
        (b"ab" * 6, b"abab"),
        (b"------", b"----"),
        (b"nothing twice", b""),
        (b"", b""),
    ],
)
def test_examples(text: bytes, draft: bytes) -> None:
    assert PromptLookupDrafter(text).draft(4) == draft


def test_bad_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="shortest=5, longest=4"):
        PromptLookupDrafter(shortest=5, longest=4)


@pytest.mark.parametrize(
    ("fed", "predicted", "drafted", "accepted"),
    [
        (b"rabc", b"abcd", 3, 4),
        (b"rabc", b"abxd", 3, 3),
        (b"rabc", b"xbcd", 3, 1),
        # A draft that is right after a wrong one does not count, nor does padding that happens to be right.
        (b"rabc", b"axcd", 3, 2),
        (b"r\0\0\0", b"\0\0\0\0", 0, 1),
        (b"ra\0\0", b"a\0\0\0", 1, 2),
        (b"r", b"a", 0, 1),
    ],
)
def test_accepted_length(fed: bytes, predicted: bytes, drafted: int, accepted: int) -> None:
    assert accepted_length(fed, predicted, drafted) == accepted
