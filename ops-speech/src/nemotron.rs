//! `nemotron_transcribe`: Nemotron streaming from samples that come piece by piece to tokens and their times.
//!
//! Arithmetic: `NemotronAsrStreamingFeatureExtractor` and `NemotronAsrStreamingForRNNT` of `transformers` (Noroozi et
//! al. 2023, arXiv 2312.17279). Samples become frames, and frames chunks of rows as soon as the last frame of a chunk
//! is there; the graph carries what it needs of earlier chunks. How the audio is divided changes nothing, and what was
//! heard takes the same memory after hours.

use std::time::Instant;

use qhx_kit::audio::{Clip, FrontEnd, LogMel};
use qhx_kit::fill::FloatInput;
use qhx_kit::schema;
use qhx_kit::state::StateCarrier;
use qhx_op::{
    Answer, Error, GraphId, Host, MASK_VALUE, MediaRules, Modality, Op, OpDescription, OpenInfo,
    Recognizer, Result, Segment, SpanId, Task, View,
};
use serde::Deserialize;
use serde_json::json;

use crate::parakeet::{EncoderRows, TransducerSteps};

const NAME: &str = "nemotron_transcribe";
/// Convolutions that halve the frames, at most.
const MAX_HALVINGS: usize = 8;

/// `params.audio` of the manifest.
#[derive(Debug, Deserialize)]
struct AudioParams {
    front_end: FrontEnd,
    #[serde(default)]
    preemphasis: f32,
    /// Convolutions that halve the frames.
    halvings: usize,
    /// Rows of a chunk.
    rows: usize,
    /// Rows before a chunk that it sees.
    past: usize,
    /// The token that stands for none.
    blank: u32,
}

#[derive(Debug, Deserialize)]
struct Params {
    encoder: String,
    predictor: String,
    joint: String,
}

/// Speech to text by Nemotron streaming.
#[derive(Debug)]
pub struct Nemotron {
    frames: Frames,
    encoder: Encoder,
    transducer: TransducerSteps,
    /// Rows that were decoded.
    decoded: usize,
    /// Nothing was heard since the last reset.
    fresh: bool,
    encoder_span: SpanId,
    token_span: SpanId,
}

impl Op for Nemotron {
    fn describe() -> OpDescription {
        let graph = |what: &str| json!({"description": what, "type": "string"});
        let names = ["mel", "keep", "cmask", "y", "x", "state", "next", "logits", "pred"];
        OpDescription {
            name: NAME.to_owned(),
            summary: "Speech to text by Nemotron streaming, while the audio comes".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Transcribe],
            modalities: vec![Modality::Audio],
            params_schema: json!({
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "required": ["encoder", "predictor", "joint"],
                "properties": {
                    "encoder": graph("Graph from log-mel frames and states to rows of a transducer."),
                    "predictor": graph("Graph from a token and a state to what follows it."),
                    "joint": graph("Graph from a row of the encoder and one of the predictor to logits."),
                    "tensors": schema::tensors(names)
                }
            }),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let Params { encoder, predictor, joint } = host.params()?;
        let audio: AudioParams = host.require("/params/audio")?;
        let blank = audio.blank;
        let frames = Frames::new(&audio)?;
        let encoder = Encoder::open(host, &encoder, &audio, frames.log_mel.mels())?;
        let names = [predictor.as_str(), joint.as_str()];
        let transducer = TransducerSteps::open(host, names, encoder.width, blank)?;
        let (encoder_span, token_span) = (host.span("encoder"), host.span("tokens"));
        let mut op = Self {
            frames,
            encoder,
            transducer,
            decoded: 0,
            fresh: false,
            encoder_span,
            token_span,
        };
        op.reset(host)?;
        Ok(op)
    }

    fn info(&self) -> OpenInfo {
        let mut media = MediaRules::default();
        media.audio.rate = self.frames.front.rate;
        OpenInfo { media, streams: true, ..OpenInfo::default() }
    }

    fn recognizer(&mut self) -> Option<&mut dyn Recognizer> {
        Some(self)
    }
}

