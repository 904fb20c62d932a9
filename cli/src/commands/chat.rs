//! `qhx chat`: a conversation that keeps its state between turns.

use std::fmt::Write as _;
use std::fs::File;
use std::io::{BufRead as _, IsTerminal as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use qhx::{Attachment, Chat, is_left_out};
use qhx_base::{CancelToken, Error, ErrorKind, Result};
use qhx_core::engine::{FinishReason, Message, Request};
use qhx_core::op::Modality;
use qhx_core::sampling::SamplingParams;

use crate::Status;
use crate::app::App;
use crate::args::{
    BackendArgs, DecodeArgs, PreparingArgs, SamplingArgs, SpeculateArgs, Switch, TemplateArg,
    parse_seconds, parse_template_arg,
};
use crate::grammar::{GrammarArgs, Tools};
use crate::media;
use crate::prompt;
use crate::session::{self, Opening, Stream};
use crate::stderr;
use crate::trace::{TraceArgs, Tracing};

const EXAMPLES: &str = "\
Examples:
  qhx chat qwen35/v81
  qhx chat smollm2
  qhx chat qwen35/v81 --system-prompt 'Answer in one sentence.' --thinking off
  printf 'Hello!\\nAnd again.\\n' | qhx chat qwen35/v81 --json

Commands:
  /image FILE     the next message has this image, before its text or where it says <image>
  /audio FILE     the same with audio, and <audio>
  /video PATH     the same with a video, and <video>
  /reset, /clear  forget the conversation
  /system TEXT    forget it and begin with this system message; without TEXT, with none
  /save FILE      write the conversation to a new file, as JSON
  /help           list these
  /exit           end; so does Ctrl-D

Ctrl-C stops an answer; what there is of it stays in the conversation.";

/// Talk with a model
///
/// Each line of standard input is a message; answers stream to standard output. A turn consumes
/// only what is new: the state of the turns before is kept. Timings go to standard error.
///
/// A message that cannot be used, such as one that the context has no room for, is left out of the
/// conversation, and the next one is read.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ChatArgs {
    /// The bundle: its folder, its manifest, a manifest's name in its folder, or a name that was pulled
    pub bundle: PathBuf,
    #[command(flatten)]
    pub options: ChatOptions,
}

/// Options of a conversation.
#[derive(Debug, Args)]
pub(crate) struct ChatOptions {
    /// Greatest number of tokens of an answer
    #[arg(short = 'n', long, value_name = "N", default_value_t = 1024)]
    pub max_new: usize,
    /// A system message before the conversation
    #[arg(long, value_name = "TEXT")]
    pub system_prompt: Option<String>,
    /// Whether the model thinks before it answers, where its template knows that
    #[arg(long, value_enum, value_name = "ON|OFF")]
    pub thinking: Option<Switch>,
    /// A further variable of the chat template: KEY=VALUE, where VALUE is JSON or else a text. May be given several
    /// times
    #[arg(long = "template-arg", value_name = "KEY=VALUE", value_parser = parse_template_arg)]
    pub template_args: Vec<TemplateArg>,
    /// End an answer before this text. May be given several times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Print one JSON object per answer, one a line
    #[arg(long)]
    pub json: bool,
    /// Give the NPU's power mode back after waiting so long for a message; the next answer asks for them again
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds, default_value = "5")]
    pub idle_release: Duration,
    #[command(flatten)]
    pub grammar: GrammarArgs,
    #[command(flatten)]
    pub sampling: SamplingArgs,
    #[command(flatten)]
    pub speculate: SpeculateArgs,
    #[command(flatten)]
    pub tracing: TraceArgs,
    #[command(flatten)]
    pub preparing: PreparingArgs,
    #[command(flatten)]
    pub decode: DecodeArgs,
    #[command(flatten)]
    pub backend: BackendArgs,
}

