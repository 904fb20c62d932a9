//! The framing of a GGUF file: header, metadata, the table of tensors (ggml's `docs/gguf.md`, versions 2 and 3).
//!
//! An own reader: of the crates that read this format, `candle-core` brings a tensor library along and reads into
//! memory, `gguf-rs` and `gguf` allocate what a count in the file asks for.

use std::collections::BTreeMap;
use std::ops::Range;

use qhx_base::artifacts::Mapped;
use qhx_base::{Error, ErrorKind, Result};

use super::form::Form;
use super::names::Architecture;

/// The first bytes.
const MAGIC: &[u8] = b"GGUF";
/// Alignment of the tensors unless `general.alignment` declares another.
const ALIGNMENT: u64 = 32;
/// Max keys, and max tensors, of a file; the largest models have a tenth of that.
const MAX_ENTRIES: u64 = 1 << 18;
/// Longest name of a key or a tensor; ggml's own limits are 65535 and 64.
const MAX_NAME: usize = 1 << 10;
/// Longest text that is kept; of longer ones (chat templates) only the place is.
const MAX_TEXT: usize = 1 << 12;
/// Longest list of numbers that is kept: one for each layer. Of longer ones, and of lists of texts, only the place is.
const MAX_LIST: u64 = 1 << 12;
/// Max dimensions of a tensor.
const MAX_DIMS: u32 = 4;
/// Nothing is larger: a few sizes multiplied do not overflow.
const MAX_SIZE: u64 = 1 << 40;

/// A value of the metadata, as far as configurations need it.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Value {
    Number(f64),
    Flag(bool),
    Text(String),
    Numbers(Vec<f64>),
    /// The bytes of a text that is long, or no text in UTF-8.
    Long(Range<usize>),
    /// A list of `count` values of the type `kind`, from the byte `at` on.
    List {
        kind: u32,
        at: usize,
        count: u64,
    },
}

/// A tensor of the table.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Info {
    pub name: String,
    /// Sizes, the slowest first: the other way round than in the file.
    pub shape: Vec<usize>,
    pub form: Form,
    /// Range of its bytes in the file.
    pub bytes: Range<usize>,
}

/// A file whose framing is valid: every tensor lies within it.
#[derive(Debug, Clone)]
pub(super) struct File {
    pub metadata: BTreeMap<String, Value>,
    pub tensors: Vec<Info>,
}

impl File {
    /// Reads the framing. Errors name the file.
    pub fn read(map: &Mapped) -> Result<Self> {
        let path = map.path().display();
        let mut cursor = Cursor { bytes: map.bytes(), at: 0 };
        cursor.file().map_err(|what| match what {
            Fault::Damaged(what) => Error::new(
                ErrorKind::Artifact,
                format!("{path}: not a whole GGUF file: {what}"),
            )
            .hint("the download may be incomplete, or a Git LFS pointer; download the file again"),
            Fault::Unfit(what, hint) => {
                Error::new(ErrorKind::Artifact, format!("{path}: {what}")).hint(hint)
            }
        })
    }
}

impl File {
    pub fn number(&self, key: &str) -> Option<f64> {
        match self.metadata.get(key) {
            Some(Value::Number(number)) => Some(*number),
            _ => None,
        }
    }

    /// A whole number that a size can be.
    pub fn size(&self, key: &str) -> Option<usize> {
        let number = self.number(key)?;
        (number >= 0.0 && number <= f64::from(u32::MAX) && number.fract() == 0.0)
            .then_some(number as usize)
    }

    pub fn flag(&self, key: &str) -> Option<bool> {
        match self.metadata.get(key) {
            Some(Value::Flag(flag)) => Some(*flag),
            _ => None,
        }
    }

    pub fn text(&self, key: &str) -> Option<&str> {
        match self.metadata.get(key) {
            Some(Value::Text(text)) => Some(text),
            _ => None,
        }
    }

