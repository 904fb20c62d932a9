package dev.qhx

/**
 * Something failed. The model can be used after it.
 *
 * @property kind A stable word: `usage`, `prompt`, `manifest`, `artifact`, `context`, `graph`, `runtime`, `execute`,
 * `device_lost`, `plugin`, `panicked`, `cancelled`, `io`, `internal` or `busy`.
 * @property message What failed: the file, tensor or option, what was found and what was expected.
 * @property hint A likely fix.
 * @property code The number of a QNN library, where it failed.
 */
public open class QhxException internal constructor(
    public val kind: String,
    override val message: String,
    public val hint: String?,
    public val code: Long?,
) : Exception(message) {
    /** The message, and the hint on a line of its own. */
    override fun toString(): String {
        val said = "${javaClass.name}: $message"
        return if (hint == null) said else "$said\n  hint: $hint"
    }
}

/** An option or a call makes no sense, or the model is closed (kind `usage`). */
public class UsageException internal constructor(message: String, hint: String? = null, code: Long? = null) :
    QhxException("usage", message, hint, code)

/** A prompt cannot be used: empty, too long, with an image that is none (kind `prompt`). */
public class PromptException internal constructor(message: String, hint: String?, code: Long?) :
    QhxException("prompt", message, hint, code)

/** A bundle is damaged, or not for this machine (kinds `manifest`, `artifact`, `context`, `graph`). */
public class BundleException internal constructor(kind: String, message: String, hint: String?, code: Long?) :
    QhxException(kind, message, hint, code)

/** Libraries or device fail (kinds `runtime`, `execute`, `device_lost`). After a lost device, the next call opens it again. */
public class DeviceException internal constructor(kind: String, message: String, hint: String?, code: Long?) :
    QhxException(kind, message, hint, code)

/** A flow of the model is being collected (kind `busy`). */
public class BusyException internal constructor(message: String, hint: String?, code: Long?) :
    QhxException("busy", message, hint, code)

internal fun exception(kind: String, message: String, hint: String?, code: Long?): QhxException = when (kind) {
    "usage" -> UsageException(message, hint, code)
    "prompt" -> PromptException(message, hint, code)
    "manifest", "artifact", "context", "graph" -> BundleException(kind, message, hint, code)
    "runtime", "execute", "device_lost" -> DeviceException(kind, message, hint, code)
    "busy" -> BusyException(message, hint, code)
    else -> QhxException(kind, message, hint, code)
}
