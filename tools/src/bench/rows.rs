//! Rates by context length and times of parts, as tables hold them.

use serde::{Deserialize, Serialize};

/// Rates of one bundle on one device, or of another program.
///
/// ```no_run
/// use qhx_tools::bench::{BenchOptions, BenchTable, EnergyMeter};
///
/// let mut model = qhx::Bundle::open("qwen35/v81")?.model()?;
/// let energy = EnergyMeter::system().ok();
/// let table = BenchTable::measure(&mut model, &BenchOptions::default(), energy.as_ref())?;
/// print!("{}", BenchTable::markdown(&[table]));
/// # Ok::<(), qhx::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct BenchTable {
    /// `qhx-bench-table-1`.
    pub schema: String,
    /// Name of the model.
    pub model: String,
    /// SHA-256 of the bundle's manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest_sha256: Option<String>,
    /// Precision of the weights, such as `w4a16`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub precision: Option<String>,
    /// Device that it ran on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Chip whose NPU executed the graphs, such as `SM8850`; none where something else did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chip: Option<String>,
    /// Name of what executed the graphs ([`BackendInfo::label`](qhx_exec::backend::BackendInfo::label)), or of another
    /// program.
    pub backend: String,
    /// Version of the library behind it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub library: Option<String>,
    /// Name of what executed the tokens of answers, where that was asked for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decoder: Option<String>,
    /// Version of qhx.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub qhx: Option<String>,
    /// Source of published figures, for those that qhx did not measure.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub source: Option<String>,
    /// Source of the energy figures: see [`EnergyMeter::name`](super::EnergyMeter::name).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub energy: Option<String>,
    /// Number of measured repeats.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeat: Option<u16>,
    /// Time that opening the model took, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub load_ms: Option<f64>,
    /// The most memory that the process ever had resident, where the system says so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub peak_memory_bytes: Option<u64>,
    /// By context length.
    #[serde(default)]
    pub rows: Vec<TableRow>,
    /// By part of the model: encoder, decoder, head, or a graph by its name.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub parts: Vec<PartTime>,
}

/// Time of one execution of a part of a model.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PartTime {
    /// Name of the part.
    pub part: String,
    /// Milliseconds, the mean of all executions.
    pub ms: f64,
    /// The estimate in its bundle, in milliseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub estimate_ms: Option<f64>,
}

/// Rates up to a context length.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct TableRow {
    /// Positions that are consumed at the end: a prompt, and behind it the tokens of an answer.
    pub context: usize,
    /// The prompt, from nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub prefill: Option<Rate>,
    /// The tokens, one at a time.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub decode: Option<Rate>,
    /// Milliseconds for handing the state over between the two, where tokens have a backend of their own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hand_over_ms: Option<f64>,
}

/// Rate at which tokens were consumed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Rate {
    /// Tokens that were measured at once.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tokens: Option<usize>,
    /// The mean rate.
    pub tokens_per_second: f64,
    /// Its standard deviation, as of a sample.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sd: Option<f64>,
    /// Energy of a token, of what [`BenchTable::energy`] measures.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub joules_per_token: Option<f64>,
}
