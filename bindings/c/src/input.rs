//! Reads what a caller points at, and copies it.

#![expect(unsafe_code, reason = "reads memory of the caller")]

use std::ffi::{CStr, c_char, c_int, c_void};
use std::path::PathBuf;
use std::ptr;

use qhx::{Attachment, CallerOptions, Limits, Modality, SamplingParams, Source};

use crate::abi::{
    GenCfg, GenerateOptions, Inputs, Layout, MAX_HISTORY, MEDIA_AUDIO, MEDIA_IMAGE, Media,
    RuntimeOptions,
};
use crate::callbacks::Poll;
use crate::fault::{Fault, Result};

/// Checked input of a generation.
#[derive(Debug, Default)]
pub(crate) struct Question {
    pub text: Option<String>,
    pub system: Option<String>,
    pub history: Vec<String>,
    pub no_template: bool,
    pub tokens: Option<Vec<u32>>,
    pub media: Vec<Attachment>,
    pub disable_thinking: bool,
    pub every_token: bool,
    pub logprobs: Option<usize>,
    pub embed_query: bool,
    pub word_times: bool,
    pub salt: Option<String>,
    /// Rules of speech as JSON.
    pub vad: Option<String>,
    pub max_new: usize,
    pub sampling: SamplingParams,
    pub stop: Vec<String>,
    pub stop_ids: Vec<u32>,
    pub grammar: Option<String>,
    pub grammar_kind: c_int,
}

/// The bytes of a text of C, without its NUL. `None` for NULL.
fn bytes<'a>(text: *const c_char) -> Option<&'a [u8]> {
    // SAFETY: the header asks for NULL or a text with a NUL at its end, which stays as it is during the call.
    (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_bytes())
}

fn text(what: &str, given: *const c_char) -> Result<Option<String>> {
    let Some(bytes) = bytes(given) else { return Ok(None) };
    let text = std::str::from_utf8(bytes).map_err(|e| {
        Fault::usage(format!("{what}: byte {} is not UTF-8, which is expected", e.valid_up_to()))
    })?;
    Ok(Some(text.to_owned()))
}

/// A path; on Unix any bytes.
pub(crate) fn path(what: &str, given: *const c_char) -> Result<Option<PathBuf>> {
    #[cfg(unix)]
    {
        use std::os::unix::ffi::OsStrExt as _;
        let _ = what;
        Ok(bytes(given).map(|bytes| std::ffi::OsStr::from_bytes(bytes).into()))
    }
    #[cfg(not(unix))]
    Ok(text(what, given)?.map(PathBuf::from))
}

/// A list of the caller's.
fn list<'a, T>(what: &str, first: *const T, count: i64, max: usize) -> Result<&'a [T]> {
    let len = usize::try_from(count).ok().filter(|len| *len <= max);
    let Some(len) = len else {
        return Err(Fault::usage(format!("{what}: {count} entries, expected 0 to {max}")));
    };
    if len == 0 {
        return Ok(&[]);
    }
    if first.is_null() {
        return Err(Fault::usage(format!("{what}: {len} entries at NULL")));
    }
    if !first.is_aligned() {
        return Err(Fault::usage(format!("{what}: the address {first:p} is not aligned")));
    }
    // SAFETY: the header asks for this number of entries there, which stay as they are during the call; `max` keeps
    // their size below `isize::MAX`.
    Ok(unsafe { std::slice::from_raw_parts(first, len) })
}

fn texts(what: &str, first: *const *const c_char, count: c_int, max: usize) -> Result<Vec<String>> {
    let given = list(what, first, count.into(), max)?;
    let one = |(index, given): (usize, &*const c_char)| {
        let what = format!("{what}[{index}]");
        text(&what, *given)?.ok_or_else(|| Fault::usage(format!("{what} is NULL")))
    };
    given.iter().enumerate().map(one).collect()
}

/// Numbers of tokens.
fn ids(what: &str, first: *const i32, count: c_int) -> Result<Vec<u32>> {
    let given = list(what, first, count.into(), MANY)?;
    let id = |id: &i32| {
        u32::try_from(*id).map_err(|_| Fault::usage(format!("{what}: {id} is no token")))
    };
    given.iter().map(id).collect()
}

/// Bytes of states, which have no other bound.
const MANY_BYTES: usize = if size_of::<usize>() < 8 { isize::MAX as usize } else { 1 << 40 };

/// Entries of lists that have no other bound.
const MANY: usize = 1 << 24;

fn count(what: &str, value: c_int) -> Result<usize> {
    usize::try_from(value)
        .map_err(|_| Fault::usage(format!("{what} is {value}, expected 0 or more")))
}

