//! Values that the host-op computes with: LSTMs, embeddings, durations and the source, in one file of f32.

use qhx_base::Result;

use super::config::{Albert, Config};
use super::{Model, SINES};

impl Model<'_> {
    /// Values that the host-op computes with, one tensor behind the other, in the order in which it reads them.
    pub(super) fn host_values(&self) -> Result<Vec<f32>> {
        let Config { hidden, style, layers, tokens, durations, ref albert, .. } = *self.config;
        let &Albert { width, embedding, positions, .. } = albert;
        let mut all = Vec::new();
        let checkpoint = self.checkpoint;
        let values = |name: &str, shape: &[usize]| checkpoint.values(name, shape);
        let lstm = |all: &mut Vec<f32>, at: &str, inputs: usize| -> Result<()> {
            let size = hidden / 2;
            for end in ["", "_reverse"] {
                let part =
                    |part: &str, shape: &[usize]| values(&format!("{at}.{part}_l0{end}"), shape);
                all.extend(part("weight_ih", &[4 * size, inputs])?);
                all.extend(part("weight_hh", &[4 * size, size])?);
                let own = part("bias_hh", &[4 * size])?;
                all.extend(part("bias_ih", &[4 * size])?.iter().zip(own).map(|(a, b)| a + b));
            }
            Ok(())
        };
        let linear = |all: &mut Vec<f32>, at: &str, shape: [usize; 2]| -> Result<()> {
            all.extend(values(&format!("{at}.weight"), &shape)?);
            all.extend(values(&format!("{at}.bias"), &shape[..1])?);
            Ok(())
        };
        all.extend(values("bert.embeddings.word_embeddings.weight", &[tokens, embedding])?);
        // Every symbol is of the first type.
        let kinds = values("bert.embeddings.token_type_embeddings.weight", &[2, embedding])?;
        let places = values("bert.embeddings.position_embeddings.weight", &[positions, embedding])?;
        all.extend(
            places.iter().zip(kinds[..embedding].iter().cycle()).map(|(place, kind)| place + kind),
        );
        for part in ["weight", "bias"] {
            all.extend(values(&format!("bert.embeddings.LayerNorm.{part}"), &[embedding])?);
        }
        linear(&mut all, "bert.encoder.embedding_hidden_mapping_in", [width, embedding])?;
        linear(&mut all, "bert_encoder", [hidden, width])?;
        all.extend(values("text_encoder.embedding.weight", &[tokens, hidden])?);
        lstm(&mut all, "text_encoder.lstm", hidden)?;
        for layer in 0..layers {
            let at = |part: usize| format!("predictor.text_encoder.lstms.{part}");
            lstm(&mut all, &at(2 * layer), hidden + style)?;
            linear(&mut all, &format!("{}.fc", at(2 * layer + 1)), [2 * hidden, style])?;
        }
        lstm(&mut all, "predictor.lstm", hidden + style)?;
        linear(&mut all, "predictor.duration_proj.linear_layer", [durations, hidden])?;
        lstm(&mut all, "predictor.shared", hidden + style)?;
        for part in ["F0_conv", "N_conv"] {
            let at = format!("decoder.{part}");
            all.extend(self.convs.normed(&at, &[1, 1, 3])?);
            all.extend(values(&format!("{at}.bias"), &[1])?);
        }
        linear(&mut all, "decoder.generator.m_source.l_linear", [1, SINES])?;
        Ok(all)
    }
}
