"""Speech: texts spoken by eSpeak NG, as WAV files in memory.

The engine (GPL-3.0-or-later) is the shared library of the package ``espeakng-loader``. What it has said before changes
what it says next (pitch, and with it the length of a sound), its own ``espeak_Terminate`` does not undo that, and the
noise of breathy voices is seeded by the clock. So it is loaded and seeded anew for each utterance, which takes some
milliseconds: a sound is then a function of its arguments and of the package's files.
"""

import _ctypes
import ctypes
import io
import os
import wave
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from importlib import metadata
from pathlib import Path
from threading import Lock

DISTRIBUTION = "espeakng-loader"

# Of speak_lib.h.
SYNCHRONOUS = 2
UTF8 = 1
CHARACTERS = 0
WORDS_PER_MINUTE = 1
LEAST_WORDS_PER_MINUTE, MOST_WORDS_PER_MINUTE = 80, 450

_RECEIVER = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_short), ctypes.c_int, ctypes.c_void_p)
_lock = Lock()


def speak(text: str, voice: str = "en-us", words_per_minute: int = 175) -> bytes:
    """The sound of a text as a WAV file: mono, 16 bits, at the engine's own rate of 22,050 samples per second.

    Args:
        text: in the language of the voice.
        voice: a language, such as ``en-us``, or one and a variant, such as ``en-us+f2``.
        words_per_minute: 80 to 450.

    Raises:
        ValueError: the engine has no such voice, or the speed is out of range.
        ModuleNotFoundError: ``espeakng-loader`` is not installed.
    """
    if not LEAST_WORDS_PER_MINUTE <= words_per_minute <= MOST_WORDS_PER_MINUTE:
        raise ValueError(
            f"words_per_minute is {words_per_minute}, expected {LEAST_WORDS_PER_MINUTE} to {MOST_WORDS_PER_MINUTE}"
        )
    parts: list[bytes] = []

    @_RECEIVER
    def receive(samples, count, events) -> int:
        parts.append(ctypes.string_at(samples, 2 * count) if count > 0 else b"")
        return 0

    with _lock, _library() as library:
        rate = library.espeak_Initialize(SYNCHRONOUS, 0, _data().encode(), 0)
        if rate <= 0:
            raise RuntimeError(f"eSpeak NG did not start from {_data()}: install {DISTRIBUTION} again")
        library.espeak_ng_SetRandSeed(ctypes.c_long(0))
        library.espeak_SetSynthCallback(receive)
        if library.espeak_SetVoiceByName(voice.encode()):
            raise ValueError(f"voice is {voice!r}, expected one that eSpeak NG has, such as 'en-us' or 'en-us+f2'")
        library.espeak_SetParameter(WORDS_PER_MINUTE, words_per_minute, 0)
        content = text.encode()
        if library.espeak_Synth(content, len(content) + 1, 0, CHARACTERS, 0, UTF8, None, None):
            raise RuntimeError(f"eSpeak NG could not say {text!r}")
        library.espeak_Terminate()
    return _wav(b"".join(parts), rate)


def speech_version() -> str:
    """The version of the installed package.

    Raises:
        ModuleNotFoundError: it is not installed.
    """
    return metadata.version(DISTRIBUTION)


@cache
def speech_fingerprint() -> str:
    """sha256 of the files that the engine reads: the library, its voices and its dictionaries."""
    data = Path(_data())
    digest = sha256(Path(_library_path()).read_bytes())
    for path in sorted(data.rglob("*")):
        if path.is_file():
            digest.update(repr(path.relative_to(data).as_posix()).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _library_path() -> str:
    import espeakng_loader

    return espeakng_loader.get_library_path()


def _data() -> str:
    import espeakng_loader

    return espeakng_loader.get_data_path()


@contextmanager
def _library() -> Iterator[ctypes.CDLL]:
    """The engine as it is when nothing has been said, unloaded afterwards."""
    path = _library_path()
    if _loaded(path):
        raise RuntimeError(f"{path} is already loaded in this process, so that what it says is not reproducible")
    library = ctypes.CDLL(path)
    try:
        yield library
    finally:
        _ctypes.dlclose(library._handle)


def _loaded(path: str) -> bool:
    try:
        handle = _ctypes.dlopen(path, os.RTLD_NOLOAD | os.RTLD_LAZY)
    except OSError:
        return False
    _ctypes.dlclose(handle)
    return True


def _wav(samples: bytes, rate: int) -> bytes:
    file = io.BytesIO()
    with wave.open(file, "wb") as output:
        output.setnchannels(1)
        output.setsampwidth(2)
        output.setframerate(rate)
        output.writeframes(samples)
    return file.getvalue()
