//! Speculative decoding over an op that is a small language model: each token by the two before it.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};

use super::super::speculate::{Drafter, Start};
use super::*;
use crate::op::Verification;
use crate::sampling::Rng;

/// Logits by the last two tokens, from a seed; their spread is `sharp`.
fn logits_after(seed: u64, sharp: f32, tokens: &[u32]) -> Vec<f32> {
    logits_of(VOCAB, seed, sharp, tokens)
}

fn logits_of(vocab: usize, seed: u64, sharp: f32, tokens: &[u32]) -> Vec<f32> {
    let last = |back: usize| tokens.iter().rev().nth(back).map_or(9, |&token| u64::from(token));
    let mut rng = Rng::new(seed ^ (last(0) * 31 + last(1) * 977));
    (0..vocab).map(|_| rng.below(1 << 16) as f32 / 65536.0 * sharp).collect()
}

/// The op: its state is the text itself.
pub(super) struct Chain {
    pub info: OpenInfo,
    seed: u64,
    sharp: f32,
    logits: Vec<f32>,
    checked: Option<Vec<u32>>,
    saved: Vec<Vec<u32>>,
    pub text: Arc<Mutex<Vec<u32>>>,
    /// Number of tokens of each call that consumed some.
    pub calls: Arc<Mutex<Vec<usize>>>,
    /// Which `verify` fails, counting from 1, and as what.
    fails: Option<(usize, ErrorKind)>,
    verified: usize,
    /// Prompts are cancelled from now on.
    stops: Arc<AtomicBool>,
}

impl Chain {
    pub(super) fn new(seed: u64) -> Self {
        let verification = Verification { widths: vec![4, 16], refusal: None };
        let info = OpenInfo {
            vocab: VOCAB,
            max_ctx: 64,
            can_truncate: true,
            verification,
            ..OpenInfo::default()
        };
        Self {
            info,
            seed,
            sharp: 6.0,
            logits: Vec::new(),
            checked: None,
            saved: Vec::new(),
            text: Arc::default(),
            calls: Arc::default(),
            fails: None,
            verified: 0,
            stops: Arc::default(),
        }
    }

    fn recurrent(mut self) -> Self {
        (self.info.can_truncate, self.info.can_snapshot) = (false, true);
        self
    }

    fn take(&mut self, tokens: &[u32]) {
        self.checked = None;
        self.calls.lock().unwrap().push(tokens.len());
        let mut text = self.text.lock().unwrap();
        text.extend_from_slice(tokens);
        assert!(text.len() <= self.info.max_ctx, "beyond the context");
        self.logits = logits_of(self.info.vocab, self.seed, self.sharp, &text);
    }
}

impl HostOp for Chain {
    fn info(&self) -> &OpenInfo {
        &self.info
    }

    fn place(&self, segment: Segment<'_>) -> Result<Placement> {
        panic!("{segment:?}")
    }

    fn call(&mut self, call: Call<'_>) -> Result<Reply<()>> {
        match call {
            Call::Reset => self.text.lock().unwrap().clear(),
            Call::Prefill(_) if self.stops.load(Ordering::Relaxed) => {
                return Err(Error::new(ErrorKind::Cancelled, "cancelled"));
            }
            Call::Prefill(segments) => {
                for segment in segments {
                    let Segment::Tokens(tokens) = segment else { panic!("{segment:?}") };
                    self.take(tokens);
                }
            }
            Call::Decode(token) => self.take(&[token]),
            Call::Verify(tokens) => {
                self.verified += 1;
                if let Some((_, kind)) = self.fails.filter(|(call, _)| *call == self.verified) {
                    return Err(Error::new(kind, "it was to fail"));
                }
                assert!(tokens.len() <= 16 && tokens.len() + self.position() <= self.info.max_ctx);
                self.checked = Some(tokens.to_vec());
            }
            Call::RowLogits(row) => {
                let tokens = &self.checked.as_ref().unwrap()[..=row];
                let text = [self.text.lock().unwrap().as_slice(), tokens].concat();
                self.logits = logits_of(self.info.vocab, self.seed, self.sharp, &text);
            }
            Call::Accept(count) => {
                let tokens = self.checked.take().unwrap();
                self.take(&tokens[..count]);
            }
            Call::Truncate(position) => {
                assert!(self.info.can_truncate);
                self.text.lock().unwrap().truncate(position);
            }
            Call::Snapshot => {
                self.saved.push(self.text.lock().unwrap().clone());
                return Ok(Reply::Saved(SnapshotId(self.saved.len() as u64 - 1)));
            }
            Call::Restore(snapshot) => {
                *self.text.lock().unwrap() = self.saved[snapshot.0 as usize].clone();
            }
            Call::DropSnapshot(_) | Call::Embed(_) => {}
            _ => return Err(unsupported(&call)),
        }
        Ok(if call.gives_floats() { Reply::Floats(()) } else { Reply::Done })
    }

