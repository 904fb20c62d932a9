//! Checks the framing of an ONNX file before it is parsed.
//!
//! The parser of rten 0.27 does not end on a varint of more than ten bytes, and allocates or seeks
//! by whatever length a field claims. This walk over the messages refuses both: every varint ends,
//! and every length lies within its message. It reads headers only, so that it takes no time for
//! weights, and knows of `onnx.proto` just which fields hold messages and packed integers. On its
//! way it notes the names of the files that hold weights.

use std::collections::BTreeSet;

use qhx_types::onnx::ExternalData;

/// Deepest nesting of subgraphs and other messages.
const DEPTH: usize = 48;

/// Content of a length-delimited field.
#[derive(Clone, Copy)]
enum Kind {
    Model,
    Graph,
    Node,
    Attribute,
    Tensor,
    SparseTensor,
    ValueInfo,
    Type,
    /// `TypeProto.Tensor`, and the sequence and optional types, which hold a type.
    TypedShape,
    Nested,
    Shape,
    /// A message of plain fields.
    Plain,
    /// Key and value of `TensorProto.external_data`.
    External,
    /// Packed varints.
    Integers,
    /// Bytes, a string, packed floats, or a field that nobody reads.
    Opaque,
}

impl Kind {
    /// Field numbers of <https://github.com/onnx/onnx/blob/main/onnx/onnx.proto>.
    fn field(self, number: u64) -> Self {
        match (self, number) {
            (Self::Model, 7) | (Self::Attribute, 6 | 11) => Self::Graph,
            (Self::Model, 8 | 14) | (Self::Shape, 1) => Self::Plain,
            (Self::Tensor, 13) => Self::External,
            (Self::Graph, 1) => Self::Node,
            (Self::Graph, 5) | (Self::Attribute, 5 | 10) | (Self::SparseTensor, 1 | 2) => {
                Self::Tensor
            }
            (Self::Graph, 11..=13) => Self::ValueInfo,
            (Self::Graph, 15) | (Self::Attribute, 22 | 23) => Self::SparseTensor,
            (Self::Node, 5) => Self::Attribute,
            (Self::Attribute, 8) | (Self::Tensor, 1 | 5 | 7 | 11) => Self::Integers,
            (Self::SparseTensor, 3) => Self::Integers,
            (Self::ValueInfo, 2) | (Self::Attribute, 14 | 15) | (Self::Nested, 1) => Self::Type,
            (Self::Type, 1 | 8) => Self::TypedShape,
            (Self::Type, 4 | 9) => Self::Nested,
            (Self::TypedShape, 2) => Self::Shape,
            _ => Self::Opaque,
        }
    }
}

/// Checks a whole file and returns the names of the files of external data. The error says
/// what is wrong at which byte.
pub(crate) fn check(model: &[u8]) -> Result<BTreeSet<String>, String> {
    let mut walk = Walk { bytes: model, at: 0, external: BTreeSet::new() };
    walk.message(Kind::Model, model.len(), 0)?;
    Ok(walk.external)
}

struct Walk<'a> {
    bytes: &'a [u8],
    at: usize,
    external: BTreeSet<String>,
}

