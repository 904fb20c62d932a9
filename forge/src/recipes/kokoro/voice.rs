//! The decoder and the vocoder: frames to spectra.

use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Conv1d, Elem, Graph, TensorId, UnaryOp};

use super::config::Config;
use super::layers::{Level, SLOPES, finer, levels, number};
use super::{CURVE, Model};
use crate::kit::filters;
use crate::recipes::vocoder::{by_channels, graph_name, leaky};

impl Model<'_> {
    /// `Decoder` and its `Generator`, without what is before its first convolution over the source and behind its last.
    pub(super) fn voice(&self, name: &str, frames: usize) -> Result<Graph> {
        let Config { hidden, style, wide, narrow, initial, rates, fft, ref blocks, .. } =
            *self.config;
        let mut b = GraphBuilder::new(name);
        let x = b.input("x", Elem::Activation, &[frames, hidden])?;
        let style = b.input("style", Elem::Activation, &[1, style])?;
        let curves = b.input("curves", Elem::Activation, &[2, frames])?;
        let (bins, fine) = (fft + 2, CURVE * frames * rates[0] * rates[1]);
        let lead = rates[1] / 2;
        let source = b.input("source", Elem::Activation, &[bins, fine + rates[1]])?;
        let ([frame, curve], fills) = levels(&mut b, frames)?;
        let coarse = finer(&mut b, curve, rates[0])?;
        let last = {
            let level = finer(&mut b, coarse, rates[1])?;
            let one = b.constant("one", Elem::Activation, &[1, 1, 1], vec![1.0])?;
            let keep = b.concat(&[one, level.keep], 2)?;
            Level { len: level.len + 1, keep, fill: number(&mut b, fills, 1)? }
        };
        let x = by_channels(&mut b, x)?;
        let curves = b.reshape(curves, &[1, 2, frames])?;
        let h = b.concat(&[x, curves], 1)?;
        b.scope("encode");
        let mut h =
            self.block(&mut b, h, style, "decoder.encode", [hidden + 2, wide], [frame; 2])?;
        let again = self.convs.conv(
            &mut b,
            x,
            "decoder.asr_res.0",
            [narrow, hidden],
            Conv1d::new(1),
            true,
        )?;
        let again = b.mul(again, frame.keep)?;
        for block in 0..4 {
            b.scope(format!("decode{block}"));
            h = b.concat(&[h, again, curves], 1)?;
            let (to, level) = if block == 3 { (initial, curve) } else { (wide, frame) };
            let sizes = [wide + narrow + 2, to];
            h = self.block(
                &mut b,
                h,
                style,
                &format!("decoder.decode.{block}"),
                sizes,
                [frame, level],
            )?;
        }
        let source = b.reshape(source, &[1, bins, fine + rates[1]])?;
        let mut channels = initial;
        for (stage, level) in [coarse, last].into_iter().enumerate() {
            let at = |part: &str, index: usize| format!("decoder.generator.{part}.{index}");
            let (from, rate) = (channels, rates[stage]);
            channels /= 2;
            b.scope(format!("source{stage}"));
            let (seen, conv, kernel) = match stage {
                0 => (source, Conv1d { stride: rates[1], ..Conv1d::new(2 * rates[1]) }, 7),
                _ => (b.slice(source, 2, lead, lead + fine + 1)?, Conv1d::new(1), 11),
            };
            let name = at("noise_convs", stage);
            let shape = [channels, bins, conv.kernel];
            let (weight, bias) = filters(self.checkpoint, &name, &shape)?;
            let seen = b.conv1d("conv", seen, weight, Some(bias), conv)?;
            let seen = b.mul(seen, level.keep)?;
            let block = (kernel, [1, 3, 5]);
            let seen = self.residual(
                &mut b,
                [seen, style],
                &at("noise_res", stage),
                channels,
                block,
                level,
            )?;
            b.scope(format!("up{stage}"));
            h = leaky(&mut b, h, SLOPES[1])?;
            h = self.convs.up(&mut b, h, &at("ups", stage), [channels, from], rate)?;
            if stage == 1 {
                // The second frame again in front of the first.
                let second = b.slice(h, 2, 1, 2)?;
                h = b.concat(&[second, h], 2)?;
            }
            h = b.mul(h, level.keep)?;
            h = b.add(h, seen)?;
            let mut sum = None;
            for (index, block) in blocks.iter().enumerate() {
                let index = stage * blocks.len() + index;
                b.scope(format!("res{index}"));
                let y = self.residual(
                    &mut b,
                    [h, style],
                    &at("resblocks", index),
                    channels,
                    *block,
                    level,
                )?;
                sum = Some(match sum {
                    None => y,
                    Some(sum) => b.add(sum, y)?,
                });
            }
            let sum = sum.unwrap_or(h);
            h = b.scale(sum, 1.0 / blocks.len() as f32)?;
        }
        b.scope("post");
        let h = leaky(&mut b, h, SLOPES[2])?;
        let conv = Conv1d { padding: [3, 3], ..Conv1d::new(7) };
        let h = self.convs.conv(
            &mut b,
            h,
            "decoder.generator.conv_post",
            [bins, channels],
            conv,
            true,
        )?;
        let h = b.reshape(h, &[bins, fine + 1])?;
        b.output("spectrum", h)?;
        b.finish()
    }

    /// `AdaINResBlock1`.
    fn residual(
        &self,
        b: &mut GraphBuilder,
        [mut x, style]: [TensorId; 2],
        at: &str,
        channels: usize,
        (kernel, dilations): (usize, [usize; 3]),
        level: Level,
    ) -> Result<TensorId> {
        for (index, dilation) in dilations.into_iter().enumerate() {
            let mut h = x;
            for (which, dilation) in [(1, dilation), (2, 1)] {
                let part = |name: &str| format!("{at}.{name}{which}.{index}");
                h = self.adain(b, h, style, &part("adain"), channels, level)?;
                h = self.snake(b, h, &part("alpha"), channels)?;
                h = b.mul(h, level.keep)?;
                let padding = [(kernel - 1) * dilation / 2; 2];
                let conv = Conv1d { padding, dilation, ..Conv1d::new(kernel) };
                h = self.convs.conv(b, h, &part("convs"), [channels; 2], conv, true)?;
                h = b.mul(h, level.keep)?;
            }
            x = b.add(h, x)?;
        }
        Ok(x)
    }

    /// `x + sin²(a·x) / a` (Ziyin et al. 2020, arXiv 2006.08195).
    fn snake(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        name: &str,
        channels: usize,
    ) -> Result<TensorId> {
        let mut alpha = self.checkpoint.values(name, &[1, channels, 1])?;
        if self.checkpoint.seed().is_some() {
            // Drawn ones may be 0.
            alpha.fill(1.0);
        }
        let inverse: Vec<_> = alpha.iter().map(|a| 1.0 / a).collect();
        if inverse.iter().any(|value| !value.is_finite()) {
            let what = format!("tensor {name} holds 0, expected numbers to divide by");
            return Err(Error::new(ErrorKind::Artifact, what));
        }
        let name = graph_name(name);
        let mut constant = |end: &str, values| {
            b.constant(&format!("{name}_{end}"), Elem::Activation, &[1, channels, 1], values)
        };
        let (alpha, inverse) = (constant("a", alpha)?, constant("inverse", inverse)?);
        let sine = b.mul(x, alpha)?;
        let sine = b.unary(UnaryOp::Sin, sine)?;
        let square = b.mul(sine, sine)?;
        let square = b.mul(square, inverse)?;
        b.add(x, square)
    }
}
