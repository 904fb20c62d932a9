//! `qhx transcribe`: the words of audio.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Instant;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use qhx::media::Attachment;
use qhx::{
    Chunk, Live, Note, Source, SpeechRules, TIMES, Times, TranscribeEvent, TranscribeLimits,
    TranscribeOptions, Transcriber, Transcript, srt, vtt,
};
use qhx_base::escape::escaped;
use qhx_base::{CancelToken, Result};
use qhx_core::Manifest;
use qhx_core::manifest::Transcription;
use qhx_core::op::Modality;
use serde_json::{Value, json};

use crate::Status;
use crate::app::App;
use crate::args::BackendArgs;
use crate::session::{self, Opening};
use crate::time::ms;
use crate::trace::{TraceArgs, Tracing};

const EXAMPLES: &str = "\
Examples:
  qhx transcribe gemma4/v81 speech.wav
  qhx transcribe gemma4/v81 monday.mp3 tuesday.mp3
  qhx transcribe whisper/v81 talk.mp3 --language de --task translate
  qhx transcribe whisper/v81 film.wav --format srt > film.srt
  arecord -q -f S16_LE -r 16000 | qhx transcribe whisper/v81 -
  ffmpeg -v error -i film.mkv -f wav - | qhx transcribe whisper/v81 - --format srt
  qhx transcribe whisper/v81 interview.mp3 --vad=min-silence=1000
  qhx transcribe gemma4/v81 lecture.flac --json | jq '.sounds[0].pieces[] | .start, .text'";

/// Write down what is said in audio
///
/// Audio longer than the model takes is cut: by the times that the model gives, or else into chunks that overlap, and
/// what two chunks both have at their border is written once. Each file's words are one line on standard output.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct TranscribeArgs {
    /// The bundle: its folder, its manifest, or a manifest's name in its folder
    pub bundle: PathBuf,
    /// The audio: WAV, FLAC, MP3, AAC, M4A, Ogg, WebM, or data: URLs; - for standard input: a WAV file, or raw samples,
    /// mono, signed 16 bits, at the model's rate (16 kHz), which are transcribed as they come; other files are read to
    /// their end first
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<OsString>,
    /// Language that is spoken, by its code; auto for what is heard at the beginning
    #[arg(long, value_name = "CODE", default_value = "auto")]
    pub language: String,
    /// What is wanted, of a model that has several tasks: transcribe, or translate (into English)
    #[arg(long, value_name = "TASK")]
    pub task: Option<String>,
    /// Language to translate into, by its code, of a model that translates into several
    #[arg(long, value_name = "CODE")]
    pub into: Option<String>,
    /// Punctuation and capitals, of a model that has the choice [default: on]
    #[arg(long, value_name = "SWITCH", value_parser = switch())]
    pub punctuation: Option<bool>,
    /// Which times are wanted
    #[arg(long, value_name = "TIMES", default_value = "segment", value_parser = times())]
    pub times: Times,
    /// Temperature that words are drawn at, and no other: 0 takes the likeliest whatever they are [default: 0, and up to
    /// 1 where words go round in circles or are unlikely]
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// Give the model speech alone, which the network of Silero VAD finds; times stay those of the file. RULES are
    /// threshold=P (0.5), neg-threshold=P (0.15 less), min-speech=MS (250), min-silence=MS (500) and pad=MS (200), with
    /// commas between them
    #[arg(
        long,
        value_name = "RULES",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "",
        value_parser = vad
    )]
    pub vad: Option<SpeechRules>,
    /// Print words as soon as nothing changes them any more, and a new line behind each file
    #[arg(long, conflicts_with_all = ["format", "json"])]
    pub stream: bool,
    /// How the words are printed
    #[arg(long, value_enum, default_value_t, conflicts_with = "json")]
    pub format: Format,
    /// What asks for the words, behind the audio [default: the manifest's params.transcription]; of a model that is
    /// asked by tokens, what was said before
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// The audio and that text are a user's message, put into the model's chat template
    #[arg(long, requires = "prompt")]
    pub chat: bool,
    /// Greatest number of tokens to generate for a chunk
    #[arg(short = 'n', long, value_name = "N", default_value_t = 256)]
    pub max_new: usize,
    /// Print one JSON object, with the times of the chunks; as --format json
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub tracing: TraceArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
}

/// How the words are printed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(crate) enum Format {
    /// A line a file
    #[default]
    Text,
    /// One JSON object
    Json,
    /// SubRip subtitles
    Srt,
    /// WebVTT subtitles
    Vtt,
}

