"""The byte 3-gram: a distribution, the formula by hand, and the order of its strengths."""

from __future__ import annotations

import math

import numpy as np
import pytest

from kda_tooling.demo.ngram import ByteTrigram


@pytest.fixture(scope="module")
def trigram() -> ByteTrigram:
    return ByteTrigram(b"abracadabra, abracadabra! the cat sat on the mat")


@pytest.mark.parametrize("context", [b"ab", b"ra", b"zb", b"zz", b"\0\0"])
def test_probabilities_sum_to_one(trigram: ByteTrigram, context: bytes) -> None:
    every = np.arange(256)
    p = trigram.probabilities(np.full(256, context[0]), np.full(256, context[1]), every)
    assert p.min() > 0
    assert p.sum() == pytest.approx(1.0, abs=1e-12)


def test_witten_bell_by_hand() -> None:
    # Counts of "aab": a 2, b 1; after a: a 1, b 1; after aa: b 1.
    p1 = (1 + 2 * (1 / 256)) / (3 + 2)
    p2 = (1 + 2 * p1) / (2 + 2)
    p3 = (1 + 1 * p2) / (1 + 1)
    given = (np.array([ord("a")]), np.array([ord("a")]), np.array([ord("b")]))
    assert ByteTrigram(b"aab").probabilities(*given)[0] == pytest.approx(p3, rel=1e-12)


def test_text_like_the_training_text_is_cheaper(trigram: ByteTrigram) -> None:
    assert trigram.bits(b"abracadabra") < trigram.bits(b"xqzjwvkpyfg")


def test_bits_add_up_byte_by_byte(trigram: ByteTrigram) -> None:
    text = b"the cat"
    parts = np.frombuffer(b"\0\0" + text, np.uint8).astype(np.int64)
    p = trigram.probabilities(parts[:-2], parts[1:-1], parts[2:])
    assert trigram.bits(text) == pytest.approx(-sum(math.log2(x) for x in p))


def test_too_short_a_text_is_refused() -> None:
    with pytest.raises(ValueError, match="text has 2 bytes"):
        ByteTrigram(b"ab")
