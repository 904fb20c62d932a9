//! Golden steps: short prompts with the logits or vectors that a bundle is to give, which the forge computes on the
//! CPU.
//!
//! A device may answer wrongly without an error: with a damaged weight, a wrong scale, graphs that were exchanged, or
//! arithmetic of its own. [`first_open`](crate::RuntimeBuilder::unverified) finds that before the first answer, and
//! [`run`] at any time.

mod clip;
mod divergence;
mod executions;
mod fill;
mod first_open;

use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::io::Read as _;
use std::ops::ControlFlow;

use half::f16;
use qhx_base::compare::Distance;
use qhx_base::{CancelToken, Error, ErrorKind, Result, bail, error};
use qhx_core::Manifest;
use qhx_core::engine::{Model, Part, Prompt, Request};
use qhx_core::op::{Segment, Task};
use serde::{Deserialize, Serialize};

pub use clip::Clip;
pub use divergence::{Comparison, Divergence, compare};
pub use executions::Execution;
pub(crate) use first_open::first_open;

/// The schema that is read and written.
pub const SCHEMA: &str = "qhx_golden/v1";

/// Tolerance for all precisions: both sides compute with the same quantized weights, and only the device in f16. Over
/// the tiny models, answers of the library have a cosine of at least 0.99997 and differ by at most 0.012 of the peak.
const TOLERANCE: Tolerance = Tolerance { cosine: 0.99, difference: 0.1 };

/// Cosine and differences of an answer that is not finite.
const WRONG: (f64, f64, f64) = (0.0, f64::INFINITY, f64::INFINITY);

/// Max bytes of a file that is read. Those that the forge writes have less than 200 KB.
const MAX_BYTES: u64 = 1 << 20;
/// Max numbers of an answer that are all written down.
const WHOLE: usize = 2048;
/// The largest logits of a longer answer that are written down.
const LARGEST: usize = 256;
/// Projections of a longer answer: one for each bit of a random number.
const PROJECTIONS: usize = 64;
/// Max golden steps of a file, and max tokens of one.
const MAX_STEPS: usize = 64;
const MAX_TOKENS: usize = 1 << 13;

/// Tokens of a golden step: those of the prompt, and those that are decoded one by one.
const SHORT: (usize, usize) = (3, 2);
const LONG: (usize, usize) = (8, 3);
/// Tokens of a prompt beyond two full chunks of the widest prefill graph.
const BEYOND: usize = 3;
/// The same beside an image or audio.
const BESIDE_MEDIA: (usize, usize) = (4, 1);
/// Power of two of the longest audio that is tried, in halves of a second.
const LONGEST: u32 = 7;
/// The largest logits of a drafting head that are written down.
const DRAFTED: usize = 32;
/// Tokens that are given to a drafting head, one by one.
const DRAFTS: usize = 2;
/// Phonemes of a short text that is said, and its speed in thousandths. Said fast, most phonemes last a frame, and
/// rounding does not make another number of it.
const SAID: (usize, u32) = (6, 2000);
/// The speed of longer ones.
const SPEED: u32 = 1000;
/// Length of the other text of an encoder.
const SHORT_TEXT: usize = 4;
/// Lengths of the two texts of a pair that is scored.
const PAIR: (usize, usize) = (5, 6);

/// The golden steps of a bundle.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Golden {
    /// [`SCHEMA`].
    pub schema: String,
    /// Max distance of answers from the expected ones.
    pub tolerance: Tolerance,
    /// The golden steps.
    pub steps: Vec<GoldenStep>,
}

/// Max distance of answers from the expected ones.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Tolerance {
    /// Smallest cosine, of the answers less their mean.
    pub cosine: f64,
    /// Largest difference of a number, as a part of the largest absolute value that is expected.
    pub difference: f64,
}

/// A prompt with the answers that are expected.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct GoldenStep {
    /// Name for reports.
    pub name: String,
    /// Task that is run on the tokens.
    pub task: Task,
    /// The prompt.
    pub tokens: Vec<u32>,
    /// Media behind the first of these tokens; alone where there are none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub media: Option<Clip>,
    /// Positions that are there before the prompt: those of the prompt itself, again and again. 0 begins a text.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub position: usize,
    /// Tokens that are decoded after it, or the other text of a pair that is scored.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub then: Vec<u32>,
    /// Tokens that the drafting head is given behind these, one by one. Nothing is consumed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub drafted: Vec<u32>,
    /// Tokens behind these that are verified in one step, as draft tokens are.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub verified: Vec<u32>,
    /// The logits of the prompt's last position and of each token that is decoded, given to the drafting head or
    /// verified; or the one vector or score. Of a drafting head the largest alone. None of a host-op that transcribes
    /// by itself or speaks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub expected: Vec<Expected>,
    /// First and second execution of each graph, for a host-op that transcribes by itself or speaks.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub graphs: Vec<Execution>,
}

