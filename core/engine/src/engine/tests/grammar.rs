//! Answers that follow a grammar, over an op that would not write it by itself: its logits are noise.

use super::super::types::MAX_DRAFT_TOKENS;
use super::speculative::{Chain, Oracle, tokens};
use super::*;
use crate::engine::Grammar;

/// A tokenizer of byte-level tokens, one of tokens with `▁` for spaces, and one with a space before every text.
const TOKENIZERS: [(&str, &str); 3] =
    [("qwen35-tied", "<|im_end|>"), ("gemma3-tiny", "<eos>"), ("mistral-tiny", "</s>")];

/// Ids of the fixtures' tokenizers are below this.
const TOKENS: usize = 500;

/// Noise over the tokens of a fixture.
fn noise(seed: u64) -> Chain {
    let mut op = Chain::new(seed);
    (op.info.vocab, op.info.max_ctx) = (TOKENS, 8192);
    op
}

fn with_tokenizer(fixture: &str, op: Chain) -> Model {
    let folder = qhx_paths::fixture(fixture);
    let tokenizer = qhx_text::Tokenizer::from_file(&folder.join("tokenizer.json")).unwrap();
    let eos = TOKENIZERS.iter().find(|(name, _)| *name == fixture).unwrap().1;
    let eos = tokenizer.token_to_id(eos).unwrap();
    let artifacts = json!({"tokenizer": "tokenizer.json"});
    let manifest = json!({"artifacts": artifacts, "params": {"eos_token_id": eos}});
    open_in(&folder, op, manifest).unwrap()
}

fn model(seed: u64) -> Model {
    with_tokenizer(TOKENIZERS[0].0, noise(seed))
}

/// An answer of `grammar`, drawn with a seed.
fn answer(grammar: Grammar, seed: u64) -> Request {
    let sampling =
        SamplingParams { temperature: 4.0, seed: Some(seed), ..SamplingParams::default() };
    request(&[40, 41, 42], 6000).sampling(sampling).grammar(grammar)
}

fn schema(schema: &Value) -> Grammar {
    Grammar::JsonSchema(schema.clone())
}

/// Checks that `text` is JSON of a schema.
fn check(schema: &Value, text: &str) {
    let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text}"));
    if let Err(e) = jsonschema::validator_for(schema).unwrap().validate(&value) {
        panic!("{schema}: {e}: {text}");
    }
}

fn person() -> Value {
    json!({
        "type": "object",
        "properties": {
            "first_name": {"type": "string", "maxLength": 12},
            "born": {"type": "integer", "minimum": 1900, "maximum": 2100},
            "languages": {"type": "array", "items": {"enum": ["de", "en", "fr"]}, "maxItems": 3},
        },
        "required": ["first_name", "born", "languages"],
        "additionalProperties": false,
    })
}

#[test]
fn answers_are_json_of_their_schemas() {
    let schemas = schemas();
    assert_eq!(schemas.len(), 50);
    for seed in 0..4 {
        let mut model = model(seed);
        for schema in &schemas {
            let generation = generate(&mut model, &answer(super::grammar::schema(schema), seed));
            let generation = generation.unwrap_or_else(|e| panic!("{schema}: {}", e.report()));
            assert_eq!(generation.finish_reason, FinishReason::Eos, "{schema}");
            check(schema, &generation.text);
        }
    }
}

