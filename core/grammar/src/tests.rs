//! Calls of tools in each format, written by chance over the tokens of a fixture.

use std::collections::BTreeSet;
use std::path::Path;

use qhx_base::ErrorKind;
use qhx_text::{Beginning, CallFormat, CallSyntax, ReasoningMarks, Tokenizer, Tool};
use serde_json::{Value, json};

use super::*;

const FORMATS: [CallFormat; 12] = CallFormat::ALL;

/// Tokens of a fixture, with the marks of calls as special tokens if so.
fn tokenizer(special: bool) -> Tokenizer {
    let path = qhx_paths::fixture("qwen35-tied").join("tokenizer.json");
    let mut document: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let added = document["added_tokens"].as_array_mut().unwrap();
    let marks = CallFormat::ALL.map(CallFormat::marks).into_iter().flat_map(|(a, b)| [a, b]);
    let marks = marks.chain(["[ARGS]", "<|\"|>", "<escape>", "<|channel>", "<channel|>"]);
    let marks: BTreeSet<_> = marks.filter(|mark| special && !mark.is_empty()).collect();
    for mark in marks {
        let mut token = added[0].clone();
        (token["content"], token["id"]) = (mark.into(), added.len().into());
        token["id"] = (428 + added.len()).into();
        added.push(token);
    }
    Tokenizer::from_bytes(Path::new("tokenizer.json"), document.to_string().as_bytes()).unwrap()
}

fn form(calls: CallFormat) -> AnswerForm {
    AnswerForm { calls: Some(calls), ..AnswerForm::default() }
}

fn writes_texts_as_they_are(format: CallFormat) -> bool {
    matches!(format.syntax().call, CallSyntax::Tags(_) | CallSyntax::Pairs { .. })
}

fn tools() -> Vec<Tool> {
    Tool::list(&json!([
        {"type": "function", "function": {"name": "weather", "parameters": {
            "type": "object",
            "properties": {
                "city": {"type": "string", "maxLength": 6, "pattern": "^[a-z]*$"},
                "days": {"type": "integer", "minimum": 1, "maximum": 9},
                "unit": {"enum": ["C", "F"]},
                "exact": {"type": "boolean"},
                "tags": {"type": "array", "items": {"$ref": "#/$defs/tag"}, "maxItems": 2},
            },
            "required": ["days"],
            "additionalProperties": false,
            "$defs": {"tag": {"enum": ["a", "b"]}},
        }}},
        {"name": "stop-all", "parameters": {"type": "object", "additionalProperties": false}},
        {"name": "maybe", "parameters": {"type": "object", "properties": {
            "a": {"type": "boolean"}, "b": {"type": "null"}}, "additionalProperties": false}},
    ]))
    .unwrap()
}

/// An answer by chance, with its special tokens spelled, and the number of tokens that were forced.
fn write(
    tokenizer: &Tokenizer,
    vocabulary: &Vocabulary,
    grammar: &Grammar,
    format: CallFormat,
    seed: u64,
) -> (String, usize) {
    let constraint = vocabulary.constrain(grammar, form(format), &[], false).unwrap();
    write_with(tokenizer, constraint, seed)
}

fn write_with(tokenizer: &Tokenizer, mut constraint: Constraint, seed: u64) -> (String, usize) {
    let end = tokenizer.token_to_id("<|im_end|>").unwrap();
    let (mut random, mut tokens, mut forced) =
        (seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1, Vec::new(), 0);
    while !constraint.is_over() && tokens.len() < 3000 {
        let must = constraint.forced();
        forced += must.len();
        if !must.is_empty() {
            assert_eq!(constraint.accepts(&must), must.len());
        }
        for &token in &must {
            constraint.accept(token).unwrap();
        }
        tokens.extend(must);
        if constraint.is_over() {
            break;
        }
        let mask = constraint.mask().unwrap();
        let bits = mask.iter().enumerate().flat_map(|(at, word)| {
            (0..32).filter(move |bit| word >> bit & 1 == 1).map(move |bit| at as u32 * 32 + bit)
        });
        let may: Vec<_> = bits.collect();
        random ^= random << 13;
        random ^= random >> 7;
        random ^= random << 17;
        // Where it may end, it does: a text without calls would go on for long.
        let token = if may.contains(&end) { end } else { may[random as usize % may.len()] };
        if token == end {
            break;
        }
        constraint.accept(token).unwrap();
        tokens.push(token);
    }
    (tokenizer.decode_with_special(&tokens).unwrap(), forced)
}

