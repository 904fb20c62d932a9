//! Any file as a part of a prompt.

use qhx_base::{Error, ErrorKind, Result};
use qhx_types::{Media, MediaRules, Modality};

use crate::format::{Format, Kind};
use crate::{Limits, Source, decode_audio, decode_image, decode_video};

/// Checks that a file is there and of a format that may serve as `wanted`, by its first bytes: for an answer before a
/// model is loaded.
///
/// # Errors
///
/// Errors of [`read`], as far as the first bytes show them.
pub fn check(source: &Source, wanted: Modality, limits: &Limits) -> Result<()> {
    let kind = match wanted {
        Modality::Image => Kind::Image,
        Modality::Audio => Kind::Audio,
        Modality::Video if source.is_folder() => return Ok(()),
        Modality::Video => Kind::Video,
        other => return Err(no_file(source, other)),
    };
    let (_, head) = source.open(limits)?.head(source)?;
    Format::expect(source, &head, kind).map(drop)
}

/// Decodes a file as a part of a prompt.
///
/// # Errors
///
/// Errors of [`decode_image`], [`decode_audio`] and [`decode_video`]; and for a modality that no file has.
pub fn read(
    source: &Source,
    wanted: Modality,
    rules: &MediaRules,
    limits: &Limits,
) -> Result<Media> {
    match wanted {
        Modality::Image => decode_image(source, &rules.image, limits)?.into_media(),
        Modality::Audio => decode_audio(source, &rules.audio, limits)?.into_media(),
        Modality::Video => decode_video(source, &rules.video, &rules.image, limits)?.into_media(),
        other => Err(no_file(source, other)),
    }
}

fn no_file(source: &Source, wanted: Modality) -> Error {
    let what = format!("{source}: no file is {}", wanted.name());
    Error::new(ErrorKind::Usage, what).hint("expected image, audio or video")
}
