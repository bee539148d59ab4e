"""Decoding, and what the loader and the modalities cost a step.

    python benchmarks/inputs.py [--quick]

Three tables: files decoded per second of one processor; a forward pass over a batch of four modalities against texts of
as many tokens (at most 1.10 times their time); and the share of a training step of the quickstart's size that waits for
two loader workers (under 5 %). Fails where a target is missed. On two cores it takes about two minutes.
"""

import argparse
import io
import platform
import sys
import time
from collections.abc import Callable, Sequence
from fractions import Fraction
from statistics import median

import av
import numpy as np
import soundfile
import torch
from PIL import Image

from xpmir_uform import (
    AudioShape,
    Augmentation,
    BagSampler,
    ContrastiveLoss,
    ImageShape,
    Item,
    Modality,
    PooledHead,
    RankedForm,
    UFormEncoder,
    VideoShape,
)
from xpmir_uform.data.decoding.registry import decode
from xpmir_uform.data.decoding.segment import Segment, blank_text
from xpmir_uform.datasets import EmojiBags, EmojiCollection
from xpmir_uform.losses.base import Answers
from xpmir_uform.model import pack
from xpmir_uform.reports.tables import table
from xpmir_uform.trainer.loader import LoadedStep, StepDataset, iterate_steps
from xpmir_uform.trainer.step.exact import Engine, Microbatch, Share, exact_step

DEPTH, HIDDEN, BATCH, WORKERS, THREADS = 2, 128, 96, 2, 2
"""Of the quickstart, but for the workers."""

RATE = 16_000
MIXED_TARGET, WAIT_TARGET = 1.10, 0.05
SHAPES = {
    "image": ImageShape.C(patch_side=8, max_side=64),
    "video": VideoShape.C(patch_side=8, tube_frames=2, max_side=64, max_frames=32),
    "audio": AudioShape.C(chunk_samples=400, sample_rate=RATE, max_seconds=10.0),
}


def scene(height: int, width: int, frame: int = 0) -> np.ndarray:
    """(H, W, 3) uint8: smooth waves that move, as hard to code as a photograph of soft things."""
    y, x = np.mgrid[:height, :width]
    waves = [np.sin((x * a + y * b) / 20 + frame / 5 + a) for a, b in ((1.0, 0.3), (0.2, 1.0), (0.7, -0.7))]
    return ((np.stack(waves, axis=-1) + 1) * 127.5).astype(np.uint8)


def picture(name: str, height: int, width: int) -> bytes:
    """An image file."""
    file = io.BytesIO()
    Image.fromarray(scene(height, width)).save(file, name)
    return file.getvalue()


def video(frames: int, height: int, width: int) -> bytes:
    """An H.264 file in MP4."""
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as output:
        stream = output.add_stream("libx264", rate=10)
        stream.height, stream.width, stream.pix_fmt, stream.thread_count = height, width, "yuv420p", 1
        for number in range(frames):
            frame = av.VideoFrame.from_ndarray(scene(height, width, number), format="rgb24")
            frame.pts, frame.time_base = number, Fraction(1, 10)
            output.mux(stream.encode(frame))
        output.mux(stream.encode(None))
    return file.getvalue()


def sound(name: str, seconds: float, rate: int) -> bytes:
    """A chirp, in a file by libsndfile."""
    steps = np.arange(int(seconds * rate)) / rate
    file = io.BytesIO()
    soundfile.write(file, 0.5 * np.sin(2 * np.pi * (200 + 300 * steps) * steps), rate, format=name)
    return file.getvalue()


def files() -> dict[str, Item]:
    """One item of each kind that is timed."""
    contents = {
        "text of 100 bytes": (Modality.TEXT, b"a name of an emoji, " * 5),
        "PNG, 64 x 64": (Modality.IMAGE, picture("PNG", 64, 64)),
        "JPEG, 640 x 480": (Modality.IMAGE, picture("JPEG", 480, 640)),
        "JPEG, 4000 x 3000": (Modality.IMAGE, picture("JPEG", 3000, 4000)),
        "H.264, 16 frames, 64 x 64": (Modality.VIDEO, video(16, 64, 64)),
        "H.264, 32 frames, 640 x 480": (Modality.VIDEO, video(32, 480, 640)),
        "WAV, 2 s at 16 kHz": (Modality.AUDIO, sound("WAV", 2.0, RATE)),
        "FLAC, 2 s at 44.1 kHz": (Modality.AUDIO, sound("FLAC", 2.0, 44_100)),
        "MP3, 2 s at 44.1 kHz": (Modality.AUDIO, sound("MP3", 2.0, 44_100)),
        "Ogg Vorbis, 2 s at 44.1 kHz": (Modality.AUDIO, sound("OGG", 2.0, 44_100)),
    }
    return {name: Item(modality, content, 0) for name, (modality, content) in contents.items()}


