//! Verification of a bundle: its files against their hashes, its answers against references, and its figures against a
//! baseline.

mod arrays;
mod baseline;
mod files;
mod suite;

pub use arrays::ArrayReport;
pub use baseline::{
    BASELINE_SCHEMA, Baseline, Change, ComparedFigure, Comparison, FigureKind, Figures,
    ToleranceOf, markdown,
};
pub use files::{FileReport, FilesReport, files, is_intact};
pub use suite::{
    Case, CaseReport, Gate, MAX_DISTANCE, MAX_REPEATS, MIN_COSINE, MIN_PASSED, SCHEMA, Score,
    Suite, SuiteReport,
};
