//! Calls of tools in each format, written by chance over the tokens of a fixture.

use std::path::Path;

use qhx_base::ErrorKind;
use qhx_text::{CallFormat, Tokenizer, Tool};
use serde_json::{Value, json};

use super::*;

const FORMATS: [CallFormat; 5] = [
    CallFormat::Tagged,
    CallFormat::Elements,
    CallFormat::Bare,
    CallFormat::Listed,
    CallFormat::Python,
];

/// Tokens of a fixture, with the marks of calls as special tokens if so.
fn tokenizer(special: bool) -> Tokenizer {
    let path = qhx_paths::fixture("qwen35-tied").join("tokenizer.json");
    let mut document: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    let added = document["added_tokens"].as_array_mut().unwrap();
    let marks =
        ["<tool_call>", "</tool_call>", "[TOOL_CALLS]", "<|tool_call_start|>", "<|tool_call_end|>"];
    for mark in marks.into_iter().filter(|_| special) {
        let mut token = added[0].clone();
        (token["content"], token["id"]) = (mark.into(), added.len().into());
        token["id"] = (428 + added.len()).into();
        added.push(token);
    }
    Tokenizer::from_bytes(Path::new("tokenizer.json"), document.to_string().as_bytes()).unwrap()
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
    let mut constraint = vocabulary.constrain(grammar, Some(format), &[], false).unwrap();
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
            for seed in 1..25 {
                let grammar = Grammar::Calls(tools.clone());
                let (text, forced) = write(&tokenizer, &vocabulary, &grammar, format, seed);
                let calls = format.calls(&text, &tools);
                assert!(!calls.is_empty() && forced > 3, "{format:?}: {text:?}");
                for call in calls {
                    let tool = tools.iter().find(|tool| tool.name == call.name).unwrap();
                    let schema = jsonschema::validator_for(&tool.parameters).unwrap();
                    // An argument that is a text has no pattern in a format that does not quote it.
                    let mut arguments = call.arguments.clone();
                    if format == CallFormat::Elements {
                        arguments.as_object_mut().unwrap().remove("city");
                    }
                    assert!(schema.is_valid(&arguments), "{format:?}: {arguments}: {text:?}");
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
            let call = match format {
                CallFormat::Tagged => {
                    "<tool_call>\n{\"name\": \"stop\", \"arguments\": {}}\n</tool_call>"
                }
                CallFormat::Elements => "<tool_call>\n<function=stop>\n</function>\n</tool_call>",
                CallFormat::Bare => "{\"name\": \"stop\", \"parameters\": {}}",
                CallFormat::Listed => "[TOOL_CALLS][{\"name\": \"stop\", \"arguments\": {}}]",
                _ => "<|tool_call_start|>[stop()]<|tool_call_end|>",
            };
            // Whether all of a text may be written.
            let may = |text: &str| {
                let tokens = tokenizer.encode(text, false).unwrap();
                let mut constraint =
                    vocabulary.constrain(&grammar, Some(format), &[], false).unwrap();
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
            if format != CallFormat::Bare {
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
        let mut constraint = vocabulary.constrain(&grammar, None, &[], false).unwrap();
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
        let error = vocabulary.constrain(grammar, Some(format), &[], false).unwrap_err();
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
        let of_schema = message(&Grammar::JsonSchema(schema.clone()), CallFormat::Tagged);
        let at = if path.is_empty() { String::new() } else { format!(", at {path}") };
        let expected = format!("the JSON schema{at}: ");
        assert!(of_schema.starts_with(&expected) && of_schema.contains(why), "{of_schema}");
        let fine = Tool::new("fine", object(json!({"a": {"type": "integer"}})));
        let tools = vec![fine, Tool::new("wrong", schema).strict(true)];
        // Other formats have no schema of all arguments.
        let formats = [CallFormat::Tagged, CallFormat::Bare, CallFormat::Listed];
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
                vocabulary.constrain(&grammar, Some(format), &[], false).map(drop)
            };
            constrain(tool.clone()).unwrap_or_else(|e| panic!("{name}, {format:?}: {e}"));
            // Elements write texts as they are.
            if format != CallFormat::Elements || !["mail", "word", "twice"].contains(&name) {
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
                CallFormat::Tagged,
                "<tool_call>\n{\"name\": \"stop\", \"arguments\": {}}\n</tool_call>",
            ),
            (CallFormat::Bare, "{\"name\": \"stop\", \"parameters\": {}}"),
            (CallFormat::Listed, "[TOOL_CALLS][{\"name\": \"stop\", \"arguments\": {}}]"),
        ];
        for (format, call) in calls {
            let takes = |text: &str| {
                let mut constraint =
                    vocabulary.constrain(&grammar, Some(format), &[], false).unwrap();
                let tokens = tokenizer.encode(text, false).unwrap();
                constraint.accepts(&tokens) == tokens.len()
            };
            assert!(takes(call) && takes("{\"n\": 7}") && takes("{\"n\":7}"), "{format:?}");
            assert!(!takes("Well") && !takes("{\"m\": 7}"), "{format:?}");
        }
    }
    assert_eq!(Grammar::Regex("a".to_owned()).or_calls(tools()), None);
}