/// Logits, a vector or what else a graph gives, in f16. Where they are many, the largest and projections of all; of a
/// drafting head, the largest alone.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Expected {
    /// Number of logits, or elements of the vector.
    pub size: usize,
    /// Indices of `values`; empty where these are all.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ids: Vec<u32>,
    /// The numbers.
    pub values: Vec<f32>,
    /// Sums of all numbers less their mean, each with a sign that is drawn by its index: a number for each bit.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub projections: Vec<f32>,
}

/// Comparison of a golden step's answers with the expected ones.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct StepReport {
    /// Its name.
    pub name: String,
    /// All answers are within the tolerance.
    pub passed: bool,
    /// Smallest cosine of an answer.
    pub cosine: f64,
    /// Largest difference of a number.
    pub difference: f64,
    /// The same as a part of the largest absolute value that is expected.
    pub relative: f64,
    /// Why there are no answers, as where they are no numbers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Comparison of the answers of all golden steps with the expected ones.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct GoldenReport {
    /// The backend that ran them.
    pub backend: String,
    /// All of them passed.
    pub passed: bool,
    /// The tolerance.
    pub tolerance: Tolerance,
    /// Each of them.
    pub steps: Vec<StepReport>,
    /// Comparison of the graphs with their ONNX graphs, if a step failed on a device.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub comparison: Option<Comparison>,
}

/// Makes golden steps with a model.
struct Maker<'a> {
    model: &'a mut Model,
    /// Called with each step before it is computed.
    begins: &'a mut dyn FnMut(&str),
    steps: Vec<GoldenStep>,
}

