//! The options that name images, audio and videos of a prompt, and what is reported about them.

use std::ffi::OsString;

use clap::{Arg, ArgAction, ArgMatches, Args, Command, FromArgMatches, value_parser};
use qhx::media::{Attached, Attachment, MediaSize};
use qhx_base::Result;
use qhx_core::op::Modality;
use serde_json::{Value, json};

use crate::time::{millis, ms};

/// Kinds of files, each with the help of its option.
const KINDS: [(Modality, &str); 3] = [
    (
        Modality::Image,
        "An image for the prompt: PNG, JPEG, WebP, GIF, or a data: URL. It stands before the text, or where the text \
         says <image>. This and the next two may be given several times, and their order counts",
    ),
    (
        Modality::Audio,
        "Audio for the prompt: WAV, FLAC, MP3, AAC, M4A, Ogg, WebM, or a data: URL. It stands before the text, or where \
         the text says <audio>",
    ),
    (
        Modality::Video,
        "A video for the prompt: a folder of images, or an animated GIF, PNG or WebP. It stands before the text, or \
         where the text says <video>",
    ),
];

/// One line about what was read and how long that took.
fn summary(attached: &Attached) -> String {
    let size = match attached.size() {
        MediaSize::Image { width, height } => format!("{width} × {height} pixels"),
        MediaSize::Audio { seconds, rate } => format!("{seconds} s at {rate} Hz"),
        MediaSize::Video { width, height, frames, last } => {
            format!("{frames} frames of {width} × {height} pixels, to {last} s")
        }
        _ => "of unknown size".to_owned(),
    };
    let modality = attached.media.modality().name();
    format!("{modality} {}: {size}, read in {:.1} ms", attached.name, ms(attached.time))
}

/// Reports what each is and how long reading took.
pub(crate) fn say(attached: &[Attached]) {
    attached.iter().for_each(|attached| say!("{}", summary(attached)));
}

/// The names of all of them in a few words; none where there is none.
pub(crate) fn names(attached: &[Attached]) -> Option<String> {
    match attached {
        [] => None,
        [one] => Some(one.name.clone()),
        [first, others @ ..] => Some(format!("{} and {} more", first.name, others.len())),
    }
}

/// JSON report of the files that were read.
pub(crate) fn json(attached: &[Attached]) -> Value {
    let report = |a: &Attached| {
        let mut report = json!({"modality": a.media.modality().name(), "name": a.name});
        if let (Some(report), Value::Object(size)) = (report.as_object_mut(), json!(a.size())) {
            report.extend(size);
            report.insert("read_ms".to_owned(), json!(millis(a.time)));
        }
        report
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
    /// Attachments that the options name.
    pub(crate) fn attachments(&self) -> Result<Vec<Attachment>> {
        let files = self.files.iter().cloned();
        files.map(|(modality, file)| Attachment::new(modality, file)).collect()
    }
}

/// By hand: the derived form keeps no order across options.
impl FromArgMatches for MediaArgs {
    fn from_arg_matches(matches: &ArgMatches) -> Result<Self, clap::Error> {
        let mut files = Vec::new();
        for (modality, _) in KINDS {
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
        let option = |(modality, help): (Modality, &'static str)| {
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

const HEADING: &str = "Images and audio";

fn parse_fps(text: &str) -> Result<f32, String> {
    let fps = text.parse().ok().filter(|fps: &f32| fps.is_finite() && *fps > 0.0);
    fps.ok_or_else(|| "expected a number above 0, such as 2 or 0.5".to_owned())
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

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
