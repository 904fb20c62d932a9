package dev.qhx.tests

import dev.qhx.BusyException
import dev.qhx.FinishReason
import dev.qhx.Model
import dev.qhx.Options
import dev.qhx.QhxException
import dev.qhx.UsageException
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.Job
import kotlinx.coroutines.async
import kotlinx.coroutines.awaitAll
import kotlinx.coroutines.cancelAndJoin
import kotlinx.coroutines.coroutineScope
import kotlinx.coroutines.flow.first
import kotlinx.coroutines.flow.take
import kotlinx.coroutines.flow.toList
import kotlinx.coroutines.launch
import kotlin.random.Random

/** Until the context is full. */
private val LONG = Options(maxNewTokens = 10_000, ignoreEos = true)

/** Waits until the model does what a coroutine asks, or that is over. */
private fun untilBusy(model: Model, asking: Job) {
    while (!model.busy && asking.isActive) Thread.onSpinWait()
}

/** Tries what depends on how fast threads are, until it was seen. */
private suspend fun eventually(attempt: suspend () -> Boolean) {
    for (number in 1..50) if (attempt()) return
    error("was not seen in 50 attempts")
}

/** Who may use a model when: flows, coroutines, threads, closing. */
fun Suite.threads() {
    val asLong = Options(maxNewTokens = given.tokens.size)

    test("a flow that is being collected refuses all else", "language") { model ->
        val pieces = StringBuilder()
        model.generate(given.prompt, asLong).collect {
            if (pieces.isEmpty() && model.busy) {
                val busy = throws<BusyException>("busy", "a stream of this model is open") { model.completion("Hi") }
                has(busy.hint, "close it")
                throws<BusyException>("busy", "is open") { model.generate("Hi").toList() }
                throws<BusyException>("busy", "is open") { model.embed(listOf("Hi")) }
            }
            pieces.append(it)
        }
        same(given.answer, pieces.toString())
        check(!model.busy)
    }
    test("a flow ends where its collector leaves it", "language") { model ->
        repeat(3) {
            val two = model.generate(given.prompt, LONG).take(2).toList()
            check(!model.busy && given.answer.startsWith(two.joinToString("")))
        }
        val thrown = runCatching { model.generate(given.prompt, LONG).collect { error("the collector") } }
        same("the collector", thrown.exceptionOrNull()?.message)
        check(!model.busy)
        same(given.answer, model.generate(given.prompt, asLong).toList().joinToString(""))
    }
    test("a cancelled coroutine ends what it asked for", "language") { model ->
        val whole = model.completion(given.prompt, LONG)
        val asking: List<suspend () -> Unit> = listOf(
            { model.generate(given.prompt, LONG).collect {} },
            { model.completion(given.prompt, LONG) },
        )
        for (ask in asking) eventually {
            // Else all of the prompt is there already.
            model.completion("Hi", Options(maxNewTokens = 1))
            coroutineScope {
                val job = launch(Dispatchers.Default) { ask() }
                untilBusy(model, job)
                job.cancelAndJoin()
            }
            check(!model.busy)
            // Less of the same text was consumed than there would have been.
            val again = model.completion(given.prompt + whole.text.dropLast(4), Options(maxNewTokens = 1))
            again.reusedTokens < again.promptTokens - 1
        }
    }
    test("a coroutine that waits for its turn can be cancelled", "language") { model ->
        coroutineScope {
            val first = async(Dispatchers.Default) { model.completion(given.prompt, LONG).finishReason }
            untilBusy(model, first)
            val second = launch(Dispatchers.Default) { model.completion("Hi", LONG) }
            second.cancelAndJoin()
            check(first.await() == FinishReason.LENGTH)
        }
    }
    test("coroutines wait for their turn", "language") { model ->
        val texts = coroutineScope {
            List(4) { async(Dispatchers.Default) { model.completion(given.prompt, asLong).text } }.awaitAll()
        }
        same(List(4) { given.answer }, texts)
    }
    test("two models run at once") {
        val texts = coroutineScope {
            List(2) {
                async(Dispatchers.Default) {
                    Model.open(given.bundle("language")).use { it.completion(given.prompt, asLong).text }
                }
            }.awaitAll()
        }
        same(List(2) { given.answer }, texts)
    }
    test("work is cancelled from another thread", "language") { model ->
        check(!model.cancel())
        eventually {
            coroutineScope {
                val answer = async(Dispatchers.Default) { model.completion(given.prompt, LONG) }
                untilBusy(model, answer)
                model.cancel() && answer.await().finishReason == FinishReason.CANCELLED
            }
        }
        var reason: FinishReason? = null
        model.generate(given.prompt, LONG) { reason = it.finishReason }.collect { model.cancel() }
        same(FinishReason.CANCELLED, reason)
        same(given.answer, model.completion(given.prompt, asLong).text)
    }
    test("a closed model does nothing more") {
        lateinit var model: Model
        eventually {
            model = Model.open(given.bundle("language"))
            coroutineScope {
                val answer = async(Dispatchers.Default) { model.completion(given.prompt, LONG) }
                untilBusy(model, answer)
                model.close()
                answer.await().finishReason == FinishReason.CANCELLED
            }
        }
        model.close()
        val uses: List<suspend () -> Any?> = listOf(
            { model.completion("Hi") },
            { model.generate("Hi").first() },
            { model.embed(listOf("Hi")) },
            { model.busy },
            { model.cancel() },
        )
        for (use in uses) throws<UsageException>("usage", "the model is closed") { use() }
        same("llama3-tiny", model.name)
    }
    test("closing a model ends the flow that its collector is in") {
        val model = Model.open(given.bundle("language"))
        var reason: FinishReason? = null
        var pieces = 0
        model.generate(given.prompt, LONG) { reason = it.finishReason }.collect {
            pieces += 1
            model.close()
        }
        check(reason == FinishReason.CANCELLED && pieces > 0)
    }
    test("opening can be cancelled") {
        coroutineScope {
            val opening = launch(Dispatchers.Default) { Model.open(given.bundle("language")).close() }
            opening.cancelAndJoin()
        }
    }
    test("random calls of four threads do not crash") {
        repeat(12) { seed ->
            val model = Model.open(given.bundle("language"), threads = 1)
            coroutineScope {
                repeat(4) { thread -> launch(Dispatchers.IO) { randomly(model, Random(4 * seed + thread)) } }
            }
            model.close()
        }
    }
}

/** Asks whatever there is; what is thrown has to be an exception of the library. */
private suspend fun randomly(model: Model, random: Random) = repeat(8) {
    val options = Options(maxNewTokens = random.nextInt(1, 8), stop = listOf("é"))
    try {
        when (random.nextInt(9)) {
            0 -> model.completion("The capital", options)
            1 -> model.generate("A", options).toList()
            2 -> model.generate("A", options).take(2).toList()
            3 -> model.chat(listOf(dev.qhx.Message.user("Hi")), options).first()
            4 -> model.cancel()
            5 -> coroutineScope { launch(Dispatchers.Default) { model.completion("B", LONG) }.cancelAndJoin() }
            6 -> model.embed(listOf("Hi"))
            7 -> model.completion("\udc00")
            else -> if (random.nextInt(8) == 0) model.close()
        }
    } catch (e: QhxException) {
        check(e.kind in listOf("usage", "busy", "cancelled", "prompt")) { e }
    } catch (_: NoSuchElementException) {
        // A flow that was cancelled before its first piece.
    }
}
