//! `qhx transcribe`: the words of sounds.

use std::ffi::OsString;
use std::ops::Range;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use clap::Args;
use qhx_core::engine::{FinishReason, Message, Model, Prompt, Request};
use qhx_core::manifest::Transcription;
use qhx_core::op::{Modality, Piece, Segment};
use qhx_core::{Error, ErrorKind, Manifest, Media, Result};
use qhx_media::{Limits, Sound};
use serde_json::{Value, json};

use crate::app::App;
use crate::args::BackendArgs;
use crate::media::{self, Attached, Attachment};
use crate::session::{self, Opening, Stream};
use crate::status::Status;
use crate::time::ms;
use crate::trace::{TraceArgs, Tracing};

/// Lengths of pieces are multiples of this.
const STEPS_A_SECOND: usize = 10;
/// What part of a piece the next one repeats.
const OVERLAP: usize = 10;
/// What part of the context is left for the words.
const ROOM: usize = 4;
/// Words that are said in a second, where a chunk has fewer of them: pauses may lie outside the overlap.
const WORDS_A_SECOND: f64 = 3.0;
/// Words at the end of a piece, and at the beginning of the next one, that the border may have spoilt.
const SPOILT: usize = 2;

const EXAMPLES: &str = "\
Examples:
  qhx transcribe gemma4/v81 speech.wav
  qhx transcribe gemma4/v81 monday.mp3 tuesday.mp3
  qhx transcribe gemma4/v81 lecture.flac --json | jq '.sounds[0].pieces[] | .start, .text'";

/// Write down what is said in sounds
///
/// A sound longer than the model takes is cut into pieces that overlap, and what two pieces both have at their border
/// is written once. Each sound's words are one line on standard output.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct TranscribeArgs {
    /// The bundle: its folder, its manifest, or a manifest's name in its folder
    pub bundle: PathBuf,
    /// The sounds: WAV, FLAC, MP3, Ogg Vorbis, or data: URLs
    #[arg(required = true, value_name = "FILE")]
    pub files: Vec<OsString>,
    /// What asks for the words, behind the sound [default: the manifest's params.transcription]
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// The sound and that text are a user's message, put into the model's chat template
    #[arg(long, requires = "prompt")]
    pub chat: bool,
    /// Greatest number of tokens to generate for a piece
    #[arg(short = 'n', long, value_name = "N", default_value_t = 256)]
    pub max_new: usize,
    /// Print one JSON object, with the times of the pieces
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub tracing: TraceArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
}

impl TranscribeArgs {
    /// What asks for the words.
    fn instruction(&self, manifest: &Manifest) -> Result<Transcription> {
        if let Some(prompt) = &self.prompt {
            return Ok(Transcription { prompt: prompt.clone(), chat: self.chat });
        }
        manifest.params.transcription.clone().ok_or_else(|| {
            let what =
                "params.transcription is missing, which says what asks the model for the words";
            Error::new(ErrorKind::Usage, format!("{}: {what}", manifest.path.display()))
                .hint("give it: --prompt TEXT, with --chat where the model answers messages")
        })
    }
}

/// What was heard in a sound.
#[derive(Debug, Default)]
struct Heard {
    text: String,
    pieces: Vec<Value>,
    cancelled: bool,
}

/// Runs the command.
pub(crate) fn run(args: &TranscribeArgs, app: &mut App) -> Result<Status> {
    args.tracing.trace(|tracing| run_traced(args, app, tracing))
}

fn run_traced(args: &TranscribeArgs, app: &mut App, tracing: Option<&Tracing>) -> Result<Status> {
    let sounds = args.files.iter().cloned();
    let sounds: Vec<_> =
        sounds.map(|file| Attachment::new(Modality::Audio, file)).collect::<Result<_>>()?;
    let mut instruction = Transcription::default();
    let check = |manifest: &Manifest| {
        instruction = args.instruction(manifest)?;
        Ok(())
    };
    let opening = Opening { attachments: &sounds, tracing, ..Opening::default() };
    let mut model = session::open_checked(app, &args.bundle, &args.backend, opening, check)?;
    say!("{}", session::load(&model));
    let (mut all, mut status) = (Vec::new(), Status::Done);
    for Attachment { source, .. } in &sounds {
        let start = Instant::now();
        let sound = qhx_media::sound(source, &model.media_rules().audio, &Limits::default())?;
        let name = source.to_string();
        let heard = transcribe(args, app, &mut model, &instruction, &name, &sound)
            .map_err(|e| e.context(&name))?;
        let seconds = seconds(&sound, sound.samples.len());
        say!("{name}: {seconds:.1} s of sound in {:.1} ms", ms(start.elapsed()));
        if !args.json {
            app.output.line(&heard.text)?;
        }
        all.push(json!({
            "name": name,
            "seconds": round(seconds),
            "text": heard.text,
            "pieces": heard.pieces,
        }));
        if heard.cancelled {
            status = Status::Cancelled;
            break;
        }
    }
    if args.json {
        app.output.json(&json!({"sounds": all}))?;
    }
    Ok(status)
}

