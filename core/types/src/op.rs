//! Host-ops: what they can be asked to do, what they say of themselves, what they consume.

use serde::{Deserialize, Serialize};

use crate::MediaRules;

/// Task that an op can do and that a bundle is made for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Task {
    /// Produce tokens.
    #[default]
    Generate,
    /// Produce one vector per text.
    Embed,
    /// Write down what is said in audio.
    Transcribe,
    /// Say a text.
    Speak,
    /// Produce one score per pair of texts.
    Score,
    /// A task that this version does not know.
    #[serde(other)]
    Other,
}

impl Task {
    /// Every task that this version knows.
    pub const ALL: [Self; 5] =
        [Self::Generate, Self::Embed, Self::Score, Self::Transcribe, Self::Speak];

    /// The name in options and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Generate => "generate",
            Self::Embed => "embed",
            Self::Transcribe => "transcribe",
            Self::Speak => "speak",
            Self::Score => "score",
            Self::Other => "other",
        }
    }

    /// The task of [`Task::ALL`] that is called `name`.
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|task| task.name() == name)
    }
}

/// Content that a prompt segment can carry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Modality {
    /// Token ids.
    Text,
    /// RGB8 pixels.
    Image,
    /// Mono f32 samples.
    Audio,
    /// RGB8 frames with their times.
    Video,
    /// A modality that this version does not know.
    #[serde(other)]
    Other,
}

impl Modality {
    /// The name in messages and JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Text => "text",
            Self::Image => "image",
            Self::Audio => "audio",
            Self::Video => "video",
            Self::Other => "other",
        }
    }
}

/// A segment of a prompt.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Segment<'a> {
    /// Token ids.
    Tokens(&'a [u32]),
    /// Interleaved RGB, 8 bits a channel, rows from the top.
    Image {
        /// `width · height · 3` bytes.
        rgb: &'a [u8],
        /// Pixels in a row.
        width: u32,
        /// Rows.
        height: u32,
    },
    /// A part of an image, such as a tile: the pixels are the whole image's, as in [`Segment::Image`].
    Tile {
        /// `width · height · 3` bytes.
        rgb: &'a [u8],
        /// Pixels in a row of the whole image.
        width: u32,
        /// Rows of the whole image.
        height: u32,
        /// Which part, below `of`: as [`crate::Piece::Part`] of the op declared.
        index: u16,
        /// Number of parts of the image.
        of: u16,
    },
    /// Mono samples in −1…1.
    Audio {
        /// The samples.
        samples: &'a [f32],
        /// Samples per second.
        rate: u32,
    },
    /// Frames of one size, interleaved RGB, 8 bits a channel, rows from the top.
    Video {
        /// `width · height · 3` bytes a frame, one frame behind the other.
        rgb: &'a [u8],
        /// Pixels in a row.
        width: u32,
        /// Rows of one frame.
        height: u32,
        /// When each frame is shown, in seconds from the beginning of the video.
        times: &'a [f32],
        /// Frames of the whole video, of which these are all or some.
        frames: usize,
    },
    /// A kind of segment that this version does not know, by its number in the plugin interface.
    Unknown(u32),
}

/// Declaration of an op about itself before any bundle is opened.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpDescription {
    /// The name that manifests select it by: lower-case letters, digits and `_`.
    pub name: String,
    /// One sentence.
    #[serde(default)]
    pub summary: String,
    /// Version of the op.
    #[serde(default)]
    pub version: String,
    /// Tasks it can do.
    pub tasks: Vec<Task>,
    /// Segments it understands.
    #[serde(default)]
    pub modalities: Vec<Modality>,
    /// JSON Schema of the manifest's `plan.params`; null for any.
    #[serde(default, skip_serializing_if = "serde_json::Value::is_null")]
    pub params_schema: serde_json::Value,
}

