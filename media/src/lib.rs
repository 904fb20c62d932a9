//! Pictures, sounds and videos for host-ops: files, bytes and `data:` URLs become pixels and samples.
//!
//! | function | reads | gives |
//! |---|---|---|
//! | [`picture`] | PNG, JPEG, WebP, GIF (the first frame of an animation) | [`Picture`]: RGB, 8 bits each |
//! | [`sound`] | WAV, FLAC, MP3, Ogg Vorbis | [`Sound`]: one channel of f32 samples at the rate of the rules |
//! | [`video`] | a folder of pictures, an animated GIF, PNG or WebP | [`Frames`]: sampled frames with their times |
//!
//! [`read`] gives any of them as a part of a prompt ([`Media`](qhx_types::Media)), and [`check`] looks at the first bytes
//! only.
//!
//! What a file is follows from its content, never from its name. The family's rules ([`ImageRules`], [`AudioRules`],
//! [`VideoRules`]) say how it is turned into pixels and samples. What is further done to these (resizing, patches,
//! spectra) is the op's.
//!
//! Files are strangers': [`Limits`] bounds what one may cost, sizes are checked before memory is taken, and a file that
//! is broken, cut off or of another kind is an error that names it. A picture or sound of which only a part is there
//! is such an error, too.

mod format;
mod frames;
mod jpeg;
mod limits;
mod part;
mod picture;
mod pixels;
mod raw;
mod resample;
mod scans;

mod sound;
mod source;
mod video;
mod wave;

pub use limits::Limits;
pub use part::{check, read};
pub use picture::{Picture, picture};
pub use qhx_types::{Alpha, AudioRules, ImageRules, VideoRules};
pub use sound::{Sound, sound};
pub use source::Source;
pub use video::{Frames, video};
