//! Images, audio and videos of a prompt: what a user attaches, where in a text it stands, and reading the files.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use qhx_base::{Result, bail, error, trace};
use qhx_core::engine::{Content, ContentPart, Model, Part, Prompt};
use qhx_core::op::{Modality, OpDescription, Segment};
use qhx_media::{Limits, Source};
use qhx_types::Media;
use serde::Serialize;

use crate::wave;

/// Modalities of files, each with its placeholder in a text.
pub const PLACEHOLDERS: [(Modality, &str); 3] =
    [(Modality::Image, "<image>"), (Modality::Audio, "<audio>"), (Modality::Video, "<video>")];

/// An image, audio clip or video that a user names.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct Attachment {
    /// Modality of the file.
    pub modality: Modality,
    /// Source of the file.
    pub source: Source,
}

impl Attachment {
    /// `file` is a path or a `data:` URL.
    ///
    /// # Errors
    /// When a `data:` URL cannot be read, or is larger than the limits allow.
    pub fn new(modality: Modality, file: impl Into<OsString>) -> Result<Self> {
        let file = file.into();
        let source = match file.to_str() {
            Some(text) => Source::parse(text, &Limits::default())?,
            None => Source::File(file.into()),
        };
        Ok(Self { modality, source })
    }

    /// A file, or bytes.
    pub fn from_source(modality: Modality, source: Source) -> Self {
        Self { modality, source }
    }

    /// An image: PNG, JPEG, WebP or GIF.
    ///
    /// # Errors
    /// Errors of [`Attachment::new`].
    pub fn image(file: impl Into<OsString>) -> Result<Self> {
        Self::new(Modality::Image, file)
    }

    /// Audio: WAV, FLAC, MP3, AAC, M4A, Ogg or WebM.
    ///
    /// # Errors
    /// Errors of [`Attachment::new`].
    pub fn audio(file: impl Into<OsString>) -> Result<Self> {
        Self::new(Modality::Audio, file)
    }

    /// Audio as mono samples in −1…1, `rate` of them a second, which are resampled as a file's are.
    ///
    /// # Errors
    /// When there are none, or more than a file may have, and where the rate is 0.
    pub fn samples(name: impl Into<String>, samples: &[f32], rate: u32) -> Result<Self> {
        let (name, count) = (name.into(), samples.len());
        let max = usize::try_from(Limits::default().bytes / 4).unwrap_or(usize::MAX);
        if count == 0 || count > max || rate == 0 {
            bail!(
                Usage,
                "{name}: {count} samples at {rate} a second, expected 1 to {max} at more than 0"
            );
        }
        let bytes = wave::file(samples, rate);
        Ok(Self::from_source(Modality::Audio, Source::Bytes { name, bytes }))
    }

    /// Errors unless the host-op takes this modality.
    fn check_taken(&self, op: &OpDescription) -> Result<()> {
        if op.modalities.contains(&self.modality) {
            return Ok(());
        }
        let takes: Vec<_> = op.modalities.iter().map(|modality| modality.name()).collect();
        let (wanted, takes) = (self.modality.name(), takes.join(", "));
        Err(error!(
            Prompt,
            "{}: host-op {:?} does not take the modality {wanted}; it takes {takes}",
            self.source,
            op.name
        )
        .hint(format!("leave it out, or name a bundle whose model takes {wanted}")))
    }

    /// Decodes the file by the rules of the model's host-op. `fps`: frames of a video that are taken a second,
    /// instead of the model's own.
    ///
    /// # Errors
    /// When the host-op does not take the modality, or the file cannot be decoded within the limits.
    pub fn read(&self, model: &Model, fps: Option<f32>) -> Result<Attached> {
        self.check_taken(&model.op().description)?;
        let start = Instant::now();
        let _span = trace::span_with(model.trace(), "read media", |s| {
            s.argument("name", self.source.to_string());
        });
        let mut rules = model.media_rules();
        if let Some(fps) = fps {
            rules.video.fps = fps;
        }
        let media = qhx_media::read(&self.source, self.modality, &rules, &Limits::default())?;
        Ok(Attached { name: self.source.to_string(), media, time: start.elapsed() })
    }
}

