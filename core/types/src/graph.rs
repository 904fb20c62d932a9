//! Graphs and their tensors.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{DType, Quantization};

/// One input or output of a graph.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TensorInfo {
    /// The name in the graph.
    pub name: String,
    /// The role that an op knows it by: the key of `plan.params.tensors` that maps to `name`, or the
    /// name itself. Empty where no op has been opened.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub role: String,
    /// Element type.
    pub dtype: DType,
    /// Row-major dimensions.
    pub shape: Vec<usize>,
    /// Encoding, for quantised types.
    #[serde(default, skip_serializing_if = "Quantization::is_none")]
    pub quantization: Quantization,
}

impl TensorInfo {
    /// A tensor without role and quantisation.
    pub fn new(name: impl Into<String>, dtype: DType, shape: impl Into<Vec<usize>>) -> Self {
        Self {
            name: name.into(),
            role: String::new(),
            dtype,
            shape: shape.into(),
            quantization: Quantization::None,
        }
    }

    /// Number of elements; `usize::MAX` when it is larger than that.
    pub fn elements(&self) -> usize {
        self.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d)).unwrap_or(usize::MAX)
    }

    /// Number of bytes; `usize::MAX` when it is larger than that, 0 for [`DType::Other`].
    pub fn byte_len(&self) -> usize {
        self.elements().saturating_mul(self.dtype.size())
    }

    /// Same as [`TensorInfo::elements`], with an error on overflow.
    ///
    /// # Errors
    /// When the number does not fit.
    pub fn try_elements(&self) -> Result<usize, SizeError> {
        let product = self.shape.iter().try_fold(1usize, |n, &d| n.checked_mul(d));
        product.ok_or_else(|| SizeError(self.to_string()))
    }

    /// Same as [`TensorInfo::byte_len`], with an error on overflow or for an unknown dtype.
    ///
    /// # Errors
    /// When the number does not fit or the dtype is unknown.
    pub fn try_byte_len(&self) -> Result<usize, SizeError> {
        let size = Some(self.dtype.size()).filter(|&size| size > 0);
        let bytes = size.and_then(|size| self.try_elements().ok()?.checked_mul(size));
        bytes.ok_or_else(|| SizeError(self.to_string()))
    }

    /// The last dimension, or 1 for a scalar.
    pub fn width(&self) -> usize {
        self.shape.last().copied().unwrap_or(1)
    }
}

impl fmt::Display for TensorInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}{:?}", self.name, self.dtype, self.shape)
    }
}

/// The size of a tensor, which is the text in it, is no number of bytes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SizeError(String);

impl fmt::Display for SizeError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "tensor {} is larger than memory can be, or of an unknown type", self.0)
    }
}

impl std::error::Error for SizeError {}

/// Inputs and outputs of one graph.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct GraphInfo {
    /// The name in the context.
    pub name: String,
    /// Inputs in the graph's order.
    pub inputs: Vec<TensorInfo>,
    /// Outputs in the graph's order.
    pub outputs: Vec<TensorInfo>,
    /// Manifest key of the context that holds it. Empty where a backend describes a graph: it knows
    /// no manifest.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub context: String,
    /// Microseconds of one execution, where the manifest declares it for the form that is executed
    /// (`artifacts.contexts.<key>.us`): an estimate or a measurement. None where a backend describes a graph.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub us: Option<f64>,
}

impl GraphInfo {
    /// A graph of a context without a key.
    pub fn new(
        name: impl Into<String>,
        inputs: impl Into<Vec<TensorInfo>>,
        outputs: impl Into<Vec<TensorInfo>>,
    ) -> Self {
        Self {
            name: name.into(),
            inputs: inputs.into(),
            outputs: outputs.into(),
            context: String::new(),
            us: None,
        }
    }

    /// The tensor behind a port.
    pub fn tensor(&self, port: Port) -> Option<&TensorInfo> {
        match port {
            Port::Input(i) => self.inputs.get(i),
            Port::Output(i) => self.outputs.get(i),
        }
    }

    /// Index of the input with a role.
    pub fn input(&self, role: &str) -> Option<usize> {
        self.inputs.iter().position(|t| t.role == role)
    }

    /// Index of the output with a role.
    pub fn output(&self, role: &str) -> Option<usize> {
        self.outputs.iter().position(|t| t.role == role)
    }

    /// Index of the input with a role; the error lists what the graph has.
    ///
    /// # Errors
    /// When the graph has no such input.
    pub fn require_input(&self, role: &str) -> Result<usize, MissingTensor> {
        self.input(role).ok_or_else(|| self.missing("input", role, &self.inputs))
    }

    /// Index of the output with a role; the error lists what the graph has.
    ///
    /// # Errors
    /// When the graph has no such output.
    pub fn require_output(&self, role: &str) -> Result<usize, MissingTensor> {
        self.output(role).ok_or_else(|| self.missing("output", role, &self.outputs))
    }

    fn missing(&self, side: &'static str, role: &str, have: &[TensorInfo]) -> MissingTensor {
        MissingTensor {
            graph: self.name.clone(),
            side,
            role: role.to_owned(),
            have: have.iter().map(|t| t.name.clone()).collect(),
        }
    }
}

/// A graph has no tensor of a role.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MissingTensor {
    /// Name of the graph.
    pub graph: String,
    /// `input` or `output`.
    pub side: &'static str,
    /// The role that was looked for.
    pub role: String,
    /// Names of all tensors on that side.
    pub have: Vec<String>,
}

impl fmt::Display for MissingTensor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const SHOWN: usize = 12;
        let mut names: Vec<_> = self.have.iter().take(SHOWN).map(String::as_str).collect();
        if self.have.len() > SHOWN {
            names.push("…");
        }
        let (graph, side, role) = (&self.graph, self.side, &self.role);
        write!(f, "graph {graph:?} has no {side} {role:?}; it has {}", names.join(", "))
    }
}

impl std::error::Error for MissingTensor {}

/// One input or output of a graph, by index.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Port {
    /// Index into [`GraphInfo::inputs`].
    Input(usize),
    /// Index into [`GraphInfo::outputs`].
    Output(usize),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_that_no_memory_has_are_errors_and_never_wrap() {
        let vast = TensorInfo::new("x", DType::F32, [usize::MAX / 2, 3]);
        assert_eq!((vast.elements(), vast.byte_len()), (usize::MAX, usize::MAX));
        assert!(vast.try_elements().is_err());
        let wide = TensorInfo::new("x", DType::F64, [usize::MAX / 4]);
        assert_eq!(wide.try_elements(), Ok(usize::MAX / 4));
        let error = wide.try_byte_len().unwrap_err().to_string();
        assert!(error.contains("x f64["), "{error}");
        assert!(TensorInfo::new("x", DType::Other, [1]).try_byte_len().is_err());
    }

    #[test]
    fn a_plain_graph_is_written_without_what_it_does_not_have() {
        let graph = GraphInfo::new("g", [TensorInfo::new("x", DType::F16, [1, 2])], []);
        let text = serde_json::to_string(&graph).unwrap();
        let tensor = r#"{"name":"x","dtype":"f16","shape":[1,2]}"#;
        assert_eq!(text, format!(r#"{{"name":"g","inputs":[{tensor}],"outputs":[]}}"#));
    }
}
