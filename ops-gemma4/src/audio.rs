//! Audio: from samples to soft tokens.
//!
//! Arithmetic: `Gemma4AudioFeatureExtractor`, `Gemma4AudioModel` and `Gemma4MultimodalEmbedder` of `transformers`. The
//! graph holds convolutions and conformer; the frames before them and the projection behind them are here.

use qhx_kit::audio::{Clip, FrontEnd, LogMel};
use qhx_kit::fill::FloatInput;
use qhx_op::{Error, GraphId, Host, Result, View};
use serde::Deserialize;

use crate::tower::{self, Matrix, MediaTokens};

/// Frames that become one soft token.
const FRAMES: usize = 4;

/// `params.audio` of the manifest.
#[derive(Debug, Clone, Deserialize)]
struct Params {
    /// Width of the tower's rows.
    width: usize,
    max_soft_tokens: usize,
    eps: f32,
    front_end: FrontEnd,
    #[serde(flatten)]
    tokens: MediaTokens,
}

/// The audio tower.
#[derive(Debug)]
pub(crate) struct Audio {
    params: Params,
    graphs: Vec<Bound>,
    projector: Matrix,
    mel: LogMel,
}

/// A graph for clips of up to `frames` frames.
#[derive(Debug)]
struct Bound {
    graph: GraphId,
    frames: usize,
    mel: FloatInput,
    keep: FloatInput,
    y: View,
}

impl Audio {
    /// Binds the graphs that `plan.params.audio_enc` names; none where the bundle has no such tower. `hidden` is the
    /// width of the decoder's rows.
    pub fn open(host: &mut Host, hidden: usize) -> Result<Option<Self>> {
        let Some(found) = tower::graphs(host, "audio_enc", "mel")? else { return Ok(None) };
        let params: Params = host.require("/params/audio")?;
        let mel = LogMel::new(params.front_end.clone())?;
        let projector = Matrix::open(host, "/artifacts/audio/proj", hidden, params.width)?;
        let mut graphs = Vec::with_capacity(found.len());
        for (graph, frames) in found {
            let tokens = frames / FRAMES;
            for (role, rows, width) in
                [("mel", tokens * FRAMES, mel.mels()), ("keep", 2 * tokens, 1)]
            {
                tower::check(host, graph, host.input(graph, role)?, rows, width)?;
            }
            graphs.push(Bound {
                graph,
                frames,
                mel: FloatInput::require(host, graph, "mel")?,
                keep: FloatInput::require(host, graph, "keep")?,
                y: tower::rows_out(host, graph, tokens, params.width)?,
            });
        }
        Ok(Some(Self { params, graphs, projector, mel }))
    }

    /// The tokens around a clip.
    pub fn tokens(&self) -> MediaTokens {
        self.params.tokens
    }

    /// Samples a second.
    pub fn rate(&self) -> u32 {
        self.params.front_end.rate
    }

    /// Soft tokens that a clip of `samples` samples becomes.
    ///
    /// # Errors
    /// When it is too short or too long.
    pub fn count(&self, samples: usize) -> Result<usize> {
        let seconds = |samples: usize| samples as f64 / f64::from(self.rate().max(1));
        let tokens = self.mel.frames(samples).div_ceil(FRAMES);
        let max = self.graphs.last().map_or(0, |bound| bound.frames / FRAMES);
        let max = max.min(self.params.max_soft_tokens);
        if tokens == 0 {
            return Err(Error::prompt(format!(
                "audio of {:.3} s ({samples} samples) is shorter than one frame of the model",
                seconds(samples)
            )));
        }
        if tokens > max {
            let hop = self.params.front_end.hop;
            return Err(Error::prompt(format!(
                "audio of {:.1} s is {tokens} soft tokens, the bundle takes {max} ({:.1} s) at most; take less of it, \
                 or have `qhx transcribe` split it into chunks",
                seconds(samples),
                seconds(max * FRAMES * hop)
            )));
        }
        Ok(tokens)
    }

    /// The soft tokens of a clip, rows as wide as the decoder's, and their number.
    pub fn soft_tokens(&mut self, host: &mut Host, clip: Clip<'_>) -> Result<(usize, Vec<f32>)> {
        let tokens = self.count(clip.samples().len())?;
        let Some(bound) = self.graphs.iter().find(|bound| bound.frames >= tokens * FRAMES) else {
            return Err(Error::graph("no graph takes the audio"));
        };
        let mels = self.mel.mels();
        let mut rows = vec![0.0; bound.frames * mels];
        let valid = self.mel.write(clip, &mut rows)?;
        host.dump_values("mel", &rows[..valid * mels], &[valid, mels])?;
        bound.mel.write(host, &rows)?;
        bound.keep.fill(host, 0.0);
        bound.keep.write_at(host, 0, &vec![1.0; valid.div_ceil(2)])?;
        host.execute(bound.graph)?;
        let width = self.params.width;
        let mut rows = tower::read(host, bound.y, tokens * width)?;
        tower::normalise(&mut rows, width, self.params.eps);
        Ok((tokens, self.projector.project(host, &rows)?))
    }
}
