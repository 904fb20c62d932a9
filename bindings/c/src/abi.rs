//! Structs and numbers of the header; `tests/` compares both.

use std::ffi::{c_char, c_int, c_void};
use std::mem::offset_of;

/// Major version of the ABI.
pub const ABI_VERSION_MAJOR: c_int = 1;
/// Minor version of the ABI.
pub const ABI_VERSION_MINOR: c_int = 1;
/// Maximum number of history entries.
pub const MAX_HISTORY: c_int = 4096;

/// Return value of a function; 0 is success.
pub type Status = i32;

/// Success.
pub const OK: Status = 0;
/// A host-op panicked.
pub const PANICKED: Status = 13;
/// A handle is NULL, freed, or none of ours.
pub const HANDLE: Status = 14;
/// The session generates already, or there is a runtime already.
pub const BUSY: Status = 15;
/// A fault of qhx itself.
pub const INTERNAL: Status = 70;
/// The generation was cancelled.
pub const CANCELLED: Status = 130;

/// An image.
pub const MEDIA_IMAGE: c_int = 1;
/// An audio clip.
pub const MEDIA_AUDIO: c_int = 2;

/// A handle of a runtime: a number, nothing that could be read.
#[derive(Debug)]
#[repr(C)]
pub struct RuntimeHandle(u8);

/// A handle of a model.
#[derive(Debug)]
#[repr(C)]
pub struct ModelHandle(u8);

/// A handle of a session.
#[derive(Debug)]
#[repr(C)]
pub struct SessionHandle(u8);

/// `qhx_token_cb`. What unwinds out of it ends the process.
pub type TokenCallback =
    Option<unsafe extern "C-unwind" fn(*mut c_void, *const c_char, c_int, c_int, c_int) -> c_int>;
/// `qhx_should_cancel_cb`.
pub type ShouldCancel = Option<unsafe extern "C-unwind" fn(*mut c_void) -> c_int>;
/// `qhx_log_cb`.
pub type LogCallback =
    Option<unsafe extern "C-unwind" fn(*mut c_void, c_int, *const c_char, *const c_char)>;

