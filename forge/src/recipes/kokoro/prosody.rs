//! F0 and N of frames.

use qhx_base::Result;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Conv1d, Elem, Graph};

use super::Model;
use super::config::Config;
use super::layers::levels;
use crate::kit::filters;
use crate::recipes::vocoder::by_channels;

impl Model<'_> {
    /// The chains of `ProsodyPredictor.F0Ntrain` behind their LSTM.
    pub(super) fn prosody(&self, name: &str, frames: usize) -> Result<Graph> {
        let Config { hidden, style, .. } = *self.config;
        let mut b = GraphBuilder::new(name);
        let x = b.input("x", Elem::Activation, &[frames, hidden])?;
        let style = b.input("style", Elem::Activation, &[1, style])?;
        let ([frame, curve], _) = levels(&mut b, frames)?;
        let x = by_channels(&mut b, x)?;
        let mut curves = Vec::new();
        for part in ["F0", "N"] {
            let at = |block: usize| format!("predictor.{part}.{block}");
            b.scope(part.to_lowercase());
            let h = self.block(&mut b, x, style, &at(0), [hidden; 2], [frame; 2])?;
            let h = self.block(&mut b, h, style, &at(1), [hidden, hidden / 2], [frame, curve])?;
            let h = self.block(&mut b, h, style, &at(2), [hidden / 2; 2], [curve; 2])?;
            let name = format!("predictor.{part}_proj");
            let (weight, bias) = filters(self.checkpoint, &name, &[1, hidden / 2, 1])?;
            let y = b.conv1d("proj", h, weight, Some(bias), Conv1d::new(1))?;
            curves.push(b.reshape(y, &[1, curve.len])?);
        }
        let curves = b.concat(&curves, 0)?;
        b.output("curves", curves)?;
        b.finish()
    }
}
