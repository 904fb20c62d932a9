//! `qhx transcribe`: the words of audio.

use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Instant;

use clap::Args;
use qhx::media::Attachment;
use qhx::{Chunk, TranscribeEvent, TranscribeOptions, Transcriber, Transcript};
use qhx_core::manifest::Transcription;
use qhx_core::op::Modality;
use qhx_core::{CancelToken, Result};
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
  qhx transcribe gemma4/v81 lecture.flac --json | jq '.sounds[0].pieces[] | .start, .text'";

/// Write down what is said in audio
///
/// Audio longer than the model takes is cut into chunks that overlap, and what two chunks both have at their border
/// is written once. Each file's words are one line on standard output.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct TranscribeArgs {
    /// The bundle: its folder, its manifest, or a manifest's name in its folder
    pub bundle: PathBuf,
    /// The audio: WAV, FLAC, MP3, Ogg Vorbis, or data: URLs
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<OsString>,
    /// What asks for the words, behind the audio [default: the manifest's params.transcription]
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// The audio and that text are a user's message, put into the model's chat template
    #[arg(long, requires = "prompt")]
    pub chat: bool,
    /// Greatest number of tokens to generate for a chunk
    #[arg(short = 'n', long, value_name = "N", default_value_t = 256)]
    pub max_new: usize,
    /// Print one JSON object, with the times of the chunks
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub tracing: TraceArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
}

impl TranscribeArgs {
    fn options(&self) -> TranscribeOptions {
        let instruction = self.prompt.clone();
        let instruction = instruction.map(|prompt| Transcription { prompt, chat: self.chat });
        TranscribeOptions::default().with_max_new(self.max_new).with_instruction(instruction)
    }
}

/// Runs the command.
pub(crate) fn run(args: &TranscribeArgs, app: &mut App) -> Result<Status> {
    args.tracing.trace(|tracing| run_traced(args, app, tracing))
}

fn run_traced(args: &TranscribeArgs, app: &mut App, tracing: Option<&Tracing>) -> Result<Status> {
    let files = args.files.iter().cloned();
    let files: Vec<_> =
        files.map(|file| Attachment::new(Modality::Audio, file)).collect::<Result<_>>()?;
    let options = args.options();
    let check = |manifest: &_| options.instruction(manifest).map(drop);
    let opening = Opening { attachments: &files, tracing, ..Opening::default() };
    let model = session::open_checked(app, &args.bundle, &args.backend, opening, check)?;
    say!("{}", session::load(&model));
    let mut transcriber = Transcriber::with_options(model, &options)?;
    let (mut all, mut status) = (Vec::new(), Status::Done);
    for Attachment { source, .. } in &files {
        let start = Instant::now();
        let name = source.to_string();
        let transcript = transcribe(app, &mut transcriber, source, &name)?;
        let seconds = transcript.seconds;
        say!("{name}: {seconds:.1} s of audio in {:.1} ms", ms(start.elapsed()));
        if !args.json {
            app.output.line(&transcript.text)?;
        }
        all.push(report(&name, &transcript));
        if transcript.cancelled {
            status = Status::Cancelled;
            break;
        }
    }
    if args.json {
        app.output.json(&json!({"sounds": all}))?;
    }
    Ok(status)
}

/// Transcribes a file, and reports how that goes on.
fn transcribe(
    app: &mut App,
    transcriber: &mut Transcriber,
    source: &qhx_media::Source,
    name: &str,
) -> Result<Transcript> {
    let ticket = CancelToken::new();
    let _working = app.interrupts.working_on(&ticket);
    let progress = app.progress.clone();
    let transcript = transcriber.transcribe_with(source, &ticket, |event| match event {
        TranscribeEvent::Chunks { count, seconds, longest, overlap } => say!(
            "{name}: {seconds:.1} s of audio, the model takes {longest:.1} s at a time: cut into {count} chunks that \
             overlap by {overlap:.1} s"
        ),
        TranscribeEvent::Begin => progress.begin(Some(name)),
        _ => progress.end(),
    });
    progress.end();
    if let Some(trace) = transcriber.model().trace() {
        // A second Ctrl-C ends the process where it is.
        trace.flush();
    }
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
        json!({
            "start": round(chunk.start),
            "end": round(chunk.end),
            "text": chunk.text,
            "finish_reason": chunk.finish_reason,
        })
    };
    json!({
        "name": name,
        "seconds": round(transcript.seconds),
        "text": transcript.text,
        "pieces": transcript.chunks.iter().map(chunk).collect::<Vec<_>>(),
    })
}

/// Milliseconds are enough for a program.
fn round(seconds: f64) -> f64 {
    (seconds * 1e3).round() / 1e3
}
