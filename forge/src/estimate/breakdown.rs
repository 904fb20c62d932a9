//! Time of a graph by classes of ops.

use std::collections::BTreeMap;
use std::fmt;

use serde::{Deserialize, Serialize};

use super::OpCost;
use super::schedule::{Trace, Unit, op_name};

/// Ops of a class that are named.
const OPS: usize = 3;

/// A class of what happens in a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Class {
    /// Products, on the matrix unit.
    Matmul,
    /// Weights on their way to the NPU.
    Weights,
    /// Low-bit values to f16, or back.
    Dequantize,
    /// Softmax.
    Softmax,
    /// Norms.
    Norm,
    /// All other arithmetic of vector threads.
    Elementwise,
    /// Copies within the NPU: formats, transposes, slices, pads, concatenations.
    Layout,
    /// Inputs, outputs and activations between memory and NPU.
    Transfers,
    /// Activations that do not fit the NPU's own memory, out and back.
    Spill,
    /// Nothing but the thread that starts and awaits the others.
    Scheduling,
    /// Nothing.
    Idle,
}

impl Class {
    /// All, in the order in which they are shown.
    pub const ALL: [Self; 11] = [
        Self::Matmul,
        Self::Weights,
        Self::Dequantize,
        Self::Softmax,
        Self::Norm,
        Self::Elementwise,
        Self::Layout,
        Self::Transfers,
        Self::Spill,
        Self::Scheduling,
        Self::Idle,
    ];

