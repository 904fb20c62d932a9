//! Published checkpoints against `transformers`: two language models from GGUF files, and an encoder.

use qhx_base::compare::Distance;
use qhx_core::engine::{Model, Prompt, Request, Speculate};
use qhx_core::op::Segment;
use qhx_core::sampling::argmax;
use qhx_forge::{Caches, ForgeOptions, Precision};
use qhx_tests::backends;
use qhx_tests::forged::Forged;
use qhx_tests::real::{self, Answer, FirstLayers, Goldens};
use qhx_tests::replay::generate;
use qhx_tests::tiny::full_matrix;
use qhx_tiers::tier;
use serde::Deserialize;

/// Answers of a bundle beside the reference's.
#[derive(Debug, Default)]
struct Counts {
    equal: usize,
    /// Another answer since a step at which the reference's two best logits are the same but for rounding.
    tied: usize,
    departed: Vec<String>,
    /// Largest difference of a logit of a first step.
    logits: f32,
}

impl Counts {
    /// Prints the counts, and asserts that no answer departed and that logits are as near as `limit`.
    fn passed(&self, label: &str, limit: f32) {
        let Self { equal, tied, departed, logits } = self;
        let gone = departed.len();
        eprintln!(
            "{label}: {equal} equal, {tied} at a tie, {gone} departed, logits within {logits:.1e}"
        );
        assert!(equal + tied > 0 && departed.is_empty(), "{label}: {departed:#?}");
        assert!(*logits <= limit, "{label}: logits differ by {logits}");
    }

    /// Has a model answer from its beginning.
    fn answer(
        &mut self,
        model: &mut Model,
        prompt: Prompt,
        answer: &Answer,
        more: Speculate,
        label: &str,
    ) {
        assert_eq!(model.encode_prompt(&prompt).unwrap(), answer.prompt_ids, "{label}");
        self.first_logits(model, answer, label);
        model.reset().unwrap();
        let request = Request::greedy(prompt, answer.output_ids.len()).speculate(more);
        let found = generate(model, &request).tokens;
        let mut steps = found.iter().zip(&answer.output_ids).enumerate();
        match steps.find(|(_, (found, expected))| found != expected) {
            None if found.len() == answer.output_ids.len() => self.equal += 1,
            Some((step, (found, _))) if answer.seconds.get(&step) == Some(found) => self.tied += 1,
            other => {
                let gap = other.and_then(|(step, _)| answer.gaps.get(step));
                self.departed.push(format!("{label}: {other:?}, gap {gap:?}, {found:?}"));
            }
        }
    }

    fn first_logits(&mut self, model: &mut Model, answer: &Answer, label: &str) {
        let op = model.op_mut();
        op.reset().unwrap();
        op.prefill(&[Segment::Tokens(&answer.prompt_ids)]).unwrap();
        let logits = op.logits().unwrap().capped(op.info().softcap);
        assert!(logits.iter().all(|logit| logit.is_finite()), "{label}: logits");
        for (token, expected) in &answer.logits {
            self.logits = self.logits.max((logits[*token] - expected).abs());
        }
    }
}

/// Forges a checkpoint for the CPU, and has it answer the goldens: two texts and a conversation, or all of them.
fn answers(
    (of, name): (&str, &str),
    (all, speculate, limit): (bool, Speculate, f32),
    change: impl FnOnce(&mut ForgeOptions),
    label: &str,
) {
    let goldens: Goldens = real::goldens(name);
    let mut model = bundle(of, change).on_cpu();
    let (texts, chats) = if all { (usize::MAX, usize::MAX) } else { (2, 1) };
    let mut counts = Counts::default();
    for text in goldens.texts.iter().take(texts) {
        let prompt = Prompt::Text(text.prompt.clone());
        counts.answer(
            &mut model,
            prompt,
            &text.answer,
            speculate,
            &format!("{label}, {}", text.id),
        );
    }
    for chat in goldens.chats.iter().take(chats) {
        for (index, turn) in chat.turns.iter().enumerate() {
            let prompt = Prompt::Chat { messages: chat.messages(index), thinking: None };
            let label = format!("{label}, {}, turn {index}", chat.id);
            counts.answer(&mut model, prompt, &turn.answer, speculate, &label);
        }
    }
    counts.passed(label, limit);
}

