//! The arguments of `qhx forge` and of its own commands.

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand};
use qhx_base::{Error, ErrorKind, Result};
use qhx_checkpoint::Adapter;
use qhx_checkpoint::Checkpoint;
use qhx_core::manifest::Rerank;
use qhx_qnn::Target;
use qhx_terminal::args::LibraryArgs;

use super::targets::{self, TargetChoice};
use crate::calibrate::{CalibrateOptions, DEFAULT_TOKENS, read_texts};
use crate::estimate::DEFAULT_CORNER;
use crate::f16_range::measure::read_columns;
use crate::receipt::TEXTS;
use crate::{
    AUTO_SHARDS, Activations, CONTEXT_BUDGET, Caches, Fold, ForgeOptions, Override, Precision,
    Task, rerank,
};

const EXAMPLES: &str = "\
Examples:
  qhx forge Qwen3.5-0.8B --out qwen35/v81
  qhx forge Qwen3.5-0.8B --out qwen35/v79-w8 --target v79 --precision w8a16 --check
  qhx forge Qwen3.5-0.8B --out qwen35 --target v73,v79,v81    # qwen35/v73, qwen35/v79, qwen35/v81
  qhx forge Qwen3.5-0.8B --out qwen35/laptop --target x-elite
  qhx forge Qwen3.5-4B --out qwen35-4b/v81 --shards 2 --max-ctx 2048
  qhx forge Qwen3.5-0.8B --out qwen35/cpu --cpu-only
  qhx forge Qwen3.5-0.8B --out qwen35/portable --portable      # then: qhx prepare qwen35/portable
  qhx forge Llama-3.2-1B --out llama/v81 --prefill 32,128
  qhx forge qwen3-0.6b-q4_k_m.gguf --precision w4a16 --out qwen3-q4/v81
  qhx forge Qwen3-0.6B --out qwen3/v81 --precision w8a16 --calibrate texts.txt --target-kl 0.02
  qhx forge plan Qwen3.5-4B --max-ctx 4096
  qhx forge estimate Qwen3.5-0.8B --precision w8a16
  qhx forge --synthetic tests/configs/qwen3.5-0.8b.json --out sizes/v81
  qhx forge Phi-tiny-MoE-instruct --out phimoe/v79 --target v79 --shards 2 --max-ctx 2048
  qhx forge Qwen3-VL-2B-Instruct --image-patches 256,512,1024 --out qwen3vl/v81
  qhx forge sentence-transformers/all-MiniLM-L6-v2 --out minilm/v81
  qhx forge Qwen3-0.6B --lora adapter --out tuned/v81";

const PLAN_EXAMPLES: &str = "\
Examples:
  qhx forge plan Qwen3.5-4B
  qhx forge plan config.json --precision w8a16 --max-ctx 8192
  qhx forge plan nv-embedcode-7b-v1 --precision w8a16 --json";

const ESTIMATE_EXAMPLES: &str = "\
Examples:
  qhx forge estimate Qwen3.5-0.8B
  qhx forge estimate config.json --target v79 --precision w8a16 --corner 5
  qhx forge estimate Qwen3.5-0.8B --trace traces    # then open traces/decode.json in Perfetto";

