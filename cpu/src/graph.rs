//! Executing a model over bound buffers.

#![expect(unsafe_code, reason = "implements Graph, which executes over shared memory")]

use std::sync::Arc;

use bytemuck::AnyBitPattern;
use qhx_base::{Error, ErrorKind, Result};
use qhx_exec::Memory;
use qhx_exec::backend::Graph;
use qhx_exec::bindings::Bindings;
use qhx_types::{DType, GraphInfo, Port, TensorInfo};
use rten::{Model, RunOptions, ThreadPool, Value, ValueOrView, ValueView};
use rten_tensor::prelude::*;
use rten_tensor::{Tensor, TensorView};

use crate::model::{Executor, LoadedModel, guarded};
use crate::program::{Input, Scratch};

/// A model with buffers bound to its inputs and outputs.
pub(crate) struct CpuGraph {
    model: Arc<LoadedModel>,
    bindings: Bindings,
    threads: Option<Arc<ThreadPool>>,
    scratch: Scratch,
}

impl CpuGraph {
    pub(crate) fn new(model: Arc<LoadedModel>, threads: Option<Arc<ThreadPool>>) -> Result<Self> {
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
        let model = match self.model.executor() {
            Executor::Program(program) => {
                let mut inputs = Vec::with_capacity(info.inputs.len());
                for (index, tensor) in info.inputs.iter().enumerate() {
                    // SAFETY: contract of `qhx_exec::backend`: exclusive. Outputs are written only after
                    // `inputs` is gone.
                    inputs.push(input(tensor, unsafe { self.bindings.input(index)? })?);
                }
                let scratch = &mut self.scratch;
                let pool = self.threads.as_deref();
                run(|| {
                    pool.unwrap_or_else(|| rten::thread_pool())
                        .run(|| program.run(&inputs, scratch))
                })?;
                drop(inputs);
                for (index, tensor) in info.outputs.iter().enumerate() {
                    // SAFETY: as above.
                    let bytes = unsafe { self.bindings.output(index)? };
                    // i32 comes as its bits.
                    let to =
                        bytemuck::try_cast_slice_mut(bytes).map_err(|e| internal(tensor, &e))?;
                    program.output(index, &self.scratch, to)?;
                }
                return Ok(());
            }
            Executor::Rten(model, _) => model,
        };
        let mut inputs = Vec::with_capacity(info.inputs.len());
        for (index, tensor) in info.inputs.iter().enumerate() {
            // SAFETY: contract of `qhx_exec::backend`: exclusive. Outputs are written only after `run`
            // has consumed every view.
            let bytes = unsafe { self.bindings.input(index)? };
            inputs.push(view(tensor, bytes)?);
        }
        let values = run(|| by_rten(model, &inputs, self.threads.as_ref()))?;
        drop(inputs);
        // All are checked before the first is written.
        for (tensor, value) in info.outputs.iter().zip(&values) {
            check(tensor, value)?;
        }
        for (index, (tensor, value)) in info.outputs.iter().zip(&values).enumerate() {
            // SAFETY: contract of `qhx_exec::backend`: exclusive. The slice ends before the next
            // output's begins.
            let bytes = unsafe { self.bindings.output(index)? };
            write(tensor, value, bytes)?;
        }
        Ok(())
    }
}

/// Executes a whole model with rten.
fn by_rten(
    model: &Model,
    inputs: &[ValueView<'_>],
    pool: Option<&Arc<ThreadPool>>,
) -> Result<Vec<Value>> {
    let inputs: Vec<(_, ValueOrView<'_>)> =
        model.input_ids().iter().copied().zip(inputs.iter().cloned().map(Into::into)).collect();
    let options = RunOptions::default().with_thread_pool(pool.cloned());
    let values = model.run(inputs, model.output_ids(), Some(options));
    values.map_err(|e| Error::new(ErrorKind::Execute, e.to_string()))
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
        DType::U8 => Input::U8(typed(tensor, bytes)?),
        DType::F16 => Input::F16(typed(tensor, bytes)?),
        _ => return Err(internal(tensor, &"not a type of the CPU backend")),
    })
}

