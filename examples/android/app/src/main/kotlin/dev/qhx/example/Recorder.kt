package dev.qhx.example

import android.annotation.SuppressLint
import android.media.AudioFormat
import android.media.AudioRecord
import android.media.MediaRecorder
import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.Job
import kotlinx.coroutines.isActive
import kotlinx.coroutines.launch

/** Samples a second: what speech models compute with. */
private const val RATE = 16_000

/** Longest clip. */
private const val SECONDS = 60

/** Records from the microphone. */
class Recorder(private val scope: CoroutineScope) {
    private var job: Job? = null

    val recording: Boolean get() = job?.isActive == true

    /**
     * Records until [stop] or for a minute, and then calls [onEnd] with the clip; with null where the microphone cannot
     * be used. The permission to record is there.
     */
    @SuppressLint("MissingPermission")
    fun start(onEnd: (Samples?) -> Unit) {
        if (recording) return
        val samples = Samples(RATE, SECONDS)
        val reading = scope.launch(Dispatchers.IO) {
            val format = AudioFormat.ENCODING_PCM_16BIT
            val bytes = maxOf(AudioRecord.getMinBufferSize(RATE, AudioFormat.CHANNEL_IN_MONO, format), RATE)
            val source = MediaRecorder.AudioSource.VOICE_RECOGNITION
            val microphone = AudioRecord(source, RATE, AudioFormat.CHANNEL_IN_MONO, format, bytes)
            try {
                if (microphone.state != AudioRecord.STATE_INITIALIZED) return@launch
                microphone.startRecording()
                val buffer = ShortArray(RATE / 10)
                while (isActive && !samples.full) {
                    val read = microphone.read(buffer, 0, buffer.size)
                    if (read <= 0) break
                    samples.add(buffer, read)
                }
                microphone.stop()
            } finally {
                microphone.release()
            }
        }
        job = reading
        scope.launch {
            reading.join()
            onEnd(samples.takeIf { it.size > 0 })
        }
    }

    /** Ends the recording. */
    fun stop() {
        job?.cancel()
    }
}