/// Make a bundle from a Hugging Face checkpoint
///
/// `qhx forge plan` and `qhx forge estimate` say beforehand what a bundle will be and cost.
///
/// Reads config.json, the safetensors and tokenizer.json of a folder, or a GGUF file (with config.json
/// beside it, where its metadata does not say all), and writes context binaries for one Hexagon architecture, or graphs
/// as ONNX for the CPU, the embedding table, the tokenizer and the manifest. The folder appears when
/// everything is written; until then finished context binaries, graphs and tables lie in a hidden folder beside it, and
/// the same command goes on from there after it was stopped. Prints the path of the manifest.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true)]
pub struct ForgeArgs {
    #[command(subcommand)]
    pub(crate) command: Option<ForgeCommand>,
    /// Folder of the checkpoint, or a GGUF file of llama.cpp
    #[arg(required_unless_present = "synthetic")]
    pub(crate) checkpoint: Option<PathBuf>,
    /// Instead of a checkpoint: a config.json, with weights drawn at random. The bundle has the
    /// sizes and speed of the real model and talks nonsense; its tokens are written as numbers
    #[arg(long, value_name = "CONFIG", conflicts_with = "checkpoint")]
    pub(crate) synthetic: Option<PathBuf>,
    /// Seed of the random weights
    #[arg(long, default_value_t = 1, requires = "synthetic")]
    pub(crate) seed: u64,
    /// Folder of the bundle
    #[arg(short, long, value_name = "DIR", required = true)]
    pub(crate) out: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) shape: ShapeArgs,
    /// Compare each context binary with its ONNX graph on random inputs and print the cosines. With =TEXTS, a file as
    /// --calibrate takes it, the model reads them in f32 first: prints the largest values of each layer that the NPU
    /// computes in f16, folds powers of two into weights where they do not fit (see --fold), and makes nothing where
    /// that does not help
    #[arg(long, value_name = "TEXTS", num_args = 0..=1, require_equals = true)]
    #[arg(conflicts_with = "cpu_only")]
    pub(crate) check: Option<Option<PathBuf>>,
    /// Image that the model sees while it is measured, beside the program's own. PNG, JPEG, WebP, GIF
    #[arg(long, value_name = "FILE", conflicts_with_all = ["no_measure", "synthetic"])]
    pub(crate) image: Option<PathBuf>,
    /// Measure nothing before the bundle is made. Otherwise the model with f16 weights reads texts on the CPU first, sees
    /// and hears: values that the NPU's f16 does not hold are folded (see --fold), or refused by their layer; 4-bit
    /// weights round the inputs least that count most; and the manifest gets a receipt, what the weights cost on texts of
    /// four kinds
    #[arg(long, conflicts_with = "receipt")]
    pub(crate) no_measure: bool,
    /// Print the receipt: divergence from f16 weights, agreement and perplexity on texts of four kinds, bytes. With
    /// =TEXTS, a file as --calibrate takes it, on these in their place
    #[arg(long, value_name = "TEXTS", num_args = 0..=1, require_equals = true, conflicts_with = "synthetic")]
    pub(crate) receipt: Option<Option<PathBuf>>,
    /// Measure on a calibration set what low-bit weights cost: divergence from f16, agreement and perplexity of each
    /// precision, and of each layer. A text a line, or in a *.jsonl file a JSON string, or object with "text", a line
    #[arg(long, value_name = "TEXTS", conflicts_with = "synthetic")]
    pub(crate) calibrate: Option<PathBuf>,
    /// Max tokens of the calibration set that are compared
    #[arg(long, value_name = "N", requires = "calibrate", default_value_t = DEFAULT_TOKENS)]
    pub(crate) calibrate_tokens: usize,
    /// Keep the most sensitive layers in the next higher precision until the divergence is at most this, in nats
    #[arg(long, value_name = "KL", requires = "calibrate")]
    pub(crate) target_kl: Option<f64>,
    /// Make no context binaries, even where there are QNN libraries
    #[arg(long, conflicts_with_all = ["target", "for_emulator"])]
    pub(crate) cpu_only: bool,
    /// Make no context binaries here: `qhx prepare` compiles the bundle where it runs, once, for the chip that it finds
    #[arg(long, conflicts_with_all = ["target", "cpu_only", "check", "estimate"])]
    pub(crate) portable: bool,
    /// Write ONNX graphs beside context binaries, too: the bundle then also runs on the CPU, and holds the weights once
    /// more. Bundles without context binaries always have them
    #[arg(long)]
    pub(crate) onnx: bool,
    /// Write no golden steps: prompts with the answers that the CPU computes from ONNX graphs, by which a device finds
    /// wrong answers when it opens the bundle
    #[arg(long)]
    pub(crate) no_golden: bool,
    /// When the bundle is made, estimate what its graphs cost on the device, see `qhx forge estimate`
    #[arg(long, conflicts_with = "cpu_only")]
    pub(crate) estimate: bool,
    /// Voltage corner of the estimate; 7 is about turbo
    #[arg(long, value_name = "N", requires = "estimate", default_value_t = DEFAULT_CORNER)]
    pub(crate) corner: u32,
    /// Name of the model and of the files [default: the checkpoint's folder]
    #[arg(long)]
    pub(crate) name: Option<String>,
    /// Replace a bundle that is there already, unless its folder holds other files, too
    #[arg(long)]
    pub(crate) overwrite: bool,
    /// Print one JSON object
    #[arg(long)]
    pub(crate) json: bool,
    #[command(flatten)]
    pub(crate) libraries: LibraryArgs,
}

