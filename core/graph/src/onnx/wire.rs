//! Messages of protobuf, read where they lie in a mapped file. Files are untrusted input: every part is within its
//! file.

use std::ops::Range;

use qhx_base::artifacts::Mapped;

/// A message of the file, whose fields are read in order.
#[derive(Debug, Clone)]
pub struct Message {
    file: Mapped,
    range: Range<usize>,
}

/// A field: its number, and its integer or its bytes.
#[derive(Debug, Clone)]
pub struct Field {
    /// The number in the schema.
    pub number: u64,
    /// The value of an integer, else 0.
    pub integer: u64,
    /// Place in the file of a value that is no integer, else empty.
    pub bytes: Range<usize>,
}

impl Message {
    /// The message that a whole file is.
    pub fn new(file: Mapped) -> Self {
        let range = 0..file.len();
        Self { file, range }
    }

    /// The message at a place in the same file.
    pub fn within(&self, range: Range<usize>) -> Self {
        Self { file: self.file.clone(), range }
    }

    /// The text at a place in the file.
    ///
    /// # Errors
    /// When it is not UTF-8.
    pub fn text(&self, range: Range<usize>) -> Result<&str, String> {
        let at = range.start;
        std::str::from_utf8(self.bytes(range))
            .map_err(|_| format!("the text at byte {at} is not UTF-8"))
    }

    /// The bytes at a place in the file; none beyond its end.
    pub fn bytes(&self, range: Range<usize>) -> &[u8] {
        self.file.bytes().get(range).unwrap_or_default()
    }

    /// The number of 32 bits at a place in the file; none where that is of another length.
    pub fn float(&self, range: Range<usize>) -> Option<f32> {
        let bytes = self.file.bytes().get(range)?;
        Some(f32::from_le_bytes(bytes.try_into().ok()?))
    }

    /// The next field, none at the end.
    ///
    /// # Errors
    /// When the message is malformed.
    pub fn next_field(&mut self) -> Result<Option<Field>, String> {
        if self.range.is_empty() {
            return Ok(None);
        }
        let start = self.range.start;
        let tag = self.varint()?;
        let mut field = Field { number: tag >> 3, integer: 0, bytes: 0..0 };
        match tag & 7 {
            0 => field.integer = self.varint()?,
            1 => field.bytes = self.take(8)?,
            5 => field.bytes = self.take(4)?,
            2 => {
                let length = usize::try_from(self.varint()?).unwrap_or(usize::MAX);
                field.bytes = self.take(length)?;
            }
            other => return Err(format!("wire type {other} at byte {start} is not in use")),
        }
        Ok(Some(field))
    }

    /// The integers of a field that may have several, packed or one a field.
    ///
    /// # Errors
    /// When packed ones do not end.
    pub fn integers(&self, field: &Field) -> Result<Vec<u64>, String> {
        if field.bytes.is_empty() {
            return Ok(vec![field.integer]);
        }
        let (mut packed, mut integers) = (self.within(field.bytes.clone()), Vec::new());
        while !packed.range.is_empty() {
            integers.push(packed.varint()?);
        }
        Ok(integers)
    }

    fn take(&mut self, length: usize) -> Result<Range<usize>, String> {
        let Range { start, end } = self.range;
        let Some(stop) = start.checked_add(length).filter(|stop| *stop <= end) else {
            let left = end - start;
            return Err(format!("{length} bytes claimed at byte {start}, where {left} are left"));
        };
        self.range.start = stop;
        Ok(start..stop)
    }

    fn varint(&mut self) -> Result<u64, String> {
        let start = self.range.start;
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let at = self.take(1)?.start;
            let byte = self.file.bytes().get(at).copied().unwrap_or_default();
            value |= u64::from(byte & 127) << shift;
            if byte < 128 {
                return Ok(value);
            }
        }
        Err(format!("the number at byte {start} does not end"))
    }
}