/// Declaration of an op about itself once a bundle is open. It is read once and does not change while the op is open.
///
/// It crosses the plugin interface as JSON and grows: an op that writes one ends it in `..OpenInfo::default()`, and
/// compiles with a later kit.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OpenInfo {
    /// Number of logits, 0 for an op that does not generate.
    pub vocab: usize,
    /// Positions that the state can hold.
    pub max_ctx: usize,
    /// Elements of an embedding, 0 for an op that does not embed.
    pub embedding_dim: usize,
    /// Scores of a text or a pair of texts, which the op's call `embed` gives in the place of an embedding; 0 for an op
    /// that does not score. A pair is two segments of tokens.
    #[serde(skip_serializing_if = "is_default")]
    pub scores: usize,
    /// The op can forget the positions from a given one on.
    pub can_truncate: bool,
    /// The op can save its state and return to it.
    pub can_snapshot: bool,
    /// Token ids that the op can consume are below this: rows of its embedding table. Fewer than `vocab` where the
    /// logits are padded; the logits beyond belong to no token and are never chosen. 0 takes the manifest's
    /// `params.vocab`, or else `vocab`.
    pub input_vocab: usize,
    /// Tokens that stand for images, audio and videos. The host turns no text into one of them, and takes no prompt of
    /// tokens that holds one.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub placeholders: Vec<u32>,
    /// c, where the scores of tokens are `c · tanh(logits / c)` (arXiv 2408.00118, section 2); none where they
    /// are the logits. The host applies it where it draws a token: the most likely token is the same without. Positive
    /// and finite.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub softcap: Option<f32>,
    /// Rules by which the host turns files into the pixels and samples of [`Segment`].
    #[serde(skip_serializing_if = "is_default")]
    pub media: MediaRules,
    /// In steps of how many tokens draft tokens are verified, or why not.
    #[serde(skip_serializing_if = "is_default")]
    pub verification: Verification,
    /// The bundle has a drafting head: the op makes logits of draft tokens (its calls `drafting` and `draft`).
    #[serde(skip_serializing_if = "is_default")]
    pub drafts: bool,
    /// The graphs that take several texts in one execution.
    #[serde(skip_serializing_if = "is_default")]
    pub packing: Packing,
    /// Rules for the tokens around a prompt.
    #[serde(skip_serializing_if = "is_default")]
    pub prompt_rules: PromptRules,
    /// Which tokens may be chosen at all.
    #[serde(skip_serializing_if = "is_default")]
    pub logit_rules: LogitRules,
    /// The op finds when tokens are spoken: its call `answer` takes two segments of tokens, what stood before an answer
    /// to the audio consumed last, with the audio's placeholder in its place, and the answer itself, and gives the
    /// times of the latter. The state is then another one.
    #[serde(skip_serializing_if = "is_default")]
    pub aligns: bool,
    /// The op is given audio piece by piece: each call `answer` with one segment of audio goes on where the last one
    /// ended, and gives the tokens that are sure by then, with times from the beginning of the first one. Without a
    /// segment it ends the audio, and gives the rest. `reset` begins other audio.
    #[serde(skip_serializing_if = "is_default")]
    pub streams: bool,
    /// The audio that an op makes that speaks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sound_out: Option<SoundOut>,
    /// Values that the op gives for each token of a text beside the text's vector (its call `embed_tokens`); none by
    /// default.
    #[serde(skip_serializing_if = "is_default")]
    pub of_tokens: OfTokens,
}

/// Values that an op that embeds gives for each token of a text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OfTokens {
    /// One weight, 0 or more, for a search by tokens.
    pub weights: bool,
    /// Elements of a vector, 0 where tokens have none.
    pub dim: usize,
    /// Tokens at the beginning of a text that have no vector.
    pub skipped: usize,
}

impl OfTokens {
    /// True where there is nothing.
    pub const fn is_none(self) -> bool {
        !self.weights && self.dim == 0
    }

    /// Values for a text of some tokens: a weight for each, then the vectors one behind the other.
    pub const fn values(self, tokens: usize) -> usize {
        let weights = if self.weights { tokens } else { 0 };
        weights.saturating_add(tokens.saturating_sub(self.skipped).saturating_mul(self.dim))
    }
}

/// Rules for the tokens that the host puts around the text of a prompt.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PromptRules {
    /// The tokenizer's post-processor adds its tokens, such as BOS. False where the op or its host writes all of them,
    /// as where the post-processor is that of training labels.
    pub special_tokens: bool,
}

impl Default for PromptRules {
    fn default() -> Self {
        Self { special_tokens: true }
    }
}

/// Limits of the tokens that the host chooses among. It chooses ids that the op can consume and that mean something:
/// the tokenizer knows them, `params.eos_token_id` of the manifest has them, or they are [times](LogitRules::times),
/// which need no text. Logits of others, such as rows that pad a vocabulary, are as if they were −∞; an op may also
/// write −∞ into its logits itself, which makes a token impossible.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct LogitRules {
    /// Tokens that are never chosen (`suppress_tokens` of a generation config).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub suppressed: Vec<u32>,
    /// Tokens that an answer does not begin with (`begin_suppress_tokens`).
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub suppressed_first: Vec<u32>,
    /// Tokens that are times, and the order that they follow.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub times: Option<TimeRule>,
}

