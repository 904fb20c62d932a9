//! Time that a grammar takes for each token, and once for a tokenizer, at 248,320 tokens.
//!
//! The tokenizer is synthetic: bytes, and words of letters, digits and signs by chance, with and without a space before
//! them. Answers are drawn at random from what each grammar allows. The largest logit is looked for in the same run,
//! for comparison: with all tokens, and with those of a mask.

#![expect(clippy::print_stdout, reason = "the report is the result")]

use std::collections::HashSet;
use std::path::Path;
use std::time::{Duration, Instant};

use half::f16;
use qhx_core::engine::{AnswerForm, Grammar, Vocabulary};
use qhx_core::op::Logits;
use qhx_core::sampling::{AllowedTokens, Rng, Sampler, SamplingParams};
use qhx_text::Tokenizer;
use serde_json::{Map, Value, json};

const VOCAB: usize = 248_320;
const ANSWERS: u64 = 20;
const TOKENS: usize = 200;

type AnyError = Box<dyn std::error::Error>;

/// Words of a byte-level vocabulary.
fn words() -> Vec<String> {
    // Printable characters are themselves, all other bytes follow from U+0100 on.
    let printable = |byte: &u8| matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
    let mut words: Vec<String> =
        (0..=255u8).filter(printable).map(|byte| char::from(byte).to_string()).collect();
    let others = 256 - words.len() as u32;
    words.extend((0x100..0x100 + others).filter_map(char::from_u32).map(String::from));
    let mut seen: HashSet<String> = words.iter().cloned().collect();
    let mut rng = Rng::new(1);
    let letters = "eeeettttaaooiinnsshhrrddlluucmwfgypbvkjxqz";
    let signs = "\"{}[]:,.;()<>=+-*/_#'!?\\|&%$@~^`";
    while words.len() < VOCAB - 20 {
        let alphabet = match rng.below(20) {
            0 => "0123456789",
            1 => signs,
            2 => "ÃÂÄåæçèéêëìíîïðñòóôõö",
            _ => letters,
        };
        let alphabet: Vec<char> = alphabet.chars().collect();
        let mut word = if rng.below(2) == 0 { "Ġ".to_owned() } else { String::new() };
        for _ in 0..2 + rng.below(4) + rng.below(5) {
            word.push(alphabet[rng.below(alphabet.len() as u64) as usize]);
        }
        if seen.insert(word.clone()) {
            words.push(word);
        }
    }
    words
}

fn tokenizer() -> Result<Tokenizer, AnyError> {
    let words = words();
    let added: Vec<_> = (words.len()..VOCAB)
        .map(|id| {
            json!({"id": id, "content": format!("<|special_{id}|>"), "special": true,
                   "single_word": false, "lstrip": false, "rstrip": false, "normalized": false})
        })
        .collect();
    let vocab: Map<String, Value> =
        words.into_iter().enumerate().map(|(id, word)| (word, id.into())).collect();
    let document = json!({
        "version": "1.0", "truncation": null, "padding": null, "added_tokens": added,
        "normalizer": null, "post_processor": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                          "use_regex": true},
        "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                    "use_regex": true},
        "model": {"type": "BPE", "vocab": vocab, "merges": []},
    });
    Ok(Tokenizer::from_bytes(Path::new("synthetic.json"), document.to_string().as_bytes())?)
}

#[derive(Default)]
struct Times(Vec<Duration>);

impl Times {
    fn add(&mut self, start: Instant) {
        self.0.push(start.elapsed());
    }

    fn report(&mut self, name: &str) -> f64 {
        self.0.sort_unstable();
        let micros = |time: Duration| time.as_secs_f64() * 1e6;
        let mean = micros(self.0.iter().sum::<Duration>()) / self.0.len().max(1) as f64;
        let at = |share: usize| {
            micros(self.0.get(self.0.len() * share / 1000).copied().unwrap_or_default())
        };
        let worst = micros(self.0.last().copied().unwrap_or_default());
        println!(
            "{name:32} mean {mean:8.1} us, half {:8.1} us, 99 % {:8.1} us, worst {worst:8.1} us, {} times",
            at(500),
            at(990),
            self.0.len()
        );
        mean
    }
}

