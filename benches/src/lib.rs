//! Shared parts of the benchmarks: a counting allocator, the process's memory, models of published shapes.

pub mod allocations;
pub mod experts;
pub mod memory;
pub mod null;
pub mod observed;
pub mod shapes;
