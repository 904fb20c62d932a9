//! Pictures, sounds and videos of a prompt: the options that name them, marks in the text, and reading the files.

use std::ffi::OsString;
use std::time::{Duration, Instant};

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, value_parser};
use qhx_core::engine::{Content, ContentPart, Model, Part, Prompt};
use qhx_core::op::{Modality, OpDescription, Segment};
use qhx_core::{Error, ErrorKind, Media, Result, trace};
use qhx_media::{Limits, Source};
use serde::Serialize;

use crate::time::{millis, ms};

/// What files can be, with the mark that says where in a text one belongs, and the help of its option.
const KINDS: [(Modality, &str, &str); 3] = [
    (
        Modality::Image,
        "<image>",
        "A picture for the prompt: PNG, JPEG, WebP, GIF, or a data: URL. It stands before the text, or where the text \
         says <image>. This and the next two may be given several times, and their order counts",
    ),
    (
        Modality::Audio,
        "<audio>",
        "A sound for the prompt: WAV, FLAC, MP3, Ogg Vorbis, or a data: URL. It stands before the text, or where the \
         text says <audio>",
    ),
    (
        Modality::Video,
        "<video>",
        "A video for the prompt: a folder of pictures, or an animated GIF, PNG or WebP. It stands before the text, or \
         where the text says <video>",
    ),
];

/// A picture, sound or video that a user named.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Attachment {
    pub modality: Modality,
    pub source: Source,
}

impl Attachment {
    /// `file` is a path or a `data:` URL.
    pub(crate) fn new(modality: Modality, file: OsString) -> Result<Self> {
        let source = match file.to_str() {
            Some(text) => Source::parse(text, &Limits::default())?,
            None => Source::File(file.into()),
        };
        Ok(Self { modality, source })
    }

    /// Whether the host-op takes such a thing.
    pub(crate) fn check_taken(&self, op: &OpDescription) -> Result<()> {
        if op.modalities.contains(&self.modality) {
            return Ok(());
        }
        let takes: Vec<_> = op.modalities.iter().map(|modality| modality.name()).collect();
        let (wanted, takes) = (self.modality.name(), takes.join(", "));
        let message = format!(
            "{}: host-op {:?} does not take the modality {wanted}; it takes {takes}",
            self.source, op.name
        );
        Err(Error::new(ErrorKind::Prompt, message)
            .hint(format!("leave it out, or name a bundle whose model takes {wanted}")))
    }

    /// Looks at the file's first bytes, for an answer before a model is loaded.
    pub(crate) fn check(&self) -> Result<()> {
        qhx_media::check(&self.source, self.modality, &Limits::default())
    }

    /// Decodes the file by the rules of the model's host-op.
    fn read(&self, model: &Model, fps: Option<f32>) -> Result<Attached> {
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

/// A picture, sound or video that was read.
#[derive(Debug, Clone)]
pub(crate) struct Attached {
    pub name: String,
    pub media: Media,
    pub time: Duration,
}

/// An [`Attached`] for programs.
#[derive(Debug, Clone, PartialEq, Serialize)]
struct Report<'a> {
    modality: &'static str,
    name: &'a str,
    #[serde(flatten)]
    size: Size,
    read_ms: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[serde(untagged)]
enum Size {
    Image { width: u32, height: u32 },
    Audio { seconds: f64, rate: u32 },
    Video { width: u32, height: u32, frames: usize, last: f32 },
    Unknown {},
}

impl Attached {
    fn size(&self) -> Size {
        match self.media.segment() {
            Segment::Image { width, height, .. } => Size::Image { width, height },
            Segment::Audio { samples, rate } => {
                let seconds = samples.len() as f64 / f64::from(rate);
                Size::Audio { seconds: (seconds * 1e3).round() / 1e3, rate }
            }
            Segment::Video { width, height, times, .. } => {
                let last = times.last().copied().unwrap_or_default();
                Size::Video { width, height, frames: times.len(), last }
            }
            _ => Size::Unknown {},
        }
    }

    /// One line about it and how long reading took.
    fn summary(&self) -> String {
        let size = match self.size() {
            Size::Image { width, height } => format!("{width} × {height} pixels"),
            Size::Audio { seconds, rate } => format!("{seconds} s at {rate} Hz"),
            Size::Video { width, height, frames, last } => {
                format!("{frames} frames of {width} × {height} pixels, to {last} s")
            }
            Size::Unknown {} => "of unknown size".to_owned(),
        };
        let modality = self.media.modality().name();
        format!("{modality} {}: {size}, read in {:.1} ms", self.name, ms(self.time))
    }
}

/// Says of each what it is and how long reading took.
pub(crate) fn say(attached: &[Attached]) {
    attached.iter().for_each(|attached| say!("{}", attached.summary()));
}

/// The names of all of them in a few words; none where there is none.
pub(crate) fn names(attached: &[Attached]) -> Option<String> {
    match attached {
        [] => None,
        [one] => Some(one.name.clone()),
        [first, others @ ..] => Some(format!("{} and {} more", first.name, others.len())),
    }
}

/// What was read, for programs.
pub(crate) fn json(attached: &[Attached]) -> serde_json::Value {
    let report = |a: &Attached| {
        let modality = a.media.modality().name();
        let report = Report { modality, name: &a.name, size: a.size(), read_ms: millis(a.time) };
        serde_json::json!(report)
    };
    attached.iter().map(report).collect()
}

/// The options `--image`, `--audio`, `--video` and `--fps`.
#[derive(Debug, Clone, Default)]
pub(crate) struct MediaArgs {
    /// In the order of the command line, across the options.
    pub files: Vec<(Modality, OsString)>,
    pub fps: Option<f32>,
}

impl MediaArgs {
    /// What the options name.
    pub(crate) fn attachments(&self) -> Result<Vec<Attachment>> {
        let files = self.files.iter().cloned();
        files.map(|(modality, file)| Attachment::new(modality, file)).collect()
    }
}

/// By hand: the derived form keeps no order across options.
impl FromArgMatches for MediaArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut files = Vec::new();
        for (modality, ..) in KINDS {
            let name = modality.name();
            let places = matches.indices_of(name).into_iter().flatten();
            let values = matches.get_many::<OsString>(name).into_iter().flatten();
            files.extend(places.zip(values).map(|(at, file)| (at, modality, file.clone())));
        }
        files.sort_by_key(|(at, ..)| *at);
        let files = files.into_iter().map(|(_, modality, file)| (modality, file)).collect();
        Ok(Self { files, fps: matches.get_one("fps").copied() })
    }