impl Recognizer for Nemotron {
    fn answer(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<Answer> {
        let ended = match segments {
            [] => true,
            [segment] => {
                let clip = Clip::of_segment(segment, self.frames.front.rate)?;
                self.frames.hear(clip.samples())?;
                false
            }
            _ => {
                let what = format!("{} segments, expected one clip, or none", segments.len());
                return Err(Error::prompt(what));
            }
        };
        if std::mem::take(&mut self.fresh) {
            self.transducer.begin(host)?;
        }
        if ended {
            self.frames.end()?;
        }
        let mut answer = Answer::default();
        while self.chunk(host, &mut answer)? {}
        if ended {
            self.reset(host)?;
        }
        Ok(answer)
    }

    fn reset(&mut self, host: &mut Host) -> Result<()> {
        self.frames.reset();
        self.encoder.states.reset(host);
        (self.decoded, self.fresh) = (0, true);
        Ok(())
    }
}

impl Nemotron {
    /// Encodes and decodes the next chunk; false where there is none yet.
    fn chunk(&mut self, host: &mut Host, answer: &mut Answer) -> Result<bool> {
        let Self { frames, encoder, transducer, decoded, .. } = self;
        let [first, rows] = [*decoded, encoder.rows];
        let all = frames.total.map(|total| lengths(total, encoder.halvings));
        // Rows of the audio, where it has ended.
        let end = all.as_ref().and_then(|lengths| lengths.last()).copied();
        let valid = match end {
            Some(end) => end.saturating_sub(first).min(rows),
            None if frames.made > (first + rows - 1) << encoder.halvings => rows,
            None => 0,
        };
        if valid == 0 {
            return Ok(false);
        }
        let start = Instant::now();
        let block = frames.block(encoder.frames);
        encoder.run(host, block, first, all.as_deref())?;
        let mut values = vec![0.0; valid * encoder.width];
        encoder.output.to_f32(host, 0, &mut values)?;
        host.dump_values("encoder", &values, &[valid, encoder.width])?;
        host.end(self.encoder_span, start);
        let start = Instant::now();
        let FrontEnd { hop, rate, .. } = frames.front;
        let step = ((hop << encoder.halvings) as f64 / f64::from(rate.max(1))) as f32;
        let read = EncoderRows { values: &values, width: encoder.width, step };
        transducer.follow(host, &read, first, answer)?;
        host.end(self.token_span, start);
        frames.drop_rows(rows << encoder.halvings);
        *decoded += rows;
        Ok(true)
    }
}

/// Frames of some audio, and the rows behind each of the convolutions that halve them.
fn lengths(frames: usize, halvings: usize) -> Vec<usize> {
    if frames == 0 {
        return vec![0; halvings + 1];
    }
    std::iter::successors(Some(frames), |len| Some(len / 2 + 1)).take(halvings + 1).collect()
}

/// Samples to frames, each as soon as its last sample is there.
#[derive(Debug)]
struct Frames {
    /// The front end of whole clips.
    front: FrontEnd,
    /// That of samples that begin with those of a frame.
    log_mel: LogMel,
    preemphasis: f32,
    /// Rows that the first chunk has in front of its first frame.
    before: usize,
    /// The sample before.
    last: Option<f32>,
    /// Samples less a part of those before them, from the beginning of the next frame on.
    samples: Vec<f32>,
    heard: usize,
    /// Frames so far.
    made: usize,
    /// Frames from the beginning of the next chunk on.
    rows: Vec<f32>,
    /// Frames of the audio, where it has ended.
    total: Option<usize>,
}

impl Frames {
    fn new(audio: &AudioParams) -> Result<Self> {
        let AudioParams { ref front_end, preemphasis, halvings, .. } = *audio;
        if !(0.0..1.0).contains(&preemphasis) {
            let found = format!("manifest /params/audio/preemphasis: {preemphasis}");
            return Err(Error::manifest(format!("{found}, expected a number from 0 to below 1")));
        }
        if !(2..=MAX_HALVINGS).contains(&halvings) {
            let found = format!("manifest /params/audio/halvings: {halvings}");
            return Err(Error::manifest(format!("{found}, expected 2 to {MAX_HALVINGS}")));
        }
        // Checks the front end, too.
        LogMel::new(front_end.clone())?;
        let aligned = FrontEnd { left: 0, span: front_end.frame, ..front_end.clone() };
        let mut frames = Self {
            front: front_end.clone(),
            log_mel: LogMel::new(aligned)?,
            preemphasis,
            before: (2 << halvings) - 2,
            last: None,
            samples: Vec::new(),
            heard: 0,
            made: 0,
            rows: Vec::new(),
            total: None,
        };
        frames.reset();
        Ok(frames)
    }

    fn reset(&mut self) {
        (self.last, self.heard, self.made, self.total) = (None, 0, 0, None);
        self.samples.clear();
        self.samples.resize(self.front.left, 0.0);
        self.rows.clear();
        self.rows.resize(self.before * self.log_mel.mels(), 0.0);
    }

    /// Takes samples.
    fn hear(&mut self, samples: &[f32]) -> Result<()> {
        self.heard += samples.len();
        self.samples.reserve(samples.len());
        for &sample in samples {
            // The first one is as it is.
            let before = self.last.replace(sample).map_or(0.0, |last| self.preemphasis * last);
            self.samples.push(sample - before);
        }
        self.make()
    }

    /// Takes silence behind the last sample, as far as frames begin before it ends.
    fn end(&mut self) -> Result<()> {
        let FrontEnd { frame, hop, left, span, .. } = self.front;
        let reach = span.saturating_sub(left);
        let total = self.heard.checked_sub(reach).map_or(0, |more| more / hop + 1);
        self.total = Some(total);
        if let Some(missing) = total.checked_sub(self.made + 1) {
            self.samples.resize(missing * hop + frame, 0.0);
            self.make()?;
        }
        Ok(())
    }