impl Maker<'_> {
    /// Adds a step with the model's answers.
    fn add(&mut self, step: GoldenStep) -> Result<()> {
        (self.begins)(&step.name);
        self.steps.push(step.answered(self.model)?);
        Ok(())
    }

    /// Adds a step if it executes a graph that no other one did.
    fn add_if_new(&mut self, step: GoldenStep) -> Result<()> {
        let before = fill::filled(self.model);
        self.add(step)?;
        if fill::filled(self.model) == before {
            self.steps.pop();
        }
        Ok(())
    }

    /// Adds a step of a text. Prompts that see themselves as a whole go through one graph: of those the longest.
    fn add_text(&mut self, (prompt, then): (usize, usize), widest: usize) -> Result<()> {
        let task = Task::Generate;
        let step = |model: &mut Model, prompt| {
            GoldenStep::plain(model, format!("{}-{prompt}", task.name()), task, (prompt, then))
        };
        let whole = step(self.model, prompt);
        match self.add(whole) {
            Err(error) if error.kind() == ErrorKind::Prompt && prompt > widest => {
                let shorter = step(self.model, widest);
                self.add(shorter)
            }
            done => done,
        }
    }

    /// Texts that are continued: short ones, of which `brief` leaves the shorter, and those that fill the prefill
    /// graphs and reach the end of each context.
    fn texts(&mut self, sizes: &fill::Sizes, brief: bool) -> Result<()> {
        let (max_ctx, task) = (self.model.info().max_ctx, Task::Generate);
        let name = |prompt: usize| format!("{}-{prompt}", task.name());
        let short = [SHORT, LONG].into_iter().take(if brief { 1 } else { 2 });
        let widest = sizes.prefill.first().copied().unwrap_or(usize::MAX);
        for lengths in short.filter(|(prompt, then)| prompt + then <= max_ctx) {
            self.add_text(lengths, widest)?;
        }
        let mut widths = sizes.prefill.iter();
        if let Some(widest) = widths.next() {
            let prompt = (2 * widest + BEYOND).min(max_ctx.saturating_sub(1)).min(MAX_TOKENS - 1);
            if prompt > SHORT.0 {
                self.add_text((prompt, 1), *widest)?;
            }
        }
        for rows in widths.filter(|rows| **rows < max_ctx) {
            self.add_if_new(GoldenStep::plain(self.model, name(*rows), task, (*rows, 1)))?;
        }
        if !fill::stretches(self.model) {
            tracing::info!(
                "the host-op's state is not of the kit's form: no golden step at the end of the context"
            );
            return Ok(());
        }
        for context in &sizes.contexts {
            // Two tokens at least, so that rows of caches and whole states differ in length.
            let widest = sizes.prefill.first().copied().unwrap_or(2);
            let prompt = widest.min(context.saturating_sub(1) / 2);
            if prompt < 2 {
                continue;
            }
            let position = context - prompt - 1;
            let name = format!("{}-at-{position}", task.name());
            let step =
                GoldenStep { position, ..GoldenStep::plain(self.model, name, task, (prompt, 1)) };
            self.add(step)?;
        }
        Ok(())
    }

    /// Texts that are embedded or scored: two short ones, and those that fill the graphs of longer ones.
    fn encoded(&mut self, sizes: &fill::Sizes, brief: bool, task: Task) -> Result<()> {
        let max_ctx = self.model.info().max_ctx;
        let pair = task == Task::Score && tells_apart(self.model);
        let second = if pair { PAIR } else { (LONG.0, 0) };
        let short = [(SHORT_TEXT, 0), second].into_iter().take(if brief { 1 } else { 2 });
        for (prompt, then) in short.filter(|(prompt, then)| prompt + then <= max_ctx) {
            let name = format!("{}-{prompt}", task.name());
            self.add(GoldenStep::plain(self.model, name, task, (prompt, then)))?;
        }
        for rows in sizes.texts.iter().filter(|rows| (LONG.0..=max_ctx).contains(*rows)) {
            let name = format!("{}-{rows}", task.name());
            self.add_if_new(GoldenStep::plain(self.model, name, task, (*rows, 0)))?;
        }
        Ok(())
    }

    /// Draft tokens that are verified, and made where there is a drafting head, in graphs that nothing else executes.
    fn drafts(&mut self, sizes: &fill::Sizes) -> Result<()> {
        let (task, stretches) = (Task::Generate, fill::stretches(self.model));
        let drafts = self.model.info().drafts;
        let widths = self.model.info().verification.widths.clone();
        let wanted = |model: &Model, width: usize| {
            drafts || fill::idle_widths(model).is_ok_and(|idle| idle.contains(&width))
        };
        for context in sizes.contexts.iter().take(if stretches { usize::MAX } else { 1 }) {
            for &width in &widths {
                // One token is decoded before: prompts may go through graphs of larger contexts.
                let free = context.saturating_sub(width + 1);
                let prompt = sizes.prefill.first().copied().unwrap_or(2).min(free / 2);
                if prompt < 2 || !wanted(self.model, width) {
                    continue;
                }
                let position = if stretches { free - prompt } else { 0 };
                let name = format!("verify-{width}-at-{position}");
                let mut step = GoldenStep::plain(self.model, name, task, (prompt, 1 + width));
                let verified = step.then.split_off(1);
                let count = if drafts { DRAFTS.min(width) } else { 0 };
                let drafted = verified[..count].to_vec();
                self.add_if_new(GoldenStep { position, drafted, verified, ..step })?;
            }
        }
        Ok(())
    }

    /// Adds a step of a host-op that steps by itself, if it executes a graph that no other one did.
    fn add_executions(&mut self, step: GoldenStep) -> Result<()> {
        let before = self.executed().len();
        self.add(step)?;
        if self.executed().len() == before {
            self.steps.pop();
        }
        Ok(())
    }

    /// Names of the graphs that such steps executed.
    fn executed(&self) -> BTreeSet<&str> {
        let graphs = self.steps.iter().flat_map(|step| &step.graphs);
        graphs.map(|execution| &*execution.graph).collect()
    }

    /// True where graphs are left that such steps did not execute.
    fn leaves_some(&self) -> Result<bool> {
        let executed = self.executed();
        Ok(self.model.graphs()?.iter().any(|graph| !executed.contains(&*graph.name)))
    }

    /// Audio that a recogniser answers to: half a second, as much as it takes at once, and what lies between them where
    /// graphs are left.
    fn transcribed(&mut self) -> Result<()> {
        let rate = self.model.info().media.audio.rate;
        let window = self.model.manifest().params.transcription.as_ref().and_then(|t| t.window);
        let longest = Clip::halves(window.unwrap_or(0.0));
        let between = (1..).map(|power| 1u32 << power).take_while(|halves| *halves < longest);
        for halves in [1, longest].into_iter().chain(between) {
            if !self.leaves_some()? {
                break;
            }
            let name = format!("{}-{:.1}s", Task::Transcribe.name(), f64::from(halves) / 2.0);
            let step = GoldenStep::plain(self.model, name, Task::Transcribe, (0, 0));
            self.add_executions(GoldenStep { media: Some(Clip::audio(rate, halves)), ..step })?;
        }
        Ok(())
    }

    /// Adds texts for a voice to say: a short one, one as long as it takes, and lengths in between while graphs are
    /// left. Only the first audio of each is run.
    fn said(&mut self) -> Result<()> {
        let Some(speech) = self.model.manifest().params.speech.clone() else { return Ok(()) };
        let mut symbols: Vec<u32> = speech.symbols.values().copied().collect();
        symbols.sort_unstable();
        symbols.dedup();
        if symbols.is_empty() {
            return Ok(());
        }
        let between = std::iter::successors(Some(2 * SAID.0), |count| count.checked_mul(2));
        let between = between.take_while(|count| *count < speech.limit);
        let longer = [speech.limit].into_iter().chain(between).map(|count| (count, SPEED));
        for (count, speed) in [SAID].into_iter().chain(longer) {
            if !self.leaves_some()? {
                break;
            }
            let drawn = (0..count.min(speech.limit) as u64).map(|index| {
                let drawn = mixed(index) % symbols.len() as u64;
                symbols[drawn as usize]
            });
            let tokens = [0, speed].into_iter().chain(drawn).collect();
            let name = format!("{}-{count}", Task::Speak.name());
            let step = GoldenStep::plain(self.model, name, Task::Speak, (0, 0));
            self.add_executions(GoldenStep { tokens, ..step })?;
        }
        Ok(())
    }

    /// An image and audio, where the bundle takes them.
    fn media(&mut self) -> Result<()> {
        let max_ctx = self.model.info().max_ctx;
        let (task, clips) = match self.model.info() {
            info if info.vocab > 0 => (Task::Generate, Clip::all(self.model)),
            info if info.embedding_dim > 0 => (Task::Embed, Clip::all(self.model)),
            _ => return Ok(()),
        };
        for clip in clips {
            let name = format!("{}-{}", task.name(), clip.noun());
            let lengths = if task == Task::Embed { (0, 0) } else { BESIDE_MEDIA };
            let step = GoldenStep {
                media: Some(clip),
                ..GoldenStep::plain(self.model, name, task, lengths)
            };
            if task == Task::Embed {
                self.add(step)?;
                continue;
            }
            match self.model.encode_prompt(&step.prompt()?) {
                Ok(ids) if ids.len() + step.then.len() < max_ctx => self.add(step)?,
                Ok(ids) => tracing::info!("{}: {} of {max_ctx} positions", step.name, ids.len()),
                // As where the bundle was made without the graphs for it.
                Err(e) => tracing::info!("{}: {e}", step.name),
            }
        }
        Ok(())
    }

    /// Longer clips, of a model that has no texts alone, for the graphs of an encoder that nothing else executes.
    fn longer_audio(&mut self) -> Result<()> {
        let (rate, task) = (self.model.info().media.audio.rate, Task::Generate);
        // Eighths of a length that is a power of two: where that is refused, something below it may be taken.
        let lengths = (1..=LONGEST).flat_map(|power| [8, 7, 6, 5].map(|part| (part << power) / 8));
        for halves in lengths {
            if self.model.info().vocab == 0 || !fill::is_idle(self.model) {
                break;
            }
            let name = format!("{}-audio-{:.1}s", task.name(), f64::from(halves) / 2.0);
            let step = GoldenStep::plain(self.model, name, task, BESIDE_MEDIA);
            let step = GoldenStep { media: Some(Clip::audio(rate, halves)), ..step };
            if self.model.encode_prompt(&step.prompt()?).is_ok() {
                self.add_if_new(step)?;
            }
        }
        Ok(())
    }

    /// Longer texts behind audio, of a model that has no texts alone, in graphs that nothing else executes.
    fn behind_audio(&mut self, sizes: &fill::Sizes) -> Result<()> {
        let (max_ctx, task) = (self.model.info().max_ctx, Task::Generate);
        let audio = Clip::all(self.model).into_iter().find(|clip| clip.noun() == "audio");
        let Some(audio) = audio.filter(|_| self.model.info().vocab > 0) else { return Ok(()) };
        let prefill = sizes.prefill.iter().map(|rows| 2 * rows + BEYOND);
        // The clip and the token that is decoded are beside these.
        let ends = sizes.contexts.iter().map(|context| context.saturating_sub(2));
        for prompt in prefill.chain(ends).filter(|prompt| *prompt > BESIDE_MEDIA.0) {
            let prompt = prompt.min(max_ctx.saturating_sub(3));
            if !fill::is_idle(self.model) {
                break;
            }
            let name = format!("{}-audio-{prompt}", task.name());
            let step = GoldenStep::plain(self.model, name, task, (prompt, 1));
            let step = GoldenStep { media: Some(audio.clone()), ..step };
            let ids = self.model.encode_prompt(&step.prompt()?)?;
            if ids.len() + step.then.len() < max_ctx {
                self.add_if_new(step)?;
            }
        }
        Ok(())
    }
}