/// What else the command can do.
#[derive(Debug, Subcommand)]
pub(crate) enum ForgeCommand {
    Plan(PlanArgs),
    Estimate(EstimateArgs),
    #[command(hide = true)]
    CompileContext(CompileContextArgs),
}

/// Say what a bundle will consist of, and what making it takes
///
/// Reads the checkpoint's configuration and the table of its tensors; a config.json alone is
/// enough. Lists the contexts with their expected sizes, the memory and the time that the forge
/// needs, and chooses the number of contexts as `qhx forge` does. Fails with the numbers where no
/// number of contexts would do.
#[derive(Debug, Args)]
#[command(after_help = PLAN_EXAMPLES)]
pub(crate) struct PlanArgs {
    /// Folder of the checkpoint, be it without weights, a GGUF file, or a config.json
    pub checkpoint: PathBuf,
    #[command(flatten)]
    pub shape: ShapeArgs,
    /// Plan without context binaries
    #[arg(long, conflicts_with = "target")]
    pub cpu_only: bool,
    /// Plan with ONNX graphs beside context binaries
    #[arg(long)]
    pub onnx: bool,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
}

/// Estimate what the graphs cost on the device, without one
///
/// Compiles every graph and sums up the schedule that the QNN compiler makes for the target: time,
/// bytes read and written, and the ops that take the longest. Weights do not matter, so that a
/// config.json alone is enough. Bytes are facts of the compiled graphs; times come from the
/// compiler's cost model and are no measurement.
#[derive(Debug, Args)]
#[command(after_help = ESTIMATE_EXAMPLES)]
pub(crate) struct EstimateArgs {
    /// Folder of the checkpoint, be it without weights, a GGUF file, or a config.json
    pub checkpoint: PathBuf,
    #[command(flatten)]
    pub shape: ShapeArgs,
    /// Voltage corner of the core, 1 to 12; 7 is about turbo
    #[arg(long, value_name = "N", default_value_t = DEFAULT_CORNER)]
    pub corner: u32,
    /// Keep the schedules in this folder, for Perfetto
    #[arg(long, value_name = "DIR")]
    pub trace: Option<PathBuf>,
    /// Print what the time of each graph goes to, by classes of ops: products, weights, dequantizing, vector work, layout
    /// changes, transfers, idle
    #[arg(long)]
    pub explain: bool,
    /// Draw the schedules into this folder, a picture for each graph: units down, time across
    #[arg(long, value_name = "DIR")]
    pub svg: Option<PathBuf>,
    /// Print one JSON object
    #[arg(long)]
    pub json: bool,
    #[command(flatten)]
    pub libraries: LibraryArgs,
}

/// Compile one context, for `qhx forge`
#[derive(Debug, Args)]
pub(crate) struct CompileContextArgs {
    /// Key of the context
    pub key: String,
    /// The binary to write
    pub file: PathBuf,
    /// The one of the forge's targets that it is for
    #[arg(long, value_parser = targets::parse)]
    pub target: TargetChoice,
    /// Its graphs hold weights together
    #[arg(long)]
    pub share_weights: bool,
    /// The command line of the forge
    #[arg(last = true, required = true)]
    pub forge: Vec<OsString>,
}

