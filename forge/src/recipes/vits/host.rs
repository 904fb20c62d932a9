//! Values that the host-op computes with: embeddings and the duration predictor, in one file of f32.

use qhx_base::Result;

use super::Model;
use super::config::{Config, Durations};

impl Model<'_> {
    /// A projection, which one class stores as a convolution of kernel 1.
    pub(super) fn projection(&self, name: &str, [outputs, inputs]: [usize; 2]) -> Result<Vec<f32>> {
        let name = format!("{name}.weight");
        let stored = self.checkpoint.stored(&name).is_some_and(|(_, shape)| shape.len() == 3);
        match stored {
            true => self.checkpoint.values(&name, &[outputs, inputs, 1]),
            false => self.checkpoint.values(&name, &[outputs, inputs]),
        }
    }

    /// Values that the host-op computes with, one tensor behind the other, in the order in which it reads them.
    pub(super) fn host_values(&self) -> Result<Vec<f32>> {
        let Config { tokens, hidden, speakers, speaker, durations, .. } = *self.config;
        let checkpoint = self.checkpoint;
        let mut all = checkpoint.values("text_encoder.embed_tokens.weight", &[tokens, hidden])?;
        let at = |part: &str| format!("duration_predictor.{part}");
        let both = |all: &mut Vec<f32>, name: &str, shape: &[usize]| -> Result<()> {
            all.extend(checkpoint.values(&format!("{name}.weight"), shape)?);
            all.extend(checkpoint.values(&format!("{name}.bias"), &shape[..1])?);
            Ok(())
        };
        let linear =
            |all: &mut Vec<f32>, name: &str, [outputs, inputs]: [usize; 2]| -> Result<()> {
                all.extend(self.projection(name, [outputs, inputs])?);
                all.extend(checkpoint.values(&format!("{name}.bias"), &[outputs])?);
                Ok(())
            };
        if speaker > 0 {
            all.extend(checkpoint.values("embed_speaker.weight", &[speakers, speaker])?);
            linear(&mut all, &at("cond"), [hidden, speaker])?;
        }
        match durations {
            Durations::Plain { inner, kernel } => {
                both(&mut all, &at("conv_1"), &[inner, hidden, kernel])?;
                both(&mut all, &at("norm_1"), &[inner])?;
                both(&mut all, &at("conv_2"), &[inner, inner, kernel])?;
                both(&mut all, &at("norm_2"), &[inner])?;
                linear(&mut all, &at("proj"), [1, inner])?;
            }
            Durations::Stochastic { kernel, layers, flows, bins, .. } => {
                let separable = |all: &mut Vec<f32>, at: &str| -> Result<()> {
                    for layer in 0..layers {
                        let part = |name: &str| format!("{at}.{name}.{layer}");
                        both(all, &part("convs_dilated"), &[hidden, 1, kernel])?;
                        both(all, &part("norms_1"), &[hidden])?;
                        linear(all, &part("convs_pointwise"), [hidden, hidden])?;
                        both(all, &part("norms_2"), &[hidden])?;
                    }
                    Ok(())
                };
                linear(&mut all, &at("conv_pre"), [hidden, hidden])?;
                separable(&mut all, &at("conv_dds"))?;
                linear(&mut all, &at("conv_proj"), [hidden, hidden])?;
                // The class does without the first of them when it speaks.
                for flow in (2..=flows).rev() {
                    let at = at(&format!("flows.{flow}"));
                    linear(&mut all, &format!("{at}.conv_pre"), [hidden, 1])?;
                    separable(&mut all, &format!("{at}.conv_dds"))?;
                    linear(&mut all, &format!("{at}.conv_proj"), [3 * bins - 1, hidden])?;
                }
                all.extend(checkpoint.values(&at("flows.0.translate"), &[2, 1])?);
                // The reciprocal of the scale, which exporters compute in part.
                let (scale, negative) = (at("flows.0.scale"), at("flows.0.negative"));
                let (name, sign) = match checkpoint.has(&negative) {
                    true => (negative, 1.0),
                    false => (at("flows.0.log_scale"), -1.0),
                };
                all.extend(match checkpoint.has(&scale) {
                    true => checkpoint.values(&scale, &[2, 1])?,
                    false => checkpoint
                        .values(&name, &[2, 1])?
                        .iter()
                        .map(|log| (sign * log).exp())
                        .collect(),
                });
            }
        }
        Ok(all)
    }
}
