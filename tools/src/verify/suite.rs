//! Suites of prompts with reference answers (`npu_suite/v1`), and the gates that judge answers.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::str::FromStr;
use std::sync::Arc;

use qhx::media::{self, Attached, Attachment};
use qhx_base::{Error, ErrorKind, Result, files};
use qhx_core::dump::Dump;
use qhx_core::engine::{FinishReason, Generation, Model, Request};
use qhx_core::npy::Array;
use qhx_core::op::Modality;
use qhx_media::Source;
use serde::{Deserialize, Serialize};

use super::arrays::{self, ArrayReport};

/// The schema that is read.
pub const SCHEMA: &str = "npu_suite/v1";

/// Largest part of a reference answer that may differ under `greedy_tol`.
pub const MAX_DISTANCE: f64 = 0.10;
/// Part of immediately repeated tokens from which an answer counts as degenerate.
pub const MAX_REPEATS: f64 = 0.5;
/// Part of the cases that has to pass under `greedy_tol`.
pub const MIN_PASSED: f64 = 0.6;
/// Cosine that each row of an array has to have with the reference's, unless the suite says another.
pub const MIN_COSINE: f64 = 0.999;

/// Longest suite that is read.
const MAX_BYTES: u64 = 64 << 20;

/// Criterion that answers have to meet.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Gate {
    /// Every token of every case is the reference's.
    #[default]
    GreedyExact,
    /// At least [`MIN_PASSED`] of the cases are within an edit distance of [`MAX_DISTANCE`] and do not repeat
    /// themselves.
    GreedyTol,
}

impl FromStr for Gate {
    type Err = String;

    /// A gate by its name.
    fn from_str(text: &str) -> std::result::Result<Self, String> {
        let found = Self::ALL.into_iter().find(|gate| gate.name() == text);
        found.ok_or_else(|| "expected greedy_exact or greedy_tol".to_owned())
    }
}

impl Gate {
    /// Both.
    pub const ALL: [Self; 2] = [Self::GreedyExact, Self::GreedyTol];

    /// The name in options and reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::GreedyExact => "greedy_exact",
            Self::GreedyTol => "greedy_tol",
        }
    }
}

/// Prompts with reference answers, and how answers are judged.
///
/// ```no_run
/// use qhx_tools::verify::Suite;
///
/// let suite = Suite::load("suite.json".as_ref())?;
/// let mut runtime = qhx::Runtime::builder();
/// if let Some(dump) = suite.dump() {
///     runtime = runtime.dump(dump.clone());
/// }
/// let mut model = runtime.build().load(&qhx::Bundle::open("qwen35/v81")?)?;
/// assert!(suite.run(&mut model, suite.gate())?.passed);
/// # Ok::<(), qhx::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Suite {
    path: PathBuf,
    content: Content,
    /// Arrays that the host-op has to make of each case.
    arrays: Vec<Vec<(String, Array)>>,
    /// Keeps those that it makes.
    dump: Option<Arc<Dump>>,
}

/// A suite file.
#[derive(Debug, Clone, Deserialize)]
struct Content {
    schema: String,
    model: Option<String>,
    gate: Option<Gate>,
    /// In place of [`MIN_COSINE`].
    min_cosine: Option<f64>,
    cases: Vec<Case>,
}

/// A prompt and its reference answer.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(default)]
#[non_exhaustive]
pub struct Case {
    /// Its name in reports.
    pub id: Option<String>,
    /// A text to complete.
    pub prompt: Option<String>,
    /// Used instead of `prompt` where it is given.
    pub prompt_ids: Option<Vec<u32>>,
    /// Images, as paths beside the suite. They stand before the prompt, or where it says `<image>`.
    pub images: Vec<String>,
    /// Audio, as paths beside the suite. They stand before the prompt behind the images, or where it says `<audio>`.
    pub audio: Vec<String>,
    /// Folders of frames, or animations, as paths beside the suite. They stand before the prompt behind the audio, or
    /// where it says `<video>`.
    pub videos: Vec<String>,
    /// Frames of a video that are taken a second, of a folder: that there are.
    pub fps: Option<f32>,
    /// `.npy` files beside the suite: what the host-op has to make of the prompt, under the names of
    /// `qhx generate --dump`.
    pub arrays: BTreeMap<String, String>,
    /// Tokens of the reference answer, with or without the one that ends it.
    pub gold: Vec<u32>,
    /// Tokens to generate; as many as the reference has, if not given.
    pub max_new: Option<usize>,
}

