//! Filling in the middle: prompts of models that were trained to write what stands between two texts.

use qhx_base::{Result, error};

use super::Tokenizer;

/// Special tokens in front of the text before, of the text behind, and of what is to be written.
const MARKS: [[&str; 3]; 5] = [
    ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"],
    ["<fim_prefix>", "<fim_suffix>", "<fim_middle>"],
    ["<fim-prefix>", "<fim-suffix>", "<fim-middle>"],
    ["<｜fim▁begin｜>", "<｜fim▁hole｜>", "<｜fim▁end｜>"],
    ["▁<PRE>", "▁<SUF>", "▁<MID>"],
];
/// Special tokens that such models write at the end of the middle, besides their own end.
const ENDS: [&str; 9] = [
    "<|endoftext|>",
    "<|fim_pad|>",
    "<|file_sep|>",
    "<|file_separator|>",
    "<|repo_name|>",
    "<fim_pad>",
    "<file_sep>",
    "▁<EOT>",
    "<|EOT|>",
];

/// A prompt that asks for the text between two others.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Infill {
    /// Its tokens.
    pub tokens: Vec<u32>,
    /// Tokens that end the answer, besides the model's own.
    pub ends: Vec<u32>,
}

impl Infill {
    /// The prompt for what stands behind `before` and in front of `behind`, in the order prefix, suffix, middle
    /// (Bavarian et al. 2022).
    ///
    /// # Errors
    /// When the tokenizer has no marks for it, or a text cannot be tokenized.
    pub fn new(tokenizer: &Tokenizer, before: &str, behind: &str) -> Result<Self> {
        let ids = MARKS.iter().find_map(|marks| {
            let [prefix, suffix, middle] = marks.map(|mark| tokenizer.token_to_id(mark));
            Some([prefix?, suffix?, middle?])
        });
        let [prefix, suffix, middle] = ids.ok_or_else(|| {
            error!(Usage, "the model does not fill in: its tokenizer has no marks for it")
                .hint("many models for code do; without a suffix the text is continued")
        })?;
        // A tokenizer that begins texts with a token does so here, too.
        let mut tokens: Vec<u32> =
            tokenizer.encode("", true)?.first().copied().into_iter().collect();
        tokens.push(prefix);
        tokens.extend(tokenizer.encode(before, false)?);
        tokens.push(suffix);
        tokens.extend(tokenizer.encode(behind, false)?);
        tokens.push(middle);
        let ends = ENDS.iter().filter_map(|end| tokenizer.token_to_id(end)).collect();
        Ok(Self { tokens, ends })
    }
}