#[test]
fn each_kind_of_tokenizer_follows_a_grammar() {
    let mut compact = person();
    compact["x-guidance"] = json!({"whitespace_flexible": false});
    for (fixture, _) in TOKENIZERS {
        let mut model = with_tokenizer(fixture, noise(3));
        for seed in 0..5 {
            for speculate in [Speculate::Off, tokens(3)] {
                let request = answer(schema(&compact), seed).speculate(speculate);
                let generation = generate(&mut model, &request).unwrap();
                check(&person(), &generation.text);
                assert!(!generation.text.contains("\": "), "{}", generation.text);
                assert!(generation.timings.forced_tokens > 8, "{fixture}: {generation:?}");
            }
            let regex = Grammar::Regex("[a-f]{3}-ü[0-9]{2,4} end".to_owned());
            let generation = generate(&mut model, &answer(regex, seed)).unwrap();
            let text = &generation.text;
            let (letters, rest) = text.split_once("-ü").unwrap();
            assert!(
                letters.len() == 3 && letters.chars().all(|c| ('a'..='f').contains(&c)),
                "{text}"
            );
            let digits = rest.strip_suffix(" end").unwrap();
            assert!((2..=4).contains(&digits.len()), "{text}");
            assert!(digits.bytes().all(|c| c.is_ascii_digit()), "{text}");

            let choices = ["yes", "no", "Not \"sure\"\n"].map(str::to_owned);
            let grammar = Grammar::Choice(choices.to_vec());
            let generation = generate(&mut model, &answer(grammar, seed)).unwrap();
            assert!(choices.contains(&generation.text), "{}", generation.text);
            assert_eq!(generation.finish_reason, FinishReason::Eos);

            let lark = "start: \"(\" (start | NUMBER) \")\"\nNUMBER: /[0-9]{1,3}/";
            let generation = generate(&mut model, &answer(Grammar::Lark(lark.to_owned()), seed));
            let text = generation.unwrap().text;
            let inner = text.trim_matches(['(', ')']);
            assert_eq!(text.matches('(').count(), text.matches(')').count(), "{text}");
            assert!(inner.parse::<u32>().is_ok(), "{text}");
        }
    }
}

#[test]
fn a_grammar_holds_for_greedy_and_filtered_choices() {
    let grammar = || schema(&person());
    let filtered = SamplingParams {
        temperature: 1.3,
        top_k: 5,
        top_p: 0.9,
        min_p: 0.01,
        repetition_penalty: 1.1,
        frequency_penalty: 0.2,
        seed: Some(4),
        ..SamplingParams::default()
    };
    for sampling in [SamplingParams::default(), filtered] {
        for seed in 0..5 {
            let request = answer(grammar(), 0).sampling(sampling.clone());
            check(&person(), &generate(&mut model(seed), &request).unwrap().text);
        }
    }
}

#[test]
fn drafts_and_forced_tokens_change_no_answer() {
    let fixture = TOKENIZERS[0].0;
    let mut accepted = 0;
    for seed in 0..6 {
        for max_new in [6000, 3, 17, 30] {
            for temperature in [0.0, 1.0] {
                let mut request = answer(schema(&person()), seed).temperature(temperature);
                request.max_new = max_new;
                let run = |speculate: Speculate, drafts: Option<(Vec<u32>, u32)>| {
                    let op = noise(seed);
                    let state = Arc::clone(&op.text);
                    let mut model = with_tokenizer(fixture, op);
                    if let Some((answer, off)) = drafts {
                        let oracle = Oracle { answer, off, vocab: TOKENS as u32, pushed: 0 };
                        model.set_drafter(Box::new(oracle));
                    }
                    let request = request.clone().speculate(speculate);
                    let generation = generate(&mut model, &request).unwrap();
                    let state = state.lock().unwrap().clone();
                    (generation, state)
                };
                let (plain, state) = run(Speculate::Off, None);
                let all = [&[40, 41, 42], plain.tokens.as_slice()].concat();
                assert!(all.starts_with(&state) && state.len() < all.len());
                for (speculate, drafts) in [
                    (tokens(3), None),
                    (tokens(MAX_DRAFT_TOKENS), Some((plain.tokens.clone(), 0))),
                    (tokens(2), Some((plain.tokens.clone(), 1))),
                    (Speculate::Auto, Some((plain.tokens.clone(), 0))),
                ] {
                    let (found, state) = run(speculate, drafts);
                    assert_eq!(found.tokens, plain.tokens, "{seed} {max_new} {speculate:?}");
                    assert_eq!(found.text, plain.text);
                    assert_eq!(found.finish_reason, plain.finish_reason);
                    assert_eq!(found.timings.forced_tokens, plain.timings.forced_tokens);
                    assert!(all.starts_with(&state) && state.len() < all.len());
                    accepted += found.timings.drafts.accepted;
                }
            }
        }
    }
    assert!(accepted > 100, "{accepted}");
}

