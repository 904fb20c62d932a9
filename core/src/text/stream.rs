//! Detokenising an answer token by token.
//!
//! The text of a token depends on its neighbours: a character may be spread over several byte
//! tokens, and many decoders drop the space before the first token. So each token is decoded
//! together with a few before it, and what that adds to the text of those before is its text. The
//! window does not grow with the answer.

use super::Tokenizer;
use crate::Result;

/// A character has at most four bytes, so that after this many undecided tokens the first of them
/// is not the beginning of one.
const UNDECIDED: usize = 4;

/// Tokens before an answer that decide about the space in front of it.
const CONTEXT: usize = 6;

const REPLACEMENT: char = '\u{fffd}';

/// Turns tokens into pieces of text that are complete characters with the right spaces.
#[derive(Debug)]
pub struct Detokenizer {
    tokenizer: Tokenizer,
    /// Context, then tokens whose text is undecided.
    window: Vec<u32>,
    /// How many tokens of the window are context.
    context: usize,
    /// Text of the context.
    before: String,
    /// Text that became complete with the last token.
    piece: String,
}

impl Detokenizer {
    /// At the beginning of a text.
    pub fn new(tokenizer: &Tokenizer) -> Self {
        Self {
            tokenizer: tokenizer.clone(),
            window: Vec::with_capacity(CONTEXT + UNDECIDED + 1),
            context: 0,
            before: String::new(),
            piece: String::new(),
        }
    }

    /// Starts over, after a prompt: the first token continues its last words.
    pub fn start(&mut self, prompt: &[u32]) -> Result<()> {
        self.window.clear();
        self.window.extend(&prompt[prompt.len().saturating_sub(CONTEXT)..]);
        self.context = self.window.len();
        self.before = self.tokenizer.decode(&self.window)?;
        // A window that begins amid a character, or ends in one, is no context.
        if self.before.contains(REPLACEMENT) {
            self.window.clear();
            self.context = 0;
            self.before.clear();
        }
        Ok(())
    }

    /// Takes a token. Answers with the text that became complete, which may be empty.
    pub fn push(&mut self, token: u32) -> Result<&str> {
        self.piece.clear();
        self.window.push(token);
        loop {
            let text = self.tokenizer.decode(&self.window)?;
            if !text.ends_with(REPLACEMENT) {
                self.complete(text)?;
                break;
            }
            if self.window.len() - self.context <= UNDECIDED {
                break;
            }
            // The first undecided token begins no character: its own text is all there will be.
            let first = self.window[self.context];
            self.piece.push_str(&self.tokenizer.decode(&[first])?);
            self.window.drain(..=self.context);
            self.context = 0;
            self.before.clear();
        }
        Ok(&self.piece)
    }

    /// Ends the text: bytes that no character was made of become U+FFFD.
    pub fn finish(&mut self) -> Result<&str> {
        self.piece.clear();
        let undecided = self.window.len() - self.context;
        if undecided > 0 {
            let rest = self.tokenizer.decode(&self.window[self.context..])?;
            // An incomplete character is one replacement, however many tokens it came in.
            let complete = rest.trim_end_matches(REPLACEMENT);
            self.piece.push_str(complete);
            if complete.len() < rest.len() {
                self.piece.push(REPLACEMENT);
            }
        }
        self.window.clear();
        self.context = 0;
        self.before.clear();
        Ok(&self.piece)
    }

    /// The window's text ends in a complete character.
    fn complete(&mut self, text: String) -> Result<()> {
        let added = match text.strip_prefix(self.before.as_str()) {
            Some(added) => added,
            // A decoder that rewrites the end of what came before: take the new tokens alone.
            None => {
                let alone = self.tokenizer.decode(&self.window[self.context..])?;
                self.piece.push_str(&alone);
                return self.advance();
            }
        };
        if added.is_empty() {
            // Special tokens and empty ones are no context for the next.
            self.window.truncate(self.context);
            return Ok(());
        }
        self.piece.push_str(added);
        self.advance()
    }

    /// The tokens just decoded become the context of the next.
    fn advance(&mut self) -> Result<()> {
        self.window.drain(..self.context);
        self.context = self.window.len();
        self.before = self.tokenizer.decode(&self.window)?;
        Ok(())
    }
}

#[cfg(test)]
impl Detokenizer {
    pub(super) fn window_len(&self) -> usize {
        self.window.len()
    }
}
