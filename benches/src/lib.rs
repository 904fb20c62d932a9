//! Shared parts of the benchmarks: a counting allocator and a table of times.

pub mod allocations;
pub mod shapes;