#[test]
fn calls_are_written_in_each_format_and_read_back() {
    let tools = tools();
    for special in [false, true] {
        let tokenizer = tokenizer(special);
        let end = tokenizer.token_to_id("<|im_end|>").unwrap();
        let count = tokenizer.vocab_size();
        let vocabulary = Vocabulary::new(&tokenizer, count, |_| true, &[end]).unwrap();
        for format in FORMATS {
            let mut names = Vec::new();
            let form = AnswerForm { one_call: true, ..form(format) };
            let grammar = Grammar::Calls(tools.clone());
            let constraint = || vocabulary.constrain(&grammar, form, &[], false).unwrap();
            let (one, _) = write_with(&tokenizer, constraint(), 3);
            assert_eq!(format.calls(&one, &tools).len(), 1, "{format:?}: {one:?}");
            let (again, _) = write_with(&tokenizer, constraint(), 4);
            assert_eq!(format.calls(&again, &tools).len(), 1, "{format:?}: {again:?}");
            for seed in 1..25 {
                let (text, forced) = write(&tokenizer, &vocabulary, &grammar, format, seed);
                let calls = format.calls(&text, &tools);
                assert!(!calls.is_empty() && forced > 3, "{format:?}: {text:?}");
                for call in calls {
                    let tool = tools.iter().find(|tool| tool.name == call.name).unwrap();
                    let schema = jsonschema::validator_for(&tool.parameters).unwrap();
                    assert!(
                        schema.is_valid(&call.arguments),
                        "{format:?}: {}: {text:?}",
                        call.arguments
                    );
                    names.push(call.name);
                }
            }
            for tool in &tools {
                assert!(names.contains(&tool.name), "{format:?}: {names:?}");
            }
        }
    }
}

#[test]
fn optional_calls_leave_room_for_text() {
    for special in [false, true] {
        let tokenizer = tokenizer(special);
        let end = tokenizer.token_to_id("<|im_end|>").unwrap();
        let count = tokenizer.vocab_size();
        let vocabulary = Vocabulary::new(&tokenizer, count, |_| true, &[end]).unwrap();
        for format in FORMATS {
            let grammar = Grammar::OptionalCalls(vec![Tool::new(
                "stop",
                json!({"type": "object", "additionalProperties": false}),
            )]);
            let call = match format.syntax().name {
                "tagged" => "<tool_call>\n{\"name\": \"stop\", \"arguments\": {}}\n</tool_call>",
                "elements" => "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
                "keys and values" => "<tool_call>stop\n</tool_call>",
                "bare" => "{\"name\": \"stop\", \"parameters\": {}}",
                "listed" => "[TOOL_CALLS][{\"name\": \"stop\", \"arguments\": {}}]",
                "named" => "[TOOL_CALLS]stop[ARGS]{}",
                "enclosed list" => {
                    "<|tool_call|>[{\"name\": \"stop\", \"arguments\": {}}]<|/tool_call|>"
                }
                "marked list" => "<|tool_call|>[{\"name\": \"stop\", \"arguments\": {}}]",
                "capitals" => "<TOOLCALL>[{\"name\": \"stop\", \"arguments\": {}}]</TOOLCALL>",
                "pairs" => "<|tool_call>call:stop{}<tool_call|>",
                "escaped pairs" => "<start_function_call>call:stop{}<end_function_call>",
                _ => "<|tool_call_start|>[stop()]<|tool_call_end|>",
            };
            // Whether all of a text may be written.
            let may = |text: &str| {
                let tokens = tokenizer.encode(text, false).unwrap();
                let mut constraint =
                    vocabulary.constrain(&grammar, form(format), &[], false).unwrap();
                let wrong = tokens.iter().position(|&token| {
                    let taken = constraint.accepts(&[token]) == 1;
                    !taken || constraint.accept(token).is_err()
                });
                let ends = constraint.is_over()
                    || constraint.mask().unwrap()[end as usize / 32] >> (end % 32) & 1 == 1;
                wrong.is_none() && ends
            };
            assert!(may("Just a text.\nOf two lines."), "{format:?}");
            assert!(may(call), "{format:?} {special}");
            assert!(!may(&call.replace("stop", "other")), "{format:?} {special}");
            if format != CallFormat::BARE {
                assert!(may(&format!("Let me see.\n{call}")), "{format:?} {special}");
            }
        }
    }
}

