"""Masking: which tokens of a segment are hidden, what stands in their place, and what is to be told.

Letters: T tokens of one item, K masked tokens, S spans, P values of one patch.
"""

from dataclasses import replace

import numpy as np

from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.vocabulary import Slot

BYTES = 256
LONGEST_MEAN = 10_000
"""The greatest mean length of a span."""

EPSILON = 1e-6
"""Added to the variance of a patch, whose values lie in -1..1: a patch of one colour has a target of zeros."""


def rounded(value: float, draw: np.random.Generator) -> int:
    """An integer next to ``value`` >= 0 whose expectation is ``value``."""
    whole = int(value)
    return whole + int(draw.random() < value - whole)


def span_level(length: int, probability: float, mean: float, draw: np.random.Generator) -> int:
    """The number of bytes at which :func:`spans` stops.

    Lengths that are geometric with this mean, added until they reach a level L, exceed it by a geometric number less
    one, whatever L is, since the geometric distribution has no memory. Cut at the end of the text, their sum is
    ``g(L) = L + (mean - 1) * (1 - q ** (length - L))`` in the mean, with ``q = 1 - 1 / mean`` and ``g(0) = 0``. ``g``
    rises from 0 to ``length``, so that some level, or a draw between two that follow one another, makes the
    expectation ``probability * length``.
    """
    level = np.arange(length + 1)
    reached = level + (mean - 1) * (1 - (1 - 1 / mean) ** (length - level))
    reached[0] = 0
    wanted = probability * length
    below = int(np.searchsorted(reached, wanted, side="right")) - 1
    if below >= length:
        return length
    return below + int(draw.random() < (wanted - reached[below]) / (reached[below + 1] - reached[below]))


def spans(length: int, probability: float, mean: float, draw: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Spans of a text: drawn one after another until enough bytes are chosen, then laid at random.

    The expected number of chosen bytes is exactly ``probability * length``; each draw is within one span of it: less
    than ``mean`` below, less than its last span above. Spans never overlap and touch only where there is no room; as in
    any such layout, the first and the last bytes are chosen less often than others. A last span that would pass the
    length of the text is cut, so that the mean length is ``mean`` in texts that are much longer than a span. Spans of
    geometric length are those of SpanBERT (Joshi et al., TACL 2020, section 3.1).

    Args:
        length: of the text, at least 0.
        probability: in [0, 1]: 0 chooses nothing, 1 everything.
        mean: of the lengths, at least 1.

    Returns:
        Starts and lengths, (S,) int64 each, in reading order.
    """
    level = span_level(length, probability, mean, draw)
    lengths = draw.geometric(1 / mean, size=level)
    ends = np.minimum(np.cumsum(lengths), length)
    count = int(np.searchsorted(ends, level)) + 1 if level else 0
    # Shuffled: the last span drawn is longer than the others in the mean, and would lie at the end.
    lengths = draw.permutation(np.diff(ends[:count], prepend=0))
    shown = length - int(lengths.sum())
    if count <= shown + 1:
        before = np.sort(draw.choice(shown + 1, count, replace=False))
    else:
        before = np.sort(draw.integers(0, shown + 1, count))
    return before + np.cumsum(lengths) - lengths, lengths


def places_of(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """(K,) int64 ascending: every place of some spans."""
    first = np.repeat(starts - np.cumsum(lengths) + lengths, lengths)
    return first + np.arange(len(first))


def corrupted(
    chosen: np.ndarray, replace_fraction: float, random_fraction: float, draw: np.random.Generator
) -> np.ndarray:
    """(K,) int16: what stands in the place of the chosen bytes (K,), each by itself.

    ``Slot.MASK`` with probability ``replace_fraction``, a uniform byte with ``random_fraction``, else the byte itself
    (BERT, Devlin et al., NAACL 2019, section 3.1).
    """
    fate = draw.random(len(chosen))
    random = draw.integers(0, BYTES, len(chosen))
    kept = np.where(fate < replace_fraction + random_fraction, random, chosen)
    return np.where(fate < replace_fraction, Slot.MASK, kept).astype(np.int16)


def mask_text(
    text: Segment, probability: float, mean_span: float, fractions: tuple[float, float], draw: np.random.Generator
) -> Segment:
    """The text with some of its bytes chosen by :func:`spans` and replaced by :func:`corrupted`.

    Args:
        fractions: of the chosen bytes that are masked, and that become random ones.
    """
    if text.values[0] == Slot.EMPTY:
        return text
    places = places_of(*spans(text.tokens, probability, mean_span, draw))
    truth = text.values[places].astype(np.int64)
    values = text.values.copy()
    values[places] = corrupted(truth, *fractions, draw)
    return replace(text, values=values, masked=places, truth=truth)


def mask_patches(segment: Segment, ratio: float, draw: np.random.Generator) -> Segment:
    """The picture, video or sound with ``ratio`` of its patches hidden, chosen uniformly.

    Their number is ``ratio * T``, rounded up or down at random such that this is its expectation.
    """
    count = rounded(ratio * segment.tokens, draw)
    places = np.sort(draw.choice(segment.tokens, count, replace=False))
    return replace(segment, masked=places, truth=standardised(segment.values[places]))


def standardised(patches: np.ndarray) -> np.ndarray:
    """(K, P) float32: each patch less its own mean, in units of its own deviation (MAE, He et al., CVPR 2022)."""
    wide = patches.astype(np.float64)
    return ((wide - wide.mean(axis=1, keepdims=True)) / deviation(wide)).astype(np.float32)


def deviation(patches: np.ndarray) -> np.ndarray:
    """(K, 1) float64: the deviation of each patch, never 0."""
    return np.sqrt(patches.var(axis=1, keepdims=True) + EPSILON)
