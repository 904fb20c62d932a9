//! How JSON of a schema is written.

use llguidance::JsonCompileOptions;
use serde_json::{Map, Value};

/// A schema whose JSON has no spaces, unless it says otherwise.
pub(crate) fn compact(schema: Value) -> Value {
    let mut schema = match schema {
        Value::Object(schema) => schema,
        // True and false are schemas, too.
        other => Map::from_iter([("allOf".to_owned(), Value::Array(vec![other]))]),
    };
    if !schema.contains_key("x-guidance") {
        let options = JsonCompileOptions { whitespace_flexible: false, ..Default::default() };
        schema.insert("x-guidance".to_owned(), serde_json::to_value(options).unwrap_or_default());
    }
    Value::Object(schema)
}