impl Suite {
    /// Reads a suite and the arrays that its cases name.
    ///
    /// # Errors
    /// When the file is no suite, a case lacks something, or an array cannot be read.
    pub fn load(path: &Path) -> Result<Self> {
        let fail = |message: String| {
            Error::new(ErrorKind::Artifact, format!("{}: {message}", path.display()))
                .hint(format!("expected a suite of schema {SCHEMA}, see docs/cli.md"))
        };
        let bytes = files::read(ErrorKind::Artifact, path, MAX_BYTES)?;
        let suite: Content =
            serde_json::from_slice(&bytes).map_err(|e| fail(format!("not a suite: {e}")))?;
        if suite.schema != SCHEMA {
            return Err(fail(format!("schema {:?}, expected {SCHEMA:?}", suite.schema)));
        }
        if suite.cases.is_empty() {
            return Err(fail("the suite has no cases".to_owned()));
        }
        if suite.min_cosine.is_some_and(|least| !(-1.0..=1.0).contains(&least)) {
            return Err(fail(
                "min_cosine is no cosine, expected a number such as 0.999".to_owned(),
            ));
        }
        for (index, case) in suite.cases.iter().enumerate() {
            let name = case.name(index);
            if case.gold.is_empty() {
                return Err(fail(format!("case {name}: gold is empty")));
            }
            if case.prompt.is_none() && case.prompt_ids.is_none() {
                return Err(fail(format!("case {name}: neither prompt nor prompt_ids")));
            }
            let is_beside = |file: &&String| {
                let mut steps = Path::new(file).components();
                !file.is_empty() && steps.all(|step| matches!(step, Component::Normal(_)))
            };
            let parts = case.images.iter().chain(&case.audio).chain(&case.videos);
            if let Some(file) = parts.chain(case.arrays.values()).find(|file| !is_beside(file)) {
                return Err(fail(format!("case {name}: {file:?} is no path beside the suite")));
            }
            if case.fps.is_some_and(|fps| !fps.is_finite() || fps <= 0.0) {
                return Err(fail(format!("case {name}: fps, expected a number above 0")));
            }
        }
        let folder = path.parent().unwrap_or(Path::new(""));
        let references = suite.cases.iter().enumerate().map(|(index, case)| {
            let read = arrays::read(&case.arrays, folder);
            read.map_err(|e| e.context(format_args!("case {}", case.name(index))))
        });
        let references = references.collect::<Result<_>>()?;
        let names: Vec<_> =
            suite.cases.iter().flat_map(|case| case.arrays.keys().cloned()).collect();
        let dump = (!names.is_empty()).then(|| Arc::new(Dump::keep(names)));
        Ok(Self { path: path.to_owned(), content: suite, arrays: references, dump })
    }

    /// The cases.
    pub fn cases(&self) -> &[Case] {
        &self.content.cases
    }

    /// The suite's own gate, or [`Gate::GreedyExact`].
    pub fn gate(&self) -> Gate {
        self.content.gate.unwrap_or_default()
    }

    /// Cosine that each row of an array has to have with the reference's.
    pub fn min_cosine(&self) -> f64 {
        self.content.min_cosine.unwrap_or(MIN_COSINE)
    }

    /// Dump that a model has to be opened with, so that arrays can be compared; `None` if no case has any.
    pub fn dump(&self) -> Option<&Arc<Dump>> {
        self.dump.as_ref()
    }

    /// Images, audio and videos of all cases.
    pub fn attachments(&self) -> Vec<Attachment> {
        self.cases().iter().flat_map(|case| case.attachments(self.folder())).collect()
    }

    fn folder(&self) -> &Path {
        self.path.parent().unwrap_or(Path::new(""))
    }

