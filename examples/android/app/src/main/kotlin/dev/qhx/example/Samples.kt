package dev.qhx.example

import dev.qhx.Audio

/** Recorded samples, up to a number of seconds. */
class Samples(private val rate: Int, seconds: Int) {
    private val samples = ShortArray(rate * seconds)

    /** Number of samples so far. */
    var size = 0
        private set

    /** No more are taken. */
    val full: Boolean get() = size == samples.size

    /** Adds the first [count] samples of [more], as far as there is room. */
    fun add(more: ShortArray, count: Int) {
        val taken = minOf(count, samples.size - size)
        more.copyInto(samples, size, 0, taken)
        size += taken
    }

    /** The clip, as the library takes it. */
    fun audio(): Audio = Audio(floats(), rate)

    /** The samples in −1 to 1. */
    fun floats(): FloatArray = FloatArray(size) { samples[it] / 32768f }
}
