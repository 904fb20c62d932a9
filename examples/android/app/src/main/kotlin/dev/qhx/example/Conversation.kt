package dev.qhx.example

import dev.qhx.Audio
import dev.qhx.ChatOptions
import dev.qhx.FinishReason
import dev.qhx.Generation
import dev.qhx.Image
import dev.qhx.Message
import dev.qhx.Model
import dev.qhx.Options
import dev.qhx.Part
import dev.qhx.QhxException
import dev.qhx.TextPart
import kotlinx.coroutines.CancellationException
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.Job
import kotlinx.coroutines.NonCancellable
import kotlinx.coroutines.flow.MutableStateFlow
import kotlinx.coroutines.flow.StateFlow
import kotlinx.coroutines.flow.update
import kotlinx.coroutines.launch
import kotlinx.coroutines.withContext
import java.io.File

/** A message as the screen shows it. */
data class Turn(
    val fromUser: Boolean,
    val text: String,
    val images: Int = 0,
    val clips: Int = 0,
    /** The user ended the answer, which is not whole. */
    val cancelled: Boolean = false,
)

/** A failure with a likely fix. */
data class Failure(val message: String, val hint: String?)

/** Speed of the last answer. */
data class Rates(
    val promptTokens: Int,
    val reusedTokens: Int,
    val prefillSeconds: Double,
    val tokens: Int,
    val tokensPerSecond: Double,
)

/** Phase of the work. */
enum class Phase { NO_MODEL, OPENING, READY, ANSWERING }

/** The whole of what the screen shows. */
data class State(
    val phase: Phase = Phase.NO_MODEL,
    /** Path of the bundle that is open, or is being opened. */
    val bundle: String? = null,
    /** Name of the model, what runs it, and why. */
    val model: String? = null,
    val canChat: Boolean = false,
    val sees: Boolean = false,
    val hears: Boolean = false,
    val turns: List<Turn> = emptyList(),
    val rates: Rates? = null,
    val failure: Failure? = null,
)

/**
 * A conversation with one model at a time. Nothing here is Android's: the screen collects [state] and calls the rest,
 * which returns at once.
 *
 * @param open Opens a bundle, with the libraries of this device.
 */
class Conversation(private val scope: CoroutineScope, private val open: suspend (String) -> Model) {
    private val shown = MutableStateFlow(State())
    private var model: Model? = null
    private var work: Job? = null

    /** Messages as the model gets them. */
    private val messages = ArrayList<Message>()

    val state: StateFlow<State> = shown

    /** Opens another bundle in place of the one that is open. The conversation begins again. */
    fun choose(bundle: String) = begin {
        shown.value = State(Phase.OPENING, bundle)
        messages.clear()
        free()
        try {
            val opened = open(bundle)
            model = opened
            shown.update {
                State(
                    phase = Phase.READY,
                    bundle = bundle,
                    model = "${opened.name} on ${opened.backend} (${opened.backendReason})",
                    canChat = opened.canChat,
                    sees = "image" in opened.modalities,
                    hears = "audio" in opened.modalities,
                )
            }
        } catch (e: QhxException) {
            shown.value = State(bundle = bundle, failure = failure(e))
        } catch (e: CancellationException) {
            shown.value = State()
            throw e
        }
    }

    /** Asks the model. A text is completed where it has no chat template. False while it answers. */
    fun send(text: String, image: Image? = null, clip: Audio? = null): Boolean = ask(text, image, clip) { model ->
        val media = listOfNotNull<Part>(image, clip)
        var answer: Generation? = null
        val pieces = if (model.canChat) {
            // A question whose answer failed is not asked again.
            val asked = messages + Message("user", media + TextPart(text))
            model.chat(asked, OPTIONS, ChatOptions(), onEnd = { answer = it })
        } else {
            val options = OPTIONS.copy(images = listOfNotNull(image), audio = listOfNotNull(clip))
            model.generate(text, options, onEnd = { answer = it })
        }
        pieces.collect { piece -> extend(piece) }
        answer?.let { whole ->
            messages += Message("user", media + TextPart(text))
            messages += Message.assistant(whole.text)
            shown.update { it.copy(rates = rates(whole), turns = it.turns.ended(whole.finishReason)) }
        }
    }

