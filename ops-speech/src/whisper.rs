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
use qhx_kit::decoder::{Chunk, Decoder, DecoderGraphs, Filler, GraphVariant, LayerState};
use qhx_kit::fill::{CausalMask, Embedding, FloatInput};
use qhx_kit::schema;
use qhx_kit::state::StateCarrier;
use qhx_op::text::not_taken;
use qhx_op::{
    Answer, BufferId, Error, Generator, GraphId, Host, LogitRules, MediaRules, Modality, Op,
    OpDescription, OpenInfo, Piece, Placement, Port, PromptRules, Recognizer, Result, Segment,
    SpanId, Task, TimeRule, View,
};
use serde::Deserialize;
use serde_json::json;

use align::Alignment;

const NAME: &str = "whisper_transcribe";
const POSITIONS: &str = "/artifacts/positions/table";
/// Powers of ten between the loudest value and the floor.
const RANGE: f32 = 8.0;

/// `params.audio` of the manifest.
#[derive(Debug, Deserialize)]
struct AudioParams {
    front_end: FrontEnd,
    /// `<|startoftranscript|>`, at whose position a clip stands.
    token_id: u32,
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
    encoder: Encoder,
    rules: LogitRules,
    /// None where no graph gives weights of alignment heads.
    alignment: Option<Alignment>,
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
        let encoder = Encoder::open(host)?;
        let positions = Positions::open(host, graphs.hidden())?;
        let Transcription { times, suppressed, suppressed_first, median } =
            host.value("/params/transcription")?.unwrap_or_default();
        let mut decoder = Decoder::builder(NAME, graphs, state)
            .mask(mask)
            .filler(positions)
            .filler(Cross { outputs: encoder.outputs.clone() })
            .filler(Alignment::new(median)?)
            .open(host)?;
        let alignment = decoder.filler_mut::<Alignment>().and_then(|found| found.take());
        let token = encoder.params.token_id;
        if token as usize >= decoder.input_vocab() {
            return Err(Error::manifest(format!(
                "manifest /params/audio/token_id: found {token}, expected a token below {}, the rows of the embedding \
                 table",
                decoder.input_vocab()
            )));
        }
        let rules = LogitRules { suppressed, suppressed_first, times };
        Ok(Self { decoder, encoder, rules, alignment })
    }

    fn info(&self) -> OpenInfo {
        let mut media = MediaRules::default();
        media.audio.rate = self.encoder.params.front_end.rate;
        OpenInfo {
            placeholders: vec![self.encoder.params.token_id],
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
        let Some(samples) = self.encoder.heard else {
            return Err(Error::prompt("times of words: no audio was heard, expected one clip"));
        };
        let frames = samples.div_ceil(self.encoder.params.front_end.hop);
        self.decoder.reset(host)?;
        let start = Instant::now();
        let times = alignment.times(host, &mut self.decoder, before, said, frames)?;
        host.end(self.encoder.align_span, start);
        Ok(Answer { tokens: said.to_vec(), times, ..Answer::default() })
    }
}

impl Generator for Whisper {
    qhx_op::inner_generator!(decoder);

    fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
        let token = self.encoder.clip(segment)?.1;
        let pieces = vec![Piece::Part { token, positions: 1, frames: None, part: None }];
        Ok(Placement { marker: token, pieces, ..Placement::default() })
    }

    fn reset(&mut self, host: &mut Host) -> Result<()> {
        self.encoder.heard = None;
        self.decoder.reset(host)
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        let mut tokens = Vec::new();
        let mut heard = None;
        for segment in segments {
            match segment {
                Segment::Tokens(ids) => tokens.extend_from_slice(ids),
                Segment::Audio { .. } if heard.is_none() => {
                    let (clip, token) = self.encoder.clip(segment)?;
                    heard = Some(clip);
                    tokens.push(token);
                }
                Segment::Audio { .. } => {
                    return Err(Error::prompt("the prompt has two audio clips, expected one"));
                }
                other => return Err(not_taken(host.op(), other)),
            }
        }
        match heard {
            // Of what is consumed already, every row has attended to another clip.
            Some(_) if self.decoder.state().position() > 0 => {
                return Err(Error::prompt(
                    "audio begins a transcription: the state holds another one; reset it first",
                ));
            }
            Some(clip) => self.encoder.run(host, clip)?,
            None if self.encoder.heard.is_none() => {
                return Err(Error::prompt("the prompt has no audio, expected one clip"));
            }
            None => {}
        }
        self.decoder.prefill(host, &[Segment::Tokens(&tokens)])
    }

    fn export_state(&mut self, _: &mut Host) -> Result<Vec<u8>> {
        Err(Error::unsupported("exporting its state, which attends to a clip"))
    }
}

/// The encoder, and what the decoder reads of it.
#[derive(Debug)]
struct Encoder {
    graph: GraphId,
    params: AudioParams,
    log_mel: LogMel,
    mel: FloatInput,
    frames: usize,
    /// `cross_k_0` and so on, with the buffer that holds it and the length of that.
    outputs: Vec<(String, BufferId, View)>,
    /// Samples of the clip that was encoded since the last reset.
    heard: Option<usize>,
    span: SpanId,
    align_span: SpanId,
}

