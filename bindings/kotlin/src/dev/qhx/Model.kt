package dev.qhx

import kotlinx.coroutines.flow.Flow

/** What texts are to [Model.embed]. */
public enum class Role(internal val word: String) {
    /** They are found. */
    DOCUMENT("document"),

    /** They are searched for with. */
    QUERY("query"),
}

/**
 * An open bundle: it generates, embeds or transcribes, with one state.
 *
 * A model does one thing at a time. Suspending functions wait for each other; while a flow is collected, all else is
 * refused ([BusyException]). A coroutine that is cancelled ends what it asked for within one execution of a graph. What
 * was consumed stays: the next prompt that begins alike goes on from there.
 *
 * A model holds memory that the virtual machine does not know of: [close] it, or [use][kotlin.use] it.
 */
public class Model private constructor(private val handle: Long) : AutoCloseable {
    private val about = About(Native.about(handle))

    /** The model's name. */
    public val name: String get() = about.name

    /** The manifest's path. */
    public val manifest: String get() = about.manifest

    /** What makes the model's steps. */
    public val hostOp: String get() = about.hostOp

    /** What prompts may hold: `text`, `image`, `audio`, `video`. */
    public val modalities: List<String> get() = about.modalities

    /** What executes the graphs. */
    public val backend: String get() = about.backend

    /** Why that was taken. */
    public val backendReason: String get() = about.backendReason

    /** Positions that the context holds. */
    public val maxContext: Int get() = about.numbers[0]

    /** Values of a vector of [embed]; 0 where the model does not embed. */
    public val embeddingDim: Int get() = about.numbers[1]

    /** Whether the model has a chat template. */
    public val canChat: Boolean get() = about.numbers[2] != 0

    /**
     * Completes a text as it is, piece by piece: no piece is empty, and none ends within a character. Each time the flow
     * is collected, it generates.
     *
     * @param onEnd Called with the whole answer behind the last piece, unless the collector left before.
     */
    public fun generate(
        prompt: String,
        options: Options = Options(),
        onEnd: (Generation) -> Unit = {},
    ): Flow<String> = pieces({ Request.completion(prompt, options).stream(handle, it) }, onEnd)

    /** Completes a text as it is. */
    public suspend fun completion(prompt: String, options: Options = Options()): Generation =
        called { generation(Request.completion(prompt, options).generate(handle, it)) }

    /**
     * Answers a conversation, rendered with the model's chat template, piece by piece: as [generate]. Where the last
     * message is the assistant's, the model goes on with it, and the answer is what is added.
     */
    public fun chat(
        messages: List<Message>,
        options: Options = Options(),
        chat: ChatOptions = ChatOptions(),
        onEnd: (Generation) -> Unit = {},
    ): Flow<String> = pieces({ Request.chat(messages, chat, options).stream(handle, it) }, onEnd)

    /** Answers a conversation, rendered with the model's chat template. */
    public suspend fun reply(
        messages: List<Message>,
        options: Options = Options(),
        chat: ChatOptions = ChatOptions(),
    ): Generation = called { generation(Request.chat(messages, chat, options).generate(handle, it)) }

    /**
     * The vectors of texts. Short ones share executions of a graph.
     *
     * @param role What the texts are: they stand behind the bundle's prefix for it.
     * @param truncate Whether a text that is too long is cut instead of refused.
     */
    public suspend fun embed(
        texts: List<String>,
        role: Role = Role.DOCUMENT,
        truncate: Boolean = false,
    ): Array<FloatArray> = called { call ->
        Native.embed(handle, call, Array(texts.size) { utf8(texts[it]) }, utf8(role.word), truncate)
    }

    /**
     * The words of an audio clip of any length.
     *
     * @param maxNewTokens Maximum number of tokens of each of its chunks.
     * @param wordTimes Whether the transcript has [Transcript.words]; a model that does not find them is refused.
     * @param vad Rules by which the model is given speech alone; times stay those of the clip. All of it if null.
     */
    public suspend fun transcribe(
        audio: Audio,
        maxNewTokens: Int? = null,
        wordTimes: Boolean = false,
        vad: SpeechRules? = null,
    ): Transcript = called { call ->
        if (maxNewTokens != null && maxNewTokens < 0) throw UsageException("option maxNewTokens: $maxNewTokens")
        val media = Attached().apply { add(audio.medium, "audio") }
        val rules = vad?.json() ?: ByteArray(0)
        transcript(Native.transcribe(handle, call, media.json(), media.contents(), maxNewTokens ?: -1, wordTimes, rules))
    }

    /** True while something runs, or a flow is collected. */
    public val busy: Boolean get() = Native.busy(handle)

    /**
     * Ends what runs, within one execution of a graph, from any thread: a generation has the finish reason
     * [FinishReason.CANCELLED] then, and embedding throws an exception of the kind `cancelled`. False where nothing runs.
     */
    public fun cancel(): Boolean = Native.cancelModel(handle)

    /** Ends what runs, waits for that, and frees the model; it can do nothing any more. */
    override fun close(): Unit = Native.close(handle)

    override fun toString(): String = "Model $name on $backend"

    public companion object {
        /**
         * Opens a bundle: a folder, a manifest, or a folder with bundles of several architectures.
         *
         * @param backend `auto` (the NPU where there is one and the bundle is made for it, otherwise the CPU), `cpu` or
         * `qnn`; the variable `QHX_BACKEND` otherwise.
         * @param deviceArch Architecture of the device, such as `v81`, where that of the library is not to be taken.
         * @param htp Path of libQnnHtp, and [system] that of libQnnSystem; the dynamic loader finds them otherwise.
         * @param plugins Folders that are searched for plugins before the others.
         * @param threads Threads of the CPU; one a core by default.
         * @param decodeOn What consumes the tokens of answers where the NPU consumes prompts: `cpu`, `npu`, or `auto`,
         * which measures both when the bundle is opened for the first time. By default one backend consumes both.
         * @param cpuActivations Type that the CPU rounds activations to in matmuls with int8 and 4-bit weights: `int16`,
         * or `int8`, which is faster and less exact; by default, `auto`, int8 with 4-bit weights and int16 with int8.
         * @param cpuCaches Type that the CPU stores caches of keys and values as: `f16`, or `f32`, in twice the memory.
         */
        public suspend fun open(
            bundle: String,
            backend: String? = null,
            deviceArch: String? = null,
            htp: String? = null,
            system: String? = null,
            plugins: List<String> = emptyList(),
            threads: Int? = null,
            decodeOn: String? = null,
            cpuActivations: String? = null,
            cpuCaches: String? = null,
        ): Model {
            val options = mapOf(
                "backend" to backend,
                "device_arch" to deviceArch,
                "htp" to htp,
                "system" to system,
                "plugins" to plugins,
                "threads" to threads,
                "decode_on" to decodeOn,
                "cpu_activations" to cpuActivations,
                "cpu_caches" to cpuCaches,
            )
            var opened: Model? = null
            try {
                return called { call -> Model(Native.open(call, utf8(bundle), json(options))).also { opened = it } }
            } catch (e: Throwable) {
                // Cancelled when it was there already.
                opened?.close()
                throw e
            }
        }

        /** The version of the native part. */
        public val version: String get() = Native.version().decodeToString()
    }
}
