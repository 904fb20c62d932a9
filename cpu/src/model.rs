//! From an ONNX file that the forge wrote to a program with fixed tensors.

use std::collections::{HashMap, HashSet};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use qhx_base::artifacts::Mapped;
use qhx_base::{Error, ErrorKind, Result};
use qhx_exec::backend::ContextSource;
use qhx_graph::onnx;
use qhx_types::GraphInfo;

use crate::options::CpuOptions;
use crate::program::Program;
use crate::weights::Weights;

/// A program with the description of its tensors.
pub(crate) struct LoadedModel {
    pub(crate) program: Program,
    pub(crate) info: Arc<GraphInfo>,
}

/// Files of external data that graphs share, by their paths and the folder that they were checked to lie in.
pub(crate) type DataFiles = HashMap<(PathBuf, Option<PathBuf>), Mapped>;

impl LoadedModel {
    /// Maps the file and its external data, as `source` allows, and checks all of its graph.
    pub(crate) fn open(
        name: &str,
        path: &Path,
        source: &ContextSource,
        cpu: &CpuOptions,
        shared: &mut DataFiles,
    ) -> Result<Self> {
        let mut open = |file: &Path| {
            if file == path {
                return source.open(file).map_err(|e| with_hint(e, MISSING));
            }
            let key = (file.to_owned(), source.within.clone());
            if let Some(mapped) = shared.get(&key) {
                return Ok(mapped.clone());
            }
            let mapped = source.open(file).map_err(|e| with_hint(e, BESIDE))?;
            shared.insert(key, mapped.clone());
            Ok(mapped)
        };
        let graph = onnx::read_with(path, &mut open)?;
        // Sizes of a hostile file may overflow where they are multiplied.
        let compiled =
            guarded(|| Program::compile(&graph, cpu.caches)).and_then(|compiled| compiled);
        let mut program = compiled.map_err(|why| {
            Error::new(ErrorKind::Context, format!("{}: {why}", path.display()))
                .hint("the file is damaged; download the bundle again")
        })?;
        program.activations = cpu.activations;
        let info = GraphInfo::new(name, program.inputs.clone(), program.outputs.clone());
        Ok(Self { program, info: Arc::new(info) })
    }

    /// Bytes of the weights. Those in the places of `seen` were counted before; the program's own are added. What is
    /// not multiplied as it is stored is four bytes wide.
    pub(crate) fn weight_bytes(&self, seen: &mut HashSet<usize>) -> u64 {
        let weights = self.program.weights().map(Weights::extent);
        let new = weights.filter(|(place, _)| seen.insert(*place)).map(|(_, bytes)| bytes);
        4 * self.program.constants() + new.sum::<u64>()
    }
}

const MISSING: &str =
    "the download may be incomplete; compare the folder with the manifest's artifacts";

const BESIDE: &str = "the weights lie in a file beside the model (*.data); copy it along, whole";

/// A link out of the bundle has a hint of its own.
fn with_hint(error: Error, hint: &str) -> Error {
    let lacks = error.kind() == ErrorKind::Artifact && error.hint_text().is_none();
    if lacks { error.hint(hint) } else { error }
}

/// Runs a call, and reports a panic in it as an error.
pub(crate) fn guarded<T>(call: impl FnOnce() -> T) -> Result<T, String> {
    catch_unwind(AssertUnwindSafe(call)).map_err(|panic| {
        let text = panic.downcast_ref::<String>().map(String::as_str);
        let text = text.or_else(|| panic.downcast_ref::<&str>().copied());
        format!("the graph is inconsistent: {}", text.unwrap_or("no reason is known"))
    })
}
