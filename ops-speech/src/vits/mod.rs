//! `vits_speak`: VITS from symbols to samples.
//!
//! Arithmetic: `VitsModel` of `transformers` (`modeling_vits.py`). A text is tokens: the number of a voice, the speed
//! and the deviations of both noises in thousandths, a seed, and its symbols. Durations come first, of all of it
//! (`durations.rs`); then the frames, with noise, go through the shortest graph that holds them. More frames than the
//! longest takes go through it in parts with as many frames around each as its samples depend on.

mod durations;

use std::time::Instant;

use qhx_kit::fill::FloatInput;
use qhx_kit::{OneOrMany, schema};
use qhx_op::{
    BufferId, DType, Error, GraphId, Host, Modality, Op, OpDescription, OpenInfo, Result, Segment,
    SoundOut, SpanId, Synthesizer, Task, View, text,
};
use serde::Deserialize;
use serde_json::json;

use crate::dense::normal;
use crate::ports::{PLACE, input, kept, output, padded};
use durations::{Durations, DurationsParams, Sizes};

const NAME: &str = "vits_speak";
/// Speeds, in thousandths, that a text may have.
const SPEEDS: std::ops::RangeInclusive<u32> = 250..=4000;
/// Deviations of noise, in thousandths.
const NOISES: std::ops::RangeInclusive<u32> = 0..=4000;
/// Tokens in front of the symbols: voice, speed, noise of frames, noise of durations, seed.
const HEAD: usize = 5;
/// Longest time that a symbol lasts, in seconds.
const LONGEST: f32 = 20.0;
/// Largest logarithm of a deviation: beyond, f32 overflows.
const MAX_LOG: f32 = 60.0;

/// `params.speech` of the manifest.
#[derive(Debug, Deserialize)]
struct SpeechParams {
    rate: u32,
    voices: Vec<String>,
    /// Symbols in front of a text and behind it.
    front: Vec<u32>,
    back: Vec<u32>,
    /// Symbol behind each one of a text.
    blank: Option<u32>,
    /// Symbols of a text.
    limit: usize,
    /// Samples of a frame, and its channels.
    hop: usize,
    flow: usize,
    /// Frames on either side that a sample depends on.
    around: usize,
    speakers: usize,
    /// Width of a speaker's embedding; 0 without speakers.
    speaker: usize,
    /// Length of a symbol, times the model's own.
    length: f32,
    durations: DurationsParams,
}

#[derive(Debug, Deserialize)]
struct Params {
    encoder: OneOrMany,
    voice: OneOrMany,
}

/// A voice by VITS.
#[derive(Debug)]
pub struct Vits {
    params: SpeechParams,
    weights: Durations,
    /// Graphs over symbols, the shortest first.
    texts: Vec<Text>,
    /// Graphs over frames, the shortest first.
    windows: Vec<Window>,
    samples: BufferId,
    pending: Option<Pending>,
    spans: [SpanId; 2],
}

/// A text that is being spoken, and the position in it.
#[derive(Debug)]
struct Pending {
    /// Number of the symbol of each frame.
    symbols: Vec<u32>,
    /// Mean and deviation of each symbol's channels, `[symbols, 2 · flow]`.
    stats: Vec<f32>,
    /// Embedding of the speaker.
    style: Vec<f32>,
    noise: f32,
    seed: u64,
    /// The first frame that is not said.
    next: usize,
}

