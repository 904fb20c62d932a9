//! Lowering to QNN: context binaries for the Hexagon NPU, through libQnnHtp's own graph compiler.
//!
//! # Element types
//! The library computes floating point in f16, whatever the tensors are declared as: a tensor of f32
//! only costs space. So everything between the graph's inputs and outputs is f16 here, and
//! [`Elem::F32`] is f32 in the caller's buffers alone, converted where it
//! enters and leaves the graph.
//!
//! # Weights
//! f16, int8 with one scale per output channel, or values of 4 or 8 bits in blocks
//! ([`Storage`](qhx_graph::weight::Storage)); activations are f16, or 16-bit integers. They are converted one at a time;
//! the library copies each as it is declared.

pub(crate) mod integers;
mod lower;

use std::path::{Path, PathBuf};

use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::graph::{Elem, Graph};
use qhx_graph::progress::Progress;
use qhx_qnn::compose::{CompilerValue, Composer, GraphConfig};
use qhx_qnn::{BinaryInfo, ContextConfig, Library, Target};

use crate::compile::Compiler;

/// The last architecture with four vector threads. There a step waits for these, not for the memory.
const FOUR_THREADS: u32 = 75;

/// Makes context binaries for one target.
#[derive(Debug, Clone)]
pub struct QnnCompiler {
    library: Library,
    target: Target,
    dsp_arch: String,
    configs: Vec<GraphConfig>,
    /// Folder for the schedules, and the voltage corner that they are for.
    schedules: Option<(PathBuf, u32)>,
}

impl QnnCompiler {
    /// A compiler for `target`, which may use all of the chip's tightly coupled memory. Where that is not known, the
    /// library chooses.
    pub fn new(library: Library, target: Target) -> Self {
        let configs = [GraphConfig::OptimizationLevel(3)].into_iter();
        Self {
            library,
            target,
            dsp_arch: target.to_string(),
            configs: configs.chain(target.vtcm_mb.map(GraphConfig::VtcmMb)).collect(),
            schedules: None,
        }
    }

    /// The chip that it compiles for.
    pub(crate) const fn target(&self) -> Target {
        self.target
    }

    /// Has the library write the schedule of each graph into a folder, and make it for a voltage corner: see
    /// [`crate::estimate`].
    #[must_use]
    pub fn with_schedules(mut self, folder: &Path, corner: u32) -> Self {
        self.schedules = Some((folder.to_owned(), corner));
        self
    }

    /// Options of one graph.
    fn configs(&self, graph: &str) -> Vec<GraphConfig> {
        let mut configs = self.configs.clone();
        if let Some((folder, corner)) = &self.schedules {
            let key = |key: &str, value| GraphConfig::Compiler { key: key.to_owned(), value };
            configs.extend([Schedule::Trace, Schedule::Costs].map(|file| {
                let path = folder.join(file.file(graph));
                key(file.key(), CompilerValue::Text(path.display().to_string()))
            }));
            configs.push(key("sim_core_voltage_corner", CompilerValue::U32(*corner)));
        }
        configs
    }

    /// Reads a context binary's description of itself.
    ///
    /// # Errors
    /// When the file is no context binary.
    pub fn read(&self, binary: &Path) -> Result<BinaryInfo> {
        let file = qhx_base::artifacts::Mapped::open(binary)?;
        BinaryInfo::read(self.library.system(), &binary.display().to_string(), file.bytes())
    }
}

impl Compiler for QnnCompiler {
    fn dsp_arch(&self) -> &str {
        &self.dsp_arch
    }

    fn soc_model(&self) -> Option<u32> {
        Some(self.target.soc)
    }

    fn version(&self) -> String {
        match self.library.core_version().qairt() {
            Some(qairt) => format!("QAIRT {qairt} ({})", self.library.build_id()),
            None => self.library.build_id().to_owned(),
        }
    }

    fn compile(
        &self,
        key: &str,
        graphs: &[Graph],
        share_weights: bool,
        out: &Path,
        progress: &mut dyn Progress,
    ) -> Result<u64> {
        for (index, graph) in graphs.iter().enumerate() {
            if graphs.iter().take(index).any(|other| other.name() == graph.name()) {
                return Err(Error::new(
                    ErrorKind::Graph,
                    format!("context {key:?}: two graphs are called {:?}", graph.name()),
                )
                .hint("give each graph a name of its own"));
            }
        }
        let mut options = Vec::new();
        if share_weights && graphs.len() > 1 {
            options.push(ContextConfig::WeightSharing(true));
        }
        let mut context = Composer::new(&self.library, self.target, &options)?;
        let total = graphs.iter().map(Graph::weight_bytes).sum();
        progress.stage(&format!("compile {key} for {}", self.target), total);
        let mut done = 0;
        for graph in graphs {
            let composed = context.graph(graph.name(), &self.configs(graph.name()))?;
            let turned = self.target.arch <= FOUR_THREADS;
            let composed = lower::lower((graph, turned), composed, &mut done, progress)?;
            progress.stop_if_cancelled()?;
            composed.finalize()?;
        }
        let bytes = context.write(out)?;
        drop(context);
        verify(&self.library, self.target, graphs, out)?;
        Ok(bytes)
    }
}

/// Files that the library writes about a graph that it compiles.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Schedule {
    /// The events, as a Chrome trace.
    Trace,
    /// Cost models of the ops.
    Costs,
}

impl Schedule {
    /// Key of the compiler that asks for the file.
    pub(crate) fn key(self) -> &'static str {
        match self {
            Self::Trace => "sim_trace_final",
            Self::Costs => "sim_model_stats",
        }
    }

    /// Name of a graph's file.
    pub(crate) fn file(self, graph: &str) -> String {
        match self {
            Self::Trace => format!("{graph}.json"),
            Self::Costs => format!("{graph}.csv"),
        }
    }
}

/// Reads the binary back: it has to describe the graphs that were asked for, in their order of inputs
/// and outputs, because that is what a host-op binds to.
fn verify(library: &Library, target: Target, graphs: &[Graph], out: &Path) -> Result<()> {
    let file = qhx_base::artifacts::Mapped::open(out)?;
    let name = out.display().to_string();
    let info = BinaryInfo::read(library.system(), &name, file.bytes())?;
    let wrong = |found: String| {
        Err(Error::new(ErrorKind::Context, format!("{name}: the compiled binary has {found}"))
            .hint(
                "this library may lower graphs in a way that qhx does not know; report its version",
            ))
    };
    if info.dsp_arch.is_some_and(|arch| arch != target.arch) {
        return wrong(format!("architecture {:?}, expected {}", info.dsp_arch, target.arch));
    }
    for graph in graphs {
        let expected = graph.info(Elem::qnn);
        let Some(found) = info.graphs.iter().find(|g| g.name == expected.name) else {
            return wrong(format!("no graph {:?}", expected.name));
        };
        let found = found.info()?;
        for (what, found, expected) in [
            ("inputs", &found.inputs, &expected.inputs),
            ("outputs", &found.outputs, &expected.outputs),
        ] {
            if found != expected {
                let list = |tensors: &[qhx_types::TensorInfo]| {
                    tensors.iter().map(ToString::to_string).collect::<Vec<_>>().join(", ")
                };
                return wrong(format!(
                    "{what} {} in graph {:?}, expected {}",
                    list(found),
                    graph.name(),
                    list(expected)
                ));
            }
        }
    }
    Ok(())
}
