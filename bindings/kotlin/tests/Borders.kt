package dev.qhx.tests

import dev.qhx.Native
import dev.qhx.QhxException
import dev.qhx.UsageException

/** The native part, called as the library never does. */
fun Suite.borders() {
    val none = arrayOf<ByteArray?>()
    fun bytes(text: String) = text.encodeToByteArray()

    test("handles that are none are refused") {
        for (handle in listOf(0L, -1L, 99_999_999L, Long.MIN_VALUE)) {
            Native.cancel(handle)
            Native.end(handle)
            Native.close(handle)
            throws<UsageException>("usage", "the call has ended") { Native.next(handle) }
            throws<UsageException>("usage", "the call has ended") { Native.result(handle) }
            throws<UsageException>("usage", "the call has ended") { Native.open(handle, bytes("x"), bytes("{}")) }
            throws<UsageException>("usage", "the model is closed") { Native.about(handle) }
            throws<UsageException>("usage", "the model is closed") {
                Native.stream(handle, handle, bytes("""{"prompt": {"text": "Hi"}}"""), bytes("[]"), none)
            }
        }
    }
    test("a call ends once, and has one stream at most") {
        val call = Native.begin()
        throws<UsageException>("usage", "the call has no stream") { Native.next(call) }
        same(null, Native.result(call))
        val opening = Native.begin()
        val model = Native.open(opening, bytes(given.bundle("language")), bytes("{}"))
        Native.cancel(opening)
        val hi = bytes("""{"prompt": {"text": "Hi"}, "max_new_tokens": 2}""")
        Native.stream(model, call, hi, bytes("[]"), none)
        val other = Native.begin()
        throws<QhxException>("busy", "a stream of this model is open") { Native.stream(model, other, hi, bytes("[]"), none) }
        Native.end(other)
        while (Native.next(call) != null) continue
        throws<UsageException>("usage", "has a stream already") { Native.stream(model, call, hi, bytes("[]"), none) }
        check(!Native.busy(model))
        Native.end(call)
        throws<UsageException>("usage", "the call has ended") { Native.next(call) }
        throws<UsageException>("usage", "the call has ended") { Native.generate(model, call, hi, bytes("[]"), none) }
        Native.close(model)
    }
    test("bytes that are no request are refused") {
        val call = Native.begin()
        val opening = Native.begin()
        val model = Native.open(opening, bytes(given.bundle("language")), bytes("{}"))
        Native.cancel(opening)
        val wrong = listOf("", "{", "[]", """{"prompt": {"text": "Hi"}, "more": 1}""", "\u0000").map { bytes(it) }
        for (request in wrong + byteArrayOf(-1, -2)) {
            throws<UsageException>("usage", "") { Native.generate(model, call, request, bytes("[]"), none) }
        }
        val hi = bytes("""{"prompt": {"text": "Hi"}, "max_new_tokens": 1}""")
        throws<QhxException>("usage", "as many contents as media") {
            Native.generate(model, call, hi, bytes("[]"), arrayOf(null))
        }
        throws<QhxException>("internal", "the media") { Native.generate(model, call, hi, bytes("7"), none) }
        throws<QhxException>("usage", "no medium is called") {
            Native.generate(model, call, hi, bytes("""[["smell", "x", [0, 0]]]"""), arrayOf(null))
        }
        throws<QhxException>("internal", "there is no medium 3") {
            Native.generate(model, call, bytes("""{"prompt": {"text": "Hi"}, "beside": [3]}"""), bytes("[]"), none)
        }
        throws<UsageException>("usage", "option role") {
            Native.embed(model, call, arrayOf(bytes("Hi")), bytes("both"), false)
        }
        same(1, (Native.generate(model, call, hi, bytes("[]"), none)[2] as IntArray).size)
        Native.end(call)
        Native.close(model)
    }
}
