package dev.qhx.tests

import dev.qhx.Audio
import dev.qhx.Image
import dev.qhx.Model
import dev.qhx.example.Conversation
import dev.qhx.example.Phase
import dev.qhx.example.Samples
import dev.qhx.example.State
import dev.qhx.example.bundles
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Job
import kotlinx.coroutines.coroutineScope
import kotlinx.coroutines.flow.first
import kotlinx.coroutines.withTimeout
import java.io.File

/** Longest time for a change of the screen, on a machine that does much else. */
private const val PATIENCE_MS = 120_000L

/** A conversation in a scope that ends with it. */
private suspend fun conversation(test: suspend (Conversation) -> Unit) = coroutineScope {
    val scope = CoroutineScope(coroutineContext + Job(coroutineContext[Job]))
    val conversation = Conversation(scope) { Model.open(it) }
    test(conversation)
    conversation.close().join()
    scope.coroutineContext[Job]?.cancel()
    Unit
}

private suspend fun Conversation.until(what: (State) -> Boolean): State =
    withTimeout(PATIENCE_MS) { state.first(what) }

private suspend fun Conversation.opened(bundle: String): State {
    choose(bundle)
    return until { it.bundle == bundle && (it.phase == Phase.READY || it.failure != null) }
}

/** The sample application for Android, without Android. */
fun Suite.app() {
    test("the app streams an answer and goes on with the conversation") {
        conversation { app ->
            val opened = app.opened(given.bundle("language"))
            check(opened.canChat && !opened.sees && !opened.hears) { opened }
            has(opened.model, "on cpu (")
            check(app.send(given.text("question-0")))
            check(!app.send("while it answers")) { "two at once" }
            val streaming = app.until { it.turns.size == 2 && it.turns[1].text.isNotEmpty() }
            check(given.text("reply-0").startsWith(streaming.turns[1].text)) { streaming }
            val first = app.until { it.phase == Phase.READY }
            same(listOf(given.text("question-0"), given.text("reply-0")), first.turns.map { it.text })
            check(app.send(given.text("question-1")))
            val second = app.until { it.phase == Phase.READY }
            same(given.text("reply-1"), second.turns.last().text)
            val rates = checkNotNull(second.rates)
            check(rates.reusedTokens > 0 && rates.tokensPerSecond > 0 && rates.tokens > 1) { rates }
            app.clear()
            check(app.state.value.turns.isEmpty() && app.state.value.rates == null)
        }
    }
    test("the app cancels an answer, and the next one is whole") {
        conversation { app ->
            app.opened(given.bundle("language"))
            app.send(given.text("question-0"))
            app.until { it.turns.size == 2 && it.turns[1].text.isNotEmpty() }
            app.cancel()
            val cancelled = app.until { it.phase == Phase.READY }
            check(cancelled.failure == null) { cancelled }
            check(cancelled.turns[1].cancelled || cancelled.turns[1].text == given.text("reply-0")) { cancelled }
            app.clear()
            app.send(given.text("question-0"))
            val whole = app.until { it.phase == Phase.READY }.turns[1]
            same(given.text("reply-0") to false, whole.text to whole.cancelled)
        }
    }
    test("the app shows an error with its hint and can be used after it") {
        conversation { app ->
            val missing = app.opened(given.bundle("nowhere"))
            same(Phase.NO_MODEL, missing.phase)
            has(missing.failure?.message, "nowhere")
            check(!app.send("nobody is there"))
            app.opened(given.bundle("seeing"))
            app.send("What is this?", Image("GIF".encodeToByteArray()))
            val refused = app.until { it.phase == Phase.READY }
            check(refused.failure != null) { refused }
            same(listOf("What is this?"), refused.turns.map { it.text })
            val boat = given.fixture("qwen3vl-tiny/images/boat.png")
            app.send("Describe this image.", Image(boat))
            val seen = app.until { it.phase == Phase.READY }
            check(seen.failure == null) { seen }
            same("A red boat on a blue sea." to 1, seen.turns.last().text to seen.turns[1].images)
        }
    }
    test("the app has a clip written down by a model that cannot chat") {
        conversation { app ->
            check(app.opened(given.bundle("hearing")).hears)
            val (samples, rate) = samples(given.fixture("gemma4-tiny/noon.wav"))
            val recorded = Samples(rate, 1 + samples.size / rate)
            val shorts = ShortArray(samples.size) { (samples[it] * 32768).toInt().toShort() }
            recorded.add(shorts, shorts.size)
            same(samples.size, recorded.floats().size)
            check(app.hear("", recorded.audio()))
            same("the boat leaves at noon", app.until { it.phase == Phase.READY }.turns.last().text)
        }
    }
    test("the app goes from one model to another while it answers") {
        conversation { app ->
            app.opened(given.bundle("language"))
            app.send(given.text("question-0"))
            val other = app.opened(given.bundle("seeing"))
            check(other.sees && other.turns.isEmpty()) { other }
            app.close().join()
            same(State(), app.state.value)
        }
    }
    test("a recording ends where there is no room") {
        val samples = Samples(4, 2)
        samples.add(ShortArray(6) { 16384 }, 6)
        check(!samples.full)
        samples.add(ShortArray(6), 6)
        check(samples.full && samples.size == 8)
        same(listOf(0.5f, 0f), listOf(samples.floats()[5], samples.floats()[6]))
    }
    test("the app lists folders with bundles") {
        val folder = File(given.bundle("language")).parentFile
        val names = bundles(folder).map { File(it).name }
        check("language" in names && "qwen35" in names && "home" !in names) { names }
        same(emptyList<String>(), bundles(File(folder, "nowhere")))
    }
}
