//! Helpers that the tests share: arbitrary weights, compiled graphs to run, and their ONNX reference graphs.

use std::collections::HashMap;
use std::sync::Arc;

use half::f16;
use qhx_base::compare::Distance;
use qhx_base::{CancelToken, Result};
use qhx_cpu::{CpuBackend, CpuOptions};
use qhx_exec::backend::{Backend, ContextSource};
use qhx_exec::{BufferId, GraphId, Workspace};
use qhx_forge::Silent;
use qhx_forge::compile::Compiler;
use qhx_forge::qnn::QnnCompiler;
use qhx_graph::graph::{Elem, Graph};
use qhx_graph::weight::{RowSource, Storage, Weight};
use qhx_qnn::{Library, QnnBackend, QnnOptions, Target};
use qhx_types::{DType, GraphInfo, MASK_VALUE, Port};
use rten::{Model, ValueOrView};
use rten_tensor::Tensor;
use rten_tensor::prelude::*;

/// Small numbers that do not repeat, the same in every run.
pub(crate) fn numbers(seed: u32, count: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(2_654_435_761).wrapping_add(12345);
    let next = |_| {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        f16::from_f32((state >> 8) as f32 / (1u32 << 23) as f32 - 1.0).to_f32()
    };
    (0..count).map(next).collect()
}

/// A matrix with values of its own.
#[derive(Debug)]
pub(crate) struct Fixed {
    pub(crate) shape: [usize; 2],
    pub(crate) values: Vec<f32>,
}

impl RowSource for Fixed {
    fn name(&self) -> &str {
        "fixed.weight"
    }

    fn shape(&self) -> [usize; 2] {
        self.shape
    }

    fn stored_dtype(&self) -> DType {
        DType::F32
    }

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        out.copy_from_slice(&self.values[first * self.shape[1]..][..out.len()]);
        Ok(())
    }
}

/// A weight with arbitrary values.
pub(crate) fn weight(seed: u32, shape: [usize; 2], storage: Storage) -> Weight {
    // Rows of different size, so that a lost scale shows.
    let mut values = numbers(seed, shape[0] * shape[1]);
    for (r, row) in values.chunks_exact_mut(shape[1]).enumerate() {
        row.iter_mut().for_each(|v| *v *= 0.2 + r as f32 / shape[0] as f32);
    }
    Weight::new(Arc::new(Fixed { shape, values }), storage)
}

/// Graphs compiled into one context and opened, with a buffer for every port.
pub(crate) struct Compiled {
    pub(crate) workspace: Workspace,
    pub(crate) buffers: HashMap<(u32, Port), BufferId>,
}

impl Compiled {
    pub(crate) fn new(library: &Library, target: Target, contexts: &[&[Graph]]) -> Self {
        let backend: Arc<dyn Backend> =
            Arc::new(QnnBackend::with_library(library, QnnOptions::default()).unwrap());
        let mut workspace = Workspace::new(Arc::clone(&backend), CancelToken::new());
        let compiler = QnnCompiler::new(library.clone(), target);
        let folder = tempfile::tempdir().unwrap();
        let path = |key: &str| folder.path().join(key);
        for (index, graphs) in contexts.iter().enumerate() {
            let key = format!("c{index}");
            let bytes = compiler.compile(&key, graphs, &path(&key), &mut Silent).unwrap();
            assert_eq!(std::fs::metadata(path(&key)).unwrap().len(), bytes);
        }
        for index in 0..contexts.len() {
            let key = format!("c{index}");
            let path = path(&key);
            let source = ContextSource { key, binary: Some(path), ..ContextSource::default() };
            let context = backend.open_context(&source).unwrap();
            workspace.add_context(&source.key, &context).unwrap();
        }
        Self::bound(workspace)
    }

