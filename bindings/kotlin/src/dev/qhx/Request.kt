package dev.qhx

/**
 * What a generation takes besides a prompt. What is null has its default: the most likely tokens, at most 1024 of them.
 *
 * @property maxNewTokens Maximum number of tokens of the answer.
 * @property temperature Divides the logits; 0, the default, takes the most likely token.
 * @property topK Draws among this many of the most likely tokens; 0 for all.
 * @property topP Draws among the most likely tokens whose probabilities sum to this.
 * @property minP Draws among tokens at least this likely relative to the most likely one.
 * @property repetitionPenalty Divides positive and multiplies negative logits of tokens in prompt or answer; 1 is off.
 * @property presencePenalty Subtracted from the logits of tokens in the answer.
 * @property frequencyPenalty Subtracted from the logits of tokens in the answer, once for each occurrence.
 * @property penaltyWindow Penalties see this many of the last tokens; 0 for all.
 * @property logitBias Added to the logits of tokens, by their ids; -100 excludes a token.
 * @property seed Makes drawn answers repeatable, on every machine.
 * @property stop Texts that end the answer; none of them appears in it.
 * @property stopTokens Tokens that end the answer, besides the model's own.
 * @property ignoreEos Goes on behind the model's end-of-text tokens.
 * @property speculate Speculative decoding: `auto`, `off`, or a number of draft tokens a step. The answer stays the same.
 * @property cacheSalt Goes on only from what answers with the same salt consumed, so that no other user's prompt can be
 * guessed from times or [Generation.reusedTokens]. Those without one share theirs.
 * @property schema The answer is JSON of this JSON schema. One of this and the next three is given at most.
 * @property regex The answer is a text that the whole of this regular expression matches.
 * @property choice The answer is one of these texts.
 * @property lark The answer is a text of this grammar, in the Lark syntax of llguidance.
 * @property images Images of the prompt, or of the last message: at `<image>` in its text, or before it.
 * @property audio Audio clips, at `<audio>` or before the text.
 */
public data class Options(
    val maxNewTokens: Int? = null,
    val temperature: Float? = null,
    val topK: Int? = null,
    val topP: Float? = null,
    val minP: Float? = null,
    val repetitionPenalty: Float? = null,
    val presencePenalty: Float? = null,
    val frequencyPenalty: Float? = null,
    val penaltyWindow: Int? = null,
    val logitBias: Map<Int, Float>? = null,
    val seed: Long? = null,
    val stop: List<String> = emptyList(),
    val stopTokens: List<Int> = emptyList(),
    val ignoreEos: Boolean = false,
    val speculate: String? = null,
    val cacheSalt: String? = null,
    val schema: String? = null,
    val regex: String? = null,
    val choice: List<String>? = null,
    val lark: String? = null,
    val images: List<Image> = emptyList(),
    val audio: List<Audio> = emptyList(),
)

/**
 * What only conversations take.
 *
 * @property tools The tools that the model may call, as JSON: a list of `{"type": "function", "function": …}`. The calls
 * of an answer are [Generation.toolCalls].
 * @property mustCall The answer is calls, and nothing else.
 * @property thinking Whether the model thinks first, where its template knows that.
 * @property templateArguments Further variables of the template.
 */
public data class ChatOptions(
    val tools: String? = null,
    val mustCall: Boolean = false,
    val thinking: Boolean? = null,
    val templateArguments: Map<String, Any?> = emptyMap(),
)

/** A message of a conversation; [role] is `system`, `user`, `assistant`, `tool` or what else the template knows. */
public class Message(public val role: String, public val content: List<Part>) {
    public constructor(role: String, text: String) : this(role, listOf(TextPart(text)))

    public companion object {
        /** What the user says, behind [media]. */
        public fun user(text: String, vararg media: Part): Message = Message("user", listOf(*media, TextPart(text)))

        /** What the model answered. */
        public fun assistant(text: String): Message = Message("assistant", text)

        /** What holds for the whole conversation. */
        public fun system(text: String): Message = Message("system", text)
    }
}

/** A request as the native part takes it. */
internal class Request(prompt: Map<String, Any>, options: Options, chat: ChatOptions?, private val media: Attached) {
    private val text = json(asked(prompt, options, chat))

    fun generate(model: Long, call: Long): Array<Any?> =
        Native.generate(model, call, text, media.json(), media.contents())

    fun stream(model: Long, call: Long) = Native.stream(model, call, text, media.json(), media.contents())

    private fun asked(prompt: Map<String, Any>, options: Options, chat: ChatOptions?): Map<String, Any?> = mapOf(
        "prompt" to prompt,
        "beside" to options.images.mapIndexed { index, image -> media.add(image.medium, "images[$index]") } +
            options.audio.mapIndexed { index, clip -> media.add(clip.medium, "audio[$index]") },
        "max_new_tokens" to options.maxNewTokens,
        "sampling" to sampling(options),
        "stop" to options.stop,
        "stop_tokens" to options.stopTokens,
        "ignore_eos" to options.ignoreEos,
        "speculate" to options.speculate,
        "cache_salt" to options.cacheSalt,
        "form" to form(options, chat),
        "thinking" to chat?.thinking,
        "template_arguments" to chat?.templateArguments,
        "tools" to chat?.tools,
        "must_call" to chat?.mustCall,
    )

    private fun sampling(options: Options): Map<String, Any?> = mapOf(
        "temperature" to options.temperature,
        "top_k" to options.topK,
        "top_p" to options.topP,
        "min_p" to options.minP,
        "repetition_penalty" to options.repetitionPenalty,
        "presence_penalty" to options.presencePenalty,
        "frequency_penalty" to options.frequencyPenalty,
        "penalty_window" to options.penaltyWindow,
        "logit_bias" to options.logitBias?.mapKeys { it.key.toString() },
        "seed" to options.seed,
    )

    private fun form(options: Options, chat: ChatOptions?): Map<String, Any?>? {
        val forms = mapOf(
            "schema" to options.schema,
            "regex" to options.regex,
            "lark" to options.lark,
            "choice" to options.choice,
        ).filterValues { it != null }
        val given = forms.keys + if (chat?.mustCall == true) setOf("mustCall") else emptySet()
        if (given.size > 1) throw UsageException("options ${given.joinToString(" and ")} are given, expected one of them")
        return forms.ifEmpty { null }
    }

    companion object {
        fun completion(prompt: String, options: Options): Request =
            Request(mapOf("text" to prompt), options, null, Attached())

        fun chat(messages: List<Message>, chat: ChatOptions, options: Options): Request {
            val media = Attached()
            val turns = messages.mapIndexed { index, message -> turn(index, message, media) }
            return Request(mapOf("messages" to turns), options, chat, media)
        }

        private fun turn(index: Int, message: Message, media: Attached): Map<String, Any> {
            val only = message.content.singleOrNull()
            val parts = { message.content.mapIndexed { at, part -> part(part, "messages[$index].content[$at]", media) } }
            return mapOf("role" to message.role, "content" to if (only is TextPart) only.text else parts())
        }

        private fun part(part: Part, name: String, media: Attached): Any = when (part) {
            is TextPart -> part.text
            is Image -> media.add(part.medium, name)
            is Audio -> media.add(part.medium, name)
            is Video -> media.add(part.medium, name)
        }
    }
}
