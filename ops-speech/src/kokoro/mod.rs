//! `kokoro_speak`: Kokoro from phonemes to samples.
//!
//! Arithmetic: `KModel` of the package `kokoro` 0.9.4 (`model.py`, `modules.py`, `istftnet.py`). A text is tokens: the
//! number of a voice, the speed in thousandths, of KittenTTS the length of the text in characters, and its phonemes. Durations come first, of all of it; then what they
//! say goes, in frames, through the shortest graphs that hold it, and what is longer than the longest is cut behind a
//! pause. On the host, in f32: LSTMs and durations (`host.rs`), the source's sines and both Fourier transforms
//! (`source.rs`).

mod host;
mod source;

use std::time::Instant;

use qhx_kit::fill::FloatInput;
use qhx_kit::{OneOrMany, schema};
use qhx_op::{
    BufferId, DType, Error, GraphId, Host, Modality, Op, OpDescription, OpenInfo, Result, Segment,
    SoundOut, SpanId, Synthesizer, Task, View, text,
};
use serde::Deserialize;
use serde_json::json;

use host::{Sizes, Weights};
use source::{Source, SourceParams};

use crate::ports::{PLACE, input, kept, output, padded};

const NAME: &str = "kokoro_speak";
/// Speeds, in thousandths, that a text may have.
const SPEEDS: std::ops::RangeInclusive<u32> = 250..=4000;
/// Token before the phonemes and behind them.
const BORDER: u32 = 0;

/// `params.speech` of the manifest.
#[derive(Debug, Deserialize)]
struct SpeechParams {
    rate: u32,
    voices: Vec<String>,
    /// Rows of a voice: one for each number of phonemes.
    rows: usize,
    style: usize,
    layers: usize,
    durations: usize,
    albert: AlbertParams,
    source: SourceParams,
    /// Tokens that a text is rather cut behind.
    #[serde(default)]
    breaks: Vec<u32>,
    /// The length of the text is behind the speed, and is the row of the voice.
    #[serde(default)]
    counted: bool,
    /// Tokens behind the phonemes.
    #[serde(default)]
    tail: Vec<u32>,
    /// Samples at the end that are not said.
    #[serde(default)]
    trim: usize,
}

impl SpeechParams {
    /// Tokens in front of the phonemes.
    fn head(&self) -> usize {
        2 + usize::from(self.counted)
    }

    /// Phonemes that a text may have.
    fn fit(&self) -> usize {
        // Borders stand around them.
        self.albert.positions.saturating_sub(2 + self.tail.len())
    }
}

#[derive(Debug, Clone, Copy, Deserialize)]
struct AlbertParams {
    layers: usize,
    embedding: usize,
    positions: usize,
}

#[derive(Debug, Deserialize)]
struct Params {
    albert: OneOrMany,
    symbols: OneOrMany,
    prosody: OneOrMany,
    voice: OneOrMany,
}

/// A voice by Kokoro.
#[derive(Debug)]
pub struct Kokoro {
    params: SpeechParams,
    weights: Weights,
    voices: BufferId,
    source: Source,
    /// Graphs over symbols, the shortest first.
    texts: Vec<Text>,
    /// Graphs over frames, the shortest first.
    windows: Vec<Window>,
    samples: BufferId,
    pending: Option<Pending>,
    spans: [SpanId; 3],
}

/// A text that is being spoken, and the position in it.
#[derive(Debug)]
struct Pending {
    tokens: Vec<u32>,
    durations: Vec<usize>,
    /// `[tokens, hidden + style]`: what durations and prosody are made of.
    prosody: Vec<f32>,
    /// `[tokens, hidden]`.
    symbols: Vec<f32>,
    /// A voice's row: the style of the decoder, and of the prosody.
    styles: [Vec<f32>; 2],
    /// The first token that is not said.
    next: usize,
    /// Windows that were said.
    said: u64,
}