/// What shapes the graphs.
#[derive(Debug, Clone, Args)]
pub(crate) struct ShapeArgs {
    /// Folder with the tokenizer.json and the config.json of the model, in the place of those within a GGUF file
    #[arg(long, value_name = "DIR")]
    pub tokenizer: Option<PathBuf>,
    /// The vision tower of a GGUF file (mmproj) [default: the one file beside it with mmproj in its name]
    #[arg(long, value_name = "FILE")]
    pub mmproj: Option<PathBuf>,
    /// What the context binaries are compiled for: a Hexagon architecture (v68, v69, v73, v75, v79, v81), a chip such
    /// as SC8380XP or x-elite, or `this` for the one that the command runs on. Several are separated by commas; then
    /// DIR has a folder for each, such as DIR/v73 [default: v81 when there are QNN libraries]
    #[arg(long, value_name = "TARGET", value_delimiter = ',', value_parser = targets::parse)]
    pub target: Vec<TargetChoice>,
    /// What the bundle is to do [default: what the model's class does; of classes that both generate and embed, embed
    /// where modules.json or a GGUF file says how texts are pooled, else generate]
    #[arg(long, value_parser = task())]
    pub task: Option<Task>,
    /// Precision of the decoder's weights
    #[arg(long, value_parser = precision(DECODER), default_value = "fp16")]
    pub precision: Precision,
    /// Precision of the head's weight, from hidden states to logits [default: fp16, with low-bit layers w8a16]
    #[arg(long, value_parser = precision(HEAD), value_name = "PRECISION")]
    pub head: Option<Precision>,
    /// Number of contexts that the decoder's layers are spread over [default: as few as devices can
    /// load]
    #[arg(long, value_name = "N", value_parser = at_least_one)]
    pub shards: Option<usize>,
    /// Bytes that one context may take on the device, inputs and outputs included
    #[arg(long, value_name = "BYTES", default_value_t = CONTEXT_BUDGET)]
    pub context_budget: u64,
    /// Positions of the KV cache, or of the texts of an encoder [default: 4096, an encoder 512, or
    /// fewer when the model has fewer]
    #[arg(long, value_name = "N")]
    pub max_ctx: Option<usize>,
    /// Tokens that a prefill graph takes at once, and those of an encoder's graphs for shorter texts; several
    /// are separated by commas, 0 makes none [default: 16,128 where the family has such graphs,
    /// Qwen3-VL 16,320, PhiMoE 128, an encoder 32,128; for the NPU no more than a mask of 1 MiB has rows, 120 of a
    /// context of 4096; 32 and 64 between them for the CPU alone]
    #[arg(long, value_name = "P", value_delimiter = ',')]
    pub prefill: Option<Vec<usize>>,
    /// Smaller contexts that get graphs of their own, such as 512,1024,2048: a token then reads as many rows of caches,
    /// and no more [default: none]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub contexts: Vec<usize>,
    /// Numbers of sequences, such as 2,4,8, that context binaries get graphs of a step for: a server then computes the
    /// tokens of as many requests in the time that one takes, reading the weights once. The CPU does so in any case
    /// [default: none]
    #[arg(long, value_name = "N", value_delimiter = ',')]
    pub batch: Vec<usize>,
    /// What caches of keys and values hold: int8 has a scale for each token and head, takes half of the memory, and
    /// rounds what later tokens read
    #[arg(long, value_parser = caches(), default_value = "f16")]
    pub caches: Caches,
    /// Activations of 4-bit weights: int16 decodes faster on v73 to v79, by estimate, and rounds scales of
    /// weights further. Weights whose inputs or results vary too much keep f16
    #[arg(long, value_parser = activations(), default_value = "f16")]
    pub activations: Activations,
    /// Make context binaries that the emulator of x86-64 loads: each graph holds its own copy of the weights. By default
    /// all graphs of a context hold them once, from v73 on, and such binaries load on devices only
    #[arg(long)]
    pub for_emulator: bool,
    /// Precision of the experts' weights as graph inputs, for models whose experts stay on the host: short for
    /// `--recipe-option experts=PRECISION` [default: w8a16]
    #[arg(long, value_parser = choices(&EXPERTS), value_name = "PRECISION")]
    pub experts: Option<String>,
    /// Side of the square that images are stretched to, in pixels, for models that see: short for
    /// `--recipe-option image-size=N` [default: 512]
    #[arg(long, value_name = "N", conflicts_with = "image_patches")]
    pub image_size: Option<String>,
    /// Patches of the vision graphs, separated by commas, for models that see. Images keep their
    /// shape: short for `--recipe-option image-patches=N,…`
    #[arg(long, value_name = "N")]
    pub image_patches: Option<String>,
    /// Max soft tokens of an image, for models with a budget: short for
    /// `--recipe-option image-tokens=N`
    #[arg(long, value_name = "N")]
    pub image_tokens: Option<String>,
    /// Words and their phonemes for a voice, such as us_gold.json of misaki; several files are separated by commas: short
    /// for `--recipe-option lexicon=FILE,…`
    #[arg(long, value_name = "FILE")]
    pub lexicon: Option<String>,
    /// A checkpoint of the drafting head for --speculate that was published apart from the model, such as Gemma 4's
    /// assistant: short for `--recipe-option draft-head=DIR`
    #[arg(long, value_name = "DIR")]
    pub draft_head: Option<String>,
    /// An option that the recipe of the model's class has beside these. May be given several times
    #[arg(long = "recipe-option", value_name = "KEY=VALUE", value_parser = key_and_value)]
    pub recipe_options: Vec<(String, String)>,
    /// Weights that are to have a higher precision than --precision: all with PART in their names, such as
    /// layers.3=fp16, down_proj=fp16 or layers.3.mlp.down_proj=fp16. May be given several times; the last one counts
    #[arg(long, value_name = "PART=PRECISION")]
    pub weights: Vec<Override>,
    /// Keep what the projection PART computes at 2^-K of its size, for values that f16 does not hold, such as
    /// layers.3.mlp.up_proj=4: its weight becomes smaller, and the weight that reads it larger. May be given several
    /// times; the last one counts
    #[arg(long = "fold", value_name = "PART=K")]
    pub folds: Vec<Fold>,
    /// Sums of squares for the inputs of weights, which the process that started this one has measured
    #[arg(long, value_name = "FILE", hide = true)]
    pub columns: Option<PathBuf>,
    /// Tensors that the bundle does without, though the recipe neither reads them nor leaves them out by itself: all
    /// with PART in their names. May be given several times
    #[arg(long, value_name = "PART")]
    pub ignore_tensors: Vec<String>,
    /// The model tells by yes or no whether a document answers a query, for `qhx rerank`: it is asked as Qwen3-Reranker
    /// is, or as a JSON file says with its keys prompt, instruction, yes and no. For --task score, a file with prompt and
    /// activation (sigmoid, identity) says how query and document become one text
    #[arg(
        long,
        value_name = "qwen3|FILE",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "qwen3",
        value_parser = rerank
    )]
    pub rerank: Option<Rerank>,
    /// An adapter of PEFT (LoRA, DoRA) to merge into the weights: the folder of its adapter_config.json, and what its
    /// change is multiplied by [default: 1]. May be given several times
    #[arg(long, value_name = "DIR[=WEIGHT]")]
    pub lora: Vec<Adapter>,
}

