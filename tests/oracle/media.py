"""Images, animations and sounds for the tests of `media`, and what Pillow, libsndfile, libopus and ffmpeg read from them.

Writes `../fixtures/media`. Needs `av==18.1.0 numpy pillow==13.0.0 soundfile==0.14.0`. A golden has the name of its file
and `.png` (one image; the frames of an animation one below the other), `.wav` or, at the file's own rate, `.flac`. For files with transparency
`.white.png` is what `convert_to_rgb` of `transformers` 5.23 makes of them, and `.drop.png` what `convert("RGB")` does.

    python media.py [--out ../fixtures/media]
"""

import argparse
import pathlib
import re
import struct
import zlib
from fractions import Fraction

import av
import numpy as np
import soundfile
from PIL import Image, ImageOps, ImageSequence

WIDTH, HEIGHT = 40, 24


def scene(width=WIDTH, height=HEIGHT, shift=0):
    """Soft colours without symmetry; `shift` moves a dark square."""
    y, x = np.mgrid[0:height, 0:width].astype(float)
    red = 255 * x / (width - 1)
    green = 255 * y / (height - 1)
    blue = 127 + 127 * np.sin(x / 7 + y / 5)
    rgb = np.stack([red, green, blue], -1)
    rgb[3:9, 3 + shift : 9 + shift] = [20, 40, 160]
    return rgb.round().astype(np.uint8)


def over_white(image):
    """`transformers.image_transforms.convert_to_rgb`."""
    if "A" in image.getbands() or image.info.get("transparency") is not None:
        image = image.convert("RGBA")
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image).convert("RGB")
    return image.convert("RGB")


def png(path, width, height, bits, kind, rows, *extra):
    """A PNG of any bit depth: `rows` are bytes, `extra` pairs of a chunk's name and bytes."""

    def chunk(name, data):
        return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))

    header = struct.pack(">IIBBBBB", width, height, bits, kind, 0, 0, 0)
    data = zlib.compress(b"".join(b"\0" + row for row in rows), 9)
    chunks = [(b"IHDR", header), *extra, (b"IDAT", data), (b"IEND", b"")]
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + b"".join(chunk(*c) for c in chunks))


def write_images(out):
    image = Image.fromarray(scene())
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[0x0112] = orientation
        image.save(out / f"exif{orientation}.jpg", quality=95, subsampling=0, exif=exif)
    image.save(out / "baseline.jpg", quality=90, subsampling=2)
    image.save(out / "progressive.jpg", quality=90, subsampling=2, progressive=True)
    image.convert("L").save(out / "grey.jpg", quality=90)
    image.convert("CMYK").save(out / "cmyk.jpg", quality=95)
    image.save(out / "lossless.webp", lossless=True)
    image.save(out / "lossy.webp", quality=90)

    # Every alpha with every value.
    value, alpha = np.meshgrid(np.arange(256, dtype=np.uint8), np.arange(256, dtype=np.uint8))
    Image.fromarray(np.stack([value, value, value, alpha], -1)).save(out / "rgba.png", optimize=True)
    grey = np.asarray(image.convert("L"))
    fade = np.linspace(0, 255, WIDTH).round().astype(np.uint8)[None].repeat(HEIGHT, 0)
    Image.fromarray(np.stack([grey, fade], -1), mode="LA").save(out / "la.png")
    Image.fromarray(np.concatenate([scene(), fade[..., None]], -1)).save(out / "alpha.webp", lossless=True, exact=True)
    palette = image.quantize(16)
    palette.save(out / "palette.png", transparency=bytes([0, 128, 255, 30]), bits=4)
    key = scene()[4, 4]
    image.save(out / "key.png", transparency=tuple(int(v) for v in key))
    image.convert("1").save(out / "bits.png")
    image.save(out / "still.gif")

    # 16 bits: what Pillow makes of them is not what is wanted, so these have no golden of it.
    wide = np.arange(WIDTH * HEIGHT, dtype=np.uint32) * 68 % 65536
    rows = wide.astype(">u2").reshape(HEIGHT, WIDTH)
    png(out / "grey16.png", WIDTH, HEIGHT, 16, 0, [row.tobytes() for row in rows])
    colours = np.stack([rows, rows[::-1], rows[:, ::-1]], -1).astype(">u2")
    png(out / "rgb16.png", WIDTH, HEIGHT, 16, 2, [row.tobytes() for row in colours])
    for name, pixels in {"grey16": np.stack([rows] * 3, -1), "rgb16": colours}.items():
        rounded = (pixels.astype(np.uint32) * 255 + 32767) // 65535
        Image.fromarray(rounded.astype(np.uint8)).save(out / f"{name}.png.png")

    plain = ["baseline.jpg", "progressive.jpg", "grey.jpg", "cmyk.jpg", "lossless.webp", "lossy.webp", "bits.png"]
    for name in plain + ["still.gif"] + [f"exif{i}.jpg" for i in range(1, 9)]:
        with Image.open(out / name) as read:
            ImageOps.exif_transpose(read).convert("RGB").save(out / f"{name}.png", optimize=True)
    for name in ["rgba.png", "la.png", "alpha.webp", "palette.png", "key.png"]:
        with Image.open(out / name) as read:
            over_white(read).save(out / f"{name}.white.png", optimize=True)
            read.convert("RGB").save(out / f"{name}.drop.png", optimize=True)