impl Op for Kokoro {
    fn describe() -> OpDescription {
        OpDescription {
            name: NAME.to_owned(),
            summary: "Phonemes to audio by Kokoro".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Speak],
            modalities: vec![Modality::Text],
            params_schema: json!({
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "required": ["albert", "symbols", "prosody", "voice"],
                "properties": {
                    "albert": schema::graphs("The layer that ALBERT repeats; each graph for texts of another length."),
                    "symbols": schema::graphs("Convolutions over embedded symbols, for the same lengths."),
                    "prosody": schema::graphs("Frames to F0 and N; each graph for clips of another length."),
                    "voice": schema::graphs("Frames, F0, N and source to a spectrum, for the same lengths."),
                    "tensors": schema::tensors(["x", "y", "keep", "fill", "style", "curves", "source", "spectrum"])
                }
            }),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let Params { albert, symbols, prosody, voice } = host.params()?;
        let params: SpeechParams = host.require("/params/speech")?;
        let [hidden, tokens] = [host.require("/params/hidden")?, host.require("/params/vocab")?];
        let AlbertParams { embedding, positions, .. } = params.albert;
        if let Some(beyond) = params.tail.iter().find(|token| **token as usize >= tokens) {
            return Err(Error::manifest(format!(
                "{PLACE}/tail: token {beyond}, expected numbers below /params/vocab, {tokens}"
            )));
        }
        let source = Source::new(params.source, params.rate)?;
        let mut texts = Vec::new();
        for (albert, symbols) in pairs(
            albert.graphs(host, "/plan/params/albert")?,
            symbols.graphs(host, "/plan/params/symbols")?,
        )? {
            texts.push(Text::open(host, albert, symbols, hidden)?);
        }
        texts.sort_by_key(|text| text.rows);
        let width = texts.first().map_or(0, |text| text.width);
        if texts.iter().any(|text| text.width != width) {
            return Err(Error::graph(
                "graphs of /plan/params/albert are of several widths, expected one",
            ));
        }
        let mut windows = Vec::new();
        for (prosody, voice) in pairs(
            prosody.graphs(host, "/plan/params/prosody")?,
            voice.graphs(host, "/plan/params/voice")?,
        )? {
            windows.push(Window::open(host, [prosody, voice], hidden, params.style, &source)?);
        }
        windows.sort_by_key(|window| window.frames);
        let sizes = Sizes {
            tokens,
            embedding,
            positions,
            width,
            hidden,
            style: params.style,
            layers: params.layers,
            durations: params.durations,
            sines: source.sines(),
        };
        let weights = Weights::open(host, sizes)?;
        let path: String = host.require("/artifacts/speech/voices/path")?;
        let voices = host.artifact("/artifacts/speech/voices/path", &path)?;
        let expected = params.voices.len() * params.rows * 2 * params.style * size_of::<f32>();
        if host.len(voices) != expected || params.rows == 0 || params.voices.is_empty() {
            return Err(Error::artifact(format!(
                "{path}: {} bytes, expected {expected}: {} voices of {} rows of {} values",
                host.len(voices),
                params.voices.len(),
                params.rows,
                2 * params.style
            )));
        }
        let longest = windows.last().map_or(0, |window| window.frames);
        let samples = host.allocate(longest * source.frame() * size_of::<f32>())?;
        let spans = ["durations", "prosody", "voice"].map(|name| host.span(name));
        Ok(Self { params, weights, voices, source, texts, windows, samples, pending: None, spans })
    }

    fn info(&self) -> OpenInfo {
        OpenInfo {
            max_ctx: self.params.head() + self.params.fit(),
            sound_out: Some(SoundOut { rate: self.params.rate }),
            ..OpenInfo::default()
        }
    }

    fn synthesizer(&mut self) -> Option<&mut dyn Synthesizer> {
        Some(self)
    }
}

impl Synthesizer for Kokoro {
    fn speak(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        if !segments.is_empty() {
            self.pending = None;
            self.pending = Some(self.begin(host, segments)?);
        }
        let Some(mut pending) = self.pending.take() else { return Ok(self.view(0)) };
        let mut len = self.window(host, &mut pending)?;
        // The end of the text is not said, wherever windows end.
        let left: usize = pending.durations[pending.next..].iter().sum();
        len = len.saturating_sub(self.params.trim.saturating_sub(left * self.source.frame()));
        let more = pending.next < pending.tokens.len() && len > 0;
        self.pending = Some(pending).filter(|_| more);
        Ok(self.view(len))
    }
}

impl Kokoro {
    fn view(&self, len: usize) -> View {
        View { buffer: self.samples, dtype: DType::F32, offset: 0, len }
    }

