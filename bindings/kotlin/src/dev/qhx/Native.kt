package dev.qhx

/**
 * The native part. Models and calls are numbers, of which it knows the live ones; texts are UTF-8, requests JSON.
 *
 * A call is made before anything is asked, so that it can be cancelled at any time. The functions of one call are called
 * by one thread at a time, [cancel] by any.
 */
internal object Native {
    init {
        System.loadLibrary("qhxjni")
    }

    /** The version of the native part. */
    @JvmStatic external fun version(): ByteArray

    /** A new call. */
    @JvmStatic external fun begin(): Long

    /** Ends what a call does, within one execution of a graph. */
    @JvmStatic external fun cancel(call: Long)

    /** Ends a call, and its stream where that is. */
    @JvmStatic external fun end(call: Long)

    /** Loads a bundle, with options of JSON, and ends the call. */
    @JvmStatic external fun open(call: Long, bundle: ByteArray, options: ByteArray): Long

    /** Name, manifest, host-op, backend, its reason, three numbers, and modalities. */
    @JvmStatic external fun about(model: Long): Array<Any>

    /** Text, finish reason, tokens, counts, seconds, stop text or null, and name and arguments of each call. */
    @JvmStatic
    external fun generate(
        model: Long,
        call: Long,
        request: ByteArray,
        media: ByteArray,
        contents: Array<ByteArray?>,
    ): Array<Any?>

    /** Begins a stream, and returns when its prompt is checked. */
    @JvmStatic
    external fun stream(model: Long, call: Long, request: ByteArray, media: ByteArray, contents: Array<ByteArray?>)

    /** The next piece of a stream; null at its end. */
    @JvmStatic external fun next(call: Long): ByteArray?

    /** What a stream has become, at its end; as of [generate]. */
    @JvmStatic external fun result(call: Long): Array<Any?>?

    /** A vector for each text. */
    @JvmStatic
    external fun embed(model: Long, call: Long, texts: Array<ByteArray>, role: ByteArray, truncate: Boolean): Array<FloatArray>

    /**
     * Text, seconds, whether it was cancelled and the number of chunks, text, finish reason and times of each chunk,
     * and text and times of each word.
     */
    @JvmStatic
    external fun transcribe(
        model: Long,
        call: Long,
        media: ByteArray,
        contents: Array<ByteArray?>,
        maxNew: Int,
        wordTimes: Boolean,
        vad: ByteArray,
    ): Array<Any>

    /** Whether something runs, or a stream is open. */
    @JvmStatic external fun busy(model: Long): Boolean

    /** Ends what a model does; false where that is nothing. */
    @JvmStatic external fun cancelModel(model: Long): Boolean

    /** Ends what a model does, waits for that and frees it. */
    @JvmStatic external fun close(model: Long)

    /** Called by the native part for what it throws. */
    @JvmStatic
    fun failure(kind: ByteArray, message: ByteArray, hint: ByteArray?, hasCode: Boolean, code: Long): Throwable =
        exception(kind.decodeToString(), message.decodeToString(), hint?.decodeToString(), if (hasCode) code else null)
}
