//! Execution of a program over bound buffers.

#![expect(unsafe_code, reason = "implements Graph, which executes over shared memory")]

use std::sync::Arc;

use bytemuck::AnyBitPattern;
use qhx_base::{Error, ErrorKind, Result};
use qhx_exec::Memory;
use qhx_exec::backend::Graph;
use qhx_exec::bindings::Bindings;
use qhx_types::{DType, GraphInfo, Port, TensorInfo};
use rayon::ThreadPool;

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
        let info = &self.model.info;
        let program = &self.model.program;
        let mut inputs = Vec::with_capacity(info.inputs.len());
        for (index, tensor) in info.inputs.iter().enumerate() {
            // SAFETY: contract of `qhx_exec::backend`: exclusive. Outputs are written only after `inputs` is gone.
            inputs.push(input(tensor, unsafe { self.bindings.input(index)? })?);
        }
        let scratch = &mut self.scratch;
        run(|| self.threads.install(|| program.run(&inputs, scratch)))?;
        drop(inputs);
        for (index, tensor) in info.outputs.iter().enumerate() {
            // SAFETY: as above.
            let bytes = unsafe { self.bindings.output(index)? };
            // i32 comes as its bits.
            let to = bytemuck::try_cast_slice_mut(bytes).map_err(|e| internal(tensor, &e))?;
            program.output(index, &self.scratch, to)?;
        }
        Ok(())
    }
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