def animations(out):
    frames = [Image.fromarray(scene(shift=2 * i)) for i in range(12)]
    fade = Image.fromarray(np.linspace(255, 90, WIDTH).round().astype(np.uint8)[None].repeat(HEIGHT, 0))
    clear = [frame.copy() for frame in frames]
    for frame in clear:
        frame.putalpha(fade)
    # Times differ: 0.1 s, 0.3 s, 0.1 s, …
    delays = [100 if i % 2 == 0 else 300 for i in range(12)]
    common = {"save_all": True, "duration": delays, "loop": 0}
    quantized = [frame.quantize(32, dither=Image.Dither.NONE) for frame in frames]
    quantized[0].save(out / "animated.gif", append_images=quantized[1:], optimize=False, **common)
    clear[0].save(out / "animated.webp", append_images=clear[1:], lossless=True, exact=True, **common)
    clear[0].save(out / "animated.png", append_images=clear[1:], **common)
    for name in ["animated.gif", "animated.webp", "animated.png"]:
        with Image.open(out / name) as read:
            all_frames = [np.asarray(over_white(frame)) for frame in ImageSequence.Iterator(read)]
        assert len(all_frames) == 12, (name, len(all_frames))
        Image.fromarray(np.concatenate(all_frames)).save(out / f"{name}.png", optimize=True)