#[test]
fn forced_tokens_are_consumed_together_and_seen_one_by_one() {
    let fixture = TOKENIZERS[0].0;
    let op = noise(1);
    let (calls, state) = (Arc::clone(&op.calls), Arc::clone(&op.text));
    let mut model = with_tokenizer(fixture, op);
    let object = json!({
        "type": "object",
        "properties": {
            "quite_a_long_name": {"type": "boolean"},
            "another_long_name": {"type": "boolean"},
        },
        "required": ["quite_a_long_name", "another_long_name"],
        "additionalProperties": false,
    });
    let mut seen = Vec::new();
    let mut pieces = String::new();
    let request = answer(schema(&object), 2);
    let generation = model.generate(&request, &mut |event| {
        if let Event::Token { id, .. } = event {
            seen.push(id);
        }
        pieces.push_str(event.text().unwrap_or_default());
        ControlFlow::Continue(())
    });
    let generation = generation.unwrap();
    assert_eq!(seen, generation.tokens);
    assert_eq!(pieces, generation.text);
    check(&object, &generation.text);
    let Timings { forced_tokens, decode_steps, .. } = generation.timings;
    // All but the choices between true and false, and their first letters at most.
    assert!(forced_tokens > generation.tokens.len() / 2, "{generation:?}");
    let calls = calls.lock().unwrap().clone();
    assert_eq!(calls.len(), 1 + decode_steps, "{calls:?}");
    assert!(calls[1..].iter().any(|&count| count > 5), "{calls:?}");
    // What was consumed is what the next request finds.
    let consumed = state.lock().unwrap().len();
    let longer = [&[40, 41, 42], generation.tokens.as_slice(), &[50]].concat();
    let next = generate(&mut model, &super::request(&longer, 1)).unwrap();
    assert_eq!(next.reused_tokens, consumed);
    assert_eq!(next.timings.forced_tokens, 0);
    // Whoever asks for log-probabilities gets those of forced tokens, too.
    let asked = generate(&mut model, &request.logprobs(2)).unwrap();
    assert_eq!(asked.tokens, generation.tokens);
    assert_eq!(asked.logprobs.len(), asked.tokens.len());
    assert!(asked.logprobs.iter().all(|one| one.logprob < 0.0 && one.top.len() == 2));
}

#[test]
fn who_cancels_does_not_wait_for_the_table_of_tokens() {
    let model = with_tokenizer(TOKENIZERS[0].0, noise(1));
    let cancel = CancelToken::new();
    cancel.cancel();
    let error = model.texts().vocabulary_unless(&cancel).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Cancelled);
    let texts = model.texts();
    assert!(std::ptr::eq(
        texts.vocabulary_unless(&CancelToken::new()).unwrap(),
        texts.vocabulary().unwrap()
    ));
}

#[test]
fn an_answer_ends_with_its_grammar_stops_and_budget() {
    let mut model = model(7);
    let fixed = Grammar::Choice(vec!["exactly this text".to_owned()]);
    let request = answer(fixed, 0);
    let whole = generate(&mut model, &request).unwrap();
    assert_eq!(
        (whole.text.as_str(), whole.finish_reason),
        ("exactly this text", FinishReason::Eos)
    );
    // No token was chosen, and no step was taken.
    let Timings { forced_tokens, decode_steps, .. } = whole.timings;
    assert_eq!((forced_tokens, decode_steps), (whole.tokens.len(), 0));
    let stopped = generate(&mut model, &request.clone().stop("this")).unwrap();
    assert_eq!((stopped.text.as_str(), stopped.finish_reason), ("exactly ", FinishReason::Stop));
    assert_eq!((stopped.stopped_at.as_deref(), whole.stopped_at), (Some("this"), None));
    let short = generate(&mut model, &request.clone().max_new(2)).unwrap();
    assert_eq!((short.tokens.len(), short.finish_reason), (2, FinishReason::Length));
    assert_eq!(short.tokens, whole.tokens[..2]);
    // Where it may end, a stop token ends it, and so does the model's own, unless the request says otherwise.
    let letters = || Grammar::Regex("a*".to_owned());
    let ends = generate(&mut model, &answer(letters(), 1)).unwrap();
    assert_eq!(ends.finish_reason, FinishReason::Eos);
    let goes_on = answer(letters(), 1).ignore_eos(true).max_new(300);
    let goes_on = generate(&mut model, &goes_on).unwrap();
    assert_eq!((goes_on.tokens.len(), goes_on.finish_reason), (300, FinishReason::Length));
    assert!(goes_on.text.bytes().all(|byte| byte == b'a'));
    let mut request = answer(letters(), 1).ignore_eos(true);
    request.stop_ids = vec![77];
    assert_eq!(generate(&mut model, &request).unwrap().tokens.last(), Some(&77));
}