    /// The graph on the CPU backend.
    pub(crate) fn on_cpu(graph: &Graph) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let written = qhx_graph::onnx::write(graph, folder.path(), &mut Silent).unwrap();
        let backend: Arc<dyn Backend> = Arc::new(CpuBackend::new(CpuOptions::default()).unwrap());
        let onnx = vec![(graph.name().to_owned(), written.model)];
        let source = ContextSource { key: "c".to_owned(), onnx, ..ContextSource::default() };
        let context = backend.open_context(&source).unwrap();
        let mut workspace = Workspace::new(backend, CancelToken::new());
        workspace.add_context(&source.key, &context).unwrap();
        Self::bound(workspace)
    }

    /// Buffers for every port.
    fn bound(mut workspace: Workspace) -> Self {
        let mut buffers = HashMap::new();
        for id in 0..workspace.graph_count() as u32 {
            let info = Arc::clone(workspace.graph(GraphId(id)).unwrap().1);
            let inputs = (0..info.inputs.len()).map(Port::Input);
            for port in inputs.chain((0..info.outputs.len()).map(Port::Output)) {
                let bytes = info.tensor(port).unwrap().try_byte_len().unwrap();
                let buffer = workspace.allocate(bytes).unwrap();
                workspace.bind(GraphId(id), port, buffer, 0).unwrap();
                buffers.insert((id, port), buffer);
            }
        }
        Self { workspace, buffers }
    }

    pub(crate) fn info(&self, graph: u32) -> Arc<GraphInfo> {
        Arc::clone(self.workspace.graph(GraphId(graph)).unwrap().1)
    }

    pub(crate) fn write(&mut self, graph: u32, index: usize, values: &[f32]) {
        let dtype = self.info(graph).inputs[index].dtype;
        let bytes: Vec<u8> = match dtype {
            DType::F16 => values.iter().flat_map(|&v| f16::from_f32(v).to_le_bytes()).collect(),
            DType::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
            DType::I32 => values.iter().flat_map(|&v| (v as i32).to_le_bytes()).collect(),
            DType::SFixed8 => values.iter().map(|&v| v as i8 as u8).collect(),
            other => panic!("input of type {other}"),
        };
        let buffer = self.buffers[&(graph, Port::Input(index))];
        self.workspace.bytes_mut(buffer).unwrap().copy_from_slice(&bytes);
    }

    pub(crate) fn read(&self, graph: u32, index: usize) -> Vec<f32> {
        let dtype = self.info(graph).outputs[index].dtype;
        let bytes = self.workspace.bytes(self.buffers[&(graph, Port::Output(index))]).unwrap();
        match dtype {
            DType::F16 => bytes
                .chunks_exact(2)
                .map(|b| f16::from_le_bytes(b.try_into().unwrap()).to_f32())
                .collect(),
            DType::F32 => {
                bytes.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
            }
            DType::I32 => bytes
                .chunks_exact(4)
                .map(|b| i32::from_le_bytes(b.try_into().unwrap()) as f32)
                .collect(),
            other => panic!("output of type {other}"),
        }
    }

    pub(crate) fn run(&mut self, graph: u32, inputs: &[Vec<f32>]) -> Vec<Vec<f32>> {
        for (index, values) in inputs.iter().enumerate() {
            self.write(graph, index, values);
        }
        self.workspace.execute(GraphId(graph)).unwrap();
        (0..self.info(graph).outputs.len()).map(|i| self.read(graph, i)).collect()
    }
}

/// The outputs of the ONNX reference graph for the same inputs.
pub(crate) fn reference(graph: &Graph, inputs: &[Vec<f32>]) -> Vec<Vec<f32>> {
    let folder = tempfile::tempdir().unwrap();
    let written = qhx_graph::onnx::write(graph, folder.path(), &mut Silent).unwrap();
    let model = Model::load_file(&written.model).unwrap();
    let info = graph.info(Elem::onnx);
    let mut values: Vec<(_, ValueOrView<'_>)> = Vec::new();
    for (tensor, data) in info.inputs.iter().zip(inputs) {
        let id = model.node_id(&tensor.name).unwrap();
        if tensor.dtype == DType::I32 {
            let data: Vec<i32> = data.iter().map(|&v| v as i32).collect();
            values.push((id, Tensor::from_data(&tensor.shape[..], data).into()));
        } else if tensor.dtype == DType::I8 {
            let data: Vec<i8> = data.iter().map(|&v| v as i8).collect();
            values.push((id, Tensor::from_data(&tensor.shape[..], data).into()));
        } else {
            values.push((id, Tensor::from_data(&tensor.shape[..], data.clone()).into()));
        }
    }
    let ids: Vec<_> = info.outputs.iter().map(|t| model.node_id(&t.name).unwrap()).collect();
    let outputs = model.run(values, &ids, None).unwrap();
    outputs
        .into_iter()
        .zip(&info.outputs)
        .map(|(value, tensor)| {
            if tensor.dtype == DType::I32 {
                let value: Tensor<i32> = value.try_into().unwrap();
                value.to_vec().into_iter().map(|v| v as f32).collect()
            } else {
                let value: Tensor<f32> = value.try_into().unwrap();
                value.to_vec()
            }
        })
        .collect()
}

/// The largest difference, relative to the largest expected value.
pub(crate) fn error(found: &[f32], expected: &[f32]) -> f64 {
    Distance::of(found, expected).unwrap().relative
}

/// Inputs in −1..1, int8 ones in −127..127; a mask hides the first half of every row but keeps its
/// last position.
pub(crate) fn inputs(graph: &Graph) -> Vec<Vec<f32>> {
    let fill = |(seed, tensor): (u32, &qhx_types::TensorInfo)| {
        let count = tensor.elements();
        if tensor.dtype == DType::I8 {
            return numbers(50 + seed, count).iter().map(|v| (v * 127.0).round()).collect();
        }
        if tensor.name == "valid" {
            return vec![1.0; count];
        }
        if !tensor.name.contains("mask") {
            return numbers(50 + seed, count);
        }
        let width = *tensor.shape.last().unwrap();
        (0..count).map(|i| if i % width < width / 2 { MASK_VALUE } else { 0.0 }).collect()
    };
    (0..).zip(&graph.info(Elem::onnx).inputs).map(fill).collect()
}
