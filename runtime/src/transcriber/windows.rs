//! Audio of any length for a model that gives times: from window to window by the last complete segment, as
//! `WhisperGenerationMixin.generate` of `transformers` does with `return_timestamps=True` (Radford et al. 2022,
//! arXiv 2212.04356, section 3.8).
//!
//! One difference: the features of a window are those of its own samples, and not cut from the features of the whole,
//! so that audio can be transcribed while it is recorded.

use qhx_base::{CancelToken, ErrorKind, Result, bail};
use qhx_core::engine::{FinishReason, Generation, Part, Prompt, Request};
use qhx_core::manifest::{Spelling, TimeTokens, Transcription};
use qhx_core::op::Segment;
use qhx_types::Media;

use super::limits::{Verdict, ratio};
use super::{
    Chunk, Found, Live, STEPS_A_SECOND, Scores, Settled, Times, TranscribeEvent, Transcriber,
    Transcript, media, most,
};

/// Seconds that a window is looked for up to.
const MAX_WINDOW: usize = 60;
/// Above this temperature, words are nothing to go on from.
const WILD: f32 = 0.5;

/// A part of a window's answer.
#[derive(Debug, PartialEq)]
struct Spoken {
    /// Steps of time from the beginning of the window.
    start: u32,
    end: u32,
    ids: Vec<u32>,
}

/// Parts of a window's answer, and number of time steps from this window to the next one. `None` if the answer does not
/// say: the next window then begins after the whole one.
fn parts(answer: &[u32], times: TimeTokens, window: u32) -> (Vec<Spoken>, Option<u32>) {
    let is_time = |id: &u32| *id >= times.first;
    let step = |id: u32| id.saturating_sub(times.first);
    let single = matches!(answer, [.., last, end] if !is_time(last) && is_time(end));
    let pairs = answer.windows(2).enumerate();
    let mut ends: Vec<usize> =
        pairs.filter(|(_, pair)| pair.iter().all(is_time)).map(|(at, _)| at + 1).collect();
    let Some(last) = ends.last_mut() else {
        let latest = answer.iter().rev().find(|id| is_time(id)).map(|id| step(*id));
        let end = latest.filter(|latest| *latest > 0).unwrap_or(window);
        return (vec![Spoken { start: 0, end, ids: answer.to_vec() }], None);
    };
    let next = if single { None } else { answer.get(*last - 1).map(|id| step(*id)) };
    if single {
        ends.push(answer.len());
    } else {
        *last += 1;
    }
    let (mut found, mut first) = (Vec::new(), 0);
    for (index, &end) in ends.iter().enumerate() {
        let ids = answer.get(first..end).unwrap_or_default();
        // The last part has the beginning of what follows behind it.
        let behind = if index + 1 == ends.len() && !single { 2 } else { 1 };
        let time = |id: Option<&u32>| id.map_or(0, |id| step(*id));
        let last = ids.len().checked_sub(behind).and_then(|at| ids.get(at));
        found.push(Spoken { start: time(ids.first()), end: time(last), ids: ids.to_vec() });
        first = end;
    }
    (found, next)
}

