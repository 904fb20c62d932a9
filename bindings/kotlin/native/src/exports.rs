//! The functions that the virtual machine looks up: those that `dev.qhx.Native` declares as `external`.

#![expect(unsafe_code, reason = "the virtual machine finds functions by their exported names")]

use jni::EnvUnowned;
use jni::objects::{JByteArray, JClass, JFloatArray, JObjectArray};
use jni::sys::{jboolean, jint, jlong};
use qhx::Times;
use qhx_bindings::Fault;

use crate::calls;
use crate::fault::called;
use crate::values::{self, Bytes};

type Env<'local> = EnvUnowned<'local>;
type Class<'local> = JClass<'local>;

/// `version(): ByteArray`
// SAFETY: as of all names here: the virtual machine's rules make it of package, class and function, nobody else uses it.
#[unsafe(no_mangle)]
extern "system" fn Java_dev_qhx_Native_version<'l>(
    env: Env<'l>,
    class: Class<'l>,
) -> JByteArray<'l> {
    called(env, &class, |env| Ok(env.byte_array_from_slice(env!("CARGO_PKG_VERSION").as_bytes())?))
}

/// `begin(): Long`
// SAFETY: as above.
#[unsafe(no_mangle)]
extern "system" fn Java_dev_qhx_Native_begin(env: Env<'_>, class: Class<'_>) -> jlong {
    called(env, &class, |_| Ok(calls::begin()))
}

/// `cancel(call: Long)`
// SAFETY: as above.
#[unsafe(no_mangle)]
extern "system" fn Java_dev_qhx_Native_cancel(env: Env<'_>, class: Class<'_>, call: jlong) {
    called(env, &class, |_| {
        calls::cancel(call);
        Ok(())
    });
}

/// `end(call: Long)`
// SAFETY: as above.
#[unsafe(no_mangle)]
extern "system" fn Java_dev_qhx_Native_end(env: Env<'_>, class: Class<'_>, call: jlong) {
    called(env, &class, |_| calls::end(call));
}

/// `open(call: Long, bundle: ByteArray, options: ByteArray): Long`
// SAFETY: as above.
#[unsafe(no_mangle)]
extern "system" fn Java_dev_qhx_Native_open<'l>(
    env: Env<'l>,
    class: Class<'l>,
    call: jlong,
    bundle: JByteArray<'l>,
    options: JByteArray<'l>,
) -> jlong {
    called(env, &class, |env| {
        calls::open(call, values::text(env, &bundle)?, values::text(env, &options)?)
    })
}

/// `about(model: Long): Array<Any>`
// SAFETY: as above.
#[unsafe(no_mangle)]
extern "system" fn Java_dev_qhx_Native_about<'l>(
    env: Env<'l>,
    class: Class<'l>,
    model: jlong,
) -> JObjectArray<'l> {
    called(env, &class, |env| values::about(env, &calls::model(model)?.about))
}

/// `generate(model: Long, call: Long, request: ByteArray, media: ByteArray, contents: Array<ByteArray?>): Array<Any?>`
// SAFETY: as above.
#[unsafe(no_mangle)]
extern "system" fn Java_dev_qhx_Native_generate<'l>(
    env: Env<'l>,
    class: Class<'l>,
    model: jlong,
    call: jlong,
    request: JByteArray<'l>,
    media: JByteArray<'l>,
    contents: Bytes<'l>,
) -> JObjectArray<'l> {
    called(env, &class, |env| {
        let items = values::items(env, &media, &contents)?;
        let answer = calls::generate(model, call, values::asked(env, &request)?, items)?;
        values::answer(env, &answer)
    })
}

/// `stream(model: Long, call: Long, request: ByteArray, media: ByteArray, contents: Array<ByteArray?>)`
// SAFETY: as above.
#[unsafe(no_mangle)]
extern "system" fn Java_dev_qhx_Native_stream<'l>(
    env: Env<'l>,
    class: Class<'l>,
    model: jlong,
    call: jlong,
    request: JByteArray<'l>,
    media: JByteArray<'l>,
    contents: Bytes<'l>,
) {
    called(env, &class, |env| {
        let items = values::items(env, &media, &contents)?;
        calls::stream(model, call, values::asked(env, &request)?, items)
    });
}