impl ShapeArgs {
    /// The options without a compiler, for a target, or for one that is not known yet.
    ///
    /// # Errors
    /// When the file of columns cannot be read.
    pub(crate) fn options(&self, out: &Path, target: Option<Target>) -> Result<ForgeOptions> {
        let own = [
            ("experts", self.experts.clone()),
            ("image-size", self.image_size.clone()),
            ("image-patches", self.image_patches.clone()),
            ("image-tokens", self.image_tokens.clone()),
            ("lexicon", self.lexicon.clone()),
            ("draft-head", self.draft_head.clone()),
        ];
        let own = own.into_iter().filter_map(|(key, value)| Some((key.to_owned(), value?)));
        Ok(ForgeOptions {
            rerank: self.rerank.clone(),
            task: self.task,
            precision: self.precision,
            head: self.head,
            shards: self.shards.unwrap_or(AUTO_SHARDS),
            context_budget: self.context_budget,
            max_ctx: self.max_ctx,
            prefill: self
                .prefill
                .as_ref()
                .map(|list| list.iter().copied().filter(|p| *p > 0).collect()),
            contexts: self.contexts.clone(),
            batch: self.batch.clone(),
            caches: self.caches,
            activations: self.activations,
            share_weights: !self.for_emulator && target.is_none_or(|t| t.shares_weights()),
            recipe_options: own.chain(self.recipe_options.iter().cloned()).collect(),
            weights: self.weights.clone(),
            folds: self.folds.clone(),
            ignore_tensors: self.ignore_tensors.clone(),
            columns: self.columns.as_deref().map(read_columns).transpose()?.unwrap_or_default(),
            ..ForgeOptions::new(out)
        })
    }

