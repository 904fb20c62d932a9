//! Arrays of Java from and to values.

use std::ffi::OsString;

use jni::Env;
use jni::objects::{JByteArray, JDoubleArray, JFloatArray, JIntArray, JObject, JObjectArray};
use jni::refs::Reference as _;
use qhx::{Chunk, Error, ErrorKind, Transcript};
use qhx_bindings::{About, Answer, Fault, Given, Item, RequestJson, Vectors};

use crate::fault::Result;

/// Texts or bytes; elements may be null.
pub(crate) type Bytes<'local> = JObjectArray<'local, JByteArray<'local>>;

/// The text of an array of UTF-8.
pub(crate) fn text(env: &Env<'_>, array: &JByteArray<'_>) -> Result<String> {
    let bytes = env.convert_byte_array(array)?;
    Ok(String::from_utf8(bytes).map_err(|e| Error::caused(ErrorKind::Usage, "a text", e))?)
}

/// The elements of an array.
fn elements(env: &mut Env<'_>, array: &Bytes<'_>) -> Result<Vec<Option<Vec<u8>>>> {
    let element = |index| {
        // Each is a reference, of which a function may hold a few hundred only.
        env.with_local_frame(2, |env| -> Result<_> {
            let element = array.get_element(env, index)?;
            let null = element.is_null();
            Ok(if null { None } else { Some(env.convert_byte_array(&element)?) })
        })
    };
    (0..array.len(env)?).map(element).collect()
}

/// Texts.
pub(crate) fn texts(env: &mut Env<'_>, array: &Bytes<'_>) -> Result<Vec<String>> {
    let text = |(index, bytes): (usize, Option<Vec<u8>>)| {
        let text = String::from_utf8(bytes.unwrap_or_default());
        let wrong = |e| Error::caused(ErrorKind::Usage, format_args!("text {index}"), e);
        Ok(text.map_err(wrong)?)
    };
    elements(env, array)?.into_iter().enumerate().map(text).collect()
}

/// Media: kind, name and numbers of each as JSON, and their contents.
pub(crate) fn items(
    env: &mut Env<'_>,
    media: &JByteArray<'_>,
    contents: &Bytes<'_>,
) -> Result<Vec<Item>> {
    let media = text(env, media)?;
    let wrong = |e| Error::caused(ErrorKind::Internal, "the media", e);
    let media: Vec<(String, String, (u32, u32))> = serde_json::from_str(&media).map_err(wrong)?;
    let contents = elements(env, contents)?;
    if media.len() != contents.len() {
        return Err(Fault::usage("as many contents as media are expected").into());
    }
    let item = |((kind, name, numbers), content)| {
        let name = OsString::from(name);
        Ok(Item::new(Given { kind, name, content, numbers })?)
    };
    media.into_iter().zip(contents).map(item).collect()
}

/// A request.
pub(crate) fn asked(env: &Env<'_>, request: &JByteArray<'_>) -> Result<RequestJson> {
    Ok(RequestJson::parse(&text(env, request)?)?)
}

/// An element of an array that Kotlin takes apart.
enum Part<'a> {
    Null,
    Text(&'a str),
    Ints(Vec<i32>),
    Doubles(Vec<f64>),
}

fn parts<'local>(env: &mut Env<'local>, parts: &[Part<'_>]) -> Result<JObjectArray<'local>> {
    let array = JObjectArray::<JObject<'_>>::new(env, parts.len(), JObject::null())?;
    for (index, part) in parts.iter().enumerate() {
        env.with_local_frame(2, |env| -> Result<()> {
            let element: JObject<'_> = match part {
                Part::Null => return Ok(()),
                Part::Text(text) => env.byte_array_from_slice(text.as_bytes())?.into(),
                Part::Ints(values) => {
                    let ints = JIntArray::new(env, values.len())?;
                    ints.set_region(env, 0, values)?;
                    ints.into()
                }
                Part::Doubles(values) => {
                    let doubles = JDoubleArray::new(env, values.len())?;
                    doubles.set_region(env, 0, values)?;
                    doubles.into()
                }
            };
            Ok(array.set_element(env, index, element)?)
        })?;
    }
    Ok(array)
}