/// `next(call: Long): ByteArray?`
// SAFETY: as above.
#[unsafe(no_mangle)]
extern "system" fn Java_dev_qhx_Native_next<'l>(
    env: Env<'l>,
    class: Class<'l>,
    call: jlong,
) -> JByteArray<'l> {
    called(env, &class, |env| match calls::next(call)? {
        Some(piece) => Ok(env.byte_array_from_slice(piece.as_bytes())?),
        None => Ok(JByteArray::default()),
    })
}

/// `result(call: Long): Array<Any?>?`
// SAFETY: as above.
#[unsafe(no_mangle)]
extern "system" fn Java_dev_qhx_Native_result<'l>(
    env: Env<'l>,
    class: Class<'l>,
    call: jlong,
) -> JObjectArray<'l> {
    called(env, &class, |env| match calls::result(call)? {
        Some(answer) => values::answer(env, &answer),
        None => Ok(JObjectArray::default()),
    })
}

/// `embed(model: Long, call: Long, texts: Array<ByteArray>, role: ByteArray, truncate: Boolean): Array<FloatArray>`
// SAFETY: as above.
#[unsafe(no_mangle)]
extern "system" fn Java_dev_qhx_Native_embed<'l>(
    env: Env<'l>,
    class: Class<'l>,
    model: jlong,
    call: jlong,
    texts: Bytes<'l>,
    role: JByteArray<'l>,
    truncate: jboolean,
) -> JObjectArray<'l, JFloatArray<'l>> {
    called(env, &class, |env| {
        let (texts, role) = (values::texts(env, &texts)?, values::text(env, &role)?);
        values::vectors(env, &calls::embed(model, call, texts, &role, truncate)?)
    })
}

/// `transcribe(model: Long, call: Long, media: ByteArray, contents: Array<ByteArray?>, maxNew: Int,
/// wordTimes: Boolean): Array<Any>`
// SAFETY: as above.
#[unsafe(no_mangle)]
extern "system" fn Java_dev_qhx_Native_transcribe<'l>(
    env: Env<'l>,
    class: Class<'l>,
    model: jlong,
    call: jlong,
    media: JByteArray<'l>,
    contents: Bytes<'l>,
    max_new: jint,
    word_times: jboolean,
) -> JObjectArray<'l> {
    called(env, &class, |env| {
        let audio = values::items(env, &media, &contents)?.pop();
        let audio = audio.ok_or_else(|| Fault::usage("expected audio"))?;
        // Below 0 where none is given.
        let max_new = usize::try_from(max_new).ok();
        let times = if word_times { Times::Word } else { Times::default() };
        values::transcript(env, &calls::transcribe(model, call, audio, max_new, times)?)
    })
}

/// `busy(model: Long): Boolean`
// SAFETY: as above.
#[unsafe(no_mangle)]
extern "system" fn Java_dev_qhx_Native_busy(
    env: Env<'_>,
    class: Class<'_>,
    model: jlong,
) -> jboolean {
    called(env, &class, |_| Ok(calls::model(model)?.shared.is_busy()?))
}

/// `cancelModel(model: Long): Boolean`
// SAFETY: as above.
#[unsafe(no_mangle)]
extern "system" fn Java_dev_qhx_Native_cancelModel(
    env: Env<'_>,
    class: Class<'_>,
    model: jlong,
) -> jboolean {
    called(env, &class, |_| Ok(calls::model(model)?.shared.cancel()?))
}

/// `close(model: Long)`
// SAFETY: as above.
#[unsafe(no_mangle)]
extern "system" fn Java_dev_qhx_Native_close(env: Env<'_>, class: Class<'_>, model: jlong) {
    called(env, &class, |_| calls::close(model));
}