impl Golden {
    /// Computes golden steps with a model, which is to execute ONNX graphs on the CPU: texts, of which `brief` leaves
    /// out one of the short ones, an image and audio, where the bundle takes them. Together they execute every graph of
    /// a decoder, of a drafting head, of an encoder of texts, of a recogniser and of a voice, prefill graphs in more
    /// than one chunk and at the end of the context, and each tower for one size. `begins` is called with each step
    /// before it is computed.
    ///
    /// # Errors
    /// When the model fails, or gives numbers that are not finite.
    pub fn make(model: &mut Model, brief: bool, begins: &mut dyn FnMut(&str)) -> Result<Self> {
        let sizes = fill::Sizes::of(model)?;
        let does = |task: Task| model.op().description.tasks.contains(&task);
        let generates = does(Task::Generate);
        let (transcribes, speaks) = (does(Task::Transcribe), does(Task::Speak));
        let (embeds, scores) = (model.info().embedding_dim > 0, model.info().scores == 1);
        let mut maker = Maker { model, begins, steps: Vec::new() };
        if generates {
            maker.texts(&sizes, brief)?;
            maker.drafts(&sizes)?;
        }
        if embeds {
            maker.encoded(&sizes, brief, Task::Embed)?;
        }
        if scores {
            maker.encoded(&sizes, brief, Task::Score)?;
        }
        maker.media()?;
        if transcribes && !generates {
            maker.behind_audio(&sizes)?;
            maker.longer_audio()?;
        }
        if transcribes && maker.model.answers() {
            maker.transcribed()?;
        }
        if speaks {
            maker.said()?;
        }
        let steps = maker.steps;
        Ok(Self { schema: SCHEMA.to_owned(), tolerance: TOLERANCE, steps })
    }