    fn update_from_arg_matches(&mut self, matches: &ArgMatches) -> Result<(), clap::Error> {
        *self = Self::from_arg_matches(matches)?;
        Ok(())
    }
}

impl Args for MediaArgs {
    fn augment_args(command: Command) -> Command {
        let option = |(modality, _, help): (Modality, &str, &'static str)| {
            let value = if modality == Modality::Video { "PATH" } else { "FILE" };
            Arg::new(modality.name())
                .long(modality.name())
                .value_name(value)
                .help(help)
                .help_heading(HEADING)
                .action(ArgAction::Append)
                .value_parser(value_parser!(OsString))
        };
        let fps = Arg::new("fps")
            .long("fps")
            .value_name("N")
            .help("Frames of a video that are taken a second, of a folder: that there are [default: the model's]")
            .help_heading(HEADING)
            .requires("video")
            .value_parser(parse_fps);
        command.args(KINDS.map(option)).arg(fps)
    }

    fn augment_args_for_update(command: Command) -> Command {
        Self::augment_args(command)
    }
}

const HEADING: &str = "Pictures and sounds";

fn parse_fps(text: &str) -> Result<f32, String> {
    let fps = text.parse().ok().filter(|fps: &f32| fps.is_finite() && *fps > 0.0);
    fps.ok_or_else(|| "expected a number above 0, such as 2 or 0.5".to_owned())
}

/// A piece of a prompt: a text, or the picture, sound or video of this number.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Slot {
    Text(String),
    Media(usize),
}

/// Where in a text pictures, sounds and videos stand: in place of the marks of their kind, in order, or before the text
/// where it has no such mark. A text without any of them is left as it is.
///
/// # Errors
///
/// More marks of a kind than files, or fewer.
fn arrange(text: &str, given: &[Modality]) -> Result<Vec<Slot>> {
    let mut marks: Vec<(usize, &str, Modality)> = Vec::new();
    let mut slots = Vec::new();
    if !given.is_empty() {
        for (modality, mark, _) in KINDS {
            marks.extend(text.match_indices(mark).map(|(at, mark)| (at, mark, modality)));
        }
        marks.sort_unstable_by_key(|(at, ..)| *at);
    }
    for (modality, mark, _) in KINDS {
        let marked = marks.iter().filter(|(.., of)| *of == modality).count();
        let files = given.iter().filter(|of| **of == modality).count();
        if marked > 0 && marked != files {
            let message = format!(
                "marks {mark} in the text: {marked}, files of {}: {files}; expected as many",
                modality.name()
            );
            return Err(Error::new(ErrorKind::Prompt, message)
                .hint("leave the marks out to have all of them before the text"));
        }
    }
    let is_marked = |modality: &Modality| marks.iter().any(|(.., of)| of == modality);
    let places = |wanted: Modality| {
        given.iter().enumerate().filter(move |(_, of)| **of == wanted).map(|(index, _)| index)
    };
    let before = given.iter().enumerate().filter(|(_, modality)| !is_marked(modality));
    slots.extend(before.map(|(index, _)| Slot::Media(index)));
    let mut waiting = KINDS.map(|(modality, ..)| (modality, places(modality)));
    let mut done = 0;
    for (at, mark, modality) in marks {
        push_text(&mut slots, text.get(done..at).unwrap_or_default());
        let next = waiting.iter_mut().find(|(of, _)| *of == modality);
        slots.extend(next.and_then(|(_, places)| places.next()).map(Slot::Media));
        done = at + mark.len();
    }
    push_text(&mut slots, text.get(done..).unwrap_or_default());
    Ok(slots)
}

