//! Building blocks of recipes: ours, and those of any other program.
//!
//! | part | for |
//! |---|---|
//! | [`Reader`] | checked values of `config.json` |
//! | [`Layers`] | projections, norms, MLPs and heads from the tensors of a checkpoint |
//! | [`Attention`], [`Attend`], [`mix`], [`rope`], [`rotate`] | softmax attention over a cache or within a text |
//! | [`CrossRows`], [`kept_mask`] | what a decoder attends to of an encoder |
//! | [`decoder`], [`decoder_of`], [`steps`], [`shards`], [`prefill_rows`], [`whole_prefill_rows`], [`check_shape`] | graphs to contexts, and the plan that runs them |
//! | [`Mamba2`], [`Scan`], [`CausalConv`] | recurrent layers, and the convolution before a recurrence |
//! | [`Experts`], [`expert_decoder`] | layers with many experts, whose weights stay on the host |
//! | [`matrices`] | tensors of the checkpoint as files that the host reads |
//! | [`Siglip`], [`Square`], [`VISION_WEIGHTS`] | a vision tower for one square image |
//! | [`ENCODER_WEIGHTS`], [`encoder_precision`] | how the weights of an encoder of audio are stored |
//! | [`Processor`] | how a checkpoint's files say that images become numbers |
//! | [`added_tokens`] | numbers of tokens that `config.json` does not say |
//! | [`DecoderParams`], [`object`], [`one_or_many`] | keys of the manifest |
//!
//! The ops beneath are methods of [`qhx_graph::builder::GraphBuilder`].

mod attention;
mod block;
mod contexts;
mod conv;
mod experts;
mod layers;
mod mamba2;
mod matrices;
mod processor;
mod reader;
mod siglip;
mod square;
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
pub(crate) use conv::gcd;
pub use conv::{CausalConv, conv_taps};
pub(crate) use experts::BEFORE_SQUARE;
pub use experts::{
    Clamp, EXPERTS, ExpertForm, ExpertInputs, ExpertNames, Experts, expert_decoder, expert_ranges,
};
pub use layers::{Layers, Mlp};
pub(crate) use layers::{filters, scaled};
pub use mamba2::{GateNorm, Mamba2, Scan};
pub use matrices::{MatrixFile, matrices};
pub(crate) use matrices::{table_bytes, write_rows};
pub use processor::{Processor, added_tokens};
pub use reader::Reader;
pub(crate) use reader::same;
pub(crate) use siglip::Blocks;
pub use siglip::{ENCODER_WEIGHTS, Siglip, SiglipSizes, VISION_WEIGHTS, encoder_precision};
pub use square::{Square, processor_size, tower_names};
pub use step::Step;
