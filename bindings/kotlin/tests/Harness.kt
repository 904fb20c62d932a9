package dev.qhx.tests

import dev.qhx.Model
import dev.qhx.QhxException
import kotlinx.coroutines.runBlocking
import java.io.File
import kotlin.system.exitProcess

/** What the tests are given: bundles, and what they answer. */
class Given(folder: File) {
    private val folder = folder.canonicalFile

    /** A bundle, by its name. */
    fun bundle(name: String): String = File(folder, name).path

    /** A file of the repository's fixtures. */
    fun fixture(name: String): File = File(text("fixtures"), name)

    /** A value. */
    fun text(name: String): String = File(folder, "$name.txt").readText()

    fun has(name: String): Boolean = File(folder, name).exists()

    val prompt: String get() = text("prompt")
    val answer: String get() = text("answer")
    val tokens: List<Int> get() = text("tokens").split(' ').map { it.toInt() }
}

/** Tests by name, in order. */
class Suite(val given: Given) {
    private val tests = LinkedHashMap<String, suspend () -> Unit>()

    fun test(name: String, body: suspend () -> Unit) {
        check(tests.put(name, body) == null) { name }
    }

    /** A test with a bundle that is opened for it. */
    fun test(name: String, bundle: String, body: suspend (Model) -> Unit) = test(name) {
        Model.open(given.bundle(bundle)).use { body(it) }
    }

    /** Runs those whose names have [filter]; the number of failures. */
    fun run(filter: String): Int {
        val chosen = tests.filterKeys { filter in it }
        val failed = chosen.count { (name, body) ->
            val failure = runCatching { runBlocking { body() } }.exceptionOrNull()
            println("test $name ... ${if (failure == null) "ok" else "FAILED"}")
            failure?.printStackTrace(System.out)
            failure != null
        }
        println("${chosen.size - failed} passed, $failed failed")
        return if (chosen.isEmpty()) 1 else failed
    }
}

fun same(expected: Any?, found: Any?) = check(expected == found) { "expected <$expected>, found <$found>" }

fun has(text: String?, part: String) = check(text != null && part in text) { "expected <$part> in <$text>" }

/** What [work] throws, which has to be of this kind. */
inline fun <reified E : QhxException> throws(kind: String, part: String, work: () -> Unit): E {
    val thrown = runCatching { work() }.exceptionOrNull()
    check(thrown is E) { "expected ${E::class.simpleName} of $part, found $thrown" }
    same(kind, thrown.kind)
    has(thrown.message, part)
    return thrown
}

fun main(arguments: Array<String>) {
    val suite = Suite(Given(File(arguments[0])))
    suite.texts()
    suite.media()
    suite.threads()
    suite.borders()
    suite.layout()
    suite.app()
    exitProcess(if (suite.run(arguments.getOrElse(1) { "" }) == 0) 0 else 1)
}
