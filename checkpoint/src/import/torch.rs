//! Files of `torch.save`: a ZIP archive of stored entries, one of which is a pickle that says which tensor lies where.
//!
//! The pickle is read and not executed. Of what such programs can do, only dictionaries, tuples, lists, texts and
//! numbers are made here, and of the functions that they can call only those that put a tensor together
//! (`torch._utils._rebuild_tensor_v2`, `_rebuild_parameter`); a file that names any other is refused, by that name.

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Range;
use std::rc::Rc;

use safetensors::tensor::Dtype;

/// A tensor of the file, and where its bytes are.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Found {
    /// The keys of the dictionaries that it lies in, with dots between them; empty for a file that is one tensor.
    pub name: String,
    pub dtype: Dtype,
    pub shape: Vec<usize>,
    pub bytes: Range<usize>,
}

/// Tensors that a file may have.
const MAX_TENSORS: usize = 1 << 16;
/// Dictionaries within each other, and tuples within each other.
const MAX_DEPTH: usize = 16;
/// Numbers of 16 and of 32 bits in whose place ZIP64 has larger ones.
const OF_16: usize = 0xffff;
const OF_32: usize = 0xffff_ffff;
/// The end of a ZIP archive without its comment, and the longest comment.
const END: usize = 22;
const MAX_COMMENT: usize = 1 << 16;

type Read<T> = std::result::Result<T, String>;

/// The tensors of a file of `torch.save`.
pub(crate) fn tensors(file: &[u8]) -> Read<Vec<Found>> {
    let entries = entries(file)?;
    let pickle =
        entries.iter().find_map(|(name, range)| Some((name.strip_suffix("data.pkl")?, range)));
    let Some((folder, pickle)) = pickle else {
        return Err("a ZIP archive without data.pkl, expected a file of torch.save".to_owned());
    };
    let order =
        entries.get(&format!("{folder}byteorder")).and_then(|range| file.get(range.clone()));
    if order.is_some_and(|order| order != b"little") {
        return Err("its numbers are big-endian, expected little-endian ones".to_owned());
    }
    let mut machine =
        Machine { code: file.get(pickle.clone()).unwrap_or_default(), ..Machine::default() };
    let root = machine.run()?;
    let mut found = Vec::new();
    machine.collect(&root, (String::new(), 0), &mut BTreeSet::new(), &mut |name, tensor| {
        if found.len() == MAX_TENSORS {
            return Err(format!("more than {MAX_TENSORS} tensors"));
        }
        found.push(tensor.placed(name, |key| entries.get(&format!("{folder}data/{key}")))?);
        Ok(())
    })?;
    Ok(found)
}

