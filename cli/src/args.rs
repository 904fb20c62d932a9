//! Groups of options that several commands share.

use std::path::{Path, PathBuf};
use std::str::FromStr;
use std::time::Duration;

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, ValueEnum};
use qhx::hub::index::{IndexOptions, IndexSource, Loaded};
use qhx::hub::{Hub, HubOptions};
use qhx::{Activations, BackendChoice, Caches, DecodeOn, DeviceOptions, cache, models};
use qhx_base::{Error, ErrorKind, Result};
use qhx_core::engine::Speculate;
use qhx_core::sampling::SamplingParams;
use qhx_qnn::{MemoryMode, PerfMode};
use qhx_terminal::args::ProcessArgs;

pub(crate) use qhx_terminal::args::LibraryArgs;
use qhx_tools::models::Models;

use crate::signal::Interrupts;
use crate::vars;

/// Text of `--help` about the environment variables named `names`; about all if there are none.
pub(crate) fn variables(names: &[&str]) -> String {
    let wanted = vars::ALL.iter().filter(|v| names.is_empty() || names.contains(&v.name));
    let lines = wanted.map(|v| format!("\n  {:22}{}", v.name, v.what));
    format!("Environment variables:{}", lines.collect::<String>())
}

/// Options of every command.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Global options")]
pub(crate) struct GlobalArgs {
    /// Load this plugin, before any other; it must load. May be given several times
    #[arg(long = "plugin", value_name = "FILE", global = true)]
    pub plugins: Vec<PathBuf>,
    /// Search this folder for plugins first. May be given several times
    #[arg(long = "plugin-dir", value_name = "DIR", global = true)]
    pub plugin_dirs: Vec<PathBuf>,
    /// Use only the host-ops that are linked in
    #[arg(long, global = true, conflicts_with_all = ["plugins", "plugin_dirs"])]
    pub no_plugins: bool,
    /// Load plugins that somebody else could change, too; see docs/security.md
    #[arg(long, global = true)]
    pub allow_untrusted_plugins: bool,
    /// Type that the CPU backend rounds activations to in matmuls with int8 and 4-bit weights; auto: int8 with 4 bits,
    /// else int16
    #[arg(long, value_name = "TYPE", global = true, default_value = "auto")]
    #[arg(value_parser = named::<Activations>(Activations::ALL.map(Activations::name)))]
    pub cpu_activations: Activations,
    /// Type that the CPU backend stores caches of keys and values as: f16, as on an NPU, or f32, in twice the memory
    #[arg(long, value_name = "TYPE", global = true, default_value = "f16")]
    #[arg(value_parser = named::<Caches>(Caches::ALL.map(Caches::name)))]
    pub cpu_caches: Caches,
    #[command(flatten)]
    pub process: ProcessArgs,
}

/// Parser of a value by one of its names.
pub(crate) fn named<T>(names: impl Into<PossibleValuesParser>) -> impl TypedValueParser<Value = T>
where
    T: FromStr<Err: Into<Box<dyn std::error::Error + Send + Sync>>> + Clone + Send + Sync + 'static,
{
    names.into().try_map(|name| name.parse::<T>())
}

/// What executes graphs.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct BackendArgs {
    /// What executes the graphs. A choice other than auto never falls back
    #[arg(long, value_name = "BACKEND", default_value = "auto", value_parser = backend_parser())]
    pub backend: BackendChoice,
    /// Keep at most N contexts loaded, and load the others when their turn comes [default: all]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub max_contexts: Option<u16>,
    /// Open a bundle whose golden steps give wrong answers on this device, too
    #[arg(long)]
    pub unverified: bool,
    #[command(flatten)]
    pub libraries: LibraryArgs,
    #[command(flatten)]
    pub device: DeviceArgs,
    /// For programs that wait for somebody: when the vote for a power mode is given back.
    #[arg(skip)]
    pub idle_release: Option<Duration>,
}

/// Index of models.
#[derive(Debug, Clone, Default, Args)]
#[command(next_help_heading = "Names of models")]
pub(crate) struct IndexArgs {
    /// Index of models, instead of the program's own: a file, or a URL with #sha256=HASH behind it or a signature
    #[arg(long, value_name = "FILE|URL", env = vars::INDEX, hide_env_values = true)]
    pub index: Option<IndexSource>,
    /// Public key of minisign that signs the index, FILE.minisig: in Base64, or its file
    #[arg(long, value_name = "KEY", env = vars::INDEX_KEY, hide_env_values = true)]
    pub index_key: Option<String>,
}

impl IndexArgs {
    /// Models of the index, with the hub and the folders that the environment names.
    pub(crate) fn models(&self, interrupts: &Interrupts) -> Result<Models> {
        let hub = HubOptions::from_environment()?;
        let options = IndexOptions::new(cache::dir()?.join("indexes"))
            .source(self.index.clone())
            .key(self.index_key.clone());
        let Loaded { index, notes, .. } = {
            let _working = interrupts.working();
            options.load(&hub, interrupts.token())?
        };
        notes.iter().for_each(|note| say!("note: {note}"));
        Ok(Models::new(index, Hub::new(hub), models::folder()?))
    }
}

