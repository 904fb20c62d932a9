//! `qhx_generate`: the argument order of published bundles.

use std::ffi::OsString;
use std::path::PathBuf;

use clap::Parser;
use qhx::media::{self, Attachment};
use qhx_base::Result;
use qhx_core::engine::{Message, Prompt, Request};

use crate::Status;
use crate::app::App;
use crate::args::{BackendArgs, DeviceArgs, GlobalArgs, Switch, TemplateArg, parse_template_arg};
use crate::prompt;
use crate::session::{self, Opening, Stream};

const EXAMPLES: &str = "\
Examples:
  qhx_generate qwen35/qwen3.5-0.8b-1024.json libQnnHtp.so libQnnSystem.so qwen35 64 'The capital of France is'
  qhx_generate qwen35 cpu - qwen35 64 'The capital of France is'

The prompt is completed as it is; --chat puts it into the model's chat template. A prompt of token
ids separated by commas is taken as ids. Generation is greedy.";

/// Continues a prompt, with the argument order of published bundles.
///
/// Standard output carries the text alone.
#[derive(Debug, Parser)]
#[command(name = "qhx_generate", version, after_help = EXAMPLES, max_term_width = 100)]
pub(crate) struct ClassicArgs {
    /// The bundle's manifest, or its folder
    pub manifest: PathBuf,
    /// libQnnHtp.so, or the word `cpu` to run the bundle's ONNX graphs on the CPU
    #[arg(value_name = "libQnnHtp.so")]
    pub htp: PathBuf,
    /// libQnnSystem.so; `-` with `cpu`
    #[arg(value_name = "libQnnSystem.so")]
    pub system: PathBuf,
    /// The folder that the manifest's paths resolve against
    #[arg(value_name = "ARTIFACTS_ROOT")]
    pub root: PathBuf,
    /// Greatest number of tokens to generate
    #[arg(value_name = "MAX_NEW")]
    pub max_new: usize,
    /// The text to continue, `-` for standard input, or token ids separated by commas
    pub prompt: OsString,
    /// An image, for host-ops that take one: it stands before the prompt, or where a text says <image>
    pub image: Option<PathBuf>,
    /// The prompt is a user's message, put into the model's chat template
    #[arg(long)]
    pub chat: bool,
    /// Whether the model thinks before it answers, where its template knows that
    #[arg(long, value_enum, value_name = "ON|OFF", requires = "chat")]
    pub thinking: Option<Switch>,
    /// A further variable of the chat template: KEY=VALUE, where VALUE is JSON or else a text. May be given several
    /// times
    #[arg(long = "template-arg", value_name = "KEY=VALUE", value_parser = parse_template_arg, requires = "chat")]
    pub template_args: Vec<TemplateArg>,
    #[command(flatten)]
    pub device: DeviceArgs,
    #[command(flatten)]
    pub global: GlobalArgs,
}

impl ClassicArgs {
    /// Backend that executes the graphs.
    pub(crate) fn backend(&self) -> BackendArgs {
        BackendArgs::classic(&self.htp, &self.system, self.device.clone())
    }
}

/// Runs the command.
pub(crate) fn run(args: &ClassicArgs, app: &mut App) -> Result<Status> {
    let text = prompt::text(Some(&args.prompt))?;
    let image = args.image.iter().cloned();
    let image = image.map(Attachment::image);
    let attachments = image.collect::<Result<Vec<_>>>()?;
    if attachments.is_empty() {
        prompt::check(&text)?;
    }
    let backend = args.backend();
    let root = Some(args.root.as_path());
    let opening = Opening { root, attachments: &attachments, text: &text, ..Opening::default() };
    let mut model = session::open_checked(app, &args.manifest, &backend, opening, |_| Ok(()))?;
    let is_id_list = !args.chat && prompt::is_id_list(&text);
    let ids = if is_id_list { prompt::ids(&text)? } else { Vec::new() };
    let (content, attached) = media::attach(text, &attachments, &model, None)?;
    let prompt = if args.chat {
        let messages = vec![Message::user(content)];
        Prompt::Chat { messages, thinking: args.thinking.map(Switch::is_on) }
    } else if is_id_list {
        media::tokens(ids, &attached)
    } else {
        content.into()
    };
    let request = Request::greedy(prompt, args.max_new)
        .template_arguments(args.template_args.iter().cloned());
    let generation = session::generate(app, &mut model, &request, &attached, Stream::Text)?;
    crate::media::say(&attached);
    say!("{}, {}", session::load(&model), session::summary(&generation));
    Ok(session::status(&generation))
}
