//! Checks a host-op's `plan.params` in the manifest against the JSON Schema of the op's description.
//!
//! The schema is a plugin's, the parameters are a bundle's. Nothing is fetched: a schema stands on its
//! own, and one with references is not used at all, since they could also go round in circles. Patterns
//! match in linear time, and the sizes of both sides bound the work.

use jsonschema::error::{TypeKind, ValidationErrorKind};
use jsonschema::{Draft, PatternOptions, ValidationError, Validator};
use qhx_base::{Error, ErrorKind, Result};
use qhx_core::manifest::Manifest;
use qhx_core::op::OpDescription;
use qhx_op::guard::catch;
use serde_json::Value;

use crate::nearest::{nearest, quoted};

/// Values in a schema; ours have under a hundred.
const MAX_SCHEMA_VALUES: usize = 4096;
/// Bytes of a schema.
const MAX_SCHEMA_BYTES: usize = 1 << 16;
/// Values of the schema times bytes of the parameters.
const MAX_WORK: usize = 1 << 28;
/// Bytes of a compiled pattern.
const MAX_PATTERN_BYTES: usize = 1 << 16;
/// Characters of a value in a message.
const SHOWN: usize = 60;
/// Path of the parameters in the manifest, for messages.
const PLACE: &str = "plan.params";

/// Errors when `plan.params` is not what the op's schema declares. Logs a warning for a key that the op
/// does not know and that is nearly one that it does.
pub(crate) fn check(op: &OpDescription, manifest: &Manifest) -> Result<()> {
    let schema = &op.params_schema;
    let mut params = manifest.plan.params.clone();
    without_nulls(&mut params);
    if params.is_null() {
        params = Value::Object(serde_json::Map::new());
    }
    let validator = match validator(schema, &params) {
        Ok(Some(validator)) => validator,
        Ok(None) => return Ok(()),
        Err(why) => {
            tracing::warn!(op = op.name, "params_schema of the host-op is not used: {why}");
            return Ok(());
        }
    };
    let found = catch(|| validator.iter_errors(&params).next().map(ValidationError::to_owned));
    match found {
        Ok(None) => {}
        Ok(Some(error)) => return Err(refusal(op, &params, &error)),
        Err(panic) => {
            tracing::warn!(op = op.name, "params_schema of the host-op is not used: {panic}");
        }
    }
    for (unknown, known) in misspelt(schema, &params) {
        tracing::warn!(
            "{}: {PLACE}.{unknown}: host-op {:?} does not know this key; did you mean {known:?}?",
            manifest.path.display(),
            op.name
        );
    }
    Ok(())
}

/// The schema made ready; `None` when it allows everything. The error is the reason why it is not used.
fn validator(schema: &Value, params: &Value) -> Result<Option<Validator>, String> {
    match schema {
        Value::Null | Value::Bool(true) => return Ok(None),
        Value::Object(keys) if keys.is_empty() => return Ok(None),
        _ => {}
    }
    let values = values(schema)?;
    let bytes = schema.to_string().len();
    if values > MAX_SCHEMA_VALUES || bytes > MAX_SCHEMA_BYTES {
        return Err(format!(
            "it has {values} values in {bytes} bytes, expected at most {MAX_SCHEMA_VALUES} in \
             {MAX_SCHEMA_BYTES}"
        ));
    }
    let length = params.to_string().len();
    if values.saturating_mul(length) > MAX_WORK {
        return Err(format!("{PLACE} has {length} bytes, too many to be checked"));
    }
    let patterns =
        PatternOptions::regex().size_limit(MAX_PATTERN_BYTES).dfa_size_limit(MAX_PATTERN_BYTES);
    let options = jsonschema::options()
        .with_draft(Draft::Draft202012)
        .with_pattern_options(patterns)
        .should_validate_formats(false);
    catch(|| {
        options.build(schema).map_err(|e| format!("it is no JSON Schema: {}", cut(&e.to_string())))
    })?
    .map(Some)
}

