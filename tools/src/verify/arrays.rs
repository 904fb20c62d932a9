//! Arrays that a suite expects of the host-op, such as what an image becomes.

use std::collections::BTreeMap;
use std::path::Path;

use qhx_base::Result;
use qhx_base::compare::Distance;
use qhx_core::dump::Dumped;
use qhx_core::npy::Array;
use serde::Serialize;

/// Longest array that is read.
const MAX_BYTES: u64 = 256 << 20;

/// Comparison of an array with its reference.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ArrayReport {
    /// Its name, as of `qhx generate --dump`.
    pub name: String,
    /// Every row is near enough to the reference's.
    pub passed: bool,
    /// Smallest cosine of a row with the reference's.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cosine: Option<f64>,
    /// The row that has it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub row: Option<usize>,
    /// Other faults of the array, if any.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Reads arrays, by their names, that lie in a folder.
pub(super) fn read(
    files: &BTreeMap<String, String>,
    folder: &Path,
) -> Result<Vec<(String, Array)>> {
    let read = |(name, file): (&String, &String)| {
        Ok((name.clone(), Array::read(&folder.join(file), MAX_BYTES)?))
    };
    files.iter().map(read).collect()
}

/// Compares what was made with what was expected, row by row.
pub(super) fn compare(made: &Dumped, expected: &[(String, Array)], least: f64) -> Vec<ArrayReport> {
    expected.iter().map(|(name, expected)| report(made, name, expected, least)).collect()
}

fn report(made: &Dumped, name: &str, expected: &Array, least: f64) -> ArrayReport {
    let name = name.to_owned();
    let wrong = |message: String| {
        let (name, message) = (name.clone(), Some(message));
        ArrayReport { name, passed: false, cosine: None, row: None, message }
    };
    let Some(found) = made.arrays.get(&name) else {
        let names = made.counts.iter().map(|(name, count)| match count {
            1 => name.clone(),
            _ => format!("{name} to {name}-{count}"),
        });
        let names: Vec<_> = names.collect();
        return wrong(format!("not made; the prompt gave {}", names.join(", ")));
    };
    let width = expected.width();
    if found.width() != width || found.values.len() != expected.values.len() {
        return wrong(format!("shape {:?}, expected {:?}", found.shape, expected.shape));
    }
    match Distance::least_row(&found.values, &expected.values, width) {
        Ok((cosine, row)) => {
            let (cosine, row, passed) = (Some(cosine), Some(row), cosine >= least);
            ArrayReport { name, passed, cosine, row, message: None }
        }
        Err(error) => wrong(error.message().to_owned()),
    }
}

impl ArrayReport {
    /// The comparison in a few words; `least` is the smallest cosine that passes.
    pub fn summary(&self, least: f64) -> String {
        let Self { name, passed, cosine, row, message } = self;
        match (cosine, row, message) {
            (Some(cosine), ..) if *passed => format!("{name}: cosine {cosine:.6}"),
            (Some(cosine), Some(row), _) => {
                format!("{name}: cosine {cosine:.6} in row {row}, expected {least}")
            }
            (.., message) => format!("{name}: {}", message.as_deref().unwrap_or_default()),
        }
    }
}