    /// The golden steps of a bundle; none where it has none.
    ///
    /// # Errors
    /// When their file is there and cannot be read, or is damaged.
    pub fn load(manifest: &Manifest) -> Result<Option<Self>> {
        let Some(path) = &manifest.artifacts.golden else { return Ok(None) };
        let artifacts = manifest.open_artifacts();
        if !artifacts.root().join(path).exists() {
            tracing::debug!("{path}: missing, so the bundle has no golden steps");
            return Ok(None);
        }
        let file = artifacts.open_file("/artifacts/golden", path)?;
        let name = artifacts.root().join(path);
        let mut bytes = Vec::new();
        file.take(MAX_BYTES + 1)
            .read_to_end(&mut bytes)
            .map_err(|e| Error::io(ErrorKind::Artifact, &name, e))?;
        let damaged = |what: String| {
            error!(Artifact, "{}: golden steps: {what}", name.display())
                .hint("download or forge the bundle again; --unverified opens it without them")
        };
        if bytes.len() as u64 > MAX_BYTES {
            return Err(damaged(format!("more than {MAX_BYTES} bytes")));
        }
        let golden: Self = serde_json::from_slice(&bytes).map_err(|e| damaged(e.to_string()))?;
        golden.validate().map_err(damaged)?;
        Ok(Some(golden))
    }

    fn validate(&self) -> std::result::Result<(), String> {
        let Self { schema, tolerance, steps } = self;
        if schema != SCHEMA {
            return Err(format!("schema {schema:?}, expected {SCHEMA:?}"));
        }
        if !(0.0..=1.0).contains(&tolerance.cosine) || !(0.0..=10.0).contains(&tolerance.difference)
        {
            return Err(format!("tolerance {tolerance:?}, expected a cosine and a part"));
        }
        if steps.is_empty() || steps.len() > MAX_STEPS {
            return Err(format!("{} steps, expected 1 to {MAX_STEPS}", steps.len()));
        }
        steps.iter().try_for_each(|step| {
            step.validate().map_err(|what| format!("step {:?}: {what}", step.name))
        })
    }

    /// The step that takes the fewest tokens, from the beginning of a text if there is one.
    pub fn shortest(&self) -> Option<&GoldenStep> {
        let cost = |step: &&GoldenStep| (step.media.is_some(), step.position > 0, step.count());
        self.steps.iter().min_by_key(cost)
    }

    /// In which order steps are asked for where there may be no time for all: the shortest, then the longest prompts
    /// first, which fill the widest graphs.
    fn by_worth(&self) -> Vec<&GoldenStep> {
        let shortest = self.shortest();
        let mut rest: Vec<&GoldenStep> = self.steps.iter().collect();
        rest.retain(|step| !shortest.is_some_and(|shortest| std::ptr::eq(shortest, *step)));
        rest.sort_by_key(|step| (step.media.is_some(), Reverse(step.count())));
        shortest.into_iter().chain(rest).collect()
    }

    /// Runs a golden step. The model is reset before and after it.
    ///
    /// # Errors
    /// When the device or the model fails, or its answers have another length.
    pub fn check(&self, model: &mut Model, step: &GoldenStep) -> Result<StepReport> {
        let mut report = StepReport {
            name: step.name.clone(),
            passed: true,
            cosine: 1.0,
            difference: 0.0,
            relative: 0.0,
            message: None,
        };
        let mut seen = Vec::new();
        let found = match step.run(model, &mut seen) {
            // Found by the host-op in what a graph gave, such as NaN. A fault of the device has a code.
            Err(error) if error.kind() == ErrorKind::Execute && error.code().is_none() => {
                let message = Some(error.message().to_owned());
                let (cosine, difference, relative) = WRONG;
                return Ok(StepReport {
                    passed: false,
                    cosine,
                    difference,
                    relative,
                    message,
                    ..report
                });
            }
            found => found?,
        };
        for (found, expected) in found.iter().zip(&step.expected) {
            if found.len() != expected.size {
                let (found, size) = (found.len(), expected.size);
                return Err(error!(
                    Artifact,
                    "golden step {:?}: {found} numbers, expected {size}", step.name
                )
                .hint("the golden steps are of another model: forge the bundle again"));
            }
            report.note(expected.distance(found));
        }
        executions::compare(step, &seen, &mut report)?;
        report.passed =
            report.cosine >= self.tolerance.cosine && report.relative <= self.tolerance.difference;
        Ok(report)
    }
}

/// Runs all golden steps of a bundle; none where it has none. `begins` is called with each before it runs. Where one
/// fails, `reference` opens what executes the ONNX graphs, to find the graph that departs.
///
/// # Errors
/// When the golden steps cannot be read, or the model fails.
pub fn run(
    model: &mut Model,
    reference: impl FnOnce() -> Result<std::sync::Arc<dyn qhx_exec::backend::Backend>>,
    begins: &mut dyn FnMut(&str),
) -> Result<Option<GoldenReport>> {
    let Some(golden) = Golden::load(model.manifest())? else { return Ok(None) };
    let mut steps = Vec::new();
    for step in &golden.steps {
        begins(&step.name);
        steps.push(golden.check(model, step)?);
    }
    let failed = golden.steps.iter().zip(&steps).find(|(_, report)| !report.passed);
    let comparison = match failed {
        Some((step, _)) if model.device().is_some() => Some(compare(model, step, reference)?),
        _ => None,
    };
    Ok(Some(GoldenReport {
        backend: model.backend().name.clone(),
        passed: failed.is_none(),
        tolerance: golden.tolerance,
        steps,
        comparison,
    }))
}

