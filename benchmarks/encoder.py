"""Unpadded against padded execution of one encoder, forward and backward, on names of emoji.

    python benchmarks/encoder.py [--quick]

Both ways share weights and rounds; the padded way is a plain dense transformer with a key-padding mask. Their outputs
and gradients are compared before anything is timed. The command fails when the ratio misses its target. On two cores
it takes about half a minute (``--quick``: ten seconds).

Letters: N items, L longest length, H hidden.
"""

import argparse
import platform
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from xpmir_uform.base.keyed_random import Purpose, generator
from xpmir_uform.data.decoding.segment import Segment
from xpmir_uform.data.vocabulary import Modality
from xpmir_uform.datasets.emoji import LANGUAGES, read_names
from xpmir_uform.model.encoder import Encoder
from xpmir_uform.model.head_modules import mean_of_items
from xpmir_uform.model.initialisation import initialise
from xpmir_uform.model.packing import pack
from xpmir_uform.model.rotary import HEAD_WIDTH, rotate, rotation

NAMES, DEPTH, HIDDEN, THREADS = 512, 2, 128, 2
TARGET = 3.0
TOLERANCE = 1e-5


def names() -> list[bytes]:
    """512 names of emoji without skin tones, in six languages and random order."""
    known = sorted({name for of_emoji in read_names(LANGUAGES).values() for name in of_emoji.values()})
    order = generator(0, Purpose.ORDER).permutation(len(known))[:NAMES]
    return [known[index].encode() for index in order]


def unpadded(encoder: Encoder, texts: Sequence[bytes]) -> Tensor:
    """(N, H) mean states, by the package's own path, packing included."""
    packed = pack([Segment(Modality.TEXT, np.frombuffer(t, np.uint8).astype(np.int16), (1, 1, len(t))) for t in texts])
    return mean_of_items(encoder(packed), packed.lengths)


def padded(encoder: Encoder, texts: Sequence[bytes]) -> Tensor:
    """(N, H) mean states, each text padded to the longest, as most libraries do."""
    lengths = np.array([len(text) for text in texts])
    longest = int(lengths.max())
    ids = np.zeros((len(texts), longest), np.int64)
    real = np.arange(longest) < lengths[:, None]
    ids[real] = np.frombuffer(b"".join(texts), np.uint8)
    keep = torch.from_numpy(real)
    steps = torch.zeros((longest, 3), dtype=torch.int32)
    steps[:, 2] = torch.arange(longest)
    turn = rotation(steps, torch.zeros(longest, dtype=torch.int64), torch.float32)
    x = encoder.bytes(torch.from_numpy(ids))  # (N, L, H)
    for block in encoder.blocks:
        x = x + _padded_attention(block.attention, block.attention_norm(x), turn, keep)
        x = x + block.feed_forward(block.feed_forward_norm(x))
    states = encoder.norm(x) * keep.unsqueeze(-1)
    return states.sum(dim=1) / torch.from_numpy(lengths).unsqueeze(1)


def _padded_attention(attention, x: Tensor, turn: Tensor, keep: Tensor) -> Tensor:
    query, key, value = attention.input(x).unflatten(-1, (3, -1, HEAD_WIDTH)).unbind(2)  # (N, L, A, D)
    q, k, v = (part.transpose(1, 2) for part in (rotate(query, turn), rotate(key, turn), value))
    mixed = scaled_dot_product_attention(q, k, v, attn_mask=keep[:, None, None, :])
    return attention.output(mixed.transpose(1, 2).flatten(2))


def answers(way: Callable, encoder: Encoder, texts: Sequence[bytes]) -> list[Tensor]:
    """Mean states and the gradients of all parameters, for a fixed direction."""
    encoder.zero_grad()
    means = way(encoder, texts)
    (means * torch.linspace(-1, 1, means.numel()).view_as(means)).sum().backward()
    return [means.detach(), *(parameter.grad.clone() for parameter in encoder.parameters())]


def largest_difference(encoder: Encoder, texts: Sequence[bytes]) -> float:
    """Of outputs and gradients, relative to the largest value of each tensor (or one)."""
    pairs = zip(answers(unpadded, encoder, texts), answers(padded, encoder, texts), strict=True)
    return max(float((a - b).abs().max() / b.abs().max().clamp(min=1)) for a, b in pairs)


def seconds(ways: Sequence[Callable], encoder: Encoder, texts: Sequence[bytes], rounds: int) -> list[float]:
    """Median seconds of each way, forward and backward; the ways take turns, so that noise meets all alike."""
    taken: list[list[float]] = [[] for _ in ways]
    for _ in range(rounds + 2):
        for way, times in zip(ways, taken, strict=True):
            encoder.zero_grad()
            start = time.perf_counter()
            way(encoder, texts).sum().backward()
            times.append(time.perf_counter() - start)
    return [median(times[2:]) for times in taken]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    rounds = 7 if parser.parse_args().quick else 25
    torch.set_num_threads(THREADS)
    texts = names()
    encoder = Encoder(DEPTH, HIDDEN)
    initialise(encoder, seed=0, depth=DEPTH)
    difference = largest_difference(encoder, texts)
    if difference > TOLERANCE:
        print(f"unpadded and padded differ by {difference:.1e}, more than {TOLERANCE:.0e}: not timed")
        return 1
    times = seconds((unpadded, padded), encoder, texts, rounds)
    return report(texts, times, difference)


def report(texts: Sequence[bytes], times: Sequence[float], difference: float) -> int:
    """Prints the table; returns the exit status."""
    count, size = len(texts), sum(len(text) for text in texts)
    spread = max(len(text) for text in texts) * count / size
    print(f"{count} names, {size} bytes, longest over mean {spread:.2f}; depth {DEPTH}, hidden {HIDDEN}, float32")
    print(f"torch {torch.__version__}, {THREADS} threads, {platform.machine()}; largest difference {difference:.1e}")
    print(f"{'':10}{'ms':>9}{'names/s':>10}{'bytes/s':>10}")
    for way, taken in zip(("unpadded", "padded"), times, strict=True):
        print(f"{way:10}{taken * 1e3:9.1f}{count / taken:10.0f}{size / taken:10.0f}")
    ratio = times[1] / times[0]
    print(f"unpadded / padded: {ratio:.2f} times the names per second (at least {TARGET})")
    return 0 if ratio >= TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