    /// The checkpoint of a folder, or of a GGUF file with the folder of its tokenizer.
    fn open(&self, path: &Path) -> Result<Checkpoint> {
        let for_gguf = |option: &str| {
            Error::new(
                ErrorKind::Usage,
                format!("{option} is for GGUF files, and {} is a folder", path.display()),
            )
        };
        let checkpoint = match (&self.tokenizer, &self.mmproj) {
            (folder, tower) if is_gguf(path) => {
                let checkpoint = Checkpoint::open_gguf(path, folder.as_deref())?;
                match tower {
                    Some(tower) => checkpoint.with_tower(tower)?,
                    None => checkpoint.with_tower_beside()?,
                }
            }
            (Some(_), _) => {
                let hint = "put the tokenizer's files into the checkpoint's folder";
                return Err(for_gguf("--tokenizer").hint(hint));
            }
            (_, Some(_)) => return Err(for_gguf("--mmproj").hint("its tensors have the tower")),
            _ => Checkpoint::open(path)?,
        };
        checkpoint.with_adapters(&self.lora)
    }

    /// Targets given with `--target`, or the default.
    pub(super) fn targets(&self) -> &[TargetChoice] {
        if self.target.is_empty() { &[TargetChoice::DEFAULT] } else { &self.target }
    }
}

/// The texts of an option's file, numbered; those of the program without one.
fn own_texts(option: Option<&Option<PathBuf>>) -> Result<Vec<(String, String)>> {
    let Some(Some(file)) = option else {
        return Ok(TEXTS.map(|(kind, text)| (kind.to_owned(), text.to_owned())).into());
    };
    let texts = read_texts(file)?.into_iter().zip(1..);
    Ok(texts.map(|(text, number)| (format!("text {number}"), text)).collect())
}

/// `experts=fp16`.
fn key_and_value(text: &str) -> Result<(String, String), String> {
    let (key, value) = text.split_once('=').ok_or("expected KEY=VALUE, such as experts=fp16")?;
    Ok((key.to_owned(), value.to_owned()))
}

/// `qwen3`, or a file.
fn rerank(text: &str) -> Result<Rerank, String> {
    match text {
        "qwen3" => Ok(rerank::qwen3()),
        file => rerank::read(Path::new(file)).map_err(|e| e.report().to_string()),
    }
}

fn at_least_one(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(number @ 1..) => Ok(number),
        _ => Err("expected a number of at least 1".to_owned()),
    }
}

/// A checkpoint's folder, a GGUF file, or a configuration alone, be it in a folder, which is enough where weights do
/// not matter.
pub(crate) fn source(path: &Path, shape: &ShapeArgs) -> Result<Checkpoint> {
    let config = path.join("config.json");
    if shape.tokenizer.is_none()
        && shape.mmproj.is_none()
        && config.is_file()
        && !Checkpoint::has_weights(path)
    {
        return Checkpoint::synthetic(&config, 1)?.with_adapters(&shape.lora);
    }
    if path.is_dir() || is_file(path) {
        return shape.open(path);
    }
    if path.extension().is_some_and(|e| e == "json") {
        return Checkpoint::synthetic(path, 1)?.with_adapters(&shape.lora);
    }
    Err(Error::new(ErrorKind::Artifact, format!("{}: not a folder", path.display())).hint(
        "expected the folder of a Hugging Face checkpoint, a .gguf, .onnx or .nemo file, or a config.json",
    ))
}

