"""A battery of odd and bad inputs, each with its declared outcome: a number of tokens, or why it is refused."""

import io
import struct
import zlib
from fractions import Fraction

import av
import numpy as np
import pytest
import soundfile
from PIL import Image

from xpmir_uform.data.decoding.registry import UnreadableItem, decode
from xpmir_uform.data.decoding.shapes import AudioShape, ImageShape, VideoShape
from xpmir_uform.data.items import Item
from xpmir_uform.data.vocabulary import Modality

TEXT, IMAGE, VIDEO, AUDIO = Modality
KEY, RATE = 0xC0FFEE, 16_000
SHAPES = {
    IMAGE: ImageShape.C(patch_side=2, max_side=8).instance(),
    VIDEO: VideoShape.C(patch_side=2, tube_frames=2, max_side=8, max_frames=16).instance(),
    AUDIO: AudioShape.C(chunk_samples=400, sample_rate=RATE, max_seconds=5.0).instance(),
}
FOREIGN = "no (file|image) of a known format"
CASES = {}
"""By name: the modality, what makes the content from the maker of media files, and the outcome."""


def case(name, modality, outcome, content):
    assert name not in CASES, name
    CASES[name] = (modality, content if callable(content) else lambda media: content, outcome)


def noise(*shape):
    return np.random.default_rng(0).integers(0, 256, shape, np.uint8)


def picture(name, mode="RGB", size=(64, 48), **options):
    file = io.BytesIO()
    base = Image.fromarray(noise(size[1], size[0], 3))
    if mode == "LAB":
        image = Image.new("LAB", size, (50, 10, 20))
    elif mode == "PA":
        image = Image.new("PA", size)
    elif mode.startswith("I;16"):
        image = Image.fromarray(noise(size[1], size[0]).astype(np.uint16) * 257)
    else:
        image = base.convert(mode)
    image.save(file, name, **options)
    return file.getvalue()


def waves(seconds=1.0, rate=RATE, channels=1):
    return np.repeat(0.5 * np.sin(np.arange(round(seconds * rate)) / 5)[:, None], channels, axis=1)


def sound(name, subtype=None, samples=None, rate=RATE):
    file = io.BytesIO()
    soundfile.write(file, waves(rate=rate) if samples is None else samples, rate, format=name, subtype=subtype)
    return file.getvalue()