    /// Everything of a text that its length is not known for yet, and its durations.
    fn begin(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<Pending> {
        let start = Instant::now();
        text::count_tokens(NAME, segments)?;
        let all: Vec<u32> = text::tokens(segments).collect();
        let Sizes { tokens: vocab, hidden, style, .. } = self.weights.sizes;
        let (head, phonemes) = all.split_at_checked(self.params.head()).unwrap_or_default();
        let &[voice, speed, ref length @ ..] = head else {
            let length = if self.params.counted { "the length of the text, " } else { "" };
            return Err(Error::prompt(format!(
                "{} tokens, expected the number of a voice, the speed in thousandths, {length}and phonemes",
                all.len()
            )));
        };
        if voice as usize >= self.params.voices.len() || !SPEEDS.contains(&speed) {
            return Err(Error::prompt(format!(
                "voice {voice}, speed {speed}: expected a voice below {} and a speed of {} to {} thousandths",
                self.params.voices.len(),
                SPEEDS.start(),
                SPEEDS.end()
            )));
        }
        let fit = self.params.fit();
        if phonemes.is_empty() || phonemes.len() > fit {
            return Err(Error::prompt(format!("{} phonemes, expected 1 to {fit}", phonemes.len())));
        }
        if let Some(beyond) = phonemes.iter().find(|token| **token as usize >= vocab) {
            return Err(Error::prompt(format!("phoneme {beyond}, expected numbers below {vocab}")));
        }
        let row = length.first().map_or(phonemes.len() - 1, |length| *length as usize);
        let row = row.min(self.params.rows - 1);
        let row = (voice as usize * self.params.rows + row) * 2 * style;
        let row = &host.f32s(self.voices)[row..row + 2 * style];
        let styles = [row[..style].to_vec(), row[style..].to_vec()];
        let tokens = [BORDER].iter().chain(phonemes).chain(&self.params.tail).chain(&[BORDER]);
        let tokens: Vec<u32> = tokens.copied().collect();
        let graphs = self.texts.iter().find(|text| text.rows >= tokens.len());
        let graphs = graphs.ok_or_else(|| {
            let longest = self.texts.last().map_or(0, |text| text.rows);
            Error::prompt(format!(
                "{} phonemes, the graphs take {}",
                phonemes.len(),
                longest.saturating_sub(tokens.len() - phonemes.len())
            ))
        })?;
        let embedded = self.weights.embedded(host, &tokens);
        let seen = graphs.albert(host, embedded, self.params.albert.layers, tokens.len())?;
        let seen = self.weights.seen(host, &seen);
        host.dump_values("bert", &seen, &[tokens.len(), hidden])?;
        let (prosody, lasting) = self.weights.durations(host, seen, &styles[1])?;
        let speed = speed as f32 / 1000.0;
        let longest = self.windows.last().map_or(1, |window| window.frames);
        // Of numbers that are none, 1.
        let durations: Vec<usize> = lasting
            .iter()
            .map(|lasts| ((lasts / speed).round_ties_even().max(1.0) as usize).min(longest))
            .collect();
        let as_floats: Vec<f32> = durations.iter().map(|frames| *frames as f32).collect();
        host.dump_values("durations", &as_floats, &[tokens.len()])?;
        let symbols = graphs.symbols(host, &self.weights.symbols(host, &tokens), tokens.len())?;
        let symbols = self.weights.read_symbols(host, &symbols)?;
        host.end(self.spans[0], start);
        Ok(Pending { tokens, durations, prosody, symbols, styles, next: 0, said: 0 })
    }

    /// Says the tokens that follow, as many as go through the graphs at once; returns the number of samples.
    fn window(&mut self, host: &mut Host, pending: &mut Pending) -> Result<usize> {
        let start = Instant::now();
        let Sizes { hidden, style, .. } = self.weights.sizes;
        let longest = self.windows.last().map_or(0, |window| window.frames);
        let tokens = pending.next..cut(pending, longest, &self.params.breaks);
        let frames: usize = pending.durations[tokens.clone()].iter().sum();
        let Some(window) = self.windows.iter().find(|window| window.frames >= frames) else {
            return Err(Error::prompt(format!(
                "{frames} frames, the graphs make {longest} at once"
            )));
        };
        let in_frames = |rows: &[f32], width: usize| -> Vec<f32> {
            let of = |token: usize| {
                std::iter::repeat_n(&rows[token * width..][..width], pending.durations[token])
            };
            tokens.clone().flat_map(of).flatten().copied().collect()
        };
        let x = self.weights.shared(host, &in_frames(&pending.prosody, hidden + style))?;
        let curves = window.prosody(host, &x, &pending.styles[1], frames)?;
        let [f0, energy] = &curves;
        host.dump_values("f0", f0, &[f0.len()])?;
        host.dump_values("n", energy, &[energy.len()])?;
        host.end(self.spans[1], start);
        let start = Instant::now();
        let halved = self.weights.halved(host, &curves);
        let spectrum = self.source.spectrum(host, f0, &self.weights, pending.said)?;
        let x = in_frames(&pending.symbols, hidden);
        let spectrum =
            window.voice(host, &x, &pending.styles[0], &halved, &spectrum, frames, &self.source)?;
        host.dump_values(
            "spectrum",
            &spectrum,
            &[self.source.bins(), spectrum.len() / self.source.bins()],
        )?;
        let samples = self.source.samples(&spectrum);
        if let Some(at) = samples.iter().position(|sample| !sample.is_finite()) {
            return Err(Error::graph(format!(
                "graph {:?}: sample {at} of what it makes is {}, expected numbers",
                host.graph(window.graphs[1]).name,
                samples[at]
            )));
        }
        host.f32s_mut(self.samples)[..samples.len()].copy_from_slice(&samples);
        host.end(self.spans[2], start);
        pending.next = tokens.end;
        pending.said += 1;
        Ok(samples.len())
    }
}

/// End of the part spoken in one go: behind the last token that fits, or rather behind the last pause in its second
/// half.
fn cut(pending: &Pending, longest: usize, breaks: &[u32]) -> usize {
    let (mut frames, mut end) = (0, pending.next);
    while let Some(more) = pending.durations.get(end).filter(|more| frames + **more <= longest) {
        frames += more;
        end += 1;
    }
    if end == pending.tokens.len() {
        return end;
    }
    let half = pending.next + (end - pending.next) / 2;
    (half + 1..=end).rev().find(|at| breaks.contains(&pending.tokens[at - 1])).unwrap_or(end)
}

/// Graphs of two kinds, one for each length.
fn pairs(first: Vec<GraphId>, second: Vec<GraphId>) -> Result<Vec<(GraphId, GraphId)>> {
    if first.len() != second.len() || first.is_empty() {
        let what =
            format!("manifest /plan/params: {} graphs and {} for them", first.len(), second.len());
        return Err(Error::manifest(format!("{what}, expected as many, and one at least")));
    }
    Ok(first.into_iter().zip(second).collect())
}

/// Graphs over the symbols of a text.
#[derive(Debug)]
struct Text {
    graphs: [GraphId; 2],
    rows: usize,
    width: usize,
    hidden: usize,
    inputs: [[FloatInput; 2]; 2],
    outputs: [View; 2],
}

impl Text {
    fn open(host: &mut Host, albert: GraphId, symbols: GraphId, hidden: usize) -> Result<Self> {
        let port = host.input(albert, "x")?;
        let (rows, width) = host.rows_of(albert, port)?;
        let mut inputs = Vec::new();
        let mut outputs = Vec::new();
        for (graph, width) in [(albert, width), (symbols, hidden)] {
            inputs
                .push([input(host, graph, "x", rows * width)?, input(host, graph, "keep", rows)?]);
            outputs.push(output(host, graph, "y", rows * width)?);
        }
        let (Ok(inputs), Ok(outputs)) = (inputs.try_into(), outputs.try_into()) else {
            return Err(Error::graph("two graphs"));
        };
        Ok(Self { graphs: [albert, symbols], rows, width, hidden, inputs, outputs })
    }

