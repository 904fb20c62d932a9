//! The layers that several graphs have: convolutions with weight norm, instance norms by a style, blocks of both.

use qhx_base::{Error, ErrorKind, Result};
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Conv1d, Elem, ReduceOp, TensorId, UnaryOp};
use qhx_graph::weight::{Storage, Weight};

use super::{CURVE, Model};
use crate::recipes::vocoder::{self, graph_name, leaky};

/// Epsilon of `InstanceNorm1d` and of the LayerNorms that are no ALBERT's.
pub(super) const EPS: f32 = 1e-5;
/// Slopes of LeakyReLUs: of blocks, of the generator, and in front of its last convolution.
pub(super) const SLOPES: [f32; 3] = [0.2, 0.1, 0.01];

/// The frames of a graph at one of its rates.
#[derive(Debug, Clone, Copy)]
pub(super) struct Level {
    pub(super) len: usize,
    /// `[1, 1, len]`: 1 in the clip, 0 behind it.
    pub(super) keep: TensorId,
    /// `[1, 1, 1]`: `len` over the frames of the clip.
    pub(super) fill: TensorId,
}

impl Model<'_> {
    /// `AdainResBlk1d`: frames of the first level, of `inputs` channels, become those of the second, of `outputs`. They
    /// are 0 behind the clip.
    pub(super) fn block(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        style: TensorId,
        at: &str,
        [inputs, outputs]: [usize; 2],
        [from, to]: [Level; 2],
    ) -> Result<TensorId> {
        let up = from.len != to.len;
        let three = Conv1d { padding: [1, 1], ..Conv1d::new(3) };
        let h = self.adain(b, x, style, &format!("{at}.norm1"), inputs, from)?;
        let mut h = leaky(b, h, SLOPES[0])?;
        if up {
            h = b.mul(h, from.keep)?;
            h = self.pool(b, h, &format!("{at}.pool"), inputs)?;
        }
        h = b.mul(h, to.keep)?;
        h = self.convs.conv(b, h, &format!("{at}.conv1"), [outputs, inputs], three, true)?;
        h = b.mul(h, to.keep)?;
        h = self.adain(b, h, style, &format!("{at}.norm2"), outputs, to)?;
        h = leaky(b, h, SLOPES[0])?;
        h = b.mul(h, to.keep)?;
        h = self.convs.conv(b, h, &format!("{at}.conv2"), [outputs; 2], three, true)?;
        h = b.mul(h, to.keep)?;
        let mut direct = x;
        if up {
            direct = interleave(b, direct, direct)?;
        }
        if inputs != outputs {
            direct = self.convs.conv(
                b,
                direct,
                &format!("{at}.conv1x1"),
                [outputs, inputs],
                Conv1d::new(1),
                false,
            )?;
        }
        let sum = b.add(h, direct)?;
        b.scale(sum, std::f32::consts::FRAC_1_SQRT_2)
    }

    /// `AdaIN1d` (Huang and Belongie 2017, arXiv 1703.06868): each channel without mean and of variance 1 over the
    /// clip, scaled and shifted by the style. `x` is 0 behind the clip, what is returned is not.
    pub(super) fn adain(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        style: TensorId,
        at: &str,
        channels: usize,
        level: Level,
    ) -> Result<TensorId> {
        let weight = self
            .checkpoint
            .matrix(&format!("{at}.fc.weight"), [2 * channels, self.config.style])?;
        let mut bias = self.checkpoint.values(&format!("{at}.fc.bias"), &[2 * channels])?;
        bias.iter_mut().take(channels).for_each(|gamma| *gamma += 1.0);
        let name = graph_name(at);
        let styled = b.linear(
            &format!("{name}_fc"),
            style,
            Weight::new(weight, Storage::Float),
            Some(bias),
        )?;
        let part = |b: &mut GraphBuilder, at: usize| {
            let part = b.slice(styled, 1, at * channels, (at + 1) * channels)?;
            b.reshape(part, &[1, channels, 1])
        };
        let (mut gamma, mut beta) = (part(b, 0)?, part(b, 1)?);
        // Few checkpoints have these: the norm was trained without.
        if self.checkpoint.has(&format!("{at}.norm.weight")) {
            let mut values = |part: &str| -> Result<TensorId> {
                let values = self.checkpoint.values(&format!("{at}.norm.{part}"), &[channels])?;
                b.constant(&format!("{name}_{part}"), Elem::Activation, &[1, channels, 1], values)
            };
            let (weight, bias) = (values("weight")?, values("bias")?);
            let shift = b.mul(gamma, bias)?;
            beta = b.add(beta, shift)?;
            gamma = b.mul(gamma, weight)?;
        }
        let over_clip = |b: &mut GraphBuilder, x: TensorId| {
            let mean = b.reduce(ReduceOp::Mean, x, 2)?;
            b.mul(mean, level.fill)
        };
        let mean = over_clip(b, x)?;
        let centred = b.sub(x, mean)?;
        let centred = b.mul(centred, level.keep)?;
        let squares = b.mul(centred, centred)?;
        let variance = over_clip(b, squares)?;
        let eps = b.scalar(variance, EPS)?;
        let variance = b.add(variance, eps)?;
        let scale = b.unary(UnaryOp::Rsqrt, variance)?;
        let scale = b.mul(scale, gamma)?;
        let y = b.mul(centred, scale)?;
        b.add(y, beta)
    }

    /// `ConvTranspose1d` of each channel by itself: kernel 3, stride 2, two frames for each.
    fn pool(
        &self,
        b: &mut GraphBuilder,
        x: TensorId,
        at: &str,
        channels: usize,
    ) -> Result<TensorId> {
        let values = self.convs.normed(at, &[channels, 1, 3])?;
        let bias = self.checkpoint.values(&format!("{at}.bias"), &[channels])?;
        let name = graph_name(at);
        let constant = |b: &mut GraphBuilder, part: &str, values: Vec<f32>| {
            b.constant(&format!("{name}_{part}"), Elem::Activation, &[1, channels, 1], values)
        };
        let tap = |at: usize| values.iter().skip(at).step_by(3).copied().collect::<Vec<_>>();
        let bias = constant(b, "bias", bias)?;
        let taps =
            [constant(b, "0", tap(0))?, constant(b, "1", tap(1))?, constant(b, "2", tap(2))?];
        let len = b.width(x)?;
        let next = b.slice(x, 2, 1, len)?;
        let none = b.constant(
            &format!("{name}_none"),
            Elem::Activation,
            &[1, channels, 1],
            vec![0.0; channels],
        )?;
        let next = b.concat(&[next, none], 2)?;
        let even = b.mul(x, taps[1])?;
        let even = b.add(even, bias)?;
        let odd = b.mul(x, taps[2])?;
        let following = b.mul(next, taps[0])?;
        let odd = b.add(odd, following)?;
        let odd = b.add(odd, bias)?;
        interleave(b, even, odd)
    }
}