    fn logits(&self) -> Result<Logits<'_>> {
        Ok(Logits::F32(&self.logits))
    }

    fn values(&self) -> Result<&[f32]> {
        Ok(&self.logits)
    }

    fn position(&self) -> usize {
        self.text.lock().unwrap().len()
    }
}

/// Draft tokens from a list: what the whole answer is, or never right.
pub(super) struct Oracle {
    pub answer: Vec<u32>,
    /// Added to each draft token, modulo the vocabulary.
    pub off: u32,
    pub vocab: u32,
    pub pushed: usize,
}

impl Drafter for Oracle {
    fn name(&self) -> &str {
        "oracle"
    }

    fn begin(&mut self, _start: &Start<'_>) -> Result<()> {
        self.pushed = 0;
        Ok(())
    }

    fn push(&mut self, _token: u32) {
        self.pushed += 1;
    }

    fn draft(&mut self, max: usize, _rng: &Rng, drafts: &mut Vec<u32>) -> Result<()> {
        let rest = self.answer.iter().skip(self.pushed).take(max);
        drafts.extend(rest.map(|token| (token + self.off) % self.vocab));
        Ok(())
    }
}

pub(super) fn tokens(count: usize) -> Speculate {
    Speculate::Tokens(NonZeroUsize::new(count).unwrap())
}

fn ways() -> [Request; 4] {
    let greedy = request(&[1, 2, 1, 2], 40);
    let sampling = |temperature: f32| SamplingParams { temperature, ..SamplingParams::default() };
    let drawn = Request { sampling: sampling(0.7), ..greedy.clone() };
    let filtered = SamplingParams { top_k: 5, top_p: 0.9, min_p: 0.02, ..sampling(1.3) };
    let penalised = sampling(0.9).repetition_penalty(1.2).frequency_penalty(0.3).penalty_window(9);
    let filtered = Request { sampling: filtered, ..greedy.clone() };
    [greedy.clone(), drawn, filtered, Request { sampling: penalised, stop_ids: vec![6], ..greedy }]
}

#[test]
fn drafts_change_no_token_and_leave_the_plain_state() {
    let mut accepted = [0; 4];
    for seed in 0..4 {
        for (way, base) in ways().into_iter().enumerate() {
            let mut request = base;
            request.sampling.seed = Some(seed);
            // Budgets at the edge of the context of 64, and below.
            for max_new in [1, 2, 7, 60, 61, 62, 100] {
                request.max_new = max_new;
                let run = |op: Chain, speculate: Speculate| {
                    let text = Arc::clone(&op.text);
                    let mut model = open(op);
                    let request = Request { speculate, ..request.clone() };
                    let generation = generate(&mut model, &request).unwrap();
                    let state = text.lock().unwrap().clone();
                    (generation, state)
                };
                let (plain, state) = run(Chain::new(seed), Speculate::Off);
                assert_eq!(plain.timings.drafts, DraftCounts::default());
                for mode in [tokens(1), tokens(3), tokens(15), tokens(64), Speculate::Auto] {
                    for op in [Chain::new(seed), Chain::new(seed).recurrent()] {
                        let (generation, its) = run(op, mode);
                        let case = format!("seed {seed}, way {way}, {max_new} tokens, {mode:?}");
                        assert_eq!(generation.tokens, plain.tokens, "{case}");
                        assert_eq!(generation.finish_reason, plain.finish_reason, "{case}");
                        assert_eq!(its, state, "{case}");
                        let DraftCounts { verifications, drafted, accepted: right } =
                            generation.timings.drafts;
                        assert!(right <= drafted && verifications <= drafted, "{case}");
                        let steps = generation.timings.decode_steps;
                        assert_eq!(steps + right, plain.timings.decode_steps, "{case}");
                        accepted[way] += right;
                    }
                }
            }
        }
    }
    assert!(accepted.iter().all(|&right| right > 10), "{accepted:?}");
}