/// The rules of times among tokens, as speech recognition has them (Radford et al. 2022, arXiv 2212.04356): an answer
/// begins with a time; times stand in pairs, an end and the next beginning, but for the one before the end of the
/// answer; they do not go back; and where all times together are likelier than the likeliest word, one of them comes.
///
/// A prompt that holds [`TimeRule::none`] asks for no times: the rules do not apply.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TimeRule {
    /// The first time, that of 0 s. All ids from it on are times, also where the tokenizer has no text for them.
    pub first: u32,
    /// The token that says that no times are wanted (`<|notimestamps|>`). Where times are asked for, it is never
    /// chosen.
    pub none: u32,
    /// Tokens of text are below this: the end of the answer (`eos_token_id`), which may follow a single time.
    pub end: u32,
    /// Maximum number of steps from the first time to the time at which an answer may begin
    /// (`max_initial_timestamp_index`).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_initial: Option<u32>,
}

/// The audio that an op makes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct SoundOut {
    /// Samples a second, mono.
    pub rate: u32,
}

/// Answer of an op that steps by itself, such as a CTC recogniser or a transducer (Graves et al. 2006; Graves 2012,
/// arXiv 1211.3711).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Answer {
    /// Tokens of the answer.
    pub tokens: Vec<u32>,
    /// Start and end of each token, in seconds from the beginning of the audio. Empty if unknown.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub times: Vec<[f32; 2]>,
    /// The language that was recognised, as its code.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub language: Option<String>,
    /// Other findings of the op.
    #[serde(skip_serializing_if = "serde_json::Map::is_empty")]
    pub note: serde_json::Map<String, serde_json::Value>,
}

impl OpenInfo {
    /// Values that the calls `embed` and `embed_many` give for each text: of a score or of an embedding.
    pub const fn values(&self) -> usize {
        if self.scores > 0 { self.scores } else { self.embedding_dim }
    }
}

fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

/// Support of an op for verifying draft tokens in one step, as speculative decoding does (Leviathan et al. 2023,
/// arXiv 2211.17192).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Verification {
    /// Numbers of tokens that its verification steps take, ascending, each at least 2. A step costs as much when it
    /// gets fewer tokens. Empty if the op verifies none.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub widths: Vec<usize>,
    /// Why it checks none: the rest of a sentence that begins with "because".
    #[serde(skip_serializing_if = "Option::is_none")]
    pub refusal: Option<String>,
}

impl Verification {
    /// Declaration of an op that verifies no draft tokens, with the reason.
    pub fn refused(why: impl Into<String>) -> Self {
        Self { widths: Vec::new(), refusal: Some(why.into()) }
    }
}

/// Which graphs of an encoder take several texts in one execution: the texts stand one behind the other, and a block
/// mask keeps each to itself (sequence packing, Krell et al. 2021, arXiv 2107.02027).
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct Packing {
    /// The packing graphs by their length, the shortest first. Empty if every text needs an execution of its own.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub buckets: Vec<Bucket>,
}

/// The graphs of an encoder for texts of up to n tokens.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Bucket {
    /// Tokens that they take, all texts together.
    pub rows: usize,
    /// Cost of executing them once, in a unit that is the same for all buckets of an op.
    pub cost: f64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_open_op_is_read_whatever_its_version() {
        let first =
            r#"{"vocab":7,"max_ctx":5,"embedding_dim":0,"can_truncate":true,"can_snapshot":false}"#;
        let open: OpenInfo = serde_json::from_str(first).unwrap();
        assert!(open.prompt_rules.special_tokens);
        assert_eq!((open.vocab, open.can_truncate, open.input_vocab), (7, true, 0));
        let text = serde_json::to_string(&OpenInfo { input_vocab: 6, ..open }).unwrap();
        assert_eq!(text, first.replace('}', r#","input_vocab":6}"#));
        let capped = OpenInfo { softcap: Some(30.0), ..OpenInfo::default() };
        let text = serde_json::to_string(&capped).unwrap();
        assert_eq!(serde_json::from_str::<OpenInfo>(&text).unwrap(), capped);
        let later: OpenInfo = serde_json::from_str(r#"{"vocab":7,"beams":4}"#).unwrap();
        assert_eq!(later, OpenInfo { vocab: 7, ..OpenInfo::default() });
    }

    #[test]
    fn tasks_have_one_name_each() {
        for task in Task::ALL {
            assert_eq!(Task::from_name(task.name()), Some(task));
            assert_eq!(serde_json::to_value(task).unwrap(), task.name());
        }
        assert_eq!(Task::from_name("other"), None);
        let tasks: Vec<Task> = serde_json::from_str(r#"["transcribe", "dance"]"#).unwrap();
        assert_eq!(tasks, [Task::Transcribe, Task::Other]);
    }
}
