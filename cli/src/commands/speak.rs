//! `qhx speak`: a text as audio.

use std::ffi::OsString;
use std::fs::File;
use std::io::{Seek as _, SeekFrom, Write as _};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use clap::Args;
use clap::builder::{PossibleValuesParser, TypedValueParser};
use qhx::{AUDIO_FORMATS, AudioFormat, SpeakOptions, Speaker, encode_audio, pcm16, wav_header};
use qhx_base::{CancelToken, Error, ErrorKind, Result};
use qhx_core::dump::Dump;
use serde_json::json;

use crate::app::App;
use crate::args::BackendArgs;
use crate::time::ms;
use crate::trace::{TraceArgs, Tracing};
use crate::{Status, prompt, session};

const EXAMPLES: &str = "\
Examples:
  qhx speak kokoro/v81 'It is raining.' -o rain.wav
  qhx speak kokoro/v81 - -o book.mp3 --voice bf_emma --speed 1.2 < chapter.txt
  qhx speak kokoro/v81 'Streams as it is made.' -o - | aplay -q
  qhx generate smollm2 'A story.' | qhx speak en_US-amy/v81 - -o - | aplay -q
  qhx speak kokoro/v81 'həlˈO wˈɜɹld!' --phonemes -o hello.wav";

/// Say a text
///
/// The audio is mono, at the model's rate, in the format of the file's extension, and else a WAV file of 16 bits. With
/// `-o -` WAV and PCM go to standard output sentence by sentence, as each is made; a text on standard input is said
/// while it comes. Words become phonemes as the voice has it: by the lexicon of the bundle, or one that is given, and
/// by rules of English letters where it lacks them; or by the program espeak-ng, which has to be installed. Voices are
/// listed by `qhx inspect`.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct SpeakArgs {
    /// The bundle: its folder, its manifest, or a manifest's name in its folder
    pub bundle: PathBuf,
    /// The text; - for standard input
    pub text: OsString,
    /// The file of the audio; - for standard output
    #[arg(short, long, value_name = "FILE")]
    pub output: PathBuf,
    /// The voice, by its name [default: the first of the bundle]
    #[arg(long, value_name = "NAME")]
    pub voice: Option<String>,
    /// How fast, from 0.25 to 4; 1 is as the voice has it
    #[arg(long, value_name = "FACTOR", default_value_t = 1.0)]
    pub speed: f32,
    /// The text is phonemes already, in the symbols of the model (IPA)
    #[arg(long)]
    pub phonemes: bool,
    /// Deviation of the noise in the audio, for voices of Piper and other VITS models [default: the bundle's own]
    #[arg(long, value_name = "NUMBER")]
    pub noise: Option<f32>,
    /// The same of the noise in the lengths of sounds
    #[arg(long, value_name = "NUMBER")]
    pub duration_noise: Option<f32>,
    /// Seed of both; the same one says a text in the same way
    #[arg(long, value_name = "NUMBER", default_value_t = 0)]
    pub seed: u32,
    /// Words and their phonemes, which are taken before the bundle's: a JSON object, such as us_gold.json of misaki. May be
    /// given several times
    #[arg(long, value_name = "FILE")]
    pub lexicon: Vec<PathBuf>,
    /// The format of the audio [default: that of the file's extension, or wav]
    #[arg(long, value_name = "FORMAT", value_parser = formats())]
    pub format: Option<AudioFormat>,
    /// Print one JSON object with the length of the audio and the words that no lexicon has
    #[arg(long)]
    pub json: bool,
    /// Write what the model makes between text and audio (durations, F0, spectrum) to this folder as .npy files
    #[arg(long, value_name = "DIR")]
    pub dump: Option<PathBuf>,
    #[command(flatten)]
    pub tracing: TraceArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
}

/// Parser of the names of formats.
fn formats() -> impl TypedValueParser<Value = AudioFormat> {
    let names = PossibleValuesParser::new(AUDIO_FORMATS.map(|(name, _)| name));
    names.try_map(|name| AudioFormat::named(&name).ok_or("an unknown format"))
}

impl SpeakArgs {
    fn format(&self) -> AudioFormat {
        let extension = self.output.extension().and_then(|extension| extension.to_str());
        self.format.or_else(|| AudioFormat::named(extension?)).unwrap_or(AudioFormat::Wav)
    }
}

/// Target of the audio.
enum Target<'a> {
    /// A file, once it is created.
    File(Option<File>, &'a PathBuf),
    Output(&'a mut App),
}

impl Target<'_> {
    fn write(&mut self, bytes: &[u8]) -> Result<()> {
        match self {
            Self::File(file, path) => {
                if file.is_none() {
                    *file = Some(create(path)?);
                }
                let Some(file) = file else { return Ok(()) };
                file.write_all(bytes).map_err(|e| Error::io(ErrorKind::Io, path, e))
            }
            Self::Output(app) => app.output.bytes(bytes),
        }
    }
}