def rate_of(run: Callable[[], object], seconds: float) -> float:
    """Runs per second of one processor, over at least so long and three runs; the first run is left out.

    The thread's own time, which other programs on the machine do not lengthen.
    """
    run()
    times: list[float] = []
    while sum(times) < seconds or len(times) < 3:
        start = time.thread_time()
        run()
        times.append(time.thread_time() - start)
    return 1 / median(times)


def decoding(model: UFormEncoder, seconds: float) -> None:
    """Prints the files decoded per second."""
    rows = []
    for name, item in files().items():
        tokens = decode(item, model.shapes).tokens
        rate = rate_of(lambda item=item: decode(item, model.shapes), seconds)
        rows.append([name, item.modality.name.lower(), str(tokens), f"{rate:,.0f}", f"{rate * tokens:,.0f}"])
    print(table(["file", "modality", "tokens", "items/s", "tokens/s"], rows))


def four_modalities(model: UFormEncoder) -> list[Segment]:
    """A batch of four modalities: 32 texts, 32 images, 4 videos and 8 sounds, of like numbers of tokens each."""
    kinds = files()
    counts = {"text of 100 bytes": 32, "PNG, 64 x 64": 32, "H.264, 16 frames, 64 x 64": 4, "WAV, 2 s at 16 kHz": 8}
    return [decode(kinds[name], model.shapes) for name, count in counts.items() for _ in range(count)]


@torch.no_grad()
def mixing(model: UFormEncoder, repeats: int) -> float:
    """The time of a forward pass over four modalities, over that of texts of the same numbers of tokens."""
    mixed = four_modalities(model)
    texts = [blank_text(segment.tokens) for segment in mixed]
    batches = {"four modalities": pack(mixed), "as texts": pack(texts)}
    times: dict[str, list[float]] = {name: [] for name in batches}
    for _ in range(repeats + 2):
        for name, packed in batches.items():
            start = time.perf_counter()
            model(packed)
            times[name].append(time.perf_counter() - start)
    ratio = median(a / b for a, b in zip(*(taken[2:] for taken in times.values()), strict=True))
    rows = [[name, str(packed.tokens), f"{1e3 * median(times[name][2:]):.1f}"] for name, packed in batches.items()]
    print(table(["forward pass", "tokens", "milliseconds"], rows))
    print(f"four modalities / as texts: {ratio:.3f} (at most {MIXED_TARGET})")
    return ratio


def waiting(model: UFormEncoder, steps: int) -> float:
    """The share of training steps that waits for the loader."""
    sampler = BagSampler.C(source=EmojiBags.C(collection=EmojiCollection.installed())).instance()
    sampler.initialize(np.random.RandomState(1))
    augmentation = Augmentation.C(noise=8.0, drop=0.1).instance()
    dataset = StepDataset(sampler, BATCH, model.shapes, augmentation=augmentation)
    sampler.source.emoji  # noqa: B018 - drawn before the workers start
    optimizer = torch.optim.AdamW(model.parameters())
    loader = iterate_steps(dataset, 0, WORKERS)
    waits, trains = [], []
    for _ in range(steps + 5):
        start = time.perf_counter()
        loaded = next(loader)
        ready = time.perf_counter()
        train(model, loaded, optimizer)
        waits.append(ready - start)
        trains.append(time.perf_counter() - ready)
    share = sum(waits[5:]) / (sum(waits[5:]) + sum(trains[5:]))
    print(f"{BATCH} bags of the quickstart, {WORKERS} workers, {steps} steps of {1e3 * median(trains[5:]):.0f} ms")
    print(f"waiting for the loader: {100 * share:.2f} % of the time (under {100 * WAIT_TARGET:.0f} %)")
    return share


def train(model: UFormEncoder, loaded: LoadedStep, optimizer: torch.optim.Optimizer) -> None:
    """One optimizer step on one microbatch."""
    optimizer.zero_grad()
    packed, numbers = pack(loaded.segments), torch.arange(len(loaded.batch))
    share = Share(loaded.batch, loaded.shares, [Microbatch(packed, numbers)])

    def forward(microbatch: Microbatch) -> Answers:
        return Answers(*model(microbatch.packed)[1:])

    exact_step(Engine(forward, torch.Tensor.backward), share, [ContrastiveLoss.C(form=RankedForm.C()).instance()])
    optimizer.step()


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repetitions")
    quick = parser.parse_args(arguments).quick
    torch.set_num_threads(THREADS)
    model = UFormEncoder.C(depth=DEPTH, hidden=HIDDEN, pooled=PooledHead.C(width=128), **SHAPES).instance()
    model.initialize()
    print(f"{platform.processor() or platform.machine()}, torch {torch.__version__}, PyAV {av.__version__}")
    decoding(model, 0.2 if quick else 1.0)
    ratio = mixing(model, 10 if quick else 40)
    share = waiting(model, 20 if quick else 60)
    return 0 if ratio <= MIXED_TARGET and share < WAIT_TARGET else 1


if __name__ == "__main__":
    sys.exit(main())
