//! The fields of a request, read with their bounds. Those that are not known are ignored.

use serde_json::{Map, Value};

use crate::error::{ApiError, Result};

/// The fields of an object in a request. `null` is as good as absent.
#[derive(Debug, Clone)]
pub(crate) struct Fields<'a> {
    map: &'a Map<String, Value>,
    /// Text before a field's name in messages, such as `messages[2].`.
    place: String,
}

impl<'a> Fields<'a> {
    pub(crate) fn new(map: &'a Map<String, Value>) -> Self {
        Self { map, place: String::new() }
    }

    /// The fields of a value that has to be an object, at `place`.
    pub(crate) fn of(value: &'a Value, place: &str) -> Result<Self> {
        let map = value.as_object().ok_or_else(|| wrong(place, "an object", value))?;
        Ok(Self { map, place: format!("{place}.") })
    }

    /// A field's name with the place that it is in.
    pub(crate) fn path(&self, name: &str) -> String {
        format!("{}{name}", self.place)
    }

    /// A field as it is.
    pub(crate) fn get(&self, name: &str) -> Option<&'a Value> {
        self.map.get(name).filter(|value| !value.is_null())
    }

    fn typed<T>(
        &self,
        name: &str,
        expected: &str,
        read: impl FnOnce(&'a Value) -> Option<T>,
    ) -> Result<Option<T>> {
        let Some(value) = self.get(name) else { return Ok(None) };
        read(value).map(Some).ok_or_else(|| wrong(&self.path(name), expected, value))
    }

    pub(crate) fn text(&self, name: &str) -> Result<Option<&'a str>> {
        self.typed(name, "a string", Value::as_str)
    }

    /// A text that has to be there.
    pub(crate) fn needed(&self, name: &str) -> Result<&'a str> {
        self.text(name)?.ok_or_else(|| self.missing(name))
    }

    pub(crate) fn flag(&self, name: &str) -> Result<Option<bool>> {
        self.typed(name, "true or false", Value::as_bool)
    }

    pub(crate) fn list(&self, name: &str) -> Result<Option<&'a Vec<Value>>> {
        self.typed(name, "a list", Value::as_array)
    }

    pub(crate) fn object(&self, name: &str) -> Result<Option<Self>> {
        self.get(name).map(|value| Self::of(value, &self.path(name))).transpose()
    }

    pub(crate) fn map(&self) -> &'a Map<String, Value> {
        self.map
    }

    /// A number from `min` to `max`.
    pub(crate) fn number(&self, name: &str, min: f64, max: f64) -> Result<Option<f32>> {
        let expected = format!("a number from {min} to {max}");
        let within = |value: &f64| (min..=max).contains(value);
        let number = self.typed(name, &expected, |value| value.as_f64().filter(within))?;
        Ok(number.map(|number| number as f32))
    }

    /// A whole number from `min` to `max`.
    pub(crate) fn count(&self, name: &str, min: u64, max: u64) -> Result<Option<usize>> {
        let expected = format!("a whole number from {min} to {max}");
        let within = |value: &u64| (min..=max).contains(value);
        let count = self.typed(name, &expected, |value| value.as_u64().filter(within))?;
        Ok(count.map(|count| usize::try_from(count).unwrap_or(usize::MAX)))
    }

    /// A text or a list of texts.
    pub(crate) fn texts(&self, name: &str) -> Result<Vec<String>> {
        let read = |value: &Value| match value {
            Value::String(text) => Some(vec![text.clone()]),
            Value::Array(list) => list.iter().map(|v| v.as_str().map(str::to_owned)).collect(),
            _ => None,
        };
        Ok(self.typed(name, "a string or a list of strings", read)?.unwrap_or_default())
    }

    /// Refuses fields that would change what comes, and that nothing here does. One that is `false`, zero or empty asks
    /// for nothing.
    pub(crate) fn unsupported(&self, names: &[&str]) -> Result<()> {
        let asks = |value: &Value| match value {
            Value::Null => false,
            Value::Bool(flag) => *flag,
            Value::Number(number) => number.as_f64() != Some(0.0),
            Value::String(text) => !text.is_empty(),
            Value::Array(list) => !list.is_empty(),
            Value::Object(map) => !map.is_empty(),
        };
        let found = names.iter().find(|name| self.get(name).is_some_and(asks));
        found.map_or(Ok(()), |name| Err(self.not_done(name)))
    }

    /// Refuses a field that is there with another value than `usual`, which is what is done.
    pub(crate) fn only(&self, name: &str, usual: &Value) -> Result<()> {
        let differs = self.get(name).is_some_and(|value| value != usual);
        if differs { Err(self.not_done(name)) } else { Ok(()) }
    }

    fn not_done(&self, name: &str) -> ApiError {
        ApiError::bad(self.path(name), "it is not supported here: leave it out").code("unsupported")
    }

    /// The error of a field that is not what is expected.
    pub(crate) fn wrong(&self, name: &str, expected: &str) -> ApiError {
        wrong(&self.path(name), expected, self.get(name).unwrap_or(&Value::Null))
    }

    /// The error of a field that has to be there.
    pub(crate) fn missing(&self, name: &str) -> ApiError {
        ApiError::bad(self.path(name), "it is missing").code("missing_required_parameter")
    }
}

/// The error of a value that is not what is expected.
pub(crate) fn wrong(place: &str, expected: &str, found: &Value) -> ApiError {
    let shown = match found {
        Value::Null => "null".to_owned(),
        Value::Bool(_) | Value::Number(_) => found.to_string(),
        Value::String(text) if text.len() <= 40 => format!("{text:?}"),
        Value::String(_) => "a string".to_owned(),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "an object".to_owned(),
    };
    ApiError::bad(place, format_args!("expected {expected}")).found(&shown).code("invalid_value")
}

/// Token ids.
pub(crate) fn tokens(value: &Value) -> Option<Vec<u32>> {
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    value.as_array()?.iter().map(id).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_wrong_is_named_with_its_place() {
        let value = serde_json::json!({"t": -1, "n": 1.5, "s": ["a", 1], "o": [], "none": null});
        let fields = Fields::of(&value, "ask").unwrap();
        let says = |error: ApiError| {
            error.json()["error"]["message"].as_str().map(str::to_owned).unwrap_or_default()
        };
        let number = fields.number("t", 0.0, 2.0).unwrap_err();
        assert_eq!(says(number), "ask.t: expected a number from 0 to 2, found -1");
        let count = fields.count("n", 1, 9).unwrap_err();
        assert_eq!(says(count), "ask.n: expected a whole number from 1 to 9, found 1.5");
        let texts = fields.texts("s").unwrap_err();
        assert_eq!(says(texts), "ask.s: expected a string or a list of strings, found a list");
        assert_eq!(
            says(fields.object("o").unwrap_err()),
            "ask.o: expected an object, found a list"
        );
        assert_eq!(fields.text("none").unwrap(), None);
    }
}