/// True for what is named as a file of llama.cpp.
pub(super) fn is_gguf(path: &Path) -> bool {
    path.extension().is_some_and(|e| e.eq_ignore_ascii_case("gguf"))
}

/// True for what is named as a file of another program that is a whole model: llama.cpp's, ONNX such as a voice of
/// Piper, and NeMo's archives.
pub(super) fn is_file(path: &Path) -> bool {
    let ends = ["gguf", "onnx", "nemo"];
    path.extension().is_some_and(|e| ends.iter().any(|end| e.eq_ignore_ascii_case(end)))
}

impl ForgeArgs {
    /// True when a program reads the output, of whichever of the commands is asked for.
    pub fn wants_json(&self) -> bool {
        match &self.command {
            Some(ForgeCommand::Plan(plan)) => plan.json,
            Some(ForgeCommand::Estimate(estimate)) => estimate.json,
            Some(ForgeCommand::CompileContext(_)) => false,
            None => self.json,
        }
    }

    /// Calibration options, if a calibration is asked for.
    pub(super) fn calibration(&self) -> Result<Option<CalibrateOptions>> {
        let Some(file) = &self.calibrate else { return Ok(None) };
        let texts = read_texts(file)?;
        Ok(Some(CalibrateOptions { texts, tokens: self.calibrate_tokens, target: self.target_kl }))
    }

    /// The checkpoint that is named, of whichever of the commands is asked for, and whether its weights are read.
    pub fn source(&mut self) -> Option<(&mut PathBuf, bool)> {
        match &mut self.command {
            Some(ForgeCommand::Plan(plan)) => Some((&mut plan.checkpoint, false)),
            Some(ForgeCommand::Estimate(estimate)) => Some((&mut estimate.checkpoint, false)),
            Some(ForgeCommand::CompileContext(_)) => None,
            None => self.checkpoint.as_mut().map(|path| (path, true)),
        }
    }

    /// Texts that are measured, with their kinds: those of --check, or of the program.
    pub(super) fn texts(&self) -> Result<Vec<(String, String)>> {
        own_texts(self.check.as_ref())
    }

    /// Texts of the receipt.
    pub(super) fn receipt_texts(&self) -> Result<Vec<(String, String)>> {
        own_texts(self.receipt.as_ref())
    }

    /// True when the model is measured before its bundle is made.
    pub(super) fn measures(&self) -> bool {
        let low = self.shape.precision != Precision::Fp16;
        let asked = self.receipt.is_some() || self.calibrate.is_some() || self.image.is_some();
        let wanted = !self.cpu_only || low || asked;
        self.command.is_none() && self.synthetic.is_none() && wanted && !self.no_measure
    }

    /// True when bundles are made to be measured, for which host-ops are needed.
    pub fn calibrates(&self) -> bool {
        let asked = self.calibrate.is_some() || matches!(self.check, Some(Some(_)));
        self.command.is_none() && (asked || self.receipt.is_some())
    }

    /// True when bundles are opened, for which host-ops are needed.
    pub fn opens_bundles(&self) -> bool {
        self.calibrates() || self.measures() || self.makes_golden_steps()
    }

    /// True when bundles are made with golden steps, for which host-ops are needed.
    pub(super) fn makes_golden_steps(&self) -> bool {
        self.command.is_none() && !self.no_golden
    }

    /// The checkpoint, or the configuration in its place.
    pub(super) fn checkpoint(&self) -> Result<Checkpoint> {
        match (&self.synthetic, &self.checkpoint) {
            (Some(config), _) => {
                Checkpoint::synthetic(config, self.seed)?.with_adapters(&self.shape.lora)
            }
            (None, Some(path)) => self.shape.open(path),
            // The parser asks for one of them.
            (None, None) => Err(Error::new(ErrorKind::Usage, "no checkpoint is named")),
        }
    }
}

