//! `moonshine_transcribe`: samples to the frames of Moonshine's encoder.
//!
//! Arithmetic: `MoonshineEncoder` of `transformers` (Jeffries et al. 2024, arXiv 2410.15608). The first convolution and
//! the norm over all of its rows are computed here, in f32: that norm is of the clip's rows alone, and the samples of a
//! quiet clip are smaller than f16 can tell apart.

use qhx_kit::OneOrMany;
use qhx_kit::audio::Clip;
use qhx_kit::fill::{Embedding, FloatInput};
use qhx_kit::kernels::Linear;
use qhx_op::{Error, GraphId, Host, Result};
use serde::Deserialize;

use crate::dictation::{Dictation, Family};
use crate::listener::Ear;

const ENCODER: &str = "/plan/params/encoder";

/// Speech to text by Moonshine.
pub type Moonshine = Dictation<Frames>;

/// `params.audio` of the manifest.
#[derive(Debug, Clone, Deserialize)]
struct AudioParams {
    /// Samples of a second.
    rate: u32,
    /// Samples that a frame sees, and samples from one frame to the next.
    frame: usize,
    hop: usize,
    /// Frames that each convolution in the graph sees, and by which it moves on.
    taps: Vec<usize>,
    strides: Vec<usize>,
    /// Seconds that the longest graph takes.
    window: usize,
    /// Epsilon of the norm over frames.
    eps: f32,
}

impl AudioParams {
    fn check(&self) -> Result<()> {
        let sizes = [self.frame, self.hop, self.window].into_iter();
        let legal = |size: usize| (1..1 << 16).contains(&size);
        let mut all = sizes.chain(self.taps.iter().copied()).chain(self.strides.iter().copied());
        if all.all(legal) && self.taps.len() == self.strides.len() && self.eps > 0.0 {
            return Ok(());
        }
        Err(Error::manifest(
            "manifest /params/audio: expected sizes of frames and convolutions above 0, as many taps as strides, and \
             an eps above 0",
        ))
    }

    /// Frames of samples.
    fn frames(&self, samples: usize) -> usize {
        steps(samples, self.frame, self.hop)
    }

    /// Rows that the graph makes of frames.
    fn rows(&self, frames: usize) -> usize {
        let pairs = self.taps.iter().zip(&self.strides);
        pairs.fold(frames, |size, (taps, stride)| steps(size, *taps, *stride))
    }

    /// Samples of a clip that is one row.
    fn least(&self) -> usize {
        let frames =
            self.taps.iter().zip(&self.strides).rev().fold(1usize, |size, (taps, stride)| {
                (size - 1).saturating_mul(*stride).saturating_add(*taps)
            });
        (frames - 1).saturating_mul(self.hop).saturating_add(self.frame)
    }
}

/// Places of a filter that sees `taps` of `size`.
fn steps(size: usize, taps: usize, stride: usize) -> usize {
    size.checked_sub(taps).map_or(0, |rest| rest / stride + 1)
}

/// Frames of a clip for the shortest graph that holds it.
#[derive(Debug)]
pub struct Frames {
    params: AudioParams,
    /// Filters `[hidden, frame]`, and weight and bias of the norm.
    filters: Vec<f32>,
    norm: Vec<f32>,
    hidden: usize,
    /// The shortest first.
    windows: Vec<Window>,
}

/// A graph of the encoder.
#[derive(Debug)]
struct Window {
    graph: GraphId,
    /// Frames that it takes, and rows that it makes of them.
    frames: usize,
    rows: usize,
    input: FloatInput,
    keep: FloatInput,
}

impl Family for Frames {
    const NAME: &'static str = "moonshine_transcribe";
    const SUMMARY: &'static str = "Speech to text by Moonshine";
    const INPUTS: &'static [&'static str] = &["frames", "keep"];

    fn open(host: &mut Host) -> Result<Self> {
        #[derive(Deserialize)]
        struct Params {
            encoder: OneOrMany,
        }
        let Params { encoder } = host.params()?;
        let params: AudioParams = host.require("/params/audio")?;
        params.check()?;
        let mut windows = Vec::new();
        let mut hidden = 0;
        for graph in encoder.graphs(host, ENCODER)? {
            let (frames, width) = {
                let port = host.input(graph, "frames")?;
                host.rows_of(graph, port)?
            };
            let input = FloatInput::require(host, graph, "frames")?;
            let keep = FloatInput::require(host, graph, "keep")?;
            let rows = keep.len();
            // What stands behind the last frame that a row sees only fills the graph.
            if rows == 0 || params.rows(frames) < rows || (hidden != 0 && width != hidden) {
                return Err(Error::graph(format!(
                    "graph {:?}: {frames} frames of {width} values and {rows} values of keep, expected one for each of \
                     at most {} rows, and frames as wide as those of the other graphs",
                    host.graph(graph).name,
                    params.rows(frames)
                )));
            }
            hidden = width;
            windows.push(Window { graph, frames, rows, input, keep });
        }
        windows.sort_by_key(|window| window.rows);
        let table = |host: &mut Host, field: &str, width: usize, rows: usize| {
            let pointer = format!("/artifacts/frames/{field}");
            let table = Embedding::open_at(host, &pointer, width, Some(rows))?;
            let mut values = vec![0.0; rows * width];
            for (row, values) in values.chunks_exact_mut(width.max(1)).enumerate() {
                table.read(host, row as u32, 0, values)?;
            }
            Ok::<_, Error>(values)
        };
        let filters = table(host, "convolution", params.frame, hidden)?;
        let norm = table(host, "norm", hidden, 2)?;
        Ok(Self { params, filters, norm, hidden, windows })
    }
}

