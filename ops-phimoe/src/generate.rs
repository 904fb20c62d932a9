//! `phimoe_generate`: decoding with a KV cache, prompts in chunks, with experts behind the graph of each layer.

use qhx_kit::decoder::{Decoder, LayerState};
use qhx_kit::experts::Rule;
use qhx_kit::fill::{CausalMask, Rope};
use qhx_kit::schema;
use qhx_kit::state::StateCarrier;
use qhx_op::{Generator, Host, Modality, Op, OpDescription, OpenInfo, Result, Task};
use serde_json::json;

use crate::names::Params;

const NAME: &str = "phimoe_generate";
/// `router_jitter_noise` of the model class.
const JITTER: f32 = 0.01;

/// Text generation for PhiMoE decoders.
#[derive(Debug)]
pub struct Generate(Decoder);

impl Op for Generate {
    fn describe() -> OpDescription {
        let layers = |description: &str, default: &str| {
            let mut graphs = schema::graphs(description);
            graphs["default"] = default.into();
            graphs
        };
        let mut params_schema = schema::decoder([]);
        params_schema["required"] = json!([]);
        for (key, value) in [
            (
                "decode",
                layers(
                    "Graphs of attention and router for one token, one a layer, in order: names, of which one * \
                     stands for the layer's number.",
                    "a*",
                ),
            ),
            (
                "prefill",
                layers(
                    "As decode, for several tokens; several numbers of rows may be there. Graphs without caches take a \
                     text's first tokens. May be absent from the bundle, together with ffn_prefill.",
                    "pf*",
                ),
            ),
            (
                "within",
                json!({
                    "description": "For each smaller context, graphs as those of decode and prefill.",
                    "type": "array",
                    "items": schema::graphs("Names, of which one * stands for the layer's number.")
                }),
            ),
            (
                "lmhead",
                json!({
                    "description": "Graph from hidden state to logits, final norm included.",
                    "default": "lmhead_ar1",
                    "type": "string"
                }),
            ),
        ] {
            params_schema["properties"][key] = value;
        }
        OpDescription {
            name: NAME.to_owned(),
            summary:
                "Text generation for PhiMoE decoders: two experts a token, weights on the host"
                    .to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text],
            params_schema,
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let graphs = host.params::<Params>()?.graphs(host)?;
        let state = StateCarrier::new(host, &graphs.groups())?;
        graphs.check_layers(host, &state, &[LayerState::Caches(&["k", "v"])])?;
        let window = host.value::<usize>("/params/sliding_window")?.filter(|window| *window > 0);
        let mask = CausalMask::new(state.capacity().unwrap_or(0));
        let jitter = host.value("/params/router_jitter_noise")?.unwrap_or(JITTER);
        let decoder = Decoder::builder(NAME, graphs, state)
            .rope(Rope::from_params(host, "/params")?)
            .mask(mask.window(window.unwrap_or(usize::MAX)))
            .router(Rule::Sparsemixer { jitter });
        decoder.open(host).map(Self)
    }

    fn info(&self) -> OpenInfo {
        self.0.info()
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(&mut self.0)
    }
}
