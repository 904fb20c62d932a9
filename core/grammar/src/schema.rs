//! Format of JSON that a schema describes.

use llguidance::JsonCompileOptions;
use serde_json::{Map, Value};

/// Key of a schema that says how its JSON is written.
const OPTIONS: &str = "x-guidance";
/// Its key for blanks between any two tokens.
const FLEXIBLE: &str = "whitespace_flexible";
/// Its keys for what stands behind an item and a key.
const SEPARATORS: [&str; 2] = ["item_separator", "key_separator"];

/// Blanks between two tokens of JSON where there may be any: a space, or a line's end and what the next line is
/// indented by. Without a bound a model that has lost its way writes nothing else.
const BLANKS: &str = r" |\r?\n[ \t]{0,32}";

/// A schema whose JSON may have blanks between any two tokens, in runs that end, unless it says otherwise. Models learn
/// to write some: without any they close lists that they have just opened, or repeat an item until they are cut.
pub(crate) fn flexible(schema: Value) -> Value {
    written(schema, JsonCompileOptions { whitespace_flexible: true, ..Default::default() })
}

/// A schema whose JSON has the spaces that models learn to put into calls, unless it says otherwise. A `lenient` one
/// leaves out what no grammar can hold to: `not`, `uniqueItems`, formats that are not known, look-around in patterns.
pub(crate) fn spaced(mut schema: Value, lenient: bool) -> Value {
    if lenient {
        without_look_around(&mut schema);
    }
    written(
        schema,
        JsonCompileOptions {
            whitespace_flexible: false,
            lenient,
            item_separator: ", ".to_owned(),
            key_separator: ": ".to_owned(),
            ..Default::default()
        },
    )
}

/// Beginnings of groups that look around, and of references back.
const LOOKING: [&str; 5] = ["(?=", "(?!", "(?<=", "(?<!", r"\k<"];

/// True for a regular expression with look-around or references back, which no automaton can follow.
pub(crate) fn looks_around(pattern: &str) -> bool {
    let refers = |pair: &[u8]| pair[0] == b'\\' && pair[1].is_ascii_digit() && pair[1] != b'0';
    LOOKING.iter().any(|begin| pattern.contains(begin)) || pattern.as_bytes().windows(2).any(refers)
}

/// Takes patterns that look around from a schema.
fn without_look_around(schema: &mut Value) {
    match schema {
        Value::Object(map) => {
            if map.get("pattern").and_then(Value::as_str).is_some_and(looks_around) {
                map.remove("pattern");
            }
            if let Some(Value::Object(patterns)) = map.get_mut("patternProperties") {
                patterns.retain(|pattern, _| !looks_around(pattern));
            }
            map.values_mut().for_each(without_look_around);
        }
        Value::Array(list) => list.iter_mut().for_each(without_look_around),
        _ => {}
    }
}

/// A schema whose JSON is written as `defaults` declare, but for what its key [`OPTIONS`] sets.
fn written(schema: Value, defaults: JsonCompileOptions) -> Value {
    let mut schema = match schema {
        Value::Object(schema) => schema,
        // True and false are schemas, too.
        other => Map::from_iter([("allOf".to_owned(), Value::Array(vec![other]))]),
    };
    let flexible = defaults.whitespace_flexible;
    let mut options = serde_json::to_value(defaults).unwrap_or_default();
    match (&mut options, schema.remove(OPTIONS)) {
        (Value::Object(options), Some(Value::Object(given))) => {
            // Who names separators wants these alone.
            let separates = SEPARATORS.iter().any(|key| given.contains_key(*key));
            options.insert(FLEXIBLE.to_owned(), (flexible && !separates).into());
            options.extend(given);
        }
        // What is no object is refused when it is read.
        (options, Some(given)) => *options = given,
        (_, None) => {}
    }
    if options[FLEXIBLE] == true && options["whitespace_pattern"].is_null() {
        options["whitespace_pattern"] = BLANKS.into();
    }
    schema.insert(OPTIONS.to_owned(), options);
    schema.into()
}