#[test]
fn what_no_answer_can_be_is_refused_before_the_prompt_runs() {
    let big: Vec<_> = (0..400_000).map(|index| format!("choice number {index}")).collect();
    let big = json!({ "enum": big });
    assert!(big.to_string().len() > 8 << 20);
    let wide: serde_json::Map<_, _> =
        (0..60_000).map(|index| (format!("property{index}"), json!({"type": "number"}))).collect();
    let mut deep = json!({"type": "integer"});
    for _ in 0..200 {
        deep = json!({"type": "array", "items": deep});
    }
    for (grammar, words) in [
        (schema(&json!({"allOf": [{"type": "string"}, {"type": "number"}]})), "nsatisfiable"),
        (schema(&json!(false)), "nsatisfiable"),
        (schema(&json!({"type": "integer", "minimum": 3, "maximum": 2})), "nsatisfiable"),
        (schema(&json!({"type": "string", "pattern": "["})), "regex"),
        (schema(&json!({"type": "strange"})), "strange"),
        (schema(&json!({"$ref": "#"})), ""),
        (schema(&json!({"$ref": "#/$defs/none"})), "none"),
        (schema(&json!({"$ref": "https://example.org/schema"})), "example.org"),
        (schema(&json!({"type": "object", "not": {}})), "not"),
        (schema(&big), "expected at most 4194304"),
        (schema(&json!({"type": "object", "properties": wide})), ""),
        (schema(&deep), "nested deeper than 127 levels"),
        (Grammar::Regex("(".to_owned()), "regex"),
        (Grammar::Regex("[ab]".repeat(1 << 21)), "expected at most 4194304"),
        (Grammar::Lark("start: missing".to_owned()), "missing"),
        (Grammar::Lark("start: start \"a\"".to_owned()), ""),
        (Grammar::Choice(Vec::new()), "there are none"),
        (Grammar::Choice(vec!["a".to_owned(), String::new()]), "one is empty"),
        (Grammar::Calls(Vec::new()), "the tools: there are none"),
    ] {
        let name: String = format!("{grammar:?}").chars().take(90).collect();
        let op = noise(1);
        let consumed = Arc::clone(&op.calls);
        let mut model = with_tokenizer("qwen35-tied", op);
        let error = generate(&mut model, &answer(grammar, 1)).map(|g| g.text).expect_err(&name);
        assert_eq!(error.kind(), ErrorKind::Usage, "{name}: {error}");
        assert!(error.message().contains(words), "{name}: {error}");
        assert!(error.message().len() < 600, "{error}");
        assert!(consumed.lock().unwrap().is_empty(), "{name}");
        // The model is there for the next request.
        let next = generate(&mut model, &answer(Grammar::Choice(vec!["b".to_owned()]), 1));
        assert_eq!(next.unwrap().text, "b");
    }
    assert_eq!(Grammar::json_schema("{").unwrap_err().kind(), ErrorKind::Usage);
    let huge = format!("\"{}\"", "x".repeat(10 << 20));
    let error = Grammar::json_schema(&huge).unwrap_err();
    assert!(error.message().contains("10485762 bytes, expected at most 4194304"), "{error}");
    // Without tokens there is no text.
    let error = generate(&mut open(Scripted::new(RISING)), &answer(Grammar::Json, 1)).unwrap_err();
    assert!(error.message().contains("has no tokenizer"), "{error}");
}

