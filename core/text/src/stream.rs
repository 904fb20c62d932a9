//! Detokenising an answer token by token.
//!
//! The text of a token depends on its neighbours: a character may be spread over several byte
//! tokens, and many decoders drop the space before the first token. So the tokenizer's decoder is
//! taken apart into its stages, and each stage keeps what later tokens may still change: the bytes
//! of an unfinished character, or spaces that it removes from the end. All other text comes out at
//! once and is final. What is buffered does not grow with the answer.
//!
//! The pieces joined are what [`Tokenizer::decode`] makes of all the tokens, with two exceptions:
//! - Where byte tokens of a byte fallback are not UTF-8, the library replaces all of the run, also
//!   the characters in it that were complete. Here those stay.
//! - A `Replace` behind a `Fuse` sees one piece at a time, and so no match that spans two of them.

#[cfg(test)]
mod tests;

use std::str::from_utf8;

use qhx_base::Result;
use tokenizers::decoders::DecoderWrapper;

use super::Tokenizer;

const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;

/// Turns tokens into pieces of text that are complete characters with the right spaces.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    stages: Vec<Stage>,
    /// Text that became complete with the last token.
    piece: String,
}

impl Detokenizer {
    /// At the beginning of a text.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        Self {
            tokenizer: tokenizer.clone(),
            stages: stages(tokenizer.decoder()),
            piece: String::new(),
        }
    }

    /// Starts over, after a prompt: the first token continues its last words, and also its last
    /// character where the prompt ends amid one.
    ///
    /// # Errors
    /// When a token of the prompt cannot be decoded.
    pub fn start(&mut self, prompt: &[u32]) -> Result<()> {
        self.stages = stages(self.tokenizer.decoder());
        for &token in prompt {
            self.push(token)?;
        }
        self.piece.clear();
        let Self { tokenizer, stages, .. } = self;
        for stage in stages {
            match stage {
                Stage::Bytes(bytes) => bytes.shown = bytes.marks(bytes.pending.len()),
                Stage::Suffix(Suffix { decoder, held: Some(held), shown, .. }) => {
                    let token = held.clone();
                    *shown = tokenizer.guard_decoding(|| last_of(decoder, vec![token]))?;
                }
                _ => {}
            }
        }
        Ok(())
    }

    /// Takes a token. Returns the text that became final, which may be empty.
    ///
    /// # Errors
    /// When the token cannot be decoded.
    pub fn push(&mut self, token: u32) -> Result<&str> {
        self.piece.clear();
        let Self { tokenizer, stages, piece } = self;
        if let Some(token) = tokenizer.visible_token(token) {
            tokenizer.guard_decoding(|| pass(stages, &token, piece))?;
        }
        Ok(&self.piece)
    }

    /// Ends the text: bytes that no character was made of become U+FFFD.
    ///
    /// # Errors
    /// When the rest cannot be decoded.
    pub fn finish(&mut self) -> Result<&str> {
        self.piece.clear();
        let Self { tokenizer, stages: active, piece } = self;
        tokenizer.guard_decoding(|| {
            for i in 0..active.len() {
                let text = active[i].finish()?;
                pass_text(&mut active[i + 1..], &text, piece)?;
            }
            Ok(())
        })?;
        self.stages = stages(self.tokenizer.decoder());
        Ok(&self.piece)
    }

    /// Bytes that wait for later tokens.
    #[cfg(test)]
    fn held(&self) -> usize {
        let held = |stage: &Stage| match stage {
            Stage::Bytes(bytes) => bytes.pending.len(),
            Stage::Suffix(suffix) => suffix.held.as_ref().map_or(0, String::len),
            Stage::Strip(strip) => strip.held,
            _ => 0,
        };
        self.stages.iter().map(held).sum()
    }
}

/// One step of a decoder, with what it remembers of the tokens so far.
#[derive(Debug)]
enum Stage {
    /// No decoder: tokens are joined by spaces.
    Spaces { begun: bool },
    /// A decoder that works on each token by itself, or on each piece behind a stage that fuses.
    Each(DecoderWrapper),
    /// The same, where only the first token of a text is decoded as the first of a list.
    First { decoder: DecoderWrapper, begun: bool },
    /// `CTC`: a token like the one before is dropped.
    Repeats { decoder: DecoderWrapper, before: Option<String> },
    /// `BPEDecoder`: the last token's suffix is dropped, the others' become spaces.
    Suffix(Suffix),
    /// `ByteLevel` and `ByteFallback`.
    Bytes(Bytes),
    /// `Strip` behind a stage that fuses: it sees the ends of the whole text.
    Strip(Strip),
}

/// The stages of a decoder.
fn stages(decoder: Option<&DecoderWrapper>) -> Vec<Stage> {
    let mut stages = Vec::new();
    match decoder {
        Some(decoder) => {
            add_stages(decoder, &mut false, &mut stages);
        }
        None => stages.push(Stage::Spaces { begun: false }),
    }
    stages
}

