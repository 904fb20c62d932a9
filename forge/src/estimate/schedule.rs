//! The schedule as the library writes it: events, traffic and the machine that it assumes.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use qhx_base::artifacts::Mapped;
use qhx_base::{Error, ErrorKind, Result};
use serde::Deserialize;

/// Parts of a trace that are read.
#[derive(Debug, Deserialize)]
pub(super) struct Trace<'a> {
    #[serde(borrow, rename = "traceEvents")]
    pub events: Vec<Event<'a>>,
    #[serde(rename = "DMA/L2 Access Statistics")]
    pub traffic: Traffic,
    #[serde(rename = "Hextimate Configuration")]
    pub machine: Machine,
}

#[derive(Debug, Deserialize)]
pub(super) struct Traffic {
    pub total_num_dma_read_bytes: u64,
    pub total_num_dma_write_bytes: u64,
}

/// The chip as the library's cost model has it; frequencies in MHz.
#[derive(Debug, Deserialize)]
pub(super) struct Machine {
    /// Events count its cycles.
    pub sim_core_freq: f64,
    #[serde(flatten)]
    buses: Buses,
}

/// Buses between the memory and the NPU. A version of the library that names them otherwise has zeros.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Buses {
    sim_nspnoc_freq: f64,
    sim_mp_width: f64,
    sim_mp_channels: f64,
    sim_gemnoc_freq: f64,
    sim_gemnoc_width: f64,
    sim_gemnoc_channels: f64,
    sim_gemnoc_efficiency: f64,
    sim_ddr_freq: f64,
    sim_ddr_width: f64,
    sim_ddr_channels: f64,
    sim_ddr_efficiency: f64,
}

impl Machine {
    /// Rate of the slowest bus between memory and NPU, in bytes per second; 0 where it is not known.
    pub(super) fn memory_rate(&self) -> f64 {
        let b = &self.buses;
        let noc = b.sim_nspnoc_freq * b.sim_mp_width * b.sim_mp_channels;
        let fabric = b.sim_gemnoc_freq
            * b.sim_gemnoc_width
            * b.sim_gemnoc_channels
            * b.sim_gemnoc_efficiency;
        // At both edges of the clock.
        let memory =
            2.0 * b.sim_ddr_freq * b.sim_ddr_width * b.sim_ddr_channels * b.sim_ddr_efficiency;
        noc.min(fabric).min(memory).max(0.0) * 1e6
    }
}

#[derive(Debug, Deserialize)]
pub(super) struct Event<'a> {
    #[serde(borrow)]
    pub name: Cow<'a, str>,
    #[serde(borrow)]
    pub ph: Cow<'a, str>,
    #[serde(default)]
    pub tid: u32,
    #[serde(default)]
    pub ts: f64,
    #[serde(default)]
    pub dur: f64,
    #[serde(borrow, default)]
    pub args: Arguments<'a>,
}

#[derive(Debug, Default, Deserialize)]
pub(super) struct Arguments<'a> {
    /// Name of a track, for the events that name one.
    #[serde(borrow, default)]
    pub name: Option<Cow<'a, str>>,
    #[serde(borrow, default)]
    pub opcode: Cow<'a, str>,
    #[serde(borrow, default)]
    pub flags: Vec<Cow<'a, str>>,
}

/// Unit that an event runs on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Unit {
    /// The matrix unit.
    Hmx,
    /// A vector thread, by its number.
    Hvx(u32),
    /// Transfers between memory and VTCM.
    Dma,
    /// The thread that starts and awaits the others.
    Scalar,
}

impl Unit {
    /// Name of its kind.
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Hmx => "HMX",
            Self::Hvx(_) => "HVX",
            Self::Dma => "DMA",
            Self::Scalar => "scalar",
        }
    }
}

impl Trace<'_> {
    /// Name of each track: `HVX 2`.
    fn tracks(&self) -> BTreeMap<u32, &str> {
        let named = self.events.iter().filter(|e| e.ph == "M" && e.name == "thread_name");
        named.filter_map(|e| Some((e.tid, e.args.name.as_deref()?.trim_end_matches(':')))).collect()
    }

    /// Events that take time, with the unit that runs them. What vector threads wait for in transfers of their own is
    /// in their events.
    pub(super) fn work(&self) -> impl Iterator<Item = (Unit, &Event<'_>)> {
        let tracks = self.tracks();
        let timed = self.events.iter().filter(|e| e.ph == "X" && e.dur > 0.0);
        timed.filter_map(move |event| {
            let (kind, number) = match tracks.get(&event.tid)?.split_once(' ') {
                Some((kind, number)) => (kind, number.parse().unwrap_or(0)),
                None => (*tracks.get(&event.tid)?, 0),
            };
            // Up to v79 matrix products are events of the scalar thread, which waits for them.
            let matrix = || event.args.flags.iter().any(|flag| flag.ends_with("_hmx"));
            let unit = match kind {
                "HMX" => Unit::Hmx,
                "HVX" => Unit::Hvx(number),
                "DMA" => Unit::Dma,
                "FG" if matrix() => Unit::Hmx,
                "FG" => Unit::Scalar,
                _ => return None,
            };
            Some((unit, event))
        })
    }

    /// The end of the last event, in cycles.
    pub(super) fn end(&self) -> f64 {
        self.events.iter().filter(|e| e.ph == "X").map(|e| e.ts + e.dur).fold(0.0, f64::max)
    }

    /// Cycles in a microsecond.
    pub(super) fn mhz(&self) -> f64 {
        self.machine.sim_core_freq.max(1.0)
    }
}

/// `q::Mul.fp16` and `default_dma (q::ConvLayer.opt.weights_to_vtcm)` without what is around the name.
pub(super) fn op_name(name: &str) -> &str {
    let inner = name.split_once('(').map_or(name, |(_, rest)| rest.trim_end_matches(')'));
    inner.trim_start_matches("q::")
}

/// Opens the file of a schedule.
///
/// # Errors
/// When it is not there: older versions of the library write none.
pub(super) fn open(file: &Path) -> Result<Mapped> {
    Mapped::open(file).map_err(|e| {
        e.hint("this version of the QNN library writes no schedule; take QAIRT 2.51 or newer")
    })
}

/// Reads a schedule.
///
/// # Errors
/// When it is none.
pub(super) fn parse(bytes: &[u8]) -> Result<Trace<'_>> {
    serde_json::from_slice(bytes)
        .map_err(|e| Error::caused(ErrorKind::Context, "the library's trace cannot be read", e))
}