/// Number of values in a schema. Errors when it has a keyword that leads elsewhere.
fn values(schema: &Value) -> Result<usize, String> {
    let mut count = 0;
    let mut left = vec![schema];
    while let Some(value) = left.pop() {
        count += 1;
        match value {
            Value::Array(items) => left.extend(items),
            Value::Object(keys) => {
                let leads = |key: &&String| {
                    key.starts_with('$') && !["$schema", "$comment"].contains(&key.as_str())
                };
                if let Some(key) = keys.keys().find(leads) {
                    return Err(format!(
                        "it has {}, expected a schema without references",
                        cut(key)
                    ));
                }
                left.extend(keys.values());
            }
            _ => {}
        }
    }
    Ok(count)
}

/// Takes out keys that are null, which count as absent everywhere in a manifest.
fn without_nulls(value: &mut Value) {
    match value {
        Value::Object(keys) => {
            keys.retain(|_, value| !value.is_null());
            keys.values_mut().for_each(without_nulls);
        }
        Value::Array(items) => items.iter_mut().for_each(without_nulls),
        _ => {}
    }
}

/// Unknown keys that are nearly a known one that is not given.
fn misspelt<'a>(schema: &'a Value, params: &'a Value) -> Vec<(&'a str, &'a str)> {
    let (Some(known), Some(given)) = (properties(schema), params.as_object()) else {
        return Vec::new();
    };
    let absent = || known.keys().filter(|key| !given.contains_key(*key)).map(String::as_str);
    let unknown = given.keys().filter(|key| !known.contains_key(*key));
    unknown.filter_map(|key| Some((key.as_str(), nearest(key, absent())?))).collect()
}

fn properties(schema: &Value) -> Option<&serde_json::Map<String, Value>> {
    schema.get("properties")?.as_object()
}

/// The error of a user's manifest.
fn refusal(op: &OpDescription, params: &Value, error: &ValidationError<'_>) -> Error {
    let (error, expected) = most_telling(error);
    let place = place(error);
    let found = cut(&error.instance().to_string());
    let schema = schema_at(&op.params_schema, error);
    let message = match error.kind() {
        ValidationErrorKind::Required { property } => {
            let key = property.as_str().unwrap_or_default();
            format!("{place}.{key}: missing; host-op {:?} needs it", op.name)
        }
        ValidationErrorKind::AdditionalProperties { unexpected } => {
            let key = unexpected.first().map_or("", String::as_str);
            format!("{place}.{}: host-op {:?} does not know this key", cut(key), op.name)
        }
        _ => format!("{place}: found {found}, expected {expected} for host-op {:?}", op.name),
    };
    let error_of = |message| Error::new(ErrorKind::Manifest, message);
    match error.kind() {
        ValidationErrorKind::Required { property } => {
            let key = property.as_str().unwrap_or_default();
            let given = params.pointer(error.instance_path().as_str()).and_then(Value::as_object);
            let keys = given.into_iter().flat_map(|keys| keys.keys()).map(String::as_str);
            match nearest(key, keys) {
                Some(given) => error_of(message).hint(format!("is {place}.{} meant?", cut(given))),
                None => error_of(message),
            }
        }
        ValidationErrorKind::AdditionalProperties { unexpected } => {
            let key = unexpected.first().map_or("", String::as_str);
            let known: Vec<_> = schema
                .and_then(properties)
                .into_iter()
                .flat_map(|k| k.keys())
                .map(String::as_str)
                .collect();
            match nearest(key, known.iter().copied()) {
                Some(near) => error_of(message).hint(format!("did you mean {near:?}?")),
                None if known.is_empty() => error_of(message),
                None => error_of(message).hint(format!("it knows {}", quoted(&known))),
            }
        }
        _ => error_of(message),
    }
}