/// `fused`: the decoders before have joined all tokens into one.
fn add_stages(decoder: &DecoderWrapper, fused: &mut bool, stages: &mut Vec<Stage>) {
    let own = || decoder.clone();
    stages.push(match decoder {
        DecoderWrapper::Sequence(sequence) => {
            for decoder in sequence.get_decoders() {
                add_stages(decoder, fused, stages);
            }
            return;
        }
        DecoderWrapper::Fuse(_) => {
            *fused = true;
            return;
        }
        DecoderWrapper::Strip(strip) if *fused => {
            let (content, start, stop) = (strip.content, strip.start, strip.stop);
            Stage::Strip(Strip { content, start, stop, held: 0 })
        }
        // A fused text is no byte token, whatever is in it.
        DecoderWrapper::ByteFallback(_) if *fused => return,
        _ if *fused => Stage::Each(own()),
        DecoderWrapper::ByteFallback(_) => Stage::Bytes(Bytes::default()),
        DecoderWrapper::ByteLevel(_) => {
            *fused = true;
            Stage::Bytes(Bytes { level: true, ..Bytes::default() })
        }
        DecoderWrapper::Metaspace(_) | DecoderWrapper::WordPiece(_) => {
            Stage::First { decoder: own(), begun: false }
        }
        DecoderWrapper::CTC(_) => Stage::Repeats { decoder: own(), before: None },
        DecoderWrapper::BPE(bpe) => Stage::Suffix(Suffix {
            decoder: own(),
            suffix: bpe.suffix.clone(),
            held: None,
            shown: String::new(),
        }),
        DecoderWrapper::Replace(_) | DecoderWrapper::Strip(_) => Stage::Each(own()),
    });
}

/// Text that a decoder makes of the last of `tokens`.
fn last_of(decoder: &DecoderWrapper, tokens: Vec<String>) -> tokenizers::Result<String> {
    use tokenizers::Decoder;
    Ok(decoder.decode_chain(tokens)?.pop().unwrap_or_default())
}

/// Sends a token, or behind a stage that fuses a piece of text, through the stages to `out`.
fn pass(stages: &mut [Stage], token: &str, out: &mut String) -> tokenizers::Result<()> {
    let Some((stage, rest)) = stages.split_first_mut() else {
        out.push_str(token);
        return Ok(());
    };
    let decoded = match stage {
        Stage::Spaces { begun } => {
            if std::mem::replace(begun, true) {
                pass(rest, " ", out)?;
            }
            return pass(rest, token, out);
        }
        Stage::Each(decoder) => last_of(decoder, vec![token.to_owned()])?,
        Stage::First { decoder, begun } => {
            let mut tokens = vec![token.to_owned()];
            if std::mem::replace(begun, true) {
                tokens.insert(0, String::new());
            }
            last_of(decoder, tokens)?
        }
        Stage::Repeats { decoder, before } => {
            if before.as_deref() == Some(token) {
                return Ok(());
            }
            *before = Some(token.to_owned());
            last_of(decoder, vec![token.to_owned()])?
        }
        Stage::Suffix(suffix) => {
            pass_text(rest, &suffix.release(false)?, out)?;
            if token.contains(suffix.suffix.as_str()) {
                suffix.held = Some(token.to_owned());
                return Ok(());
            }
            token.to_owned()
        }
        Stage::Bytes(bytes) if bytes.level => {
            bytes.push_level(token);
            return pass_text(rest, &bytes.take(false), out);
        }
        Stage::Bytes(bytes) => {
            if let Some(byte) = byte_token(token) {
                bytes.pending.push(byte);
                return pass_text(rest, &bytes.take(false), out);
            }
            pass_text(rest, &bytes.take(true), out)?;
            return pass(rest, token, out);
        }
        Stage::Strip(strip) => strip.take(token),
    };
    pass(rest, &decoded, out)
}

/// Text that a stage held back until now.
#[derive(Default)]
struct Buffered {
    text: String,
    /// Bytes of it that the prompt's own text ends with: later stages see them, the answer has
    /// them not.
    shown: usize,
}

/// Sends text that is no token through the stages. No text is no piece of one.
fn pass_text(
    stages: &mut [Stage],
    buffered: &Buffered,
    out: &mut String,
) -> tokenizers::Result<()> {
    let (shown, new) = buffered.text.split_at(buffered.shown);
    if !shown.is_empty() {
        pass(stages, shown, &mut String::new())?;
    }
    if !new.is_empty() {
        pass(stages, new, out)?;
    }
    Ok(())
}

impl Stage {
    /// The text that was held back, now that no token follows.
    fn finish(&mut self) -> tokenizers::Result<Buffered> {
        match self {
            Self::Bytes(bytes) => Ok(bytes.take(true)),
            Self::Suffix(suffix) => suffix.release(true),
            _ => Ok(Buffered::default()),
        }
    }
}