/// The stored entries of a ZIP archive: their names, and where their bytes are.
pub(super) fn entries(file: &[u8]) -> Read<BTreeMap<String, Range<usize>>> {
    let cut = || "a ZIP archive that is cut off or damaged; download it again".to_owned();
    let u16_at =
        |at: usize| Some(usize::from(u16::from_le_bytes(file.get(at..at + 2)?.try_into().ok()?)));
    let u32_at =
        |at: usize| Some(u32::from_le_bytes(file.get(at..at + 4)?.try_into().ok()?) as usize);
    let u64_at = |at: usize| {
        let bytes = file.get(at..at.checked_add(8)?)?.try_into().ok()?;
        usize::try_from(u64::from_le_bytes(bytes)).ok()
    };
    let from = file.len().saturating_sub(END + MAX_COMMENT);
    let tail = file.get(from..).unwrap_or_default();
    let end = tail.windows(4).rposition(|bytes| bytes == b"PK\x05\x06").map(|at| from + at);
    let end = end.ok_or_else(|| {
        "not a ZIP archive, expected a file of torch.save (of PyTorch 1.6 or newer)".to_owned()
    })?;
    let (mut count, mut at) = u16_at(end + 10).zip(u32_at(end + 16)).ok_or_else(cut)?;
    if count == OF_16 || at == OF_32 {
        // ZIP64, for files of 4 GiB and more: a record whose place is said before the end has the numbers.
        let locator =
            end.checked_sub(20).filter(|at| file.get(*at..*at + 4) == Some(b"PK\x06\x07"));
        let record = locator.and_then(|at| u64_at(at + 8));
        let record = record.filter(|at| {
            at.checked_add(4).and_then(|end| file.get(*at..end)) == Some(b"PK\x06\x06")
        });
        let numbers = record.and_then(|at| u64_at(at + 32).zip(u64_at(at + 48)));
        (count, at) = numbers.ok_or_else(cut)?;
    }
    let mut entries = BTreeMap::new();
    for _ in 0..count {
        if at.checked_add(46).and_then(|_| file.get(at..at + 4)) != Some(b"PK\x01\x02") {
            return Err(cut());
        }
        let numbers = || {
            let lengths = [u16_at(at + 28)?, u16_at(at + 30)?, u16_at(at + 32)?];
            Some((u16_at(at + 10)?, u32_at(at + 24)?, lengths, u32_at(at + 42)?))
        };
        let (method, mut size, [name_len, extra, comment], mut local) =
            numbers().ok_or_else(cut)?;
        let name = file.get(at + 46..at + 46 + name_len).ok_or_else(cut)?;
        let name = String::from_utf8_lossy(name).into_owned();
        if method != 0 {
            return Err(format!(
                "entry {name} is compressed, expected stored ones as torch.save makes"
            ));
        }
        if size == OF_32 || local == OF_32 {
            // Of size, stored size and place those that do not fit their 32 bits, in this order.
            let stored = u32_at(at + 20).ok_or_else(cut)?;
            let mut wide = wide_numbers(at + 46 + name_len, extra, u16_at).ok_or_else(cut)?;
            for number in [&mut size, &mut { stored }, &mut local] {
                if *number == OF_32 {
                    *number = u64_at(wide).ok_or_else(cut)?;
                    wide += 8;
                }
            }
        }
        let header = local.checked_add(30).filter(|end| *end <= file.len()).ok_or_else(cut)?;
        let skipped = u16_at(header - 4).zip(u16_at(header - 2)).ok_or_else(cut)?;
        let start = header + skipped.0 + skipped.1;
        let end = start.checked_add(size).filter(|end| *end <= file.len()).ok_or_else(cut)?;
        entries.insert(name, start..end);
        at += 46 + name_len + extra + comment;
    }
    Ok(entries)
}

/// Offset of the numbers of ZIP64 among the extra fields of an entry, `len` bytes from `at` on.
fn wide_numbers(
    mut at: usize,
    len: usize,
    u16_at: impl Fn(usize) -> Option<usize>,
) -> Option<usize> {
    let end = at.checked_add(len)?;
    while at + 4 <= end {
        if u16_at(at)? == 1 {
            return Some(at + 4);
        }
        at += 4 + u16_at(at + 2)?;
    }
    None
}

/// Value that a pickle makes.
#[derive(Debug, Clone)]
enum Value {
    None,
    Int(i64),
    Text(Rc<str>),
    /// With how deep tuples lie in it.
    Tuple(Rc<[Value]>, usize),
    /// The place of a dictionary or a list, which may be filled once it is known elsewhere.
    Dict(usize),
    List,
    /// A class or a function, by its name.
    Global(Rc<str>),
    Storage {
        dtype: Option<Dtype>,
        key: Rc<str>,
    },
    Tensor(Rc<Tensor>),
}

#[derive(Debug)]
struct Tensor {
    dtype: Option<Dtype>,
    key: Rc<str>,
    offset: usize,
    shape: Vec<usize>,
    strides: Vec<usize>,
}