fn create(path: &std::path::Path) -> Result<File> {
    File::create(path)
        .map_err(|e| Error::io(ErrorKind::Io, path, e).hint("name another file: -o FILE"))
}

/// Runs the command.
pub(crate) fn run(args: &SpeakArgs, app: &mut App, tracing: Option<&Tracing>) -> Result<Status> {
    // What comes on standard input is said while it comes.
    let text = match args.text.as_os_str() == "-" {
        true => None,
        false => Some(prompt::text(Some(&args.text))?),
    };
    let options = SpeakOptions::default()
        .with_voice(args.voice.clone())
        .with_speed(args.speed)
        .with_phonemes(args.phonemes)
        .with_noise(args.noise)
        .with_duration_noise(args.duration_noise)
        .with_seed(args.seed);
    let streams = args.output.as_os_str() == "-";
    if streams && args.json {
        let what = "--json: standard output is the audio already";
        return Err(Error::new(ErrorKind::Usage, what).hint("name a file: -o FILE"));
    }
    let dump = args.dump.as_deref().map(Dump::create).transpose()?.map(Arc::new);
    let opening = session::Opening { dump, tracing, ..session::Opening::default() };
    let model = session::open_checked(app, &args.bundle, &args.backend, opening, |_| Ok(()))?;
    say!("{}", session::load(&model));
    let mut speaker = Speaker::new(model)?;
    for file in args.lexicon.iter().rev() {
        speaker.add_lexicon(file)?;
    }
    // Before anything is computed, and before a file that is there is emptied.
    match &text {
        Some(text) => speaker.check(text, &options)?,
        None => speaker.check_options(&options)?,
    }
    let rate = speaker.rate();
    let ticket = CancelToken::new();
    let _working = app.interrupts.working_on(&ticket);
    let mut target = match streams {
        true => Target::Output(app),
        // A text that is still to come may be none that is said, and leaves the file as it is.
        false => {
            let file = if text.is_some() { Some(create(&args.output)?) } else { None };
            Target::File(file, &args.output)
        }
    };
    let format = args.format();
    let (start, mut first, mut samples, mut waiting) = (Instant::now(), None, 0, Vec::new());
    let pieces = text.map(Ok).into_iter().chain(prompt::Pieces::of(args.text.as_os_str()));
    let spoken = speaker.speak_pieces(pieces, &options, &ticket, |part| {
        if first.is_none() && format == AudioFormat::Wav {
            target.write(&wav_header(rate, None))?;
        }
        first.get_or_insert_with(|| start.elapsed());
        samples += part.len();
        match format {
            AudioFormat::Wav | AudioFormat::Pcm => target.write(&pcm16(part)),
            _ => {
                waiting.extend_from_slice(part);
                Ok(())
            }
        }
    });
    if !waiting.is_empty() {
        target.write(&encode_audio(&waiting, rate, format)?)?;
    }
    if let (Target::File(Some(file), path), AudioFormat::Wav, true) =
        (&mut target, format, samples > 0)
    {
        // The length is known now, also of what was cut short.
        let written = file
            .seek(SeekFrom::Start(0))
            .and_then(|_| file.write_all(&wav_header(rate, Some(samples))));
        written.map_err(|e| Error::io(ErrorKind::Io, path, e))?;
    }
    drop(target);
    if let Some(trace) = speaker.model().trace() {
        trace.flush();
    }
    let spoken = spoken?;
    let took = start.elapsed();
    say!(
        "{:.1} s of audio in {:.1} ms, {:.1} times real time, the first after {:.1} ms",
        spoken.seconds,
        ms(took),
        spoken.seconds / took.as_secs_f64().max(f64::MIN_POSITIVE),
        ms(first.unwrap_or_default())
    );
    if !spoken.left_out.is_empty() {
        let characters: String = spoken.left_out.iter().collect();
        say!("left out, as they have no sound: {characters}");
    }
    if !spoken.out_of_lexicon.is_empty() {
        let some: Vec<_> = spoken.out_of_lexicon.iter().take(8).map(String::as_str).collect();
        let more = if spoken.out_of_lexicon.len() > some.len() { ", …" } else { "" };
        say!("said by rules of letters, as no lexicon has them: {}{more}", some.join(", "));
    }
    if args.json {
        app.output.json(&json!({
            "file": args.output,
            "seconds": (spoken.seconds * 1e3).round() / 1e3,
            "rate": rate,
            "parts": spoken.parts,
            "cancelled": spoken.cancelled,
            "left_out": spoken.left_out,
            "out_of_lexicon": spoken.out_of_lexicon,
        }))?;
    }
    Ok(if spoken.cancelled { Status::Cancelled } else { Status::Done })
}