def bytes_of_png(width, height):
    """The beginning of a PNG that declares this size."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(100)))


# Texts: any UTF-8, one token a byte.
for name, text in {
    "empty": "",
    "blank": " ",
    "line ends": "a\r\nb\n",
    "a zero byte": "a\0b",
    "control characters": "\x01\x1b[31m\x7f",
    "a byte order mark": "\N{ZERO WIDTH NO-BREAK SPACE}a",
    "joined emoji": "\N{WOMAN}\N{ZERO WIDTH JOINER}\N{ROCKET}",
    "combining marks": "e" + "\N{COMBINING ACUTE ACCENT}" * 50,
    "right to left": "\N{HEBREW LETTER ALEF}\N{RIGHT-TO-LEFT OVERRIDE}b",
    "a noncharacter": "\uffff",
    "the last code point": "\U0010ffff",
    "private use": "\ue000",
    "huge": "x" * 1_000_000,
    "huge, of four bytes each": "\N{GRINNING FACE}" * 100_000,
}.items():
    case(f"text: {name}", TEXT, max(1, len(text.encode())), text.encode())
for name, content in {
    "Latin-1": "caf\xe9".encode("latin-1"),
    "UTF-16": "caf\xe9".encode("utf-16"),
    "a lone surrogate": "a\ud800".encode("utf-8", "surrogatepass"),
    "a pair of surrogates": "\ud83d\ude00".encode("utf-8", "surrogatepass"),
    "cut inside a character": "\N{GRINNING FACE}".encode()[:-1],
    "a continuation alone": b"a\x80",
    "an overlong zero": b"\xc0\x80",
    "beyond the last code point": b"\xf4\x90\x80\x80",
    "a byte that never occurs": b"\xff",
    "a JPEG": picture("JPEG"),
    "huge, bad at its end": b"x" * 1_000_000 + b"\xff",
}.items():
    case(f"text: {name}", TEXT, "is not UTF-8 text", content)

# Files of another kind, or of none, in the place of each.
for modality in (IMAGE, VIDEO, AUDIO):
    word = modality.name.lower()
    for name, content in {
        "nothing": b"",
        "one byte": b"\0",
        "a text": b"hello " * 100,
        "JSON": b'{"a": [1, 2, 3]}',
        "HTML": b"<!DOCTYPE html><html><body>404</body></html>",
        "zeros": bytes(5_000),
        "noise": noise(5_000).tobytes(),
        "a zip": b"PK\x03\x04" + bytes(100),
        "a list of files": b"#EXTM3U\n#EXTINF:1,\n/etc/hostname\n",
        "a script of FFmpeg": b"ffconcat version 1.0\nfile /etc/hostname\n",
        "an SVG": b'<svg xmlns="http://www.w3.org/2000/svg" width="4" height="4"/>',
        "PostScript": b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 4 4\n",
    }.items():
        case(f"{word}: {name}", modality, FOREIGN, content)
for name in ("PNG", "JPEG", "WEBP", "BMP", "TIFF"):
    case(f"video: a {name}", VIDEO, FOREIGN, picture(name))
    case(f"audio: a {name}", AUDIO, FOREIGN, picture(name))
for name in ("WAV", "FLAC", "OGG", "MP3"):
    case(f"image: a {name}", IMAGE, FOREIGN, sound(name))
    case(f"video: a {name}", VIDEO, "no video stream", sound(name))
case("image: an MP4", IMAGE, FOREIGN, lambda media: media.video(noise(4, 16, 16, 3), "mp4", "mpeg4", "yuv420p"))

# Pictures: modes, sizes, and files cut short.
for mode, name in (
    *(("1", "PNG"), ("L", "PNG"), ("LA", "PNG"), ("P", "PNG"), ("RGB", "PNG"), ("RGBA", "PNG"), ("I;16", "PNG")),
    *(("1", "TIFF"), ("L", "TIFF"), ("P", "TIFF"), ("PA", "TIFF"), ("RGBA", "TIFF"), ("RGBX", "TIFF")),
    *(("CMYK", "TIFF"), ("YCbCr", "TIFF"), ("LAB", "TIFF"), ("I;16", "TIFF"), ("I", "TIFF"), ("F", "TIFF")),
    *(("L", "JPEG"), ("CMYK", "JPEG"), ("I", "PPM"), ("RGB", "TGA"), ("RGB", "PCX"), ("RGB", "SGI")),
):
    case(f"image: {name} of mode {mode}", IMAGE, 12, picture(name, mode))
for size, tokens in {(1, 1): 1, (1, 2000): 4, (2000, 1): 4, (3, 5): 6, (2, 2): 1, (8, 8): 16, (4000, 3000): 12}.items():
    case(f"image: {size[0]} x {size[1]}", IMAGE, tokens, picture("PNG", size=size))
for name in ("PNG", "JPEG", "TIFF", "BMP", "WEBP", "AVIF", "JPEG2000", "QOI", "PPM", "GIF", "TGA", "PCX", "SGI"):
    for part in (10, 0.5):
        whole = picture(name)
        case(f"image: {name} cut at {part}", IMAGE, ".", whole[: part if part > 1 else len(whole) // 2])
case("image: PNG without its last four bytes", IMAGE, 12, picture("PNG")[:-4])
case("image: an animation", IMAGE, 12, lambda media: media.video(noise(3, 48, 64, 3), "apng", "apng", "rgb24"))
for side in (9_000, 10_000, 100_000):
    case(f"image: PNG that declares {side} x {side}", IMAGE, "expected at most|bomb", bytes_of_png(side, side))

# Videos: containers, whole and cut short; those without a declared length are read as far as they go.
for name, (arguments, half) in {
    "MP4": (("mp4", "libx264", "yuv420p"), FOREIGN),
    "MP4 of MPEG-4": (("mp4", "mpeg4", "yuv420p"), FOREIGN),
    "MP4 of HEVC": (("mp4", "libx265", "yuv420p"), FOREIGN),
    "MOV of PNG": (("mov", "png", "rgb24"), FOREIGN),
    "WebM of VP8": (("webm", "libvpx", "yuv420p"), "it is truncated: its header declares"),
    "WebM of VP9": (("webm", "libvpx-vp9", "yuv420p"), "it is truncated: its header declares"),
    "Matroska of FFV1": (("matroska", "ffv1", "bgr0"), "it is truncated: its header declares"),
    "AVI of MPEG-4": (("avi", "mpeg4", "yuv420p"), "truncated or damaged"),
    "AVI, uncompressed": (("avi", "rawvideo", "bgr24"), "truncated or damaged"),
    "AVI of JPEG": (("avi", "mjpeg", "yuvj420p"), "truncated or damaged"),
    "FLV": (("flv", "flv", "yuv420p"), "truncated or damaged"),
    "APNG": (("apng", "apng", "rgb24"), "truncated or damaged"),
    "GIF": (("gif", "gif", "rgb8"), 36),
}.items():

    def whole_video(media, arguments=arguments):
        return media.video(noise(10, 48, 64, 3), *arguments)

    case(f"video: {name}", VIDEO, 60, whole_video)
    case(f"video: {name} cut at 10", VIDEO, ".", lambda media, whole=whole_video: whole(media)[:10])
    case(f"video: {name} cut at half", VIDEO, half, lambda media, whole=whole_video: (w := whole(media))[: len(w) // 2])

for name, (frames, options, outcome) in {
    "one frame": (noise(1, 48, 64, 3), {}, 12),
    "three frames": (noise(3, 48, 64, 3), {}, 24),
    "as many frames as it may have": (noise(16, 48, 64, 3), {}, 96),
    "one frame too many": (noise(17, 48, 64, 3), {}, "more than 16 frames"),
    "1 x 1": (noise(2, 1, 1, 3), {}, 1),
    "1 x 2000": (noise(2, 2000, 1, 3), {"container": "mov", "codec": "png", "pixels": "rgb24"}, 4),
    "2000 x 1": (noise(2, 1, 2000, 3), {"container": "mov", "codec": "png", "pixels": "rgb24"}, 4),
    "7 x 3": (noise(2, 3, 7, 3), {}, 8),
    "a varying rate": (noise(5, 48, 64, 3), {"times": [0, 1, 2, 40, 41]}, 36),
    "a frame a second": (noise(4, 48, 64, 3), {"rate": 1}, 24),
    "1000 frames a second": (noise(4, 48, 64, 3), {"rate": 1000}, 24),
    "a broken rate": (noise(4, 48, 64, 3), {"rate": Fraction(24_000, 1_001)}, 24),
    "grey of 8 bits": (noise(4, 48, 64, 3), {"pixels": "gray"}, 24),
    "grey of 16 bits": (noise(4, 48, 64, 3), {"pixels": "gray16le"}, 24),
    "10 bits": (noise(4, 48, 64, 3), {"pixels": "yuv420p10le"}, 24),
    "4:4:4": (noise(4, 48, 64, 3), {"pixels": "yuv444p"}, 24),
    "an alpha plane": (noise(4, 48, 64, 3), {"pixels": "yuva420p"}, 24),
    "an hour": (np.zeros((3600, 2, 2, 3), np.uint8), {"rate": 1}, "more than 16 frames"),
}.items():
    case(f"video: {name}", VIDEO, outcome, lambda media, f=frames, o=options: media.video(f, **o))
case("video: a sound in MP4", VIDEO, "no video stream", lambda media: media.sound(waves(), RATE, "ipod", "aac"))
case(
    *("video: a transport stream", VIDEO, 60),
    lambda media: media.video(noise(10, 48, 64, 3), "mpegts", "mpeg2video", "yuv420p", rate=25),
)

# Sounds: sample types, rates, channels, lengths, and files cut short.
for name, subtype in (
    *(("WAV", "PCM_U8"), ("WAV", "PCM_16"), ("WAV", "PCM_24"), ("WAV", "PCM_32"), ("WAV", "FLOAT"), ("WAV", "DOUBLE")),
    *(("WAV", "ULAW"), ("WAV", "ALAW"), ("WAV", "IMA_ADPCM"), ("WAV", "MS_ADPCM"), ("WAVEX", "PCM_16")),
    *(
        ("RF64", "PCM_16"),
        ("W64", "PCM_16"),
        ("AIFF", "PCM_24"),
        ("AIFF", "FLOAT"),
        ("AU", "PCM_16"),
        ("CAF", "PCM_16"),
    ),
    *(("FLAC", "PCM_S8"), ("FLAC", "PCM_16"), ("FLAC", "PCM_24"), ("OGG", "VORBIS"), ("OGG", "OPUS")),
):
    case(f"audio: {name} of {subtype}", AUDIO, {"IMA_ADPCM": 41, "MS_ADPCM": 41}.get(subtype, 40), sound(name, subtype))
for rate in (1_000, 4_000, 7_919, 8_000, 11_025, 22_050, 44_100, 48_000, 96_000, 192_000, 655_350, 999_983):
    case(f"audio: {rate} hertz", AUDIO, 40, sound("WAV", rate=rate))
for channels in (2, 3, 6, 8):
    case(f"audio: {channels} channels", AUDIO, 40, sound("WAV", samples=waves(channels=channels)))
case("audio: 7.1 in planes", AUDIO, 41, lambda media: media.sound(waves(channels=8), RATE, "ipod", "aac"))
for name, (samples, outcome) in {
    "one sample": (waves()[:1], 1),
    "no sample": (waves()[:0], "no sample"),
    "silence": (0 * waves(), 40),
    "full scale": (np.sign(waves()), 40),
    "five seconds": (waves(5.0), 200),
    "longer than five seconds": (waves(5.01), "longer than 5 seconds"),
    "a minute": (waves(60.0), "longer than 5 seconds"),
}.items():
    case(f"audio: {name}", AUDIO, outcome, sound("WAV", samples=samples))
for value in (np.nan, np.inf, -np.inf):
    case(f"audio: {value}", AUDIO, "NaN or infinite", sound("WAV", "FLOAT", waves() * 0 + value))
piped = bytearray(sound("WAV"))
piped[4:8] = piped[40:44] = b"\xff" * 4
case("audio: WAV that was written to a pipe", AUDIO, 40, bytes(piped))
many_pages = sound("OGG", samples=noise(64_000) / 256)
case("audio: OGG of many pages cut at half", AUDIO, 34, many_pages[: len(many_pages) // 2])
case("audio: far beyond full scale", AUDIO, 40, sound("WAV", "FLOAT", waves() * 1e30))
for name, half in {
    "WAV": "truncated or damaged",
    "FLAC": "FFmpeg says 'Invalid data",
    "AIFF": "it is truncated: its header declares",
    "AU": "it is truncated: its header declares",
    "CAF": "truncated or damaged",
    "MP3": 14,
    "OGG": FOREIGN,
}.items():
    whole = sound(name)
    case(f"audio: {name} cut at 10", AUDIO, ".", whole[:10])
    case(f"audio: {name} cut at half", AUDIO, half, whole[: len(whole) // 2])
for name, (arguments, tokens, half) in {
    "M4A": ((RATE, "ipod", "aac"), 41, FOREIGN),
    "M4A, lossless": ((RATE, "ipod", "alac"), 40, FOREIGN),
    "AAC": ((RATE, "adts", "aac"), 44, "FFmpeg says 'Invalid data"),
    "WebM": ((48_000, "webm", "libopus"), 40, "it is truncated: its header declares"),
    "AMR": ((8_000, "amr", "libopencore_amrnb"), 41, "FFmpeg says 'Invalid data"),
}.items():

    def whole_sound(media, arguments=arguments):
        return media.sound(waves(rate=arguments[0]), *arguments)

    case(f"audio: {name}", AUDIO, tokens, whole_sound)
    case(f"audio: {name} cut at half", AUDIO, half, lambda media, whole=whole_sound: (w := whole(media))[: len(w) // 2])
for sound_track, outcome in ((None, "no audio stream"), (1.0, 41)):
    case(
        *(f"audio: a video with sound {sound_track}", AUDIO, outcome),
        lambda media, s=sound_track: media.video(noise(10, 16, 16, 3), "mp4", "mpeg4", "yuv420p", sound=s),
    )


def test_the_battery_is_large():
    assert len(CASES) >= 150


@pytest.mark.filterwarnings("ignore:Corrupt EXIF", "ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("name", CASES)
def test_the_outcome_is_the_declared_one(media, name):
    modality, make, outcome = CASES[name]
    item = Item(modality, make(media), KEY)
    if isinstance(outcome, str):
        with pytest.raises(UnreadableItem, match=outcome) as caught:
            decode(item, SHAPES)
        assert caught.value.key == KEY
        assert str(caught.value).startswith(f"cannot decode {item}: ")
        return
    segment, again = decode(item, SHAPES), decode(item, SHAPES)
    assert segment.tokens == np.prod(segment.grid) == outcome
    assert np.array_equal(segment.values, again.values)
    assert np.isfinite(segment.values).all()
    if modality is not TEXT:
        assert segment.values.shape == (segment.tokens, SHAPES[modality].patch_values)
        assert segment.tokens <= SHAPES[modality].most_tokens


def test_a_lone_surrogate_makes_no_item():
    with pytest.raises(ValueError, match="surrogates not allowed"):
        Item.text("\ud800")


def test_ffmpeg_writes_no_log(media, capfd):
    for name in ("video: FLV cut at half", "audio: FLAC cut at half", "video: MP4"):
        modality, make, outcome = CASES[name]
        content = make(media)
        capfd.readouterr()
        try:
            decode(Item(modality, content, KEY), SHAPES)
        except UnreadableItem:
            assert isinstance(outcome, str)
        assert capfd.readouterr() == ("", "")
    assert av.logging.get_level() is None
