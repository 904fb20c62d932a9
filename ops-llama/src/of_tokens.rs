//! What an encoder gives for each token of a text beside its vector, as BGE-M3 does (arXiv 2402.03216).

use std::ops::Range;

use qhx_kit::kernels::Linear;
use qhx_op::{BufferId, Error, ErrorCode, Host, OfTokens, Result, View};
use serde::Deserialize;

use crate::modules::{normalize, open};

/// `plan.params.of_tokens` of the manifest: heads over the last rows, whose weights are files of `artifacts.modules`.
#[derive(Debug, Clone, Default, Deserialize)]
pub(crate) struct Declared {
    /// One value, of which what is above 0 is the token's weight.
    weights: Option<Head>,
    /// A vector, divided by its norm.
    vectors: Option<Vectors>,
}

#[derive(Debug, Clone, Deserialize)]
struct Head {
    weight: String,
    bias: String,
}

#[derive(Debug, Clone, Deserialize)]
struct Vectors {
    weight: String,
    bias: String,
    outputs: usize,
    /// Tokens at the beginning that have no vector.
    #[serde(default)]
    skipped: usize,
}

/// The heads, and room for a row.
#[derive(Debug, Default)]
pub(crate) struct TokenHeads {
    of: OfTokens,
    weights: Option<[BufferId; 2]>,
    vectors: Option<[BufferId; 2]>,
    row: Vec<f32>,
    vector: Vec<f32>,
}

impl TokenHeads {
    /// Maps the weights. `width` is that of the last rows.
    pub fn open(host: &mut Host, declared: &Declared, width: usize) -> Result<Self> {
        let mut heads = Self { row: vec![0.0; width], ..Self::default() };
        if let Some(Head { weight, bias }) = &declared.weights {
            heads.weights = Some([open(host, weight, width)?, open(host, bias, 1)?]);
            heads.of.weights = true;
        }
        if let Some(Vectors { weight, bias, outputs, skipped }) = &declared.vectors {
            let weight = open(host, weight, outputs.saturating_mul(width))?;
            heads.vectors = Some([weight, open(host, bias, *outputs)?]);
            (heads.of.dim, heads.of.skipped) = (*outputs, *skipped);
            heads.vector = vec![0.0; *outputs];
        }
        Ok(heads)
    }

    /// What they give.
    pub const fn of(&self) -> OfTokens {
        self.of
    }

    /// Writes the values of the rows of `text` in `source`, f32 from element `place` of `target` on.
    pub fn write(
        &mut self,
        host: &mut Host,
        source: View,
        text: Range<usize>,
        (target, mut place): (BufferId, usize),
    ) -> Result<()> {
        let width = self.row.len();
        let mut write = |host: &mut Host, values: &[f32]| {
            if !values.iter().all(|value| value.is_finite()) {
                return Err(Error::new(
                    ErrorCode::EXECUTE,
                    "the encoder's last rows are not finite: a value overflowed in a graph, or the weights of a head are \
                     damaged",
                ));
            }
            host.f32s_mut(target)[place..place + values.len()].copy_from_slice(values);
            place += values.len();
            Ok(())
        };
        if let Some([weight, bias]) = self.weights {
            for row in text.clone() {
                source.to_f32(host, row * width, &mut self.row)?;
                let mut value = [0.0];
                let head = Linear::new(host.f32s(weight), Some(host.f32s(bias)), width, 1)?;
                head.write(host, &self.row, &mut value)?;
                write(host, &[value[0].max(0.0)])?;
            }
        }
        if let Some([weight, bias]) = self.vectors {
            for row in text.skip(self.of.skipped) {
                source.to_f32(host, row * width, &mut self.row)?;
                let bias = Some(host.f32s(bias));
                let head = Linear::new(host.f32s(weight), bias, width, self.of.dim)?;
                head.write(host, &self.row, &mut self.vector)?;
                normalize(&mut self.vector);
                write(host, &self.vector)?;
            }
        }
        Ok(())
    }
}
