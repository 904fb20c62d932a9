//! Goldens played again: prompts, steps and conversations, compared with what `transformers` gave.

use std::ops::ControlFlow;

use qhx_base::Result;
use qhx_base::compare::Distance;
use qhx_core::engine::{DraftCounts, FinishReason, Generation, Model, Prompt, Request, Speculate};
use qhx_core::op::{HandOvers, HostOp, Segment};
use qhx_core::sampling::argmax;
use qhx_exec::workspace::GraphStats;

use crate::backends;
use crate::tiny::{Case, Chat, Goldens};

/// Generates to the end.
pub fn generate(model: &mut Model, request: &Request) -> Generation {
    try_generate(model, request).unwrap_or_else(|e| panic!("{e}"))
}

/// Continues tokens greedily.
pub fn complete(model: &mut Model, tokens: &[u32], max_new: usize) -> Result<Generation> {
    try_generate(model, &Request::greedy(Prompt::Tokens(tokens.to_vec()), max_new))
}

/// Same as [`generate`], for a request that may fail.
pub fn try_generate(model: &mut Model, request: &Request) -> Result<Generation> {
    model.generate(request, &mut |_| ControlFlow::Continue(()))
}

/// The recorded text is decoded alone, where a SentencePiece-like decoder drops the space before its first word;
/// what continues a prompt has it.
pub fn same_text(found: &str, expected: &str, label: &str) {
    let continued = found.strip_prefix(' ').unwrap_or(found);
    assert!(found == expected || continued == expected, "{label}: {found:?}, not {expected:?}");
}

/// Every case from its text, compared in tokens, text and reason.
pub fn greedy_exact(model: &mut Model, cases: &[&Case], label: &str) {
    speculative_exact(model, cases, Speculate::Off, label);
}

/// The same with draft tokens. Returns the counts of draft tokens in all cases together.
pub fn speculative_exact(
    model: &mut Model,
    cases: &[&Case],
    speculate: Speculate,
    label: &str,
) -> DraftCounts {
    let mut all = DraftCounts::default();
    for case in cases {
        model.reset().unwrap_or_else(|e| panic!("{e}"));
        let request = Request::greedy(Prompt::Text(case.prompt.clone()), case.output_ids.len());
        let request = request.speculate(speculate);
        let label = format!("{label}, {}", case.id);
        let mut streamed = String::new();
        let generation = model.generate(&request, &mut |event| {
            streamed.push_str(event.text().unwrap_or_default());
            ControlFlow::Continue(())
        });
        let generation = generation.unwrap_or_else(|e| panic!("{label}: {e}"));
        assert_eq!(generation.prompt_tokens, case.prompt_ids.len(), "{label}");
        assert_eq!(generation.tokens, case.output_ids, "{label}");
        assert_eq!(streamed, generation.text, "{label}: streamed");
        if case.cut {
            assert!(case.begins_with(&generation.text), "{label}: {:?}", generation.text);
        } else {
            same_text(&generation.text, &case.text, &label);
        }
        let expected = if case.finish == "eos" { FinishReason::Eos } else { FinishReason::Length };
        assert_eq!(generation.finish_reason, expected, "{label}");
        add(&mut all, generation.timings.drafts);
    }
    all
}

/// Adds up counts of draft tokens.
pub(crate) fn add(all: &mut DraftCounts, drafts: DraftCounts) {
    let DraftCounts { verifications, drafted, accepted } = drafts;
    all.verifications += verifications;
    all.drafted += drafted;
    all.accepted += accepted;
}

/// Checks `rows` tokens in one step behind a case's prompt, of which the first `right` are the golden ones, and keeps
/// these. Returns how far the logits of the next plain step are from those after plain steps alone.
pub fn accepted_exact(model: &mut Model, case: &Case, rows: usize, right: usize) -> Distance {
    let (tokens, op) = (&case.output_ids, model.op_mut());
    let mut logits = [true, false].map(|drafted| {
        let mut go = || {
            op.reset()?;
            op.prefill(&[Segment::Tokens(&case.prompt_ids)])?;
            if drafted {
                let mut step = tokens[..right].to_vec();
                step.resize(rows, case.prompt_ids[0]);
                op.verify(&step)?;
                for row in 0..right {
                    op.row_logits(row)?;
                    assert_eq!(argmax(op.logits()?)?, tokens[row + 1], "{}, row {row}", case.id);
                }
                op.accept(right)?;
            } else {
                tokens[..right].iter().try_for_each(|&token| op.decode(token))?;
            }
            op.decode(tokens[right])?;
            Ok::<_, qhx_base::Error>(op.logits()?.to_f32())
        };
        go().unwrap_or_else(|e| panic!("{}: {e}", case.id))
    });
    let plain = std::mem::take(&mut logits[1]);
    model.reset().unwrap_or_else(|e| panic!("{e}"));
    Distance::of(&logits[0], &plain).unwrap_or_else(|e| panic!("{}: {e}", case.id))
}

/// The `most` cases with the fewest tokens.
pub fn shortest(goldens: &Goldens, max: usize) -> Vec<&Case> {
    let mut cases: Vec<_> = goldens.cases.iter().collect();
    cases.sort_by_key(|case| case.prompt_ids.len() + case.output_ids.len());
    cases.truncate(max);
    cases
}