/// An image, audio clip or video that was decoded.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Attached {
    /// The name of its file.
    pub name: String,
    /// Pixels or samples.
    pub media: Media,
    /// Time that decoding took.
    pub time: Duration,
}

/// Size of an attachment.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(untagged)]
#[non_exhaustive]
pub enum MediaSize {
    /// Pixels.
    Image {
        /// Columns.
        width: u32,
        /// Rows.
        height: u32,
    },
    /// Samples of one channel.
    Audio {
        /// Length, to the millisecond.
        seconds: f64,
        /// Samples a second.
        rate: u32,
    },
    /// Frames.
    Video {
        /// Columns of each.
        width: u32,
        /// Rows of each.
        height: u32,
        /// Number of frames.
        frames: usize,
        /// Seconds from the first to the last.
        last: f32,
    },
    /// Media of a modality that this version does not know.
    Unknown,
}

impl Attached {
    /// Media that was not read from a file, under a name.
    pub fn new(name: impl Into<String>, media: Media) -> Self {
        Self { name: name.into(), media, time: Duration::ZERO }
    }

    /// Size of the media.
    pub fn size(&self) -> MediaSize {
        match self.media.segment() {
            Segment::Image { width, height, .. } => MediaSize::Image { width, height },
            Segment::Audio { samples, rate } => {
                let seconds = samples.len() as f64 / f64::from(rate);
                MediaSize::Audio { seconds: (seconds * 1e3).round() / 1e3, rate }
            }
            Segment::Video { width, height, times, .. } => {
                let last = times.last().copied().unwrap_or_default();
                MediaSize::Video { width, height, frames: times.len(), last }
            }
            _ => MediaSize::Unknown,
        }
    }
}

/// A part of a prompt: a text, or the attachment of this number.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Slot {
    Text(String),
    Media(usize),
}

/// Positions of attachments in a text: in place of the placeholders of their kind, in order, or before the text if it
/// has no such placeholder. A text without any of them is left as it is.
///
/// # Errors
/// More placeholders of a kind than attachments, or fewer.
fn arrange(text: &str, given: &[Modality]) -> Result<Vec<Slot>> {
    let mut places: Vec<(usize, &str, Modality)> = Vec::new();
    let mut slots = Vec::new();
    if !given.is_empty() {
        for (modality, placeholder) in PLACEHOLDERS {
            let found = text.match_indices(placeholder);
            places.extend(found.map(|(at, placeholder)| (at, placeholder, modality)));
        }
        places.sort_unstable_by_key(|(at, ..)| *at);
    }
    for (modality, placeholder) in PLACEHOLDERS {
        let found = places.iter().filter(|(.., of)| *of == modality).count();
        let files = given.iter().filter(|of| **of == modality).count();
        if found > 0 && found != files {
            return Err(error!(
                Prompt,
                "placeholders {placeholder} in the text: {found}, files of {}: {files}; expected as many",
                modality.name()
            )
            .hint("leave the placeholders out to have all of them before the text"));
        }
    }
    let has_place = |modality: &Modality| places.iter().any(|(.., of)| of == modality);
    let numbers = |wanted: Modality| {
        given.iter().enumerate().filter(move |(_, of)| **of == wanted).map(|(index, _)| index)
    };
    let before = given.iter().enumerate().filter(|(_, modality)| !has_place(modality));
    slots.extend(before.map(|(index, _)| Slot::Media(index)));
    let mut waiting = PLACEHOLDERS.map(|(modality, _)| (modality, numbers(modality)));
    let mut done = 0;
    for (at, placeholder, modality) in places {
        push_text(&mut slots, text.get(done..at).unwrap_or_default());
        let next = waiting.iter_mut().find(|(of, _)| *of == modality);
        slots.extend(next.and_then(|(_, numbers)| numbers.next()).map(Slot::Media));
        done = at + placeholder.len();
    }
    push_text(&mut slots, text.get(done..).unwrap_or_default());
    Ok(slots)
}

