//! The plugin interface as it was at 1.0: what crosses, and nothing over it.

pub mod abi;
