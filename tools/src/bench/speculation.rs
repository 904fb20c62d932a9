//! Gain of speculative decoding: the same answers token by token and with draft tokens, in turns.

use std::ops::ControlFlow;

use qhx_base::{Error, ErrorKind, Result};
use qhx_core::engine::{DraftCounts, FinishReason, Generation, Model, Prompt, Request, Speculate};
use qhx_core::op::Task;
use qhx_core::sampling::SamplingParams;
use serde::{Deserialize, Serialize};

use super::{Measured, Spread};

/// Tokens of the prompt, where the context holds as many.
pub(super) const PROMPT: usize = 64;
/// Tokens after which the prompt of [`Text::Repeats`] begins again.
const PERIOD: usize = 8;

/// Kind of prompt and answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Text {
    /// A prompt that repeats, whose most likely continuation is taken.
    Repeats,
    /// A prompt that does not, and an answer that is drawn at temperature 1.
    Varies,
}

/// An answer that is measured both ways.
#[derive(Debug)]
pub(super) struct Answer {
    text: Text,
    prompt: Vec<u32>,
    /// Tokens that are stepped to.
    tokens: usize,
    speculate: Speculate,
    /// Seconds of plain decoding, and of speculative decoding.
    seconds: [Vec<f64>; 2],
    /// Steps of speculative decoding, and the draft tokens verified in them.
    steps: usize,
    drafts: DraftCounts,
    /// The first token at which an answer of speculative decoding was another one.
    differs_at: Option<usize>,
}

/// Result of speculative decoding, beside the same answer by plain decoding.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Speculated {
    /// Rate of the same answer token by token.
    pub plain_tokens_per_second: Spread,
    /// Speed-up over plain decoding: the median of the turns.
    pub times_plain: f64,
    /// The worst turn.
    pub least_times_plain: f64,
    /// Tokens of the answer that a step of the model gave.
    pub tokens_per_step: f64,
    /// Draft tokens that were verified.
    pub drafted: usize,
    /// Number of draft tokens that were accepted.
    pub accepted: usize,
    /// Share of the draft tokens that were accepted; none where there were none.
    pub acceptance: Option<f64>,
    /// The first token at which an answer with draft tokens was another one: graphs of several rows round otherwise
    /// than those of one, and two tokens were almost as likely.
    #[serde(skip)]
    pub differs_at: Option<usize>,
}

/// The answers of `tokens` tokens for a model that takes `most` positions; `varied` are tokens that it knows.
pub(super) fn answers(
    model: &mut Model,
    speculate: Speculate,
    (tokens, most): (usize, usize),
    varied: &[u32],
) -> Result<Vec<Answer>> {
    if !model.op().description.tasks.contains(&Task::Generate) {
        let what = "option --speculate: the bundle does not generate";
        return Err(Error::new(ErrorKind::Usage, what));
    }
    if let Some(why) = &model.info().verification.refusal {
        return Err(Error::new(
            ErrorKind::Usage,
            format!("option --speculate: no draft tokens can be verified: {why}"),
        ));
    }
    // The last token is chosen and not consumed.
    let room = most.saturating_sub(tokens);
    if room == 0 || varied.is_empty() {
        return Err(Error::new(
            ErrorKind::Usage,
            format!(
                "option --speculate: a context of {most} has no room for {tokens} tokens behind a prompt"
            ),
        ));
    }
    let length = PROMPT.min(room);
    let answer = |text| {
        let period = if text == Text::Repeats { PERIOD.min(varied.len()) } else { varied.len() };
        Answer {
            text,
            prompt: varied[..period].iter().copied().cycle().take(length).collect(),
            tokens,
            speculate,
            seconds: [Vec::new(), Vec::new()],
            steps: 0,
            drafts: DraftCounts::default(),
            differs_at: None,
        }
    };
    Ok([Text::Repeats, Text::Varies].map(answer).into())
}

impl Answer {
    /// Such as `repeats64`.
    pub fn name(&self) -> String {
        match self.text {
            Text::Repeats => format!("repeats{}", self.tokens),
            Text::Varies => format!("varies{}", self.tokens),
        }
    }

    /// Answers both ways; the first to go changes from turn to turn. Turn 0 does not count.
    pub fn take_turn(&mut self, model: &mut Model, turn: u16) -> Result<()> {
        let mut answers: [Vec<u32>; 2] = Default::default();
        for place in 0..2 {
            let way = (place + usize::from(turn)) % 2;
            let speculate = if way == 0 { Speculate::Off } else { self.speculate };
            let found = self.generate(model, speculate, turn)?;
            if turn > 0 {
                self.seconds[way].push(found.timings.decode.as_secs_f64());
                if way == 1 {
                    let DraftCounts { verifications, drafted, accepted } = found.timings.drafts;
                    self.steps += found.timings.decode_steps;
                    self.drafts.verifications += verifications;
                    self.drafts.drafted += drafted;
                    self.drafts.accepted += accepted;
                }
            }
            answers[way] = found.tokens;
        }
        let [plain, drafted] = &answers;
        if plain != drafted {
            let same = plain.iter().zip(drafted).take_while(|(a, b)| a == b).count();
            self.differs_at.get_or_insert(same);
        }
        Ok(())
    }

    fn generate(&self, model: &mut Model, speculate: Speculate, turn: u16) -> Result<Generation> {
        let (temperature, seed) = match self.text {
            Text::Repeats => (0.0, None),
            Text::Varies => (1.0, Some(u64::from(turn))),
        };
        let sampling = SamplingParams::default().temperature(temperature).seed(seed);
        let request = Request::greedy(Prompt::Tokens(self.prompt.clone()), self.tokens + 1)
            .sampling(sampling)
            .ignore_eos(true)
            .speculate(speculate);
        model.reset()?;
        let found = model.generate(&request, &mut |_| ControlFlow::Continue(()))?;
        if found.finish_reason == FinishReason::Cancelled {
            return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
        }
        Ok(found)
    }

    /// Result of the test.
    pub fn measured(&self) -> Measured {
        let rate = |seconds: &f64| self.tokens as f64 / seconds.max(1e-9);
        let [plain, drafted] = &self.seconds;
        let mut times: Vec<_> = plain.iter().zip(drafted).map(|(a, b)| a / b.max(1e-9)).collect();
        times.sort_by(f64::total_cmp);
        let DraftCounts { drafted: asked, accepted, .. } = self.drafts;
        Measured {
            name: self.name(),
            tokens: self.tokens,
            ms: Spread::of(drafted.iter().map(|s| s * 1e3)),
            tokens_per_second: Spread::of(drafted.iter().map(rate)),
            audio: None,
            speculated: Some(Speculated {
                plain_tokens_per_second: Spread::of(plain.iter().map(rate)),
                times_plain: median(&times),
                least_times_plain: times.first().copied().unwrap_or_default(),
                tokens_per_step: (self.steps + accepted) as f64 / self.steps.max(1) as f64,
                drafted: asked,
                accepted,
                acceptance: (asked > 0).then(|| accepted as f64 / asked as f64),
                differs_at: self.differs_at,
            }),
            ratio: None,
        }
    }
}

/// The middle of sorted numbers.
fn median(sorted: &[f64]) -> f64 {
    let at = |index: usize| sorted.get(index).copied().unwrap_or_default();
    (at(sorted.len() / 2) + at(sorted.len().saturating_sub(1) / 2)) / 2.0
}