/// What answers while a portable bundle is prepared.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct PreparingArgs {
    /// Where nothing of a portable bundle is prepared for this chip: prepare it in a process of its own, which outlives
    /// this command, and have the CPU answer this time
    #[arg(long, value_name = "BACKEND", value_parser = ["cpu"])]
    pub while_preparing: Option<String>,
}

/// What consumes the tokens of answers.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct DecodeArgs {
    /// What consumes the tokens of answers where the NPU consumes prompts: the state goes over once after a prompt.
    /// auto measures both when a bundle is opened for the first time, and takes the faster one [default: what consumes
    /// prompts]
    #[arg(long, value_name = "WHERE", value_parser = named::<DecodeOn>(DecodeOn::ALL.map(DecodeOn::name)))]
    pub decode_on: Option<DecodeOn>,
}

/// How the NPU is used.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct DeviceArgs {
    /// Hexagon architecture of the device, where the library's own word is not to be taken
    #[arg(long, value_name = "ARCH", value_parser = parse_arch)]
    pub device_arch: Option<u32>,
    /// Power mode of the NPU while the program runs: burst, sustained, balanced, low, or a step between; docs/cli.md
    /// has all
    #[arg(long, value_name = "MODE", default_value = "burst", hide_possible_values = true)]
    #[arg(value_parser = named::<PerfMode>(perf_names()))]
    pub perf: PerfMode,
    #[command(flatten)]
    pub memory: MemoryArgs,
}

fn backend_parser() -> impl TypedValueParser<Value = BackendChoice> {
    let what = |choice| match choice {
        BackendChoice::Auto => {
            "qnn when its libraries are there and the bundle has context binaries, otherwise cpu"
        }
        BackendChoice::Cpu => "The bundle's ONNX graphs on the CPU",
        BackendChoice::Qnn => {
            "The bundle's context binaries on the NPU, or on its emulator on x86-64"
        }
    };
    named(BackendChoice::ALL.map(|c| PossibleValue::new(c.name()).help(what(c))))
}

impl DeviceArgs {
    /// The options for the runtime.
    pub(crate) fn options(&self) -> DeviceOptions {
        DeviceOptions::default()
            .arch(self.device_arch)
            .power(self.perf)
            .memory(self.memory.memory)
            .cdsprpc(self.memory.cdsprpc.clone())
    }
}

/// Names of power modes, those of the help first.
fn perf_names() -> Vec<&'static str> {
    let aliases = PerfMode::ALIASES.iter().map(|(name, _)| *name);
    PerfMode::ALL.iter().map(|mode| mode.name()).chain(aliases).collect()
}

/// Where inputs and outputs of graphs lie on the NPU.
#[derive(Debug, Clone, Default, Args)]
pub(crate) struct MemoryArgs {
    /// Where inputs and outputs lie: in memory that host and NPU share, or raw on the heap, copied for each execution
    #[arg(long, value_name = "MODE", env = vars::MEMORY, hide_env_values = true, default_value = "auto")]
    #[arg(value_parser = named::<MemoryMode>(MemoryMode::ALL.map(MemoryMode::name)))]
    pub memory: MemoryMode,
    /// libcdsprpc.so, which shares memory with the NPU [default: the device's]
    #[arg(long, value_name = "FILE", env = vars::CDSPRPC, hide_env_values = true)]
    pub cdsprpc: Option<PathBuf>,
}

impl BackendArgs {
    /// Arguments of programs with the argument order of published bundles: the word `cpu` stands in the place of
    /// libQnnHtp.
    pub(crate) fn classic(htp: &Path, system: &Path, device: DeviceArgs) -> Self {
        if htp == Path::new("cpu") {
            return Self { backend: BackendChoice::Cpu, device, ..Self::default() };
        }
        let libraries = LibraryArgs { htp: Some(htp.into()), system: Some(system.into()) };
        Self { backend: BackendChoice::Qnn, libraries, device, ..Self::default() }
    }
}

/// `v81` or `81`.
pub(crate) fn parse_arch(text: &str) -> Result<u32, String> {
    let digits = text.strip_prefix('v').unwrap_or(text);
    match digits.parse::<u32>() {
        Ok(arch @ 60..=99) => Ok(arch),
        _ => Err("expected a Hexagon architecture such as v75, v79 or v81".to_owned()),
    }
}

/// A time such as `30` or `0.5`.
pub(crate) fn parse_seconds(text: &str) -> Result<Duration, String> {
    let seconds = text.parse().ok().filter(|seconds| *seconds > 0.0);
    seconds
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .ok_or_else(|| "expected seconds, such as 30 or 0.5".to_owned())
}

/// A variable of the chat template: its name, and JSON or else a text.
pub(crate) type TemplateArg = (String, serde_json::Value);