def sounds(out):
    rate = 16_000
    t = np.arange(rate // 4) / rate
    envelope = np.sin(np.pi * t / t[-1])
    left = 0.5 * envelope * np.sin(2 * np.pi * (300 + 1500 * t) * t)
    right = 0.3 * envelope * np.sin(2 * np.pi * 700 * t)
    stereo = np.stack([left, right], -1)
    soundfile.write(out / "tone.mp3", left, rate, format="MP3", subtype="MPEG_LAYER_III")
    soundfile.write(out / "tone.ogg", left, rate, format="OGG", subtype="VORBIS")
    soundfile.write(out / "tone16.flac", stereo, rate, subtype="PCM_16")
    soundfile.write(out / "tone24.flac", left, rate, subtype="PCM_24")
    for bits in ["PCM_U8", "PCM_24", "PCM_32", "DOUBLE", "ALAW", "ULAW", "IMA_ADPCM"]:
        soundfile.write(out / f"{bits.lower()}.wav", left[2000:2400], rate, subtype=bits, format="WAV")
    soundfile.write(out / "extensible.wav", stereo[2000:2400], rate, subtype="PCM_16", format="WAVEX")
    for name in ["tone.mp3", "tone.ogg", "tone16.flac", "tone24.flac", "extensible.wav", "pcm_u8.wav", "pcm_24.wav",
                 "pcm_32.wav", "double.wav", "alaw.wav", "ulaw.wav"]:
        samples, found = soundfile.read(out / name, dtype="float32", always_2d=True)
        assert found == rate, name
        soundfile.write(out / f"{name}.wav", samples.mean(1), rate, subtype="FLOAT", format="WAV")


def voice(rate, channels):
    """A third of a second of two syllables: harmonics with two formants, and on the right a tone."""
    t = np.arange(rate * 3 // 10) / rate
    pitch = 120 + 40 * np.sin(2 * np.pi * 2.5 * t)
    phase = 2 * np.pi * np.cumsum(pitch) / rate
    envelope = np.clip(np.sin(2 * np.pi * 6 * t), 0, 1) ** 0.5
    formants = lambda f: np.exp(-(((f - 600) / 500) ** 2)) + 0.3 * np.exp(-(((f - 2200) / 300) ** 2))
    left = sum(np.sin(k * phase) * formants(k * pitch) for k in range(1, 40))
    left *= 0.5 * envelope / np.abs(left).max()
    return np.stack([left, 0.3 * envelope * np.sin(2 * np.pi * 700 * t)][:channels]).astype(np.float32)


def encode(path, codec, rate, channels, bits, container, options=None, layout=None):
    """Writes a file by libavcodec and libavformat."""
    samples = voice(rate, channels)
    with av.open(str(path), "w", format=container, options=layout or {}) as file:
        stream = file.add_stream(codec, rate=rate, layout=["mono", "stereo"][channels - 1], options=options or {})
        stream.bit_rate = bits
        planar = codec == "aac"
        data = np.ascontiguousarray(samples if planar else samples.T.reshape(1, -1))
        frame = av.AudioFrame.from_ndarray(data, format="fltp" if planar else "flt", layout=stream.layout.name)
        frame.rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        fifo = av.AudioFifo()
        fifo.write(frame)
        while frame := fifo.read(stream.codec_context.frame_size, partial=True):
            file.mux(stream.encode(frame))
        file.mux(stream.encode(None))


def decoded(path):
    """The mean of the channels by libavcodec, and for Opus by libopus, whose resampling libavcodec does otherwise."""
    with av.open(str(path)) as file:
        stream = file.streams.audio[0]
        decoder = stream.codec_context
        if decoder.name == "opus":
            decoder = av.CodecContext.create("libopus", "r")
            decoder.extradata, decoder.sample_rate = stream.codec_context.extradata, 48_000
            decoder.layout = stream.layout
        frames = [frame for packet in file.demux(stream) if packet.size for frame in decoder.decode(packet)]
        frames += decoder.decode(None)
        parts = [frame.to_ndarray().reshape(len(frame.layout.channels), -1, order="C" if frame.format.is_planar else "F")
                 for frame in frames]
        samples = np.concatenate(parts, 1)
        scale = 32768 if samples.dtype == np.int16 else 1
        return samples.mean(0) / scale, 48_000 if decoder.name == "libopus" else stream.rate


def encoded(out):
    telephone = {"application": "voip"}
    fragments = {"movflags": "frag_keyframe+empty_moov+default_base_moof", "frag_duration": "100000"}
    encode(out / "voice.opus", "libopus", 48_000, 1, 16_000, "ogg", telephone, {"page_duration": "50000"})
    encode(out / "stereo.webm", "libopus", 48_000, 2, 48_000, "webm")
    encode(out / "recorded.webm", "libopus", 48_000, 1, 24_000, "webm", None, {"live": "1", "cluster_time_limit": "100"})
    encode(out / "voice.m4a", "aac", 44_100, 2, 96_000, "ipod")
    encode(out / "fragments.mp4", "aac", 22_050, 1, 48_000, "mp4", None, fragments)
    encode(out / "opus.mp4", "libopus", 48_000, 1, 24_000, "mp4")
    encode(out / "voice.aac", "aac", 16_000, 1, 32_000, "adts")
    # As `MediaRecorder` of browsers writes it: no element has an index, and clusters have no length.
    recorded = (out / "recorded.webm").read_bytes()
    at = recorded.rindex(b"\x15\x49\xa9\x66")
    recorded = recorded[: recorded.index(b"\x11\x4d\x9b\x74")] + recorded[at:]
    cluster = re.compile(rb"\x1f\x43\xb6\x75[\x40-\x7f].(?=\xe7)", re.DOTALL)
    recorded = cluster.sub(b"\x1f\x43\xb6\x75\x01" + b"\xff" * 7, recorded)
    (out / "recorded.webm").write_bytes(recorded)
    for name in ["voice.opus", "stereo.webm", "recorded.webm", "voice.m4a", "fragments.mp4", "opus.mp4", "voice.aac"]:
        samples, rate = decoded(out / name)
        soundfile.write(out / f"{name}.flac", samples, rate, subtype="PCM_16")
    with av.open(str(out / "silent.mp4"), "w", format="mp4") as file:
        stream = file.add_stream("mpeg4", rate=10)
        stream.width, stream.height, stream.pix_fmt = 16, 16, "yuv420p"
        file.mux(stream.encode(av.VideoFrame.from_ndarray(np.zeros((16, 16, 3), np.uint8), format="rgb24")))
        file.mux(stream.encode(None))


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "../fixtures/media")
    out = parser.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for old in out.iterdir():
        old.unlink()
    write_images(out)
    animations(out)
    sounds(out)
    encoded(out)


if __name__ == "__main__":
    main()
