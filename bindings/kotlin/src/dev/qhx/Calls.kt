package dev.qhx

import kotlinx.coroutines.CoroutineScope
import kotlinx.coroutines.CoroutineStart
import kotlinx.coroutines.Dispatchers
import kotlinx.coroutines.ExperimentalCoroutinesApi
import kotlinx.coroutines.Job
import kotlinx.coroutines.awaitCancellation
import kotlinx.coroutines.coroutineScope
import kotlinx.coroutines.currentCoroutineContext
import kotlinx.coroutines.ensureActive
import kotlinx.coroutines.flow.Flow
import kotlinx.coroutines.flow.flow
import kotlinx.coroutines.flow.flowOn
import kotlinx.coroutines.launch
import kotlinx.coroutines.withContext

/** Does [work] on a thread that may block, with a call that ends within one execution of a graph when it is cancelled. */
internal suspend fun <T> called(work: (Long) -> T): T = coroutineScope {
    val call = Native.begin()
    val watch = watch(call)
    try {
        withContext(Dispatchers.IO) { unlessCancelled { work(call) } }
    } finally {
        // Cancelling what has ended does nothing.
        Native.end(call)
        watch.cancel()
    }
}

/** The pieces of a stream that [begin] begins each time the flow is collected. */
internal fun pieces(begin: (Long) -> Unit, onEnd: (Generation) -> Unit): Flow<String> = flow {
    coroutineScope {
        val call = Native.begin()
        val watch = watch(call)
        try {
            unlessCancelled { begin(call) }
            while (true) {
                val piece = unlessCancelled { Native.next(call) } ?: break
                emit(piece.decodeToString())
            }
            Native.result(call)?.let { onEnd(generation(it)) }
        } finally {
            Native.end(call)
            watch.cancel()
        }
    }
}.flowOn(Dispatchers.IO)

/** A call that was cancelled with its coroutine fails as that does. */
private suspend fun <T> unlessCancelled(work: () -> T): T = try {
    work()
} catch (e: QhxException) {
    currentCoroutineContext().ensureActive()
    throw e
}

/** Cancels the call when the scope is cancelled, on the thread that does so: no other may be free. */
@OptIn(ExperimentalCoroutinesApi::class)
private fun CoroutineScope.watch(call: Long): Job = launch(Dispatchers.Unconfined, CoroutineStart.UNDISPATCHED) {
    try {
        awaitCancellation()
    } finally {
        Native.cancel(call)
    }
}
