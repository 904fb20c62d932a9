package dev.qhx.example

import android.Manifest
import android.app.Activity
import android.content.Intent
import android.content.pm.PackageManager
import android.os.Bundle
import android.view.View
import android.widget.AdapterView
import android.widget.ArrayAdapter
import android.widget.Button
import android.widget.EditText
import android.widget.ScrollView
import android.widget.Spinner
import android.widget.TextView
import dev.qhx.Image
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.MainScope
import kotlinx.coroutines.cancel
import kotlinx.coroutines.launch
import kotlinx.coroutines.withContext
import java.io.File
import java.io.IOException

private const val PICK_IMAGE = 1
private const val ALLOW_MICROPHONE = 2

/** The only screen: a model, a conversation with it, and how fast it answers. */
class MainActivity : Activity() {
    private val scope = MainScope()
    private val recorder = Recorder(scope)
    private lateinit var app: ExampleApplication
    private var image: Image? = null

    private lateinit var models: Spinner
    private lateinit var status: TextView
    private lateinit var turns: TextView
    private lateinit var scroll: ScrollView
    private lateinit var failure: TextView
    private lateinit var text: EditText
    private lateinit var pick: Button
    private lateinit var record: Button
    private lateinit var clear: Button
    private lateinit var send: Button

    override fun onCreate(savedInstanceState: Bundle?) {
        super.onCreate(savedInstanceState)
        setContentView(R.layout.activity_main)
        app = application as ExampleApplication
        models = findViewById(R.id.models)
        status = findViewById(R.id.status)
        turns = findViewById(R.id.turns)
        scroll = findViewById(R.id.scroll)
        failure = findViewById(R.id.failure)
        text = findViewById(R.id.text)
        pick = findViewById(R.id.image)
        record = findViewById(R.id.record)
        clear = findViewById(R.id.clear)
        send = findViewById(R.id.send)

        pick.setOnClickListener { pickImage() }
        record.setOnClickListener { if (recorder.recording) recorder.stop() else askToRecord() }
        clear.setOnClickListener { app.conversation.clear() }
        send.setOnClickListener { sendOrCancel() }
        scope.launch { app.conversation.state.collect { show(it) } }
    }

    override fun onResume() {
        super.onResume()
        listModels()
    }

    override fun onDestroy() {
        scope.cancel()
        super.onDestroy()
    }

    private fun listModels() {
        val found = bundles(app.models)
        val chosen = app.conversation.state.value.bundle
        models.adapter = ArrayAdapter(this, android.R.layout.simple_spinner_dropdown_item, found.map { File(it).name })
        models.setSelection(maxOf(found.indexOf(chosen), 0))
        models.onItemSelectedListener = object : AdapterView.OnItemSelectedListener {
            override fun onItemSelected(parent: AdapterView<*>?, view: View?, position: Int, id: Long) {
                val bundle = found[position]
                if (bundle != app.conversation.state.value.bundle) app.conversation.choose(bundle)
            }

            override fun onNothingSelected(parent: AdapterView<*>?) = Unit
        }
        if (found.isEmpty()) fail(getString(R.string.no_models, app.models.path))
    }

    private fun show(state: State) {
        status.text = listOfNotNull(
            state.model ?: state.bundle?.let { "… $it" },
            state.rates?.let {
                "%.1f tokens/s · %d tokens · prompt %d (%d reused) in %.1f s"
                    .format(it.tokensPerSecond, it.tokens, it.promptTokens, it.reusedTokens, it.prefillSeconds)
            },
        ).joinToString("\n")
        turns.text = state.turns.joinToString("\n\n") { turn ->
            val media = "🖼 ".repeat(turn.images) + "🎤 ".repeat(turn.clips)
            val mark = if (turn.fromUser) "› " else ""
            mark + media + turn.text + if (turn.cancelled) " ✕" else ""
        }
        scroll.post { scroll.fullScroll(View.FOCUS_DOWN) }
        val failed = state.failure
        if (failed != null) fail(listOfNotNull(failed.message, failed.hint).joinToString("\n")) else fail(null)
        val ready = state.phase == Phase.READY
        val busy = state.phase == Phase.ANSWERING || state.phase == Phase.OPENING
        pick.isEnabled = ready && state.sees
        record.isEnabled = recorder.recording || ready && state.hears
        clear.isEnabled = ready
        send.isEnabled = ready || busy
        send.setText(if (busy) R.string.cancel else R.string.send)
    }

    private fun fail(message: String?) {
        failure.text = message
        failure.visibility = if (message == null) View.GONE else View.VISIBLE
    }

    private fun sendOrCancel() {
        val phase = app.conversation.state.value.phase
        if (phase == Phase.ANSWERING || phase == Phase.OPENING) return app.conversation.cancel()
        val asked = text.text.toString()
        if (asked.isBlank() && image == null) return
        if (app.conversation.send(asked, image)) {
            text.setText("")
            setImage(null)
        }
    }

    private fun pickImage() {
        val pick = Intent(Intent.ACTION_OPEN_DOCUMENT).addCategory(Intent.CATEGORY_OPENABLE).setType("image/*")
        startActivityForResult(pick, PICK_IMAGE)
    }

    @Deprecated("the only way without AndroidX")
    override fun onActivityResult(requestCode: Int, resultCode: Int, data: Intent?) {
        val uri = data?.data
        if (requestCode != PICK_IMAGE || resultCode != RESULT_OK || uri == null) return
        scope.launch {
            try {
                setImage(withContext(Dispatchers.IO) { readImage(contentResolver, uri) })
            } catch (e: IOException) {
                fail(getString(R.string.no_image, e.message))
            }
        }
    }

    private fun setImage(picked: Image?) {
        image = picked
        pick.text = getString(R.string.image) + if (picked == null) "" else " ✓"
    }

    private fun askToRecord() {
        val permission = Manifest.permission.RECORD_AUDIO
        if (checkSelfPermission(permission) == PackageManager.PERMISSION_GRANTED) return startRecording()
        requestPermissions(arrayOf(permission), ALLOW_MICROPHONE)
    }

    override fun onRequestPermissionsResult(requestCode: Int, permissions: Array<String>, grantResults: IntArray) {
        if (requestCode != ALLOW_MICROPHONE) return
        val granted = grantResults.firstOrNull() == PackageManager.PERMISSION_GRANTED
        if (granted) startRecording() else fail(getString(R.string.no_microphone))
    }

    private fun startRecording() {
        record.setText(R.string.stop_recording)
        recorder.start { samples ->
            record.setText(R.string.record)
            if (samples == null) return@start fail(getString(R.string.no_microphone))
            if (app.conversation.hear(text.text.toString(), samples.audio())) text.setText("")
        }
    }
}