/// A token whose text depends on whether it is the last one.
#[derive(Debug)]
struct Suffix {
    decoder: DecoderWrapper,
    suffix: String,
    held: Option<String>,
    /// The prompt's own text of the token held.
    shown: String,
}

impl Suffix {
    /// The text of the token held.
    fn release(&mut self, last: bool) -> tokenizers::Result<Buffered> {
        use tokenizers::Decoder;
        let Some(held) = self.held.take() else { return Ok(Buffered::default()) };
        let tokens = if last { vec![held] } else { vec![held, String::new()] };
        let text = self.decoder.decode_chain(tokens)?.swap_remove(0);
        let before = std::mem::take(&mut self.shown);
        let common = text.chars().zip(before.chars()).take_while(|(a, b)| a == b);
        Ok(Buffered { shown: common.map(|(a, _)| a.len_utf8()).sum(), text })
    }
}

/// Bytes on their way to becoming characters.
#[derive(Debug, Default)]
struct Bytes {
    /// Tokens are written in the alphabet of `ByteLevel`, and not as `<0x41>`.
    level: bool,
    /// The beginning of a character.
    pending: Vec<u8>,
    /// Replacement characters that the prompt's own text has for the pending bytes.
    shown: usize,
}

impl Bytes {
    /// Replacement characters for `bytes` bytes that are the beginning of one character: a byte
    /// level makes one of them, a byte fallback one of each.
    fn marks(&self, bytes: usize) -> usize {
        if self.level { bytes.min(1) } else { bytes }
    }

    /// The complete characters, with replacements for what cannot become one. With `end` nothing
    /// stays pending.
    fn take(&mut self, end: bool) -> Buffered {
        let mut buffered = Buffered::default();
        let mut rest = self.pending.as_slice();
        while !rest.is_empty() {
            let (complete, broken) = match from_utf8(rest) {
                Ok(complete) => (complete, 0),
                Err(e) => {
                    let (complete, tail) = rest.split_at(e.valid_up_to());
                    let unfinished = if end { tail.len() } else { 0 };
                    let broken = e.error_len().unwrap_or(unfinished);
                    (from_utf8(complete).unwrap_or_default(), broken)
                }
            };
            if complete.is_empty() && broken == 0 {
                break;
            }
            if complete.is_empty() && buffered.text.is_empty() {
                // The prompt's character, broken as its own text shows it.
                buffered.shown = self.marks(broken).min(self.shown) * REPLACEMENT.len_utf8();
            }
            buffered.text.push_str(complete);
            buffered.text.extend(std::iter::repeat_n(REPLACEMENT, self.marks(broken)));
            rest = &rest[complete.len() + broken..];
            self.shown = 0;
        }
        let done = self.pending.len() - rest.len();
        self.pending.drain(..done);
        buffered
    }

    /// The bytes of a token of a byte-level vocabulary. A token with a character outside its
    /// alphabet, such as an added one, is text.
    fn push_level(&mut self, token: &str) {
        push_level(&mut self.pending, token);
    }
}

/// Adds the bytes of a token of a byte-level vocabulary, as [`Bytes::push_level`].
pub(super) fn push_level(bytes: &mut Vec<u8>, token: &str) {
    let before = bytes.len();
    for c in token.chars() {
        let Some(byte) = level_byte(c) else {
            bytes.truncate(before);
            bytes.extend_from_slice(token.as_bytes());
            return;
        };
        bytes.push(byte);
    }
}

/// The byte that `<0x41>` stands for, read as `tokenizers` reads it.
pub(super) fn byte_token(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2).then(|| u8::from_str_radix(digits, 16).ok())?
}

/// The byte that a character of the byte-level alphabet stands for: printable characters of
/// Latin-1 are themselves, the other bytes follow from U+0100 on in their order.
pub(super) fn level_byte(c: char) -> Option<u8> {
    match c as u32 {
        c @ (0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff) => u8::try_from(c).ok(),
        c @ 0x100..=0x120 => u8::try_from(c - 0x100).ok(),
        c @ 0x121..=0x142 => u8::try_from(c - 0x121 + 0x7f).ok(),
        0x143 => Some(0xad),
        _ => None,
    }
}

/// Removes a character from both ends of a text.
#[derive(Debug)]
struct Strip {
    content: char,
    /// Number of characters still to be removed from the beginning.
    start: usize,
    /// Number of characters to remove from the end.
    stop: usize,
    /// Number of characters at the end so far, all of which may have to go.
    held: usize,
}

impl Strip {
    fn take(&mut self, text: &str) -> String {
        let mut out = String::with_capacity(text.len());
        for c in text.chars() {
            if c == self.content && self.start > 0 {
                self.start -= 1;
                continue;
            }
            self.start = 0;
            if c != self.content {
                out.extend(std::iter::repeat_n(self.content, self.held));
                self.held = 0;
                out.push(c);
            } else if self.held < self.stop {
                self.held += 1;
            } else {
                out.push(c);
            }
        }
        out
    }
}