/// A vocabulary of a fixture.
fn vocabulary() -> (Tokenizer, Vocabulary) {
    let tokenizer = tokenizer(false);
    let end = tokenizer.token_to_id("<|im_end|>").unwrap();
    let count = tokenizer.vocab_size();
    let vocabulary = Vocabulary::new(&tokenizer, count, |_| true, &[end]).unwrap();
    (tokenizer, vocabulary)
}

#[test]
fn one_option_of_a_schema_leaves_the_others() {
    let (tokenizer, vocabulary) = vocabulary();
    let takes = |options: Value, text: &str| {
        let mut schema = json!({"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
                                "required": ["a", "b"], "additionalProperties": false});
        if !options.is_null() {
            schema["x-guidance"] = options;
        }
        let grammar = Grammar::JsonSchema(schema);
        let mut constraint =
            vocabulary.constrain(&grammar, AnswerForm::default(), &[], false).unwrap();
        let tokens = tokenizer.encode(text, false).unwrap();
        constraint.accepts(&tokens) == tokens.len()
    };
    let none = json!({"whitespace_flexible": false});
    assert!(takes(none.clone(), "{\"a\":1,\"b\":2}") && !takes(none, "{\"a\": 1,\"b\":2}"));
    let spaced = json!({"item_separator": ", "});
    assert!(takes(spaced.clone(), "{\"a\":1, \"b\":2}") && !takes(spaced, "{\"a\": 1, \"b\":2}"));
    // Of one key, the others are as without any.
    for text in ["{\"a\": 1,\n  \"b\": 2}", "{\"a\":1,\"b\":2}"] {
        assert_eq!(takes(json!({"lenient": true}), text), takes(json!(null), text), "{text}");
    }
    for text in
        ["{\"a\":1,\"b\":2}", "{\n    \"a\": 1,\n    \"b\": 2\n}", "{ \"a\" : 1 , \"b\" : 2 }"]
    {
        assert!(takes(json!(null), text), "{text}");
    }
    for run in ["  ", "\n\n", " \n", &format!("\n{}", " ".repeat(33))] {
        let text = format!("{{{run}\"a\":1,\"b\":2}}");
        assert!(!takes(json!(null), &text), "{text:?}");
    }
    let own = json!({"whitespace_pattern": "~"});
    assert!(takes(own.clone(), "{~\"a\":1,\"b\":2}") && !takes(own, "{ \"a\":1,\"b\":2}"));
}