/// `[1, channels, frames]` twice: a frame of the one and a frame of the other, in turns.
fn interleave(b: &mut GraphBuilder, even: TensorId, odd: TensorId) -> Result<TensorId> {
    let &[_, channels, len] = b.shape(even)? else {
        return Err(Error::new(ErrorKind::Internal, "frames of other than three dimensions"));
    };
    let [even, odd] = [b.reshape(even, &[channels, len, 1])?, b.reshape(odd, &[channels, len, 1])?];
    let both = b.concat(&[even, odd], 2)?;
    b.reshape(both, &[1, channels, 2 * len])
}

/// The inputs `keep` and `fill` as the levels of frames and of curves, and `fill` itself.
pub(super) fn levels(b: &mut GraphBuilder, frames: usize) -> Result<([Level; 2], TensorId)> {
    let keep = b.input("keep", Elem::Activation, &[frames, 1])?;
    let fill = b.input("fill", Elem::Activation, &[1, 2])?;
    let keep = b.reshape(keep, &[1, 1, frames])?;
    let frame = Level { len: frames, keep, fill: number(b, fill, 0)? };
    Ok(([frame, finer(b, frame, CURVE)?], fill))
}

/// A number of a row.
pub(super) fn number(b: &mut GraphBuilder, fill: TensorId, which: usize) -> Result<TensorId> {
    let one = b.slice(fill, 1, which, which + 1)?;
    b.reshape(one, &[1, 1, 1])
}

/// A level of as many frames for each.
pub(super) fn finer(b: &mut GraphBuilder, level: Level, times: usize) -> Result<Level> {
    let keep = vocoder::finer(b, level.keep, times)?;
    Ok(Level { len: level.len * times, keep, fill: level.fill })
}
