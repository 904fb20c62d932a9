package dev.qhx

/** Why an answer ended. */
public enum class FinishReason {
    /** The model ended it. */
    EOS,

    /** A stop text or token came, or the grammar was at its end. */
    STOP,

    /** There are as many tokens as were asked for, or the context is full. */
    LENGTH,

    /** It was cancelled. */
    CANCELLED,
}

/** A call of a tool in an answer; [arguments] is JSON: an object, unless the model wrote something else. */
public data class ToolCall(val name: String, val arguments: String)

/**
 * An answer.
 *
 * @property text The text, without special tokens and stop texts.
 * @property tokens Every token that was chosen, the ending one included.
 * @property promptTokens Positions of the prompt: its tokens, and those of images and audio.
 * @property reusedTokens Of these, those whose state was there already, from an earlier call.
 * @property finishReason Why it ended.
 * @property stoppedAt The text of [Options.stop] that ended it, if one did.
 * @property toolCalls The calls in it, where the conversation had tools.
 * @property prefillSeconds Time in which the prompt was consumed.
 * @property decodeSeconds Time from the first token of the answer to its last.
 */
public class Generation internal constructor(
    public val text: String,
    public val tokens: IntArray,
    public val promptTokens: Int,
    public val reusedTokens: Int,
    public val finishReason: FinishReason,
    public val stoppedAt: String?,
    public val toolCalls: List<ToolCall>,
    public val prefillSeconds: Double,
    public val decodeSeconds: Double,
) {
    /** The text. */
    override fun toString(): String = text
}

/** What was said in a part of an audio clip, from [start] to [end] in seconds, before it is joined with its neighbours. */
public class Chunk internal constructor(
    public val start: Double,
    public val end: Double,
    public val text: String,
    public val finishReason: FinishReason,
)

/** A word of an audio clip, which is said from [start] to [end] in seconds. */
public class Word internal constructor(public val start: Double, public val end: Double, public val text: String)

/**
 * What was said in an audio clip.
 *
 * @property text All words.
 * @property seconds Length of the audio.
 * @property chunks Its parts, which overlap, in order.
 * @property words The words with their times, where they are asked for.
 * @property cancelled It was cancelled, and ends with the last chunk.
 */
public class Transcript internal constructor(
    public val text: String,
    public val seconds: Double,
    public val chunks: List<Chunk>,
    public val words: List<Word>,
    public val cancelled: Boolean,
) {
    /** The text. */
    override fun toString(): String = text
}

/** Parts of an array of the native part. */
private fun Array<out Any?>.text(at: Int): String = (this[at] as ByteArray).decodeToString()
private fun Array<out Any?>.ints(at: Int): IntArray = this[at] as IntArray
private fun Array<out Any?>.doubles(at: Int): DoubleArray = this[at] as DoubleArray
private fun Array<out Any?>.reason(at: Int): FinishReason = FinishReason.valueOf(text(at).uppercase())

internal fun generation(parts: Array<Any?>): Generation {
    val (prompt, reused) = parts.ints(3)
    val (prefill, decode) = parts.doubles(4)
    val stop = parts[5]?.let { parts.text(5) }
    val calls = (6 until parts.size step 2).map { ToolCall(parts.text(it), parts.text(it + 1)) }
    return Generation(parts.text(0), parts.ints(2), prompt, reused, parts.reason(1), stop, calls, prefill, decode)
}

internal fun transcript(parts: Array<Any>): Transcript {
    val (cancelled, count) = parts.ints(2)
    val behind = 3 + 3 * count
    val chunks = (3 until behind step 3).map {
        val (start, end) = parts.doubles(it + 2)
        Chunk(start, end, parts.text(it), parts.reason(it + 1))
    }
    val words = (behind until parts.size step 2).map {
        val (start, end) = parts.doubles(it + 1)
        Word(start, end, parts.text(it))
    }
    return Transcript(parts.text(0), parts.doubles(1)[0], chunks, words, cancelled != 0)
}

/** What an open model is. */
internal class About(parts: Array<Any>) {
    val name = parts.text(0)
    val manifest = parts.text(1)
    val hostOp = parts.text(2)
    val backend = parts.text(3)
    val backendReason = parts.text(4)
    val numbers = parts.ints(5)
    val modalities = (6 until parts.size).map { parts.text(it) }
}
