//! Rates at which devices read weights, from times that were published, and what they change in an estimate.

use qhx_qnn::{SOCS, Target};

use super::{GraphEstimate, UnitTime};

/// Bytes per second, from the times of Whisper's decoders in fp16 on AI Hub (`python3 benches/device_estimates.py`): for
/// each chip the times of small and large-v3-turbo give a rate and a time of an op, by which base takes 0 to 11 % more
/// than measured.
const RATES: [(&str, f64); 6] = [
    ("SM8550", 53e9),
    ("SC8380XP", 57e9),
    ("SM8650", 70e9),
    ("SM8750", 76e9),
    ("SM8850", 75e9),
    ("SC8480XP", 115e9),
];

/// Rate of a chip, where times of it were published.
pub(super) fn measured_rate(target: Target) -> Option<f64> {
    let chip = SOCS.iter().find(|soc| soc.target == target)?;
    RATES.iter().find(|(name, _)| *name == chip.name).map(|(_, rate)| *rate)
}

/// Time of a graph at another rate of the memory. The schedule is as fast as the unit that is busiest: where that is the
/// DMA unit, its transfers decide, and else as far as they become the slowest.
pub(super) fn at_rate(estimate: &GraphEstimate, rate: f64) -> f64 {
    let busy = |unit: &UnitTime| (unit.unit == "DMA", unit.us);
    let of = |transfers: bool| {
        let units = estimate.units.iter().map(busy).filter(|(dma, _)| *dma == transfers);
        units.map(|(_, us)| us).fold(0.0, f64::max)
    };
    let (transfers, others) = (of(true), of(false));
    let slower = estimate.memory_rate / rate;
    if transfers <= 0.0 || !slower.is_finite() || slower <= 0.0 {
        return estimate.us;
    }
    estimate.us * (transfers * slower).max(others) / transfers.max(others)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_decides_where_transfers_do() {
        let estimate = |dma: f64, hvx: f64| GraphEstimate {
            us: 100.0,
            memory_rate: 60e9,
            units: [("HVX", hvx), ("DMA", dma)]
                .map(|(unit, us)| UnitTime { unit: unit.to_owned(), us, alone_us: 0.0 })
                .into(),
            ..GraphEstimate::default()
        };
        // Bound by transfers: all of the gain, or as much as the vector threads allow.
        assert_eq!(at_rate(&estimate(90.0, 10.0), 120e9), 50.0);
        assert_eq!(at_rate(&estimate(80.0, 60.0), 120e9), 75.0);
        // Bound by vector threads: nothing, until transfers are slower than they are.
        assert_eq!(at_rate(&estimate(40.0, 80.0), 120e9), 100.0);
        assert_eq!(at_rate(&estimate(40.0, 80.0), 30e9), 100.0);
        assert_eq!(at_rate(&estimate(40.0, 80.0), 15e9), 200.0);
        assert_eq!(at_rate(&GraphEstimate { us: 7.0, ..GraphEstimate::default() }, 1e9), 7.0);
        assert!(measured_rate(Target::V81) > measured_rate(Target::V73));
        assert_eq!(measured_rate(Target::V68), None);
    }
}