    /// Makes the frames that are whole.
    fn make(&mut self) -> Result<()> {
        let FrontEnd { frame, hop, rate, .. } = self.front;
        let Some(more) = self.samples.len().checked_sub(frame) else { return Ok(()) };
        let (count, mels) = (more / hop + 1, self.log_mel.mels());
        let from = self.rows.len();
        self.rows.resize(from + count * mels, 0.0);
        let clip = Clip::new(&self.samples, rate, rate)?;
        self.log_mel.write(clip, self.rows.get_mut(from..).unwrap_or_default())?;
        self.samples.drain(..(count * hop).min(self.samples.len()));
        self.made += count;
        Ok(())
    }

    /// The first `count` frames, with zeros behind those that there are.
    fn block(&mut self, count: usize) -> &[f32] {
        let len = count * self.log_mel.mels();
        if self.rows.len() < len {
            self.rows.resize(len, 0.0);
        }
        self.rows.get(..len).unwrap_or_default()
    }

    fn drop_rows(&mut self, count: usize) {
        let len = count * self.log_mel.mels();
        self.rows.drain(..len.min(self.rows.len()));
    }
}

/// The graph of the encoder, and its states.
#[derive(Debug)]
struct Encoder {
    graph: GraphId,
    mel: FloatInput,
    keep: FloatInput,
    mask: FloatInput,
    output: View,
    states: StateCarrier,
    halvings: usize,
    rows: usize,
    past: usize,
    /// Frames of a chunk, those before its own included.
    frames: usize,
    width: usize,
}

impl Encoder {
    fn open(host: &mut Host, name: &str, audio: &AudioParams, mels: usize) -> Result<Self> {
        let AudioParams { halvings, rows, past, .. } = *audio;
        let graph = host.require_graph("/plan/params/encoder", name)?;
        let port = host.output(graph, "y")?;
        let (found_rows, width) = host.rows_of(graph, port)?;
        let mel = FloatInput::require(host, graph, "mel")?;
        let keep = FloatInput::require(host, graph, "keep")?;
        let mask = FloatInput::require(host, graph, "cmask")?;
        let inner = |step: usize| {
            let left = 1usize << (halvings - step);
            left.checked_mul(rows)?.checked_add(left - 1)
        };
        let frames = inner(0).unwrap_or(0);
        let kept = (1..halvings).map(inner).sum::<Option<usize>>();
        let fits = rows > 0
            && found_rows == rows
            && frames.checked_mul(mels) == Some(mel.len())
            && kept == Some(keep.len())
            && past.checked_add(rows) == Some(mask.len());
        if !fits {
            return Err(Error::graph(format!(
                "graph {:?}: {} values of mel, {} of keep, {} of cmask and {found_rows} rows; expected {frames} frames of \
                 {mels} mels, {kept:?} inner rows, and keys of {past} rows before the chunk's {rows}, as \
                 params.audio has them",
                host.graph(graph).name,
                mel.len(),
                keep.len(),
                mask.len()
            )));
        }
        let output = host.view_for(graph, port)?;
        let states = StateCarrier::new(host, &[&[graph]])?;
        states.check_complete(host, 0)?;
        Ok(Self { graph, mel, keep, mask, output, states, halvings, rows, past, frames, width })
    }

    /// Encodes the frames of the chunk that begins at row `first`. `lengths` are those of the audio, if it has ended.
    fn run(
        &mut self,
        host: &mut Host,
        frames: &[f32],
        first: usize,
        lengths: Option<&[usize]>,
    ) -> Result<()> {
        let Self { halvings, rows, past, .. } = *self;
        let length = |step: usize| {
            lengths.and_then(|lengths| lengths.get(step)).copied().unwrap_or(usize::MAX)
        };
        let mut keep = Vec::with_capacity(self.keep.len());
        for step in 1..halvings {
            let left = 1 << (halvings - step);
            let (last, count) = ((first + rows - 1) * left, left * rows + left - 1);
            // The first of them lie before the audio in the first chunk.
            let kept = (0..count).map(|at| (last + 1 + at).checked_sub(count));
            keep.extend(
                kept.map(|row| f32::from(u8::from(row.is_some_and(|row| row < length(step))))),
            );
        }
        let seen =
            |key: usize| (first + key).checked_sub(past).is_some_and(|row| row < length(halvings));
        let mask: Vec<f32> =
            (0..past + rows).map(|key| if seen(key) { 0.0 } else { MASK_VALUE }).collect();
        self.mel.write(host, frames)?;
        self.keep.write(host, &keep)?;
        self.mask.write(host, &mask)?;
        host.execute(self.graph)?;
        self.states.commit(host, 0, rows)
    }
}
