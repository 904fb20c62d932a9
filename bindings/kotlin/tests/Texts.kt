package dev.qhx.tests

import dev.qhx.BundleException
import dev.qhx.ChatOptions
import dev.qhx.DeviceException
import dev.qhx.FinishReason
import dev.qhx.Generation
import dev.qhx.Message
import dev.qhx.Model
import dev.qhx.Options
import dev.qhx.PromptException
import dev.qhx.UsageException
import kotlinx.coroutines.flow.toList

private const val TOOLS = """[{"type": "function", "function": {"name": "weather", "parameters": {"type": "object",
    "properties": {"days": {"type": "integer", "minimum": 1, "maximum": 9}}, "required": ["days"],
    "additionalProperties": false}}}]"""

private const val SCHEMA = """{"type": "object", "properties": {"age": {"type": "integer", "minimum": 0, "maximum": 150}},
    "required": ["age"], "additionalProperties": false, "x-guidance": {"whitespace_flexible": false}}"""

/** Completions, conversations, forms of answers, and what is refused. */
fun Suite.texts() {
    val asLong = Options(maxNewTokens = given.tokens.size)

    test("a completion is that of transformers", "language") { model ->
        val answer = model.completion(given.prompt, asLong)
        same(given.answer, answer.text)
        same(given.tokens, answer.tokens.toList())
        same(FinishReason.LENGTH, answer.finishReason)
        check(answer.promptTokens > 3 && answer.decodeSeconds > 0 && answer.toString() == answer.text)
        // All but the last token of the prompt is there already.
        same(answer.promptTokens - 1, model.completion(given.prompt, Options(maxNewTokens = 1)).reusedTokens)
    }
    test("a flow gives the same text in pieces", "language") { model ->
        var whole: Generation? = null
        val pieces = model.generate(given.prompt, asLong) { whole = it }
        repeat(2) {
            val collected = pieces.toList()
            same(given.answer, collected.joinToString(""))
            check(collected.size > 10 && "" !in collected)
            same(given.tokens, whole?.tokens?.toList())
        }
    }
    test("emoji come and go whole", "language") { model ->
        val pieces = model.generate("The crab walks", Options(maxNewTokens = 48)).toList()
        has(pieces.joinToString(""), " sideways 🦀 because its legs")
        val split = pieces.filter { it.first().isLowSurrogate() || it.last().isHighSurrogate() || '\uFFFD' in it }
        same(emptyList<String>(), split)
        val choice = listOf("🦀👩‍🚀é東京 \"\\\n")
        same(choice[0], model.completion("Which?", Options(choice = choice, maxNewTokens = 100)).text)
    }
    test("conversations go on from their state", "language") { model ->
        val messages = ArrayList<Message>()
        for (turn in 0 until 2) {
            messages += Message.user(given.text("question-$turn"))
            val answer = model.reply(messages)
            same(given.text("reply-$turn"), answer.text)
            same(turn > 0, answer.reusedTokens > 20)
            messages += Message.assistant(answer.text)
        }
        same(given.text("reply-0"), model.chat(messages.take(1)).toList().joinToString(""))
    }
    test("options of sampling are honoured", "language") { model ->
        val drawn = listOf(1L, 1L, 2L).map {
            model.completion("The", Options(temperature = 2f, seed = it, maxNewTokens = 20)).text
        }
        check(drawn[0] == drawn[1] && drawn[1] != drawn[2])
        val stopped = model.completion(given.prompt, Options(stop = listOf("nowhere", " river")))
        same(given.answer.substringBefore(" river") to FinishReason.STOP, stopped.text to stopped.finishReason)
        val token = given.tokens[5]
        check(model.completion(given.prompt, Options(stopTokens = listOf(token))).tokens.size <= 6)
        same(given.answer, model.completion(given.prompt, asLong.copy(speculate = "auto")).text)
    }
    test("a token that is made unlikely is not chosen", "language") { model ->
        val first = given.tokens[0]
        val other = model.completion(given.prompt, Options(logitBias = mapOf(first to -100f), maxNewTokens = 1))
        check(other.tokens[0] != first)
        throws<UsageException>("usage", "logit_bias of token $first") {
            model.completion(given.prompt, Options(logitBias = mapOf(first to 101f)))
        }
    }
    test("the stop text that ended an answer is named", "language") { model ->
        val stops = Options(stop = listOf("nowhere", " river"))
        same(" river", model.completion(given.prompt, stops).stoppedAt)
        var streamed: Generation? = null
        model.generate(given.prompt, stops) { streamed = it }.toList()
        same(FinishReason.STOP to " river", streamed?.finishReason to streamed?.stoppedAt)
        val byToken = model.completion(given.prompt, Options(stopTokens = listOf(given.tokens[5])))
        same(FinishReason.STOP to null, byToken.finishReason to byToken.stoppedAt)
    }
    test("another salt goes on from no state", "language") { model ->
        val messages = listOf(Message.user(given.text("question-0")))
        for (salt in listOf("one", "two", null)) {
            val options = Options(cacheSalt = salt, maxNewTokens = 1)
            val texts = List(2) { model.completion(given.prompt, options) }
            val replies = List(2) { model.reply(messages, options) }
            same(listOf(false, true, false, true), (texts + replies).map { it.reusedTokens > 1 })
        }
        throws<UsageException>("usage", "the cache salt is empty") { model.completion("Hi", Options(cacheSalt = "")) }
    }
    test("answers are held to their form", "language") { model ->
        val json = model.completion("Who?", Options(schema = SCHEMA, maxNewTokens = 60)).text
        check(Regex("""\{"age": ?\d{1,3}\}""").matches(json)) { json }
        val city = model.reply(listOf(Message.user("Where?")), Options(choice = listOf("Oslo", "Rome")))
        check(city.text in listOf("Oslo", "Rome"))
        val month = Regex("[0-9]{4}-[0-9]{2}")
        check(month.matches(model.completion("When?", Options(regex = month.pattern)).text))
        check(month.matches(model.completion("When?", Options(lark = """start: /[0-9]{4}/ "-" /[0-9]{2}/""")).text))
    }
    test("calls of tools come back", "calling") { model ->
        val asked = listOf(Message.user("Name a city."))
        val must = ChatOptions(tools = TOOLS, mustCall = true)
        val answer = model.reply(asked, Options(maxNewTokens = 100), must)
        same("weather", answer.toolCalls[0].name)
        check(Regex("""\{"days":[1-9]\}""").matches(answer.toolCalls[0].arguments)) { answer.toolCalls }
        var streamed: Generation? = null
        model.chat(asked, Options(maxNewTokens = 100), must) { streamed = it }.toList()
        same(answer.toolCalls, streamed?.toolCalls)
        same(emptyList<Any>(), model.reply(asked, Options(maxNewTokens = 4), ChatOptions(tools = TOOLS)).toolCalls)
        throws<UsageException>("usage", "option tools") { model.reply(asked, chat = ChatOptions(tools = "[")) }
        throws<UsageException>("usage", "options schema and mustCall") { model.reply(asked, Options(schema = "{}"), must) }
    }
    test("what makes no sense is refused", "language") { model ->
        val refused = listOf(
            Triple(Options(temperature = -1f), "usage", "option temperature: expected 0 (greedy) or"),
            Triple(Options(temperature = Float.NaN), "usage", "NaN is no number of JSON"),
            Triple(Options(topK = -1), "usage", "expected usize"),
            Triple(Options(maxNewTokens = -1), "usage", "expected usize"),
            Triple(Options(speculate = "1000"), "usage", "option speculate: 1000"),
            Triple(Options(schema = "{"), "usage", "the JSON schema is no JSON"),
            Triple(Options(schema = """{"type": "integer", "minimum": 2, "maximum": 1}"""), "usage", "no value is of it"),
            Triple(Options(schema = "{}", regex = "a"), "usage", "options schema and regex are given"),
            Triple(Options(choice = emptyList()), "usage", "the choices: there are none"),
            Triple(Options(images = listOf(dev.qhx.Image("boat.png"))), "prompt", "does not take the modality image"),
        )
        for ((options, kind, words) in refused) {
            val asking: List<suspend () -> Unit> =
                listOf({ model.completion("Hi", options) }, { model.generate("Hi", options).toList() })
            for (ask in asking) throws<dev.qhx.QhxException>(kind, words) { ask() }
        }
        throws<PromptException>("prompt", "empty") { model.completion("") }
        throws<PromptException>("prompt", "the context of llama3-tiny holds") { model.completion("a ".repeat(2000)) }
        throws<UsageException>("usage", "half of a surrogate pair") { model.completion("\ud83e crab") }
        same(given.tokens.take(1), model.completion(given.prompt, Options(maxNewTokens = 1)).tokens.toList())
    }
    test("a bundle that cannot be opened says why") {
        val raw = throws<BundleException>("manifest", "llama3-tiny") { Model.open(given.fixture("llama3-tiny").path) }
        has(raw.hint, "make one of it: qhx forge")
        same("dev.qhx.BundleException: ${raw.message}\n  hint: ${raw.hint}", raw.toString())
        val language = given.bundle("language")
        throws<UsageException>("usage", "backend \"gpu\": expected auto, cpu or qnn") { Model.open(language, backend = "gpu") }
        throws<DeviceException>("runtime", "nowhere") {
            Model.open(language, backend = "qnn", htp = given.bundle("nowhere/libQnnHtp.so"))
        }
    }
    test("a model says what it is", "language") { model ->
        same("llama3-tiny llama_generate cpu", "${model.name} ${model.hostOp} ${model.backend}")
        check(model.modalities == listOf("text") && model.canChat && model.maxContext > 100 && model.embeddingDim == 0)
        has(model.manifest, given.bundle("language"))
        same("Model llama3-tiny on cpu", model.toString())
        same(given.text("version"), Model.version)
    }
    if (given.has("npu")) {
        test("a model generates on the NPU") {
            Model.open(given.bundle("npu"), backend = "qnn", htp = given.text("htp"), system = given.text("system")).use {
                same("qnn", it.backend.substringBefore(' '))
                same(given.tokens.take(4), it.completion(given.prompt, Options(maxNewTokens = 4)).tokens.toList())
            }
        }
    }
}