    /// Answers all cases and compares the answers.
    ///
    /// # Errors
    /// Errors of [`Suite::check`].
    pub fn run(&self, model: &mut Model, gate: Gate) -> Result<SuiteReport> {
        let cases = (0..self.cases().len()).map(|index| {
            self.check(model, index, gate, |model, request, _| model.start(request)?.finish())
        });
        let cases = cases.collect::<Result<_>>()?;
        Ok(self.report(model, gate, cases))
    }

    /// Answers the case of this index and compares the answer. `generate` is called with the request, and with the
    /// images, audio and videos of its prompt.
    ///
    /// # Errors
    /// When there is no such case, when its files cannot be read, when generating fails, and when it was cancelled.
    pub fn check(
        &self,
        model: &mut Model,
        index: usize,
        gate: Gate,
        generate: impl FnOnce(&mut Model, &Request, &[Attached]) -> Result<Generation>,
    ) -> Result<CaseReport> {
        let (Some(case), Some(expected)) = (self.cases().get(index), self.arrays.get(index)) else {
            return Err(Error::new(ErrorKind::Usage, format!("the suite has no case {index}")));
        };
        let id = case.name(index);
        let of_case = |e: Error| e.context(format_args!("case {id}"));
        let attachments = case.attachments(self.folder());
        let text = case.prompt.clone().filter(|_| case.prompt_ids.is_none()).unwrap_or_default();
        let (content, attached) =
            media::attach(text, &attachments, model, case.fps).map_err(of_case)?;
        let prompt = match &case.prompt_ids {
            Some(ids) => media::tokens(ids.clone(), &attached),
            None => content.into(),
        };
        let gold = match case.gold.split_last() {
            Some((last, rest)) if model.manifest().params.eos_token_id.contains(last) => rest,
            _ => &case.gold[..],
        };
        let max_new = case.max_new.unwrap_or(case.gold.len());
        model.reset()?;
        let request = Request::greedy(prompt, max_new);
        let generation = generate(model, &request, &attached).map_err(of_case)?;
        // Also where the signal came with the last token, which ends a generation by itself.
        let cancelled = request.cancel.is_cancelled() || model.cancel_token().is_cancelled();
        if cancelled || generation.finish_reason == FinishReason::Cancelled {
            return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
        }
        let mut answer = &generation.tokens[..];
        if generation.finish_reason == FinishReason::Eos {
            answer = answer.split_last().map_or(answer, |(_, rest)| rest);
        }
        let score = Score::of(answer, gold, gold.len() < max_new);
        let made = self.dump.as_ref().map(|dump| dump.take()).unwrap_or_default();
        let arrays = arrays::compare(&made, expected, self.min_cosine());
        let passed = score.passes(gate) && arrays.iter().all(|array| array.passed);
        Ok(CaseReport { id, passed, score, arrays, tokens: generation.tokens })
    }

    /// Sums up the cases that [`Suite::check`] compared.
    pub fn report(&self, model: &Model, gate: Gate, cases: Vec<CaseReport>) -> SuiteReport {
        let cases_passed = cases.iter().filter(|case| case.passed).count();
        let arrays_pass = cases.iter().flat_map(|case| &case.arrays).all(|array| array.passed);
        SuiteReport {
            suite: self.path.clone(),
            model: self.content.model.clone(),
            gate,
            backend: model.backend().name.clone(),
            passed: suite_passes(gate, cases_passed, cases.len()) && arrays_pass,
            cases_passed,
            cases,
        }
    }
}

/// Comparison of a case's answer with its reference.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct CaseReport {
    /// Its name.
    pub id: String,
    /// The gate and all arrays let it pass.
    pub passed: bool,
    /// The answer's tokens beside the reference's.
    #[serde(flatten)]
    pub score: Score,
    /// The arrays beside the reference's.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub arrays: Vec<ArrayReport>,
    /// The answer.
    pub tokens: Vec<u32>,
}

/// Comparison of a suite's answers with their references.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct SuiteReport {
    /// The suite's file.
    pub suite: PathBuf,
    /// The model that its references are of, where it says so.
    pub model: Option<String>,
    /// Gate that judged the answers.
    pub gate: Gate,
    /// The backend that ran the model.
    pub backend: String,
    /// The gate and all arrays let the suite pass.
    pub passed: bool,
    /// Number of cases that passed.
    pub cases_passed: usize,
    /// Each case.
    pub cases: Vec<CaseReport>,
}