impl Encoder {
    fn open(host: &mut Host) -> Result<Self> {
        #[derive(Deserialize)]
        struct Params {
            encoder: String,
        }
        let Params { encoder } = host.params()?;
        let graph = host.require_graph("/plan/params/encoder", &encoder)?;
        let params: AudioParams = host.require("/params/audio")?;
        let log_mel = LogMel::new(params.front_end.clone())?;
        let port = host.input(graph, "mel")?;
        let (frames, mels) = host.rows_of(graph, port)?;
        if mels != log_mel.mels() || frames == 0 {
            return Err(Error::graph(format!(
                "graph {encoder:?}: tensor {}: expected rows of {} mels, as params.audio.front_end makes them",
                host.tensor(graph, port),
                log_mel.mels()
            )));
        }
        let names: Vec<String> =
            host.graph(graph).outputs.iter().map(|tensor| tensor.role.clone()).collect();
        let mut outputs = Vec::new();
        for name in names.into_iter().filter(|name| name.starts_with("cross_")) {
            let view = {
                let port = host.output(graph, &name)?;
                host.view_for(graph, port)?
            };
            outputs.push((name, view.buffer, view));
        }
        let mel = FloatInput::require(host, graph, "mel")?;
        let (span, align_span) = (host.span("encoder"), host.span("align"));
        let heard = None;
        Ok(Self { graph, params, log_mel, mel, frames, outputs, heard, span, align_span })
    }

    /// The clip of a segment that the encoder takes, and the token at whose position it stands.
    fn clip<'a>(&self, segment: &Segment<'a>) -> Result<(Clip<'a>, u32)> {
        let FrontEnd { rate, hop, .. } = self.params.front_end;
        let clip = Clip::of_segment(segment, rate)?;
        let (found, max) = (clip.samples().len(), self.frames * hop);
        if found > max {
            let seconds = |samples: usize| samples as f64 / f64::from(rate.max(1));
            return Err(Error::prompt(format!(
                "audio of {:.2} s, the encoder takes {:.2} s at once; take less of it, or have `qhx transcribe` cut it \
                 into windows",
                seconds(found),
                seconds(max)
            )));
        }
        Ok((clip, self.params.token_id))
    }

    /// Encodes a clip, with silence behind it up to the encoder's length.
    fn run(&mut self, host: &mut Host, clip: Clip<'_>) -> Result<()> {
        let start = Instant::now();
        self.heard = None;
        let mut samples = clip.samples().to_vec();
        samples.resize(self.frames * self.params.front_end.hop, 0.0);
        let mels = self.log_mel.mels();
        let mut rows = vec![0.0; self.frames * mels];
        let padded = Clip::new(&samples, self.params.front_end.rate, self.params.front_end.rate)?;
        self.log_mel.write(padded, &mut rows)?;
        limit_range(&mut rows, RANGE);
        rows.iter_mut().for_each(|value| *value = (*value + 4.0) / 4.0);
        host.dump_values("mel", &rows, &[self.frames, mels])?;
        self.mel.write(host, &rows)?;
        host.execute(self.graph)?;
        for (name, _, view) in &self.outputs {
            host.dump(name, *view, &[view.len])?;
        }
        self.heard = Some(clip.samples().len());
        host.end(self.span, start);
        Ok(())
    }
}

/// Binds the inputs `cross_*` of the decoder to what the encoder writes.
#[derive(Debug)]
struct Cross {
    outputs: Vec<(String, BufferId, View)>,
}

impl Filler for Cross {
    fn bind(&mut self, host: &mut Host, pass: GraphVariant<'_>) -> Result<()> {
        for &graph in pass.graphs {
            let wanted: Vec<(usize, String)> = host
                .graph(graph)
                .inputs
                .iter()
                .enumerate()
                .filter(|(_, tensor)| tensor.role.starts_with("cross_"))
                .map(|(index, tensor)| (index, tensor.role.clone()))
                .collect();
            for (index, role) in wanted {
                let port = Port::Input(index);
                let tensor = host.tensor(graph, port);
                let found = self.outputs.iter().find(|(name, ..)| *name == role);
                let fits =
                    |view: &View| view.len == tensor.elements() && view.dtype == tensor.dtype;
                let Some((_, buffer, _)) = found.filter(|(.., view)| fits(view)) else {
                    let what =
                        format!("the encoder has no output {role:?} of that length and type");
                    return Err(host.misfit(graph, port, what));
                };
                let buffer = *buffer;
                host.bind(graph, port, buffer, 0)?;
            }
        }
        Ok(())
    }

    fn fill(&mut self, _: &mut Host, _: Chunk<'_>) -> Result<()> {
        Ok(())
    }
}

/// Learned positions: rows of a table for the input `pos` of the first shard.
#[derive(Debug)]
struct Positions {
    table: Embedding,
    inputs: Vec<FloatInput>,
    /// Positions of the step.
    places: Vec<u32>,
}

impl Positions {
    fn open(host: &mut Host, hidden: usize) -> Result<Self> {
        let table = Embedding::open_at(host, POSITIONS, hidden, None)?;
        Ok(Self { table, inputs: Vec::new(), places: Vec::new() })
    }
}

impl Filler for Positions {
    fn bind(&mut self, host: &mut Host, pass: GraphVariant<'_>) -> Result<()> {
        self.inputs.push(self.table.bind(host, pass.graphs[0], "pos", pass.rows)?);
        self.places.reserve(pass.rows);
        Ok(())
    }

    fn fill(&mut self, host: &mut Host, chunk: Chunk<'_>) -> Result<()> {
        self.places.clear();
        self.places.extend((chunk.position..).take(chunk.tokens.len()).map(|at| at as u32));
        self.table.fill(host, &self.places, &self.inputs[chunk.pass])
    }
}