/// Reads which times are wanted.
fn times() -> impl TypedValueParser<Value = Times> {
    PossibleValuesParser::new(TIMES.map(|(name, _)| name)).try_map(|name| {
        TIMES
            .iter()
            .find(|(known, _)| *known == name)
            .map(|(_, times)| *times)
            .ok_or("no such times")
    })
}

/// Reads `on` or `off`.
fn switch() -> impl TypedValueParser<Value = bool> {
    PossibleValuesParser::new(["on", "off"]).map(|switch| switch == "on")
}

/// Reads rules of speech.
fn vad(text: &str) -> std::result::Result<SpeechRules, String> {
    let mut rules = SpeechRules::default();
    for rule in text.split(',').filter(|rule| !rule.is_empty()) {
        let (name, value) = rule.split_once('=').unwrap_or((rule, ""));
        let wrong = |what: &str| format!("{name}: found {value:?}, expected {what}");
        let millis = || value.parse().map_err(|_| wrong("a number of milliseconds"));
        let share = || value.parse().map_err(|_| wrong("a number from 0 to 1"));
        match name {
            "threshold" => rules.threshold = share()?,
            "neg-threshold" => rules.neg_threshold = Some(share()?),
            "min-speech" => rules.min_speech_ms = millis()?,
            "min-silence" => rules.min_silence_ms = millis()?,
            "pad" => rules.pad_ms = millis()?,
            _ => {
                let known = "threshold, neg-threshold, min-speech, min-silence and pad";
                return Err(format!("no rule is called {name:?}: there are {known}"));
            }
        }
    }
    rules.check().map_err(|e| e.to_string())?;
    Ok(rules)
}

impl TranscribeArgs {
    /// The options for a bundle of this manifest.
    fn options(&self, manifest: &Manifest) -> Result<TranscribeOptions> {
        let options =
            TranscribeOptions::default().with_max_new(self.max_new).with_times(self.times);
        let mut options = options
            .with_task(self.task.clone())
            .with_into(self.into.clone())
            .with_punctuation(self.punctuation)
            .with_vad(self.vad);
        if let Some(temperature) = self.temperature {
            options =
                options.with_limits(TranscribeLimits::default().temperatures(vec![temperature])?);
        }
        let language = Some(self.language.clone()).filter(|code| code != "auto");
        let options = options.with_language(language);
        let declared = manifest.params.transcription.as_ref();
        if declared.is_some_and(Transcription::asks_by_itself) {
            return Ok(options.with_prompt(self.prompt.clone()));
        }
        let asked = |prompt| Transcription { prompt, chat: self.chat, ..Transcription::default() };
        Ok(options.with_instruction(self.prompt.clone().map(asked)))
    }

    fn format(&self) -> Format {
        if self.json { Format::Json } else { self.format }
    }
}

/// Runs the command.
pub(crate) fn run(
    args: &TranscribeArgs,
    app: &mut App,
    tracing: Option<&Tracing>,
) -> Result<Status> {
    let named = args.files.iter().filter(|file| *file != "-");
    let files: Vec<_> =
        named.map(|file| Attachment::new(Modality::Audio, file.clone())).collect::<Result<_>>()?;
    let check = |manifest: &Manifest| args.options(manifest)?.instruction(manifest).map(drop);
    let opening = Opening { attachments: &files, tracing, ..Opening::default() };
    let model = session::open_checked(app, &args.bundle, &args.backend, opening, check)?;
    say!("{}", session::load(&model));
    let options = args.options(model.manifest())?;
    let mut transcriber = Transcriber::with_options(model, &options)?;
    let (mut all, mut status) = (Vec::new(), Status::Done);
    let format = args.format();
    let mut sources = files.iter();
    for file in &args.files {
        let start = Instant::now();
        let source = if file == "-" { None } else { sources.next().map(|file| &file.source) };
        let name = source.map_or_else(|| "standard input".to_owned(), ToString::to_string);
        let shown = if args.stream { Shown::Text } else { Shown::Chunks(format) };
        let transcript = transcribe(app, &mut transcriber, source, &name, shown)?;
        let (seconds, took) = (transcript.seconds, start.elapsed());
        let language = transcript.language.as_ref();
        let language = language.map_or_else(String::new, |code| format!(", language {code}"));
        say!(
            "{name}: {seconds:.1} s of audio in {:.1} ms, {:.1} times real time{language}",
            ms(took),
            seconds / took.as_secs_f64().max(f64::MIN_POSITIVE)
        );
        match format {
            Format::Text if args.stream => app.output.line("")?,
            Format::Text => app.output.line(&transcript.text)?,
            Format::Srt => app.output.write(&srt(&transcript))?,
            Format::Vtt => app.output.write(&vtt(&transcript))?,
            Format::Json => {}
        }
        all.push(report(&name, &transcript));
        if transcript.cancelled {
            status = Status::Cancelled;
            break;
        }
    }
    if format == Format::Json {
        app.output.json(&json!({"sounds": all}))?;
    }
    Ok(status)
}

