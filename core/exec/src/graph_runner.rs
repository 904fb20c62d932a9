//! Graphs alone: executed on values by the names of their tensors, in f32, to be compared with others.

use std::sync::Arc;

use half::f16;
use half::slice::HalfFloatSliceExt as _;
use qhx_base::{CancelToken, Error, ErrorKind, Result};
use qhx_types::{DType, GraphInfo, Port, TensorInfo};

use crate::backend::{Backend, ContextSource};
use crate::{GraphId, Workspace};

/// A workspace with the graphs of one context, and their descriptions.
///
/// # Errors
/// When the context or one of its graphs does not open.
pub fn open(
    backend: &Arc<dyn Backend>,
    source: &ContextSource,
) -> Result<(Workspace, Vec<Arc<GraphInfo>>)> {
    let context = backend.open_context(source)?;
    let mut workspace = Workspace::new(Arc::clone(backend), CancelToken::new());
    workspace.add_context(&source.key, &context)?;
    Ok((workspace, context.graphs().to_vec()))
}

/// Values by the name of their tensor.
pub type Named = (String, Vec<f32>);

/// Executes a graph with inputs by name and returns its outputs by name.
///
/// # Errors
/// When an input is missing or of another size, an element type is not supported, or the execution fails.
pub fn run(workspace: &mut Workspace, info: &GraphInfo, inputs: &[Named]) -> Result<Vec<Named>> {
    let graph: GraphId = workspace.find_graph(&info.name)?.ok_or_else(|| {
        Error::new(ErrorKind::Internal, format!("graph {:?} is not in its context", info.name))
    })?;
    for (index, tensor) in info.inputs.iter().enumerate() {
        let Some((_, values)) = inputs
            .iter()
            .find(|(n, v)| *n == tensor.name && Ok(v.len()) == tensor.try_elements().map_err(drop))
        else {
            return Err(Error::new(
                ErrorKind::Graph,
                format!("graph {:?}: input {tensor} is not in its reference graph", info.name),
            ));
        };
        let buffer = workspace.allocate(tensor.try_byte_len().map_err(Error::size)?)?;
        encode(tensor, values, workspace.bytes_mut(buffer)?)?;
        workspace.bind(graph, Port::Input(index), buffer, 0)?;
    }
    let mut buffers = Vec::new();
    for (index, tensor) in info.outputs.iter().enumerate() {
        let buffer = workspace.allocate(tensor.try_byte_len().map_err(Error::size)?)?;
        workspace.bind(graph, Port::Output(index), buffer, 0)?;
        buffers.push(buffer);
    }
    workspace.execute(graph)?;
    info.outputs
        .iter()
        .zip(buffers)
        .map(|(tensor, buffer)| {
            Ok((tensor.name.clone(), decode(tensor, workspace.bytes(buffer)?)?))
        })
        .collect()
}

fn encode(tensor: &TensorInfo, values: &[f32], bytes: &mut [u8]) -> Result<()> {
    match tensor.dtype {
        DType::F16 => {
            let mut half = vec![f16::ZERO; values.len()];
            half.convert_from_f32_slice(values);
            copy(tensor, bytes, half.iter().map(|v| v.to_le_bytes()))
        }
        DType::F32 => copy(tensor, bytes, values.iter().map(|v| v.to_le_bytes())),
        DType::I8 | DType::SFixed8 => copy(tensor, bytes, values.iter().map(|v| [int8(*v)])),
        DType::UFixed8 => copy(tensor, bytes, values.iter().map(|v| [int8(*v) ^ UNSIGNED])),
        _ => Err(unsupported(tensor)),
    }
}

/// The byte of 0 of quantized values that are unsigned.
const UNSIGNED: u8 = 128;

fn int8(value: f32) -> u8 {
    ((value * 127.0).round() as i8).cast_unsigned()
}

fn copy<const N: usize>(
    tensor: &TensorInfo,
    bytes: &mut [u8],
    from: impl ExactSizeIterator<Item = [u8; N]>,
) -> Result<()> {
    let to = bytes.as_chunks_mut::<N>().0.get_mut(..from.len());
    let to = to.ok_or_else(|| unsupported(tensor))?;
    to.iter_mut().zip(from).for_each(|(to, from)| *to = from);
    Ok(())
}

/// Elements of a tensor.
///
/// # Errors
/// When there are too few bytes, or the elements are neither floats nor int8.
pub fn decode(tensor: &TensorInfo, bytes: &[u8]) -> Result<Vec<f32>> {
    let bytes = bytes
        .get(..tensor.try_byte_len().map_err(Error::size)?)
        .ok_or_else(|| unsupported(tensor))?;
    match tensor.dtype {
        DType::F16 => {
            let pairs = bytes.as_chunks::<2>().0;
            let half: Vec<f16> = pairs.iter().map(|p| f16::from_le_bytes(*p)).collect();
            let mut wide = vec![0f32; half.len()];
            half.convert_to_f32_slice(&mut wide);
            Ok(wide)
        }
        DType::F32 => Ok(bytes.as_chunks::<4>().0.iter().map(|q| f32::from_le_bytes(*q)).collect()),
        DType::I8 | DType::SFixed8 => {
            Ok(bytes.iter().map(|b| f32::from(b.cast_signed()) / 127.0).collect())
        }
        DType::UFixed8 => {
            let signed = bytes.iter().map(|b| (b ^ UNSIGNED).cast_signed());
            Ok(signed.map(|b| f32::from(b) / 127.0).collect())
        }
        _ => Err(unsupported(tensor)),
    }
}

fn unsupported(tensor: &TensorInfo) -> Error {
    Error::new(
        ErrorKind::Graph,
        format!("a graph alone does not take tensor {tensor}, expected f16, f32 or int8"),
    )
}
