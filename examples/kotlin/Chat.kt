// Asks a model: Chat BUNDLE QUESTION
import dev.qhx.Message
import dev.qhx.Model
import kotlinx.coroutines.runBlocking

fun main(arguments: Array<String>) = runBlocking {
    Model.open(arguments[0]).use { model ->
        model.chat(listOf(Message.user(arguments[1])), onEnd = { System.err.println("\n${it.tokens.size} tokens") })
            .collect { piece -> print(piece) }
    }
}
