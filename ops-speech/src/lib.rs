//! Host-ops that recognise speech.
//!
//! [`Whisper`] is `whisper_transcribe`: an encoder that runs once a clip, and a decoder that attends to what it made.

mod whisper;

pub use whisper::Whisper;

qhx_op::register_ops!(Whisper);

/// To be called by what is linked of an archive: from one, a linker takes only the parts that something names, and
/// those of this module register the ops.
#[doc(hidden)]
#[inline(never)]
pub fn linked() {}