    /// Name for people.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Matmul => "matrix products",
            Self::Weights => "reading weights",
            Self::Dequantize => "dequantizing",
            Self::Softmax => "softmax",
            Self::Norm => "norms",
            Self::Elementwise => "other vector work",
            Self::Layout => "layout changes",
            Self::Transfers => "activations in and out",
            Self::Spill => "spill and fill",
            Self::Scheduling => "starting and awaiting",
            Self::Idle => "idle",
        }
    }

    /// Class of an op of the library, by its name and where it runs.
    pub(super) fn of(unit: Unit, op: &str) -> Self {
        const LAYOUT: [&str; 14] = [
            "ForceFormat",
            "Transpose",
            "Slice",
            "Reshape",
            "Flatten",
            "Concat",
            "pack_",
            "Pad",
            "BlockZap",
            "Crouton",
            "SpaceTo",
            "DepthTo",
            "Split",
            "Unpack",
        ];
        let has = |part: &str| op.contains(part);
        match unit {
            Unit::Scalar => Self::Scheduling,
            Unit::Hmx => Self::Matmul,
            _ if has("@Spill") || has("@Fill") => Self::Spill,
            Unit::Dma if has("weights") || has("bias") => Self::Weights,
            Unit::Dma => Self::Transfers,
            Unit::Hvx(_) if has("_vtcm") || has("InputSlice") || has("OutputSlice") => {
                Self::Transfers
            }
            Unit::Hvx(_) if has("quant") => Self::Dequantize,
            Unit::Hvx(_) if has("oftmax") => Self::Softmax,
            Unit::Hvx(_) if has("norm") || has("Norm") => Self::Norm,
            Unit::Hvx(_) => {
                let plain = op.trim_start_matches('*').trim_start_matches("hnnx::");
                let layout = LAYOUT.iter().any(|start| plain.starts_with(start));
                if layout { Self::Layout } else { Self::Elementwise }
            }
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Time of a class.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct ClassTime {
    /// The class.
    pub class: Class,
    /// Its part of the graph's time. Where several classes run side by side, each has the same part of the moment; all
    /// together are the graph's time.
    pub wall_us: f64,
    /// Time in which nothing else runs.
    pub alone_us: f64,
    /// Durations of its events together; units and threads run side by side.
    pub busy_us: f64,
    /// Its ops that take the longest.
    pub ops: Vec<OpCost>,
}

/// Time of a kind of unit, `HMX`, `HVX` or `DMA`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct UnitTime {
    /// The kind.
    pub unit: String,
    /// Time in which any of its threads runs.
    pub us: f64,
    /// Time in which no other unit runs.
    pub alone_us: f64,
}

/// Counts of what runs at a moment.
struct Running<const N: usize> {
    counts: [usize; N],
    /// Time with any, time with none but it, and parts of the time.
    any: [f64; N],
    alone: [f64; N],
    part: [f64; N],
}

impl<const N: usize> Running<N> {
    const fn new() -> Self {
        Self { counts: [0; N], any: [0.0; N], alone: [0.0; N], part: [0.0; N] }
    }

    /// Counts a time without changes; true if anything ran.
    fn pass(&mut self, time: f64) -> bool {
        let active = self.counts.iter().filter(|count| **count > 0).count();
        for index in (0..N).filter(|index| self.counts[*index] > 0) {
            self.any[index] += time;
            self.part[index] += time / active as f64;
            if active == 1 {
                self.alone[index] += time;
            }
        }
        active > 0
    }
}

/// Times of all classes and units of a schedule.
pub(super) fn breakdown(trace: &Trace<'_>) -> (Vec<ClassTime>, Vec<UnitTime>) {
    const CLASSES: usize = Class::ALL.len();
    const UNITS: [&str; 3] = ["HMX", "HVX", "DMA"];
    let mut changes: Vec<(f64, bool, usize, Option<usize>)> = Vec::new();
    let mut busy = [0.0; CLASSES];
    let mut ops: BTreeMap<(Class, &str, &str), (usize, f64)> = BTreeMap::new();
    let mhz = trace.mhz();
    for (unit, event) in trace.work() {
        let op = op_name(&event.name);
        let class = Class::of(unit, op);
        let kind = UNITS.iter().position(|name| *name == unit.name());
        changes.push((event.ts, true, class as usize, kind));
        changes.push((event.ts + event.dur, false, class as usize, kind));
        busy[class as usize] += event.dur / mhz;
        if kind.is_some() {
            let entry = ops.entry((class, op, unit.name())).or_default();
            entry.0 += 1;
            entry.1 += event.dur / mhz;
        }
    }
    changes.sort_by(|a, b| a.0.total_cmp(&b.0));
    let mut classes = Running::<CLASSES>::new();
    let mut units = Running::<{ UNITS.len() }>::new();
    let (mut now, mut scheduling) = (0.0, 0usize);
    let mut rest = [0.0; 2];
    let mut pass =
        |classes: &mut Running<CLASSES>, units: &mut Running<3>, scheduling, time: f64| {
            units.pass(time);
            // The scalar thread counts where nothing else runs.
            if !classes.pass(time) {
                rest[usize::from(scheduling > 0)] += time;
            }
        };
    for (at, starts, class, kind) in changes {
        pass(&mut classes, &mut units, scheduling, (at - now) / mhz);
        now = at;
        let change = |count: &mut usize| {
            *count = if starts { *count + 1 } else { count.saturating_sub(1) };
        };
        match kind {
            Some(kind) => {
                change(&mut classes.counts[class]);
                change(&mut units.counts[kind]);
            }
            None => change(&mut scheduling),
        }
    }
    pass(&mut classes, &mut units, 0, (trace.end() - now).max(0.0) / mhz);
    for (class, time) in [(Class::Idle, rest[0]), (Class::Scheduling, rest[1])] {
        classes.part[class as usize] = time;
        classes.alone[class as usize] = time;
    }
    busy[Class::Idle as usize] = rest[0];
    let of_class = |class: Class| {
        let of = ops.iter().filter(|((its, ..), _)| *its == class);
        let mut ops: Vec<_> = of.map(|((_, op, unit), sum)| OpCost::new(op, unit, *sum)).collect();
        ops.sort_by(|a, b| b.us.total_cmp(&a.us));
        ops.truncate(OPS);
        let index = class as usize;
        let (wall_us, alone_us) = (classes.part[index], classes.alone[index]);
        ClassTime { class, wall_us, alone_us, busy_us: busy[index], ops }
    };
    let times = Class::ALL.map(of_class).into_iter();
    let times = times.filter(|time| time.busy_us > 0.0 || time.wall_us > 0.0).collect();
    let of_unit = |(index, unit): (usize, &str)| UnitTime {
        unit: unit.to_owned(),
        us: units.any[index],
        alone_us: units.alone[index],
    };
    (times, UNITS.into_iter().enumerate().map(of_unit).collect())
}