/// Steps through every case: the most likely token is the golden one at every step. Returns the largest distance
/// of recorded logits.
pub fn step_exact(model: &mut Model, goldens: &Goldens, cases: &[&Case], label: &str) -> Distance {
    let mut worst: Option<Distance> = None;
    for case in cases {
        let label = format!("{label}, {}", case.id);
        let recorded = goldens.logits(case);
        let op = model.op_mut();
        op.reset().unwrap_or_else(|e| panic!("{label}: {e}"));
        op.prefill(&[Segment::Tokens(&case.prompt_ids)]).unwrap_or_else(|e| panic!("{label}: {e}"));
        steps(op, &case.output_ids, (&case.logits_steps, &recorded), &mut worst, &label);
    }
    model.reset().unwrap_or_else(|e| panic!("{e}"));
    worst.expect("steps with recorded logits")
}

/// Steps through an answer behind its prompt: the most likely token is the golden one at every step. `worst` becomes
/// the largest distance of logits from those that are recorded for some of the steps.
pub(crate) fn steps(
    op: &mut dyn HostOp,
    tokens: &[u32],
    (recorded_steps, recorded): (&[usize], &[Vec<f32>]),
    worst: &mut Option<Distance>,
    label: &str,
) {
    for (step, token) in tokens.iter().enumerate() {
        if step > 0 {
            op.decode(tokens[step - 1]).unwrap_or_else(|e| panic!("{label}: {e}"));
        }
        let logits = op.logits().expect("there are logits");
        assert_eq!(argmax(logits).ok(), Some(*token), "{label}, step {step}");
        if let Some(index) = recorded_steps.iter().position(|&s| s == step) {
            let found = Distance::of(&logits.capped(op.info().softcap), &recorded[index]);
            let found = found.unwrap_or_else(|e| panic!("{label}, step {step}: {e}"));
            *worst = Some(worst.map_or(found, |worst| worst.worse(found)));
        }
    }
}

/// Prints a distance of logits, of which no difference may be larger than `limit`.
pub fn within(found: Distance, limit: f64, label: &str) {
    let Distance { largest, cosine, .. } = found;
    eprintln!("{label}: logits differ by at most {largest:.2e}, cosine {cosine:.7}");
    assert!(largest <= limit, "{label}: logits differ by {largest:e}");
}

/// Prints a distance of logits, whose cosine must be `least` or more.
pub fn alike(found: Distance, least: f64, label: &str) {
    let Distance { largest, cosine, .. } = found;
    eprintln!("{label}: logits differ by at most {largest:.2e}, cosine {cosine:.7}");
    assert!(cosine >= least, "{label}: cosine {cosine}");
}

/// Executions so far of the graphs whose names `is` takes.
pub fn executions(model: &Model, is: impl Fn(&str) -> bool) -> u64 {
    model.graph_stats().iter().filter(|stats| is(&stats.graph)).map(|stats| stats.executions).sum()
}

/// Has the CPU consume the answer of a case behind its prompt, which the model's backend consumes: every token is the
/// golden one, and the state went over once. Returns the largest distance of recorded logits.
pub fn hands_over(model: &mut Model, goldens: &Goldens, case: &Case, label: &str) -> Distance {
    let label = format!("{label}, tokens on the CPU");
    model.decode_on(Some(backends::cpu()), "asked for").unwrap_or_else(|e| panic!("{label}: {e}"));
    let before = model.graph_stats();
    let distance = step_exact(model, goldens, &[case], &label);
    let HandOvers { count, bytes, .. } = model.op_mut().hand_overs();
    assert!(count == 1 && bytes > 0, "{label}: {count} times, {bytes} bytes");
    let of_tokens = |stats: &&GraphStats| stats.context.starts_with("cpu:");
    let ran = |stats: &[GraphStats], on_cpu: bool| -> u64 {
        let stats = stats.iter().filter(|stats| of_tokens(stats) == on_cpu);
        stats.map(|stats| stats.executions).sum()
    };
    let after = model.graph_stats();
    for on_cpu in [false, true] {
        assert!(ran(&after, on_cpu) > ran(&before, on_cpu), "{label}, {on_cpu}: {after:?}");
    }
    model.decode_on(None, "").unwrap_or_else(|e| panic!("{label}: {e}"));
    distance
}

/// Plays a conversation from its beginning: prompts, answers and texts are the golden ones. Returns what each turn generated.
pub fn play(model: &mut Model, chat: &Chat) -> Vec<Generation> {
    play_speculative(model, chat, Speculate::Off)
}

/// The same with draft tokens.
pub fn play_speculative(model: &mut Model, chat: &Chat, speculate: Speculate) -> Vec<Generation> {
    model.reset().unwrap_or_else(|e| panic!("{}: {e}", chat.id));
    let mut played = Vec::new();
    for (index, turn) in chat.turns.iter().enumerate() {
        let prompt = chat.prompt(index);
        let ids = model.encode_prompt(&prompt).unwrap_or_else(|e| panic!("{}: {e}", chat.id));
        assert_eq!(ids, turn.prompt_ids, "{}", chat.id);
        let request = Request::greedy(prompt, turn.output_ids.len());
        let generation = generate(model, &request.speculate(speculate));
        assert_eq!(generation.tokens, turn.output_ids, "{}", chat.id);
        assert_eq!(generation.text, turn.text, "{}", chat.id);
        played.push(generation);
    }
    played
}