fn bundle(name: &str, change: impl FnOnce(&mut ForgeOptions)) -> Forged {
    Forged::of(&real::checkpoint(name), |options| {
        options.max_ctx = Some(512);
        change(options);
    })
}

/// SmolLM2 in the form of its file, blocks of 4 bits with offsets.
fn smollm2(options: &mut ForgeOptions) {
    options.precision = Precision::W4A16;
}

/// Gemma 3 in the forms of its file, blocks of 4, 5 and 8 bits, but for `down_proj`: a part of these is Q6_K, which
/// no bundle has.
fn gemma3(options: &mut ForgeOptions) {
    options.precision = Precision::W8A16;
    options.weights = vec!["down_proj=fp16".parse().unwrap()];
}

const SMOL: (&str, &str) = ("smollm2", "smollm2");
const GEMMA: (&str, &str) = ("gemma3-270m", "gemma3");
/// Logits on the CPU differ by the rounding of activations to int16: by 4.4e-3 at most in first steps of SmolLM2.
const LIMIT: f32 = 0.01;

#[tier(real)]
fn smollm2_answers_as_the_reference() {
    answers(SMOL, (false, Speculate::Off, LIMIT), smollm2, "SmolLM2");
}

#[tier(real)]
fn gemma3_answers_as_the_reference() {
    answers(GEMMA, (false, Speculate::Off, LIMIT), gemma3, "Gemma 3");
}

/// Every golden answer, in chunks of other sizes and token by token, with draft tokens, and of a portable bundle.
#[tier(real, full)]
fn all_forms_answer_as_the_reference() {
    let drafts: Speculate = "6".parse().unwrap();
    for (prefill, portable, speculate, label) in [
        (&[16, 128][..], false, Speculate::Off, "all answers"),
        (&[5, 7], false, Speculate::Off, "chunks of 5 and 7"),
        (&[], false, Speculate::Off, "token by token"),
        (&[16], false, drafts, "draft tokens"),
        (&[16], true, Speculate::Off, "portable"),
    ] {
        let models: [(_, fn(&mut ForgeOptions), _); 2] =
            [(SMOL, smollm2, "SmolLM2"), (GEMMA, gemma3, "Gemma 3")];
        for (model, own, name) in models {
            let change = |options: &mut ForgeOptions| {
                own(options);
                options.prefill = Some(prefill.to_vec());
                options.portable = portable;
            };
            answers(model, (true, speculate, LIMIT), change, &format!("{name}, {label}"));
        }
    }
}

/// The likeliest token behind each golden one is the reference's wherever that is clear.
fn clear_steps(model: &mut Model, answer: &Answer, steps: usize, clear: f32, label: &str) -> usize {
    let op = model.op_mut();
    op.reset().unwrap();
    op.prefill(&[Segment::Tokens(&answer.prompt_ids)]).unwrap();
    let mut compared = 0;
    for (step, token) in answer.output_ids.iter().enumerate().take(steps) {
        if step > 0 {
            op.decode(answer.output_ids[step - 1]).unwrap();
        }
        let logits = op.logits().unwrap();
        assert!(logits.to_f32().iter().all(|logit| logit.is_finite()), "{label}, step {step}");
        if answer.gaps[step] >= clear {
            assert_eq!(argmax(logits).ok(), Some(*token), "{label}, step {step}");
            compared += 1;
        }
    }
    compared
}

/// Caches of 8 bits change no token that is half a logit ahead of the next one.
#[tier(real, full)]
fn int8_caches_keep_every_clear_token() {
    let change = |options: &mut ForgeOptions| {
        smollm2(options);
        options.caches = Caches::Int8;
    };
    let mut model = bundle(SMOL.0, change).on_cpu();
    let goldens: Goldens = real::goldens("smollm2");
    let steps = goldens.texts.iter().map(|text| {
        clear_steps(&mut model, &text.answer, usize::MAX, 0.5, &format!("int8 caches, {}", text.id))
    });
    let compared: usize = steps.sum();
    eprintln!("int8 caches: {compared} clear tokens are the reference's");
    assert!(compared > 100, "{compared}");
}

