"""Byte 3-gram with Witten-Bell interpolation: the yardstick for the demo model's bits per byte."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

VOCAB = 256


class ByteTrigram:
    """P(c | two bytes before), interpolated down to the uniform distribution over 256 bytes.

    Witten-Bell (Chen and Goodman 1998, section 2.6): with n(h) the count of context h and d(h) the number of
    different bytes seen after it, ``P(c | h) = (n(h c) + d(h) P(c | h')) / (n(h) + d(h))``, h' one byte shorter.
    A context never seen falls through to h' whole.
    """

    def __init__(self, text: bytes) -> None:
        """Count ``text`` (at least 3 bytes); needs about 200 MB for a moment. Raises ``ValueError`` when shorter."""
        if len(text) < 3:
            raise ValueError(f"text has {len(text)} bytes; a 3-gram needs at least 3. Give more training text.")
        data = np.frombuffer(text, dtype=np.uint8).astype(np.int64)
        self._unigram = np.bincount(data, minlength=VOCAB)
        self._bigram = np.bincount(data[:-1] * VOCAB + data[1:], minlength=VOCAB**2).reshape(VOCAB, VOCAB)
        codes = (data[:-2] * VOCAB + data[1:-1]) * VOCAB + data[2:]
        self._trigram = np.bincount(codes, minlength=VOCAB**3).astype(np.uint32).reshape(VOCAB**2, VOCAB)

    def probabilities(
        self, before: NDArray[np.int64], last: NDArray[np.int64], byte: NDArray[np.int64]
    ) -> NDArray[np.float64]:
        """P(byte | before, last), elementwise over three equally long arrays of byte values; float64."""
        p = self._interpolate(self._unigram[None], np.zeros_like(byte), byte, np.full(byte.shape, 1.0 / VOCAB))
        p = self._interpolate(self._bigram, last, byte, p)
        return self._interpolate(self._trigram, before * VOCAB + last, byte, p)

    @staticmethod
    def _interpolate(
        counts: NDArray[np.integer], context: NDArray[np.int64], byte: NDArray[np.int64], lower: NDArray[np.float64]
    ) -> NDArray[np.float64]:
        total = counts.sum(axis=1, dtype=np.int64)[context]
        distinct = np.count_nonzero(counts, axis=1)[context]
        seen = total > 0
        mixed = (counts[context, byte] + distinct * lower) / np.where(seen, total + distinct, 1)
        return np.where(seen, mixed, lower)

    def bits(self, text: bytes) -> float:
        """Total bits to code ``text`` byte by byte, with two zero bytes standing before its first byte."""
        data = np.frombuffer(b"\0\0" + text, dtype=np.uint8).astype(np.int64)
        return float(-np.log2(self.probabilities(data[:-2], data[1:-1], data[2:])).sum())
