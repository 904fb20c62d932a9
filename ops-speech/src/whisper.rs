//! `whisper_transcribe`: Whisper from samples to logits.
//!
//! Arithmetic: `WhisperFeatureExtractor` and `WhisperForConditionalGeneration` of `transformers` (Radford et al. 2022,
//! arXiv 2212.04356). The graph `encoder` makes the keys and values that the decoder attends to, once a clip; the
//! graphs of the decoder read them where they lie. A clip stands at one position, that of `<|startoftranscript|>`;
//! language, task and the wish for no times are tokens behind it, and what was said before stands in front of it.
//! Which windows a long clip is cut into is the caller's to decide. Times of words are those of `align`.

mod align;

use std::time::Instant;

use qhx_kit::audio::{Clip, FrontEnd, LogMel, limit_range};
use qhx_kit::decoder::{Decoder, DecoderGraphs, LayerState};
use qhx_kit::fill::{CausalMask, FloatInput};
use qhx_kit::schema;
use qhx_kit::state::StateCarrier;
use qhx_op::{
    Answer, Error, Generator, GraphId, Host, LogitRules, MediaRules, Modality, Op, OpDescription,
    OpenInfo, Placement, PromptRules, Recognizer, Result, Segment, SpanId, Task, TimeRule, View,
};
use serde::Deserialize;
use serde_json::json;

use crate::listener::{Ear, Listener, Positions, attends};
use align::Alignment;

const NAME: &str = "whisper_transcribe";
/// Powers of ten between the loudest value and the floor.
const RANGE: f32 = 8.0;

/// `params.audio` of the manifest.
#[derive(Debug, Deserialize)]
struct AudioParams {
    front_end: FrontEnd,
}

/// `params.transcription`, as far as the op needs it.
#[derive(Debug, Default, Deserialize)]
#[serde(default)]
struct Transcription {
    times: Option<TimeRule>,
    suppressed: Vec<u32>,
    suppressed_first: Vec<u32>,
    /// Width of the median filter of times.
    median: Option<usize>,
}

/// Speech to text by Whisper.
#[derive(Debug)]
pub struct Whisper {
    decoder: Decoder,
    listener: Listener<Mels>,
    rules: LogitRules,
    /// None where no graph gives weights of alignment heads.
    alignment: Option<Alignment>,
    align_span: SpanId,
}

impl Op for Whisper {
    fn describe() -> OpDescription {
        let mut params_schema = schema::decoder(["pos", "mel", "cross_*", "align_*"]);
        params_schema["properties"]["encoder"] = json!({
            "description": "Graph from log-mel frames to the keys and values of the cross-attention.",
            "type": "string"
        });
        params_schema["required"] = json!(["decode", "encoder"]);
        OpDescription {
            name: NAME.to_owned(),
            summary: "Speech to text by Whisper, with times and translation".to_owned(),
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
        let mask = CausalMask::new(state.capacity().unwrap_or(0));
        let mels = Mels::open(host)?;
        let listener = Listener::open(host, mels)?;
        let positions = Positions::open(host, graphs.hidden())?;
        let Transcription { times, suppressed, suppressed_first, median } =
            host.value("/params/transcription")?.unwrap_or_default();
        let mut decoder = Decoder::builder(NAME, graphs, state)
            .mask(mask)
            .filler(positions)
            .filler(listener.cross())
            .filler(Alignment::new(median)?)
            .open(host)?;
        let alignment = decoder.filler_mut::<Alignment>().and_then(|found| found.take());
        listener.check_token(&decoder)?;
        let rules = LogitRules { suppressed, suppressed_first, times };
        Ok(Self { decoder, listener, rules, alignment, align_span: host.span("align") })
    }

    fn info(&self) -> OpenInfo {
        let mut media = MediaRules::default();
        media.audio.rate = self.listener.ear.rate();
        OpenInfo {
            placeholders: vec![self.listener.token],
            // What a saved state attends to is the clip's, and not saved with it.
            can_snapshot: false,
            media,
            prompt_rules: PromptRules { special_tokens: false },
            logit_rules: self.rules.clone(),
            aligns: self.alignment.is_some(),
            ..self.decoder.info()
        }
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }

    fn recognizer(&mut self) -> Option<&mut dyn Recognizer> {
        Some(self)
    }
}

impl Recognizer for Whisper {
    fn answer(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<Answer> {
        let [Segment::Tokens(before), Segment::Tokens(said)] = segments else {
            return Err(Error::prompt(
                "times of words: expected the tokens before an answer, and those of the answer",
            ));
        };
        let Some(alignment) = &self.alignment else {
            return Err(Error::unsupported(
                "times of words, for which no graph has outputs align_*",
            ));
        };
        let Some(samples) = self.listener.heard else {
            return Err(Error::prompt("times of words: no audio was heard, expected one clip"));
        };
        let frames = samples.div_ceil(self.listener.ear.log_mel.front_end().hop);
        self.decoder.reset(host)?;
        let start = Instant::now();
        let times = alignment.times(host, &mut self.decoder, before, said, frames)?;
        host.end(self.align_span, start);
        Ok(Answer { tokens: said.to_vec(), times, ..Answer::default() })
    }
}

impl Generator for Whisper {
    qhx_op::inner_generator!(decoder);

    fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
        self.listener.place(segment)
    }

    fn reset(&mut self, host: &mut Host) -> Result<()> {
        self.listener.reset(host, &mut self.decoder)
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        self.listener.prefill(host, &mut self.decoder, segments)
    }

    fn export_state(&mut self, _: &mut Host) -> Result<Vec<u8>> {
        Err(attends())
    }
}

/// Log-mel frames of a clip with silence behind it, for the one graph of the encoder.
#[derive(Debug)]
struct Mels {
    graph: GraphId,
    log_mel: LogMel,
    mel: FloatInput,
    frames: usize,
}

impl Mels {
    fn open(host: &mut Host) -> Result<Self> {
        #[derive(Deserialize)]
        struct Params {
            encoder: String,
        }
        let Params { encoder } = host.params()?;
        let graph = host.require_graph("/plan/params/encoder", &encoder)?;
        let AudioParams { front_end } = host.require("/params/audio")?;
        let log_mel = LogMel::new(front_end)?;
        let port = host.input(graph, "mel")?;
        let (frames, mels) = host.rows_of(graph, port)?;
        if mels != log_mel.mels() || frames == 0 {
            return Err(Error::graph(format!(
                "graph {encoder:?}: tensor {}: expected rows of {} mels, as params.audio.front_end makes them",
                host.tensor(graph, port),
                log_mel.mels()
            )));
        }
        let mel = FloatInput::require(host, graph, "mel")?;
        Ok(Self { graph, log_mel, mel, frames })
    }
}

impl Ear for Mels {
    fn graphs(&self) -> Vec<GraphId> {
        vec![self.graph]
    }

    fn rate(&self) -> u32 {
        self.log_mel.front_end().rate
    }

    fn most(&self) -> usize {
        self.frames * self.log_mel.front_end().hop
    }

    fn write(&mut self, host: &mut Host, clip: Clip<'_>) -> Result<GraphId> {
        let (mut samples, rate) = (clip.samples().to_vec(), self.rate());
        samples.resize(self.most(), 0.0);
        let mels = self.log_mel.mels();
        let mut rows = vec![0.0; self.frames * mels];
        self.log_mel.write(Clip::new(&samples, rate, rate)?, &mut rows)?;
        limit_range(&mut rows, RANGE);
        rows.iter_mut().for_each(|value| *value = (*value + 4.0) / 4.0);
        host.dump_values("mel", &rows, &[self.frames, mels])?;
        self.mel.write(host, &rows)?;
        Ok(self.graph)
    }
}
