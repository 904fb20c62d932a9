//! Building blocks of recipes: ours, and those of any other program.
//!
//! | part | for |
//! |---|---|
//! | [`Reader`] | checked values of `config.json` |
//! | [`Layers`] | projections, norms, MLPs and heads from the tensors of a checkpoint |
//! | [`Attention`], [`Attend`], [`mix`], [`rope`], [`rotate`] | softmax attention over a cache or within a text |
//! | [`CrossRows`], [`kept_mask`] | what a decoder attends to of an encoder |
//! | [`decoder`], [`decoder_of`], [`steps`], [`shards`], [`prefill_rows`], [`whole_prefill_rows`], [`check_shape`] | graphs to contexts, and the plan that runs them |
//! | [`Experts`], [`expert_decoder`] | layers with many experts, whose weights stay on the host |
//! | [`matrices`] | tensors of the checkpoint as files that the host reads |
//! | [`Siglip`], [`VISION_WEIGHTS`] | a vision tower for one square image |
//! | [`ENCODER_WEIGHTS`], [`encoder_precision`] | how the weights of an encoder of audio are stored |
//! | [`Processor`] | how a checkpoint's files say that images become numbers |
//! | [`DecoderParams`], [`object`], [`one_or_many`] | keys of the manifest |
//!
//! The ops beneath are methods of [`qhx_graph::builder::GraphBuilder`].

mod attention;
mod block;
mod contexts;
mod experts;
mod layers;
mod matrices;
mod processor;
mod reader;
mod siglip;
mod step;

pub use attention::{
    Attend, AttendInputs, Attention, CrossRows, Heads, Mixed, Past, kept_mask, mix, mix_past, rope,
    rotate,
};
pub use contexts::{
    Decoder, DecoderParams, PREFILL_ROWS, check_shape, decoder, decoder_of, object, one_or_many,
    prefill_rows, shards, steps, whole_prefill_rows,
};
pub(crate) use contexts::{MAX_MASK, sized};
pub use experts::{EXPERTS, ExpertInputs, ExpertNames, Experts, expert_decoder, expert_ranges};
pub(crate) use layers::filters;
pub use layers::{Layers, Mlp};
pub use matrices::{MatrixFile, matrices};
pub(crate) use matrices::{table_bytes, write_rows};
pub use processor::Processor;
pub use reader::Reader;
pub(crate) use siglip::Blocks;
pub use siglip::{ENCODER_WEIGHTS, Siglip, SiglipSizes, VISION_WEIGHTS, encoder_precision};
pub use step::Step;
