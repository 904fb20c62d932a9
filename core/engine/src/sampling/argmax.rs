//! The largest logit, found on the bits of half-precision numbers without converting them.
//!
//! A half is a sign and a 15-bit magnitude whose integer order is the order of the numbers.
//! Negating the magnitude where the sign is set gives an `i16` that orders all halves, with −0
//! equal to +0, infinities at ±0x7c00 and NaN beyond them. Maximum and minimum of `i16` are single
//! vector instructions on SSE2 and NEON, which the loops below are written to become.

use std::ops::Range;

use half::f16;
use half::slice::HalfFloatSliceExt as _;
use qhx_base::{Error, ErrorKind, Result, error};
use qhx_exec::Logits;

/// The ordering key of infinity.
const INFINITY: i16 = 0x7c00;

/// Numbers handled together; several vector registers, so that the loop is not one long chain.
const LANES: usize = 64;

/// Numbers of which only the largest is known before the position of the maximum is looked for.
const BLOCK: usize = 4096;

/// Runs from which on all logits between the first and the last one are looked at first.
const MANY_RUNS: usize = 256;

/// Index of the largest logit, the lowest one on ties.
///
/// # Errors
/// When a logit is NaN, when all are −∞, and when there are none.
pub fn argmax(logits: Logits<'_>) -> Result<u32> {
    argmax_within(logits, &[Range { start: 0, end: logits.len() }])
}

/// Same as [`argmax`], over the logits in `runs`, which are ascending and end within the logits. The others make no
/// difference.
pub(super) fn argmax_within(logits: Logits<'_>, runs: &[Range<usize>]) -> Result<u32> {
    // A mask of a grammar has runs by the thousand, each of which takes as long as some hundred logits. The largest of
    // all is allowed most of the time.
    if let [first, .., last] = runs
        && runs.len() > MANY_RUNS
        && let Ok(index) = argmax_within(logits, &[Range { start: first.start, end: last.end }])
    {
        let at = runs.partition_point(|run| run.end <= index as usize);
        if runs.get(at).is_some_and(|run| run.contains(&(index as usize))) {
            return Ok(index);
        }
    }
    match logits {
        Logits::F16(values) => best(values, runs, largest_f16),
        Logits::F32(values) => best(values, runs, largest_f32),
    }
}

/// The largest value of some, which is above −∞, and its index.
type Largest<K> = Option<(K, usize)>;

/// The largest of several runs' largest values.
fn best<T, K: PartialOrd>(
    values: &[T],
    runs: &[Range<usize>],
    largest: impl Fn(&[T]) -> Result<Largest<K>, NotANumber>,
) -> Result<u32> {
    let mut best: Largest<K> = None;
    for run in runs {
        let found = largest(values.get(run.clone()).unwrap_or(&[]));
        let found = found.map_err(|NotANumber(index)| nan(run.start + index))?;
        if let Some((value, index)) = found
            && best.as_ref().is_none_or(|(best, _)| value > *best)
        {
            best = Some((value, run.start + index));
        }
    }
    let none = || nothing(runs.iter().map(Range::len).sum());
    best.map(|(_, index)| index as u32).ok_or_else(none)
}

/// The index of a value that is NaN.
#[derive(Debug)]
struct NotANumber(usize);

fn key(bits: u16) -> i16 {
    let sign = (bits as i16) >> 15;
    (((bits & 0x7fff) as i16) ^ sign).wrapping_sub(sign)
}

fn largest_f16(values: &[f16]) -> Result<Largest<i16>, NotANumber> {
    let bits: &[u16] = values.reinterpret_cast();
    let (mut best, mut block) = (i16::MIN, 0);
    let mut lowest = i16::MAX;
    for (index, part) in bits.chunks(BLOCK).enumerate() {
        let (high, low) = extremes(part);
        lowest = lowest.min(low);
        if high > best {
            (best, block) = (high, index);
        }
    }
    if best > INFINITY || lowest < -INFINITY {
        return Err(NotANumber(values.iter().position(|v| v.is_nan()).unwrap_or_default()));
    }
    if best <= -INFINITY {
        return Ok(None);
    }
    let start = block * BLOCK;
    let within = bits[start..].iter().position(|&b| key(b) == best);
    Ok(Some((best, start + within.unwrap_or(0))))
}