#[test]
fn a_special_token_is_no_text_of_a_grammar() {
    let mut model = model(2);
    let name = "<|im_start|>";
    let special = model.tokenizer().unwrap().token_to_id(name).unwrap();
    let grammar = Grammar::Choice(vec![name.to_owned()]);
    let text = generate(&mut model, &answer(grammar, 1)).unwrap();
    assert_eq!(text.text, name);
    assert!(!text.tokens.contains(&special));
    let grammar = Grammar::Lark(format!("start: \"a\" {name} \"b\""));
    let token = generate(&mut model, &answer(grammar, 1)).unwrap();
    assert_eq!(token.text, "ab");
    assert!(token.tokens.contains(&special));
}

#[test]
fn the_kinds_of_the_c_interface_are_grammars() {
    let kind = |kind, text| Grammar::of_kind(kind, text).unwrap();
    assert_eq!(kind(0, "whatever"), None);
    assert_eq!(kind(1, ""), Some(Grammar::Json));
    assert_eq!(kind(1, "json"), Some(Grammar::Json));
    let object = Some(Grammar::JsonSchema(json!({"type": "object"})));
    assert_eq!(kind(1, "json:{\"type\": \"object\"}"), object);
    assert_eq!(kind(1, "{\"type\": \"object\"}"), object);
    let choice = Some(Grammar::Choice(vec!["yes".to_owned(), "no".to_owned()]));
    assert_eq!(kind(4, "yes, no"), choice);
    assert_eq!(kind(4, "[\"yes\", \"no\"]"), choice);
    let tools = |grammar: Option<Grammar>| grammar.unwrap().tools().unwrap()[0].name.clone();
    assert_eq!(tools(kind(2, "[{\"name\": \"f\"}]")), "f");
    assert_eq!(tools(kind(3, "[{\"function\": {\"name\": \"g\"}}]")), "g");
    for (number, text) in [(5, ""), (-1, ""), (1, "json:{"), (2, ""), (2, "[]"), (4, "[1]")] {
        let error = Grammar::of_kind(number, text).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{number} {text}");
    }
}