#[test]
fn errors_name_the_tool_and_the_part_of_its_schema() {
    let (_, vocabulary) = vocabulary();
    let message = |grammar: &Grammar, format| {
        let error = vocabulary.constrain(grammar, form(format), &[], false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
        error.message().to_owned()
    };
    let object = |properties: Value| json!({"type": "object", "properties": properties});
    let refused = [
        (
            object(json!({"day": {"type": "integer", "not": {"const": 3}}})),
            "/properties/day",
            "\"not\"",
        ),
        (object(json!({"city": {"type": "string", "pattern": "["}})), "/properties/city", "regex"),
        (
            object(json!({"a/b": {"items": {"type": "strange"}}})),
            "/properties/a~1b/items",
            "strange",
        ),
        (
            object(json!({"to": {"anyOf": [{"type": "null"}, {"if": {}}]}})),
            "/properties/to/anyOf/1",
            "\"if\"",
        ),
        (
            json!({"type": "object", "properties": {"at": {"$ref": "#/$defs/place"}}, "$defs": {
            "place": object(json!({"zip": {"type": "strange"}})), "unused": {"not": {}}}}),
            "/$defs/place/properties/zip",
            "strange",
        ),
        (
            json!({"type": "object", "minProperties": 3, "dependentSchemas": {}}),
            "",
            "dependentSchemas",
        ),
    ];
    for (schema, path, why) in refused {
        let of_schema = message(&Grammar::JsonSchema(schema.clone()), CallFormat::TAGGED);
        let at = if path.is_empty() { String::new() } else { format!(", at {path}") };
        let expected = format!("the JSON schema{at}: ");
        assert!(of_schema.starts_with(&expected) && of_schema.contains(why), "{of_schema}");
        let fine = Tool::new("fine", object(json!({"a": {"type": "integer"}})));
        let tools = vec![fine, Tool::new("wrong", schema).strict(true)];
        // Other formats have no schema of all arguments.
        let formats = [CallFormat::TAGGED, CallFormat::BARE, CallFormat::LISTED];
        for (format, optional) in formats.into_iter().flat_map(|f| [(f, false), (f, true)]) {
            let grammar = match optional {
                false => Grammar::Calls(tools.clone()),
                true => Grammar::OptionalCalls(tools.clone()),
            };
            let of_tool = message(&grammar, format);
            let expected = format!("the tools: the parameters of \"wrong\"{at}: ");
            assert!(of_tool.starts_with(&expected) && of_tool.contains(why), "{of_tool}");
            for internal in ["%json", "a1", "f1", "while processing", "start:"] {
                assert!(!of_tool.contains(internal), "{internal} in {of_tool}");
            }
        }
    }
    let wrong = object(json!({"day": {"type": "integer", "not": {"const": 3}}}));
    for format in FORMATS {
        let of_tool =
            message(&Grammar::Calls(vec![Tool::new("wrong", wrong.clone()).strict(true)]), format);
        assert!(of_tool.contains("of \"wrong\", at /properties/day: "), "{format:?}: {of_tool}");
    }
}

#[test]
fn a_tokenizer_without_bytes_is_named() {
    let path = qhx_paths::fixture("qwen35-tied").join("tokenizer.json");
    let mut document: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    document["decoder"] = json!({"type": "BPEDecoder", "suffix": "</w>"});
    let document = document.to_string();
    let tokenizer = Tokenizer::from_bytes(Path::new("its.json"), document.as_bytes()).unwrap();
    let error = Vocabulary::new(&tokenizer, 428, |_| true, &[]).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.message().starts_with("its.json: its decoder gives tokens no bytes"), "{error}");
}

#[test]
fn unsupported_keywords_are_dropped_unless_a_tool_is_strict() {
    let tokenizer = tokenizer(true);
    let end = tokenizer.token_to_id("<|im_end|>").unwrap();
    let vocabulary = Vocabulary::new(&tokenizer, 512, |_| true, &[end]).unwrap();
    for (name, schema) in [
        ("names", json!({"type": "object", "propertyNames": {"maxLength": 3}})),
        ("unique", json!({"type": "array", "items": {"type": "integer"}, "uniqueItems": true})),
        ("other", json!({"not": {"type": "null"}})),
        ("mail", json!({"type": "string", "format": "postbox"})),
        ("word", json!({"type": "string", "pattern": "^(?!x)[a-z]+$"})),
        ("twice", json!({"type": "string", "pattern": r"^([a-z])\1$"})),
        ("one", json!({"oneOf": [{"type": "string"}, {"type": "string", "maxLength": 2}]})),
    ] {
        let schema = json!({"type": "object", "properties": {name: schema}, "required": [name]});
        let tool = Tool::new("search", schema);
        for format in FORMATS {
            let constrain = |tool: Tool| {
                let grammar = Grammar::OptionalCalls(vec![tool]);
                vocabulary.constrain(&grammar, form(format), &[], false).map(drop)
            };
            constrain(tool.clone()).unwrap_or_else(|e| panic!("{name}, {format:?}: {e}"));
            // Elements write texts as they are.
            if !writes_texts_as_they_are(format) || !["mail", "word", "twice"].contains(&name) {
                let error = constrain(tool.clone().strict(true)).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Usage, "{name}, {format:?}");
                assert!(error.message().contains("search"), "{name}, {format:?}: {error}");
            }
        }
    }
}