    /// The bytes of a text of any length. `map` is the file that this was read from, here and below.
    pub fn long_text<'a>(&'a self, map: &'a Mapped, key: &str) -> Option<&'a [u8]> {
        match self.metadata.get(key)? {
            Value::Text(text) => Some(text.as_bytes()),
            Value::Long(place) => map.bytes().get(place.clone()),
            _ => None,
        }
    }

    /// A list of texts.
    pub fn texts<'a>(&self, map: &'a Mapped, key: &str) -> Option<Vec<&'a [u8]>> {
        let Some(Value::List { kind: STRING, at, count }) = self.metadata.get(key) else {
            return None;
        };
        let mut cursor = Cursor { bytes: map.bytes(), at: *at };
        let mut texts = Vec::new();
        for _ in 0..*count {
            texts.push(cursor.text().ok()?);
        }
        Some(texts)
    }

    /// A short list of numbers; nothing where there is none.
    pub fn list(&self, key: &str) -> &[f64] {
        match self.metadata.get(key) {
            Some(Value::Numbers(numbers)) => numbers,
            _ => &[],
        }
    }

    /// A list of numbers of any length.
    pub fn numbers(&self, map: &Mapped, key: &str) -> Option<Vec<f64>> {
        match self.metadata.get(key)? {
            Value::Numbers(numbers) => Some(numbers.clone()),
            Value::List { kind, at, count } => {
                Cursor { bytes: map.bytes(), at: *at }.numbers(*kind, *count).ok()
            }
            _ => None,
        }
    }
}

/// Why a file is refused.
enum Fault {
    /// Invalid bytes, with a description.
    Damaged(String),
    /// Part of a valid file that is not supported, and a hint that would help.
    Unfit(String, String),
}

type Read<T> = std::result::Result<T, Fault>;

