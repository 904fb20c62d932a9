//! `llama_generate`: decoding with a KV cache, prompts in chunks.
//!
//! Where some layers see only the last positions of a window, their caches are rings, and they have a mask of their
//! own.

use qhx_kit::decoder::DeclaredDecoder;
use qhx_op::{Generator, Host, Op, OpDescription, OpenInfo, Result};

const NAME: &str = "llama_generate";

/// Text generation for Llama-like decoders: a [`DeclaredDecoder`] under the name that bundles of the family have.
#[derive(Debug)]
pub struct Generate(DeclaredDecoder);

impl Op for Generate {
    fn describe() -> OpDescription {
        OpDescription {
            name: NAME.to_owned(),
            summary: "Text generation for Llama-like decoders (Llama, Mistral, Qwen2, Qwen3, Phi-3, SmolLM3, Granite, \
                      OLMo 2, Gemma 2)"
                .to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            ..DeclaredDecoder::describe()
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        DeclaredDecoder::open_as(host, NAME).map(Self)
    }

    fn info(&self) -> OpenInfo {
        self.0.info()
    }

    fn generator(&mut self) -> Option<&mut dyn Generator> {
        self.0.generator()
    }
}
