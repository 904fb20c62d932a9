package dev.qhx.tests

import dev.qhx.Audio
import dev.qhx.Image
import dev.qhx.Message
import dev.qhx.Options
import dev.qhx.PromptException
import dev.qhx.QhxException
import dev.qhx.Role
import dev.qhx.SpeechRules
import dev.qhx.TextPart
import dev.qhx.UsageException
import java.io.File
import java.nio.ByteBuffer
import java.nio.ByteOrder
import java.util.Base64
import javax.imageio.ImageIO

/** Images, audio and vectors, in all forms that they are taken in. */
fun Suite.media() {
    val boat = given.fixture("qwen3vl-tiny/images/boat.png")
    val noon = given.fixture("gemma4-tiny/noon.wav")

    test("an image is seen in each form", "seeing") { model ->
        check("image" in model.modalities)
        val url = "data:image/png;base64," + Base64.getEncoder().encodeToString(boat.readBytes())
        for (image in listOf(Image(boat), Image(url), Image(boat.readBytes()), pixels(boat))) {
            val beside = model.reply(listOf(Message.user("Describe this image.")), Options(images = listOf(image)))
            same("A red boat on a blue sea.", beside.text)
            val within = Message("user", listOf(image, TextPart("Describe this image.")))
            same(beside.text, model.reply(listOf(within)).text)
            same(beside.text, model.reply(listOf(Message.user("Describe this image.", image))).text)
        }
    }
    test("what is no image is refused", "seeing") { model ->
        val refused = listOf(
            Image("GIF".encodeToByteArray()) to "images[0]",
            Image(ByteArray(0)) to "empty",
            Image(noon) to "noon.wav",
            Image.ofPixels(ByteArray(5), 2, 2) to "images[0]",
            Image.ofPixels(ByteArray(0), Int.MAX_VALUE, Int.MAX_VALUE) to "at most",
        )
        for ((image, words) in refused) {
            throws<QhxException>("prompt", words) { model.completion("What is this?", Options(images = listOf(image))) }
        }
        throws<QhxException>("io", "nowhere.png") { model.completion("?", Options(images = listOf(Image("nowhere.png")))) }
        throws<UsageException>("usage", "-1 × 2 pixels") { Image.ofPixels(ByteArray(0), -1, 2) }
        throws<PromptException>("prompt", "placeholders <image> in the text: 2, files of image: 1") {
            model.completion("<image> and <image>", Options(images = listOf(Image(boat))))
        }
    }
    test("speech becomes text in each form", "hearing") { model ->
        val (samples, rate) = samples(noon)
        for (clip in listOf(Audio(noon), Audio(noon.readBytes()), Audio(samples, rate))) {
            val heard = model.transcribe(clip)
            same("the boat leaves at noon", heard.toString())
            check(kotlin.math.abs(heard.seconds - samples.size.toDouble() / rate) < 0.01 && !heard.cancelled)
            same("EOS", heard.chunks.joinToString { it.finishReason.name })
            check(heard.chunks[0].start == 0.0 && heard.chunks[0].end > 0.5)
        }
        throws<UsageException>("usage", "0 samples a second") { Audio(samples, 0) }
        throws<QhxException>("prompt", "audio") { model.transcribe(Audio("RIFF".encodeToByteArray())) }
        throws<UsageException>("usage", "option maxNewTokens") { model.transcribe(Audio(noon), -1) }
    }
    test("words have their times", "listening") { model ->
        val clip = Audio(given.fixture("whisper-tiny/${given.text("clip")}"))
        val heard = model.transcribe(clip, wordTimes = true)
        val expected = given.text("words").lines().map { it.split(' ') }
        same(expected.map { it[0] }, heard.words.map { it.text })
        for ((word, times) in heard.words.zip(expected)) {
            val (start, end) = times.drop(1).map { it.toDouble() }
            check(kotlin.math.abs(word.start - start) < 0.001 && kotlin.math.abs(word.end - end) < 0.001) { times }
        }
        check(heard.chunks.isNotEmpty() && model.transcribe(clip).words.isEmpty())
        // The clip's words are chords, and nobody speaks.
        same("", model.transcribe(clip, vad = SpeechRules(threshold = 0.9f)).text)
    }
    test("a model without times of words says so", "hearing") { model ->
        throws<UsageException>("usage", "times of words: the model gives no times") {
            model.transcribe(Audio(noon), wordTimes = true)
        }
        throws<UsageException>("usage", "option vad") { model.transcribe(Audio(noon), vad = SpeechRules(threshold = 2f)) }
    }
    test("texts become vectors", "encoder") { model ->
        val texts = listOf("def fib(n):", "SELECT 1", "a river 🦀")
        val vectors = model.embed(texts)
        same(List(3) { model.embeddingDim }, vectors.map { it.size })
        for (vector in vectors) check(kotlin.math.abs(vector.sumOf { (it * it).toDouble() } - 1) < 1e-3)
        same(vectors[1].toList(), model.embed(listOf(texts[1]))[0].toList())
        check(!vectors[0].contentEquals(model.embed(texts, Role.QUERY)[0]))
        same(0, model.embed(emptyList()).size)
        // More than a frame of the virtual machine's references holds.
        same(600, model.embed(List(600) { "a" }).size)
        val long = listOf("short", "long ".repeat(100))
        has(throws<PromptException>("prompt", "text 1: ") { model.embed(long) }.hint, "truncate")
        same(2, model.embed(long, truncate = true).size)
    }
    test("a model does what it is for, and says so", "language") { model ->
        throws<UsageException>("usage", "params.transcription is missing") { model.transcribe(Audio(noon)) }
        throws<UsageException>("usage", "embed") { model.embed(listOf("Hi")) }
    }
}

private fun pixels(file: File): Image {
    val image = ImageIO.read(file)
    val rgb = ByteArray(3 * image.width * image.height)
    for (y in 0 until image.height) for (x in 0 until image.width) {
        val at = 3 * (y * image.width + x)
        for (channel in 0 until 3) rgb[at + channel] = (image.getRGB(x, y) shr (16 - 8 * channel)).toByte()
    }
    return Image.ofPixels(rgb, image.width, image.height)
}

/** Of a WAV file of 16 bits, with its header of 44 bytes. */
internal fun samples(file: File): Pair<FloatArray, Int> {
    val bytes = ByteBuffer.wrap(file.readBytes()).order(ByteOrder.LITTLE_ENDIAN)
    val shorts = bytes.position(44).slice().order(ByteOrder.LITTLE_ENDIAN).asShortBuffer()
    return FloatArray(shorts.remaining()) { shorts[it] / 32768f } to bytes.getInt(24)
}