/// Has the model write down one piece of a sound after another.
fn transcribe(
    args: &TranscribeArgs,
    app: &mut App,
    model: &mut Model,
    instruction: &Transcription,
    name: &str,
    sound: &Sound,
) -> Result<Heard> {
    let most = longest(model, instruction, name, sound)?;
    let pieces = qhx_op::audio::pieces(sound.samples.len(), most, most / OVERLAP)
        .map_err(|e| Error::new(ErrorKind::Internal, e.message().to_owned()))?;
    if pieces.len() > 1 {
        say!(
            "{name}: {:.1} s of sound, the model takes {:.1} s at a time: cut into {} pieces that overlap by {:.1} s",
            seconds(sound, sound.samples.len()),
            seconds(sound, most),
            pieces.len(),
            seconds(sound, most / OVERLAP),
        );
    }
    let mut heard = Heard::default();
    let (mut behind, mut rate) = (0, WORDS_A_SECOND);
    for range in pieces {
        let Range { start, end } = range.clone();
        let overlap = seconds(sound, behind.max(start) - start);
        behind = end;
        let [start, end] = [start, end].map(|samples| seconds(sound, samples));
        let samples = sound.samples.get(range).unwrap_or_default().to_vec();
        let media = Media::audio(samples, sound.rate)?;
        let piece = [Attached { name: name.to_owned(), media, time: Duration::ZERO }];
        model.reset()?;
        let request = Request::greedy(prompt(instruction, &piece)?, args.max_new);
        let generation = session::generate(app, model, &request, &piece, Stream::Quiet)?;
        let text = generation.text.trim();
        let rate_here =
            text.split_whitespace().count() as f64 / (end - start).max(f64::MIN_POSITIVE);
        // Of both chunks the faster.
        let fastest = rate.max(rate_here);
        rate = rate_here.max(WORDS_A_SECOND);
        join(&mut heard.text, text, (overlap * fastest).ceil() as usize);
        heard.pieces.push(json!({
            "start": round(start),
            "end": round(end),
            "text": text,
            "finish_reason": generation.finish_reason,
        }));
        if generation.finish_reason == FinishReason::Length {
            let (tokens, max_ctx) = (generation.tokens.len(), model.info().max_ctx);
            let why = cut_off(tokens, args.max_new, max_ctx);
            say!(
                "{name}: what is said from {start:.1} s to {end:.1} s is cut off after {tokens} tokens; {why}"
            );
        }
        heard.cancelled = session::status(&generation) != Status::Done;
        if heard.cancelled {
            break;
        }
    }
    Ok(heard)
}

/// What ended an answer that its model did not end, and what to do about it.
fn cut_off(tokens: usize, max_new: usize, max_ctx: usize) -> String {
    if tokens >= max_new {
        return "give more with --max-new".to_owned();
    }
    format!("the context of {max_ctx} is full: forge the model with a larger --max-ctx")
}

fn seconds(sound: &Sound, samples: usize) -> f64 {
    samples as f64 / f64::from(sound.rate.max(1))
}

/// Milliseconds are enough for a program.
fn round(seconds: f64) -> f64 {
    (seconds * 1e3).round() / 1e3
}

/// The sound, and behind it what asks for its words.
fn prompt(instruction: &Transcription, piece: &[Attached]) -> Result<Prompt> {
    let text = instruction.prompt.clone();
    if !instruction.chat {
        return media::completion(text, piece);
    }
    let message = Message::new("user", media::content(text, piece)?);
    Ok(Prompt::Chat { messages: vec![message], thinking: None })
}

/// The most samples of the sound, from its beginning, that the model takes at once. Errors with its reason when it does
/// not take the shortest piece.
fn longest(
    model: &mut Model,
    instruction: &Transcription,
    name: &str,
    sound: &Sound,
) -> Result<usize> {
    let all = sound.samples.len();
    let max_ctx = model.info().max_ctx;
    let step = (sound.rate as usize / STEPS_A_SECOND).max(1);
    let positions = |model: &mut Model, samples: usize| -> Result<usize> {
        let samples = sound.samples.get(..samples).unwrap_or(&sound.samples);
        let placement = model.op_mut().place(Segment::Audio { samples, rate: sound.rate })?;
        let positions = placement.pieces.iter().map(|piece| match piece {
            Piece::Part { positions, .. } => *positions,
            _ => 0,
        });
        Ok(positions.fold(0, usize::saturating_add))
    };
    // What the prompt has besides the audio.
    let shortest = step.min(all);
    let samples = sound.samples.get(..shortest).unwrap_or_default().to_vec();
    let media = Media::audio(samples, sound.rate)?;
    let piece = [Attached { name: name.to_owned(), media, time: Duration::ZERO }];
    let whole = model.encode_prompt(&prompt(instruction, &piece)?)?.len();
    let request = whole.saturating_sub(positions(model, shortest)?);
    let most = max_ctx.saturating_sub(max_ctx / ROOM).saturating_sub(request);
    let mut takes = |samples: usize| -> Result<()> {
        match positions(model, samples)? {
            positions if positions <= most => Ok(()),
            positions => Err(Error::new(
                ErrorKind::Prompt,
                format!(
                    "{:.1} s of audio take {positions} positions, and the context of {max_ctx} has {most} for audio \
                     beside a request of {request}",
                    seconds(sound, samples.min(all))
                ),
            )
            .hint("forge the model with a larger --max-ctx")),
        }
    };
    // Doubled until the model takes no more, then halved between what it takes and what it does not.
    let (mut taken, mut refused) = (step.min(all), all.div_ceil(step) * step + step);
    takes(taken)?;
    while refused - taken > step {
        let doubled = taken.saturating_mul(2);
        let half = taken + (refused - taken) / 2 / step * step;
        let next = if doubled < half { doubled } else { half.max(taken + step) };
        match takes(next) {
            Ok(()) => taken = next,
            Err(_) => refused = next,
        }
    }
    Ok(taken.min(all))
}

