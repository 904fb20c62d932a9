//! What crosses the boundary between host and plugin, as it was at 1.2.

pub mod abi;