fn push_text(slots: &mut Vec<Slot>, text: &str) {
    if !text.is_empty() {
        slots.push(Slot::Text(text.to_owned()));
    }
}

/// Checks before a model is loaded that the text's placeholders fit the attachments, that the host-op takes them, and
/// that the files are such images, audio and videos, by their first bytes.
///
/// # Errors
/// When one of these does not hold.
pub fn check(text: &str, attachments: &[Attachment], op: &OpDescription) -> Result<()> {
    let given: Vec<_> = attachments.iter().map(|attachment| attachment.modality).collect();
    arrange(text, &given)?;
    attachments.iter().try_for_each(|attachment| {
        attachment.check_taken(op)?;
        qhx_media::check(&attachment.source, attachment.modality, &Limits::default())
    })
}

/// Content of a message, or of a [`Prompt`] to complete: the text with its attachments, which are decoded by the rules
/// of the model's host-op ([`Attachment::read`]) and stand as [`content`] has it.
///
/// # Errors
/// Errors of [`Attachment::read`] and [`content`].
pub fn attach(
    text: String,
    attachments: &[Attachment],
    model: &Model,
    fps: Option<f32>,
) -> Result<(Content, Vec<Attached>)> {
    let attached = attachments.iter().map(|attachment| attachment.read(model, fps));
    let attached = attached.collect::<Result<Vec<_>>>()?;
    Ok((content(text, &attached)?, attached))
}

/// Content of a text with what is attached: in place of the placeholders of its kind, in order, or before the text if
/// it has no such placeholder.
///
/// # Errors
/// When there are more placeholders of a kind than attachments, or fewer.
pub fn content(text: String, attached: &[Attached]) -> Result<Content> {
    if attached.is_empty() {
        return Ok(text.into());
    }
    let given: Vec<_> = attached.iter().map(|attached| attached.media.modality()).collect();
    let part = |slot| match slot {
        Slot::Text(text) => Some(ContentPart::Text(text)),
        Slot::Media(at) => {
            attached.get(at).map(|attached| ContentPart::Media(attached.media.clone()))
        }
    };
    Ok(arrange(&text, &given)?.into_iter().filter_map(part).collect::<Vec<_>>().into())
}

/// Tokens to complete, behind what is attached.
pub fn tokens(ids: Vec<u32>, attached: &[Attached]) -> Prompt {
    if attached.is_empty() {
        return Prompt::Tokens(ids);
    }
    let media = attached.iter().map(|attached| Part::Media(attached.media.clone()));
    Prompt::Parts(media.chain([Part::Tokens(ids)]).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    const I: Modality = Modality::Image;
    const A: Modality = Modality::Audio;

    fn arranged(text: &str, given: &[Modality]) -> Vec<Slot> {
        arrange(text, given).unwrap()
    }

    fn text(text: &str) -> Slot {
        Slot::Text(text.to_owned())
    }

    #[test]
    fn parts_stand_at_their_placeholders_or_before_the_text() {
        use Slot::Media;
        assert_eq!(arranged("a <image> b", &[]), [text("a <image> b")]);
        assert_eq!(arranged("hello", &[I, A, I]), [Media(0), Media(1), Media(2), text("hello")]);
        assert_eq!(
            arranged("a <image> b <audio><image>", &[A, I, I]),
            [text("a "), Media(1), text(" b "), Media(0), Media(2)]
        );
        assert_eq!(arranged("a <image>!", &[A, I]), [Media(0), text("a "), Media(1), text("!")]);
        assert_eq!(arranged("", &[I]), [Media(0)]);
    }

    #[test]
    fn there_are_as_many_placeholders_as_files() {
        for (text, given, says) in [
            (
                "<image> and <image>",
                &[I][..],
                "placeholders <image> in the text: 2, files of image: 1",
            ),
            ("<image>", &[I, I], "placeholders <image> in the text: 1, files of image: 2"),
            ("<video>", &[I], "placeholders <video> in the text: 1, files of video: 0"),
        ] {
            let error = arrange(text, given).unwrap_err();
            assert!(error.message().starts_with(says), "{error}");
        }
    }
}