#[test]
fn an_answer_is_calls_or_json_of_a_schema() {
    for special in [false, true] {
        let tokenizer = tokenizer(special);
        let end = tokenizer.token_to_id("<|im_end|>").unwrap();
        let vocabulary = Vocabulary::new(&tokenizer, 512, |_| true, &[end]).unwrap();
        let schema = json!({"type": "object", "properties": {"n": {"type": "integer"}},
                            "required": ["n"], "additionalProperties": false});
        let tool = Tool::new("stop", json!({"type": "object", "additionalProperties": false}));
        let grammar = Grammar::JsonSchema(schema).or_calls(vec![tool]).unwrap();
        let calls = [
            (
                CallFormat::TAGGED,
                "<tool_call>\n{\"name\": \"stop\", \"arguments\": {}}\n</tool_call>",
            ),
            (CallFormat::BARE, "{\"name\": \"stop\", \"parameters\": {}}"),
            (CallFormat::LISTED, "[TOOL_CALLS][{\"name\": \"stop\", \"arguments\": {}}]"),
        ];
        for (format, call) in calls {
            let takes = |text: &str| {
                let mut constraint =
                    vocabulary.constrain(&grammar, form(format), &[], false).unwrap();
                let tokens = tokenizer.encode(text, false).unwrap();
                constraint.accepts(&tokens) == tokens.len()
            };
            assert!(takes(call) && takes("{\"n\": 7}") && takes("{\"n\":7}"), "{format:?}");
            assert!(!takes("Well") && !takes("{\"m\": 7}"), "{format:?}");
        }
    }
    assert_eq!(Grammar::Regex("a".to_owned()).or_calls(tools()), None);
}

