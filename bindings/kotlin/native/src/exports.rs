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

/// Declares functions by what they do: a closure, whose faults and panics are thrown as exceptions.
macro_rules! exports {
    ($($(#[$doc:meta])* fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $value:ty)? = $work:expr;)*) => {$(
        $(#[$doc])*
        // SAFETY: the virtual machine's rules make the name of package, class and function, nobody else uses it.
        #[unsafe(no_mangle)]
        extern "system" fn $name<'l>(env: Env<'l>, class: Class<'l>, $($argument: $type),*) $(-> $value)? {
            called(env, &class, $work)
        }
    )*};
}

exports! {
    /// `version(): ByteArray`
    fn Java_dev_qhx_Native_version() -> JByteArray<'l> = |env| {
        Ok(env.byte_array_from_slice(env!("CARGO_PKG_VERSION").as_bytes())?)
    };

    /// `begin(): Long`
    fn Java_dev_qhx_Native_begin() -> jlong = |_| Ok(calls::begin());

    /// `cancel(call: Long)`
    fn Java_dev_qhx_Native_cancel(call: jlong) = |_| {
        calls::cancel(call);
        Ok(())
    };

    /// `end(call: Long)`
    fn Java_dev_qhx_Native_end(call: jlong) = |_| calls::end(call);

    /// `open(call: Long, bundle: ByteArray, options: ByteArray): Long`
    fn Java_dev_qhx_Native_open(call: jlong, bundle: JByteArray<'l>, options: JByteArray<'l>) -> jlong = |env| {
        calls::open(call, values::text(env, &bundle)?, values::text(env, &options)?)
    };

    /// `about(model: Long): Array<Any>`
    fn Java_dev_qhx_Native_about(model: jlong) -> JObjectArray<'l> = |env| {
        values::about(env, &calls::model(model)?.about)
    };

    /// `generate(model: Long, call: Long, request: ByteArray, media: ByteArray,
    /// contents: Array<ByteArray?>): Array<Any?>`
    fn Java_dev_qhx_Native_generate(
        model: jlong, call: jlong, request: JByteArray<'l>, media: JByteArray<'l>, contents: Bytes<'l>,
    ) -> JObjectArray<'l> = |env| {
        let items = values::items(env, &media, &contents)?;
        let answer = calls::generate(model, call, values::asked(env, &request)?, items)?;
        values::answer(env, &answer)
    };

    /// `stream(model: Long, call: Long, request: ByteArray, media: ByteArray, contents: Array<ByteArray?>)`
    fn Java_dev_qhx_Native_stream(
        model: jlong, call: jlong, request: JByteArray<'l>, media: JByteArray<'l>, contents: Bytes<'l>,
    ) = |env| {
        let items = values::items(env, &media, &contents)?;
        calls::stream(model, call, values::asked(env, &request)?, items)
    };

    /// `next(call: Long): ByteArray?`
    fn Java_dev_qhx_Native_next(call: jlong) -> JByteArray<'l> = |env| match calls::next(call)? {
        Some(piece) => Ok(env.byte_array_from_slice(piece.as_bytes())?),
        None => Ok(JByteArray::default()),
    };

    /// `result(call: Long): Array<Any?>?`
    fn Java_dev_qhx_Native_result(call: jlong) -> JObjectArray<'l> = |env| match calls::result(call)? {
        Some(answer) => values::answer(env, &answer),
        None => Ok(JObjectArray::default()),
    };

    /// `embed(model: Long, call: Long, texts: Array<ByteArray>, role: ByteArray, truncate: Boolean): Array<FloatArray>`
    fn Java_dev_qhx_Native_embed(
        model: jlong, call: jlong, texts: Bytes<'l>, role: JByteArray<'l>, truncate: jboolean,
    ) -> JObjectArray<'l, JFloatArray<'l>> = |env| {
        let (texts, role) = (values::texts(env, &texts)?, values::text(env, &role)?);
        values::vectors(env, &calls::embed(model, call, texts, &role, truncate)?)
    };

    /// `transcribe(model: Long, call: Long, media: ByteArray, contents: Array<ByteArray?>, maxNew: Int,
    /// wordTimes: Boolean, vad: ByteArray): Array<Any>`
    fn Java_dev_qhx_Native_transcribe(
        model: jlong, call: jlong, media: JByteArray<'l>, contents: Bytes<'l>, max_new: jint, word_times: jboolean,
        vad: JByteArray<'l>,
    ) -> JObjectArray<'l> = |env| {
        let audio = values::items(env, &media, &contents)?.pop();
        let audio = audio.ok_or_else(|| Fault::usage("expected audio"))?;
        // Below 0 where none is given.
        let max_new = usize::try_from(max_new).ok();
        let times = if word_times { Times::Word } else { Times::default() };
        // Empty where none are given.
        let vad = Some(values::text(env, &vad)?).filter(|rules| !rules.is_empty());
        values::transcript(env, &calls::transcribe(model, call, audio, max_new, times, vad)?)
    };

    /// `busy(model: Long): Boolean`
    fn Java_dev_qhx_Native_busy(model: jlong) -> jboolean = |_| Ok(calls::model(model)?.shared.is_busy()?);

    /// `cancelModel(model: Long): Boolean`
    fn Java_dev_qhx_Native_cancelModel(model: jlong) -> jboolean = |_| Ok(calls::model(model)?.shared.cancel()?);

    /// `close(model: Long)`
    fn Java_dev_qhx_Native_close(model: jlong) = |_| calls::close(model);
}
