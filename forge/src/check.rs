//! Compares each compiled graph with its ONNX reference graph on the same random inputs.

use half::f16;
use qhx_base::compare::Distance;
use qhx_base::{Error, ErrorKind, Result};
use qhx_exec::backend::ContextSource;
use qhx_exec::graph_runner::{Named, open, run};
use qhx_graph::progress::Progress;
use qhx_types::{GraphInfo, MASK_VALUE};
use rand_xoshiro::SplitMix64;
use rand_xoshiro::rand_core::{RngCore as _, SeedableRng as _};
use serde::Serialize;

use crate::options::CheckBackends;

/// Agreement of one output of a compiled graph with its reference graph.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct CheckRow {
    /// Key of the context.
    pub context: String,
    /// Name of the graph.
    pub graph: String,
    /// Name of the output.
    pub output: String,
    /// Cosine of the two results, 1 for equal directions.
    pub cosine: f64,
    /// Largest difference of an element, as a part of the largest element of the reference.
    pub error: f64,
}

impl CheckRow {
    /// f16 arithmetic stays above this, int8 weights included; a wrong graph does not.
    pub const MIN_COSINE: f64 = 0.995;

    /// True when the two agree.
    pub fn agrees(&self) -> bool {
        self.cosine >= Self::MIN_COSINE
    }
}

/// Runs every graph of `sources` on both backends.
///
/// Inputs are uniform in −1..1 and rounded to f16, so that both backends see the same numbers; an
/// input whose name begins with `cmask` masks all but some positions and the last, and by `valid` all rows but the
/// last are tokens.
pub(crate) fn compare(
    sources: &[ContextSource],
    check: &CheckBackends,
    progress: &mut dyn Progress,
) -> Result<Vec<CheckRow>> {
    let (qnn, cpu) = ((check.qnn)()?, (check.cpu)()?);
    let mut rows = Vec::new();
    for source in sources {
        let (mut compiled, infos) = open(&qnn, source)?;
        let (mut reference, graphs) = open(&cpu, source)?;
        for info in &infos {
            let Some(other) = graphs.iter().find(|t| t.name == info.name) else {
                return Err(Error::new(
                    ErrorKind::Graph,
                    format!(
                        "context {:?}: graph {:?} has no ONNX reference graph",
                        source.key, info.name
                    ),
                ));
            };
            progress.stage(&format!("check {} of {}", info.name, source.key), 0);
            progress.stop_if_cancelled()?;
            let inputs = random_inputs(info, check.seed)?;
            let ours = run(&mut compiled, info, &inputs)?;
            let theirs = run(&mut reference, other, &inputs)?;
            for (name, values) in ours {
                let expected = theirs.iter().find(|(n, v)| *n == name && v.len() == values.len());
                let Some((_, expected)) = expected else {
                    return Err(Error::new(
                        ErrorKind::Graph,
                        format!(
                            "graph {:?}: output {name:?} of the reference graph has another size or name",
                            info.name
                        ),
                    ));
                };
                // What is not finite agrees with nothing.
                let (cosine, error) = Distance::of(&values, expected)
                    .map_or((0.0, f64::INFINITY), |distance| (distance.cosine, distance.relative));
                rows.push(CheckRow {
                    context: source.key.clone(),
                    graph: info.name.clone(),
                    output: name,
                    cosine,
                    error,
                });
            }
        }
    }
    if let Some(row) = rows.iter().find(|row| !row.agrees()) {
        progress.note(&format!(
            "graph {:?}: output {:?} has cosine {:.6} with its reference graph, expected at least {}",
            row.graph,
            row.output,
            row.cosine,
            CheckRow::MIN_COSINE
        ));
    }
    Ok(rows)
}