impl StepReport {
    /// Takes what is further away than what was found so far.
    fn note(&mut self, (cosine, difference, relative): (f64, f64, f64)) {
        self.cosine = self.cosine.min(cosine);
        self.difference = self.difference.max(difference);
        self.relative = self.relative.max(relative);
    }
}

impl GoldenStep {
    /// A step of this many tokens, and then this many one by one, without answers.
    fn plain(model: &Model, name: String, task: Task, (prompt, then): (usize, usize)) -> Self {
        let mut tokens = tokens(model, prompt + then);
        let then = tokens.split_off(prompt);
        let (drafted, verified, expected, graphs) = Default::default();
        let (media, position) = (None, 0);
        Self { name, task, tokens, media, position, then, drafted, verified, expected, graphs }
    }

    /// Its tokens that have a position.
    fn count(&self) -> usize {
        self.tokens.len().saturating_add(self.then.len()).saturating_add(self.verified.len())
    }

    /// True where the host-op answers in steps of its own, and what its graphs gave is compared.
    fn is_alone(&self) -> bool {
        matches!(self.task, Task::Transcribe | Task::Speak)
    }

    /// The model's answers. `seen` gets the executions of the graphs if these are compared.
    fn run(&self, model: &mut Model, seen: &mut Vec<executions::Seen>) -> Result<Vec<Vec<f32>>> {
        if self.is_alone() {
            *seen = executions::seen(model, self)?;
            return Ok(Vec::new());
        }
        answers(model, self)
    }

    /// The step with the model's answers.
    fn answered(mut self, model: &mut Model) -> Result<Self> {
        let mut seen = Vec::new();
        let answers = self.run(model, &mut seen)?;
        let drafts = self.then.len() + 1;
        let drafts = drafts..drafts + self.drafted.len();
        let expected = answers.iter().enumerate().map(|(at, values)| match drafts.contains(&at) {
            true => Expected::largest(values, DRAFTED),
            false => Expected::of(values),
        });
        self.expected = expected.collect::<Result<_>>()?;
        self.graphs = seen.iter().map(Execution::of).collect::<Result<_>>()?;
        Ok(self)
    }

    /// The prompt for the engine.
    fn prompt(&self) -> Result<Prompt> {
        let Some(clip) = &self.media else { return Ok(Prompt::Tokens(self.tokens.clone())) };
        let (before, behind) = self.tokens.split_at(self.tokens.len().min(1));
        let parts = [Part::Tokens(before.to_vec()), Part::Media(clip.media()?)];
        let behind = Part::Tokens(behind.to_vec());
        Ok(Prompt::Parts(parts.into_iter().chain([behind]).collect()))
    }

    fn validate(&self) -> std::result::Result<(), String> {
        let count = self.count();
        let alone = matches!(self.task, Task::Embed | Task::Transcribe) && self.media.is_some();
        if self.tokens.is_empty() != alone || count > MAX_TOKENS {
            let expected =
                if alone { "none beside media".to_owned() } else { format!("1 to {MAX_TOKENS}") };
            return Err(format!("{count} tokens, expected {expected}"));
        }
        if self.position > 0 && (self.task != Task::Generate || self.media.is_some()) {
            return Err("a position, expected none but of a text that is continued".to_owned());
        }
        let drafts = self.drafted.len().saturating_add(self.verified.len());
        if drafts > MAX_TOKENS || (drafts > 0 && self.task != Task::Generate) {
            return Err(format!("{drafts} draft tokens, expected none but of the task generate"));
        }
        let answers = match self.task {
            Task::Generate => self.then.len() + 1 + drafts,
            Task::Embed if self.then.is_empty() => 1,
            Task::Score => 1,
            Task::Transcribe if self.media.is_some() => 0,
            Task::Speak if self.then.is_empty() => 0,
            _ => {
                let what = "expected the task generate or score, transcribe of audio, or embed or speak of a prompt \
                            alone";
                return Err(what.to_owned());
            }
        };
        if self.graphs.is_empty() == self.is_alone() {
            let expected = if self.is_alone() { "some" } else { "none of this task" };
            return Err(format!("{} executions of graphs, expected {expected}", self.graphs.len()));
        }
        self.graphs.iter().try_for_each(Execution::validate)?;
        if let Some(clip) = &self.media {
            if !matches!(self.task, Task::Generate | Task::Embed | Task::Transcribe) {
                return Err(format!(
                    "expected no {} for the task {}",
                    clip.noun(),
                    self.task.name()
                ));
            }
            clip.media().map_err(|e| e.message().to_owned())?;
        }
        if self.expected.len() != answers {
            return Err(format!("{} answers, expected {answers}", self.expected.len()));
        }
        self.expected.iter().try_for_each(Expected::validate)
    }
}