fn grammars() -> Vec<(&'static str, Grammar)> {
    let person = json!({"type": "object", "properties": {
        "name": {"type": "string"}, "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "mail": {"type": "string", "format": "email"}, "tags": {"type": "array", "items": {"type": "string"}}},
        "required": ["name", "age", "mail", "tags"], "additionalProperties": false});
    let tree = json!({"$defs": {"node": {"type": "object", "properties": {
        "value": {"type": "number"}, "label": {"enum": ["red", "green", "blue"]},
        "children": {"type": "array", "items": {"$ref": "#/$defs/node"}}},
        "required": ["value", "label", "children"], "additionalProperties": false}}, "$ref": "#/$defs/node"});
    let ones: Vec<_> = (0..100)
        .map(|i| {
            json!({"type": "object", "properties": {"kind": {"const": format!("kind{i}")},
            "value": {"type": "string", "maxLength": 40}}, "required": ["kind", "value"],
            "additionalProperties": false})
        })
        .collect();
    vec![
        ("any JSON object", Grammar::Json),
        ("an object of texts", Grammar::JsonSchema(person)),
        ("a recursive tree", Grammar::JsonSchema(tree)),
        ("one of 100 objects", Grammar::JsonSchema(json!({ "anyOf": ones }))),
        ("a pattern", Grammar::Regex("([A-Za-z]{3,9} ?){20,40}".to_owned())),
    ]
}

fn main() -> Result<(), AnyError> {
    let tokenizer = tokenizer()?;
    let end = VOCAB as u32 - 1;
    let start = Instant::now();
    let vocabulary = Vocabulary::new(&tokenizer, VOCAB, |_| true, &[end])?;
    println!("set-up for {VOCAB} tokens: {:.0} ms", start.elapsed().as_secs_f64() * 1e3);

    let mut rng = Rng::new(7);
    let logits: Vec<f16> =
        (0..VOCAB).map(|_| f16::from_f32(rng.below(2000) as f32 / 100.0 - 10.0)).collect();
    let mut sampler = Sampler::new(SamplingParams::default(), VOCAB)?;
    let (all, mut allowed) = (AllowedTokens::below(VOCAB), AllowedTokens::below(0));
    let (mut masks, mut forced, mut accepted, mut compiled) =
        (Times::default(), Times::default(), Times::default(), Times::default());
    let (mut plain, mut masked) = (Times::default(), Times::default());
    for (name, grammar) in grammars() {
        let mut of_grammar = Times::default();
        for _ in 0..ANSWERS {
            let start = Instant::now();
            let mut constraint =
                vocabulary.constrain(&grammar, AnswerForm::default(), &[], false)?;
            compiled.add(start);
            let mut count = 0;
            while count < TOKENS && !constraint.is_over() {
                let start = Instant::now();
                let must = constraint.forced();
                forced.add(start);
                if let Some(&token) = must.first() {
                    constraint.accept(token)?;
                    count += 1;
                    continue;
                }
                let start = Instant::now();
                let mask = constraint.mask()?;
                masks.add(start);
                of_grammar.add(start);
                let start = Instant::now();
                allowed.set_masked(&all, mask);
                sampler.sample_among(Logits::F16(&logits), &allowed)?;
                masked.add(start);
                let start = Instant::now();
                sampler.sample(Logits::F16(&logits))?;
                plain.add(start);
                let nth = rng.below(allowed.len() as u64) as usize;
                let Some(token) = (0..VOCAB as u32).filter(|&id| allowed.contains(id)).nth(nth)
                else {
                    break;
                };
                if token == end {
                    break;
                }
                let start = Instant::now();
                constraint.accept(token)?;
                accepted.add(start);
                count += 1;
            }
        }
        of_grammar.report(&format!("mask: {name}"));
    }
    compiled.report("grammar compiled, first mask");
    let mask = masks.report("mask");
    forced.report("forced tokens");
    accepted.report("token accepted");
    let (plain, masked) =
        (plain.report("largest of all logits"), masked.report("largest of a mask"));
    println!(
        "a token with a grammar takes {:.2} times choosing one without",
        (mask + masked) / plain
    );
    Ok(())
}