/// For a value that fits none of several alternatives: the failure that lies deepest in it, and the expectation there.
/// `["a", 7]` against a name or a list of names fails at the 7.
fn most_telling<'a, 'e>(error: &'a ValidationError<'e>) -> (&'a ValidationError<'e>, String) {
    let (ValidationErrorKind::AnyOf { context } | ValidationErrorKind::OneOfNotValid { context }) =
        error.kind()
    else {
        return (error, expectation(error));
    };
    let depth = |e: &ValidationError<'_>| e.instance_path().as_str().matches('/').count();
    let own = depth(error);
    // `'static` errors inside; they are shown, never kept.
    let inner: Vec<_> = context.iter().filter_map(|branch| branch.first()).collect();
    if let Some(deepest) = inner.iter().max_by_key(|e| depth(e)).filter(|e| depth(e) > own) {
        return most_telling(deepest);
    }
    let mut all: Vec<String> = inner.into_iter().map(|e| most_telling(e).1).collect();
    all.dedup();
    (error, all.join(" or "))
}

/// Expectation of a keyword, in words.
fn expectation(error: &ValidationError<'_>) -> String {
    match error.kind() {
        ValidationErrorKind::Type { kind: TypeKind::Single(kind) } => a(&kind.to_string()),
        ValidationErrorKind::Type { kind: TypeKind::Multiple(kinds) } => {
            kinds.iter().map(|kind| a(&kind.to_string())).collect::<Vec<_>>().join(" or ")
        }
        ValidationErrorKind::Enum { options } => format!("one of {}", cut(&options.to_string())),
        ValidationErrorKind::Constant { expected_value } => cut(&expected_value.to_string()),
        ValidationErrorKind::Minimum { limit } => format!("at least {limit}"),
        ValidationErrorKind::ExclusiveMinimum { limit } => format!("more than {limit}"),
        ValidationErrorKind::Maximum { limit } => format!("at most {limit}"),
        ValidationErrorKind::ExclusiveMaximum { limit } => format!("less than {limit}"),
        ValidationErrorKind::MinItems { limit } => format!("at least {limit} items"),
        ValidationErrorKind::MaxItems { limit } => format!("at most {limit} items"),
        ValidationErrorKind::Pattern { pattern } => format!("a text like {}", cut(pattern)),
        kind => format!("what the schema's {:?} allows", kind.keyword()),
    }
}

fn a(kind: &str) -> String {
    let article = if kind.starts_with(['a', 'e', 'i', 'o', 'u']) { "an" } else { "a" };
    format!("{article} {kind}")
}

/// `plan.params.decode[1]` for `/decode/1`.
fn place(error: &ValidationError<'_>) -> String {
    let mut place = PLACE.to_owned();
    for part in error.instance_path().as_str().split('/').skip(1) {
        let part = part.replace("~1", "/").replace("~0", "~");
        match part.parse::<usize>() {
            Ok(index) => place.push_str(&format!("[{index}]")),
            Err(_) => place.push_str(&format!(".{}", cut(&part))),
        }
    }
    place
}

/// The schema that holds the keyword that failed.
fn schema_at<'a>(schema: &'a Value, error: &ValidationError<'_>) -> Option<&'a Value> {
    let path = error.schema_path().as_str();
    schema.pointer(path.rsplit_once('/').map_or("", |(parent, _)| parent))
}

/// A text for a message: one line of bounded length without control characters.
fn cut(text: &str) -> String {
    let mut shown: String = text.chars().take(SHOWN).flat_map(escaped).collect();
    if text.chars().nth(SHOWN).is_some() {
        shown.push('…');
    }
    shown
}