/// The bytes of an input as rten sees them.
fn view<'a>(tensor: &'a TensorInfo, bytes: &'a [u8]) -> Result<ValueView<'a>> {
    fn typed<'a, T: AnyBitPattern>(
        tensor: &'a TensorInfo,
        bytes: &'a [u8],
    ) -> Result<TensorView<'a, T>> {
        let elements: &[T] = bytemuck::try_cast_slice(bytes).map_err(|e| internal(tensor, &e))?;
        TensorView::try_from_data(tensor.shape.as_slice(), elements)
            .map_err(|e| internal(tensor, &e))
    }
    Ok(match tensor.dtype {
        DType::F32 => ValueView::FloatTensor(typed(tensor, bytes)?),
        DType::I32 => ValueView::Int32Tensor(typed(tensor, bytes)?),
        DType::I8 => ValueView::Int8Tensor(typed(tensor, bytes)?),
        DType::U8 => ValueView::UInt8Tensor(typed(tensor, bytes)?),
        _ => return Err(internal(tensor, &"not a type of the CPU backend")),
    })
}

/// Type and shape of a result against what the model declares.
fn check(tensor: &TensorInfo, value: &Value) -> Result<()> {
    let (dtype, shape) = match value {
        Value::FloatTensor(t) => (Some(DType::F32), t.shape()),
        Value::Int32Tensor(t) => (Some(DType::I32), t.shape()),
        Value::Int8Tensor(t) => (Some(DType::I8), t.shape()),
        Value::UInt8Tensor(t) => (Some(DType::U8), t.shape()),
        _ => (None, Default::default()),
    };
    if dtype == Some(tensor.dtype) && *shape == *tensor.shape {
        return Ok(());
    }
    let found = dtype.map_or("a sequence".to_owned(), |d| format!("{d}{shape:?}"));
    Err(Error::new(ErrorKind::Execute, format!("output {tensor} came out as {found}"))
        .hint("the model declares another type or shape than it computes"))
}

/// Copies a result into the bytes bound to an output.
fn write(tensor: &TensorInfo, value: &Value, bytes: &mut [u8]) -> Result<()> {
    fn typed<T: bytemuck::Pod>(
        tensor: &TensorInfo,
        result: &Tensor<T>,
        bytes: &mut [u8],
    ) -> Result<()> {
        let target: &mut [T] =
            bytemuck::try_cast_slice_mut(bytes).map_err(|e| internal(tensor, &e))?;
        match result.data() {
            Some(data) if data.len() == target.len() => target.copy_from_slice(data),
            _ => target.iter_mut().zip(result.iter()).for_each(|(to, from)| *to = *from),
        }
        Ok(())
    }
    match value {
        Value::FloatTensor(result) => typed(tensor, result, bytes),
        Value::Int32Tensor(result) => typed(tensor, result, bytes),
        Value::Int8Tensor(result) => typed(tensor, result, bytes),
        Value::UInt8Tensor(result) => typed(tensor, result, bytes),
        _ => Err(internal(tensor, &"a sequence")),
    }
}

fn internal(tensor: &TensorInfo, error: &dyn std::fmt::Display) -> Error {
    Error::new(ErrorKind::Internal, format!("tensor {tensor}: {error}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_result_of_another_shape_or_type_is_refused() {
        let declared = TensorInfo::new("y", DType::F32, [2]);
        let value = Value::from_shape([3, 2], vec![0f32; 6]).unwrap();
        let error = check(&declared, &value).unwrap_err();
        assert_eq!(error.message(), "output y f32[2] came out as f32[3, 2]");
        let value = Value::from_shape([2], vec![0i32; 2]).unwrap();
        let error = check(&declared, &value).unwrap_err();
        assert_eq!(error.message(), "output y f32[2] came out as i32[2]");
        check(&declared, &Value::from_shape([2], vec![0f32; 2]).unwrap()).unwrap();
    }
}
