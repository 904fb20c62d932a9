//! `parakeet_transcribe`: Parakeet from samples to tokens and their times.
//!
//! Arithmetic: `ParakeetFeatureExtractor`, `ParakeetForCTC`, `ParakeetForRNNT` and `ParakeetForTDT` of `transformers`
//! (Rekesh et al. 2023, arXiv 2305.05084). A clip goes through the shortest graph of the encoder that holds it. What
//! follows is on the host: of a CTC head the likeliest token of each row, without repetitions and blanks (Graves et al.
//! 2006); of a transducer its steps (`transducer.rs`), over two small graphs.

mod rows;
mod transducer;

pub(crate) use rows::Rows as EncoderRows;
pub(crate) use transducer::Transducer as TransducerSteps;

use std::time::Instant;

use qhx_kit::audio::{Clip, FrontEnd};
use qhx_kit::fill::FloatInput;
use qhx_kit::{OneOrMany, schema};
use qhx_op::{
    Answer, Error, GraphId, Host, MediaRules, Modality, Op, OpDescription, OpenInfo, Recognizer,
    Result, Segment, SpanId, Task, View,
};
use serde::Deserialize;
use serde_json::json;

use crate::features::Features;
use rows::{Rows, likeliest};
use transducer::Transducer;

const NAME: &str = "parakeet_transcribe";
const ENCODER: &str = "/plan/params/encoder";

/// `params.audio` of the manifest.
#[derive(Debug, Deserialize)]
struct AudioParams {
    front_end: FrontEnd,
    #[serde(default)]
    preemphasis: f32,
    /// Frames of a row of the encoder.
    subsampling: usize,
    /// The token that stands for none.
    blank: u32,
}

#[derive(Debug, Deserialize)]
struct Params {
    encoder: OneOrMany,
    predictor: Option<String>,
    joint: Option<String>,
}

/// Speech to text by Parakeet.
#[derive(Debug)]
pub struct Parakeet {
    features: Features,
    /// The shortest first.
    windows: Vec<Window>,
    subsampling: usize,
    blank: u32,
    /// Values of a row that the encoder gives.
    width: usize,
    /// None with a CTC head.
    transducer: Option<Transducer>,
    encoder_span: SpanId,
    token_span: SpanId,
}

impl Op for Parakeet {
    fn describe() -> OpDescription {
        let graph = |what: &str| json!({"description": what, "type": "string"});
        OpDescription {
            name: NAME.to_owned(),
            summary: "Speech to text by Parakeet, CTC or transducer, with the times of tokens"
                .to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Transcribe],
            modalities: vec![Modality::Audio],
            params_schema: json!({
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "required": ["encoder"],
                "properties": {
                    "encoder": schema::graphs(
                        "Graphs from log-mel frames to logits, or to rows of a transducer; each for clips of another length."
                    ),
                    "predictor": graph("Graph from a token and a state to what follows it, of a transducer."),
                    "joint": graph("Graph from a row of the encoder and one of the predictor to logits."),
                    "tensors": schema::tensors(["mel", "keep", "logits", "y", "x", "state", "next", "pred"])
                }
            }),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let Params { encoder, predictor, joint } = host.params()?;
        let AudioParams { front_end, preemphasis, subsampling, blank } =
            host.require("/params/audio")?;
        let features = Features::new(front_end, preemphasis)?;
        let output = if joint.is_some() { "y" } else { "logits" };
        let mut windows = Vec::new();
        for graph in encoder.graphs(host, ENCODER)? {
            windows.push(Window::open(host, graph, &features, subsampling, output)?);
        }
        windows.sort_by_key(|window| window.frames);
        let width = windows.first().map_or(0, |window| window.width);
        if let Some(other) = windows.iter().find(|window| window.width != width) {
            return Err(Error::graph(format!(
                "graph {:?}: rows of {} values, expected {width} as those of the other graphs of {ENCODER}",
                host.graph(other.graph).name,
                other.width
            )));
        }
        let transducer = match (predictor, joint) {
            (Some(predictor), Some(joint)) => {
                Some(Transducer::open(host, [&predictor, &joint], width, blank)?)
            }
            (None, None) if (blank as usize) < width => None,
            (None, None) => {
                return Err(Error::manifest(format!(
                    "manifest /params/audio/blank: found {blank}, expected a token below {width}, the number of logits"
                )));
            }
            _ => {
                let what = "manifest /plan/params: one of predictor and joint is named, expected both or none";
                return Err(Error::manifest(what));
            }
        };
        Ok(Self {
            features,
            windows,
            subsampling,
            blank,
            width,
            transducer,
            encoder_span: host.span("encoder"),
            token_span: host.span("tokens"),
        })
    }

    fn info(&self) -> OpenInfo {
        let mut media = MediaRules::default();
        media.audio.rate = self.features.front_end().rate;
        OpenInfo { media, ..OpenInfo::default() }
    }

