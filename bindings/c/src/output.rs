//! Writes where a caller points to.

#![expect(unsafe_code, reason = "writes memory of the caller")]

use std::ffi::{c_char, c_int};
use std::mem::offset_of;
use std::ptr;

use qhx::TokenLogprobs;

use crate::abi::{LastError, Output};
use crate::fault::{Fault, Last, Result};

/// Writes a value, where there is a place for it.
pub(crate) fn put<T: Copy>(to: *mut T, value: T) {
    if !to.is_null() && to.is_aligned() {
        // SAFETY: the header asks for NULL or a place for such a value.
        unsafe { to.write(value) };
    }
}

/// Writes the first `bytes` of a value, where there is a place for them: what a caller of an earlier version has room
/// for.
pub(crate) fn put_first<T: Copy>(to: *mut T, value: T, bytes: usize) {
    if !to.is_null() && to.is_aligned() {
        let bytes = bytes.min(size_of::<T>());
        // SAFETY: the header asks for NULL or a place for such a struct, of which the caller's version has as much.
        unsafe { ptr::copy_nonoverlapping((&raw const value).cast::<u8>(), to.cast(), bytes) };
    }
}

/// Writes a text with its NUL into a buffer of `size` bytes, as much of it as there is room for.
pub(crate) fn put_text(to: *mut c_char, size: c_int, text: &str) {
    let Some(room) = usize::try_from(size).ok().and_then(|size| size.checked_sub(1)) else {
        return;
    };
    if to.is_null() {
        return;
    }
    let len = text.len().min(room);
    // SAFETY: the header asks for NULL or a buffer of that size, which holds `len` and the NUL.
    unsafe {
        ptr::copy_nonoverlapping(text.as_ptr().cast(), to, len);
        to.add(len).write(0);
    }
}

/// Writes the last error, as far as the caller's struct has room.
pub(crate) fn put_error(to: *mut LastError, last: Option<&Last>) -> Result<()> {
    if to.is_null() || !to.is_aligned() {
        return Err(Fault::usage("error is NULL or not aligned"));
    }
    // SAFETY: the header asks for a struct that begins with its size.
    let size = unsafe { (&raw const (*to).struct_size).read() };
    if size < size_of::<usize>() {
        return Err(Fault::usage(format!(
            "error.struct_size is {size}, expected that of qhx_error"
        )));
    }
    macro_rules! field {
        ($field:ident, $value:expr) => {{
            let value = $value;
            if offset_of!(LastError, $field) + size_of_val(&value) <= size {
                // SAFETY: the caller's struct is as long as it says, so that it has the field.
                unsafe { (&raw mut (*to).$field).write(value) };
            }
        }};
    }
    let empty = c"".as_ptr();
    field!(status, last.map_or(0, |last| last.status));
    field!(kind, last.map_or(empty, |last| last.kind.as_ptr()));
    field!(message, last.map_or(empty, |last| last.message.as_ptr()));
    field!(
        hint,
        last.and_then(|last| last.hint.as_ref()).map_or(ptr::null(), |hint| hint.as_ptr())
    );
    field!(code, last.map_or(0, |last| last.code));
    Ok(())
}

/// Data that a session holds for its caller.
#[derive(Debug, Default)]
pub(crate) struct Held {
    /// With a NUL behind it.
    text: Vec<u8>,
    embedding: Vec<f32>,
    tokens: Vec<i32>,
    logprobs: Vec<f32>,
    top_tokens: Vec<i32>,
    top_logprobs: Vec<f32>,
    finish: Option<qhx::FinishReason>,
    /// With a NUL behind it.
    stopped_at: Option<Vec<u8>>,
    words: Vec<Word>,
    state: Vec<u8>,
}

/// A word of a transcription.
#[derive(Debug)]
struct Word {
    /// With a NUL behind it.
    text: Vec<u8>,
    start: f64,
    end: f64,
}

/// A text with a NUL behind it.
fn ended(text: String) -> Vec<u8> {
    let mut text = text.into_bytes();
    text.push(0);
    text
}

