//! Images, audio and videos for host-ops: files, bytes and `data:` URLs become pixels and samples.
//!
//! | function | reads | gives |
//! |---|---|---|
//! | [`decode_image`] | PNG, JPEG, WebP, GIF (the first frame of an animation) | [`Image`]: RGB, 8 bits each |
//! | [`decode_audio`] | WAV, FLAC, MP3, AAC, M4A; Opus or Vorbis in Ogg or WebM | [`Audio`]: one channel of f32 samples at the rate of the rules |
//! | [`decode_video`] | a folder of images, an animated GIF, PNG or WebP | [`Frames`]: sampled frames and their times |
//!
//! [`Incoming`] reads audio that another program is still writing. [`encode_audio`] writes samples as WAV, FLAC, MP3, Opus or AAC.
//! [`speech`] finds where somebody speaks, and [`VoiceActivity`] does in audio that is still coming in.
//!
//! [`read`] gives any of them as a part of a prompt ([`Media`](qhx_types::Media)), and [`check`] looks at the first
//! bytes only.
//!
//! The format of a file follows from its content, never from its name. The family's rules ([`ImageRules`],
//! [`AudioRules`], [`VideoRules`]) say how it is turned into pixels and samples. Further steps (resizing, patches,
//! spectra) are the op's.
//!
//! Files are untrusted input: [`Limits`] bounds the cost of one, sizes are checked before memory is taken, and a file
//! that is broken, cut off or of another kind is an error that names it. The same holds for an image or audio file of
//! which only a part is there.

mod audio;
mod container;
mod encode;
mod format;
mod frames;
mod image;
mod incoming;
mod jpeg;
mod limits;
mod opus;
mod part;
mod pixels;
mod raw;
mod resample;
mod scans;
mod source;
mod video;
mod voice;
mod wave;

pub use self::audio::{Audio, AudioReader, decode_audio};
pub use self::encode::{AUDIO_FORMATS, AudioFormat, WAV_HEADER, encode_audio, pcm16, wav_header};
pub use self::image::{Image, decode_image};
pub use self::incoming::Incoming;
pub use self::limits::Limits;
pub use self::part::{check, read};
pub use self::source::Source;
pub use self::video::{Frames, decode_video};
pub use self::voice::{SpeechRules, VoiceActivity, VoiceChange, speech};
pub use qhx_types::{Alpha, AudioRules, ImageRules, VideoRules};
