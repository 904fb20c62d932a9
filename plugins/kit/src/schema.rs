//! Parts of the JSON Schema that an op gives for `plan.params`, which the host checks a manifest with
//! before it loads anything.

use serde_json::{Map, Value, json};

use crate::experts;

/// Roles of the tensors that a [`crate::state::StateCarrier`] pairs.
pub const STATE_ROLES: [&str; 5] = ["past_*", "scale_*", "new_*", "present_*", "row_*"];

/// Roles of the tensors that a [`crate::decoder::Decoder`] knows by itself, besides its state.
pub const DECODER_ROLES: [&str; 7] = ["x", "y", "h", "cos", "sin", "cmask", "logits"];

/// `plan.params` of an op that is a [`crate::decoder::Decoder`], with the roles of further tensors
/// that it fills.
pub fn decoder<'a>(roles: impl IntoIterator<Item = &'a str>) -> Value {
    let roles = roles.into_iter().chain(experts::ROLES);
    let mut schema = json!({
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "type": "object",
        "required": ["decode"],
        "properties": {
            "decode": graphs("Graph that takes one token, or its shards in order."),
            "prefill": graphs(
                "Graphs that take several tokens of a prompt. Those with as many rows of x are the \
                 shards of one step, in order; several numbers of rows may be there."
            ),
            "within": {
                "description":
                    "For each smaller context the graphs of decode, and of prefill, with caches of fewer rows: a step \
                     goes through the smallest ones that hold its positions.",
                "type": "array",
                "items": graphs("Graphs of one smaller context, with shards in order.")
            },
            "lmhead": {
                "description":
                    "Graph from hidden row to logits; absent when the last decode graph gives logits.",
                "type": "string"
            },
            "draft_head": graphs(
                "Graphs of a drafting head: from embeddings x of tokens and the hidden states h before them to hidden \
                 states y, which lmhead makes logits of draft tokens of. One takes a single token. Those that read the \
                 decoder's caches and write none may give logits themselves."
            ),
            "tensors": tensors(DECODER_ROLES.into_iter().chain(STATE_ROLES).chain(roles))
        }
    });
    if let Some(properties) = schema["properties"].as_object_mut() {
        properties.extend(expert_params());
    }
    schema
}

/// Schema of the experts in `plan.params`: the fields of [`experts::ExpertParams`].
pub fn expert_params() -> Map<String, Value> {
    let params = json!({
        "ffn": {
            "description": "Graph of the experts of one token.",
            "default": "ffn2",
            "type": "string"
        },
        "ffn_prefill": {
            "description": "Graph of one expert for several tokens.",
            "default": "ffn_pf",
            "type": "string"
        },
        "int8_step": {
            "description": "What one step of int8 weight inputs is worth inside the graphs, their encoding's scale.",
            "default": 1.0,
            "type": "number",
            "exclusiveMinimum": 0
        },
        "read_ahead": {
            "description": "Ask the system for experts as a whole before their first use.",
            "default": true,
            "type": "boolean"
        },
        "trace_routing": {
            "description": "Log every routing decision, at level debug.",
            "default": false,
            "type": "boolean"
        }
    });
    match params {
        Value::Object(params) => params,
        _ => Map::new(),
    }
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
