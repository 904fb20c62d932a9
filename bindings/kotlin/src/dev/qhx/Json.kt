package dev.qhx

/** A text as UTF-8. Half of a surrogate pair is no character, and is refused. */
internal fun utf8(text: String): ByteArray = try {
    text.encodeToByteArray(throwOnInvalidSequence = true)
} catch (_: CharacterCodingException) {
    throw UsageException("a text has half of a surrogate pair", "do not cut texts between the two chars of an emoji")
}

/** JSON of maps, lists, texts, numbers and booleans. Values of a map that are null are left out. */
internal fun json(value: Any?): ByteArray = utf8(StringBuilder().apply { write(value) }.toString())

private fun StringBuilder.write(value: Any?) {
    when (value) {
        null, is Boolean, is Int, is Long -> append(value)
        is Float -> number(value.toDouble(), value)
        is Double -> number(value, value)
        is String -> quoted(value)
        is Map<*, *> -> listed("{", value.entries.filter { it.value != null }, "}") { (name, member) ->
            quoted(name.toString())
            append(':')
            write(member)
        }
        is Iterable<*> -> listed("[", value, "]") { write(it) }
        is IntArray -> write(value.asIterable())
        else -> throw UsageException("$value: ${value.javaClass.name}, which is no value of JSON")
    }
}

private fun StringBuilder.number(value: Double, shown: Number) {
    if (!value.isFinite()) throw UsageException("the options: $shown is no number of JSON")
    append(shown)
}

private fun <T> StringBuilder.listed(open: String, values: Iterable<T>, close: String, each: (T) -> Unit) {
    append(open)
    values.forEachIndexed { index, value ->
        if (index > 0) append(',')
        each(value)
    }
    append(close)
}

private fun StringBuilder.quoted(text: String) {
    append('"')
    for (char in text) {
        when {
            char == '"' || char == '\\' -> append('\\').append(char)
            char < ' ' -> append("\\u").append(char.code.toString(16).padStart(4, '0'))
            else -> append(char)
        }
    }
    append('"')
}