    /// ALBERT's layers over embedded symbols.
    fn albert(
        &self,
        host: &mut Host,
        mut values: Vec<f32>,
        layers: usize,
        count: usize,
    ) -> Result<Vec<f32>> {
        self.inputs[0][1].write(host, &kept(count, self.rows))?;
        for _ in 0..layers {
            self.inputs[0][0].write(host, &padded(&values, self.rows * self.width))?;
            host.execute(self.graphs[0])?;
            self.outputs[0].to_f32(host, 0, &mut values)?;
        }
        Ok(values)
    }

    /// Convolutions over embedded symbols.
    fn symbols(&self, host: &mut Host, values: &[f32], count: usize) -> Result<Vec<f32>> {
        self.inputs[1][1].write(host, &kept(count, self.rows))?;
        self.inputs[1][0].write(host, &padded(values, self.rows * self.hidden))?;
        host.execute(self.graphs[1])?;
        let mut out = vec![0.0; count * self.hidden];
        self.outputs[1].to_f32(host, 0, &mut out)?;
        Ok(out)
    }
}

/// Graphs over frames.
#[derive(Debug)]
struct Window {
    graphs: [GraphId; 2],
    frames: usize,
    hidden: usize,
    /// x, style, keep and fill of both.
    inputs: [[FloatInput; 4]; 2],
    curves: FloatInput,
    source: FloatInput,
    outputs: [View; 2],
}

impl Window {
    fn open(
        host: &mut Host,
        graphs: [GraphId; 2],
        hidden: usize,
        style: usize,
        source: &Source,
    ) -> Result<Self> {
        let port = host.input(graphs[0], "x")?;
        let (frames, _) = host.rows_of(graphs[0], port)?;
        let mut common = |graph: GraphId| -> Result<[FloatInput; 4]> {
            Ok([
                input(host, graph, "x", frames * hidden)?,
                input(host, graph, "style", style)?,
                input(host, graph, "keep", frames)?,
                input(host, graph, "fill", 2)?,
            ])
        };
        let inputs = [common(graphs[0])?, common(graphs[1])?];
        let [prosody, voice] = graphs;
        let source_len = source.bins() * source.padded(frames);
        Ok(Self {
            graphs,
            frames,
            hidden,
            inputs,
            curves: input(host, voice, "curves", 2 * frames)?,
            source: input(host, voice, "source", source_len)?,
            outputs: [
                output(host, prosody, "curves", 4 * frames)?,
                output(host, voice, "spectrum", source.bins() * source.steps(frames))?,
            ],
        })
    }

