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

/// A schema whose JSON has the spaces that models learn to put into calls, unless it says otherwise.
pub(crate) fn spaced(schema: Value) -> Value {
    written(
        schema,
        JsonCompileOptions {
            whitespace_flexible: false,
            item_separator: ", ".to_owned(),
            key_separator: ": ".to_owned(),
            ..Default::default()
        },
    )
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
