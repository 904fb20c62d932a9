//! The bytes that each token stands for within a text.

use qhx_base::{Result, error};
use tokenizers::{Decoder as _, DecoderWrapper};

use super::{Tokenizer, guarded};
use crate::stream::{byte_token, push_level};

/// A step from a token to its bytes.
enum Step<'a> {
    /// `ByteLevel`: each character is a byte.
    Level,
    /// `ByteFallback`: `<0x0A>` is a byte.
    Fallback,
    /// Changes each token by itself, behind the first one of a text.
    Each(&'a DecoderWrapper),
}

/// Converter from tokens to bytes: see [`Tokenizer::token_bytes`].
pub struct TokenBytes<'a> {
    tokenizer: &'a Tokenizer,
    steps: Vec<Step<'a>>,
}

impl std::fmt::Debug for TokenBytes<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("TokenBytes").field("tokenizer", self.tokenizer).finish_non_exhaustive()
    }
}

impl Tokenizer {
    /// The bytes of tokens, where a text is the bytes of its tokens in a row. What a decoder removes from the beginning
    /// of a text is left out of account.
    ///
    /// # Errors
    /// When the bytes of a token depend on those around it.
    pub fn token_bytes(&self) -> Result<TokenBytes<'_>> {
        let mut steps = Vec::new();
        let known = self.decoder().is_some_and(|decoder| add_steps(decoder, &mut steps));
        if known {
            return Ok(TokenBytes { tokenizer: self, steps });
        }
        let path = self.path().display();
        Err(error!(Usage, "{path}: its decoder gives tokens no bytes of their own")
            .hint("expected a decoder of ByteLevel, ByteFallback, Replace or Metaspace"))
    }
}

/// False where a decoder looks at several tokens.
fn add_steps<'a>(decoder: &'a DecoderWrapper, steps: &mut Vec<Step<'a>>) -> bool {
    match decoder {
        DecoderWrapper::Sequence(sequence) => {
            return sequence.get_decoders().iter().all(|decoder| add_steps(decoder, steps));
        }
        DecoderWrapper::Fuse(_) | DecoderWrapper::Strip(_) => {}
        DecoderWrapper::ByteLevel(_) => steps.push(Step::Level),
        DecoderWrapper::ByteFallback(_) => steps.push(Step::Fallback),
        DecoderWrapper::Replace(_)
        | DecoderWrapper::Metaspace(_)
        | DecoderWrapper::WordPiece(_) => steps.push(Step::Each(decoder)),
        DecoderWrapper::BPE(_) | DecoderWrapper::CTC(_) => return false,
    }
    true
}

impl TokenBytes<'_> {
    /// The bytes of a token; none where it has no text, such as a special one.
    ///
    /// # Errors
    /// When the token cannot be decoded.
    pub fn of(&self, id: u32) -> Result<Vec<u8>> {
        let Some(mut token) = self.tokenizer.visible_token(id) else { return Ok(Vec::new()) };
        for step in &self.steps {
            match step {
                Step::Level => {
                    let mut bytes = Vec::with_capacity(token.len());
                    push_level(&mut bytes, &token);
                    return Ok(bytes);
                }
                Step::Fallback => {
                    if let Some(byte) = byte_token(&token) {
                        return Ok(vec![byte]);
                    }
                }
                Step::Each(decoder) => {
                    let tokens = vec![String::new(), token];
                    let decoded = guarded(|| decoder.decode_chain(tokens));
                    let decoded = decoded.map_err(|e| self.tokenizer.not_decoded(&e))?;
                    token = decoded.into_iter().next_back().unwrap_or_default();
                }
            }
        }
        Ok(token.into_bytes())
    }
}