/// Declares a struct of the header with the names of its fields, for the test that compares their places. A field is 0
/// or NULL by default, unless it says otherwise.
///
/// Structs that begin with `struct_size` may get further fields at their end, whose default is 0. The others are as
/// published callers write them, without a size: they stay as they are, and what a later version takes or returns goes
/// through the former and through functions of its own (`qhx_session_last_…`).
macro_rules! c_struct {
    ($(#[$about:meta])* $name:ident = $c_name:literal {
        $($(#[$doc:meta])* $field:ident: $type:ty $(= $default:expr)?,)*
    }) => {
        $(#[$about])*
        #[derive(Debug, Clone, Copy)]
        #[repr(C)]
        pub struct $name {
            $($(#[$doc])* pub $field: $type,)*
        }

        impl $name {
            /// The name in the header, and each field with its offset and size in bytes.
            pub const LAYOUT: Layout = Layout {
                name: $c_name,
                size: size_of::<$name>(),
                fields: &[$((
                    stringify!($field),
                    offset_of!($name, $field),
                    size_of::<$type>(),
                )),*],
            };
        }

        impl Default for $name {
            fn default() -> Self {
                Self { $($field: default!($($default)?),)* }
            }
        }
    };
}

macro_rules! default {
    () => {
        Default::default()
    };
    ($value:expr) => {
        $value
    };
}

/// Layout of the fields of a struct.
#[derive(Debug, Clone, Copy)]
pub struct Layout {
    /// Name in the header.
    pub name: &'static str,
    /// Bytes of the struct.
    pub size: usize,
    /// Name, offset and bytes of each field.
    pub fields: &'static [(&'static str, usize, usize)],
}

c_struct! {
    /// Generation and sampling options.
    GenCfg = "qhx_gen_cfg" {
        /// Maximum number of tokens.
        max_new_tokens: c_int = 1024,
        /// 0 takes the most likely token.
        temperature: f32,
        /// 0 is off.
        top_k: c_int,
        /// 1 is off.
        top_p: f32 = 1.0,
        /// 0 is off.
        min_p: f32,
        /// 1 is off.
        repetition_penalty: f32 = 1.0,
        /// 0 for all tokens.
        repetition_window: c_int,
        /// 0 draws one.
        seed: u64,
        /// Texts that end the answer.
        stop_strings: *const *const c_char,
        /// Number of them.
        n_stop_strings: c_int,
        /// Tokens that end the answer.
        stop_token_ids: *const i32,
        /// Number of them.
        n_stop_token_ids: c_int,
        /// Grammar that the answer must match.
        grammar: *const c_char,
        /// Kind of `grammar`.
        grammar_kind: c_int,
    }
}

c_struct! {
    /// Input of a generation.
    Inputs = "qhx_inputs" {
        /// The text.
        text: *const c_char,
        /// NULL for none.
        system_prompt: *const c_char,
        /// user, assistant, …
        history: *const *const c_char,
        /// Number of them.
        n_history: c_int,
        /// Completes the text as it is.
        no_template: c_int,
        /// An image's file.
        image_path: *const c_char,
        /// An image's bytes.
        image_data: *const c_void,
        /// Number of them.
        image_size: usize,
        /// Refused.
        mask_path: *const c_char,
        /// Samples of one channel.
        audio: *const f32,
        /// Number of them.
        n_audio: i64,
        /// Samples a second.
        audio_sr: c_int,
    }
}

c_struct! {
    /// An image or audio clip.
    Media = "qhx_media" {
        /// [`MEDIA_IMAGE`] or [`MEDIA_AUDIO`].
        kind: c_int,
        /// A file.
        path: *const c_char,
        /// The bytes of a file.
        data: *const c_void,
        /// Number of them.
        size: usize,
        /// Samples of one channel.
        samples: *const f32,
        /// Number of them.
        n_samples: i64,
        /// Samples a second.
        sample_rate: c_int,
    }
}

c_struct! {
    /// Further options of a generation.
    GenerateOptions = "qhx_generate_options" {
        /// Bytes that the caller's struct has.
        struct_size: usize = Self::FIRST_SIZE,
        /// Turns thinking off, if the chat template supports that.
        disable_thinking: c_int,
        /// Nonzero cancels.
        should_cancel: ShouldCancel,
        /// Its argument.
        should_cancel_user: *mut c_void,
        /// The prompt.
        tokens: *const i32,
        /// Number of them.
        n_tokens: c_int,
        /// Images and audio.
        media: *const Media,
        /// Number of them.
        n_media: c_int,
        /// Calls for each token.
        every_token: c_int,
        /// Embeds a query.
        embed_query: c_int,
        /// Log-probabilities of the tokens.
        logprobs: c_int,
        /// Number of most likely tokens per position whose log-probabilities are returned as well.
        top_logprobs: c_int,
        /// 0. A field of a later version would otherwise lie in what 1.0 has as padding, and never sets.
        reserved: c_int,
        /// Tokens whose logits are changed.
        logit_bias_tokens: *const i32,
        /// Values added to their logits.
        logit_biases: *const f32,
        /// Number of both.
        n_logit_bias: c_int,
        /// Finds when each word of a transcription is said.
        word_times: c_int,
        /// Salt of the states that may be reused; NULL for states without one.
        cache_salt: *const c_char,
        /// Rules of speech as JSON, for a transcription of speech alone; NULL for one of all audio.
        vad: *const c_char,
    }
}

c_struct! {
    /// Result of a generation.
    Output = "qhx_output" {
        /// Status that the function returned.
        status: Status,
        /// The text.
        text: *const c_char,
        /// Tokens.
        n_generated: c_int,
        /// Positions.
        n_prompt: c_int,
        /// Milliseconds.
        prefill_ms: f64,
        /// Milliseconds.
        decode_ms: f64,
        /// NULL.
        audio: *const f32,
        /// 0.
        n_audio: i64,
        /// 0.
        sample_rate: c_int,
        /// A vector.
        embedding: *const f32,
        /// Its values.
        n_embedding: c_int,
        /// NULL.
        image: *const u8,
        /// 0.
        img_h: c_int,
        /// 0.
        img_w: c_int,
        /// 0.
        img_c: c_int,
        /// Bytes of the text.
        n_text: usize,
        /// Positions whose state was there.
        n_reused: c_int,
        /// Why it ended.
        finish_reason: *const c_char,
        /// The tokens.
        tokens: *const i32,
        /// Their log-probabilities.
        logprobs: *const f32,
        /// The most likely tokens in the place of each.
        top_tokens: *const i32,
        /// Their log-probabilities.
        top_logprobs: *const f32,
        /// Number of them in each place.
        n_top: c_int,
    }
}

c_struct! {
    /// The last error of a thread.
    LastError = "qhx_error" {
        /// Bytes that the caller's struct has.
        struct_size: usize,
        /// Status that the function returned, or would have returned.
        status: Status,
        /// One word.
        kind: *const c_char,
        /// Description of the failure.
        message: *const c_char,
        /// A likely fix.
        hint: *const c_char,
        /// Error code of a QNN library.
        code: u64,
    }
}

c_struct! {
    /// Options of a runtime.
    RuntimeOptions = "qhx_runtime_options" {
        /// Bytes that the caller's struct has.
        struct_size: usize = Self::FIRST_SIZE,
        /// libQnnHtp.
        htp: *const c_char,
        /// libQnnSystem.
        system: *const c_char,
        /// auto, cpu or qnn.
        backend: *const c_char,
        /// Such as v81.
        device_arch: *const c_char,
        /// A folder.
        plugins: *const c_char,
        /// 0 for one a core.
        threads: c_int,
        /// auto, cpu or npu.
        decode_on: *const c_char,
        /// auto, int16 or int8.
        cpu_activations: *const c_char,
        /// f16 or f32.
        cpu_caches: *const c_char,
    }
}

impl GenerateOptions {
    /// Bytes of the struct of 1.0, all that `qhx_generate_options_default` may write: its caller may be that old.
    pub const FIRST_SIZE: usize = offset_of!(Self, reserved) + size_of::<c_int>();
}

impl RuntimeOptions {
    /// Bytes of the struct of 1.0, all that `qhx_runtime_options_default` may write.
    pub const FIRST_SIZE: usize = offset_of!(Self, cpu_caches) + size_of::<*const c_char>();
}

impl Output {
    /// Nothing but a status.
    pub fn empty(status: Status) -> Self {
        Self { status, ..Self::default() }
    }
}