impl Op for Vits {
    fn describe() -> OpDescription {
        OpDescription {
            name: NAME.to_owned(),
            summary: "Symbols to audio by VITS".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Speak],
            modalities: vec![Modality::Text],
            params_schema: json!({
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "required": ["encoder", "voice"],
                "properties": {
                    "encoder": schema::graphs("Symbols to statistics of frames; each graph for texts of another length."),
                    "voice": schema::graphs("Frames to samples; each graph for clips of another length."),
                    "tensors": schema::tensors(["x", "y", "keep", "stats", "style", "samples"])
                }
            }),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let Params { encoder, voice } = host.params()?;
        let params: SpeechParams = host.require("/params/speech")?;
        let [hidden, tokens] = [host.require("/params/hidden")?, host.require("/params/vocab")?];
        let SpeechParams { hop, flow, speakers, speaker, rate, length, around, .. } = params;
        let sizes = [hop, flow, speakers, hidden, tokens, rate as usize];
        let ids = params.front.iter().chain(&params.back).chain(&params.blank);
        let legal = sizes.iter().all(|n| (1..=1 << 20).contains(n))
            && speaker <= 1 << 16
            && around <= 1 << 16;
        let beyond = ids.clone().any(|id| *id as usize >= tokens) || ids.count() > 16;
        if !legal || beyond || params.voices.len() != speakers || !(length > 0.0 && length <= 16.0)
        {
            return Err(Error::manifest(format!(
                "{PLACE}: {sizes:?} samples and channels of a frame, speakers, channels of a symbol, symbols and samples \
                 a second, {} voices, length {length}: expected numbers above 0, a voice for each speaker, a length of \
                 16 at most, and symbols around a text below the number of symbols",
                params.voices.len()
            )));
        }
        let mut texts = Vec::new();
        for graph in encoder.graphs(host, "/plan/params/encoder")? {
            texts.push(Text::open(host, graph, hidden, flow)?);
        }
        texts.sort_by_key(|text| text.rows);
        let mut windows = Vec::new();
        for graph in voice.graphs(host, "/plan/params/voice")? {
            windows.push(Window::open(host, graph, &params)?);
        }
        windows.sort_by_key(|window| window.frames);
        let longest = windows.last().map_or(0, |window| window.frames);
        if texts.is_empty() || longest <= 2 * around {
            return Err(Error::manifest(format!(
                "manifest /plan/params: {} graphs of texts, {longest} frames of the longest voice: expected one, and more \
                 than twice the {around} frames around a part",
                texts.len()
            )));
        }
        let sizes = Sizes { tokens, hidden, speakers: params.voices.len(), speaker };
        let weights = Durations::open(host, sizes, params.durations)?;
        let samples = host.allocate(longest * hop * size_of::<f32>())?;
        let spans = ["durations", "voice"].map(|name| host.span(name));
        Ok(Self { params, weights, texts, windows, samples, pending: None, spans })
    }

    fn info(&self) -> OpenInfo {
        OpenInfo {
            max_ctx: HEAD + self.params.limit,
            sound_out: Some(SoundOut { rate: self.params.rate }),
            ..OpenInfo::default()
        }
    }

    fn synthesizer(&mut self) -> Option<&mut dyn Synthesizer> {
        Some(self)
    }
}

impl Synthesizer for Vits {
    fn speak(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        if !segments.is_empty() {
            self.pending = None;
            self.pending = Some(self.begin(host, segments)?);
        }
        let Some(mut pending) = self.pending.take() else { return Ok(self.view(0)) };
        let len = self.part(host, &mut pending)?;
        self.pending = Some(pending).filter(|pending| pending.next < pending.symbols.len());
        Ok(self.view(len))
    }
}

impl Vits {
    fn view(&self, len: usize) -> View {
        View { buffer: self.samples, dtype: DType::F32, offset: 0, len }
    }