impl Expected {
    fn of(values: &[f32]) -> Result<Self> {
        let size = values.len();
        if size > WHOLE {
            let largest = Self::largest(values, LARGEST)?;
            return Ok(Self { projections: projections(values), ..largest });
        }
        check_f16(values)?;
        let values = values.iter().map(|value| f16::from_f32(*value).to_f32()).collect();
        Ok(Self { size, ids: Vec::new(), values, projections: Vec::new() })
    }

    /// The largest alone: which others a drafting head masks hangs on scores of clusters that may be nearly equal.
    fn largest(values: &[f32], count: usize) -> Result<Self> {
        check_f16(values)?;
        let mut order: Vec<usize> = (0..values.len()).collect();
        order.sort_by(|a, b| values[*b].total_cmp(&values[*a]).then(a.cmp(b)));
        order.truncate(count);
        Ok(Self {
            size: values.len(),
            values: order.iter().map(|at| f16::from_f32(values[*at]).to_f32()).collect(),
            ids: order.iter().map(|at| *at as u32).collect(),
            projections: Vec::new(),
        })
    }

    fn validate(&self) -> std::result::Result<(), String> {
        let Self { size, ids, values, projections } = self;
        let whole = ids.is_empty() && projections.is_empty() && values.len() == *size;
        let part = !ids.is_empty()
            && ids.len() == values.len()
            && [0, PROJECTIONS].contains(&projections.len());
        if values.is_empty() || !(whole || part) || ids.iter().any(|id| *id as usize >= *size) {
            return Err(format!(
                "{} values, {} ids and {} projections of {size} numbers, expected all values, or as many ids below \
                 {size} as values, and {PROJECTIONS} projections or none",
                values.len(),
                ids.len(),
                projections.len()
            ));
        }
        match values.iter().chain(projections).find(|value| !value.is_finite()) {
            Some(value) => Err(format!("{value}, expected finite numbers")),
            None => Ok(()),
        }
    }

    /// Cosine and largest difference of an answer of the same size, and that as a part of the largest value. What is
    /// not finite is as far as it gets.
    fn distance(&self, found: &[f32]) -> (f64, f64, f64) {
        if found.iter().any(|value| !value.is_finite()) {
            return WRONG;
        }
        // One number has no direction, and where it is a score near 0, no scale.
        if let ([found], [value]) = (found, &self.values[..]) {
            let difference = f64::from((found - value).abs());
            return (1.0, difference, difference / f64::from(value.abs().max(1.0)));
        }
        if !self.ids.is_empty() && self.projections.is_empty() {
            return self.distance_of_largest(found);
        }
        let there: Vec<f32> = match self.ids.is_empty() {
            true => found.to_vec(),
            false => self.ids.iter().filter_map(|id| found.get(*id as usize)).copied().collect(),
        };
        let direction = match self.ids.is_empty() {
            true => Distance::of(&centered(found), &centered(&self.values)),
            false => Distance::of(&projections(found), &self.projections),
        };
        match (direction, Distance::of(&there, &self.values)) {
            (Ok(direction), Ok(values)) => (direction.cosine, values.largest, values.relative),
            _ => WRONG,
        }
    }

    /// The same where only the largest are known. Logits that were masked, which are the lowest, say nothing; half of
    /// them at most are.
    fn distance_of_largest(&self, found: &[f32]) -> (f64, f64, f64) {
        let lowest = found.iter().copied().fold(f32::INFINITY, f32::min);
        let pairs = self.ids.iter().zip(&self.values);
        let pairs = pairs.filter_map(|(id, value)| Some((*found.get(*id as usize)?, *value)));
        let (there, values): (Vec<f32>, Vec<f32>) =
            pairs.filter(|(found, _)| *found > lowest).unzip();
        if 2 * there.len() < self.ids.len() {
            return WRONG;
        }
        let direction = Distance::of(&centered(&there), &centered(&values));
        match (direction, Distance::of(&there, &values)) {
            (Ok(direction), Ok(values)) => (direction.cosine, values.largest, values.relative),
            _ => WRONG,
        }
    }
}

/// Errors where a number is none of f16.
fn check_f16(values: &[f32]) -> Result<()> {
    let size = values.len();
    match values.iter().position(|value| !f16::from_f32(*value).is_finite()) {
        None => Ok(()),
        Some(at) => {
            Err(error!(Graph, "number {at} of {size} is {}, expected one of f16", values[at]))
        }
    }
}

fn is_zero(position: &usize) -> bool {
    *position == 0
}

/// The numbers less their mean: what all logits have in common changes no answer.
fn centered(values: &[f32]) -> Vec<f32> {
    let mean = mean(values);
    values.iter().map(|value| (f64::from(*value) - mean) as f32).collect()
}

fn mean(values: &[f32]) -> f64 {
    values.iter().map(|value| f64::from(*value)).sum::<f64>() / values.len().max(1) as f64
}