    /** Writes down what is said in a clip. False while the model does something else. */
    fun transcribe(clip: Audio): Boolean = ask("", null, clip) { model ->
        val heard = model.transcribe(clip)
        extend(heard.text)
        if (heard.cancelled) shown.update { it.copy(turns = it.turns.ended(FinishReason.CANCELLED)) }
    }

    /** Hands a recorded clip to the model in the way that it has: as part of a message, or to be written down. */
    fun hear(text: String, clip: Audio): Boolean =
        if (shown.value.canChat) send(text, clip = clip) else transcribe(clip)

    /** Ends what runs. What there is of an answer stays. */
    fun cancel() {
        // Where nothing runs in the model yet, as while it is opened, the coroutine ends.
        if (model?.cancel() != true) work?.cancel()
    }

    /** Begins again with the same model. */
    fun clear() {
        if (shown.value.phase != Phase.READY) return
        messages.clear()
        shown.update { it.copy(turns = emptyList(), rates = null, failure = null) }
    }

    /** Ends what runs, and frees the model. */
    fun close() = begin {
        free()
        shown.value = State()
    }

    private fun ask(text: String, image: Image?, clip: Audio?, answer: suspend (Model) -> Unit): Boolean {
        val model = model
        if (model == null || shown.value.phase != Phase.READY) return false
        val asked = Turn(true, text, if (image == null) 0 else 1, if (clip == null) 0 else 1)
        shown.update {
            it.copy(phase = Phase.ANSWERING, failure = null, turns = it.turns + asked + Turn(false, ""))
        }
        work = scope.launch {
            try {
                answer(model)
            } catch (e: QhxException) {
                shown.update { it.copy(failure = if (e.kind == "cancelled") null else failure(e)) }
            } catch (e: CancellationException) {
                shown.update { it.copy(turns = it.turns.ended(FinishReason.CANCELLED)) }
                throw e
            } finally {
                shown.update { it.copy(phase = Phase.READY, turns = it.turns.withoutEmptyAnswer()) }
            }
        }
        return true
    }

    private fun extend(piece: String) = shown.update {
        it.copy(turns = it.turns.dropLast(1) + it.turns.last().let { turn -> turn.copy(text = turn.text + piece) })
    }

    /** Runs [next] behind what runs now, which is ended. */
    private fun begin(next: suspend () -> Unit): Job {
        val before = work
        model?.cancel()
        before?.cancel()
        return scope.launch {
            before?.join()
            next()
        }.also { work = it }
    }

    /** Frees the model, for which the NPU may have to be waited for. */
    private suspend fun free() {
        val old = model ?: return
        model = null
        withContext(NonCancellable + Dispatchers.IO) { old.close() }
    }

    private companion object {
        val OPTIONS = Options(maxNewTokens = 512)

        fun failure(e: QhxException) = Failure(e.message, e.hint)

        fun rates(answer: Generation): Rates {
            // The first token comes with the prompt.
            val decoded = answer.tokens.size - 1
            val rate = if (decoded > 0 && answer.decodeSeconds > 0) decoded / answer.decodeSeconds else 0.0
            return Rates(answer.promptTokens, answer.reusedTokens, answer.prefillSeconds, answer.tokens.size, rate)
        }

        fun List<Turn>.ended(why: FinishReason): List<Turn> =
            if (why == FinishReason.CANCELLED) dropLast(1) + last().copy(cancelled = true) else this

        fun List<Turn>.withoutEmptyAnswer(): List<Turn> =
            if (lastOrNull()?.let { !it.fromUser && it.text.isEmpty() } == true) dropLast(1) else this
    }
}

/** Bundles in [folder], by path: folders with a manifest, and folders of such folders, one for each architecture. */
fun bundles(folder: File): List<String> {
    fun File.holdsManifest() = listFiles()?.any { it.isFile && it.extension == "json" } == true
    val folders = folder.listFiles()?.filter { it.isDirectory }.orEmpty()
    return folders.filter { it.holdsManifest() || it.listFiles()?.any(File::holdsManifest) == true }
        .map { it.path }
        .sorted()
}
