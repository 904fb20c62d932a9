//! Which part of a JSON schema cannot be compiled, and why, in words that need no knowledge of grammars.

use serde_json::Value;

use crate::constraint::short;

/// Keys whose value is a schema, a list of schemas, or an object of schemas.
const ONE: [&str; 2] = ["items", "additionalProperties"];
const LISTS: [&str; 5] = ["prefixItems", "items", "anyOf", "allOf", "oneOf"];
const MAPS: [&str; 4] = ["properties", "patternProperties", "$defs", "definitions"];

/// Keys of definitions, which references from anywhere in a schema name.
const DEFINITIONS: [&str; 2] = ["$defs", "definitions"];

/// Maximum number of parts that are compiled by themselves to find the one at fault.
const MAX_TRIES: usize = 512;

/// A part of a schema that cannot be compiled.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Fault {
    /// JSON pointer of the part, empty for the whole schema.
    pub path: String,
    /// The reason.
    pub why: String,
}

impl Fault {
    /// The message about the fault of what is called `name`.
    pub(crate) fn of(&self, name: &str) -> String {
        match self.path.as_str() {
            "" => format!("{name}: {}", self.why),
            path => format!("{name}, at {path}: {}", self.why),
        }
    }
}

/// The smallest part of `schema` that `compile` refuses by itself; the schema is refused because of `why`.
pub(crate) fn locate(
    schema: &Value,
    why: &str,
    compile: impl Fn(&Value) -> Result<(), String>,
) -> Fault {
    let mut fault = Fault { path: String::new(), why: plain(why) };
    let (mut part, mut tries) = (schema, 0);
    'deeper: loop {
        for (path, child) in parts(part) {
            if tries == MAX_TRIES {
                return fault;
            }
            if refers_elsewhere(child) {
                continue;
            }
            tries += 1;
            // A part that no value is of may well be in a schema with some.
            if let Err(why) = compile(&with_definitions(child, schema))
                && unsatisfiable(&why) == unsatisfiable(&fault.why)
            {
                fault = Fault { path: fault.path + &path, why: plain(&why) };
                part = child;
                continue 'deeper;
            }
        }
        return fault;
    }
}

/// The schemas that a schema directly has, with their JSON pointers.
fn parts(schema: &Value) -> Vec<(String, &Value)> {
    let Value::Object(schema) = schema else { return Vec::new() };
    let mut parts = Vec::new();
    for (key, value) in schema {
        match value {
            Value::Object(map) if MAPS.contains(&key.as_str()) => {
                let escaped = |name: &str| name.replace('~', "~0").replace('/', "~1");
                let named =
                    map.iter().map(|(name, part)| (format!("/{key}/{}", escaped(name)), part));
                parts.extend(named);
            }
            Value::Array(list) if LISTS.contains(&key.as_str()) => {
                parts.extend(
                    list.iter().enumerate().map(|(at, part)| (format!("/{key}/{at}"), part)),
                );
            }
            part if ONE.contains(&key.as_str()) => parts.push((format!("/{key}"), part)),
            _ => {}
        }
    }
    let text = Value::from(schema.clone()).to_string();
    let is_definition = |path: &str| DEFINITIONS.iter().any(|key| path[1..].starts_with(key));
    // Those that nobody refers to are not compiled.
    parts.retain(|(path, part)| {
        part.is_object() && (!is_definition(path) || text.contains(&format!("\"#{path}\"")))
    });
    // Before those that refer to them.
    parts.sort_by_key(|(path, _)| !is_definition(path));
    parts
}

fn unsatisfiable(why: &str) -> bool {
    why.contains("nsatisfiable")
}

/// A part with the definitions of its schema.
fn with_definitions(part: &Value, schema: &Value) -> Value {
    let mut part = part.clone();
    if let Value::Object(part) = &mut part {
        for key in DEFINITIONS {
            if let Some(definitions) = schema.get(key) {
                part.entry(key).or_insert_with(|| definitions.clone());
            }
        }
    }
    part
}

/// True where a part refers to what it has not by itself.
fn refers_elsewhere(part: &Value) -> bool {
    let within = |path: &str| DEFINITIONS.iter().any(|key| path.starts_with(&format!("#/{key}/")));
    match part {
        Value::Object(map) => {
            let to = map.get("$ref").and_then(Value::as_str);
            to.is_some_and(|path| path.starts_with('#') && !within(path))
                || map.values().any(refers_elsewhere)
        }
        Value::Array(list) => list.iter().any(refers_elsewhere),
        _ => false,
    }
}

/// Why a schema cannot be compiled, without the words of who compiles it.
pub(crate) fn plain(why: &str) -> String {
    let line = why.lines().map(str::trim).find(|line| !line.is_empty()).unwrap_or_default();
    if let Some(keys) = line.strip_prefix("Unimplemented keys: ") {
        return format!("these keys are not supported: {}", keys.trim_matches(['[', ']']));
    }
    if let Some(why) = line.strip_prefix("Unsatisfiable schema: ") {
        return format!("no value is of it (unsatisfiable): {why}");
    }
    let beyond = ["too large", "too big", "too many", "limit", "fuel", "exceeded"];
    if beyond.iter().any(|word| line.contains(word)) {
        return "it is too large when compiled".to_owned();
    }
    short(&line)
}