/// Output while a file is transcribed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Shown {
    /// Text as it becomes known, on standard output.
    Text,
    /// Chunks on standard error, where standard output has them later or otherwise.
    Chunks(Format),
}

/// Transcribes a file, and reports how that goes on.
fn transcribe(
    app: &mut App,
    transcriber: &mut Transcriber,
    source: Option<&Source>,
    name: &str,
    shown: Shown,
) -> Result<Transcript> {
    let ticket = CancelToken::new();
    let _working = app.interrupts.working_on(&ticket);
    let progress = app.progress.clone();
    let (output, mut written) = (&mut app.output, Ok(()));
    let on_event = |event: TranscribeEvent<'_>| match event {
        TranscribeEvent::Chunks { count, seconds, longest, overlap } if overlap > 0.0 => say!(
            "{name}: {seconds:.1} s of audio, the model takes {longest:.1} s at a time: cut into {count} chunks that \
             overlap by {overlap:.1} s"
        ),
        TranscribeEvent::Begin => progress.begin(Some(name)),
        // What is known already, where it is not printed anyway.
        TranscribeEvent::Done(chunk) => {
            progress.end();
            if shown != Shown::Text && (source.is_none() || shown != Shown::Chunks(Format::Text)) {
                say!("{name}: {:.2} s to {:.2} s: {}", chunk.start, chunk.end, chunk.text);
            }
        }
        TranscribeEvent::Text(text) if shown == Shown::Text => {
            progress.end();
            // Where nobody reads any more, the work ends.
            if written.is_ok() {
                written = output.write(&escaped(text)).inspect_err(|_| ticket.cancel());
            }
        }
        _ => progress.end(),
    };
    let transcript = match source {
        Some(source) => transcriber.transcribe_with(source, &ticket, on_event),
        None => {
            let rules = transcriber.model().media_rules().audio;
            Live::incoming(name, std::io::stdin(), &rules)
                .and_then(|live| transcriber.transcribe_live(name, live, &ticket, on_event))
        }
    };
    progress.end();
    if let Some(trace) = transcriber.model().trace() {
        // A second Ctrl-C ends the process where it is.
        trace.flush();
    }
    written?;
    let transcript = transcript?;
    for chunk in &transcript.chunks {
        if let Some(why) = transcriber.cut_off(chunk) {
            let Chunk { start, end, tokens, .. } = chunk;
            say!(
                "{name}: what is said from {start:.1} s to {end:.1} s is cut off after {tokens} tokens; {why}"
            );
        }
    }
    Ok(transcript)
}

/// A transcript for programs.
fn report(name: &str, transcript: &Transcript) -> Value {
    let chunk = |chunk: &Chunk| {
        let mut report = json!({
            "start": round(chunk.start),
            "end": round(chunk.end),
            "text": chunk.text,
            "finish_reason": chunk.finish_reason,
        });
        if let Some(scores) = &chunk.scores {
            report["seek"] = json!(round(scores.seek));
            report["temperature"] = json!(round(f64::from(scores.temperature)));
            report["avg_logprob"] = json!(scores.avg_logprob);
            report["compression_ratio"] = json!(scores.compression_ratio);
            report["no_speech_prob"] = json!(scores.no_speech_prob);
        }
        report
    };
    let pieces = if transcript.words.is_empty() { &transcript.chunks } else { &transcript.words };
    let mut report = json!({
        "name": name,
        "seconds": round(transcript.seconds),
        "text": transcript.text,
        "pieces": pieces.iter().map(chunk).collect::<Vec<_>>(),
    });
    if let Some(language) = &transcript.language {
        report["language"] = json!(language);
    }
    if !transcript.notes.is_empty() {
        let note = |note: &Note| json!({"start": round(note.start), "end": round(note.end), "found": note.found});
        report["notes"] = transcript.notes.iter().map(note).collect();
    }
    report
}

/// Milliseconds are enough for a program.
fn round(seconds: f64) -> f64 {
    (seconds * 1e3).round() / 1e3
}
