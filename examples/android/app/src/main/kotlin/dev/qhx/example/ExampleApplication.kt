package dev.qhx.example

import android.app.Application
import android.system.Os
import dev.qhx.Model
import kotlinx.coroutines.MainScope
import java.io.File

/** Holds what outlives the screen: the model, and the conversation with it. */
class ExampleApplication : Application() {
    private val scope = MainScope()

    /** Folder of the bundles: the user may copy some there by adb, without rights. */
    val models: File get() = getExternalFilesDir("models") ?: File(filesDir, "models")

    val conversation: Conversation by lazy { Conversation(scope, ::open) }

    private suspend fun open(bundle: String): Model {
        val libraries = applicationInfo.nativeLibraryDir
        // The DSP has to know where its libraries are before the first model is opened.
        Os.setenv("ADSP_LIBRARY_PATH", libraries, true)
        // What is remembered of bundles, such as the faster backend.
        Os.setenv("QHX_CACHE_DIR", File(cacheDir, "qhx").path, true)
        val htp = File(libraries, "libQnnHtp.so").path.takeIf { File(it).exists() }
        val system = File(libraries, "libQnnSystem.so").path.takeIf { htp != null }
        return Model.open(bundle, htp = htp, system = system)
    }
}
