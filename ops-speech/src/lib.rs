//! Host-ops that recognise speech, and such that speak.
//!
//! | op | |
//! |---|---|
//! | [`Whisper`], `whisper_transcribe` | an encoder that runs once a clip, and a decoder that attends to what it made |
//! | [`Moonshine`], `moonshine_transcribe` | the same, in the lengths of clips |
//! | [`Canary`], `canary_transcribe` | the same, in many languages and translated |
//! | [`Asr`], `qwen3_asr_transcribe` | Qwen3-ASR: a decoder that takes rows of a tower for a clip |
//! | [`Kokoro`], `kokoro_speak` | phonemes to durations, then frames, a source of sines and a spectrum to samples |
//! | [`Nemotron`], `nemotron_transcribe` | an encoder that is given its audio chunk by chunk, and a transducer over its rows |
//! | [`Vits`], `vits_speak` | symbols to durations, then frames with noise through a flow and a vocoder |
//! | [`Parakeet`], `parakeet_transcribe` | an encoder that runs once a clip, and a CTC head or a transducer over its rows |

mod asr;
mod canary;
mod dense;
mod dictation;
mod features;
mod kokoro;
mod listener;
mod moonshine;
mod nemotron;
mod parakeet;
mod ports;
#[cfg(test)]
mod tests;
mod vits;
mod whisper;

pub use asr::Asr;
pub use canary::Canary;
pub use dictation::Dictation;
pub use kokoro::Kokoro;
pub use moonshine::Moonshine;
pub use nemotron::Nemotron;
pub use parakeet::Parakeet;
pub use vits::Vits;
pub use whisper::Whisper;

qhx_op::register_ops!(Asr, Canary, Kokoro, Moonshine, Nemotron, Parakeet, Vits, Whisper);

/// To be called by what is linked of an archive: from one, a linker takes only the parts that something names, and
/// those of this module register the ops.
#[doc(hidden)]
#[inline(never)]
pub fn linked() {}
