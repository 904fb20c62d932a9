//! From an ONNX file to a model with fixed tensors.

#![expect(unsafe_code, reason = "maps the model and its weights")]

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;

use qhx_base::artifacts::Mapped;
use qhx_base::{Error, ErrorKind, Result};
use qhx_exec::backend::{ContextSource, GraphExecutor, Unsupported};
use qhx_types::{DType, GraphInfo, TensorInfo};
use rten::{DataType, Dimension, LoadErrorKind, Model, ModelOptions, NodeId, ValueType};
use rten_onnx::onnx::{DataType as OnnxType, ModelProto};

use crate::options::CpuOptions;
use crate::program::Program;
use crate::weights::Weights;
use crate::wire;

/// A model with the description of its tensors.
pub(crate) struct LoadedModel {
    // Dropped before the files, into which its weights point.
    executor: Executor,
    pub(crate) info: Arc<GraphInfo>,
    _files: Vec<Mapped>,
}

/// Executor of a graph.
pub(crate) enum Executor {
    /// Every operator is instructions.
    Program(Program),
    /// rten, because of an operator that has none.
    Rten(Box<Model>, Unsupported),
}

/// Files of external data that graphs share, by their paths and the folder that they were checked to lie in.
pub(crate) type DataFiles = HashMap<(PathBuf, Option<PathBuf>), Mapped>;

impl LoadedModel {
    /// Maps the file and its external data, as `source` allows, and checks every input and output.
    pub(crate) fn open(
        name: &str,
        path: &Path,
        source: &ContextSource,
        cpu: &CpuOptions,
        shared: &mut DataFiles,
    ) -> Result<Self> {
        let file = source.open(path).map_err(|e| with_hint(e, MISSING))?;
        if file.is_empty() {
            let message =
                format!("{}: expected an ONNX model, found an empty file", path.display());
            return Err(Error::new(ErrorKind::Artifact, message).hint(MISSING));
        }
        let external = wire::check(file.bytes())
            .map_err(|e| load_error(path, LoadErrorKind::ParseError, &e))?;
        let mut options = ModelOptions::with_all_ops();
        options.prepack_weights(cpu.prepack);
        // rten would open the files by itself, wherever links lead; so it gets their bytes.
        let mut files = vec![file];
        let mut data = HashMap::new();
        for location in external {
            let beside = beside(path, &location)?;
            let key = (beside, source.within.clone());
            let mapped = match shared.get(&key) {
                Some(mapped) => mapped.clone(),
                None => source.open(&key.0).map_err(|e| with_hint(e, BESIDE))?,
            };
            shared.insert(key, mapped.clone());
            // SAFETY: `files` keeps the mapping for as long as the model lives.
            options.external_data_static(&location, unsafe { lasting(&mapped) });
            files.push(mapped.clone());
            data.insert(location, mapped);
        }
        // SAFETY: as above.
        let bytes = unsafe { lasting(&files[0]) };
        let load = |load: &dyn Fn() -> Result<Model, rten::LoadError>| match guarded(load) {
            Ok(Ok(model)) => Ok(model),
            Ok(Err(e)) => Err(load_error(path, e.kind(), &e)),
            Err(panic) => Err(load_error(path, LoadErrorKind::ParseError, &panic)),
        };
        let parsed = guarded(|| ModelProto::parse_buf(bytes)).ok().and_then(Result::ok);
        let compiled = match &parsed {
            // Sizes of a hostile file may overflow where they are multiplied.
            Some(model) => guarded(|| Program::compile(model, &data, cpu.caches))
                .unwrap_or_else(|why| Err(Unsupported { why, ..Unsupported::default() })),
            None => {
                Err(Unsupported { why: "it is no ONNX model".to_owned(), ..Unsupported::default() })
            }
        };
        let (executor, info) = match compiled {
            Ok(mut program) => {
                program.activations = cpu.activations;
                let info = GraphInfo::new(name, program.inputs.clone(), program.outputs.clone());
                (Executor::Program(program), info)
            }
            Err(unsupported) => {
                let model = load(&|| options.load_static_slice(bytes))?;
                let info = describe(name, &model).map_err(|e| e.context(path.display()))?;
                let stored = parsed.as_ref().map_or(0, stored_bytes);
                let bytes = 4 * model.total_params() as u64;
                tracing::warn!(
                    graph = name,
                    path = %path.display(),
                    "rten executes this graph: {unsupported}. Its weights take {bytes} bytes as f32, stored they are \
                     {stored}",
                );
                (Executor::Rten(Box::new(model), unsupported), info)
            }
        };
        Ok(Self { executor, info: Arc::new(info), _files: files })
    }

    /// The executor. Its results are copies: nothing of it outlives `self`.
    pub(crate) fn executor(&self) -> &Executor {
        &self.executor
    }

    /// Description of the executor.
    pub(crate) fn executed_by(&self) -> GraphExecutor {
        match &self.executor {
            Executor::Program(_) => {
                GraphExecutor { name: "instructions".to_owned(), unsupported: None }
            }
            Executor::Rten(_, unsupported) => {
                GraphExecutor { name: "rten".to_owned(), unsupported: Some(unsupported.clone()) }
            }
        }
    }

    /// Bytes of the weights. Those in the places of `seen` were counted before; the model's own are added. What is not
    /// multiplied as it is stored is four bytes wide.
    pub(crate) fn weight_bytes(&self, seen: &mut HashSet<usize>) -> u64 {
        match &self.executor {
            Executor::Program(program) => {
                let weights = program.weights().map(Weights::extent);
                let new = weights.filter(|(place, _)| seen.insert(*place)).map(|(_, bytes)| bytes);
                4 * program.constants() + new.sum::<u64>()
            }
            Executor::Rten(model, _) => 4 * model.total_params() as u64,
        }
    }
}