    fn recognizer(&mut self) -> Option<&mut dyn Recognizer> {
        Some(self)
    }
}

impl Recognizer for Parakeet {
    fn answer(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<Answer> {
        let [segment] = segments else {
            return Err(Error::prompt(format!("{} segments, expected one clip", segments.len())));
        };
        let FrontEnd { rate, hop, .. } = *self.features.front_end();
        let clip = Clip::of_segment(segment, rate)?;
        let frames = self.features.frames(clip);
        let start = Instant::now();
        let longest = self.windows.last().map_or(0, |window| window.frames);
        let Some(window) = self.windows.iter_mut().find(|window| window.frames >= frames) else {
            let seconds = |samples: usize| samples as f64 / f64::from(rate.max(1));
            return Err(Error::prompt(format!(
                "audio of {:.2} s, the encoder takes {:.2} s at once; take less of it, or have `qhx transcribe` cut it \
                 into windows",
                seconds(clip.samples().len()),
                seconds(longest * hop)
            )));
        };
        if frames == 0 {
            return Ok(Answer::default());
        }
        let rows = frames.div_ceil(self.subsampling);
        let mut values = vec![0.0; rows * self.width];
        window.run(host, &mut self.features, clip, frames, &mut values)?;
        host.end(self.encoder_span, start);
        let start = Instant::now();
        let step = (self.subsampling * hop) as f32 / rate.max(1) as f32;
        let rows = Rows { values: &values, width: self.width, step };
        let answer = match &mut self.transducer {
            Some(transducer) => {
                transducer.answer(host, &rows, (frames + 1).div_ceil(self.subsampling))?
            }
            None => letters(host, window.graph, &rows, self.blank)?,
        };
        host.end(self.token_span, start);
        Ok(answer)
    }
}

/// The likeliest token of each row of logits, without repetitions and blanks. A token lasts from the first row of its
/// repetitions to the end of the last one.
fn letters(host: &Host, graph: GraphId, rows: &Rows<'_>, blank: u32) -> Result<Answer> {
    let (mut answer, mut last) = (Answer::default(), blank);
    for (at, row) in rows.values.chunks_exact(rows.width).enumerate() {
        let token = likeliest(host, graph, row)?;
        if token != blank {
            let end = rows.seconds(at + 1);
            match answer.times.last_mut().filter(|_| token == last) {
                Some(time) => time[1] = end,
                None => {
                    answer.tokens.push(token);
                    answer.times.push([rows.seconds(at), end]);
                }
            }
        }
        last = token;
    }
    Ok(answer)
}

/// A graph of the encoder.
#[derive(Debug)]
struct Window {
    graph: GraphId,
    /// Frames that it takes.
    frames: usize,
    mel: FloatInput,
    keep: FloatInput,
    output: View,
    width: usize,
    role: &'static str,
}

impl Window {
    fn open(
        host: &mut Host,
        graph: GraphId,
        features: &Features,
        subsampling: usize,
        role: &'static str,
    ) -> Result<Self> {
        let (frames, mels) = {
            let port = host.input(graph, "mel")?;
            host.rows_of(graph, port)?
        };
        let port = host.output(graph, role)?;
        let (rows, width) = host.rows_of(graph, port)?;
        let mel = FloatInput::require(host, graph, "mel")?;
        let keep = FloatInput::require(host, graph, "keep")?;
        let fits = subsampling > 0 && rows.checked_mul(subsampling) == Some(frames);
        if mels != features.mels() || keep.len() != frames || !fits {
            return Err(Error::graph(format!(
                "graph {:?}: {frames} frames of {mels} mels, {} values of keep, and {rows} rows; expected {} mels as \
                 params.audio.front_end makes them, a value for each frame, and a row for each {subsampling} frames",
                host.graph(graph).name,
                keep.len(),
                features.mels()
            )));
        }
        let output = host.view_for(graph, port)?;
        Ok(Self { graph, frames, mel, keep, output, width, role })
    }

    /// Encodes a clip of `frames` frames, and reads as many values as `values` has.
    fn run(
        &self,
        host: &mut Host,
        features: &mut Features,
        clip: Clip<'_>,
        frames: usize,
        values: &mut [f32],
    ) -> Result<()> {
        let mels = features.mels();
        let mut rows = vec![0.0; self.frames * mels];
        features.write(clip, &mut rows)?;
        host.dump_values("mel", &rows, &[self.frames, mels])?;
        self.mel.write(host, &rows)?;
        let keep: Vec<f32> = (0..self.frames).map(|at| f32::from(u8::from(at < frames))).collect();
        self.keep.write(host, &keep)?;
        host.execute(self.graph)?;
        self.output.to_f32(host, 0, values)?;
        let name = if self.role == "y" { "encoder" } else { "encoder_logits" };
        host.dump_values(name, values, &[values.len() / self.width.max(1), self.width])
    }
}