fn push_text(slots: &mut Vec<Slot>, text: &str) {
    if !text.is_empty() {
        slots.push(Slot::Text(text.to_owned()));
    }
}

/// Whether the text's marks fit what is attached, before anything is loaded.
pub(crate) fn check_marks(text: &str, attachments: &[Attachment]) -> Result<()> {
    let given: Vec<_> = attachments.iter().map(|attachment| attachment.modality).collect();
    arrange(text, &given).map(drop)
}

/// Decodes all files, for the model's host-op.
pub(crate) fn read(
    attachments: &[Attachment],
    model: &Model,
    fps: Option<f32>,
) -> Result<Vec<Attached>> {
    attachments.iter().map(|attachment| attachment.read(model, fps)).collect()
}

fn parts<P>(
    text: &str,
    attached: &[Attached],
    of_text: impl Fn(String) -> P,
    of_media: impl Fn(Media) -> P,
) -> Result<Vec<P>> {
    let given: Vec<_> = attached.iter().map(|attached| attached.media.modality()).collect();
    let part = |slot| match slot {
        Slot::Text(text) => Some(of_text(text)),
        Slot::Media(at) => attached.get(at).map(|attached| of_media(attached.media.clone())),
    };
    Ok(arrange(text, &given)?.into_iter().filter_map(part).collect())
}

/// What a message says.
pub(crate) fn content(text: String, attached: &[Attached]) -> Result<Content> {
    if attached.is_empty() {
        return Ok(text.into());
    }
    Ok(parts(&text, attached, ContentPart::Text, ContentPart::Media)?.into())
}

/// A text to complete.
pub(crate) fn completion(text: String, attached: &[Attached]) -> Result<Prompt> {
    if attached.is_empty() {
        return Ok(Prompt::Text(text));
    }
    Ok(Prompt::Parts(parts(&text, attached, Part::Text, Part::Media)?))
}

/// Tokens to complete, after what is attached.
pub(crate) fn tokens(ids: Vec<u32>, attached: &[Attached]) -> Prompt {
    if attached.is_empty() {
        return Prompt::Tokens(ids);
    }
    let media = attached.iter().map(|attached| Part::Media(attached.media.clone()));
    Prompt::Parts(media.chain([Part::Tokens(ids)]).collect())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

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
    fn parts_stand_at_their_marks_or_before_the_text() {
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
    fn marks_and_files_are_as_many() {
        for (text, given, says) in [
            ("<image> and <image>", &[I][..], "marks <image> in the text: 2, files of image: 1"),
            ("<image>", &[I, I], "marks <image> in the text: 1, files of image: 2"),
            ("<video>", &[I], "marks <video> in the text: 1, files of video: 0"),
        ] {
            let error = arrange(text, given).unwrap_err();
            assert!(error.message().starts_with(says), "{error}");
        }
    }

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        media: MediaArgs,
    }

    #[test]
    fn the_order_of_the_command_line_counts_across_options() {
        let words = "x --image a --audio b --image=c --video d --fps 0.5 --audio e".split(' ');
        let media = Line::try_parse_from(words).unwrap().media;
        let files: Vec<_> = media.files.iter().map(|(_, file)| file.to_str().unwrap()).collect();
        assert_eq!(files, ["a", "b", "c", "d", "e"]);
        let kinds: Vec<_> = media.files.iter().map(|(modality, _)| modality.name()).collect();
        assert_eq!(kinds, ["image", "audio", "image", "video", "audio"]);
        assert_eq!(media.fps, Some(0.5));
        for bad in ["x --fps 2", "x --video d --fps 0", "x --video d --fps nan", "x --image"] {
            assert!(Line::try_parse_from(bad.split(' ')).is_err(), "{bad}");
        }
    }
}