/// Result of a generation.
#[derive(Debug, Default)]
pub(crate) struct Answer {
    pub text: String,
    pub embedding: Vec<f32>,
    pub generated: usize,
    pub tokens: Vec<u32>,
    pub logprobs: Vec<TokenLogprobs>,
    pub top: usize,
    pub prompt: usize,
    pub reused: usize,
    pub prefill_ms: f64,
    pub decode_ms: f64,
    pub finish: Option<qhx::FinishReason>,
    pub stopped_at: Option<String>,
    pub words: Vec<qhx::Chunk>,
    pub cancelled: bool,
}

impl Held {
    /// Holds an answer, and returns what points to it.
    pub(crate) fn hold(&mut self, answer: Answer) -> Output {
        let number = |n: usize| c_int::try_from(n).unwrap_or(c_int::MAX);
        let n_text = answer.text.len();
        self.text = ended(answer.text);
        self.embedding = answer.embedding;
        let mut output = Output::empty(if answer.cancelled { crate::abi::CANCELLED } else { 0 });
        output.text = self.text.as_ptr().cast();
        output.n_text = n_text;
        output.n_generated = number(answer.generated);
        output.n_prompt = number(answer.prompt);
        output.n_reused = number(answer.reused);
        output.prefill_ms = answer.prefill_ms;
        output.decode_ms = answer.decode_ms;
        output.embedding = start(&self.embedding);
        output.n_embedding = number(self.embedding.len());
        let id = |token: u32| i32::try_from(token).unwrap_or(-1);
        self.tokens = answer.tokens.into_iter().map(id).collect();
        self.logprobs = answer.logprobs.iter().map(|one| one.logprob).collect();
        let fill = std::iter::repeat((-1, f32::NEG_INFINITY));
        (self.top_tokens, self.top_logprobs) = answer
            .logprobs
            .iter()
            .flat_map(|one| {
                let top = one.top.iter().map(|(token, logprob)| (id(*token), *logprob));
                top.chain(fill.clone()).take(answer.top)
            })
            .unzip();
        output.tokens = start(&self.tokens);
        output.logprobs = start(&self.logprobs);
        output.top_tokens = start(&self.top_tokens);
        output.top_logprobs = start(&self.top_logprobs);
        output.n_top = number(answer.top);
        self.finish = answer.finish;
        self.stopped_at = answer.stopped_at.map(ended);
        let word =
            |word: qhx::Chunk| Word { text: ended(word.text), start: word.start, end: word.end };
        self.words = answer.words.into_iter().map(word).collect();
        output.finish_reason = self.stop().0;
        output
    }

    /// Why the answer ended, and the stop string that ended it.
    pub(crate) fn stop(&self) -> (*const c_char, *const c_char) {
        let reason = self.finish.map_or(ptr::null(), |reason| name(reason).as_ptr());
        (reason, self.stopped_at.as_ref().map_or(ptr::null(), |text| text.as_ptr().cast()))
    }

    /// Number of words.
    pub(crate) fn words(&self) -> usize {
        self.words.len()
    }

    /// A word, and when it begins and ends.
    pub(crate) fn word(&self, index: c_int) -> Result<(*const c_char, f64, f64)> {
        let word = usize::try_from(index).ok().and_then(|index| self.words.get(index));
        let word = word.ok_or_else(|| {
            let count = self.words.len();
            Fault::usage(format!("index is {index}, expected one of {count} words, from 0 on"))
        })?;
        Ok((word.text.as_ptr().cast(), word.start, word.end))
    }

    /// Holds a state, and returns where it lies.
    pub(crate) fn hold_state(&mut self, bytes: Vec<u8>) -> (*const u8, usize) {
        self.state = bytes;
        (self.state.as_ptr(), self.state.len())
    }

    /// Forgets it.
    pub(crate) fn clear(&mut self) {
        *self = Self::default();
    }
}

/// Pointer to the values; NULL for none.
fn start<T>(values: &[T]) -> *const T {
    if values.is_empty() { ptr::null() } else { values.as_ptr() }
}

/// The name of a reason, in a text of C.
fn name(reason: qhx::FinishReason) -> &'static std::ffi::CStr {
    use qhx::FinishReason::{Cancelled, Eos, Length, Stop};
    match reason {
        Eos => c"eos",
        Stop => c"stop",
        Length => c"length",
        Cancelled => c"cancelled",
    }
}
