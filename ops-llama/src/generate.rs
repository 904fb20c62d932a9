//! Decoders that bundles know by a name of their own, each a [`DeclaredDecoder`]: the kit's form with a KV cache,
//! prompts in chunks, and what the manifest declares besides.
//!
//! Where some layers see only the last positions of a window, their caches are rings, and they have a mask of their
//! own.

use qhx_kit::decoder::DeclaredDecoder;
use qhx_op::{Generator, Host, Op, OpDescription, OpenInfo, Result};

/// Declares a host-op: its type, its name in manifests, and what it is for.
macro_rules! decoder {
    ($(#[doc = $doc:literal] $op:ident: $name:literal, $summary:literal;)*) => {$(
        #[doc = $doc]
        #[derive(Debug)]
        pub struct $op(DeclaredDecoder);

        impl Op for $op {
            fn describe() -> OpDescription {
                OpDescription {
                    name: $name.to_owned(),
                    summary: $summary.to_owned(),
                    version: env!("CARGO_PKG_VERSION").to_owned(),
                    ..DeclaredDecoder::describe()
                }
            }

            fn open(host: &mut Host) -> Result<Self> {
                DeclaredDecoder::open_as(host, $name).map(Self)
            }

            fn info(&self) -> OpenInfo {
                self.0.info()
            }

            fn generator(&mut self) -> Option<&mut dyn Generator> {
                self.0.generator()
            }
        }
    )*};
}

decoder! {
    /// Text generation for Llama-like decoders.
    Generate: "llama_generate",
        "Text generation for Llama-like decoders (Llama, Mistral, Qwen2, Qwen3, Phi-3, SmolLM3, Granite, OLMo 2, Gemma 2)";
    /// Text generation over published bundles of Qwen3, and of decoders with its graphs.
    Qwen3: "qwen3_generate", "Text generation over published bundles of Qwen3 and its like";
    /// Text generation over published bundles of LFM2, whose convolutions replace a state.
    Lfm: "lfm_generate", "Text generation over published bundles of LFM2";
    /// Text generation over published bundles whose layers are spread over several contexts.
    Split: "split_generate", "Text generation over published bundles in several contexts";
}