/// Schemas of many kinds. Noise writes long texts and long lists where it may, so that these have limits.
fn schemas() -> Vec<Value> {
    let text = || json!({"type": "string", "maxLength": 8});
    let object = |properties: Value| {
        let required: Vec<_> = properties.as_object().unwrap().keys().cloned().collect();
        json!({"type": "object", "properties": properties, "required": required,
               "additionalProperties": false})
    };
    let list = |items: Value, min: usize, max: usize| json!({"type": "array", "items": items, "minItems": min, "maxItems": max});
    vec![
        json!({"type": "null"}),
        json!({"type": "boolean"}),
        json!({"type": "integer", "minimum": -20, "maximum": 3000}),
        json!({"type": "integer", "exclusiveMinimum": 7, "exclusiveMaximum": 12}),
        json!({"type": "number", "minimum": 0, "maximum": 1}),
        json!({"type": "number", "exclusiveMinimum": -2.5, "maximum": 99.75}),
        json!({"type": "integer", "minimum": 0, "maximum": 1000, "multipleOf": 5}),
        text(),
        json!({"type": "string", "minLength": 3, "maxLength": 5}),
        json!({"type": "string", "pattern": "^[A-Z]{2}-[0-9]{4}$"}),
        json!({"type": "string", "pattern": "^(ab|cd)+e?$", "maxLength": 9}),
        json!({"type": "string", "format": "date"}),
        json!({"type": "string", "format": "time"}),
        json!({"type": "string", "format": "date-time"}),
        json!({"type": "string", "format": "uuid"}),
        json!({"type": "string", "format": "ipv4"}),
        json!({"enum": ["red", "green", "blue"]}),
        json!({"enum": [1, 2.5, null, true, "two", [1, 2], {"a": 1}]}),
        json!({"const": "the \"only\" one\n"}),
        json!({"const": {"a": [1, {"b": null}], "c": "d"}}),
        json!({"type": ["integer", "null"], "minimum": 0, "maximum": 9}),
        list(json!({"type": "boolean"}), 2, 4),
        list(text(), 0, 2),
        list(list(json!({"enum": [0, 1]}), 2, 2), 2, 2),
        json!({"type": "array", "prefixItems": [{"const": "point"}, {"enum": [1, 2]}],
               "items": false, "minItems": 2}),
        json!({"type": "array", "prefixItems": [text()], "items": {"type": "boolean"},
               "minItems": 2, "maxItems": 3}),
        object(json!({"a": text()})),
        object(json!({"a": {"type": "boolean"}, "b": list(text(), 1, 2), "c": {"const": 3}})),
        object(json!({"outer": object(json!({"inner": object(json!({"x": {"enum": [1]}}))}))})),
        json!({"type": "object", "properties": {"a": {"type": "boolean"}, "b": text()},
               "required": ["b"], "additionalProperties": false}),
        json!({"type": "object", "properties": {"a": {"type": "boolean"}, "b": {"enum": [1]}},
               "additionalProperties": false}),
        json!({"type": "object", "properties": {"ü \"quoted\"": {"type": "null"}},
               "required": ["ü \"quoted\""], "additionalProperties": false}),
        json!({"type": "object", "additionalProperties": false}),
        json!({"type": "object", "additionalProperties": {"type": "boolean"},
               "properties": {"id": {"const": 7}}, "required": ["id"], "maxProperties": 1}),
        json!({"type": "object", "properties": {"a": {"const": 1}, "b": {"const": 2}},
               "required": ["a"], "additionalProperties": false}),
        json!({"anyOf": [{"type": "boolean"}, {"enum": ["a", "b"]}]}),
        json!({"anyOf": [object(json!({"kind": {"const": "a"}, "x": text()})),
                         object(json!({"kind": {"const": "b"}, "y": {"type": "boolean"}}))]}),
        json!({"oneOf": [{"type": "integer", "minimum": 1, "maximum": 5}, {"type": "null"}]}),
        json!({"allOf": [{"type": "integer", "minimum": 5}, {"maximum": 8}]}),
        json!({"allOf": [object(json!({"a": {"type": "boolean"}}))]}),
        json!({"$ref": "#/$defs/color", "$defs": {"color": {"enum": ["red", "blue"]}}}),
        json!({"$defs": {"point": object(json!({"x": {"enum": [1, 2]}, "y": {"enum": [3]}}))},
               "type": "array", "items": {"$ref": "#/$defs/point"}, "minItems": 1, "maxItems": 3}),
        json!({"definitions": {"name": {"type": "string", "maxLength": 4}},
               "type": "object", "properties": {"n": {"$ref": "#/definitions/name"}},
               "required": ["n"], "additionalProperties": false}),
        // Recursive.
        json!({"$defs": {"node": {"type": "object", "properties": {
                   "value": {"enum": [1, 2]},
                   "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 1}},
               "required": ["value", "children"], "additionalProperties": false}},
               "$ref": "#/$defs/node"}),
        json!({"type": "object", "properties": {"next": {"anyOf": [{"$ref": "#"}, {"type": "null"}]}},
               "required": ["next"], "additionalProperties": false}),
        json!({"$defs": {"even": {"anyOf": [{"const": 0}, {"type": "array", "items": {"$ref": "#/$defs/odd"},
                   "minItems": 1, "maxItems": 1}]},
               "odd": {"type": "array", "items": {"$ref": "#/$defs/even"}, "minItems": 1, "maxItems": 1}},
               "$ref": "#/$defs/even"}),
        object(json!({"temperature": {"type": "number", "minimum": -50, "maximum": 60},
                      "unit": {"enum": ["C", "F"]}, "city": text(),
                      "when": {"type": "string", "format": "date"}})),
        object(
            json!({"steps": list(object(json!({"text": text(), "done": {"type": "boolean"}})), 1, 3),
                      "note": {"anyOf": [text(), {"type": "null"}]}}),
        ),
        json!({"title": "With words around", "description": "d", "$comment": "c", "default": 3,
               "examples": [1], "type": "integer", "minimum": 0, "maximum": 10}),
        person(),
    ]
}