    /// Everything of a text that its length is not known for yet, and its durations.
    fn begin(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<Pending> {
        let start = Instant::now();
        text::count_tokens(NAME, segments)?;
        let all: Vec<u32> = text::tokens(segments).collect();
        let (head, symbols) = all.split_at_checked(HEAD).unwrap_or_default();
        let &[voice, speed, noise, width, seed] = head else {
            return Err(Error::prompt(format!(
                "{} tokens, expected the number of a voice, speed, noise and noise of durations in thousandths, a seed, \
                 and symbols",
                all.len()
            )));
        };
        let speakers = self.params.voices.len();
        let legal =
            SPEEDS.contains(&speed) && [noise, width].iter().all(|noise| NOISES.contains(noise));
        if voice as usize >= speakers || !legal {
            return Err(Error::prompt(format!(
                "voice {voice}, speed {speed}, noise {noise} and {width}: expected a voice below {speakers}, a speed of \
                 {} to {} thousandths, and noise of {} to {}",
                SPEEDS.start(),
                SPEEDS.end(),
                NOISES.start(),
                NOISES.end()
            )));
        }
        let (limit, vocab) = (self.params.limit, self.weights.sizes.tokens);
        if symbols.is_empty() || symbols.len() > limit {
            return Err(Error::prompt(format!("{} symbols, expected 1 to {limit}", symbols.len())));
        }
        if let Some(beyond) = symbols.iter().find(|token| **token as usize >= vocab) {
            return Err(Error::prompt(format!("symbol {beyond}, expected numbers below {vocab}")));
        }
        let SpeechParams { ref front, ref back, blank, flow, hop, rate, length, .. } = self.params;
        let within = symbols.iter().flat_map(|symbol| [*symbol].into_iter().chain(blank));
        let ids: Vec<u32> =
            front.iter().copied().chain(within).chain(back.iter().copied()).collect();
        let Some(graph) = self.texts.iter().find(|text| text.rows >= ids.len()) else {
            let longest = self.texts.last().map_or(0, |text| text.rows);
            return Err(Error::prompt(format!(
                "{} symbols with those between them, the graphs take {longest}",
                ids.len()
            )));
        };
        let embedded = self.weights.embedded(host, &ids);
        let (seen, mut stats) = graph.run(host, &embedded, ids.len())?;
        host.dump_values("encoded", &seen, &[ids.len(), self.weights.sizes.hidden])?;
        host.dump_values("stats", &stats, &[ids.len(), 2 * flow])?;
        let style = self.weights.style(host, voice as usize);
        let seed = u64::from(seed);
        let logs = self.weights.durations(host, seen, &style, (width as f32 / 1000.0, 2 * seed))?;
        host.dump_values("durations", &logs, &[ids.len()])?;
        let longest = LONGEST * rate as f32 / hop as f32;
        let scale = length * 1000.0 / speed as f32;
        let mut symbols = Vec::new();
        for (at, log) in logs.iter().enumerate() {
            let frames = (log.exp() * scale).ceil();
            if frames.is_nan() {
                return Err(Error::graph(format!(
                    "duration of symbol {at} is {frames}, expected a number"
                )));
            }
            symbols.extend(std::iter::repeat_n(at as u32, frames.min(longest) as usize));
        }
        if symbols.is_empty() {
            symbols.push(0);
        }
        for row in stats.chunks_exact_mut(2 * flow) {
            row[flow..].iter_mut().for_each(|log| *log = log.min(MAX_LOG).exp());
        }
        host.end(self.spans[0], start);
        Ok(Pending {
            symbols,
            stats,
            style,
            noise: noise as f32 / 1000.0,
            seed: 2 * seed + 1,
            next: 0,
        })
    }

    /// Says the frames that follow, as many as go through a graph at once; returns the number of samples.
    fn part(&mut self, host: &mut Host, pending: &mut Pending) -> Result<usize> {
        let start = Instant::now();
        let SpeechParams { flow, hop, around, .. } = self.params;
        let total = pending.symbols.len();
        let first = pending.next.saturating_sub(around);
        let longest = self.windows.last().map_or(0, |window| window.frames);
        let last = total.min(first + longest);
        let end = if last == total { total } else { last - around };
        let Some(window) = self.windows.iter().find(|window| window.frames >= last - first) else {
            return Err(Error::prompt(format!(
                "{} frames, the graphs make {longest} at once",
                last - first
            )));
        };
        let mut frames = Vec::with_capacity((last - first) * flow);
        for at in first..last {
            let row = &pending.stats[pending.symbols[at] as usize * 2 * flow..][..2 * flow];
            for (channel, (mean, deviation)) in row[..flow].iter().zip(&row[flow..]).enumerate() {
                let noise = match pending.noise {
                    0.0 => 0.0,
                    scale => scale * normal(pending.seed, (channel * total + at) as u64),
                };
                frames.push(mean + noise * deviation);
            }
        }
        host.dump_values("frames", &frames, &[last - first, flow])?;
        let samples = window.run(host, &frames, &pending.style, last - first)?;
        let skipped = (pending.next - first) * hop;
        let samples = &samples[skipped..skipped + (end - pending.next) * hop];
        if let Some(at) = samples.iter().position(|sample| !sample.is_finite()) {
            return Err(Error::graph(format!(
                "graph {:?}: sample {at} of what it makes is {}, expected numbers",
                host.graph(window.graph).name,
                samples[at]
            )));
        }
        host.f32s_mut(self.samples)[..samples.len()].copy_from_slice(samples);
        host.end(self.spans[1], start);
        pending.next = end;
        Ok(samples.len())
    }
}

/// A graph over the symbols of a text.
#[derive(Debug)]
struct Text {
    graph: GraphId,
    rows: usize,
    hidden: usize,
    flow: usize,
    x: FloatInput,
    keep: FloatInput,
    outputs: [View; 2],
}

impl Text {
    fn open(host: &mut Host, graph: GraphId, hidden: usize, flow: usize) -> Result<Self> {
        let port = host.input(graph, "x")?;
        let (rows, _) = host.rows_of(graph, port)?;
        Ok(Self {
            graph,
            rows,
            hidden,
            flow,
            x: input(host, graph, "x", rows * hidden)?,
            keep: input(host, graph, "keep", rows)?,
            outputs: [
                output(host, graph, "y", rows * hidden)?,
                output(host, graph, "stats", rows * 2 * flow)?,
            ],
        })
    }