impl Ear for Frames {
    fn graphs(&self) -> Vec<GraphId> {
        self.windows.iter().map(|window| window.graph).collect()
    }

    fn rate(&self) -> u32 {
        self.params.rate
    }

    fn most(&self) -> usize {
        self.params.window.saturating_mul(self.params.rate as usize)
    }

    fn write(&mut self, host: &mut Host, clip: Clip<'_>) -> Result<GraphId> {
        let AudioParams { frame, hop, .. } = self.params;
        let mut samples = clip.samples().to_vec();
        // Less than a row is said in silence.
        samples.resize(samples.len().max(self.params.least()), 0.0);
        let frames = self.params.frames(samples.len());
        let rows = self.params.rows(frames);
        let Some(window) = self.windows.iter().find(|window| window.rows >= rows) else {
            let most = self.windows.last().map_or(0, |window| window.rows);
            return Err(Error::prompt(format!(
                "audio of {} samples is {rows} rows, the encoder takes {most}",
                samples.len()
            )));
        };
        let frames = frames.min(window.frames);
        let seen: Vec<f32> =
            (0..frames).flat_map(|at| samples.iter().skip(at * hop).take(frame)).copied().collect();
        let mut values = vec![0.0; frames * self.hidden];
        Linear::new(&self.filters, None, frame, self.hidden)?.write(host, &seen, &mut values)?;
        values.iter_mut().for_each(|value| *value = value.tanh());
        normalise(&mut values, &self.norm, self.params.eps);
        host.dump_values("frames", &values, &[frames, self.hidden])?;
        values.resize(window.frames * self.hidden, 0.0);
        window.input.write(host, &values)?;
        let keep: Vec<f32> = (0..window.rows).map(|at| f32::from(u8::from(at < rows))).collect();
        window.keep.write(host, &keep)?;
        Ok(window.graph)
    }
}

/// GroupNorm of one group (Wu and He 2018, arXiv 1803.08494): all values have one mean and one deviation; weight and
/// bias are of their columns.
fn normalise(values: &mut [f32], norm: &[f32], eps: f32) {
    let (weight, bias) = norm.split_at(norm.len() / 2);
    let count = values.len() as f64;
    let mean = values.iter().map(|value| f64::from(*value)).sum::<f64>() / count;
    let squares = values.iter().map(|value| (f64::from(*value) - mean).powi(2)).sum::<f64>();
    let factor = 1.0 / (squares / count + f64::from(eps)).sqrt();
    for row in values.chunks_exact_mut(weight.len().max(1)) {
        for ((value, weight), bias) in row.iter_mut().zip(weight).zip(bias) {
            *value = ((f64::from(*value) - mean) * factor) as f32 * weight + bias;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_of_one_clip_have_one_mean_and_one_deviation() {
        let mut values = [1.0, 3.0, 1.0, 3.0];
        normalise(&mut values, &[1.0, 2.0, 0.0, 0.5], 1e-5);
        for (found, expected) in values.iter().zip([-1.0, 2.5, -1.0, 2.5]) {
            assert!((found - expected).abs() < 1e-4, "{values:?}");
        }
        let mut silence = [0.0; 4];
        normalise(&mut silence, &[1.0, 2.0, 0.0, 0.5], 1e-5);
        assert_eq!(silence, [0.0, 0.5, 0.0, 0.5]);
    }

    #[test]
    fn a_row_sees_what_the_shortest_clip_has() {
        let params = AudioParams {
            rate: 16_000,
            frame: 127,
            hop: 64,
            taps: vec![7, 3],
            strides: vec![3, 2],
            window: 30,
            eps: 1e-5,
        };
        let rows = |samples| params.rows(params.frames(samples));
        let least = params.least();
        assert_eq!((least, rows(least), rows(least - 1)), (895, 1, 0));
        assert_eq!(rows(480_000), 1248);
    }
}