/// The fields of a struct that begins with `struct_size`, as far as the caller has them, over the defaults.
fn sized<T: Copy + Default>(what: &str, given: *const T, layout: &Layout) -> Result<T> {
    let mut read = T::default();
    if given.is_null() {
        return Ok(read);
    }
    if !given.is_aligned() {
        return Err(Fault::usage(format!("{what}: the address is not aligned")));
    }
    // SAFETY: the header asks for a struct that begins with its size.
    let size = unsafe { given.cast::<usize>().read() };
    if size < size_of::<usize>() {
        return Err(Fault::usage(format!(
            "{what}.struct_size is {size}, expected the size of the struct: take its defaults first"
        )));
    }
    let ends = layout.fields.iter().map(|(_, offset, bytes)| offset + bytes);
    let bytes = ends.take_while(|end| *end <= size).last().unwrap_or(0);
    // SAFETY: the caller's struct is as long as it says, so that it has these fields. All are numbers and pointers, for
    // which any bits will do.
    unsafe { ptr::copy_nonoverlapping(given.cast::<u8>(), (&raw mut read).cast(), bytes) };
    Ok(read)
}

/// A struct that is there as a whole.
fn whole<T: Copy>(what: &str, given: *const T) -> Result<Option<T>> {
    if given.is_null() {
        return Ok(None);
    }
    if !given.is_aligned() {
        return Err(Fault::usage(format!("{what}: the address {given:p} is not aligned")));
    }
    // SAFETY: the header asks for NULL or a struct of that type; all its fields are numbers and pointers, for which
    // any bits will do.
    Ok(Some(unsafe { given.read() }))
}

/// The options of a generation.
pub(crate) fn options(given: *const GenerateOptions) -> Result<GenerateOptions> {
    sized("options", given, &GenerateOptions::LAYOUT)
}

/// Whom to ask whether to cancel.
pub(crate) fn poll(options: &GenerateOptions) -> Poll {
    Poll::new(options.should_cancel, options.should_cancel_user)
}

/// Checks the input of a generation.
pub(crate) fn question(
    inputs: *const Inputs,
    cfg: *const GenCfg,
    options: &GenerateOptions,
) -> Result<Question> {
    let inputs = whole("inputs", inputs)?
        .ok_or_else(|| Fault::usage("inputs is NULL, expected a prompt"))?;
    let cfg = whole("cfg", cfg)?.unwrap_or_default();
    if !inputs.mask_path.is_null() {
        return Err(Fault::usage("mask_path: no model takes a mask of an image; leave it NULL"));
    }
    let history = texts("history", inputs.history, inputs.n_history, MAX_HISTORY as usize)?;
    if history.len() % 2 == 1 {
        return Err(Fault::usage(format!(
            "history has {} entries, expected an even number: of the user and of the assistant by turns",
            history.len()
        )));
    }
    let media = [image(&inputs)?, audio("audio", inputs.audio, inputs.n_audio, inputs.audio_sr)?];
    let mut media: Vec<_> = media.into_iter().flatten().collect();
    for (index, one) in
        list("media", options.media, options.n_media.into(), 4096)?.iter().enumerate()
    {
        media.push(attachment(&format!("media[{index}]"), one)?);
    }
    let tokens = match options.n_tokens {
        0 => None,
        count => Some(ids("tokens", options.tokens, count)?),
    };
    let sampling = SamplingParams::default()
        .temperature(cfg.temperature)
        .top_k(count("top_k", cfg.top_k)?)
        .top_p(cfg.top_p)
        .min_p(cfg.min_p)
        .repetition_penalty(cfg.repetition_penalty)
        .penalty_window(count("repetition_window", cfg.repetition_window)?)
        .seed((cfg.seed != 0).then_some(cfg.seed))
        .logit_bias(logit_bias(options)?);
    Ok(Question {
        text: text("text", inputs.text)?,
        system: text("system_prompt", inputs.system_prompt)?,
        history,
        no_template: inputs.no_template != 0,
        tokens,
        media,
        disable_thinking: options.disable_thinking != 0,
        every_token: options.every_token != 0,
        logprobs: logprobs(options)?,
        embed_query: options.embed_query != 0,
        word_times: options.word_times != 0,
        salt: salt(options)?,
        vad: text("vad", options.vad)?,
        max_new: count("max_new_tokens", cfg.max_new_tokens)?,
        sampling,
        stop: texts("stop_strings", cfg.stop_strings, cfg.n_stop_strings, MANY)?,
        stop_ids: ids("stop_token_ids", cfg.stop_token_ids, cfg.n_stop_token_ids)?,
        grammar: text("grammar", cfg.grammar)?,
        grammar_kind: cfg.grammar_kind,
    })
}

/// Number of most likely tokens whose log-probabilities are wanted, where any are.
fn logprobs(options: &GenerateOptions) -> Result<Option<usize>> {
    let top = count("top_logprobs", options.top_logprobs)?;
    Ok((options.logprobs != 0 || top > 0).then_some(top))
}