    /// What durations are made of, and the statistics of frames.
    fn run(&self, host: &mut Host, embedded: &[f32], count: usize) -> Result<(Vec<f32>, Vec<f32>)> {
        self.keep.write(host, &kept(count, self.rows))?;
        self.x.write(host, &padded(embedded, self.rows * self.hidden))?;
        host.execute(self.graph)?;
        let (mut seen, mut stats) =
            (vec![0.0; count * self.hidden], vec![0.0; count * 2 * self.flow]);
        self.outputs[0].to_f32(host, 0, &mut seen)?;
        self.outputs[1].to_f32(host, 0, &mut stats)?;
        Ok((seen, stats))
    }
}

/// A graph over frames.
#[derive(Debug)]
struct Window {
    graph: GraphId,
    frames: usize,
    flow: usize,
    hop: usize,
    x: FloatInput,
    keep: FloatInput,
    style: Option<FloatInput>,
    samples: View,
}

impl Window {
    fn open(host: &mut Host, graph: GraphId, params: &SpeechParams) -> Result<Self> {
        let SpeechParams { flow, hop, speaker, .. } = *params;
        let port = host.input(graph, "x")?;
        let (frames, _) = host.rows_of(graph, port)?;
        let style = match speaker {
            0 => None,
            _ => Some(input(host, graph, "style", speaker)?),
        };
        Ok(Self {
            graph,
            frames,
            flow,
            hop,
            x: input(host, graph, "x", frames * flow)?,
            keep: input(host, graph, "keep", frames)?,
            style,
            samples: output(host, graph, "samples", frames * hop)?,
        })
    }

    fn run(
        &self,
        host: &mut Host,
        frames: &[f32],
        style: &[f32],
        count: usize,
    ) -> Result<Vec<f32>> {
        self.x.write(host, &padded(frames, self.frames * self.flow))?;
        self.keep.write(host, &kept(count, self.frames))?;
        if let Some(input) = &self.style {
            input.write(host, style)?;
        }
        host.execute(self.graph)?;
        let mut samples = vec![0.0; count * self.hop];
        self.samples.to_f32(host, 0, &mut samples)?;
        Ok(samples)
    }
}