/// `reasoning_effort=high`.
pub(crate) fn parse_template_arg(text: &str) -> Result<TemplateArg, String> {
    let (name, value) =
        text.split_once('=').ok_or("expected KEY=VALUE, such as reasoning_effort=high")?;
    let is_name = |name: &str| {
        name.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_')
            && name.chars().all(|c| c.is_ascii_alphanumeric() || c == '_')
    };
    if !is_name(name) {
        return Err(format!("{name:?} cannot be the name of a variable"));
    }
    Ok((name.to_owned(), serde_json::from_str(value).unwrap_or_else(|_| value.into())))
}

/// How the next token is chosen.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Sampling")]
pub(crate) struct SamplingArgs {
    /// Divides the logits; 0 takes the most likely token [default: 0; a conversation the model's own]
    #[arg(long, value_name = "T")]
    pub temperature: Option<f32>,
    /// Keep the K most likely tokens; 0 keeps all [default: 0, or the model's own]
    #[arg(long, value_name = "K")]
    pub top_k: Option<usize>,
    /// Keep the most likely tokens whose probabilities sum to P; 1 keeps all [default: 1, or the model's own]
    #[arg(long, value_name = "P")]
    pub top_p: Option<f32>,
    /// Keep tokens at least P times as likely as the most likely one; 0 keeps all [default: 0, or the model's own]
    #[arg(long, value_name = "P")]
    pub min_p: Option<f32>,
    /// Divides the logits of tokens of the prompt and the answer; 1 is off [default: 1, or the model's own]
    #[arg(long, value_name = "X")]
    pub repetition_penalty: Option<f32>,
    /// Subtracted from the logits of tokens of the answer; 0 is off [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub presence_penalty: Option<f32>,
    /// The same, once for each occurrence; 0 is off [default: 0]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub frequency_penalty: Option<f32>,
    /// Penalties see the last N tokens; 0 means all [default: 0]
    #[arg(long, value_name = "N")]
    pub penalty_window: Option<usize>,
    /// Add BIAS to the logit of a token, given by its id; −100 excludes it. May be given several times
    #[arg(long, value_name = "TOKEN=BIAS", value_parser = parse_bias, allow_hyphen_values = true)]
    pub logit_bias: Vec<(u32, f32)>,
    /// Makes the choices repeatable, on every machine
    #[arg(long, value_name = "N")]
    pub seed: Option<u64>,
}

/// `42=-100`.
fn parse_bias(text: &str) -> Result<(u32, f32), String> {
    let pair = text
        .split_once('=')
        .and_then(|(token, bias)| Some((token.trim().parse().ok()?, bias.trim().parse().ok()?)));
    pair.ok_or_else(|| "expected a token's id and a number, such as 42=-100".to_owned())
}

impl SamplingArgs {
    /// The options for the sampler, checked. Those that are not given are as `unsaid` has them.
    pub(crate) fn params(&self, unsaid: &SamplingParams) -> qhx_base::Result<SamplingParams> {
        let params = SamplingParams::default()
            .temperature(self.temperature.unwrap_or(unsaid.temperature))
            .top_k(self.top_k.unwrap_or(unsaid.top_k))
            .top_p(self.top_p.unwrap_or(unsaid.top_p))
            .min_p(self.min_p.unwrap_or(unsaid.min_p))
            .repetition_penalty(self.repetition_penalty.unwrap_or(unsaid.repetition_penalty))
            .presence_penalty(self.presence_penalty.unwrap_or(unsaid.presence_penalty))
            .frequency_penalty(self.frequency_penalty.unwrap_or(unsaid.frequency_penalty))
            .penalty_window(self.penalty_window.unwrap_or(unsaid.penalty_window))
            .logit_bias(self.logit_bias.iter().copied())
            .seed(self.seed.or(unsaid.seed));
        params.validate()?;
        Ok(params)
    }
}

/// Speculative decoding.
#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Speculative decoding")]
pub(crate) struct SpeculateArgs {
    /// Verify up to N draft tokens in one step; auto takes as many as pay. The answer stays the same
    /// [default: auto with --draft, or where the bundle has a drafting head of its own, else off]
    #[arg(long, value_name = "N|auto|off")]
    pub speculate: Option<Speculate>,
    /// A smaller bundle with the same tokenizer that makes draft tokens, instead of what stood in the text before
    #[arg(long, value_name = "BUNDLE")]
    pub draft: Option<PathBuf>,
}

impl SpeculateArgs {
    /// Mode of speculative decoding for each generation.
    pub(crate) fn mode(&self) -> Speculate {
        let unsaid = if self.draft.is_some() { Speculate::Auto } else { Speculate::Model };
        self.speculate.unwrap_or(unsaid)
    }

    /// The draft's bundle.
    ///
    /// # Errors
    ///
    /// There is one, and it is not to be used.
    pub(crate) fn draft(&self) -> qhx_base::Result<Option<&Path>> {
        if self.draft.is_some() && self.mode() == Speculate::Off {
            let what = "--draft names a bundle, and --speculate off does not use it";
            return Err(Error::new(ErrorKind::Usage, what).hint("leave out one of them"));
        }
        Ok(self.draft.as_deref())
    }
}

/// On or off.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Switch {
    On,
    Off,
}

impl Switch {
    pub(crate) fn is_on(self) -> bool {
        self == Self::On
    }
}
