//! Writes small ONNX models: just enough protobuf for the tests.
//!
//! Field numbers are those of `onnx.proto` (<https://github.com/onnx/onnx/blob/main/onnx/onnx.proto>).

pub const FLOAT: u64 = 1;
pub const UINT8: u64 = 2;
pub const INT8: u64 = 3;
pub const INT32: u64 = 6;
pub const INT64: u64 = 7;
pub const FLOAT16: u64 = 10;

/// A protobuf message.
#[derive(Default, Clone)]
pub struct Message(pub Vec<u8>);

impl Message {
    fn varint(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    pub fn int(mut self, field: u64, value: u64) -> Self {
        self.varint(field << 3);
        self.varint(value);
        self
    }

    pub fn bytes(mut self, field: u64, value: impl AsRef<[u8]>) -> Self {
        self.varint(field << 3 | 2);
        self.varint(value.as_ref().len() as u64);
        self.0.extend(value.as_ref());
        self
    }

    pub fn message(self, field: u64, value: Message) -> Self {
        self.bytes(field, value.0)
    }
}

/// A dimension: a number, or a name for one that is not fixed.
#[derive(Clone, Copy)]
pub enum Dim {
    Fixed(u64),
    Named(&'static str),
}

/// A model in the making.
#[derive(Default)]
pub struct Model {
    graph: Message,
}

impl Model {
    fn value(field: u64, name: &str, dtype: u64, shape: &[Dim]) -> Message {
        let shape = shape.iter().fold(Message::default(), |shape, dim| {
            shape.message(
                1,
                match dim {
                    Dim::Fixed(n) => Message::default().int(1, *n),
                    Dim::Named(name) => Message::default().bytes(2, name),
                },
            )
        });
        let tensor = Message::default().int(1, dtype).message(2, shape);
        let info =
            Message::default().bytes(1, name).message(2, Message::default().message(1, tensor));
        Message::default().message(field, info)
    }

    pub fn input(self, name: &str, dtype: u64, shape: &[u64]) -> Self {
        let shape: Vec<_> = shape.iter().map(|&n| Dim::Fixed(n)).collect();
        self.dynamic_input(name, dtype, &shape)
    }

    pub fn dynamic_input(mut self, name: &str, dtype: u64, shape: &[Dim]) -> Self {
        self.graph.0.extend(Self::value(11, name, dtype, shape).0);
        self
    }

    pub fn output(mut self, name: &str, dtype: u64, shape: &[u64]) -> Self {
        let shape: Vec<_> = shape.iter().map(|&n| Dim::Fixed(n)).collect();
        self.graph.0.extend(Self::value(12, name, dtype, &shape).0);
        self
    }

    pub fn node(self, op: &str, inputs: &[&str], outputs: &[&str]) -> Self {
        self.node_with(op, inputs, outputs, &[])
    }

    /// A node with attributes that are integers. `MatMulNBits` is one of ONNX Runtime's own.
    pub fn node_with(
        mut self,
        op: &str,
        inputs: &[&str],
        outputs: &[&str],
        attributes: &[(&str, u64)],
    ) -> Self {
        let node = inputs.iter().fold(Message::default(), |n, i| n.bytes(1, i));
        let node = outputs.iter().fold(node, |n, o| n.bytes(2, o));
        let node = attributes.iter().fold(node, |n, (name, value)| {
            let attribute = Message::default().bytes(1, name).int(3, *value).int(20, 2);
            n.message(5, attribute)
        });
        let domain = if op == "MatMulNBits" { "com.microsoft" } else { "" };
        let node = node.bytes(3, outputs.join("_")).bytes(4, op).bytes(7, domain);
        self.graph = self.graph.message(1, node);
        self
    }

    /// `y` is `x` with its axes in this order.
    pub fn transpose(mut self, x: &str, y: &str, perm: &[u64]) -> Self {
        let attribute = Message::default().bytes(1, "perm").int(20, 7);
        let attribute = perm.iter().fold(attribute, |a, &axis| a.int(8, axis));
        let node = Message::default().bytes(1, x).bytes(2, y).bytes(3, y);
        self.graph = self.graph.message(1, node.bytes(4, "Transpose").message(5, attribute));
        self
    }

    fn tensor(name: &str, dtype: u64, shape: &[u64]) -> Message {
        shape.iter().fold(Message::default(), |t, &n| t.int(1, n)).int(2, dtype).bytes(8, name)
    }

    /// Weights in the model.
    pub fn weights(mut self, name: &str, shape: &[u64], values: &[f32]) -> Self {
        let raw: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.graph = self.graph.message(5, Self::tensor(name, FLOAT, shape).bytes(9, raw));
        self
    }

    /// A constant of int64.
    pub fn integers(mut self, name: &str, values: &[i64]) -> Self {
        let raw: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        let shape = [values.len() as u64];
        self.graph = self.graph.message(5, Self::tensor(name, INT64, &shape).bytes(9, raw));
        self
    }

    /// A constant of int32.
    pub fn ints(mut self, name: &str, shape: &[u64], values: &[i32]) -> Self {
        let raw: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.graph = self.graph.message(5, Self::tensor(name, INT32, shape).bytes(9, raw));
        self
    }

    /// `y` is the convolution of `inputs`; each attribute is a list of integers.
    pub fn conv(
        mut self,
        inputs: &[&str],
        y: &str,
        group: u64,
        attributes: &[(&str, &[u64])],
    ) -> Self {
        let node = inputs.iter().fold(Message::default(), |n, i| n.bytes(1, i));
        let node = node.bytes(2, y).bytes(3, y).bytes(4, "Conv");
        let group = Message::default().bytes(1, "group").int(3, group).int(20, 2);
        let node = attributes.iter().fold(node.message(5, group), |node, (name, values)| {
            let attribute = Message::default().bytes(1, name).int(20, 7);
            node.message(5, values.iter().fold(attribute, |a, &n| a.int(8, n)))
        });
        self.graph = self.graph.message(1, node);
        self
    }

    /// Weights of f32 in a file beside it.
    pub fn external(self, name: &str, shape: &[u64], file: &str, offset: u64) -> Self {
        self.external_as(name, FLOAT, shape, file, [offset, 4 * shape.iter().product::<u64>()])
    }

    /// Weights in a file beside it, at an offset and of a length in bytes.
    pub fn external_as(
        mut self,
        name: &str,
        dtype: u64,
        shape: &[u64],
        file: &str,
        [offset, length]: [u64; 2],
    ) -> Self {
        let entries = [
            ("location", file.to_owned()),
            ("offset", offset.to_string()),
            ("length", length.to_string()),
        ];
        let tensor = entries.iter().fold(Self::tensor(name, dtype, shape), |t, (key, value)| {
            t.message(13, Message::default().bytes(1, key).bytes(2, value))
        });
        self.graph = self.graph.message(5, tensor.int(14, 1));
        self
    }

    /// The file's bytes.
    pub fn build(self) -> Vec<u8> {
        let opset = Message::default().bytes(1, "").int(2, 17);
        let contrib = Message::default().bytes(1, "com.microsoft").int(2, 1);
        let model = Message::default().int(1, 8).message(7, self.graph.bytes(2, "g"));
        model.message(8, contrib).message(8, opset).0
    }
}