fn random_inputs(info: &GraphInfo, seed: u64) -> Result<Vec<Named>> {
    // The same inputs on every machine.
    let mut random = SplitMix64::seed_from_u64(seed ^ 0x9e37_79b9_7f4a_7c15);
    // Uniform in −1..1, and the same in f16 and f32.
    let mut number = || {
        let wide = (random.next_u64() >> 40) as f32 / (1u64 << 23) as f32 - 1.0;
        f16::from_f32(wide).to_f32()
    };
    info.inputs
        .iter()
        .map(|tensor| {
            let count = tensor.try_elements().map_err(Error::size)?;
            let mut values: Vec<f32> = (0..count).map(|_| number()).collect();
            if tensor.name.starts_with("cmask") {
                // Row by row: a row with nothing open would compare roundings.
                let width = tensor.shape.last().copied().unwrap_or(count).max(1);
                for (index, value) in values.iter_mut().enumerate() {
                    let column = index % width;
                    let open = column < width / 2 || column + 1 == width;
                    *value = if open { 0.0 } else { MASK_VALUE };
                }
            }
            if tensor.name == "valid" {
                values.fill(1.0);
                if let [_, .., last] = values.as_mut_slice() {
                    *last = 0.0;
                }
            }
            Ok((tensor.name.clone(), values))
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use qhx_exec::null::NullBackend;
    use qhx_types::{DType, TensorInfo};

    use super::*;
    use crate::options::BackendFactory;
    use qhx_graph::progress::Silent;

    /// A backend whose graph `g` hands its input on, each byte changed by `change`.
    fn backend(dtype: DType, output: &str, change: fn(u8) -> u8) -> BackendFactory {
        let graph = GraphInfo::new(
            "g",
            [TensorInfo::new("x", dtype, [1, 64])],
            [TensorInfo::new(output, dtype, [1, 64])],
        );
        let null = NullBackend::new(vec![("decode".to_owned(), vec![graph])]).with_script(
            move |_, inputs, outputs| {
                for (to, from) in outputs[0].iter_mut().zip(inputs[0]) {
                    *to = change(*from);
                }
                Ok(())
            },
        );
        Box::new(move || Ok(Arc::new(null.clone())))
    }

    fn check(qnn: BackendFactory, cpu: BackendFactory) -> Result<Vec<CheckRow>> {
        let source = ContextSource { key: "decode".to_owned(), ..ContextSource::default() };
        let backends = CheckBackends { qnn, cpu, seed: 1 };
        compare(&[source], &backends, &mut Silent)
    }

    #[test]
    fn graphs_that_compute_the_same_agree_across_element_types() {
        let same: fn(u8) -> u8 = |byte| byte;
        let rows = check(backend(DType::F16, "y", same), backend(DType::F32, "y", same)).unwrap();
        assert_eq!(rows.len(), 1);
        assert_eq!((rows[0].graph.as_str(), rows[0].output.as_str()), ("g", "y"));
        assert!(rows[0].agrees() && rows[0].cosine > 0.999_999 && rows[0].error == 0.0, "{rows:?}");
    }

    #[test]
    fn graphs_that_answer_nothing_but_nan_do_not_agree() {
        let nan: fn(u8) -> u8 = |_| 0xff;
        let rows = check(backend(DType::F16, "y", nan), backend(DType::F32, "y", nan)).unwrap();
        assert_eq!((rows[0].agrees(), rows[0].cosine, rows[0].error), (false, 0.0, f64::INFINITY));
    }

    #[test]
    fn graphs_that_differ_are_found() {
        let same: fn(u8) -> u8 = |byte| byte;
        let rows =
            check(backend(DType::F32, "y", |byte| byte ^ 0x80), backend(DType::F32, "y", same))
                .unwrap();
        assert!(!rows[0].agrees(), "{rows:?}");
        let error = check(backend(DType::F32, "y", same), backend(DType::F32, "z", same));
        assert!(error.unwrap_err().message().contains("output \"y\""));
    }

    #[test]
    fn inputs_are_the_same_every_time_and_the_mask_is_a_mask() {
        let info = GraphInfo::new(
            "g",
            [
                TensorInfo::new("x", DType::F16, [1, 4]),
                TensorInfo::new("cmask", DType::F16, [1, 5]),
                TensorInfo::new("valid", DType::F16, [3, 1]),
            ],
            [],
        );
        let inputs = random_inputs(&info, 7).unwrap();
        assert_eq!(inputs, random_inputs(&info, 7).unwrap());
        assert!(inputs[0].1.iter().all(|v| (-1.0..1.0).contains(v)));
        assert_eq!(inputs[1].1, [0.0, 0.0, MASK_VALUE, MASK_VALUE, 0.0]);
        assert_eq!(inputs[2].1, [1.0, 1.0, 0.0]);
        let rows = GraphInfo::new("rows", [TensorInfo::new("cmask", DType::F16, [2, 4])], []);
        let mask = random_inputs(&rows, 7).unwrap().remove(0).1;
        assert_eq!(mask, [0.0, 0.0, MASK_VALUE, 0.0, 0.0, 0.0, MASK_VALUE, 0.0]);
    }
}
