//! Checks an op's declaration about its logits against the tensors that a graph writes.

use qhx_base::{Error, ErrorKind, Result};
use qhx_exec::{BufferId, Workspace};
use qhx_op::abi::{RawView, VIEW_F16};
use qhx_types::{DType, TensorInfo};

/// Expected content of a view.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    /// A whole row of a tensor, where a graph writes it.
    Logits,
    /// A run of values; an op may return the first of a row only.
    Embedding,
}

/// Errors when a view reads what a graph wrote otherwise than the graph wrote it: as another element
/// type, or as rows of another length. A view of a buffer that no graph writes is the op's own.
pub(crate) fn agree(op: &str, kind: Kind, view: RawView, workspace: &Workspace) -> Result<()> {
    let (dtype, name) =
        if view.dtype == VIEW_F16 { (DType::F16, "f16") } else { (DType::F32, "f32") };
    let bytes = view.len.saturating_mul(dtype.size() as u64);
    let end = view.offset.saturating_add(bytes);
    let mut differing = None;
    for (graph, tensor, start) in workspace.outputs_in(BufferId(view.buffer)) {
        let start = start as u64;
        let last = start.saturating_add(tensor.try_byte_len().map_err(Error::size)? as u64);
        if view.offset >= last || end <= start {
            continue;
        }
        let first = view.offset.checked_sub(start).filter(|_| end <= last);
        let fits = first.is_some_and(|first| match kind {
            Kind::Logits => is_row(tensor, view.len) && first.is_multiple_of(bytes.max(1)),
            Kind::Embedding => true,
        });
        if tensor.dtype == dtype && fits {
            return Ok(());
        }
        differing = differing.or(Some((graph, tensor)));
    }
    let Some((graph, tensor)) = differing else { return Ok(()) };
    let what = match kind {
        Kind::Logits => "logits",
        Kind::Embedding => "embedding",
    };
    let width = tensor.shape.last().copied().unwrap_or(1);
    Err(Error::new(
        ErrorKind::Plugin,
        format!(
            "host-op {op:?}: its {what} are {} {name} values at byte {} of what graph {:?} writes as \
             tensor {tensor}; expected a row of {width} {} values",
            view.len, view.offset, graph.name, tensor.dtype
        ),
    )
    .hint("the op must take the view's dtype and length from the tensor; tell its author"))
}

/// The graph and tensor that write where a view begins, for messages. `None` where no graph does.
pub(crate) fn origin(view: RawView, workspace: &Workspace) -> Option<String> {
    let mut outputs = workspace.outputs_in(BufferId(view.buffer));
    let (graph, tensor, _) = outputs.find(|(_, tensor, start)| {
        let bytes = tensor.try_byte_len().unwrap_or_default();
        (*start..start.saturating_add(bytes)).contains(&(view.offset as usize))
    })?;
    Some(format!("graph {:?}, tensor {tensor}", graph.name))
}

/// True if a number of values is a row of the tensor, or all of it.
fn is_row(tensor: &TensorInfo, len: u64) -> bool {
    let mut row = 1_u64;
    tensor.shape.is_empty() && len == 1
        || tensor.shape.iter().rev().any(|&dimension| {
            row = row.saturating_mul(dimension as u64);
            row == len
        })
}
