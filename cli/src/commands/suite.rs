//! Suites of prompts with reference answers (`npu_suite/v1`), and the gates that judge answers.

use std::collections::BTreeMap;
use std::path::{Component, Path};

use clap::ValueEnum;
use qhx::media::Attachment;
use qhx_core::op::Modality;
use qhx_core::{Error, ErrorKind, Result, files};
use qhx_media::Source;
use serde::{Deserialize, Serialize};

/// The schema that is read.
pub(crate) const SCHEMA: &str = "npu_suite/v1";

/// Largest part of a reference answer that may differ under `greedy_tol`.
pub(crate) const MAX_DISTANCE: f64 = 0.10;
/// Part of immediately repeated tokens from which an answer counts as degenerate.
pub(crate) const MAX_REPEATS: f64 = 0.5;
/// Part of the cases that has to pass under `greedy_tol`.
pub(crate) const MIN_PASSED: f64 = 0.6;
/// Cosine that each row of an array has to have with the reference's, unless the suite says another.
pub(crate) const MIN_COSINE: f64 = 0.999;

/// Longest suite that is read.
const MAX_BYTES: u64 = 64 << 20;

/// How answers are judged.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[value(rename_all = "snake_case")]
pub(crate) enum Gate {
    /// every token of every case is the reference's
    #[default]
    GreedyExact,
    /// at least 0.6 of the cases are within an edit distance of 0.1 and do not repeat themselves
    GreedyTol,
}

impl Gate {
    /// The name in options and reports.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::GreedyExact => "greedy_exact",
            Self::GreedyTol => "greedy_tol",
        }
    }
}

/// A suite file.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Suite {
    pub schema: String,
    #[serde(default)]
    pub model: Option<String>,
    #[serde(default)]
    pub gate: Option<Gate>,
    /// In place of [`MIN_COSINE`].
    #[serde(default)]
    pub min_cosine: Option<f64>,
    pub cases: Vec<Case>,
}

/// A prompt and its reference answer.
#[derive(Debug, Clone, Deserialize)]
pub(crate) struct Case {
    #[serde(default)]
    pub id: Option<String>,
    #[serde(default)]
    pub prompt: Option<String>,
    /// Used instead of `prompt` where it is given.
    #[serde(default)]
    pub prompt_ids: Option<Vec<u32>>,
    /// Images, as paths beside the suite. They stand before the prompt, or where it says `<image>`.
    #[serde(default)]
    pub images: Vec<String>,
    /// Audio, as paths beside the suite. They stand before the prompt behind the images, or where it says `<audio>`.
    #[serde(default)]
    pub audio: Vec<String>,
    /// Folders of frames, or animations, as paths beside the suite. They stand before the prompt behind the audio, or
    /// where it says `<video>`.
    #[serde(default)]
    pub videos: Vec<String>,
    /// Frames of a video that are taken a second, of a folder: that there are.
    #[serde(default)]
    pub fps: Option<f32>,
    /// `.npy` files beside the suite: what the host-op has to make of the prompt, under the names of
    /// `qhx generate --dump`.
    #[serde(default)]
    pub arrays: BTreeMap<String, String>,
    /// Tokens of the reference answer, with or without the one that ends it.
    pub gold: Vec<u32>,
    /// Tokens to generate; as many as the reference has, if not given.
    #[serde(default)]
    pub max_new: Option<usize>,
}

impl Suite {
    /// Reads a suite.
    pub(crate) fn load(path: &Path) -> Result<Self> {
        let fail = |message: String| {
            Error::new(ErrorKind::Artifact, format!("{}: {message}", path.display()))
                .hint(format!("expected a suite of schema {SCHEMA}, see docs/cli.md"))
        };
        let bytes = files::read(ErrorKind::Artifact, path, MAX_BYTES)?;
        let suite: Self =
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
        Ok(suite)
    }
}

impl Case {
    /// Images, audio and videos of the case, of a suite in this folder.
    pub(crate) fn attachments(&self, folder: &Path) -> Vec<Attachment> {
        let of = |modality| {
            move |file: &String| Attachment::from_source(modality, Source::File(folder.join(file)))
        };
        let images = self.images.iter().map(of(Modality::Image));
        let audio = self.audio.iter().map(of(Modality::Audio));
        images.chain(audio).chain(self.videos.iter().map(of(Modality::Video))).collect()
    }

    /// The id, or the position in the suite.
    pub(crate) fn name(&self, index: usize) -> String {
        self.id.clone().unwrap_or_else(|| (index + 1).to_string())
    }
}

/// How an answer compares with its reference.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub(crate) struct Score {
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
    pub(crate) fn of(answer: &[u32], gold: &[u32], whole: bool) -> Self {
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

    /// Whether a gate lets the answer pass.
    pub(crate) fn passes(&self, gate: Gate) -> bool {
        match gate {
            Gate::GreedyExact => self.exact,
            Gate::GreedyTol => self.distance <= MAX_DISTANCE && self.repeats < MAX_REPEATS,
        }
    }
}

/// Whether a gate lets a suite pass.
pub(crate) fn suite_passes(gate: Gate, passed: usize, cases: usize) -> bool {
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
