"""What tests of several layers share."""

import os
import signal
from fractions import Fraction
from io import BytesIO

import av
import numpy as np
import pytest
import torch
from experimaestro import taskglobals
from experimaestro.xpmutils import DirectoryContext

if not torch.cuda.is_available():
    # Read when a kernel is defined: Triton kernels then run in its interpreter, on CPU tensors.
    os.environ.setdefault("TRITON_INTERPRET", "1")

# What starts the tests, such as nohup or a shell in the background, may have told them to ignore what a person sends.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)

# Tiny tensors: on a busy machine a second thread costs more than it gives.
torch.set_num_threads(1)


@pytest.fixture
def execute():
    """Executes a task configuration in a folder, as its job would; answers the instance that ran."""
    environment = taskglobals.Env.instance()
    before = environment.taskpath

    def run(config, folder):
        path = folder / "workspace" / "jobs" / "task" / "job"
        path.mkdir(parents=True, exist_ok=True)
        environment.taskpath = path
        task = config.instance(context=DirectoryContext(path))
        task.execute()
        return task

    yield run
    environment.taskpath = before


class MediaFiles:
    """Writes small files in memory by PyAV, an encoder in place of the decoder that is tested."""

    @staticmethod
    def video(frames, container="matroska", codec="ffv1", pixels="bgr0", rate=10, times=None, sound=None):
        """A video of (F, H, W, 3) uint8 frames, with a tone of ``sound`` seconds as its sound track."""
        file = BytesIO()
        with av.open(file, "w", format=container) as output:
            stream = output.add_stream(codec, rate=rate)
            stream.height, stream.width = frames.shape[1:3]
            stream.pix_fmt, stream.thread_count = pixels, 1
            track = output.add_stream("aac", rate=16000, layout="mono") if sound else None
            for number, picture in enumerate(frames):
                frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(picture), format="rgb24")
                frame.pts = times[number] if times else number
                frame.time_base = Fraction(1, rate)
                output.mux(stream.encode(frame))
            output.mux(stream.encode(None))
            if track:
                samples = np.sin(np.arange(int(16000 * sound)) / 10)[:, None]
                MediaFiles._write_samples(output, track, samples, 16000)
        return file.getvalue()

    @staticmethod
    def sound(samples, rate=16000, container="wav", codec="pcm_s16le"):
        """A sound of (S, 1, 2 or 8) samples in -1..1."""
        file = BytesIO()
        with av.open(file, "w", format=container) as output:
            layout = {1: "mono", 2: "stereo", 8: "7.1"}[samples.shape[1]]
            MediaFiles._write_samples(output, output.add_stream(codec, rate=rate, layout=layout), samples, rate)
        return file.getvalue()

    @staticmethod
    def _write_samples(output, stream, samples, rate):
        packed = np.ascontiguousarray(samples, np.float32).reshape(1, -1)
        frame = av.AudioFrame.from_ndarray(packed, format="flt", layout=stream.layout)
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        coder = stream.codec_context
        resampler = av.AudioResampler(coder.format, coder.layout, rate, coder.frame_size or None)
        for part in [*resampler.resample(frame), *resampler.resample(None)]:
            output.mux(stream.encode(part))
        output.mux(stream.encode(None))


@pytest.fixture(scope="session")
def media():
    """Makes video and sound files."""
    return MediaFiles