/// Reads forward; never beyond the end.
struct Cursor<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Cursor<'a> {
    fn file(&mut self) -> Read<File> {
        if self.take(MAGIC.len())? != MAGIC {
            return Err(Fault::Damaged("it does not begin with \"GGUF\"".to_owned()));
        }
        match self.u32()? {
            2 | 3 => {}
            version if version.swap_bytes() <= 3 => {
                return Err(unfit(
                    "numbers are big-endian",
                    "convert the model on another machine",
                ));
            }
            version => {
                return Err(unfit(
                    &format!("version {version} of GGUF, expected 2 or 3"),
                    "convert the model again with a current llama.cpp",
                ));
            }
        }
        let tensors = self.count("tensors")?;
        let keys = self.count("keys")?;
        let mut metadata = BTreeMap::new();
        for _ in 0..keys {
            let key = self.name()?;
            let kind = self.u32()?;
            let value = self.value(kind, &key)?;
            if metadata.insert(key.clone(), value).is_some() {
                return Err(Fault::Damaged(format!("the key {key} is there twice")));
            }
        }
        let alignment = match metadata.get("general.alignment") {
            None => ALIGNMENT,
            Some(Value::Number(n)) if *n >= 8.0 && *n <= 65536.0 && n % 8.0 == 0.0 => *n as u64,
            Some(other) => {
                return Err(Fault::Damaged(format!(
                    "general.alignment is {other:?}, expected a multiple of 8 up to 65536"
                )));
            }
        };
        let mut places = Vec::new();
        for _ in 0..tensors {
            places.push(self.place()?);
        }
        let data = (self.at as u64).next_multiple_of(alignment);
        let mut names = std::collections::BTreeSet::new();
        let mut infos = Vec::new();
        for place in places {
            if !names.insert(place.name.clone()) {
                return Err(Fault::Damaged(format!("the tensor {} is there twice", place.name)));
            }
            infos.push(self.locate(place, data)?);
        }
        Ok(File { metadata, tensors: infos })
    }

    /// An entry of the table of tensors.
    fn place(&mut self) -> Read<Place> {
        let name = self.name()?;
        let count = self.u32()?;
        if count == 0 || count > MAX_DIMS {
            return Err(Fault::Damaged(format!(
                "tensor {name} has {count} dimensions, expected 1 to {MAX_DIMS}"
            )));
        }
        let mut sizes = Vec::new();
        for _ in 0..count {
            let size = self.u64()?;
            if size == 0 || size > MAX_SIZE {
                return Err(Fault::Damaged(format!("tensor {name} has a dimension of {size}")));
            }
            sizes.push(size);
        }
        let kind = self.u32()?;
        let offset = self.u64()?;
        Ok(Place { name, sizes, kind, offset })
    }

    /// Locates a tensor in the file, whose tensors begin at `data`.
    fn locate(&self, place: Place, data: u64) -> Read<Info> {
        let Place { name, sizes, kind, offset } = place;
        let form = Form::of(kind).map_err(|what| {
            unfit(
                &format!("tensor {name} is stored as {what}, expected {}", Form::NAMES),
                "make a file of another type from the f16 one: \
                 `llama-quantize model-f16.gguf model-q4_k_m.gguf Q4_K_M`",
            )
        })?;
        let (block, size) = form.unit();
        let cols = sizes.first().copied().unwrap_or(0);
        if !cols.is_multiple_of(block as u64) {
            return Err(Fault::Damaged(format!(
                "tensor {name} is stored as {} with rows of {cols}, expected a multiple of {block}",
                form.name()
            )));
        }
        let elements = sizes.iter().try_fold(1u64, |n, size| n.checked_mul(*size));
        let range = elements
            .and_then(|n| (n / block as u64).checked_mul(size as u64))
            .zip(data.checked_add(offset))
            .and_then(|(len, start)| Some(start..start.checked_add(len)?))
            .filter(|range| range.end <= self.bytes.len() as u64);
        let Some(range) = range else {
            return Err(Fault::Damaged(format!(
                "tensor {name}, {sizes:?} of {}, lies beyond its end at {}",
                form.name(),
                self.bytes.len()
            )));
        };
        Ok(Info {
            name,
            // The file has these bytes, and so the sizes fit.
            shape: sizes.iter().rev().map(|size| *size as usize).collect(),
            form,
            bytes: range.start as usize..range.end as usize,
        })
    }

    /// A value of the type `kind`.
    fn value(&mut self, kind: u32, key: &str) -> Read<Value> {
        if let Some(number) = self.number(kind)? {
            return Ok(number);
        }
        match kind {
            STRING => {
                let text = self.text()?;
                let place = self.at - text.len()..self.at;
                let text =
                    if text.len() <= MAX_TEXT { std::str::from_utf8(text).ok() } else { None };
                Ok(text.map_or(Value::Long(place), |text| Value::Text(text.to_owned())))
            }
            ARRAY => self.array(key),
            _ => {
                Err(Fault::Damaged(format!("the key {key} has a value of the unknown type {kind}")))
            }
        }
    }

    /// Lists of numbers that are short; others are passed over.
    fn array(&mut self, key: &str) -> Read<Value> {
        let kind = self.u32()?;
        let count = self.u64()?;
        let list = Value::List { kind, at: self.at, count };
        if kind == STRING {
            // Each takes at least the eight bytes of its length, so that this ends with the file.
            for _ in 0..count {
                self.text()?;
            }
            return Ok(list);
        }
        let Some(size) = number_size(kind) else {
            return Err(Fault::Damaged(format!(
                "the key {key} is a list of values of type {kind}, expected numbers or texts"
            )));
        };
        if count > MAX_LIST {
            let len = usize::try_from(count).ok().and_then(|n| n.checked_mul(size));
            self.take(len.unwrap_or(usize::MAX))?;
            return Ok(list);
        }
        self.numbers(kind, count).map(Value::Numbers)
    }

    /// Numbers and flags, of a type that has a [`number_size`].
    fn numbers(&mut self, kind: u32, count: u64) -> Read<Vec<f64>> {
        let mut numbers = Vec::new();
        for _ in 0..count {
            match self.number(kind)? {
                Some(Value::Number(n)) => numbers.push(n),
                Some(Value::Flag(flag)) => numbers.push(f64::from(u8::from(flag))),
                _ => return Err(self.ends()),
            }
        }
        Ok(numbers)
    }

    /// A number or a flag; none for other types.
    fn number(&mut self, kind: u32) -> Read<Option<Value>> {
        let Some(size) = number_size(kind) else { return Ok(None) };
        let bytes = self.take(size)?;
        let mut wide = [0u8; 8];
        for (to, from) in wide.iter_mut().zip(bytes) {
            *to = *from;
        }
        let bits = u64::from_le_bytes(wide);
        let number = match kind {
            1 => f64::from((bits as u8).cast_signed()),
            3 => f64::from((bits as u16).cast_signed()),
            5 => f64::from((bits as u32).cast_signed()),
            6 => f64::from(f32::from_bits(bits as u32)),
            7 => return Ok(Some(Value::Flag(bits != 0))),
            11 => bits.cast_signed() as f64,
            12 => f64::from_bits(bits),
            _ => bits as f64,
        };
        Ok(Some(Value::Number(number)))
    }

    fn name(&mut self) -> Read<String> {
        let bytes = self.text()?;
        let name = std::str::from_utf8(bytes).ok().filter(|name| name.len() <= MAX_NAME);
        let name = name.filter(|name| !name.chars().any(char::is_control));
        name.map(str::to_owned).ok_or_else(|| {
            Fault::Damaged(format!("a name at byte {} is no text of reasonable length", self.at))
        })
    }

    /// The bytes of a text after their number.
    fn text(&mut self) -> Read<&'a [u8]> {
        let len = self.u64()?;
        self.take(usize::try_from(len).unwrap_or(usize::MAX))
    }

    fn count(&mut self, what: &str) -> Read<u64> {
        let count = self.u64()?;
        if count > MAX_ENTRIES {
            return Err(Fault::Damaged(format!("{count} {what}, expected at most {MAX_ENTRIES}")));
        }
        Ok(count)
    }

    fn u32(&mut self) -> Read<u32> {
        let bytes = self.take(4)?.first_chunk::<4>();
        bytes.map(|b| u32::from_le_bytes(*b)).ok_or_else(|| self.ends())
    }

    fn u64(&mut self) -> Read<u64> {
        let bytes = self.take(8)?.first_chunk::<8>();
        bytes.map(|b| u64::from_le_bytes(*b)).ok_or_else(|| self.ends())
    }

    fn take(&mut self, len: usize) -> Read<&'a [u8]> {
        let end = self.at.checked_add(len);
        let Some((end, bytes)) = end.and_then(|end| Some((end, self.bytes.get(self.at..end)?)))
        else {
            return Err(self.ends());
        };
        self.at = end;
        Ok(bytes)
    }

    fn ends(&self) -> Fault {
        Fault::Damaged(format!(
            "it ends within its table, at {} of {} bytes",
            self.at,
            self.bytes.len()
        ))
    }
}

fn unfit(what: &str, hint: &str) -> Fault {
    Fault::Unfit(what.to_owned(), hint.to_owned())
}

/// An entry of the table of tensors as it is in the file.
struct Place {
    name: String,
    sizes: Vec<u64>,
    kind: u32,
    offset: u64,
}

/// The type of texts.
const STRING: u32 = 8;
/// The type of lists.
const ARRAY: u32 = 9;

/// Bytes of a value, for the types that are numbers.
fn number_size(kind: u32) -> Option<usize> {
    match kind {
        0 | 1 | 7 => Some(1),
        2 | 3 => Some(2),
        4..=6 => Some(4),
        10..=12 => Some(8),
        _ => None,
    }
}

/// Layers of the decoder, without those that predict further tokens.
pub(super) fn layers(file: &File, architecture: Architecture) -> usize {
    let size = |key: &str| file.size(&architecture.key(key));
    let further = size("nextn_predict_layers").unwrap_or(0);
    size("block_count").map_or(usize::MAX, |count| count.saturating_sub(further))
}

/// The f64 that an f32 of the metadata was written for: 1e-5 and not 9.99999974e-6.
pub(super) fn shortest(number: f64) -> f64 {
    (number as f32).to_string().parse().unwrap_or(number)
}