/// Counts are of what fits into memory many times over.
fn int(count: usize) -> i32 {
    i32::try_from(count).unwrap_or(i32::MAX)
}

/// Name, manifest, host-op, backend, its reason, the numbers, and all modalities.
pub(crate) fn about<'local>(env: &mut Env<'local>, about: &About) -> Result<JObjectArray<'local>> {
    let manifest = about.manifest.to_string_lossy();
    let numbers = vec![int(about.max_ctx), int(about.embedding_dim), about.can_chat.into()];
    let mut all = vec![
        Part::Text(&about.name),
        Part::Text(&manifest),
        Part::Text(&about.host_op),
        Part::Text(&about.backend),
        Part::Text(&about.backend_reason),
        Part::Ints(numbers),
    ];
    all.extend(about.modalities.iter().map(|modality| Part::Text(modality.name())));
    parts(env, &all)
}

/// Text, finish reason, tokens, counts, seconds, stop text or null, and name and arguments of each call of a tool.
pub(crate) fn answer<'local>(
    env: &mut Env<'local>,
    answer: &Answer,
) -> Result<JObjectArray<'local>> {
    let arguments: Vec<_> =
        answer.tool_calls.iter().map(|call| call.arguments.to_string()).collect();
    let mut all = vec![
        Part::Text(&answer.text),
        Part::Text(answer.finish_reason),
        Part::Ints(answer.tokens.iter().map(|token| token.cast_signed()).collect()),
        Part::Ints(vec![int(answer.prompt_tokens), int(answer.reused_tokens)]),
        Part::Doubles(vec![answer.prefill_seconds, answer.decode_seconds]),
        answer.stopped_at.as_deref().map_or(Part::Null, Part::Text),
    ];
    for (call, arguments) in answer.tool_calls.iter().zip(&arguments) {
        all.extend([Part::Text(&call.name), Part::Text(arguments)]);
    }
    parts(env, &all)
}

/// Text, seconds, whether it was cancelled and the number of chunks, text, finish reason and times of each chunk, and
/// text and times of each word.
pub(crate) fn transcript<'local>(
    env: &mut Env<'local>,
    transcript: &Transcript,
) -> Result<JObjectArray<'local>> {
    let mut all = vec![
        Part::Text(&transcript.text),
        Part::Doubles(vec![transcript.seconds]),
        Part::Ints(vec![transcript.cancelled.into(), int(transcript.chunks.len())]),
    ];
    let times = |chunk: &Chunk| Part::Doubles(vec![chunk.start, chunk.end]);
    for chunk in &transcript.chunks {
        let reason = Part::Text(chunk.finish_reason.name());
        all.extend([Part::Text(&chunk.text), reason, times(chunk)]);
    }
    for word in &transcript.words {
        all.extend([Part::Text(&word.text), times(word)]);
    }
    parts(env, &all)
}

/// A vector for each text.
pub(crate) fn vectors<'local>(
    env: &mut Env<'local>,
    vectors: &Vectors,
) -> Result<JObjectArray<'local, JFloatArray<'local>>> {
    let Vectors { values, dim, .. } = vectors;
    let rows: Vec<_> = values.chunks_exact((*dim).max(1)).collect();
    let array = JObjectArray::<JFloatArray<'_>>::new(env, rows.len(), JFloatArray::null())?;
    for (index, row) in rows.iter().enumerate() {
        env.with_local_frame(2, |env| -> Result<()> {
            let floats = JFloatArray::new(env, row.len())?;
            floats.set_region(env, 0, row)?;
            Ok(array.set_element(env, index, floats)?)
        })?;
    }
    Ok(array)
}
