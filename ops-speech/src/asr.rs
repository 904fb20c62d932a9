//! `qwen3_asr_transcribe`: Qwen3-ASR and Canary-Qwen, whose decoder takes rows of a tower for audio.
//!
//! Arithmetic: `Qwen3ASRFeatureExtractor` and `Qwen3ASRForConditionalGeneration` of `transformers`; NeMo's `SALM` with
//! the features of Parakeet. The host makes log-mel frames, with zeros behind them; a graph makes rows of them, of which
//! the clip has the first.

use std::time::Instant;

use qhx_kit::audio::{Clip, FrontEnd, LogMel, limit_range};
use qhx_kit::decoder::{Decoder, DecoderGraphs, LayerState, SoftPart, SoftPrompt};
use qhx_kit::fill::{CausalMask, FloatInput, Rope};
use qhx_kit::state::StateCarrier;
use qhx_kit::{OneOrMany, schema};
use qhx_op::{
    Error, Generator, GraphId, Host, MediaRules, Modality, Op, OpDescription, OpenInfo, Piece,
    Placement, PromptRules, Result, Segment, SpanId, Task, View,
};
use serde::Deserialize;
use serde_json::json;

use crate::features::Features;

const NAME: &str = "qwen3_asr_transcribe";
const GRAPHS: &str = "/plan/params/audio";
/// Powers of ten between the loudest value and the floor.
const RANGE: f32 = 8.0;

/// `params.audio` of the manifest.
#[derive(Debug, Deserialize)]
struct AudioParams {
    front_end: FrontEnd,
    /// The part of the sample before that each sample loses. With it, the features are Parakeet's.
    preemphasis: Option<f32>,
    /// The token that stands at each position of a clip.
    token_id: u32,
    /// Frames of a chunk; none where a clip is one.
    chunk: Option<usize>,
    /// Convolutions that each halve them, rounded up.
    halvings: usize,
    /// Samples of the shortest clip; shorter ones have silence behind them.
    #[serde(default)]
    least: usize,
}

impl AudioParams {
    /// Rows of a number of frames.
    fn rows(&self, frames: usize) -> usize {
        let halved = |size: usize| (0..self.halvings).fold(size, |size, _| size.div_ceil(2));
        match self.chunk {
            Some(chunk) => frames / chunk * halved(chunk) + halved(frames % chunk),
            None => halved(frames),
        }
    }
}

/// Samples to frames.
#[derive(Debug)]
enum Mels {
    /// As Whisper's: between the loudest value and a floor below it.
    Limited(LogMel),
    /// As Parakeet's: each mel by its mean and deviation.
    Normalised(Features),
}

impl Mels {
    fn open(params: &AudioParams) -> Result<Self> {
        let front_end = params.front_end.clone();
        Ok(match params.preemphasis {
            Some(part) => Self::Normalised(Features::new(front_end, part)?),
            None => Self::Limited(LogMel::new(front_end)?),
        })
    }

    fn log_mel(&self) -> &LogMel {
        match self {
            Self::Limited(log_mel) => log_mel,
            Self::Normalised(features) => features.log_mel(),
        }
    }

    fn write(&mut self, clip: Clip<'_>, values: &mut [f32]) -> Result<()> {
        match self {
            Self::Limited(log_mel) => {
                log_mel.write(clip, values)?;
                limit_range(values, RANGE);
                values.iter_mut().for_each(|value| *value = (*value + 4.0) / 4.0);
                Ok(())
            }
            Self::Normalised(features) => features.write(clip, values),
        }
    }
}

/// Speech to text by Qwen3-ASR and Canary-Qwen.
#[derive(Debug)]
pub struct Asr {
    decoder: Decoder,
    tower: Tower,
}

impl Op for Asr {
    fn describe() -> OpDescription {
        let mut params_schema = schema::decoder(["mel", "keep", "rows"]);
        params_schema["properties"]["audio"] = schema::graphs(
            "Graphs from log-mel frames to rows of the prompt; each for clips of another length.",
        );
        params_schema["required"] = json!(["decode", "audio"]);
        OpDescription {
            name: NAME.to_owned(),
            summary: "Speech to text by Qwen3-ASR and Canary-Qwen".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Transcribe],
            modalities: vec![Modality::Text, Modality::Audio],
            params_schema,
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let graphs = DecoderGraphs::find(host)?;
        let state = StateCarrier::new(host, &graphs.groups())?;
        graphs.check_layers(host, &state, &[LayerState::Caches(&["k", "v"])])?;
        let tower = Tower::open(host, graphs.hidden())?;
        let mask = CausalMask::new(state.capacity().unwrap_or(0));
        let rope = Rope::from_params(host, "/params")?;
        let decoder = Decoder::builder(NAME, graphs, state).rope(rope).mask(mask).open(host)?;
        let token = tower.params.token_id;
        if token as usize >= decoder.input_vocab() {
            return Err(Error::manifest(format!(
                "manifest /params/audio/token_id: found {token}, expected a token below {}, the rows of the embedding \
                 table",
                decoder.input_vocab()
            )));
        }
        Ok(Self { decoder, tower })
    }

    fn info(&self) -> OpenInfo {
        let mut media = MediaRules::default();
        media.audio.rate = self.tower.params.front_end.rate;
        OpenInfo {
            placeholders: vec![self.tower.params.token_id],
            media,
            prompt_rules: PromptRules { special_tokens: false },
            ..self.decoder.info()
        }
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }
}

