//! Verification of a bundle: its files against their hashes, and its answers against references.

mod arrays;
mod files;
mod suite;

pub use arrays::ArrayReport;
pub use files::{FileReport, FilesReport, files, is_intact};
pub use suite::{
    Case, CaseReport, Gate, MAX_DISTANCE, MAX_REPEATS, MIN_COSINE, MIN_PASSED, SCHEMA, Score,
    Suite, SuiteReport,
};
