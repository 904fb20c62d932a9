//! Pieces of the JSON Schema that an op gives for `plan.params`, which the host checks a manifest with
//! before it loads anything.

use serde_json::{Map, Value, json};

/// Roles of the tensors that a [`crate::state::StateCarrier`] pairs.
pub const STATE_ROLES: [&str; 3] = ["past_*", "new_*", "present_*"];

/// A parameter that names one graph, or several in order.
pub fn graphs(description: &str) -> Value {
    json!({
        "description": description,
        "oneOf": [
            {"type": "string"},
            {"type": "array", "items": {"type": "string"}, "minItems": 1}
        ]
    })
}

/// `plan.params.tensors` of an op that knows these roles and no others. A role consists of letters,
/// digits, `_` and at most one `*`, which stands for any text, usually a layer's number.
pub fn tensors<'a>(roles: impl IntoIterator<Item = &'a str>) -> Value {
    let name = || json!({"type": "string"});
    let (mut properties, mut patterns) = (Map::new(), Map::new());
    for role in roles {
        properties.insert(role.to_owned(), name());
        if role.contains('*') {
            patterns.insert(format!("^{}$", role.replace('*', ".+")), name());
        }
    }
    json!({
        "description": "Role to tensor name, where they differ; one * in both stands for the same text.",
        "type": "object",
        "properties": properties,
        "patternProperties": patterns,
        "additionalProperties": false
    })
}