impl<'a> Walk<'a> {
    fn message(&mut self, kind: Kind, end: usize, depth: usize) -> Result<(), String> {
        if depth > DEPTH {
            return Err(format!("messages are nested more than {DEPTH} deep at byte {}", self.at));
        }
        let (mut key, mut value): (&'a [u8], &'a [u8]) = (&[], &[]);
        while self.at < end {
            let start = self.at;
            let tag = self.varint(end)?;
            match tag & 7 {
                0 => {
                    self.varint(end)?;
                }
                1 => self.skip(8, end)?,
                5 => self.skip(4, end)?,
                2 => {
                    let length = self.varint(end)?;
                    let length = usize::try_from(length).unwrap_or(usize::MAX);
                    let field_end = self.at.checked_add(length).filter(|&e| e <= end);
                    let Some(field_end) = field_end else {
                        let left = end - self.at;
                        return Err(format!(
                            "the field at byte {start} claims {length} bytes where {left} are left"
                        ));
                    };
                    match kind.field(tag >> 3) {
                        Kind::Opaque => {
                            let field = self.bytes.get(self.at..field_end).unwrap_or_default();
                            match (kind, tag >> 3) {
                                (Kind::External, 1) => key = field,
                                (Kind::External, 2) => value = field,
                                _ => {}
                            }
                            self.at = field_end;
                        }
                        Kind::Integers => {
                            while self.at < field_end {
                                self.varint(field_end)?;
                            }
                        }
                        inner => self.message(inner, field_end, depth + 1)?,
                    }
                }
                other => return Err(format!("wire type {other} at byte {start} is not in use")),
            }
        }
        if key == ExternalData::LOCATION.as_bytes() {
            let name = std::str::from_utf8(value)
                .map_err(|_| format!("the file name before byte {end} is not UTF-8"))?;
            if !self.external.contains(name) {
                self.external.insert(name.to_owned());
            }
        }
        Ok(())
    }

    fn varint(&mut self, end: usize) -> Result<u64, String> {
        let start = self.at;
        let mut value = 0u64;
        for shift in (0..70).step_by(7) {
            let byte = match self.bytes.get(self.at) {
                Some(&byte) if self.at < end => byte,
                _ => return Err(format!("the number at byte {start} is cut off")),
            };
            self.at += 1;
            if shift == 63 && byte > 1 {
                break;
            }
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(format!("the number at byte {start} does not fit in 64 bits"))
    }

    fn skip(&mut self, count: usize, end: usize) -> Result<(), String> {
        if end - self.at < count {
            return Err(format!("the field before byte {} is cut off", self.at));
        }
        self.at += count;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn framing_faults_are_told_apart() {
        // Model: field 7 (graph) of 2 bytes holds field 1 (node) of 0 bytes.
        assert_eq!(check(&[0x3a, 2, 0x0a, 0]), Ok(BTreeSet::new()));
        let cases: [(&[u8], &str); 6] = [
            (&[0xff; 40], "the number at byte 0 does not fit in 64 bits"),
            (&[0x3a, 3, 0x0a, 0], "the field at byte 0 claims 3 bytes where 2 are left"),
            (&[0x3a, 2, 0x0a, 1, 0, 0], "the field at byte 2 claims 1 bytes where 0 are left"),
            (&[0x08, 0x80], "the number at byte 1 is cut off"),
            (&[0x0d, 1, 2], "the field before byte 1 is cut off"),
            (&[0x0b], "wire type 3 at byte 0 is not in use"),
        ];
        for (bytes, expected) in cases {
            assert_eq!(check(bytes), Err(expected.to_owned()), "{bytes:x?}");
        }
        // A length that is negative as i64 would seek backwards for ever.
        let mut backwards = vec![0x7a];
        backwards.extend([0xff; 9]);
        backwards.push(1);
        assert!(check(&backwards).unwrap_err().contains("claims"));
    }

    #[test]
    fn subgraphs_nest_only_so_deep() {
        let mut graph = Vec::new();
        // graph { node { attribute { g: graph { … } } } }
        for _ in 0..40 {
            for tag in [0x32, 0x2a, 0x0a] {
                let mut outer = vec![tag];
                let mut length = graph.len();
                while length >= 0x80 {
                    outer.push(length as u8 | 0x80);
                    length >>= 7;
                }
                outer.push(length as u8);
                outer.append(&mut graph);
                graph = outer;
            }
        }
        let mut model = vec![0x3a, graph.len() as u8 | 0x80, (graph.len() >> 7) as u8];
        model.extend(graph);
        assert!(check(&model).unwrap_err().contains("nested more than 48 deep"));
    }
}