/// Bytes of a model's constants as they are stored.
fn stored_bytes(model: &ModelProto) -> u64 {
    let tensors = model.graph.iter().flat_map(|graph| &graph.initializer);
    let bytes = tensors.map(|tensor| {
        let size = match tensor.data_type {
            Some(OnnxType::FLOAT16) => 2,
            Some(OnnxType::INT8 | OnnxType::UINT8 | OnnxType::BOOL) => 1,
            Some(OnnxType::INT64 | OnnxType::DOUBLE) => 8,
            _ => 4,
        };
        let dims = tensor.dims.iter().map(|&dim| u64::try_from(dim).unwrap_or(0));
        dims.fold(size, u64::saturating_mul)
    });
    bytes.fold(0, u64::saturating_add)
}

const MISSING: &str =
    "the download may be incomplete; compare the folder with the manifest's artifacts";

const BESIDE: &str = "the weights lie in a file beside the model (*.data); copy it along, whole";

/// A link out of the bundle has a hint of its own.
fn with_hint(error: Error, hint: &str) -> Error {
    let lacks = error.kind() == ErrorKind::Artifact && error.hint_text().is_none();
    if lacks { error.hint(hint) } else { error }
}

/// Path of the external data `location` of the model at `path`: beside it.
fn beside(path: &Path, location: &str) -> Result<PathBuf> {
    let mut components = Path::new(location).components();
    match (components.next(), components.next()) {
        (Some(Component::Normal(name)), None) => Ok(path.with_file_name(name)),
        _ => Err(Error::new(
            ErrorKind::Artifact,
            format!("{}: the weights lie in {location:?}, expected a file name", path.display()),
        )
        .hint("save the model with its external data in the same folder")),
    }
}

/// The bytes of a mapped file without a lifetime.
///
/// # Safety
/// The mapping outlives every use of the slice.
unsafe fn lasting(file: &Mapped) -> &'static [u8] {
    // SAFETY: pointer and length are those of a slice that lives as long as the mapping, which the
    // caller vouches for. Nobody may modify a bundle's file while it is open; `docs/security.md`
    // says so.
    unsafe { std::slice::from_raw_parts(file.as_ptr(), file.len()) }
}

/// Runs a call into rten, which means to refuse broken models with errors, and reports a panic as
/// one.
pub(crate) fn guarded<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        format!("the model is inconsistent: {}", text.unwrap_or("no reason is known"))
    })
}

fn load_error(path: &Path, kind: LoadErrorKind, error: &dyn fmt::Display) -> Error {
    let (kind, hint) = match kind {
        LoadErrorKind::ExternalDataError => (ErrorKind::Artifact, BESIDE),
        LoadErrorKind::OperatorInvalid => {
            (ErrorKind::Context, "the CPU backend runs the standard operators that rten implements")
        }
        LoadErrorKind::OptimizeError | LoadErrorKind::ShapeInferenceFailed => {
            (ErrorKind::Context, "operators of the model disagree about shapes or types")
        }
        _ => (ErrorKind::Artifact, "the file is damaged or truncated, or is not an ONNX model"),
    };
    Error::new(kind, format!("{}: {error}", path.display())).hint(hint)
}

fn describe(name: &str, model: &Model) -> Result<GraphInfo> {
    let mut names = HashSet::new();
    let mut side = |side: &str, ids: &[NodeId]| -> Result<Vec<TensorInfo>> {
        ids.iter()
            .enumerate()
            .map(|(index, &id)| {
                let tensor = tensor(model, id, side, index)?;
                if !names.insert(tensor.name.clone()) {
                    let message = format!("{side} {:?} occurs twice", tensor.name);
                    return Err(Error::new(ErrorKind::Graph, message));
                }
                Ok(tensor)
            })
            .collect()
    };
    Ok(GraphInfo::new(name, side("input", model.input_ids())?, side("output", model.output_ids())?))
}

fn tensor(model: &Model, id: NodeId, side: &str, index: usize) -> Result<TensorInfo> {
    let fail = |message: String| Error::new(ErrorKind::Graph, message);
    let info = model.node_info(id).ok_or_else(|| fail(format!("{side} {index} is no value")))?;
    let name = info.name().ok_or_else(|| fail(format!("{side} {index} has no name")))?;
    let dtype = match info.dtype() {
        Some(ValueType::Tensor(DataType::Float)) => DType::F32,
        Some(ValueType::Tensor(DataType::Int32)) => DType::I32,
        Some(ValueType::Tensor(DataType::Int8)) => DType::I8,
        Some(ValueType::Tensor(DataType::UInt8)) => DType::U8,
        other => {
            let found = other.map_or("none".to_owned(), |t| format!("{t:?}"));
            return Err(fail(format!(
                "{side} {name:?}: expected float, int32, int8 or uint8, found {found}"
            )));
        }
    };
    let Some(dimensions) = info.shape() else {
        return Err(fail(format!("{side} {name:?} has no shape")).hint(FIXED));
    };
    let mut shape = Vec::with_capacity(dimensions.len());
    for (axis, dimension) in dimensions.iter().enumerate() {
        match dimension {
            Dimension::Fixed(size) => shape.push(*size),
            Dimension::Symbolic(symbol) => {
                let message = format!("{side} {name:?}: axis {axis} is dynamic ({symbol})");
                return Err(fail(message).hint(FIXED));
            }
        }
    }
    let tensor = TensorInfo::new(name, dtype, shape);
    tensor.try_byte_len().map_err(Error::size)?;
    Ok(tensor)
}

const FIXED: &str = "export the model with fixed shapes; the graphs of a bundle have no others";
