//! Trait for compiling graphs into a context binary.

use std::fmt;
use std::path::Path;

use qhx_base::Result;
use qhx_graph::graph::Graph;
use qhx_graph::progress::Progress;

/// Compiles graphs into context binaries for one target.
///
/// The graphs of one call share one context, and if they are to share weights, a weight of several of them is stored
/// once. Weights are read through [`qhx_graph::weight::Weight`] while
/// a graph is composed, one at a time. The weight of a `Linear` is stored as its
/// [`qhx_graph::weight::Storage`] says; the names, element types
/// ([`qhx_graph::graph::Elem::qnn`]), shapes and order of inputs and outputs are the graph's own.
pub trait Compiler: Send + Sync {
    /// The architecture that the binaries are for: `v81`.
    fn dsp_arch(&self) -> &str;

    /// The library's number of the chip that the binaries are for, where there is one, for the manifest.
    fn soc_model(&self) -> Option<u32> {
        None
    }

    /// Name and version of the library behind it, for the manifest.
    fn version(&self) -> String;

    /// Compiles `graphs` into one context and writes its binary to `out`, a path that does not exist
    /// yet. `key` is the context's key in the manifest, for messages. Returns the bytes written.
    ///
    /// # Errors
    /// When the compiler refuses a graph or cannot write the file, and `Cancelled` when `progress` stops it.
    fn compile(
        &self,
        key: &str,
        graphs: &[Graph],
        share_weights: bool,
        out: &Path,
        progress: &mut dyn Progress,
    ) -> Result<u64>;
}

impl fmt::Debug for dyn Compiler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.dsp_arch())
    }
}