/// A line of input.
#[derive(Debug, PartialEq, Eq)]
enum Input<'a> {
    Nothing,
    Message(&'a str),
    Attach(Modality, &'a str),
    Reset,
    System(Option<&'a str>),
    Save(&'a str),
    Help,
    Exit,
    Unknown(&'a str),
}

impl<'a> Input<'a> {
    fn parse(line: &'a str) -> Self {
        let trimmed = line.trim();
        if trimmed.is_empty() {
            return Self::Nothing;
        }
        if !trimmed.starts_with('/') {
            return Self::Message(line);
        }
        let (word, rest) = trimmed.split_once(char::is_whitespace).unwrap_or((trimmed, ""));
        let rest = Some(rest.trim()).filter(|rest| !rest.is_empty());
        match word {
            "/reset" | "/clear" => Self::Reset,
            "/save" => Self::Save(rest.unwrap_or_default()),
            "/system" => Self::System(rest),
            "/image" => Self::Attach(Modality::Image, rest.unwrap_or_default()),
            "/audio" => Self::Attach(Modality::Audio, rest.unwrap_or_default()),
            "/video" => Self::Attach(Modality::Video, rest.unwrap_or_default()),
            "/help" => Self::Help,
            "/exit" | "/quit" => Self::Exit,
            // A path or a fraction is a message, too.
            _ if word[1..].chars().all(|c| c.is_ascii_lowercase()) => Self::Unknown(word),
            _ => Self::Message(line),
        }
    }
}

/// Reads a file for the next message.
fn attach(chat: &mut Chat, modality: Modality, file: &str) -> Result<()> {
    if file.is_empty() {
        let message = format!("/{} names no file", modality.name());
        return Err(Error::new(ErrorKind::Prompt, message).hint("/help lists the commands"));
    }
    let attached = chat.attach(&Attachment::new(modality, file)?)?;
    media::say(std::slice::from_ref(attached));
    Ok(())
}

/// Writes role and text of each message to a file that is not there yet.
fn save(chat: &Chat, file: &str) -> Result<()> {
    if file.is_empty() {
        return Err(
            Error::new(ErrorKind::Prompt, "/save names no file").hint("/help lists the commands")
        );
    }
    let message = |m: &Message| {
        let content: String = m.content.texts().collect();
        serde_json::json!({"role": m.role, "content": content})
    };
    let messages: serde_json::Value = chat.messages().iter().map(message).collect();
    let path = Path::new(file);
    let written = File::create_new(path).and_then(|mut f| writeln!(f, "{messages:#}"));
    written.map_err(|e| Error::io(ErrorKind::Io, path, e))
}

/// Format of printed answers.
struct Output {
    /// Answers are JSON objects.
    json: bool,
    tools: Option<Tools>,
}

/// One message and its answer. True when the answer was interrupted.
fn turn(app: &mut App, chat: &mut Chat, message: &str, output: &Output) -> Result<bool> {
    let Output { json, ref tools } = *output;
    let stream = if json { Stream::Quiet } else { Stream::Text };
    let attached = chat.attached().to_vec();
    let trace = chat.model().trace().cloned();
    let cancel = CancelToken::new();
    let looks_at = media::names(&attached);
    let generation = session::follow(app, &cancel, looks_at, trace.as_ref(), stream, || {
        chat.send_with(message, cancel.clone())
    })?;
    if json {
        let mut json = session::json(chat.model(), &generation, &attached);
        tools.iter().try_for_each(|tools| tools.report(chat.model(), &generation, &mut json))?;
        app.output.json(&json)?;
    }
    say!("{}", session::summary(&generation));
    if is_left_out(&generation) {
        say!("(the message is not part of the conversation)");
    }
    Ok(generation.finish_reason == FinishReason::Cancelled)
}

/// Runs the command.
pub(crate) fn run(args: &ChatArgs, app: &mut App, tracing: Option<&Tracing>) -> Result<Status> {
    talk(&args.bundle, &args.options, None, app, tracing)
}

/// One message, instead of those of standard input.
pub(crate) struct Single<'a> {
    pub text: &'a str,
    pub attachments: Vec<Attachment>,
}

/// Opens a bundle, and answers one message or those of standard input.
pub(crate) fn talk(
    bundle: &Path,
    args: &ChatOptions,
    single: Option<Single<'_>>,
    app: &mut App,
    tracing: Option<&Tracing>,
) -> Result<Status> {
    let sampling = args.sampling.params(&SamplingParams::default())?;
    let draft = args.speculate.draft()?;
    let request = Request::chat([])
        .max_new(args.max_new)
        .sampling(sampling)
        .stops(args.stop.iter().cloned())
        .speculate(args.speculate.mode())
        .template_arguments(args.template_args.iter().cloned());
    let (request, tools) = args.grammar.apply(request)?;
    let check = |manifest: &_| request.check(manifest);
    let (preparing, decode_on) = (Some(&args.preparing), args.decode.decode_on);
    let opening = Opening { tracing, preparing, decode_on, ..Opening::default() };
    let backend = BackendArgs { idle_release: Some(args.idle_release), ..args.backend.clone() };
    let model = session::open_checked(app, bundle, &backend, opening, check)?;
    let own = model.sampling().cloned();
    let request = match &own {
        Some(own) => request.sampling(args.sampling.params(own)?),
        None => request,
    };
    let sampling = own.map(|_| described(&request.sampling));
    let mut chat =
        Chat::new(model)?.with_request(request).with_thinking(args.thinking.map(Switch::is_on));
    chat.begin(args.system_prompt.as_deref())?;
    session::open_draft(app, chat.model_mut(), draft, &backend, tracing)?;
    tools.iter().try_for_each(|tools| tools.check(chat.model()))?;
    say!("{}", session::load(chat.model()));
    sampling.iter().for_each(|sampling| say!("sampling: {sampling}"));
    let output = Output { json: args.json, tools };
    if let Some(Single { text, attachments }) = single {
        for attachment in &attachments {
            media::say(std::slice::from_ref(chat.attach(attachment)?));
        }
        let interrupted = turn(app, &mut chat, text, &output)?;
        return Ok(if interrupted { Status::Cancelled } else { Status::Done });
    }
    let interactive = std::io::stdin().is_terminal();
    let mut line = Vec::new();
    // What a script's messages failed with; a person has seen it.
    let mut status = Status::Done;
    loop {
        if interactive {
            stderr::ask("> ");
        }
        line.clear();
        let read = std::io::stdin()
            .lock()
            .read_until(b'\n', &mut line)
            .map_err(|e| Error::caused(ErrorKind::Io, "standard input", e))?;
        if read == 0 {
            return Ok(status);
        }
        let result = prompt::utf8(std::mem::take(&mut line)).and_then(|mut text| {
            prompt::strip_line_end(&mut text);
            step(app, &mut chat, &text, &output)
        });
        let result = result.or_else(refused);
        match result {
            Ok(Next::Continue) => {}
            Ok(Next::Interrupted) if interactive => {}
            Ok(Next::Interrupted) => return Ok(Status::Cancelled),
            Ok(Next::Exit) => return Ok(status),
            // The message or the file is at fault, and the next one may be better.
            Ok(Next::Refused(e, note)) => {
                stderr::error(&e);
                say!("{note}");
                if args.json {
                    app.output.error(&e)?;
                }
                if !interactive {
                    status = Status::Reported(e.kind());
                }
            }
            Err(e) => return Err(e),
        }
    }
}

/// Sampling of the conversation: the options given, over those of the bundle.
fn described(sampling: &SamplingParams) -> String {
    if sampling.is_greedy() {
        return "greedy".to_owned();
    }
    let mut text = format!("temperature {}", sampling.temperature);
    let (top_k, off) = (sampling.top_k as f32, SamplingParams::default());
    for (name, value, off) in [
        ("top-k", top_k, 0.0),
        ("top-p", sampling.top_p, off.top_p),
        ("min-p", sampling.min_p, off.min_p),
        ("repetition penalty", sampling.repetition_penalty, off.repetition_penalty),
    ] {
        if value != off {
            let _ = write!(text, ", {name} {value}");
        }
    }
    text + ", the model's own where no option says otherwise; --temperature 0 is greedy"
}

enum Next {
    Continue,
    Interrupted,
    Exit,
    /// Something about the input, and what that means for the conversation.
    Refused(Error, &'static str),
}

/// Handles an error about a message.
fn refused(e: Error) -> Result<Next> {
    let note = "(the message is not part of the conversation; /reset begins again)";
    if e.kind() == ErrorKind::Prompt { Ok(Next::Refused(e, note)) } else { Err(e) }
}

fn step(app: &mut App, chat: &mut Chat, line: &str, output: &Output) -> Result<Next> {
    match Input::parse(line) {
        Input::Nothing => {}
        Input::Message(text) => {
            if turn(app, chat, text, output)? {
                return Ok(Next::Interrupted);
            }
        }
        Input::Attach(modality, file) => {
            // Also a file that is not there: all of it is the user's to mend.
            if let Err(e) = attach(chat, modality, file) {
                return Ok(Next::Refused(e, "(the next message goes without it)"));
            }
        }
        Input::Reset => {
            chat.reset()?;
            say!("(the conversation is forgotten)");
        }
        Input::System(text) => {
            chat.begin(text)?;
            let with = if text.is_some() { "with a" } else { "without" };
            say!("(a new conversation, {with} system message)");
        }
        Input::Save(file) => match save(chat, file) {
            Ok(()) => say!("(the conversation is saved)"),
            Err(e) => return Ok(Next::Refused(e, "(the conversation is not saved)")),
        },
        Input::Help => stderr::lines(EXAMPLES),
        Input::Exit => return Ok(Next::Exit),
        Input::Unknown(word) => say!("unknown command {word}; /help lists the commands"),
    }
    Ok(Next::Continue)
}

#[cfg(test)]
mod tests {
    use super::{Input, Modality};

    #[test]
    fn lines() {
        assert_eq!(Input::parse("  "), Input::Nothing);
        assert_eq!(Input::parse("hello"), Input::Message("hello"));
        assert_eq!(Input::parse("/reset"), Input::Reset);
        assert_eq!(Input::parse("/clear"), Input::Reset);
        assert_eq!(Input::parse("/save a b.json "), Input::Save("a b.json"));
        assert_eq!(Input::parse("/system Be brief. "), Input::System(Some("Be brief.")));
        assert_eq!(Input::parse("/system"), Input::System(None));
        assert_eq!(Input::parse("/image a b.png "), Input::Attach(Modality::Image, "a b.png"));
        assert_eq!(Input::parse("/audio"), Input::Attach(Modality::Audio, ""));
        assert_eq!(Input::parse("/exit"), Input::Exit);
        assert_eq!(Input::parse("/frobnicate"), Input::Unknown("/frobnicate"));
        assert_eq!(Input::parse("/etc/hosts?"), Input::Message("/etc/hosts?"));
    }
}
