//! `qwen3_5_generate`: any number of decode shards, a separate or fused head, images where there is a vision graph.

use qhx_kit::decoder::{Decoder, DecoderGraphs, LayerState};
use qhx_kit::fill::{CausalMask, RopeParams};
use qhx_kit::schema;
use qhx_kit::state::StateCarrier;
use qhx_kit::vision::{Mrope, VisionEncoder, VisionPrompts, VisionTokens};
use qhx_op::{
    Error, Generator, Host, Modality, Op, OpDescription, OpenInfo, Placement, Result, Segment,
    Task, View,
};

const NAME: &str = "qwen3_5_generate";
/// Fraction of a head that is rotated when the manifest has none: the family's own.
const ROTARY_FRACTION: f64 = 0.25;
/// Base of the rotary frequencies when the manifest has none: the family's own.
const ROPE_THETA: f64 = 1e7;
/// Pairs by axis when the manifest has none (`Qwen3_5TextRotaryEmbedding`).
const SECTION: [usize; 3] = [11, 11, 10];
/// Tokens around images when the manifest has none (`Qwen3_5Config`).
const TOKENS: VisionTokens =
    VisionTokens { image: 248_056, video: 248_057, start: 248_053, end: 248_054 };

/// Text generation for the Qwen3.5 hybrid family.
#[derive(Debug)]
pub struct Generate {
    decoder: Decoder,
    prompts: VisionPrompts,
}

fn rope(host: &Host) -> Result<RopeParams> {
    let mut params = RopeParams::read(host, "/params")?;
    params.theta.get_or_insert(ROPE_THETA);
    let declared = |key: &str| host.value::<f64>(&format!("/params/{key}"));
    if declared("rotary_dim")?.is_none() && declared("partial_rotary_factor")?.is_none() {
        // The whole head, so far.
        params.rotary_dim =
            params.rotary_dim.map(|head| (head as f64 * ROTARY_FRACTION).round() as usize);
    }
    Ok(params)
}

impl Op for Generate {
    fn describe() -> OpDescription {
        let mut params_schema = schema::decoder(["embeds"]);
        params_schema["properties"]["vision"] = VisionEncoder::schema();
        OpDescription {
            name: NAME.to_owned(),
            summary: "Generation for the Qwen3.5 hybrid family (gated delta rule and softmax attention), from text, \
                      images and videos"
                .to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text, Modality::Image, Modality::Video],
            params_schema,
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let graphs = DecoderGraphs::find(host)?;
        let state = StateCarrier::new(host, &graphs.groups())?;
        let layers = [LayerState::Caches(&["k", "v"]), LayerState::States(&["conv", "ssm"])];
        graphs.check_layers(host, &state, &layers)?;
        let prompts = VisionPrompts::open(host, Self::describe(), graphs.hidden(), TOKENS)?;
        let deepstack = prompts.encoder().map_or(0, VisionEncoder::layers);
        if deepstack > 0 {
            return Err(Error::graph(format!(
                "the vision graph gives rows for {deepstack} layers of the decoder (deepstack), expected none: {NAME} \
                 puts the rows of an image in the prompt alone"
            )));
        }
        let mask = CausalMask::new(state.capacity().unwrap_or(0));
        let rope = Mrope::interleaved(rope(host)?, SECTION, prompts.encoder().is_some())?;
        let decoder = Decoder::builder(NAME, graphs, state).filler(rope).mask(mask).open(host)?;
        prompts.check_tokens(decoder.input_vocab())?;
        Ok(Self { decoder, prompts })
    }

    fn info(&self) -> OpenInfo {
        // A bundle of text alone need not have these tokens, nor say them.
        let placeholders = match self.prompts.encoder() {
            Some(_) => self.prompts.placeholders(),
            None => Vec::new(),
        };
        OpenInfo { placeholders, ..self.decoder.info() }
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(self)
    }
}

impl Generator for Generate {
    qhx_op::inner_generator!(decoder);

    fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
        self.prompts.place(segment)
    }

    fn prefill(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        let text = segments.iter().all(|segment| matches!(segment, Segment::Tokens(_)));
        if text && self.prompts.encoder().is_none() {
            return self.decoder.prefill(host, segments);
        }
        self.prompts.encode(host, &self.decoder, segments)?.prefill(host, &mut self.decoder)
    }
}