fn escaped(c: char) -> impl Iterator<Item = char> {
    let control = c.is_control().then(|| c.escape_default());
    let plain = (!c.is_control()).then_some(c);
    control.into_iter().flatten().chain(plain)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::{Duration, Instant};

    use serde_json::json;

    use super::*;

    fn check_with(schema: Value, params: Value) -> Result<()> {
        let op = OpDescription {
            name: "tiny".to_owned(),
            params_schema: schema,
            ..OpDescription::default()
        };
        let manifest = json!({
            "schema_version": 1,
            "model": {"name": "tiny"},
            "artifacts": {"contexts": {"step": {"bin": "step.bin"}}},
            "plan": {"params": params, "steps": [{"host": "tiny"}]}
        });
        check(&op, &Manifest::from_value(Path::new("tiny.json"), manifest, None)?)
    }

    #[test]
    fn a_schema_that_allows_everything_or_is_none_refuses_nothing() {
        for schema in [json!(null), json!(true), json!({}), json!({"type": 7}), json!("text")] {
            assert!(check_with(schema, json!({"any": [1, 2]})).is_ok());
        }
    }

    #[test]
    fn each_key_is_named_with_what_was_found_and_expected() {
        let schema = json!({
            "type": "object",
            "required": ["decode"],
            "properties": {
                "decode": {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]},
                "mode": {"enum": ["mean", "last"]},
                "step": {"type": "integer", "minimum": 1, "maximum": 9},
                "deep": {"type": "object", "properties": {"a/b": {"type": "boolean"}}},
                "name": {"type": "string", "pattern": "^[a-z]+$"},
            }
        });
        for (params, expected) in [
            (json!({"decode": 7}), "plan.params.decode: found 7, expected a string or an array"),
            (json!({"decode": ["a", {}]}), "plan.params.decode[1]: found {}, expected a string"),
            (
                json!({"decode": "a", "mode": "max"}),
                "plan.params.mode: found \"max\", expected one of",
            ),
            (json!({"decode": "a", "step": 0}), "plan.params.step: found 0, expected at least 1"),
            (
                json!({"decode": "a", "step": 1.5}),
                "plan.params.step: found 1.5, expected an integer",
            ),
            (
                json!({"decode": "a", "deep": {"a/b": 1}}),
                "plan.params.deep.a/b: found 1, expected a bool",
            ),
            (
                json!({"decode": "a", "name": "A"}),
                "plan.params.name: found \"A\", expected a text like",
            ),
            (json!({"decod": "a"}), "hint: is plan.params.decod meant?"),
            (json!({"decode": null}), "plan.params.decode: missing; host-op \"tiny\" needs it"),
        ] {
            let error = check_with(schema.clone(), params).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Manifest);
            assert!(
                error.report().to_string().contains(expected),
                "{error} does not say {expected:?}"
            );
        }
        assert!(check_with(schema, json!({"decode": "a", "mode": null, "other": 7})).is_ok());
    }

    #[test]
    fn hostile_schemas_fetch_nothing_and_end_soon() {
        let deep = (0..100).fold(json!({"type": "object"}), |inner, _| json!({"allOf": [inner]}));
        let wide: Vec<_> = (0..5000).map(|i| json!({"const": i})).collect();
        let bombs: Vec<_> =
            (0..500).map(|i| json!({"pattern": format!("({i}|a{{900}}){{900}}")})).collect();
        let start = Instant::now();
        for schema in [
            json!({"$ref": "http://localhost:9/schema.json"}),
            json!({"$ref": "file:///etc/hostname"}),
            json!({"$ref": "#"}),
            json!({"$schema": "http://localhost:9/meta.json", "type": "object"}),
            json!({"properties": {"a": {"$dynamicRef": "#a"}}, "$defs": {"a": {"$ref": "#/$defs/a"}}}),
            json!({"properties": {"a": {"pattern": "^(a+)+$"}}}),
            json!({"properties": {"a": {"pattern": "(((a{900}){900}){900}"}}}),
            json!({"properties": {"a": {"allOf": bombs}}}),
            json!({"anyOf": wide}),
            deep,
        ] {
            // Refused or not, it comes back.
            let _ = check_with(schema, json!({"a": format!("{}b", "a".repeat(20_000))}));
        }
        assert!(start.elapsed() < Duration::from_secs(20), "{:?}", start.elapsed());
    }

    #[test]
    fn what_a_message_quotes_is_short_and_plain() {
        let schema = json!({"properties": {"a": {"type": "integer"}}});
        let text = format!("\u{1b}[2J{}", "x".repeat(1 << 20));
        let error = check_with(schema, json!({"a": text})).unwrap_err().report().to_string();
        assert!(error.len() < 200 && !error.contains('\u{1b}'), "{error}");
    }
}
