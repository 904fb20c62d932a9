//! Execution of a program over bound buffers.

#![expect(unsafe_code, reason = "implements Graph, which executes over shared memory")]

use std::sync::Arc;

use bytemuck::AnyBitPattern;
use qhx_base::{Error, ErrorKind, Result};
use qhx_exec::Memory;
use qhx_exec::backend::{Batch, BoundPorts, Graph};
use qhx_exec::bindings::Bindings;
use qhx_types::{DType, GraphInfo, Port, TensorInfo};
use rayon::ThreadPool;

use crate::kernels::FEW;
use crate::model::{LoadedModel, guarded};
use crate::program::{Input, Scratch};

/// A program with buffers bound to its inputs and outputs.
pub(crate) struct CpuGraph {
    model: Arc<LoadedModel>,
    bindings: Bindings,
    threads: Arc<ThreadPool>,
    scratch: Scratch,
}

impl CpuGraph {
    pub(crate) fn new(model: Arc<LoadedModel>, threads: Arc<ThreadPool>) -> Result<Self> {
        let bindings = Bindings::new(&model.info)?;
        Ok(Self { model, bindings, threads, scratch: Scratch::default() })
    }
}

/// Executes what could panic.
fn run<T>(call: impl FnOnce() -> Result<T>) -> Result<T> {
    guarded(call).map_err(|panic| Error::new(ErrorKind::Execute, panic))?
}

impl Graph for CpuGraph {
    fn info(&self) -> &Arc<GraphInfo> {
        &self.model.info
    }

    fn bind(&mut self, port: Port, memory: &Memory, offset: usize) -> Result<()> {
        self.bindings.bind(port, memory, offset)
    }

    unsafe fn execute(&mut self) -> Result<()> {
        let Self { model, bindings, threads, scratch } = self;
        // SAFETY: contract of `qhx_exec::backend`: exclusive. Outputs are written only after `inputs` is gone.
        let inputs = unsafe { inputs(&model.info, bindings)? };
        run(|| threads.install(|| model.program.run(&inputs, scratch)))?;
        drop(inputs);
        // SAFETY: as above.
        unsafe { write_outputs(model, bindings, scratch) }
    }
}

/// The inputs that are bound.
///
/// # Safety
/// *exclusive* of the contract of `qhx_exec::backend`, as long as they live.
unsafe fn inputs<'a>(info: &GraphInfo, bindings: &'a Bindings) -> Result<Vec<Input<'a>>> {
    let one = |(index, tensor): (usize, &TensorInfo)| {
        // SAFETY: the caller's.
        input(tensor, unsafe { bindings.input(index)? })
    };
    info.inputs.iter().enumerate().map(one).collect()
}

/// Writes the outputs of an execution.
///
/// # Safety
/// *exclusive* of the contract of `qhx_exec::backend`, and nothing of the inputs is borrowed.
unsafe fn write_outputs(model: &LoadedModel, bindings: &Bindings, scratch: &Scratch) -> Result<()> {
    for (index, tensor) in model.info.outputs.iter().enumerate() {
        // SAFETY: the caller's.
        let bytes = unsafe { bindings.output(index)? };
        // i32 comes as its bits.
        let to = bytemuck::try_cast_slice_mut(bytes).map_err(|e| internal(tensor, &e))?;
        model.program.output(index, scratch, to)?;
    }
    Ok(())
}

/// Maximum number of sequences of a step: as many rows as weights are multiplied with as they come from memory.
const SEQUENCES: usize = FEW;

/// A program for several sequences at once.
pub(crate) struct CpuBatch {
    model: Arc<LoadedModel>,
    threads: Arc<ThreadPool>,
    /// Memory of each sequence.
    bindings: Vec<Bindings>,
    scratches: Vec<Scratch>,
}

impl CpuBatch {
    pub(crate) fn new(model: Arc<LoadedModel>, threads: Arc<ThreadPool>) -> Result<Self> {
        let bindings = (0..SEQUENCES).map(|_| Bindings::new(&model.info));
        let bindings = bindings.collect::<Result<_>>()?;
        Ok(Self { model, threads, bindings, scratches: Vec::new() })
    }
}

impl Batch for CpuBatch {
    fn max(&self) -> usize {
        SEQUENCES
    }

    unsafe fn execute(&mut self, sequences: &[&BoundPorts]) -> Result<()> {
        let Self { model, threads, bindings, scratches } = self;
        let bindings = bindings.get_mut(..sequences.len()).ok_or_else(|| {
            let message = format!("{} sequences, at most {SEQUENCES}", sequences.len());
            Error::new(ErrorKind::Internal, message)
        })?;
        for (bindings, ports) in bindings.iter_mut().zip(sequences) {
            bind(&model.info, bindings, ports)?;
        }
        scratches.resize_with(scratches.len().max(sequences.len()), Scratch::default);
        let scratches = &mut scratches[..sequences.len()];
        let inputs = bindings.iter().map(|bindings| {
            // SAFETY: contract of `qhx_exec::backend`: exclusive. Outputs are written only after `inputs` is gone.
            unsafe { inputs(&model.info, bindings) }
        });
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        run(|| threads.install(|| model.program.run_together(&inputs, scratches)))?;
        drop(inputs);
        for (bindings, scratch) in bindings.iter().zip(scratches) {
            // SAFETY: as above.
            unsafe { write_outputs(model, bindings, scratch)? };
        }
        Ok(())
    }
}

/// Binds what a sequence has bound to its own graph.
fn bind(info: &GraphInfo, bindings: &mut Bindings, ports: &BoundPorts) -> Result<()> {
    let inputs = (0..info.inputs.len()).map(Port::Input);
    let outputs = (0..info.outputs.len()).map(Port::Output);
    for (port, bound) in inputs.chain(outputs).zip(ports) {
        if let Some((memory, offset)) = bound {
            bindings.bind(port, memory, *offset)?;
        }
    }
    Ok(())
}

/// The bytes of an input as a program sees them.
fn input<'a>(tensor: &TensorInfo, bytes: &'a [u8]) -> Result<Input<'a>> {
    fn typed<'a, T: AnyBitPattern>(tensor: &TensorInfo, bytes: &'a [u8]) -> Result<&'a [T]> {
        bytemuck::try_cast_slice(bytes).map_err(|e| internal(tensor, &e))
    }
    Ok(match tensor.dtype {
        DType::F32 => Input::F32(typed(tensor, bytes)?),
        DType::I32 => Input::I32(typed(tensor, bytes)?),
        DType::I8 => Input::I8(typed(tensor, bytes)?),
        DType::F16 => Input::F16(typed(tensor, bytes)?),
        _ => return Err(internal(tensor, &"not a type of the CPU backend")),
    })
}

fn internal(tensor: &TensorInfo, error: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorKind::Internal, format!("tensor {tensor}: {error}"))
}