/// Tokens, and what is added to their logits.
fn logit_bias(options: &GenerateOptions) -> Result<impl Iterator<Item = (u32, f32)> + use<>> {
    let count = options.n_logit_bias;
    let tokens = ids("logit_bias_tokens", options.logit_bias_tokens, count)?;
    let biases = list("logit_biases", options.logit_biases, count.into(), MANY)?.to_vec();
    Ok(tokens.into_iter().zip(biases))
}

/// Salt of the states that may be gone on from.
fn salt(options: &GenerateOptions) -> Result<Option<String>> {
    let salt = text("cache_salt", options.cache_salt)?;
    if salt.as_ref().is_some_and(String::is_empty) {
        return Err(Fault::usage(
            "cache_salt is empty, expected a text that nobody else knows, or NULL for none",
        ));
    }
    Ok(salt)
}

/// The bytes of a state.
pub(crate) fn state<'a>(first: *const c_void, size: usize) -> Result<&'a [u8]> {
    let size = i64::try_from(size).unwrap_or(i64::MAX);
    list("bytes", first.cast(), size, MANY_BYTES)
}

/// The image of the inputs.
fn image(inputs: &Inputs) -> Result<Option<Attachment>> {
    let bytes = !inputs.image_data.is_null() || inputs.image_size > 0;
    match path("image_path", inputs.image_path)? {
        Some(_) if bytes => Err(Fault::usage("image_path and image_data are given, expected one")),
        Some(path) => Ok(Some(Attachment::from_source(Modality::Image, Source::File(path)))),
        None if bytes => {
            let source = file("image_data", inputs.image_data.cast(), inputs.image_size)?;
            Ok(Some(Attachment::from_source(Modality::Image, source)))
        }
        None => Ok(None),
    }
}

/// The bytes of a file.
fn file(what: &str, first: *const u8, size: usize) -> Result<Source> {
    let max = usize::try_from(Limits::default().bytes).unwrap_or(usize::MAX);
    let size = i64::try_from(size).unwrap_or(i64::MAX);
    let bytes = list(what, first, size, max)?.to_vec();
    Ok(Source::Bytes { name: what.to_owned(), bytes })
}

/// Samples.
fn audio(what: &str, first: *const f32, count: i64, rate: c_int) -> Result<Option<Attachment>> {
    if count == 0 && first.is_null() {
        return Ok(None);
    }
    let max = usize::try_from(Limits::default().bytes / 4).unwrap_or(usize::MAX);
    let samples = list(what, first, count, max)?;
    Ok(Some(Attachment::samples(what, samples, u32::try_from(rate).unwrap_or(0))?))
}

fn attachment(what: &str, media: &Media) -> Result<Attachment> {
    let modality = match media.kind {
        MEDIA_IMAGE => Modality::Image,
        MEDIA_AUDIO => Modality::Audio,
        kind => return Err(Fault::usage(format!("{what}.kind is {kind}, expected 1 or 2"))),
    };
    let path = path(&format!("{what}.path"), media.path)?;
    let bytes = !media.data.is_null() || media.size > 0;
    let samples = !media.samples.is_null() || media.n_samples != 0;
    if usize::from(path.is_some()) + usize::from(bytes) + usize::from(samples) != 1 {
        return Err(Fault::usage(format!("{what}: expected one of path, data and samples")));
    }
    let source = match path {
        Some(path) => Source::File(path),
        None if bytes => file(&format!("{what}.data"), media.data.cast(), media.size)?,
        None if modality == Modality::Image => {
            return Err(Fault::usage(format!("{what}.samples: an image has none")));
        }
        None => {
            let what = format!("{what}.samples");
            let audio = audio(&what, media.samples, media.n_samples, media.sample_rate)?;
            return audio.ok_or_else(|| Fault::usage(format!("{what}: there are none")));
        }
    };
    Ok(Attachment::from_source(modality, source))
}

/// Checks the options of a runtime.
pub(crate) fn runtime(given: *const RuntimeOptions) -> Result<CallerOptions> {
    let read = sized("options", given, &RuntimeOptions::LAYOUT)?;
    Ok(CallerOptions {
        htp: path("htp", read.htp)?,
        system: path("system", read.system)?,
        backend: text("backend", read.backend)?,
        device_arch: text("device_arch", read.device_arch)?,
        plugins: path("plugins", read.plugins)?.into_iter().collect(),
        threads: Some(count("threads", read.threads)?).filter(|threads| *threads > 0),
        decode_on: text("decode_on", read.decode_on)?,
        cpu_activations: text("cpu_activations", read.cpu_activations)?,
        cpu_caches: text("cpu_caches", read.cpu_caches)?,
    })
}