impl Generator for Asr {
    qhx_op::inner_generator!(decoder);

    fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
        let (_, positions) = self.tower.clip(segment)?;
        let token = self.tower.params.token_id;
        let pieces = vec![Piece::Part { token, positions, frames: None, part: None }];
        Ok(Placement { marker: token, pieces, ..Placement::default() })
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        let Self { decoder, tower } = self;
        let prompt = SoftPrompt::of(segments, |segment| tower.rows(host, segment))?;
        prompt.prefill(host, decoder)
    }
}

#[derive(Debug)]
struct Tower {
    params: AudioParams,
    mels: Mels,
    hidden: usize,
    /// The shortest first.
    windows: Vec<Window>,
    span: SpanId,
}

/// A graph of the tower.
#[derive(Debug)]
struct Window {
    graph: GraphId,
    frames: usize,
    mel: FloatInput,
    keep: FloatInput,
    output: View,
}

impl Tower {
    fn open(host: &mut Host, hidden: usize) -> Result<Self> {
        #[derive(Deserialize)]
        struct Params {
            audio: OneOrMany,
        }
        let Params { audio } = host.params()?;
        let params: AudioParams = host.require("/params/audio")?;
        if params.chunk == Some(0) || params.halvings > 16 {
            return Err(Error::manifest(format!(
                "manifest /params/audio: chunk {} and halvings {}, expected frames above 0 and at most 16 halvings",
                params.chunk.map_or_else(|| "none".to_owned(), |chunk| chunk.to_string()),
                params.halvings
            )));
        }
        let features = Mels::open(&params)?;
        let mut windows = Vec::new();
        for graph in audio.graphs(host, GRAPHS)? {
            let (frames, mels) = {
                let port = host.input(graph, "mel")?;
                host.rows_of(graph, port)?
            };
            let port = host.output(graph, "rows")?;
            let (rows, width) = host.rows_of(graph, port)?;
            let output = host.view_for(graph, port)?;
            let mel = FloatInput::require(host, graph, "mel")?;
            let keep = FloatInput::require(host, graph, "keep")?;
            // What is kept are frames where a clip is one chunk, else rows.
            let kept = if params.chunk.is_some() { rows } else { frames };
            let expected = features.log_mel().mels();
            let fits = mels == expected && width == hidden && keep.len() == kept;
            if !fits || frames == 0 || params.rows(frames) != rows {
                return Err(Error::graph(format!(
                    "graph {:?}: {frames} frames of {mels} mels, {} values of keep, and {rows} rows of {width}; expected \
                     {expected} mels as params.audio.front_end makes them, {} rows as wide as the decoder's, {hidden}, \
                     and {kept} values of keep",
                    host.graph(graph).name,
                    keep.len(),
                    params.rows(frames)
                )));
            }
            windows.push(Window { graph, frames, mel, keep, output });
        }
        windows.sort_by_key(|window| window.frames);
        Ok(Self { params, mels: features, hidden, windows, span: host.span("audio") })
    }

    /// The clip of a segment, and the positions that it takes.
    fn clip<'a>(&self, segment: &Segment<'a>) -> Result<(Clip<'a>, usize)> {
        let log_mel = self.mels.log_mel();
        let FrontEnd { rate, hop, .. } = *log_mel.front_end();
        let clip = Clip::of_segment(segment, rate)?;
        let samples = clip.samples().len().max(self.params.least).max(hop);
        let frames = log_mel.frames(samples);
        let most = self.windows.last().map_or(0, |window| window.frames);
        if frames > most {
            let seconds = |samples: usize| samples as f64 / f64::from(rate.max(1));
            return Err(Error::prompt(format!(
                "audio of {:.2} s, the bundle takes {:.2} s at once; take less of it, or have `qhx transcribe` cut it \
                 into chunks",
                seconds(samples),
                seconds(most.saturating_mul(hop))
            )));
        }
        Ok((clip, self.params.rows(frames)))
    }

    /// What stands in the prompt for a clip.
    fn rows(&mut self, host: &mut Host, segment: &Segment<'_>) -> Result<SoftPart> {
        let start = Instant::now();
        let (clip, count) = self.clip(segment)?;
        let log_mel = self.mels.log_mel();
        let FrontEnd { rate, hop, .. } = *log_mel.front_end();
        let mut samples = clip.samples().to_vec();
        samples.resize(samples.len().max(self.params.least).max(hop), 0.0);
        let (frames, mels) = (log_mel.frames(samples.len()), log_mel.mels());
        let mut values = vec![0.0; frames * mels];
        self.mels.write(Clip::new(&samples, rate, rate)?, &mut values)?;
        host.dump_values("mel", &values, &[frames, mels])?;
        let Some(window) = self.windows.iter().find(|window| window.frames >= frames) else {
            return Err(Error::graph("no graph takes the audio"));
        };
        values.resize(window.frames * mels, 0.0);
        window.mel.write(host, &values)?;
        let kept = if self.params.chunk.is_some() { count } else { frames };
        let keep: Vec<f32> =
            (0..window.keep.len()).map(|at| f32::from(u8::from(at < kept))).collect();
        window.keep.write(host, &keep)?;
        host.execute(window.graph)?;
        let mut rows = vec![0.0; count * self.hidden];
        window.output.to_f32(host, 0, &mut rows)?;
        host.dump_values("rows", &rows, &[count, self.hidden])?;
        host.end(self.span, start);
        Ok(SoftPart { token: self.params.token_id, count, rows, together: false })
    }
}
