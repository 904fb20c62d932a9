//! `qwen3vl_generate`: prompts of text, images and videos over a decoder, which may have deepstack inputs.

use qhx_kit::decoder::{Decoder, DecoderGraphs, LayerState};
use qhx_kit::fill::{CausalMask, RopeParams};
use qhx_kit::schema;
use qhx_kit::state::StateCarrier;
use qhx_kit::vision::{Mrope, VisionEncoder, VisionPrompts, VisionTokens};
use qhx_op::{
    Error, ErrorCode, Generator, Host, Modality, Op, OpDescription, OpenInfo, Placement, Result,
    Segment, Task, View,
};

use crate::deepstack::Deepstack;

const NAME: &str = "qwen3vl_generate";
/// Base of the decoder's rotary tables, pairs by axis, and tokens around images, of published checkpoints.
const THETA: f64 = 5e6;
const SECTION: [usize; 3] = [24, 20, 20];
const TOKENS: VisionTokens =
    VisionTokens { image: 151_655, video: 151_656, start: 151_652, end: 151_653 };

/// Text generation for Qwen3-VL and Qwen2.5-VL.
#[derive(Debug)]
pub struct Generate {
    decoder: Decoder,
    prompts: VisionPrompts,
}

impl Op for Generate {
    fn describe() -> OpDescription {
        let mut params_schema = schema::decoder(["deepstack", "deepstack_*", "embeds"]);
        params_schema["properties"]["vision"] = VisionEncoder::schema();
        OpDescription {
            name: NAME.to_owned(),
            summary: "Text generation over images, videos and text (Qwen3-VL, Qwen2.5-VL)"
                .to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text, Modality::Image, Modality::Video],
            params_schema,
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let graphs = DecoderGraphs::find(host)?;
        let hidden = graphs.hidden();
        let state = StateCarrier::new(host, &graphs.groups())?;
        graphs.check_layers(host, &state, &[LayerState::Caches(&["k", "v"])])?;
        let mut rope = RopeParams::read(host, "/params")?;
        rope.theta.get_or_insert(THETA);
        let prompts = VisionPrompts::open(host, Self::describe(), hidden, TOKENS)?;
        // Axes take turns unless the manifest declares that they do not: those of Qwen2.5-VL stand behind each other.
        let images = prompts.encoder().is_some();
        let rope = match host.value::<bool>("/params/rope_scaling/mrope_interleaved")? {
            Some(false) => Mrope::declared(rope, images),
            _ => Mrope::interleaved(rope, SECTION, images),
        }?;
        let mask = CausalMask::new(state.capacity().unwrap_or(0));
        let mut decoder = Decoder::builder(NAME, graphs, state)
            .filler(rope)
            .filler(Deepstack::new(hidden))
            .mask(mask)
            .open(host)?;
        let layers = prompts.encoder().map_or(0, VisionEncoder::layers);
        deepstack(&mut decoder)?.check(layers)?;
        prompts.check_tokens(decoder.input_vocab())?;
        Ok(Self { decoder, prompts })
    }

    fn info(&self) -> OpenInfo {
        OpenInfo {
            // Those that stand for nothing in a bundle of text alone are refused there, too.
            placeholders: self.prompts.placeholders(),
            ..self.decoder.info()
        }
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
        let mut prompt = self.prompts.encode(host, &self.decoder, segments)?;
        let images = prompt.images.iter_mut();
        let layers = images.map(|p| (p.first, std::mem::take(&mut p.features.deepstack)));
        deepstack(&mut self.decoder)?.put(layers.collect());
        let result = prompt.prefill(host, &mut self.decoder);
        deepstack(&mut self.decoder)?.clear();
        result
    }
}

fn deepstack(decoder: &mut Decoder) -> Result<&mut Deepstack> {
    decoder.filler_mut().ok_or_else(lost)
}

/// The decoder was made with these fillers.
fn lost() -> Error {
    Error::new(ErrorCode::INTERNAL, "a filler of the decoder is not there")
}