impl Transcriber {
    /// Has the model transcribe one window after another.
    pub(super) fn windows(
        &mut self,
        mut live: Live<'_>,
        cancel: &CancelToken,
        mut on_event: impl FnMut(TranscribeEvent<'_>),
    ) -> Result<Transcript> {
        let Some(times) = self.instruction.times else {
            bail!(Internal, "a model without times");
        };
        let rate = live.rate;
        let window = self.window(rate)?;
        let step = ((times.step * f64::from(rate)).round() as usize).max(1);
        let mut transcript =
            Transcript { language: self.options.language.clone(), ..Transcript::default() };
        let mut before: Vec<u32> = Vec::new();
        // Samples before the window.
        let mut seek = 0;
        let (mut shown, mut settled) = (false, Settled::default());
        loop {
            while live.len() < seek + window && !cancel.is_cancelled() && live.read()? {}
            let all = live.len();
            transcript.seconds = live.seconds();
            let rest = live.part(seek..all);
            // Less than half a step is no frame.
            if rest.len() <= step / 2 && !(all > 0 && seek == 0) {
                break;
            }
            if !shown && all > window {
                on_event(TranscribeEvent::Chunks {
                    count: live.expected().div_ceil(window),
                    seconds: live.expected() as f64 / f64::from(rate.max(1)),
                    longest: window as f64 / f64::from(rate.max(1)),
                    overlap: 0.0,
                });
                shown = true;
            }
            let here = rest.len().min(window);
            let clip = media(rest.get(..here).unwrap_or_default(), rate)?;
            on_event(TranscribeEvent::Begin);
            let timed = self.options.times != Times::None || all > window;
            let Some(said) =
                self.window_said(&clip, timed, &mut transcript, &before, cancel, &mut on_event)?
            else {
                seek += here;
                continue;
            };
            let WindowSaid { ids, finish_reason, wild, found, spoken_at, scores } = said;
            let seconds = |samples: usize| samples as f64 / f64::from(rate.max(1));
            let from = live.begins(seconds(seek));
            let scores = scores.map(|scores| Scores { seek: from, ..scores });
            transcript.note([from, live.ends(seconds(seek + here))], found);
            let (spoken, next) = parts(&ids, times, (here / step) as u32);
            if wild {
                before.clear();
            }
            let mut spoken_at = spoken_at.into_iter();
            for part in spoken {
                let words: Vec<u32> =
                    part.ids.iter().copied().filter(|id| *id < times.end).collect();
                let aligned = part.ids.iter().zip(spoken_at.by_ref());
                let aligned = aligned.filter(|(id, _)| **id < times.end).map(|(_, time)| time);
                let aligned: Vec<[f32; 2]> = aligned.collect();
                if self.options.condition_on_previous && !wild {
                    before.extend(&part.ids);
                }
                let text = self.decoded(&words)?;
                transcript.text.push_str(&text);
                let at = |steps: u32| seconds(seek + steps as usize * step);
                let (start, end) = (live.begins(at(part.start)), live.ends(at(part.end)));
                let text = text.trim().to_owned();
                if text.is_empty() {
                    continue;
                }
                if self.options.times == Times::Word {
                    let steps = |time: f32| (f64::from(time) / times.step).round() as u32;
                    let aligned = aligned.iter().map(|time| time.map(|time| at(steps(time))));
                    let aligned = aligned.map(|[from, to]| [live.begins(from), live.ends(to)]);
                    let (aligned, language) =
                        (aligned.collect::<Vec<_>>(), transcript.language.as_deref());
                    let words = self.aligned_words(&words, &aligned, language)?;
                    transcript.words.extend(words);
                }
                let (tokens, ids) = (part.ids.len(), part.ids);
                let chunk = Chunk { start, end, text, finish_reason, tokens, ids, scores };
                on_event(TranscribeEvent::Done(&chunk));
                transcript.chunks.push(chunk);
                // White space around the whole is no part of it.
                let all = &transcript.text;
                settled.0 = settled.0.max(all.len() - all.trim_start().len());
                settled.until(all, all.trim_end().len(), &mut on_event);
            }
            if finish_reason == FinishReason::Cancelled || cancel.is_cancelled() {
                transcript.cancelled = true;
                break;
            }
            // A window that leads nowhere would come again for ever.
            let next = next.map(|steps| steps as usize * step).filter(|next| *next > 0);
            seek += next.unwrap_or(here).min(here);
            live.forget(seek);
        }
        if transcript.seconds == 0.0 {
            bail!(Prompt, "holds no audio (0 samples)");
        }
        transcript.text = transcript.text.trim().to_owned();
        Ok(transcript)
    }

    /// The most samples that the model takes at once.
    fn window(&mut self, rate: u32) -> Result<usize> {
        let step = (rate as usize / STEPS_A_SECOND).max(1);
        let silence = vec![0.0; step * STEPS_A_SECOND * MAX_WINDOW];
        let model = &mut self.model;
        most(step, silence.len(), &mut |samples| {
            let samples = silence.get(..samples).unwrap_or(&silence);
            model.op_mut().place(Segment::Audio { samples, rate }).map(drop)
        })
    }

    /// Words of a window; `None` if nobody speaks.
    fn window_said(
        &mut self,
        clip: &Media,
        timed: bool,
        transcript: &mut Transcript,
        before: &[u32],
        cancel: &CancelToken,
        on_event: &mut impl FnMut(TranscribeEvent<'_>),
    ) -> Result<Option<WindowSaid>> {
        let Transcription { languages, tasks, times, no_speech, previous, .. } =
            self.instruction.clone();
        self.model.reset()?;
        let prompted = self.before(previous, before)?;
        let begin = |behind: Vec<u32>| {
            let parts =
                [Part::Tokens(prompted.clone()), Part::Media(clip.clone()), Part::Tokens(behind)];
            let filled = |part: &Part| !matches!(part, Part::Tokens(tokens) if tokens.is_empty());
            Prompt::Parts(parts.into_iter().filter(filled).collect())
        };
        let limits = self.options.limits.clone();
        let listens = transcript.language.is_none() && !languages.is_empty();
        let mut silence = None;
        if listens || (limits.no_speech.is_some() && no_speech.is_some()) {
            let vocab = self.model.info().vocab as u32;
            let all: Vec<u32> = (0..vocab).collect();
            let logits = match self.model.next_logits(&begin(Vec::new()), &all, cancel) {
                Err(e) if e.kind() == ErrorKind::Cancelled => {
                    return Ok(Some(WindowSaid::cancelled()));
                }
                logits => logits?,
            };
            let of = |id: u32| logits.get(id as usize).copied().unwrap_or(f32::NEG_INFINITY);
            silence = no_speech.map(|id| share(&logits, of(id)));
            if listens {
                let tokens = languages.iter().filter_map(|(code, of)| Some((code, of.token()?)));
                let likeliest = tokens.max_by(|a, b| of(a.1).total_cmp(&of(b.1)));
                transcript.language = likeliest.map(|(code, _)| code.clone());
            }
        }
        let token = |spelling: Option<&Spelling>| spelling.and_then(Spelling::token);
        let language = transcript.language.as_ref().and_then(|code| token(languages.get(code)));
        let task = self.options.task.as_deref().unwrap_or("transcribe");
        let none = times.filter(|_| !timed).map(|times| times.none);
        let head: Vec<u32> =
            language.into_iter().chain(token(tasks.get(task))).chain(none).collect();
        let vocab = self.model.info().vocab;
        let mut said = None;
        for &temperature in &limits.temperatures {
            let request = Request::greedy(begin(head.clone()), self.options.max_new)
                .temperature(temperature)
                .seed(0)
                .logprobs(Some(0))
                .cancelled_by(cancel.clone());
            let mut run = self.model.start(&request)?;
            while run.next_event()?.is_some() {
                on_event(TranscribeEvent::Token);
            }
            let Generation { mut tokens, logprobs, finish_reason, .. } = run.finish()?;
            let sum: f64 = logprobs.iter().map(|one| f64::from(one.logprob)).sum();
            let mean = sum / tokens.len().max(1) as f64;
            let verdict = limits.judge(&tokens, vocab, mean, silence.unwrap_or(0.0));
            if times.is_some_and(|times| tokens.last() == Some(&times.end)) {
                tokens.pop();
            }
            if verdict == Verdict::Leave {
                return Ok(None);
            }
            let ended = finish_reason == FinishReason::Cancelled || verdict == Verdict::Keep;
            let (found, wild) = (self.found(finish_reason)?, temperature >= WILD);
            let words: Vec<u32> = match times {
                Some(times) => tokens.iter().copied().filter(|id| *id < times.end).collect(),
                None => tokens.clone(),
            };
            let scores = Some(Scores {
                seek: 0.0,
                temperature,
                avg_logprob: mean,
                compression_ratio: ratio(self.decoded(&words)?.trim().as_bytes()),
                no_speech_prob: silence,
            });
            let (ids, spoken_at) = (tokens, Vec::new());
            said = Some(WindowSaid { ids, finish_reason, wild, found, spoken_at, scores });
            if ended {
                break;
            }
        }
        let wanted = |said: &&mut WindowSaid| {
            self.options.times == Times::Word && said.finish_reason != FinishReason::Cancelled
        };
        let Some(found) = said.as_mut().filter(wanted) else { return Ok(said) };
        match self.model.align(&begin(head), &found.ids, cancel) {
            Err(e) if e.kind() == ErrorKind::Cancelled => Ok(Some(WindowSaid::cancelled())),
            times => {
                found.spoken_at = times?;
                Ok(said)
            }
        }
    }

    /// Tokens in front of the audio: what was said before, half of the context at most.
    fn before(&self, previous: Option<u32>, before: &[u32]) -> Result<Vec<u32>> {
        let Some(previous) = previous else { return Ok(Vec::new()) };
        let mut tokens = match &self.options.prompt {
            Some(prompt) if before.is_empty() => {
                self.tokenizer()?.encode(&format!(" {}", prompt.trim()), false)?
            }
            _ => before.to_vec(),
        };
        let room = (self.model.info().max_ctx / 2).saturating_sub(1);
        tokens.drain(..tokens.len().saturating_sub(room));
        if !tokens.is_empty() {
            tokens.insert(0, previous);
        }
        Ok(tokens)
    }
}

/// Words and findings of a window.
struct WindowSaid {
    /// Its tokens, without the one that ends them.
    ids: Vec<u32>,
    finish_reason: FinishReason,
    /// The temperature was so high that nothing goes on from it.
    wild: bool,
    /// Findings of the op besides the words.
    found: Found,
    /// Seconds of the window between which each token is spoken; empty unless they are asked for.
    spoken_at: Vec<[f32; 2]>,
    /// Scores, but for the place of the window; none of one that was cancelled.
    scores: Option<Scores>,
}

impl WindowSaid {
    fn cancelled() -> Self {
        let (ids, found, spoken_at) = (Vec::new(), Found::new(), Vec::new());
        let finish_reason = FinishReason::Cancelled;
        Self { ids, finish_reason, wild: false, found, spoken_at, scores: None }
    }
}

/// The probability of a logit among all of them.
fn share(logits: &[f32], of: f32) -> f64 {
    let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
    let weight = |logit: f32| f64::from(logit - max).exp();
    let total: f64 = logits.iter().map(|logit| weight(*logit)).sum();
    weight(of) / total
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Times from 100 on, the end is 50.
    const TIMES: TimeTokens = TimeTokens { first: 100, none: 99, end: 50, step: 0.02 };

    fn found(answer: &[u32]) -> (Vec<(u32, u32, usize)>, Option<u32>) {
        let (parts, next) = parts(answer, TIMES, 75);
        (parts.into_iter().map(|part| (part.start, part.end, part.ids.len())).collect(), next)
    }

    /// Same division as `_retrieve_segment` makes.
    #[test]
    fn an_answer_is_divided_at_its_pairs_of_times() {
        assert_eq!(found(&[101, 1, 2, 110, 110, 3]), (vec![(1, 10, 5)], Some(10)));
        let two = vec![(1, 10, 3), (12, 30, 3)];
        assert_eq!(found(&[101, 1, 110, 112, 3, 130]), (two, None));
        let three = vec![(0, 10, 3), (12, 30, 4)];
        assert_eq!(found(&[100, 1, 110, 112, 3, 130, 131, 4]), (three, Some(30)));
        assert_eq!(found(&[103, 1, 2]), (vec![(0, 3, 3)], None));
        assert_eq!(found(&[100, 1, 2]), (vec![(0, 75, 3)], None));
        assert_eq!(found(&[1, 2]), (vec![(0, 75, 2)], None));
        assert_eq!(found(&[]), (vec![(0, 75, 0)], None));
    }

    #[test]
    fn a_share_is_the_probability_of_a_logit() {
        assert!((share(&[0.0, 0.0, 0.0, 0.0], 0.0) - 0.25).abs() < 1e-9);
        assert!(share(&[0.0, 1000.0], 0.0) < 1e-9);
    }
}