/// Arguments of all kinds, and a text of a grammar of its own.
#[test]
fn arguments_in_pairs_are_of_their_schema() {
    let schema = json!({
        "type": "object",
        "properties": {
            "tree": {"$ref": "#/$defs/node"},
            "any": {},
            "kind": {"const": {"a": [1, "x"]}},
            "text": {"type": ["string", "null"], "minLength": 1, "maxLength": 4},
            "map": {"type": "object", "additionalProperties": {"type": "integer", "maximum": 3}},
            "list": {"type": "array", "items": {"enum": ["a", 2, true]}, "minItems": 2, "maxItems": 3},
            "one": {"anyOf": [{"type": "boolean"}, {"type": "array", "maxItems": 1}]},
        },
        "required": ["list", "tree"],
        "additionalProperties": false,
        "$defs": {"node": {"type": "object", "properties": {
            "value": {"type": "number", "minimum": -9, "maximum": 9}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
            "required": ["value"], "additionalProperties": false}},
    });
    let valid = jsonschema::validator_for(&schema).unwrap();
    let tools = vec![Tool::new("f", schema).strict(true)];
    for special in [false, true] {
        let tokenizer = tokenizer(special);
        let end = tokenizer.token_to_id("<|im_end|>").unwrap();
        let vocabulary =
            Vocabulary::new(&tokenizer, tokenizer.vocab_size(), |_| true, &[end]).unwrap();
        let mut seen = BTreeSet::new();
        for seed in 1..60 {
            let (text, _) = write(
                &tokenizer,
                &vocabulary,
                &Grammar::Calls(tools.clone()),
                CallFormat::PAIRS,
                seed,
            );
            let calls = CallFormat::PAIRS.calls(&text, &tools);
            // Any value may be longer than the bound of tokens.
            let [call] = calls.as_slice() else { continue };
            assert!(valid.is_valid(&call.arguments), "{}: {text:?}", call.arguments);
            seen.extend(call.arguments.as_object().unwrap().keys().cloned());
        }
        assert_eq!(seen.len(), 7, "{seen:?}");
    }
}

#[test]
fn a_text_that_is_written_as_it_is_follows_a_grammar_of_its_own() {
    let tokenizer = tokenizer(true);
    let end = tokenizer.token_to_id("<|im_end|>").unwrap();
    let vocabulary = Vocabulary::new(&tokenizer, tokenizer.vocab_size(), |_| true, &[end]).unwrap();
    let lark = "start: line+\nline: \"+ \" WORD \"\\n\"\nWORD: /[a-c{}]+/";
    for (text, pattern) in [
        (json!({"type": "string", Tool::LARK: lark}), "^(\\+ [a-c{}]+\\n)+$"),
        (json!({"type": "string", "pattern": "^[a-c]+/x$"}), "^[a-c]+/x$"),
    ] {
        let schema =
            json!({"type": "object", "properties": {"input": text}, "required": ["input"]});
        let pattern = json!({"properties": {"input": {"type": "string", "pattern": pattern}}});
        let valid = jsonschema::validator_for(&pattern).unwrap();
        let tools = vec![Tool::new("patch", schema)];
        for format in FORMATS.into_iter().filter(|format| writes_texts_as_they_are(*format)) {
            for seed in 1..8 {
                let (answer, _) =
                    write(&tokenizer, &vocabulary, &Grammar::Calls(tools.clone()), format, seed);
                let calls = format.calls(&answer, &tools);
                let input = &calls[0].arguments;
                // The reader of tags takes line ends at both ends for its own.
                let whole = json!({"input": format!("{}\n", input["input"].as_str().unwrap())});
                assert!(valid.is_valid(input) || valid.is_valid(&whole), "{format:?}: {answer:?}");
            }
        }
    }
}

/// Calls within reasoning are words; behind it, and without it, they are of the grammar.
#[test]
fn reasoning_stands_before_optional_calls() {
    let marks = |source: &str| ReasoningMarks::of_template(source).unwrap();
    let think = marks("<think></think>");
    for (special, format, reasoning) in [
        (false, CallFormat::ELEMENTS, think),
        (true, CallFormat::ELEMENTS, think),
        (false, CallFormat::TAGGED, think),
        (true, CallFormat::PYTHON, think),
        (true, CallFormat::PAIRS, marks("<|channel><channel|>")),
        (false, CallFormat::BARE, think),
    ] {
        let tokenizer = tokenizer(special);
        let end = tokenizer.token_to_id("<|im_end|>").unwrap();
        let vocabulary = Vocabulary::new(&tokenizer, 512, |_| true, &[end]).unwrap();
        let grammar = Grammar::OptionalCalls(vec![Tool::new(
            "stop",
            json!({"type": "object", "additionalProperties": false}),
        )]);
        let may = |beginning, text: &str| {
            let form = AnswerForm { calls: Some(format), reasoning, beginning, one_call: false };
            let mut constraint = vocabulary.constrain(&grammar, form, &[], false).unwrap();
            let tokens = tokenizer.encode(text, false).unwrap();
            tokens
                .iter()
                .all(|&token| constraint.accepts(&[token]) == 1 && constraint.accept(token).is_ok())
                && (constraint.is_over()
                    || constraint.mask().unwrap()[end as usize / 32] >> (end % 32) & 1 == 1)
        };
        let (open, close) = (reasoning.open, reasoning.close);
        let (start, _) = format.marks();
        let call = match format.syntax().name {
            "elements" => "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
            "tagged" => "<tool_call>\n{\"name\": \"stop\", \"arguments\": {}}\n</tool_call>",
            "pairs" => "<|tool_call>call:stop{}<tool_call|>",
            "bare" => "{\"name\": \"stop\", \"parameters\": {}}",
            _ => "<|tool_call_start|>[stop()]<|tool_call_end|>",
        };
        let wrong = call.replace("stop", "other");
        let texts = [
            (format!("{open}Hm.{close}Well."), true),
            (format!("{open}Hm.{close}{call}"), true),
            (format!("{open}I {start} it{close}{call}"), true),
            (format!("{open}I {start} it{close}{wrong}"), false),
            (format!("{open}Hm. {wrong}"), true),
            (format!("{open}Hm"), true),
            ("Well.".to_owned(), true),
            (call.to_owned(), true),
            (wrong.clone(), false),
        ];
        for (text, expected) in texts {
            assert_eq!(may(Beginning::Either, &text), expected, "{format:?}, {special}: {text}");
            // The same where the prompt opens it.
            if let Some(text) = text.strip_prefix(open) {
                assert_eq!(
                    may(Beginning::Reasoning, text),
                    expected,
                    "{format:?}, {special}: {text}"
                );
            }
        }
    }
}
