//! How JSON of a schema is written.

use llguidance::JsonCompileOptions;
use serde_json::{Map, Value};

/// Key of a schema that says how its JSON is written.
const OPTIONS: &str = "x-guidance";

/// Blanks between two tokens of JSON where there may be any: a space, or a line's end and what the next line is indented
/// by. Without a bound a model that has lost its way writes nothing else.
const BLANKS: &str = r" |\r?\n[ \t]{0,32}";

/// A schema whose JSON is written without spaces, unless it says otherwise.
pub(crate) fn compact(schema: Value) -> Value {
    written(schema, JsonCompileOptions { whitespace_flexible: false, ..Default::default() })
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
    let mut options = serde_json::to_value(defaults).unwrap_or_default();
    match (&mut options, schema.remove(OPTIONS)) {
        (Value::Object(options), Some(Value::Object(given))) => options.extend(given),
        // What is no object is refused when it is read.
        (options, Some(given)) => *options = given,
        (_, None) => {}
    }
    if options["whitespace_flexible"] == true && options["whitespace_pattern"].is_null() {
        options["whitespace_pattern"] = BLANKS.into();
    }
    schema.insert(OPTIONS.to_owned(), options);
    schema.into()
}
