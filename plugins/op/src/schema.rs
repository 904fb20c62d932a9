//! Parts of the JSON Schema that an op gives for `plan.params`, which the host checks a manifest with
//! before it loads anything.

use serde_json::{Map, Value, json};

/// Roles of the tensors that a [`crate::state::StateCarrier`] pairs.
pub const STATE_ROLES: [&str; 4] = ["past_*", "new_*", "present_*", "row_*"];

/// Roles of the tensors that a [`crate::decoder::Decoder`] knows by itself, besides its state.
pub const DECODER_ROLES: [&str; 6] = ["x", "y", "cos", "sin", "cmask", "logits"];

/// `plan.params` of an op that is a [`crate::decoder::Decoder`], with the roles of further tensors
/// that it fills.
pub fn decoder<'a>(roles: impl IntoIterator<Item = &'a str>) -> Value {
    json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "required": ["decode"],
        "properties": {
            "decode": graphs("Graph that takes one token, or its shards in order."),
            "prefill": graphs(
                "Graphs that take several tokens of a prompt. Those with as many rows of x are the \
                 shards of one step, in order; several numbers of rows may be there."
            ),
            "lmhead": {
                "description":
                    "Graph from hidden row to logits; absent when the last decode graph gives logits.",
                "type": "string"
            },
            "tensors": tensors(DECODER_ROLES.into_iter().chain(STATE_ROLES).chain(roles))
        }
    })
}

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
