//! `qhx generate`: continues a prompt.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use clap::Args;
use qhx::media;
use qhx_base::{Error, ErrorKind};
use qhx_core::dump::Dump;
use qhx_core::engine::{Message, Prompt, Request};
use qhx_core::sampling::SamplingParams;

use crate::Status;
use crate::app::App;
use crate::args::{
    BackendArgs, DecodeArgs, PreparingArgs, SamplingArgs, SpeculateArgs, Switch, TemplateArg,
    parse_seconds, parse_template_arg,
};
use crate::grammar::GrammarArgs;
use crate::media::MediaArgs;
use crate::prompt;
use crate::session::{self, Opening, Stream};
use crate::trace::{TraceArgs, Tracing};

const EXAMPLES: &str = "\
Examples:
  qhx generate qwen35/v81 'The capital of France is' --max-new 32
  qhx generate qwen35/v81 --chat 'Name three rivers.' --thinking off --temperature 0.7 --seed 1
  git diff | qhx generate qwen35/v81 - --system-prompt 'Write a commit message.' --chat
  qhx generate qwen3vl/v81 --chat 'What is in this image?' --image photograph.jpg
  qhx generate qwen35-4b/v81 'Once' --draft qwen35-0.8b/v81
  qhx generate qwen35/v81 --chat 'Name a river and its length.' --json-schema river.json
  qhx generate qwen35/v81 --chat 'Will it rain in Bonn?' --tools weather.json --json | jq .tool_calls
  qhx generate qwen35/v81 --ids 760,6511,314,9338,369
  qhx generate qwen35/v81 'Once' --json | jq .timings";

/// Continue a prompt
///
/// The text streams to standard output as it is generated. Timings, and which backend runs and
/// why, go to standard error.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct GenerateArgs {
    /// The bundle: its folder, its manifest, or a manifest's name in its folder
    pub bundle: PathBuf,
    /// The text to continue; `-`, or nothing, reads standard input, without its last line end
    #[arg(value_name = "PROMPT|-")]
    pub prompt: Option<OsString>,
    /// Read the text from this file, without its last line end
    #[arg(short = 'f', long, value_name = "FILE", conflicts_with = "prompt")]
    pub file: Option<PathBuf>,
    /// Greatest number of tokens to generate
    #[arg(short = 'n', long, value_name = "N", default_value_t = 128)]
    pub max_new: usize,
    /// The prompt is a user's message, put into the model's chat template
    #[arg(long)]
    pub chat: bool,
    /// A system message before it
    #[arg(long, value_name = "TEXT", requires = "chat")]
    pub system_prompt: Option<String>,
    /// Whether the model thinks before it answers, where its template knows that
    #[arg(long, value_enum, value_name = "ON|OFF", requires = "chat")]
    pub thinking: Option<Switch>,
    /// A further variable of the chat template: KEY=VALUE, where VALUE is JSON or else a text. May be given several
    /// times
    #[arg(long = "template-arg", value_name = "KEY=VALUE", value_parser = parse_template_arg, requires = "chat")]
    pub template_args: Vec<TemplateArg>,
    /// The prompt is a list of token ids separated by commas, and ids are printed
    #[arg(long, conflicts_with_all = ["chat", "image", "audio", "video"])]
    pub ids: bool,
    /// End before this text. May be given several times
    #[arg(long, value_name = "TEXT")]
    pub stop: Vec<String>,
    /// Do not end at the model's end-of-text tokens
    #[arg(long)]
    pub ignore_eos: bool,
    /// Stop after this time, as Ctrl-C does; opening the bundle does not count
    #[arg(long, value_name = "SECONDS", value_parser = parse_seconds)]
    pub timeout: Option<Duration>,
    /// Write arrays that the model makes to this folder as .npy files, to compare them with a reference's:
    /// `logits.npy` after the prompt, and what the host-op offers
    #[arg(long, value_name = "DIR")]
    pub dump: Option<PathBuf>,
    /// Print one JSON object, once all is there
    #[arg(long)]
    pub json: bool,
    /// With the log-probability of each token, and of this number of most likely tokens in its place
    #[arg(long, value_name = "N", requires = "json")]
    pub logprobs: Option<usize>,
    #[command(flatten)]
    pub media: MediaArgs,
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

/// Runs the command.
pub(crate) fn run(
    args: &GenerateArgs,
    app: &mut App,
    tracing: Option<&Tracing>,
) -> qhx_base::Result<Status> {
    let sampling = args.sampling.params(&SamplingParams::default())?;
    let draft = args.speculate.draft()?;
    let attachments = args.media.attachments()?;
    let text = match &args.file {
        Some(file) => prompt::of_file(file)?,
        None => prompt::text(args.prompt.as_deref())?,
    };
    // What is attached is a prompt, too.
    if attachments.is_empty() {
        prompt::check(&text)?;
    }
    let ids = if args.ids { prompt::ids(&text)? } else { Vec::new() };
    // What is attached is read by the rules of the model, once it is open.
    let mut request = Request::greedy(Prompt::Tokens(ids), args.max_new)
        .sampling(sampling)
        .stops(args.stop.iter().cloned())
        .ignore_eos(args.ignore_eos)
        .logprobs(args.logprobs)
        .speculate(args.speculate.mode())
        .template_arguments(args.template_args.iter().cloned());
    let tools;
    (request, tools) = args.grammar.apply(request)?;
    if tools.is_some() && !args.chat {
        let what = "option --tools: they are a chat template's, and there is no --chat";
        return Err(Error::new(ErrorKind::Usage, what).hint("add --chat"));
    }
    let check = |manifest: &_| request.check(manifest);
    let dump = args.dump.as_deref().map(Dump::create).transpose()?.map(Arc::new);
    let opening = Opening {
        dump,
        tracing,
        preparing: Some(&args.preparing),
        decode_on: args.decode.decode_on,
        attachments: &attachments,
        text: &text,
        ..Opening::default()
    };
    let mut model = session::open_checked(app, &args.bundle, &args.backend, opening, check)?;
    session::open_draft(app, &mut model, draft, &args.backend, tracing)?;
    tools.iter().try_for_each(|tools| tools.check(&model))?;
    let (content, attached) = media::attach(text, &attachments, &model, args.media.fps)?;
    if args.chat {
        let system = args.system_prompt.iter().map(|text| Message::new("system", text));
        let messages = system.chain([Message::user(content)]).collect();
        request.prompt = Prompt::Chat { messages, thinking: args.thinking.map(Switch::is_on) };
    } else if !args.ids {
        request.prompt = content.into();
    }
    let stream = match (args.json, args.ids) {
        (true, _) => Stream::Quiet,
        (false, true) => Stream::Ids,
        (false, false) => Stream::Text,
    };
    let limit = args.timeout.map(|time| app.interrupts.limit(time));
    let generation = session::generate(app, &mut model, &request, &attached, stream)?;
    drop(limit);
    if args.json {
        let mut json = session::json(&model, &generation, &attached);
        tools.iter().try_for_each(|tools| tools.report(&model, &generation, &mut json))?;
        app.output.json(&json)?;
    }
    crate::media::say(&attached);
    say!("{}, {}", session::load(&model), session::summary(&generation));
    Ok(session::status(&generation))
}