impl Case {
    /// Images, audio and videos of the case, of a suite in this folder.
    fn attachments(&self, folder: &Path) -> Vec<Attachment> {
        let of = |modality| {
            move |file: &String| Attachment::from_source(modality, Source::File(folder.join(file)))
        };
        let images = self.images.iter().map(of(Modality::Image));
        let audio = self.audio.iter().map(of(Modality::Audio));
        images.chain(audio).chain(self.videos.iter().map(of(Modality::Video))).collect()
    }

    /// The id, or the position in the suite.
    fn name(&self, index: usize) -> String {
        self.id.clone().unwrap_or_else(|| (index + 1).to_string())
    }
}

/// Comparison of an answer with its reference.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
#[non_exhaustive]
pub struct Score {
    /// It is the reference.
    pub exact: bool,
    /// Index of the first token that differs.
    pub first_difference: Option<usize>,
    /// Edit distance to the reference, as a part of its length.
    pub distance: f64,
    /// Part of the tokens that repeat the one before.
    pub repeats: f64,
}

impl Score {
    /// Compares an answer without its ending token with the reference.
    ///
    /// `whole` is the reference's own end: the answer has to stop there, too.
    pub fn of(answer: &[u32], gold: &[u32], whole: bool) -> Self {
        let common = answer.iter().zip(gold).take_while(|(a, b)| a == b).count();
        let exact = common == gold.len() && (!whole || answer.len() == gold.len());
        let head = answer.get(..gold.len()).unwrap_or(answer);
        let distance = strsim::generic_levenshtein(&head.to_vec(), &gold.to_vec());
        let repeats = head.windows(2).filter(|w| w[0] == w[1]).count();
        Self {
            exact,
            first_difference: (!exact).then_some(common),
            distance: distance as f64 / gold.len().max(1) as f64,
            repeats: repeats as f64 / head.len().saturating_sub(1).max(1) as f64,
        }
    }

    /// True if a gate lets the answer pass.
    pub fn passes(&self, gate: Gate) -> bool {
        match gate {
            Gate::GreedyExact => self.exact,
            Gate::GreedyTol => self.distance <= MAX_DISTANCE && self.repeats < MAX_REPEATS,
        }
    }
}

/// True if a gate lets a suite pass.
fn suite_passes(gate: Gate, passed: usize, cases: usize) -> bool {
    match gate {
        Gate::GreedyExact => passed == cases,
        Gate::GreedyTol => passed as f64 >= MIN_PASSED * cases as f64,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gates() {
        let gold: Vec<u32> = (0..20).collect();
        let score = Score::of(&gold, &gold, false);
        assert!(score.exact && score.passes(Gate::GreedyExact) && score.passes(Gate::GreedyTol));
        let mut two_off = gold.clone();
        two_off[7] = 99;
        two_off[8] = 98;
        let score = Score::of(&two_off, &gold, false);
        assert_eq!(score.first_difference, Some(7));
        assert!(!score.passes(Gate::GreedyExact) && score.passes(Gate::GreedyTol));
        two_off[9] = 97;
        assert!(!Score::of(&two_off, &gold, false).passes(Gate::GreedyTol));
        let repeats = vec![5; 20];
        assert!(!Score::of(&repeats, &repeats, false).passes(Gate::GreedyTol));
    }

    #[test]
    fn an_answer_ends_where_the_reference_ends() {
        assert!(Score::of(&[1, 2, 3], &[1, 2], false).exact);
        assert!(!Score::of(&[1, 2, 3], &[1, 2], true).exact);
        assert!(!Score::of(&[1], &[1, 2], false).exact);
    }

    #[test]
    fn suites() {
        assert!(suite_passes(Gate::GreedyTol, 6, 10) && !suite_passes(Gate::GreedyTol, 5, 10));
        assert!(!suite_passes(Gate::GreedyExact, 9, 10));
    }
}
