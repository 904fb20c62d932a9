//! JSON with pointers: reads typed values out of a document and reports where it disagrees.

use std::fmt;
use std::path::Path;

use qhx_base::{Error, Result, error};
use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Number, Value};

/// Parses a JSON document in which no object has the same key twice.
///
/// `serde_json` alone keeps the last of two equal keys, which makes half of an edited manifest
/// disappear without a word.
pub(crate) fn parse(path: &Path, bytes: &[u8]) -> Result<Value> {
    let fail = |message: String, hint: &str| {
        Err(error!(Manifest, "{}: {message}", path.display()).hint(hint))
    };
    if bytes.starts_with(&[0xff, 0xfe]) || bytes.starts_with(&[0xfe, 0xff]) {
        return fail("the file is UTF-16, expected UTF-8".into(), "save it again as UTF-8");
    }
    let bytes = bytes.strip_prefix(&[0xef, 0xbb, 0xbf]).unwrap_or(bytes);
    if bytes.iter().all(u8::is_ascii_whitespace) {
        return fail("the file is empty".into(), "the download may be incomplete");
    }
    match serde_json::from_slice::<Strict>(bytes) {
        Ok(Strict(value)) => Ok(value),
        Err(e) => fail(format!("not valid JSON: {e}"), "check the file with a JSON validator")
            .map_err(|error| error.with_source(e)),
    }
}

/// A [`Value`] whose deserialisation refuses duplicate keys.
struct Strict(Value);

impl<'de> Deserialize<'de> for Strict {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(StrictVisitor).map(Strict)
    }
}

struct StrictVisitor;

impl<'de> Visitor<'de> for StrictVisitor {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a JSON value")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, v: bool) -> Result<Value, E> {
        Ok(Value::Bool(v))
    }

    fn visit_i64<E>(self, v: i64) -> Result<Value, E> {
        Ok(Value::Number(v.into()))
    }

    fn visit_u64<E>(self, v: u64) -> Result<Value, E> {
        Ok(Value::Number(v.into()))
    }

    fn visit_f64<E: de::Error>(self, v: f64) -> Result<Value, E> {
        Number::from_f64(v).map(Value::Number).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E>(self, v: &str) -> Result<Value, E> {
        Ok(Value::String(v.to_owned()))
    }

    fn visit_string<E>(self, v: String) -> Result<Value, E> {
        Ok(Value::String(v))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Value, A::Error> {
        let mut items = Vec::new();
        while let Some(Strict(item)) = seq.next_element()? {
            items.push(item);
        }
        Ok(Value::Array(items))
    }

    fn visit_map<A: MapAccess<'de>>(self, mut access: A) -> Result<Value, A::Error> {
        let mut map = Map::new();
        while let Some(key) = access.next_key::<String>()? {
            if map.contains_key(&key) {
                return Err(de::Error::custom(format_args!("key {key:?} is given twice")));
            }
            let Strict(value) = access.next_value()?;
            map.insert(key, value);
        }
        Ok(Value::Object(map))
    }
}

/// A value of a document together with its JSON pointer (RFC 6901).
#[derive(Debug, Clone)]
pub(crate) struct Node<'a> {
    pointer: String,
    value: &'a Value,
}

impl<'a> Node<'a> {
    /// The whole document.
    pub(crate) fn root(value: &'a Value) -> Self {
        Self { pointer: String::new(), value }
    }

    pub(crate) fn value(&self) -> &'a Value {
        self.value
    }

    fn child(&self, key: impl fmt::Display, value: &'a Value) -> Node<'a> {
        let key = key.to_string().replace('~', "~0").replace('/', "~1");
        Node { pointer: format!("{}/{key}", self.pointer), value }
    }

    /// An error that names this place.
    pub(crate) fn error(&self, message: impl fmt::Display) -> Error {
        let pointer = if self.pointer.is_empty() { "/" } else { &self.pointer };
        error!(Manifest, "{pointer}: {message}")
    }

    fn expected(&self, what: &str) -> Error {
        self.error(format_args!("expected {what}, found {}", describe(self.value)))
    }

    /// The member `key`; `None` when absent or null.
    pub(crate) fn get(&self, key: &str) -> Result<Option<Node<'a>>> {
        let value = self.object()?.get(key).filter(|v| !v.is_null());
        Ok(value.map(|v| self.child(key, v)))
    }

    /// The member `key`, which must be there.
    pub(crate) fn require(&self, key: &str) -> Result<Node<'a>> {
        self.get(key)?.ok_or_else(|| {
            let pointer = format!("{}/{key}", self.pointer);
            error!(Manifest, "{pointer}: missing")
        })
    }

    pub(crate) fn object(&self) -> Result<&'a Map<String, Value>> {
        self.value.as_object().ok_or_else(|| self.expected("an object"))
    }

    /// Members of an object, in the document's order.
    pub(crate) fn members(&self) -> Result<impl Iterator<Item = (&'a str, Node<'a>)>> {
        let object = self.object()?;
        let node = self.clone();
        Ok(object.iter().map(move |(k, v)| (k.as_str(), node.child(k, v))))
    }

    /// Elements of an array.
    pub(crate) fn elements(&self) -> Result<impl Iterator<Item = Node<'a>>> {
        let array = self.value.as_array().ok_or_else(|| self.expected("a list"))?;
        let node = self.clone();
        Ok(array.iter().enumerate().map(move |(i, v)| node.child(i, v)))
    }

    pub(crate) fn string(&self) -> Result<String> {
        self.value.as_str().map(str::to_owned).ok_or_else(|| self.expected("a string"))
    }

    /// A string that is not empty.
    pub(crate) fn text(&self) -> Result<String> {
        let text = self.string()?;
        if text.is_empty() { Err(self.expected("a string that is not empty")) } else { Ok(text) }
    }

    pub(crate) fn bool(&self) -> Result<bool> {
        self.value.as_bool().ok_or_else(|| self.expected("true or false"))
    }

    pub(crate) fn u64(&self) -> Result<u64> {
        self.value.as_u64().ok_or_else(|| self.expected("a whole number of at least 0"))
    }

    /// A finite number above 0.
    pub(crate) fn positive(&self) -> Result<f64> {
        let number = self.value.as_f64().filter(|n| n.is_finite() && *n > 0.0);
        number.ok_or_else(|| self.expected("a number above 0"))
    }

    pub(crate) fn u32(&self) -> Result<u32> {
        u32::try_from(self.u64()?).map_err(|_| self.expected("a number below 2^32"))
    }

    /// A size that fits in memory arithmetic: at most 2^31.
    pub(crate) fn size(&self) -> Result<usize> {
        let n = self.u64()?;
        match usize::try_from(n) {
            Ok(size) if n <= 1 << 31 => Ok(size),
            _ => Err(self.expected("a number of at most 2^31")),
        }
    }

    /// A path: a string, or an object with `path`.
    pub(crate) fn path(&self) -> Result<String> {
        match self.value {
            Value::Object(_) => self.require("path")?.text(),
            Value::String(_) => self.text(),
            _ => Err(self.expected("a path as a string, or an object with \"path\"")),
        }
    }
}

/// The value as a message shows it: short, on one line.
fn describe(value: &Value) -> String {
    match value {
        Value::Array(items) => format!("a list of {}", items.len()),
        Value::Object(_) => "an object".to_owned(),
        Value::String(s) if s.chars().count() > 60 => {
            format!("{:?}…", s.chars().take(60).collect::<String>())
        }
        other => other.to_string(),
    }
}
