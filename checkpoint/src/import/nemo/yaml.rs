//! YAML as OmegaConf writes it, as JSON: one document, without aliases.

use serde_json::{Map, Value};
use yaml_rust2::Yaml;
use yaml_rust2::parser::{Event, Parser};
use yaml_rust2::scanner::TScalarStyle;

use super::Read;

/// Mappings and sequences within each other.
const MAX_DEPTH: usize = 64;

/// A mapping or sequence whose end has not come yet.
enum Open {
    Mapping(Map<String, Value>, Option<String>),
    Sequence(Vec<Value>),
}

/// The document of `text`.
pub(super) fn read(text: &str) -> Read<Value> {
    let mut parser = Parser::new_from_str(text);
    let mut open: Vec<Open> = Vec::new();
    loop {
        let (event, at) = parser.next_token().map_err(|e| e.to_string())?;
        let line = at.line();
        let value = match event {
            Event::Scalar(text, style, ..) => scalar(text, style),
            Event::MappingStart(..) => {
                open.push(Open::Mapping(Map::new(), None));
                None
            }
            Event::SequenceStart(..) => {
                open.push(Open::Sequence(Vec::new()));
                None
            }
            Event::MappingEnd | Event::SequenceEnd => match open.pop() {
                Some(Open::Mapping(map, _)) => Some(Value::Object(map)),
                Some(Open::Sequence(list)) => Some(Value::Array(list)),
                None => return Err(format!("line {line}: an end without a start")),
            },
            Event::Alias(_) => return Err(format!("line {line}: an alias, expected plain values")),
            Event::StreamEnd => return Err("an empty document".to_owned()),
            Event::Nothing | Event::StreamStart | Event::DocumentStart | Event::DocumentEnd => {
                continue;
            }
        };
        if open.len() > MAX_DEPTH {
            return Err(format!("line {line}: more than {MAX_DEPTH} levels"));
        }
        let Some(value) = value else { continue };
        match open.last_mut() {
            None => return Ok(value),
            Some(Open::Sequence(list)) => list.push(value),
            Some(Open::Mapping(map, key)) => match (key.take(), value) {
                (Some(key), value) => {
                    map.insert(key, value);
                }
                (None, Value::String(name)) => *key = Some(name),
                // Keys such as 1 and true are texts in JSON.
                (None, name @ (Value::Number(_) | Value::Bool(_) | Value::Null)) => {
                    *key = Some(name.to_string());
                }
                (None, _) => return Err(format!("line {line}: a key that is no text")),
            },
        }
    }
}

fn scalar(text: String, style: TScalarStyle) -> Option<Value> {
    if style != TScalarStyle::Plain {
        return Some(Value::String(text));
    }
    Some(match Yaml::from_str(&text) {
        Yaml::Null => Value::Null,
        Yaml::Boolean(flag) => Value::Bool(flag),
        Yaml::Integer(number) => Value::from(number),
        // Infinite numbers and those that are none have no place in JSON.
        Yaml::Real(number) => number.parse::<f64>().map_or(Value::Null, Value::from),
        _ => Value::String(text),
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn what_omegaconf_writes_is_read() {
        let text =
            "a: 1\nb:\n- -1\n- 1.0e-05\n- null\n- <|en|>\n- '2'\nc: {}\nd:\n  e: false\n  1: ''\n";
        let expected = json!({"a": 1, "b": [-1, 1e-5, null, "<|en|>", "2"], "c": {}, "d": {"e": false, "1": ""}});
        assert_eq!(read(text).unwrap(), expected);
    }

    #[test]
    fn hostile_documents_are_refused() {
        let deep = "[".repeat(70);
        let nested: String = (0..80).map(|depth| format!("{}a:\n", " ".repeat(depth))).collect();
        for (text, words) in [
            ("a: &x [1, 2]\nb: *x\n", "line 2: an alias"),
            ("", "empty"),
            (&deep, "levels"),
            (&nested, "levels"),
            ("? [1]\n: 2\n", "a key that is no text"),
            ("a: [1, 2", "line"),
        ] {
            let error = read(text).unwrap_err();
            assert!(error.contains(words), "{text:?}: {error}");
        }
    }
}