/// Golden vector of a text.
#[derive(Debug, Deserialize)]
struct Embedded {
    text: String,
    ids: Vec<u32>,
    vector: Vec<f32>,
}

/// Vectors of texts as the reference's, but for a cosine of `least`.
fn embeds(model: &mut Model, goldens: &[Embedded], least: f64, label: &str) {
    let mut worst = 1.0f64;
    for golden in goldens {
        let tokens = model.tokenizer().unwrap().encode(&golden.text, true).unwrap();
        assert_eq!(tokens, golden.ids, "{}", golden.text);
        let vector = model.embed(&tokens).unwrap();
        assert!(vector.iter().all(|value| value.is_finite()), "{}", golden.text);
        let cosine = Distance::of(vector, &golden.vector).unwrap().cosine;
        worst = worst.min(cosine);
        assert!(cosine >= least, "{label}, {}: cosine {cosine}", golden.text);
    }
    eprintln!("{label}: {} vectors, cosine {worst:.7} or more", goldens.len());
}

#[tier(real)]
fn minilm_embeds_as_the_reference() {
    let goldens: Vec<Embedded> = real::goldens("minilm");
    assert_eq!(goldens.len(), 7);
    let bundle = Forged::of(&real::checkpoint("minilm"), |_| ());
    embeds(&mut bundle.on_cpu(), &goldens, 0.99999, "MiniLM");
}

/// The first layers and the head on the emulator, where a token of all layers takes minutes.
fn first_layers((of, name): (&str, &str), change: impl FnOnce(&mut ForgeOptions), label: &str) {
    let goldens: Goldens = real::goldens(name);
    let FirstLayers { layers, ids, logits } = goldens.first_layers;
    let (_folder, checkpoint, others) = real::first_layers(of, layers);
    let bundle = Forged::of(&checkpoint, |options| {
        change(options);
        options.max_ctx = Some(64);
        options.prefill = Some(Vec::new());
        options.ignore_tensors = others;
        options.compiler = Some(backends::compiler("v81"));
    });
    let mut model = bundle.open(backends::qnn());
    let op = model.op_mut();
    let mut worst = 1.0f64;
    for (step, (id, expected)) in ids.iter().zip(&logits).enumerate() {
        op.prefill(&[Segment::Tokens(&[*id])]).unwrap();
        let found = op.logits().unwrap().to_f32();
        assert!(found.iter().all(|logit| logit.is_finite()), "step {step}");
        let found: Vec<f32> = expected.keys().map(|token| found[*token]).collect();
        let expected: Vec<f32> = expected.values().copied().collect();
        let distance = Distance::of(&found, &expected).unwrap();
        worst = worst.min(distance.cosine);
        assert!(distance.cosine >= 0.9999, "{label}, step {step}: {distance:?}");
    }
    eprintln!("{layers} layers of {label} on v81: {} steps, cosine {worst:.7} or more", ids.len());
}

#[tier(real, qnn)]
fn layers_of_smollm2_on_the_npu_answer_as_the_reference() {
    first_layers(SMOL, smollm2, "SmolLM2");
}

#[tier(real, qnn, full)]
fn layers_of_gemma3_on_the_npu_answer_as_the_reference() {
    first_layers(GEMMA, gemma3, "Gemma 3");
}

/// The smallest of the three on the emulator.
#[tier(real, qnn)]
fn minilm_embeds_on_the_npu_as_the_reference() {
    let mut goldens: Vec<Embedded> = real::goldens("minilm");
    goldens.retain(|golden| golden.ids.len() <= 16);
    goldens.truncate(if full_matrix() { usize::MAX } else { 1 });
    let bundle = Forged::of(&real::checkpoint("minilm"), |options| {
        options.max_ctx = Some(16);
        options.prefill = Some(vec![16]);
        options.compiler = Some(backends::compiler("v81"));
    });
    embeds(&mut bundle.open(backends::qnn()), &goldens, 0.999, "MiniLM on v81");
}