impl Tensor {
    /// Finds the bytes of the tensor, which must lie in its storage without gaps.
    fn placed<'a>(
        &self,
        name: String,
        storage: impl Fn(&str) -> Option<&'a Range<usize>>,
    ) -> Read<Found> {
        let dtype = self
            .dtype
            .ok_or_else(|| format!("tensor {name} has an element type that is not read"))?;
        let mut dense = 1usize;
        for (size, stride) in self.shape.iter().zip(&self.strides).rev() {
            if *size != 1 && *stride != dense {
                return Err(format!(
                    "tensor {name} is a view with gaps, expected one that lies as it is"
                ));
            }
            dense =
                dense.checked_mul(*size).ok_or_else(|| format!("tensor {name} is too large"))?;
        }
        let lies = storage(&self.key).and_then(|storage| {
            let size = dtype.bitsize() / 8;
            let start = storage.start.checked_add(self.offset.checked_mul(size)?)?;
            let end = start.checked_add(dense.checked_mul(size)?)?;
            (end <= storage.end).then_some(start..end)
        });
        let bytes =
            lies.ok_or_else(|| format!("tensor {name} lies beyond its storage {}", self.key))?;
        Ok(Found { name, dtype, shape: self.shape.clone(), bytes })
    }
}

/// The stack machine that a pickle is a program of (`pickletools` of Python documents it).
#[derive(Debug, Default)]
struct Machine<'a> {
    code: &'a [u8],
    at: usize,
    stack: Vec<Value>,
    /// Lengths of the stack at the marks.
    marks: Vec<usize>,
    memo: BTreeMap<u32, Value>,
    dicts: Vec<Vec<(Rc<str>, Value)>>,
}

