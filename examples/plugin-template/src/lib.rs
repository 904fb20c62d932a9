//! `my_generate`: the smallest complete host-op. One graph, `decode`, takes the embedding row of a
//! token and gives logits; what it has seen so far is in its caches and states.
//!
//! The kit's [`Decoder`] does the work: it fills the inputs, executes the graphs and commits the
//! state, for one token and for a prompt. Places to change are marked with `CHANGE`.

use qhx_kit::decoder::{Decoder, DecoderGraphs};
use qhx_kit::fill::{CausalMask, Rope};
use qhx_kit::schema;
use qhx_kit::state::StateCarrier;
use qhx_op::{Generator, Host, Modality, Op, OpDescription, OpenInfo, Result, Task};

/// CHANGE: manifests select the op by this name (`plan.steps[0].host`).
const NAME: &str = "my_generate";

/// The open op: everything was found and checked when it was opened, so that a step only fills,
/// executes and commits.
#[derive(Debug)]
pub struct MyOp {
    decoder: Decoder,
}

impl Op for MyOp {
    fn describe() -> OpDescription {
        OpDescription {
            name: NAME.to_owned(),
            // CHANGE: one sentence.
            summary: "A host-op of my own".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Generate],
            modalities: vec![Modality::Text],
            // CHANGE: what the op reads from `plan.params`: `decode`, `prefill`, `lmhead`, and the
            // names of tensors. Give further roles of tensors as the argument.
            params_schema: schema::decoder([]),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let graphs = DecoderGraphs::find(host)?;
        // Pairs past_X with new_X (rows that are appended) and present_X (states that swap).
        let state = StateCarrier::new(host, &graphs.groups())?;
        // CHANGE: what the host fills besides the embedding's row, where a graph has it. What is
        // neither a rope nor a mask is a `qhx_kit::decoder::Filler` of your own.
        let rope = Rope::from_params(host, "/params")?;
        let mask = CausalMask::new(state.capacity().unwrap_or(0));
        let decoder = Decoder::builder(NAME, graphs, state).rope(rope).mask(mask).open(host)?;
        Ok(Self { decoder })
    }

    fn info(&self) -> OpenInfo {
        self.decoder.info()
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        Some(&mut self.decoder)
    }
}

qhx_op::register_ops!(MyOp);
qhx_op::export_plugin!();
