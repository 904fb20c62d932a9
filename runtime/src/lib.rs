//! qhx: runs bundles on the Hexagon NPU, its emulator and the CPU.

#[cfg(feature = "builtin-ops")]
mod builtin;