/// Reads a task of bundles, with a word on each for the help.
fn task() -> impl TypedValueParser<Value = Task> {
    let help = |task| match task {
        Task::Embed => "One vector for each text",
        Task::Transcribe => "Audio to text",
        Task::Speak => "Text to audio",
        Task::Score => "One score for each pair of texts, for `qhx rerank`",
        _ => "Text",
    };
    choices(&Task::ALL.map(|task| (task.name(), help(task))))
        .try_map(|name| Task::from_name(&name).ok_or("no task has this name"))
}

/// Precisions of the decoder's weights, for the help.
const DECODER: [&str; 3] = [
    "f16 weights",
    "int8 weights with one scale per 32 inputs of an output channel, f16 activations",
    "4-bit weights with one scale and offset per 32 inputs of an output channel, f16 activations",
];
/// Precisions of the head's weight.
const HEAD: [&str; 3] = [
    "f16",
    "int8 with one scale per 32 inputs of a token",
    "4 bits with a scale and offset for as many",
];
/// Precisions of the experts' weights as graph inputs.
const EXPERTS: [(&str, &str); 2] = [
    ("w8a16", "The table's int8 values as they lie in the file, scaled after the matmul"),
    ("fp16", "f16 values, which the host makes of the table for each token"),
];

fn precision(help: [&'static str; 3]) -> impl TypedValueParser<Value = Precision> {
    let names = Precision::ALL.map(Precision::name);
    let named: Vec<_> = names.into_iter().zip(help).collect();
    choices(&named).try_map(|name| name.parse::<Precision>())
}

fn caches() -> impl TypedValueParser<Value = Caches> {
    let int8 = ("int8", "int8 with one scale per token and head");
    choices(&[("f16", "f16, on the CPU f32"), int8])
        .map(move |name| if name == int8.0 { Caches::Int8 } else { Caches::F16 })
}

fn activations() -> impl TypedValueParser<Value = Activations> {
    let int16 = ("int16", "16-bit integers of a range that is measured");
    choices(&[("f16", "f16"), int16])
        .map(move |name| if name == int16.0 { Activations::Int16 } else { Activations::F16 })
}

/// Reads one of these names, each with a word for the help.
fn choices(named: &[(&'static str, &'static str)]) -> PossibleValuesParser {
    let values = named.iter().map(|(name, help)| PossibleValue::new(*name).help(*help));
    PossibleValuesParser::new(values)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        shape: ShapeArgs,
    }

    #[test]
    fn precisions_of_head_and_experts_become_options() {
        let Line { shape } = Line::parse_from(["x", "--head", "w8a16", "--experts", "fp16"]);
        let options = shape.options(Path::new("out"), None).unwrap();
        assert_eq!(options.head, Some(Precision::W8A16));
        assert_eq!(options.recipe_options["experts"], "fp16");
    }

    #[test]
    fn devices_that_can_share_weights_do_by_default() {
        let shares = |words: &[&str], target| {
            let Line { shape } = Line::parse_from([&["x"], words].concat());
            shape.options(Path::new("out"), target).unwrap().share_weights
        };
        let on_each = |words: &[&str]| Target::ALL.map(|target| shares(words, Some(target)));
        assert_eq!(on_each(&[]), [false, false, true, true, true, true]);
        assert!(shares(&[], None));
        assert_eq!(on_each(&["--for-emulator"]), [false; 6]);
    }

    #[test]
    fn a_folder_with_a_configuration_alone_can_be_planned() {
        let dir = tempfile::tempdir().unwrap();
        let Line { shape } = Line::parse_from(["plan"]);
        assert!(source(dir.path(), &shape).is_err());
        std::fs::write(dir.path().join("config.json"), "{}").unwrap();
        let checkpoint = source(dir.path(), &shape).unwrap();
        assert_eq!(checkpoint.seed(), Some(1));
        std::fs::write(dir.path().join("model.safetensors"), "damaged").unwrap();
        assert!(source(dir.path(), &shape).is_err());
    }
}
