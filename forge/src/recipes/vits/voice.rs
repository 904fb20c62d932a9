//! The flow and the vocoder: frames to samples.

use qhx_base::Result;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Conv1d, Elem, Graph, TensorId, UnaryOp};
use qhx_graph::weight::{Storage, Weight};

use super::Model;
use super::config::{Config, Decoder, Wavenet};
use crate::recipes::vocoder::{by_channels, finer, graph_name, leaky};

/// Slope in front of the last convolution.
const LAST_SLOPE: f32 = 0.01;
/// Kernel of the vocoder's first and last convolution.
const ENDS: Conv1d = Conv1d { padding: [3, 3], ..Conv1d::new(7) };

impl Model<'_> {
    /// `VitsResidualCouplingBlock` backwards, and `VitsHifiGan`.
    pub(super) fn voice(&self, name: &str, frames: usize) -> Result<Graph> {
        let Config { flow, speaker, couplings, .. } = *self.config;
        let mut b = GraphBuilder::new(name);
        let x = b.input("x", Elem::Activation, &[frames, flow])?;
        let keep = b.input("keep", Elem::Activation, &[frames, 1])?;
        let style = match speaker {
            0 => None,
            _ => Some(b.input("style", Elem::Activation, &[1, speaker])?),
        };
        let keep = b.reshape(keep, &[1, 1, frames])?;
        let x = by_channels(&mut b, x)?;
        let mut halves = [b.slice(x, 1, 0, flow / 2)?, b.slice(x, 1, flow / 2, flow)?];
        for coupling in (0..couplings).rev() {
            b.scope(format!("flow{coupling}"));
            // The class turns the channels round in front of each; here the weights of every other one are.
            let turned = (couplings - coupling) % 2 == 1;
            let (seen, moved) = if turned { (1, 0) } else { (0, 1) };
            let at = format!("flow.flows.{coupling}");
            let mean = self.coupling(&mut b, halves[seen], &at, turned, keep, style)?;
            let moved_by = b.sub(halves[moved], mean)?;
            halves[moved] = b.mul(moved_by, keep)?;
        }
        let z = b.concat(&halves, 1)?;
        let samples = self.vocoder(&mut b, z, keep, style)?;
        b.output("samples", samples)?;
        b.finish()
    }

    /// The mean that a coupling takes from one half of the channels, as the other half shows it.
    fn coupling(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        at: &str,
        turned: bool,
        keep: TensorId,
        style: Option<TensorId>,
    ) -> Result<TensorId> {
        let Config { hidden, flow, wavenet: Wavenet { layers, kernel, dilation }, .. } =
            *self.config;
        let half = flow / 2;
        let mut x =
            self.turned(b, x, &format!("{at}.conv_pre"), [hidden, half], [false, turned])?;
        x = b.mul(x, keep)?;
        let styled = match style {
            None => None,
            Some(style) => Some(self.styled(
                b,
                style,
                &format!("{at}.wavenet.cond_layer"),
                2 * hidden * layers,
            )?),
        };
        let mut sum = None;
        let mut reach = 1;
        for layer in 0..layers {
            let part = |name: &str| format!("{at}.wavenet.{name}.{layer}");
            let conv =
                Conv1d { padding: [kernel / 2 * reach; 2], dilation: reach, ..Conv1d::new(kernel) };
            let mut y =
                self.convs.conv(b, x, &part("in_layers"), [2 * hidden, hidden], conv, true)?;
            if let Some(styled) = styled {
                let own = b.slice(styled, 1, 2 * hidden * layer, 2 * hidden * (layer + 1))?;
                y = b.add(y, own)?;
            }
            let (a, gate) = (b.slice(y, 1, 0, hidden)?, b.slice(y, 1, hidden, 2 * hidden)?);
            let (a, gate) = (b.unary(UnaryOp::Tanh, a)?, b.unary(UnaryOp::Sigmoid, gate)?);
            let y = b.mul(a, gate)?;
            let last = layer + 1 == layers;
            let outputs = if last { hidden } else { 2 * hidden };
            let mut y = self.convs.conv(
                b,
                y,
                &part("res_skip_layers"),
                [outputs, hidden],
                Conv1d::new(1),
                true,
            )?;
            if !last {
                let own = b.slice(y, 1, 0, hidden)?;
                let own = b.add(x, own)?;
                x = b.mul(own, keep)?;
                y = b.slice(y, 1, hidden, 2 * hidden)?;
            }
            sum = Some(match sum {
                None => y,
                Some(sum) => b.add(sum, y)?,
            });
            reach *= dilation;
        }
        let sum = b.mul(sum.unwrap_or(x), keep)?;
        self.turned(b, sum, &format!("{at}.conv_post"), [half, hidden], [turned, false])
    }

    /// A convolution of kernel 1 whose outputs, or inputs, are in the opposite order.
    fn turned(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        at: &str,
        [outputs, inputs]: [usize; 2],
        [turn_outputs, turn_inputs]: [bool; 2],
    ) -> Result<TensorId> {
        let weight = self.convs.hold(at, || {
            let mut values = self.convs.normed(at, &[outputs, inputs, 1])?;
            if turn_inputs {
                values.chunks_exact_mut(inputs).for_each(<[f32]>::reverse);
            }
            if turn_outputs {
                values = values.rchunks_exact(inputs).flatten().copied().collect();
            }
            Ok(([outputs, inputs], values))
        })?;
        let mut bias = self.checkpoint.values(&format!("{at}.bias"), &[outputs])?;
        if turn_outputs {
            bias.reverse();
        }
        b.conv1d(
            &graph_name(at),
            x,
            Weight::new(weight, Storage::Float),
            Some(bias),
            Conv1d::new(1),
        )
    }

    /// What a speaker adds to channels, `[1, outputs, 1]`.
    fn styled(
        &self,
        b: &mut GraphBuilder,
        style: TensorId,
        at: &str,
        outputs: usize,
    ) -> Result<TensorId> {
        let inputs = b.width(style)?;
        let weight = self
            .convs
            .hold(at, || Ok(([outputs, inputs], self.convs.normed(at, &[outputs, inputs, 1])?)))?;
        let bias = self.checkpoint.values(&format!("{at}.bias"), &[outputs])?;
        let y =
            b.linear(&graph_name(at), style, Weight::new(weight, Storage::Float), Some(bias))?;
        b.reshape(y, &[1, outputs, 1])
    }

    /// Samples `[frames, hop]`.
    fn vocoder(
        &self,
        b: &mut GraphBuilder,
        z: TensorId,
        mut keep: TensorId,
        style: Option<TensorId>,
    ) -> Result<TensorId> {
        let Config { flow, couplings, ref decoder, .. } = *self.config;
        let Decoder { initial, ref rates, ref blocks, paired, slope } = *decoder;
        let frames = b.width(z)?;
        b.scope("pre");
        // Behind an odd number of couplings the channels are turned round.
        let at = "decoder.conv_pre";
        let weight = self.convs.hold(at, || {
            let mut values = self.convs.normed(at, &[initial, flow, ENDS.kernel])?;
            if couplings % 2 == 1 {
                for row in values.chunks_exact_mut(flow * ENDS.kernel) {
                    let turned: Vec<f32> =
                        row.rchunks_exact(ENDS.kernel).flatten().copied().collect();
                    row.copy_from_slice(&turned);
                }
            }
            Ok(([initial, flow * ENDS.kernel], values))
        })?;
        let bias = self.checkpoint.values(&format!("{at}.bias"), &[initial])?;
        let mut h =
            b.conv1d(&graph_name(at), z, Weight::new(weight, Storage::Float), Some(bias), ENDS)?;
        if let Some(style) = style {
            let own = self.styled(b, style, "decoder.cond", initial)?;
            h = b.add(h, own)?;
        }
        let mut channels = initial;
        for (stage, rate) in rates.iter().enumerate() {
            b.scope(format!("up{stage}"));
            // Behind the clip the class has nothing.
            h = b.mul(h, keep)?;
            h = leaky(b, h, slope)?;
            let (from, to) = (channels, channels / 2);
            h = self.convs.up(b, h, &format!("decoder.upsampler.{stage}"), [to, from], *rate)?;
            keep = finer(b, keep, *rate)?;
            h = b.mul(h, keep)?;
            channels = to;
            let mut sum = None;
            for (index, (kernel, dilations)) in blocks.iter().enumerate() {
                let index = stage * blocks.len() + index;
                b.scope(format!("res{index}"));
                let at = format!("decoder.resblocks.{index}");
                let mut x = h;
                for (step, dilation) in dilations.iter().enumerate() {
                    let parts: &[(&str, usize)] = if paired {
                        &[("convs1", *dilation), ("convs2", 1)]
                    } else {
                        &[("convs", *dilation)]
                    };
                    let mut y = x;
                    for (part, dilation) in parts {
                        let padding = [kernel / 2 * dilation; 2];
                        let conv = Conv1d { padding, dilation: *dilation, ..Conv1d::new(*kernel) };
                        y = leaky(b, y, slope)?;
                        y = self.convs.conv(
                            b,
                            y,
                            &format!("{at}.{part}.{step}"),
                            [channels; 2],
                            conv,
                            true,
                        )?;
                        y = b.mul(y, keep)?;
                    }
                    x = b.add(y, x)?;
                }
                sum = Some(match sum {
                    None => x,
                    Some(sum) => b.add(sum, x)?,
                });
            }
            h = b.scale(sum.unwrap_or(h), 1.0 / blocks.len() as f32)?;
        }
        b.scope("post");
        h = leaky(b, h, LAST_SLOPE)?;
        h = self.convs.conv(b, h, "decoder.conv_post", [1, channels], ENDS, false)?;
        h = b.unary(UnaryOp::Tanh, h)?;
        b.reshape(h, &[frames, self.config.hop()])
    }
}