/// Appends the words of a piece to those of the pieces before it, without those that both have at the border.
///
/// The border may cut a word in two, which the model then hears otherwise: up to [`SPOILT`] words on either side of what
/// both have are dropped, too, unless it is a single word. The overlap holds no more than `most` words: what speakers
/// repeat stays.
fn join(whole: &mut String, next: &str, most: usize) {
    let before: Vec<String> = whole.split_whitespace().map(str::to_owned).collect();
    let words: Vec<&str> = next.split_whitespace().collect();
    let (kept, skipped) = border(&before, &words, most);
    let words = before.iter().take(kept).map(String::as_str).chain(words.into_iter().skip(skipped));
    *whole = words.collect::<Vec<_>>().join(" ");
}

/// How many words of `before` stay, and how many of `words` are left out; the overlap holds at most `most`.
fn border(before: &[String], words: &[&str], most: usize) -> (usize, usize) {
    let bare = |word: &str| {
        word.chars()
            .filter(|c| c.is_alphanumeric())
            .flat_map(char::to_lowercase)
            .collect::<String>()
    };
    let first = before.len().saturating_sub(most);
    let ends: Vec<_> = before.iter().skip(first).map(|word| bare(word)).collect();
    let begins: Vec<_> = words.iter().take(most).map(|word| bare(word)).collect();
    // The more words are the same and the fewer are dropped, the better.
    let mut best = (None, before.len(), 0);
    for from in 0..ends.len() {
        for skipped in 0..begins.len().min(SPOILT + 1) {
            let pairs = ends.iter().skip(from).zip(begins.iter().skip(skipped));
            let same = pairs.take_while(|(a, b)| a == b).count();
            let dropped = ends.len() - from - same + skipped;
            let fits = ends.len() - from - same <= SPOILT && (dropped == 0 || same > 1);
            let score = same.checked_sub(dropped).filter(|_| fits && same > 0);
            if score > best.0 {
                best = (score, first + from + same, skipped + same);
            }
        }
    }
    (best.1, best.2)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn joined(pieces: &[&str]) -> String {
        let mut whole = String::new();
        pieces.iter().for_each(|piece| join(&mut whole, piece, 20));
        whole
    }

    #[test]
    fn words_that_two_pieces_have_in_common_are_written_once() {
        let pieces = ["The boat leaves", "leaves at noon.", "At noon, it rains", "", "it pours"];
        assert_eq!(joined(&pieces), "The boat leaves at noon. it rains it pours");
        assert_eq!(joined(&["a rose is a rose", "a rose is red"]), "a rose is a rose is red");
        assert_eq!(joined(&["one two", "three four"]), "one two three four");
    }

    #[test]
    fn no_more_words_are_joined_than_the_overlap_holds() {
        let mut whole = String::new();
        (0..9).for_each(|_| join(&mut whole, "the boat leaves at noon", 2));
        assert_eq!(whole.split_whitespace().count(), 9 * 5);
        let mut whole = "the boat leaves at noon the boat leaves".to_owned();
        join(&mut whole, "boat leaves at noon the boat leaves at noon", 2);
        let expected = "the boat leaves at noon the boat leaves at noon the boat leaves at noon";
        assert_eq!(whole, expected);
    }

    #[test]
    fn a_full_context_is_not_blamed_on_max_new() {
        assert_eq!(cut_off(256, 256, 4096), "give more with --max-new");
        assert!(cut_off(100, 256, 512).starts_with("the context of 512 is full"));
    }

    #[test]
    fn words_that_the_border_cut_are_heard_in_the_other_piece() {
        let pieces = ["we go down to the har", "on to the harbour at night"];
        assert_eq!(joined(&pieces), "we go down to the harbour at night");
        // One word in common among others is chance.
        assert_eq!(joined(&["see the sea", "and the moon"]), "see the sea and the moon");
    }
}