/// See [`Expected::projections`]. The angle between two arrays is about that between their projections.
fn projections(values: &[f32]) -> Vec<f32> {
    let mean = mean(values);
    let mut sums = [0f64; PROJECTIONS];
    for (index, value) in values.iter().enumerate() {
        let (signs, value) = (mixed(index as u64), f64::from(*value) - mean);
        for (bit, sum) in sums.iter_mut().enumerate() {
            *sum += if signs >> bit & 1 == 1 { value } else { -value };
        }
    }
    sums.map(|sum| sum as f32).to_vec()
}

/// A random number for each index: SplitMix64.
const fn mixed(index: u64) -> u64 {
    let mut z = index.wrapping_add(1).wrapping_mul(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

/// Tokens of a golden step: the one that texts begin with, then some from the vocabulary's first half, where
/// tokenizers keep no special tokens but at its beginning.
fn tokens(model: &Model, count: usize) -> Vec<u32> {
    let info = model.info();
    let params = &model.manifest().params;
    let declared = [info.input_vocab, params.vocab.unwrap_or(0), info.vocab];
    let vocab = declared.into_iter().filter(|rows| *rows > 0).min().unwrap_or(1) as u64;
    let (first, end) = (vocab / 8, vocab / 2 + 1);
    let drawn = (0u64..).map(|index| (first + mixed(index) % (end - first)) as u32);
    let drawn = drawn.filter(|id| u64::from(*id) < vocab);
    let all = params.bos_token_id.into_iter().chain(drawn);
    // Audio may stand in the place of the token that texts begin with.
    all.filter(|id| !info.placeholders.contains(id)).take(count).collect()
}

/// True if the texts of a pair are two parts for the model.
fn tells_apart(model: &Model) -> bool {
    let pair = model.tokenizer().and_then(|tokenizer| {
        tokenizer.encode_pair("a", "b", usize::MAX, &CancelToken::new()).ok()
    });
    pair.is_some_and(|parts| parts.len() > 1)
}

/// The model's answers to a golden step.
fn answers(model: &mut Model, step: &GoldenStep) -> Result<Vec<Vec<f32>>> {
    let answers = match step.task {
        Task::Embed => match &step.media {
            Some(clip) => model.embed_media(&clip.media()?).map(|vector| vec![vector.to_vec()]),
            None => model.embed(&step.tokens).map(|vector| vec![vector.to_vec()]),
        },
        Task::Score => {
            let parts = [&step.tokens[..], &step.then[..]];
            let count = if step.then.is_empty() { 1 } else { 2 };
            let score = model.score_parts(&parts[..count], &CancelToken::new());
            score.map(|score| vec![vec![score]])
        }
        Task::Transcribe => {
            let media = step.media.as_ref().map(Clip::media).transpose()?;
            let answer = media.map(|media| model.answer(&media, &CancelToken::new()));
            answer.transpose().map(|_| Vec::new())
        }
        // The rest of what is said goes through the same graphs.
        Task::Speak => model.op_mut().speak(&[Segment::Tokens(&step.tokens)]).map(|_| Vec::new()),
        _ => decoded(model, step),
    };
    answers.map_err(|e| e.context(format_args!("golden step {:?}", step.name)))
}

fn decoded(model: &mut Model, step: &GoldenStep) -> Result<Vec<Vec<f32>>> {
    model.reset()?;
    let mut logits = Vec::new();
    let mut run = || {
        if step.media.is_some() {
            // The one token that is chosen is not consumed.
            let request = Request::greedy(step.prompt()?, 1);
            model.generate(&request, &mut |_| ControlFlow::Continue(()))?;
        } else {
            let (end, max_ctx) = (step.position.saturating_add(step.count()), model.info().max_ctx);
            if step.position > 0 && end > max_ctx {
                bail!(Artifact, "{end} positions, the context holds {max_ctx}");
            }
            let (op, prompt) = (model.op_mut(), [Segment::Tokens(&step.tokens)]);
            let drafts = !step.drafted.is_empty();
            if drafts && step.position == 0 {
                op.drafting(true)?;
            }
            op.prefill(&prompt)?;
            if step.position > 0 {
                let state = fill::stretched(&op.export_state()?, step.position);
                let state = state.ok_or_else(|| {
                    error!(
                        Internal,
                        "the host-op's state cannot be brought to position {}", step.position
                    )
                })?;
                op.import_state(step.position, &state)?;
                if drafts {
                    op.drafting(true)?;
                }
                op.prefill(&prompt)?;
            }
        }
        let op = model.op_mut();
        logits.push(op.logits()?.to_f32());
        for token in &step.then {
            op.decode(*token)?;
            logits.push(op.logits()?.to_f32());
        }
        for token in &step.drafted {
            op.draft(*token)?;
            logits.push(op.logits()?.to_f32());
        }
        if !step.verified.is_empty() {
            op.verify(&step.verified)?;
            for row in 0..step.verified.len() {
                op.row_logits(row)?;
                logits.push(op.logits()?.to_f32());
            }
        }
        Ok(())
    };
    let mut result: Result<()> = run();
    if !step.drafted.is_empty() {
        result = result.and(model.op_mut().drafting(false));
    }
    let reset = model.reset();
    result.and(reset).map(|()| logits)
}

#[cfg(test)]
mod tests;
