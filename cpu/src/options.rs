//! Options for executing graphs.

use qhx_base::names;

/// Type that activations are rounded to in matmuls with int8 and 4-bit weights, where the processor has integer
/// instructions. Sums and everything between matmuls are f32.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Activations {
    /// 8 bits beside 4-bit weights, whose own rounding costs many times more, but for tokens of which a few columns are
    /// nearly all, and 16 bits for these and beside int8.
    #[default]
    Auto,
    /// 16 bits with a scale for each 32 columns: more exact than the f16 of an NPU, except for columns less than a
    /// thirtieth of the largest of their 32.
    Int16,
    /// 8 bits with a scale for each 32 columns, as llama.cpp does: faster, and less exact than f16.
    Int8,
}

names! { Activations: Auto = "auto", Int16 = "int16", Int8 = "int8" }

/// Type that key/value caches are stored as, where only attention reads them. Caches of int8 stay int8.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Caches {
    /// Each key and value as it was computed.
    F32,
    /// The type on an NPU: half the memory, and half the bytes that a token reads of it. A number's error is up to
    /// 4.9e-4 of it, and one beyond 65504 becomes infinite.
    #[default]
    F16,
}

names! { Caches: F16 = "f16", F32 = "f32" }

/// Options for executing graphs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct CpuOptions {
    /// Threads of one graph; as many as there are physical cores where it is not given.
    pub threads: Option<usize>,
    /// Type that activations are rounded to in matmuls with int8 and 4-bit weights. Processors without instructions for
    /// integers have f32.
    pub activations: Activations,
    /// Type that key/value caches are stored as.
    pub caches: Caches,
}

impl CpuOptions {
    /// Options of the smallest error: activations of 16 bits and caches of f32, for what is compared with a reference.
    pub fn exact() -> Self {
        Self { threads: None, activations: Activations::Int16, caches: Caches::F32 }
    }
}
