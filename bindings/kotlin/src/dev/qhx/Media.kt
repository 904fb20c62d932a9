package dev.qhx

import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder

/** A part of a message. */
public sealed interface Part

/** Words of a message. */
public class TextPart(public val text: String) : Part

/** A medium as the native part takes it: kind, path, content, and two numbers. */
internal class Medium(val kind: String, val path: String?, val content: ByteArray?, val a: Int = 0, val b: Int = 0)

/** An image: a file by its path or `data:` URL, the bytes of a file (PNG, JPEG, WebP, GIF), or pixels. */
public class Image private constructor(internal val medium: Medium) : Part {
    public constructor(path: String) : this(Medium("image", path, null))
    public constructor(file: File) : this(file.path)
    public constructor(bytes: ByteArray) : this(Medium("image", null, bytes))

    public companion object {
        /** An image of [width] × [height] pixels: RGB of 8 bits each, row by row. */
        public fun ofPixels(rgb: ByteArray, width: Int, height: Int): Image {
            if (width <= 0 || height <= 0) throw UsageException("$width × $height pixels, expected more than 0")
            return Image(Medium("pixels", null, rgb, width, height))
        }
    }
}

/** An audio clip: a file by its path, the bytes of a file (WAV, FLAC, MP3, AAC, M4A, Ogg, WebM), or samples. */
public class Audio private constructor(internal val medium: Medium) : Part {
    public constructor(path: String) : this(Medium("audio", path, null))
    public constructor(file: File) : this(file.path)
    public constructor(bytes: ByteArray) : this(Medium("audio", null, bytes))

    /** Mono samples in −1 to 1, [rate] of them a second. They are resampled as the model needs. */
    public constructor(samples: FloatArray, rate: Int) : this(Medium("samples", null, littleEndian(samples), positive(rate)))

    private companion object {
        fun littleEndian(samples: FloatArray): ByteArray {
            val bytes = ByteBuffer.allocate(samples.size * Float.SIZE_BYTES).order(ByteOrder.LITTLE_ENDIAN)
            bytes.asFloatBuffer().put(samples)
            return bytes.array()
        }

        fun positive(rate: Int): Int {
            if (rate <= 0) throw UsageException("$rate samples a second, expected more than 0")
            return rate
        }
    }
}

/** A video: a file by its path, or the bytes of an animated GIF or WebP. */
public class Video private constructor(internal val medium: Medium) : Part {
    public constructor(path: String) : this(Medium("video", path, null))
    public constructor(file: File) : this(file.path)
    public constructor(bytes: ByteArray) : this(Medium("video", null, bytes))
}

/** The media of a request, and what errors call those that are no files. */
internal class Attached {
    private val entries = ArrayList<List<Any>>()
    private val contents = ArrayList<ByteArray?>()

    /** The number of the medium that was added. */
    fun add(medium: Medium, name: String): Int {
        entries += listOf(medium.kind, medium.path ?: name, listOf(medium.a, medium.b))
        contents += medium.content
        return entries.size - 1
    }

    fun json(): ByteArray = json(entries)

    fun contents(): Array<ByteArray?> = contents.toTypedArray()
}

/**
 * When somebody is heard to speak. What is null is as usual.
 *
 * @param threshold Probability from which on there is speech: 0.5.
 * @param negThreshold Probability below which it ends: 0.15 less.
 * @param minSpeechMs Speech that lasts no longer is none: 250 ms.
 * @param minSilenceMs Silence that ends speech: 500 ms.
 * @param padMs Audio around speech that belongs to it: 200 ms.
 */
public data class SpeechRules(
    val threshold: Float? = null,
    val negThreshold: Float? = null,
    val minSpeechMs: Int? = null,
    val minSilenceMs: Int? = null,
    val padMs: Int? = null,
) {
    internal fun json(): ByteArray = json(
        mapOf(
            "threshold" to threshold,
            "neg_threshold" to negThreshold,
            "min_speech_ms" to minSpeechMs,
            "min_silence_ms" to minSilenceMs,
            "pad_ms" to padMs,
        ),
    )
}