/// Largest and smallest key.
fn extremes(bits: &[u16]) -> (i16, i16) {
    let mut high = [i16::MIN; LANES];
    let mut low = [i16::MAX; LANES];
    let (parts, rest) = bits.as_chunks::<LANES>();
    for part in parts {
        for lane in 0..LANES {
            let key = key(part[lane]);
            high[lane] = high[lane].max(key);
            low[lane] = low[lane].min(key);
        }
    }
    for (lane, &bits) in rest.iter().enumerate() {
        high[lane] = high[lane].max(key(bits));
        low[lane] = low[lane].min(key(bits));
    }
    let high = high.into_iter().fold(i16::MIN, i16::max);
    (high, low.into_iter().fold(i16::MAX, i16::min))
}

/// Same as [`argmax`], for single precision.
pub(super) fn argmax_f32(values: &[f32]) -> Result<u32> {
    argmax(Logits::F32(values))
}

fn largest_f32(values: &[f32]) -> Result<Largest<f32>, NotANumber> {
    let (mut best, mut block) = (f32::NEG_INFINITY, 0);
    for (index, part) in values.chunks(BLOCK).enumerate() {
        let Some(high) = max_f32(part) else {
            return Err(NotANumber(values.iter().position(|v| v.is_nan()).unwrap_or_default()));
        };
        if high > best {
            (best, block) = (high, index);
        }
    }
    if best == f32::NEG_INFINITY {
        return Ok(None);
    }
    let start = block * BLOCK;
    let within = values[start..].iter().position(|&v| v == best);
    Ok(Some((best, start + within.unwrap_or(0))))
}

/// The largest value; `None` when one is NaN.
pub(super) fn max_f32(values: &[f32]) -> Option<f32> {
    const LANES: usize = 32;
    let mut high = [f32::NEG_INFINITY; LANES];
    let mut nan = [0u32; LANES];
    let (parts, rest) = values.as_chunks::<LANES>();
    for part in parts {
        for lane in 0..LANES {
            let v = part[lane];
            high[lane] = if v > high[lane] { v } else { high[lane] };
            nan[lane] |= u32::from(v.is_nan());
        }
    }
    for (lane, &v) in rest.iter().enumerate() {
        high[lane] = if v > high[lane] { v } else { high[lane] };
        nan[lane] |= u32::from(v.is_nan());
    }
    let valid = nan.iter().all(|&n| n == 0);
    valid.then(|| high.into_iter().fold(f32::NEG_INFINITY, f32::max))
}

pub(super) fn nan(index: usize) -> Error {
    error!(Execute, "the logit of token {index} is NaN")
        .hint("the graph overflowed or a weight file is damaged; `qhx verify` checks the files")
}

pub(super) fn nothing(count: usize) -> Error {
    let message = match count {
        0 => "there are no logits".to_owned(),
        n => format!("all {n} logits are −∞"),
    };
    Error::new(ErrorKind::Execute, message)
        .hint("the lm-head did not write its output, or every token is masked")
}

#[cfg(test)]
mod tests {
    use super::super::rng::Rng;
    use super::*;

    #[test]
    fn keys_order_every_half() {
        for a in (0..=u16::MAX).filter(|&b| !f16::from_bits(b).is_nan()) {
            for b in [0, 0x8000, 1, 0x8001, 0x3c00, 0xbc00, 0x7bff, 0xfbff, 0x7c00, 0xfc00, a] {
                let order = f16::from_bits(a).to_f32().partial_cmp(&f16::from_bits(b).to_f32());
                assert_eq!(Some(key(a).cmp(&key(b))), order, "{a:#x} {b:#x}");
            }
        }
        for nan in (0..=u16::MAX).filter(|&b| f16::from_bits(b).is_nan()) {
            assert!(key(nan) > INFINITY || key(nan) < -INFINITY, "{nan:#x}");
        }
    }