#[test]
fn right_drafts_save_steps_and_wrong_ones_only_cost_them() {
    let base = request(&[1, 2], 41);
    let plain = generate(&mut open(Chain::new(5)), &base).unwrap();
    for (off, speculate, expected) in [
        // 40 tokens are consumed: 10 steps of 4.
        (0, tokens(3), DraftCounts { verifications: 10, drafted: 30, accepted: 30 }),
        (0, tokens(1), DraftCounts { verifications: 20, drafted: 20, accepted: 20 }),
        (0, tokens(64), DraftCounts { verifications: 3, drafted: 37, accepted: 37 }),
        // The last token is not drafted: the budget ends with it.
        (1, tokens(1), DraftCounts { verifications: 39, drafted: 39, accepted: 0 }),
    ] {
        let mut model = open(Chain::new(5));
        let answer = plain.tokens.clone();
        model.set_drafter(Box::new(Oracle { answer, off, vocab: VOCAB as u32, pushed: 0 }));
        let found = generate(&mut model, &Request { speculate, ..base.clone() }).unwrap();
        assert_eq!(found.tokens, plain.tokens, "{off} {speculate:?}");
        assert_eq!(found.timings.drafts, expected, "{off} {speculate:?}");
    }
}

#[test]
fn stop_texts_events_and_reuse_see_draft_tokens_like_others() {
    let base = request(&[1, 2], 30);
    let plain = generate(&mut open_with_words(Chain::new(5), &LETTERS), &base).unwrap();
    let letters: Vec<char> = plain.text.chars().collect();
    for at in 1..letters.len() - 2 {
        let stop: String = letters[at..at + 2].iter().collect();
        let request = Request { stop: vec![stop.clone()], ..base.clone() };
        let expected = generate(&mut open_with_words(Chain::new(5), &LETTERS), &request).unwrap();
        let op = Chain::new(5);
        let text = Arc::clone(&op.text);
        let mut model = open_with_words(op, &LETTERS);
        let answer = plain.tokens.clone();
        model.set_drafter(Box::new(Oracle { answer, off: 0, vocab: VOCAB as u32, pushed: 0 }));
        let request = Request { speculate: tokens(7), ..request };
        let found = generate(&mut model, &request).unwrap();
        assert_eq!((&found.text, &found.tokens), (&expected.text, &expected.tokens), "{stop}");
        assert_eq!(found.finish_reason, FinishReason::Stop);
        let state = [&[1, 2], &found.tokens[..found.tokens.len() - 1]].concat();
        assert_eq!(*text.lock().unwrap(), state, "{stop}");

        // Broken off at any token, the next request goes on from there.
        let mut left = at;
        let broken = model.generate(&Request { stop: Vec::new(), ..request }, &mut |event| {
            left -= usize::from(matches!(event, Event::Token { .. }));
            if left == 0 { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        });
        let broken = broken.unwrap();
        assert_eq!(broken.finish_reason, FinishReason::Cancelled);
        assert_eq!(broken.tokens, plain.tokens[..at]);
        let longer = [&[1, 2], &plain.tokens[..at], &[3]].concat();
        let next = generate(&mut model, &super::request(&longer, 1)).unwrap();
        assert_eq!(next.reused_tokens, at + 1, "all but the token chosen last and the new one");
    }
}

#[test]
fn a_step_that_fails_leaves_the_state_before_it() {
    for (kind, ends) in [(ErrorKind::Cancelled, true), (ErrorKind::Execute, false)] {
        let op = Chain { fails: Some((2, kind)), ..Chain::new(5) };
        let text = Arc::clone(&op.text);
        let mut model = open(op);
        let plain = generate(&mut open(Chain::new(5)), &request(&[1, 2], 30)).unwrap();
        let answer = plain.tokens.clone();
        model.set_drafter(Box::new(Oracle { answer, off: 0, vocab: VOCAB as u32, pushed: 0 }));
        let request = Request { speculate: tokens(3), ..request(&[1, 2], 30) };
        match generate(&mut model, &request) {
            Ok(generation) => {
                assert!(ends && generation.finish_reason == FinishReason::Cancelled);
                assert_eq!(generation.tokens, plain.tokens[..5]);
            }
            Err(e) => assert!(!ends && e.kind() == kind, "{e}"),
        }
        assert_eq!(*text.lock().unwrap(), [&[1, 2], &plain.tokens[..4]].concat());
        // The next run uses what is there.
        let again = generate(&mut model, &request).unwrap();
        assert_eq!(again.tokens, plain.tokens);
    }
}

#[test]
fn an_op_without_verification_decodes_plainly() {
    let plain = generate(&mut open(Chain::new(5)), &request(&[1, 2], 30)).unwrap();
    let hostile = vec![0, 1, usize::MAX, 4, 4];
    for (widths, drafts) in [(Vec::new(), false), (vec![0, 1], false), (hostile, true)] {
        let verification = Verification { widths, refusal: Some("it is of yesterday".to_owned()) };
        let mut op = Chain::new(5);
        op.info.verification = verification;
        let mut model = open(op);
        for _ in 0..2 {
            let request = Request { speculate: tokens(3), ..request(&[1, 2], 30) };
            let found = generate(&mut model, &request).unwrap();
            assert_eq!(found.tokens, plain.tokens);
            assert_eq!(found.timings.drafts.verifications > 0, drafts);
        }
    }
    // So does one that declares nothing about it.
    let request = Request { speculate: Speculate::Auto, ..request(&[1], 3) };
    let found = generate(&mut open(Scripted::new(RISING)), &request).unwrap();
    assert_eq!((found.tokens, found.timings.drafts), (vec![7; 3], DraftCounts::default()));
}

#[test]
fn a_cancelled_prompt_counts_no_drafts_of_the_last_one() {
    let op = Chain::new(5);
    let stops = Arc::clone(&op.stops);
    let mut model = open(op);
    let speculating = |prompt: &[u32]| Request { speculate: tokens(3), ..request(prompt, 30) };
    let before = generate(&mut model, &speculating(&[1, 2, 1, 2])).unwrap();
    assert!(before.timings.drafts.verifications > 0 && before.timings.decode_steps > 0);
    stops.store(true, Ordering::Relaxed);
    let cancelled = generate(&mut model, &speculating(&[3, 4])).unwrap();
    let Timings { drafts, decode_steps, .. } = cancelled.timings;
    assert_eq!((drafts, decode_steps), (DraftCounts::default(), 0));
    assert_eq!(cancelled.finish_reason, FinishReason::Cancelled);
}

#[test]
fn a_draft_draws_with_the_numbers_of_the_model() {
    for recurrent in [false, true] {
        // Of another seed: hardly ever right. Blunter: often.
        for (seed, sharp, min, max) in
            [(5, 6.0, 1.0, 1.0), (5, 5.0, 0.6, 0.999), (6, 6.0, 0.0, 0.5)]
        {
            let (mut drafted, mut accepted) = (0, 0);
            for request in ways() {
                for drawn in 0..10 {
                    let mut request = request.clone();
                    (request.sampling.seed, request.max_new) = (Some(drawn), 50);
                    // Penalties are the model's alone.
                    if request.sampling.has_penalties() {
                        continue;
                    }
                    let plain = generate(&mut open(Chain::new(5)), &request).unwrap();
                    let mut draft = Chain { sharp, ..Chain::new(seed) };
                    if recurrent {
                        draft = draft.recurrent();
                    }
                    let mut model = open(Chain::new(5));
                    model.set_draft(open(draft)).unwrap();
                    request.speculate = tokens(3);
                    // Twice: the second begins with the state of the first.
                    for prompt in [&[1, 2, 1, 2][..], &[1, 2, 4]] {
                        request.prompt = Prompt::Tokens(prompt.to_vec());
                        let found = generate(&mut model, &request).unwrap();
                        if prompt.len() == 4 {
                            assert_eq!(found.tokens, plain.tokens);
                        }
                        drafted += found.timings.drafts.drafted;
                        accepted += found.timings.drafts.accepted;
                    }
                }
            }
            let share = accepted as f64 / drafted as f64;
            assert!((min..=max).contains(&share), "{seed} {sharp} {recurrent}: {share}");
        }
    }
}

#[test]
fn a_draft_must_speak_the_same_tokens() {
    let refused = |model: &mut Model, draft: Model, words: &str| {
        let error = model.set_draft(draft).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        let report = error.report().to_string();
        assert!(
            report.contains(words) && report.contains("smaller model of its family"),
            "{report}"
        );
    };
    let small = |vocab: usize| {
        let info = OpenInfo { vocab, max_ctx: 64, ..OpenInfo::default() };
        Chain { info, ..Chain::new(5) }
    };
    refused(&mut open(Chain::new(5)), open(small(7)), "its vocabulary is 7, expected at least 8");
    let words = &LETTERS;
    let other: Vec<_> = LETTERS.iter().rev().map(|&(word, id)| (word, 7 - id)).collect();
    // `open_with_words` forgets its folder, so that the files are kept here.
    let folders = [tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap()];
    let with = |folder: &Path, words: &[(&str, u32)]| with_words(folder, Chain::new(5), words);
    refused(&mut with(folders[0].path(), words), open(Chain::new(5)), "it has no tokenizer");
    let mut plain = open(Chain::new(5));
    refused(&mut plain, with(folders[0].path(), words), "it has a tokenizer, the model has none");
    let mut model = with(folders[0].path(), words);
    refused(&mut model, with(folders[1].path(), &other), "tokenizer.json differs from");
    model.set_draft(with(folders[0].path(), words)).unwrap();
}

/// χ² of what two draft tokens become against the model's own probabilities, over drawn seeds.
#[test]
fn drafts_leave_the_distribution_as_it_is() {
    let (seed, sharp, temperature, runs) = (11, 3.0, 1.0, 6_000_u64);
    let prompt = [1, 2, 3];
    let probabilities = |tokens: &[u32]| {
        let weights: Vec<_> = logits_after(seed, sharp, tokens)
            .iter()
            .map(|&logit| f64::from(logit / temperature).exp())
            .collect();
        let sum: f64 = weights.iter().sum();
        weights.into_iter().map(move |weight| weight / sum).collect::<Vec<_>>()
    };
    let mut expected = vec![0.0; VOCAB * VOCAB];
    // The first token is drawn plainly; the draft tokens are the second and third.
    for (first, p) in probabilities(&prompt).into_iter().enumerate() {
        let text = [&prompt[..], &[first as u32]].concat();
        for (second, q) in probabilities(&text).into_iter().enumerate() {
            let text = [&text[..], &[second as u32]].concat();
            for (third, r) in probabilities(&text).into_iter().enumerate() {
                expected[second * VOCAB + third] += p * q * r * runs as f64;
            }
        }
    }
    let op = Chain { sharp, ..Chain::new(seed) };
    let mut lists: Vec<Model> = vec![open(op)];
    lists[0].set_drafter(Box::new(Oracle {
        answer: vec![0, 4, 2, 6],
        off: 0,
        vocab: VOCAB as u32,
        pushed: 0,
    }));
    let mut drafted = open(Chain { sharp, ..Chain::new(seed) });
    drafted.set_draft(open(Chain { sharp: 2.0, ..Chain::new(seed) })).unwrap();
    lists.push(drafted);
    for model in &mut lists {
        let (mut counts, mut accepted) = (vec![0.0; VOCAB * VOCAB], 0);
        for run in 0..runs {
            let sampling =
                SamplingParams { temperature, seed: Some(run), ..SamplingParams::default() };
            let request = Request { sampling, speculate: tokens(2), ..request(&prompt, 4) };
            let found = generate(model, &request).unwrap();
            counts[found.tokens[1] as usize * VOCAB + found.tokens[2] as usize] += 1.0;
            accepted += found.timings.drafts.accepted;
        }
        let squares = counts.iter().zip(&expected).map(|(found, expected): (&f64, &f64)| {
            (found - expected) * (found - expected) / expected
        });
        let squares: f64 = squares.sum();
        // 63 degrees of freedom: 103.4 is exceeded once in a thousand times.
        assert!(squares.is_finite() && squares < 103.4, "χ² = {squares}");
        assert!(accepted > 300, "{accepted} draft tokens were accepted");
    }
}
