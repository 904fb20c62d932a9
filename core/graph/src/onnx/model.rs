//! A model as bytes: the messages of `rten_onnx`, which the CPU backend reads, with the one field that they lack.

use crate::onnx::format::{IR_VERSION, MICROSOFT, MICROSOFT_OPSET, OPSET, Operator};
use rten_onnx::onnx::{GraphProto, OperatorSetIdProto, StringStringEntryProto};
use rten_onnx::protobuf::{EncodeMessage, MessageWriter, ProtobufError, ValueWriter, WriteValue};

/// `ModelProto` of one graph.
pub(super) struct Model<'a> {
    pub(super) name: &'a str,
    pub(super) graph: &'a GraphProto,
    /// Key and value of `metadata_props`.
    pub(super) metadata: [&'a str; 2],
}

impl Model<'_> {
    /// The file.
    pub(super) fn bytes(&self) -> Result<Vec<u8>, ProtobufError> {
        let mut bytes = Vec::new();
        self.encode(ValueWriter::new(&mut bytes))?;
        Ok(bytes)
    }
}

// Field numbers of <https://github.com/onnx/onnx/blob/main/onnx/onnx.proto>.
impl EncodeMessage for Model<'_> {
    fn encode_fields<W: WriteValue>(
        &self,
        fields: &mut MessageWriter<'_, W>,
    ) -> Result<(), ProtobufError> {
        let opset = |domain: &str, version| OperatorSetIdProto {
            domain: Some(domain.to_owned()),
            version: Some(version),
        };
        let packs = |node: &rten_onnx::onnx::NodeProto| node.domain.as_deref() == Some(MICROSOFT);
        fields.write_int64(1, IR_VERSION)?;
        fields.write_string(2, "qhx")?;
        fields.write_message(7, &NamedGraph { name: self.name, graph: self.graph })?;
        fields.write_message(8, &opset(Operator::MatMul.domain(), OPSET))?;
        if self.graph.node.iter().any(packs) {
            fields.write_message(8, &opset(MICROSOFT, MICROSOFT_OPSET))?;
        }
        let [key, value] = self.metadata.map(|text| Some(text.to_owned()));
        fields.write_message(14, &StringStringEntryProto { key, value })
    }
}

/// `GraphProto` with its name, without which ONNX's checker refuses a model.
struct NamedGraph<'a> {
    name: &'a str,
    graph: &'a GraphProto,
}

impl EncodeMessage for NamedGraph<'_> {
    fn encode_fields<W: WriteValue>(
        &self,
        fields: &mut MessageWriter<'_, W>,
    ) -> Result<(), ProtobufError> {
        let GraphProto { node, initializer, input, output, value_info } = self.graph;
        fields.write_repeated_message(1, node)?;
        fields.write_string(2, self.name)?;
        fields.write_repeated_message(5, initializer)?;
        fields.write_repeated_message(11, input)?;
        fields.write_repeated_message(12, output)?;
        fields.write_repeated_message(13, value_info)
    }
}

#[cfg(test)]
mod tests {
    use rten_onnx::onnx::{ModelProto, NodeProto};

    use super::*;

    #[test]
    fn a_model_names_its_graph_and_domains() {
        let node = |operator: Operator| NodeProto {
            op_type: Some(operator.name().to_owned()),
            domain: Some(operator.domain().to_owned()).filter(|domain| !domain.is_empty()),
            ..NodeProto::default()
        };
        for (operator, domains) in [
            (Operator::Gemm, &["", "com.microsoft"][..1]),
            (Operator::MatMulNBits, &["", MICROSOFT]),
        ] {
            let graph = GraphProto { node: vec![node(operator)], ..GraphProto::default() };
            let bytes =
                Model { name: "decode_0", graph: &graph, metadata: ["a", "{}"] }.bytes().unwrap();
            assert!(bytes.windows(10).any(|part| part == b"\x12\x08decode_0"));
            let model = ModelProto::parse_buf(&bytes).unwrap();
            let found: Vec<_> =
                model.opset_import.iter().filter_map(|opset| opset.domain.as_deref()).collect();
            assert_eq!(found, domains);
            assert_eq!(model.graph.unwrap().node[0].op_type.as_deref(), Some(operator.name()));
        }
    }
}