    /// Writes what both graphs take.
    fn write(
        &self,
        host: &mut Host,
        which: usize,
        x: &[f32],
        style: &[f32],
        frames: usize,
        fill: f32,
    ) -> Result<()> {
        let [input, voice, keep, ratio] = &self.inputs[which];
        input.write(host, &padded(x, self.frames * self.hidden))?;
        voice.write(host, style)?;
        keep.write(host, &kept(frames, self.frames))?;
        ratio.write(host, &[self.frames as f32 / frames as f32, fill])
    }

    /// F0 and N, two of each a frame.
    fn prosody(
        &self,
        host: &mut Host,
        x: &[f32],
        style: &[f32],
        frames: usize,
    ) -> Result<[Vec<f32>; 2]> {
        self.write(host, 0, x, style, frames, 1.0)?;
        host.execute(self.graphs[0])?;
        let mut curves = [vec![0.0; 2 * frames], vec![0.0; 2 * frames]];
        for (at, curve) in curves.iter_mut().enumerate() {
            self.outputs[0].to_f32(host, at * 2 * self.frames, curve)?;
        }
        Ok(curves)
    }

    /// The spectrum `[bins, steps]` of frames.
    #[expect(clippy::too_many_arguments, reason = "the inputs of a graph")]
    fn voice(
        &self,
        host: &mut Host,
        x: &[f32],
        style: &[f32],
        curves: &[Vec<f32>; 2],
        spectrum: &[f32],
        frames: usize,
        source: &Source,
    ) -> Result<Vec<f32>> {
        let (own, all) = (source.steps(frames), source.steps(self.frames));
        self.write(host, 1, x, style, frames, all as f32 / own as f32)?;
        let rows: Vec<f32> = curves.iter().flat_map(|curve| padded(curve, self.frames)).collect();
        self.curves.write(host, &rows)?;
        let wide = source.padded(self.frames);
        let mut seen = vec![0.0; source.bins() * wide];
        for (to, from) in seen.chunks_exact_mut(wide).zip(spectrum.chunks_exact(own)) {
            to[source.lead()..][..own].copy_from_slice(from);
        }
        self.source.write(host, &seen)?;
        host.execute(self.graphs[1])?;
        let mut out = vec![0.0; source.bins() * own];
        for (at, row) in out.chunks_exact_mut(own).enumerate() {
            self.outputs[1].to_f32(host, at * all, row)?;
        }
        Ok(out)
    }
}