impl Machine<'_> {
    fn run(&mut self) -> Read<Value> {
        loop {
            let at = self.at;
            let op = self.bytes(1)?[0];
            match op {
                // PROTO, FRAME
                0x80 => drop(self.bytes(1)?),
                0x95 => drop(self.bytes(8)?),
                b'.' => return self.pop(),
                b'}' => {
                    self.dicts.push(Vec::new());
                    self.stack.push(Value::Dict(self.dicts.len() - 1));
                }
                b']' => self.stack.push(Value::List),
                b')' => self.stack.push(Value::Tuple(Rc::from([]), 0)),
                b'(' => self.marks.push(self.stack.len()),
                b'N' => self.stack.push(Value::None),
                0x88 => self.stack.push(Value::Int(1)),
                0x89 => self.stack.push(Value::Int(0)),
                b'K' => self.int(1)?,
                b'M' => self.int(2)?,
                b'J' => {
                    let number = self.number(4)? as u32;
                    self.stack.push(Value::Int(i64::from(number.cast_signed())));
                }
                0x8a => {
                    let len = self.bytes(1)?[0];
                    if len > 7 {
                        return Err(format!("a number of {len} bytes at {at}"));
                    }
                    self.int(usize::from(len))?;
                }
                b'G' => {
                    self.bytes(8)?;
                    self.stack.push(Value::None);
                }
                b'X' => self.text(4)?,
                0x8c => self.text(1)?,
                b'q' => self.memorize(1)?,
                b'r' => self.memorize(4)?,
                0x94 => {
                    let at = self.memo.len() as u32;
                    let value = self.stack.last().cloned().ok_or("an empty stack")?;
                    self.memo.insert(at, value);
                }
                b'h' => self.recall(1)?,
                b'j' => self.recall(4)?,
                b'c' => {
                    let name = format!("{}.{}", self.line()?, self.line()?);
                    self.stack.push(Value::Global(name.into()));
                }
                0x93 => {
                    let (name, module) = (self.pop()?, self.pop()?);
                    let (Value::Text(module), Value::Text(name)) = (module, name) else {
                        return Err(format!("a class without a name at {at}"));
                    };
                    self.stack.push(Value::Global(format!("{module}.{name}").into()));
                }
                b't' => {
                    let parts = self.marked()?;
                    self.tuple(parts)?;
                }
                0x85..=0x87 => {
                    let count = usize::from(op - 0x84);
                    let from = self.stack.len().checked_sub(count).ok_or("an empty stack")?;
                    let parts = self.stack.split_off(from);
                    self.tuple(parts)?;
                }
                b'Q' => self.storage()?,
                b'R' => self.call()?,
                b'u' => {
                    let pairs = self.marked()?;
                    self.set(pairs)?;
                }
                b's' => {
                    let from = self.stack.len().checked_sub(2).ok_or("an empty stack")?;
                    let pair = self.stack.split_off(from);
                    self.set(pair)?;
                }
                // Lists and attributes hold no tensors of a checkpoint.
                b'e' => drop(self.marked()?),
                b'a' | b'b' => drop(self.pop()?),
                _ => {
                    return Err(format!(
                        "its pickle has the instruction {op:#04x} at {at}, which is not read"
                    ));
                }
            }
        }
    }

    fn bytes(&mut self, count: usize) -> Read<&[u8]> {
        let end = self.at.checked_add(count);
        let bytes =
            end.and_then(|end| self.code.get(self.at..end)).ok_or("its pickle is cut off")?;
        self.at += count;
        Ok(bytes)
    }

    fn number(&mut self, size: usize) -> Read<u64> {
        let bytes = self.bytes(size)?.iter().rev();
        Ok(bytes.fold(0, |number, byte| number << 8 | u64::from(*byte)))
    }

    fn int(&mut self, size: usize) -> Read<()> {
        let number = self.number(size)?;
        self.stack.push(Value::Int(number as i64));
        Ok(())
    }

    fn text(&mut self, size: usize) -> Read<()> {
        let len = self.number(size)? as usize;
        let text = String::from_utf8_lossy(self.bytes(len)?).into_owned();
        self.stack.push(Value::Text(text.into()));
        Ok(())
    }

    fn line(&mut self) -> Read<String> {
        let rest = self.code.get(self.at..).unwrap_or_default();
        let len = rest.iter().position(|byte| *byte == b'\n').ok_or("its pickle is cut off")?;
        let line = String::from_utf8_lossy(self.bytes(len)?).into_owned();
        self.at += 1;
        Ok(line)
    }

    fn pop(&mut self) -> Read<Value> {
        Ok(self.stack.pop().ok_or("an empty stack")?)
    }

    fn marked(&mut self) -> Read<Vec<Value>> {
        let mark = self.marks.pop().filter(|mark| *mark <= self.stack.len());
        Ok(self.stack.split_off(mark.ok_or("a missing mark")?))
    }

    fn memorize(&mut self, size: usize) -> Read<()> {
        let at = self.number(size)? as u32;
        let value = self.stack.last().cloned().ok_or("an empty stack")?;
        self.memo.insert(at, value);
        Ok(())
    }

    fn recall(&mut self, size: usize) -> Read<()> {
        let at = self.number(size)? as u32;
        let value = self.memo.get(&at).cloned().ok_or("an unknown memo")?;
        self.stack.push(value);
        Ok(())
    }

    fn tuple(&mut self, parts: Vec<Value>) -> Read<()> {
        let depth = |value: &Value| match value {
            Value::Tuple(_, depth) => depth + 1,
            _ => 0,
        };
        let depth = parts.iter().map(depth).max().unwrap_or(0);
        if depth > MAX_DEPTH {
            return Err(format!("tuples more than {MAX_DEPTH} deep"));
        }
        self.stack.push(Value::Tuple(parts.into(), depth));
        Ok(())
    }

    fn set(&mut self, pairs: Vec<Value>) -> Read<()> {
        let Some(Value::Dict(at)) = self.stack.last() else {
            return Err("keys of something that is no dictionary".to_owned());
        };
        for pair in pairs.chunks_exact(2) {
            if let [Value::Text(key), value] = pair {
                self.dicts[*at].push((Rc::clone(key), value.clone()));
            }
        }
        Ok(())
    }

    /// `('storage', type, key, device, elements)`.
    fn storage(&mut self) -> Read<()> {
        let value = self.pop()?;
        let Value::Tuple(parts, _) = &value else {
            return Err("a reference to something unknown".to_owned());
        };
        let [Value::Text(kind), Value::Global(class), Value::Text(key), ..] = &parts[..] else {
            return Err("a reference to something unknown".to_owned());
        };
        if &**kind != "storage" {
            return Err(format!("a reference to a {kind}, expected a storage"));
        }
        let dtype = match &**class {
            "torch.FloatStorage" => Some(Dtype::F32),
            "torch.HalfStorage" => Some(Dtype::F16),
            "torch.BFloat16Storage" => Some(Dtype::BF16),
            "torch.DoubleStorage" => Some(Dtype::F64),
            "torch.LongStorage" => Some(Dtype::I64),
            "torch.IntStorage" => Some(Dtype::I32),
            "torch.ByteStorage" => Some(Dtype::U8),
            "torch.BoolStorage" => Some(Dtype::BOOL),
            _ => None,
        };
        self.stack.push(Value::Storage { dtype, key: Rc::clone(key) });
        Ok(())
    }

    fn call(&mut self) -> Read<()> {
        let (arguments, function) = (self.pop()?, self.pop()?);
        let (Value::Global(name), Value::Tuple(arguments, _)) = (&function, &arguments) else {
            return Err("a call of something that is no function".to_owned());
        };
        let made = match (&**name, &arguments[..]) {
            ("collections.OrderedDict", []) => {
                self.dicts.push(Vec::new());
                Value::Dict(self.dicts.len() - 1)
            }
            ("torch._utils._rebuild_parameter", [tensor @ Value::Tensor(_), ..]) => tensor.clone(),
            (
                "torch._utils._rebuild_tensor_v2",
                [
                    Value::Storage { dtype, key },
                    Value::Int(offset),
                    Value::Tuple(shape, _),
                    Value::Tuple(strides, _),
                    ..,
                ],
            ) => {
                let sizes = |values: &[Value]| -> Option<Vec<usize>> {
                    let size = |value: &Value| match value {
                        Value::Int(size) => usize::try_from(*size).ok(),
                        _ => None,
                    };
                    values.iter().map(size).collect()
                };
                let parts = sizes(shape).zip(sizes(strides)).zip(usize::try_from(*offset).ok());
                let ((shape, strides), offset) =
                    parts.ok_or("a tensor whose sizes are no numbers")?;
                if shape.len() != strides.len() || shape.len() > MAX_DEPTH {
                    return Err(format!(
                        "a tensor of {} dimensions with {} strides",
                        shape.len(),
                        strides.len()
                    ));
                }
                let tensor = Tensor { dtype: *dtype, key: Rc::clone(key), offset, shape, strides };
                Value::Tensor(Rc::new(tensor))
            }
            _ => {
                return Err(format!(
                    "its pickle calls {name}, and nothing of a checkpoint is executed here; save the tensors alone \
                     (`torch.save(model.state_dict(), …)`), or as safetensors"
                ));
            }
        };
        self.stack.push(made);
        Ok(())
    }

    /// Gives `take` each tensor below a value, each dictionary once.
    fn collect(
        &self,
        value: &Value,
        (name, depth): (String, usize),
        seen: &mut BTreeSet<usize>,
        take: &mut impl FnMut(String, &Tensor) -> Read<()>,
    ) -> Read<()> {
        match value {
            Value::Tensor(tensor) => take(name, tensor),
            Value::Dict(at) if seen.insert(*at) => {
                if depth > MAX_DEPTH {
                    return Err("dictionaries too deep in each other".to_owned());
                }
                for (key, value) in self.dicts.get(*at).into_iter().flatten() {
                    let name =
                        if name.is_empty() { key.to_string() } else { format!("{name}.{key}") };
                    self.collect(value, (name, depth + 1), seen, take)?;
                }
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    /// A tensor `[62, 1, 256]` as the package's voices are saved.
    fn voice() -> Vec<u8> {
        let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures");
        std::fs::read(fixtures.join("kokoro-tiny/voices/bm_two.pt")).unwrap()
    }

    /// The file with `old` wherever it stands replaced by as many bytes.
    fn with(old: &[u8], new: &[u8]) -> Vec<u8> {
        assert_eq!(old.len(), new.len());
        let mut file = voice();
        let places: Vec<_> =
            (0..file.len() - old.len()).filter(|at| file[*at..].starts_with(old)).collect();
        assert!(!places.is_empty());
        places.into_iter().for_each(|at| file[at..at + new.len()].copy_from_slice(new));
        file
    }

    #[test]
    fn a_saved_tensor_is_found_where_it_lies() {
        let found = tensors(&voice()).unwrap();
        let [tensor] = &found[..] else { panic!("{found:?}") };
        assert_eq!((tensor.name.as_str(), tensor.dtype), ("", Dtype::F32));
        assert_eq!((&tensor.shape[..], tensor.bytes.len()), (&[62, 1, 256][..], 62 * 256 * 4));
    }

    /// The file with the numbers of its directory as ZIP64 has them in archives of 4 GiB and more.
    fn as_zip64(mut file: Vec<u8>) -> Vec<u8> {
        let end = file.len() - END;
        let number = |at: usize| u32::from_le_bytes(file[at..at + 4].try_into().unwrap());
        let (count, directory) = (u64::from(number(end + 10) & 0xffff), number(end + 16) as usize);
        let mut wide = Vec::new();
        let mut at = directory;
        for _ in 0..count {
            let lens = [28, 30, 32].map(|n| number(at + n) as usize & 0xffff);
            let (size, local) = (number(at + 24), number(at + 42));
            let mut entry = file[at..at + 46 + lens[0]].to_vec();
            entry[20..28].fill(0xff);
            entry[30..34].copy_from_slice(&[28 + 5, 0, 0, 0]);
            entry[42..46].fill(0xff);
            // Another field comes before.
            entry.extend([9, 9, 1, 0, 7, 1, 0, 24, 0]);
            entry.extend([size, 0, size, 0, local, 0].iter().flat_map(|n| n.to_le_bytes()));
            wide.extend(entry);
            at += 46 + lens[0] + lens[1] + lens[2];
        }
        file.truncate(directory);
        file.extend(&wide);
        let record = file.len() as u64;
        file.extend(b"PK\x06\x06");
        file.extend([0; 28]);
        file.extend(
            [count, wide.len() as u64, directory as u64].iter().flat_map(|n| n.to_le_bytes()),
        );
        file.extend(b"PK\x06\x07\0\0\0\0");
        file.extend(record.to_le_bytes());
        file.extend([1, 0, 0, 0]);
        file.extend(b"PK\x05\x06\0\0\0\0");
        file.extend([0xff; 12]);
        file.extend([0; 2]);
        file
    }

    #[test]
    fn directories_of_large_archives_are_read() {
        let file = voice();
        assert_eq!(tensors(&as_zip64(file.clone())).unwrap(), tensors(&file).unwrap());
        let wide = as_zip64(file);
        for len in (0..=wide.len() - END).rev().step_by(97) {
            tensors(&wide[..len]).unwrap_err();
        }
        let directory = wide.windows(4).position(|bytes| bytes == b"PK\x01\x02").unwrap();
        for at in directory..wide.len() {
            let mut damaged = wide.clone();
            damaged[at] ^= 0x80;
            let found = tensors(&damaged).unwrap_or_default();
            assert!(found.iter().all(|tensor| tensor.bytes.end <= damaged.len()), "{at}");
        }
    }

    #[test]
    fn what_else_a_pickle_calls_is_refused_by_its_name() {
        let error = tensors(&with(b"torch._utils", b"posix._utils")).unwrap_err();
        assert!(error.contains("calls posix._utils._rebuild_tensor_v2"), "{error}");
        let error = tensors(&with(b"FloatStorage", b"QuantStorage")).unwrap_err();
        assert!(error.contains("element type"), "{error}");
    }

    #[test]
    fn damaged_files_are_errors() {
        let file = voice();
        for len in (0..=file.len() - END).rev().step_by(97) {
            tensors(&file[..len]).unwrap_err();
        }
        // Whatever they make of it, none panics, and no tensor lies outside the file.
        let pickle = file.windows(4).position(|bytes| bytes == b"PK\x01\x02").unwrap();
        for at in (0..600).chain(pickle..file.len()) {
            for flip in [0x01, 0x80, 0xff] {
                let mut file = file.clone();
                file[at] ^= flip;
                let found = tensors(&file).unwrap_or_default();
                assert!(found.iter().all(|tensor| tensor.bytes.end <= file.len()), "{at} {flip}");
            }
        }
    }
}