    #[test]
    fn many_runs_are_looked_through_as_few_are() {
        let mut rng = Rng::new(5);
        for round in 0..400 {
            let mut values: Vec<f32> =
                (0..4 * MANY_RUNS).map(|_| rng.below(900) as f32 / 4.0).collect();
            let runs: Vec<_> = (0..values.len())
                .filter(|&id| id % 3 == round % 3)
                .map(|id| id..id + 1 + usize::from(rng.below(2) == 1))
                .collect();
            assert!(runs.len() > MANY_RUNS);
            let allowed = |id: usize| runs.iter().any(|run| run.contains(&id));
            if round % 4 == 0 {
                let not = (10..).find(|&id| !allowed(id)).unwrap();
                values[not] = f32::NAN;
            }
            let of = (0..values.len()).filter(|&id| allowed(id)).rev();
            let expected = of.max_by(|a, b| values[*a].total_cmp(&values[*b])).unwrap();
            let halves: Vec<_> = values.iter().map(|&value| f16::from_f32(value)).collect();
            for logits in [Logits::F32(&values), Logits::F16(&halves)] {
                let found = argmax_within(logits, &runs).unwrap();
                assert_eq!(found as usize, expected, "round {round}");
            }
        }
    }

    #[test]
    fn agrees_with_a_plain_loop_at_every_length() {
        let mut rng = Rng::new(3);
        let lengths = (1..200).chain([BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 7]);
        for len in lengths {
            // Few distinct values, so that ties are common.
            let halves: Vec<_> =
                (0..len).map(|_| f16::from_f32(rng.below(40) as f32 / 4.0 - 9.0)).collect();
            let singles: Vec<_> = halves.iter().map(|h| h.to_f32()).collect();
            let mut expected = 0;
            for (i, v) in singles.iter().enumerate() {
                if *v > singles[expected] {
                    expected = i;
                }
            }
            assert_eq!(argmax(Logits::F16(&halves)).unwrap(), expected as u32, "{len}");
            assert_eq!(argmax(Logits::F32(&singles)).unwrap(), expected as u32, "{len}");
        }
    }

    #[test]
    fn both_zeros_tie_and_infinity_wins() {
        for values in [[-0.0, 0.0, -1.0], [0.0, -0.0, -1.0], [-1.0, -2.0, f32::NEG_INFINITY]] {
            let halves = values.map(f16::from_f32);
            assert_eq!(argmax(Logits::F16(&halves)).unwrap(), 0, "{values:?}");
            assert_eq!(argmax(Logits::F32(&values)).unwrap(), 0, "{values:?}");
        }
        let values = [1.0, f32::INFINITY, 2.0];
        assert_eq!(argmax(Logits::F32(&values)).unwrap(), 1);
        assert_eq!(argmax(Logits::F16(&values.map(f16::from_f32))).unwrap(), 1);
    }

    #[test]
    fn nan_is_named_wherever_it_is() {
        for at in [0, 63, 64, 5000, 9999] {
            for nan in [f16::NAN, f16::from_bits(0xfe01)] {
                let mut values = vec![f16::ONE; 10_000];
                values[at] = nan;
                let error = argmax(Logits::F16(&values)).unwrap_err();
                assert_eq!(error.message(), format!("the logit of token {at} is NaN"));
                let singles: Vec<_> = values.iter().map(|h| h.to_f32()).collect();
                let error = argmax(Logits::F32(&singles)).unwrap_err();
                assert_eq!(error.message(), format!("the logit of token {at} is NaN"));
            }
        }
        let masked = [f16::NEG_INFINITY; 70];
        assert_eq!(argmax(Logits::F16(&masked)).unwrap_err().message(), "all 70 logits are −∞");
        let masked = [f32::NEG_INFINITY; 70];
        assert_eq!(argmax(Logits::F32(&masked)).unwrap_err().message(), "all 70 logits are −∞");
        assert_eq!(argmax(Logits::F32(&[])).unwrap_err().message(), "there are no logits");
    }
}
