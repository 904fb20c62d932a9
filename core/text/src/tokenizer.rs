//! The tokenizer of a bundle: a `tokenizer.json` of Hugging Face `tokenizers`.

mod blame;
mod bpe;
mod bytes;
mod index;
mod model;
mod size;
#[cfg(test)]
mod tests;
mod vet;

use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::{Arc, mpsc};
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;
use tokenizers::{
    DecoderWrapper, Encoding, Model as _, NormalizerWrapper, OffsetType, PaddingParams,
    PostProcessor as _, PostProcessorWrapper, PreTokenizer as _, PreTokenizerWrapper,
    TokenizerBuilder, TokenizerImpl, TruncationDirection, TruncationParams, TruncationStrategy,
    truncate_encodings,
};

pub use bytes::TokenBytes;
use model::Model;
use qhx_base::artifacts::Mapped;
use qhx_base::{CancelToken, Error, Result, TooLong, error, files};
use size::Size;
use vet::{Document, Keyed, Refusal};

/// Texts of more bytes are tokenized on a thread of their own, which nobody has to wait for.
const AT_ONCE: usize = 32 << 10;

/// Text to token ids and back. Clones share the vocabulary.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<Inner>,
    path: Arc<PathBuf>,
    size: Size,
    /// The side on which texts are truncated.
    cut: TruncationDirection,
    /// Ends what tokenizes.
    cancel: CancelToken,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tokenizer")
            .field("path", &self.path)
            .field("vocab", &self.vocab_size())
            .finish()
    }
}

/// The library's tokenizer, with a model of ours.
type Inner = TokenizerImpl<
    Model,
    NormalizerWrapper,
    PreTokenizerWrapper,
    PostProcessorWrapper,
    DecoderWrapper,
>;

/// The tokenizer of a document whose model is in compact tables, made of the parts that were vetted; `None` for any
/// other, and where the library finds fault with a part.
fn compact(document: &mut Document) -> Option<Inner> {
    fn part<'de, T: Deserialize<'de>>(value: &'de Value) -> tokenizers::Result<Option<T>> {
        Ok(Option::deserialize(value)?)
    }
    let model = document.model.bpe.take().filter(|_| document.version == vet::version())?;
    let tokens = document.added_tokens.iter().map(|Keyed(added)| added.token());
    let tokens: Vec<_> = tokens.collect::<Option<_>>()?;
    let build = || {
        // These are off, but have to be understood.
        part::<TruncationParams>(&document.truncation)?;
        part::<PaddingParams>(&document.padding)?;
        let mut inner = TokenizerBuilder::new()
            .with_model(Model::Bpe(model))
            .with_normalizer(part(&document.normalizer)?)
            .with_pre_tokenizer(part(&document.pre_tokenizer)?)
            .with_post_processor(part(&document.post_processor)?)
            .with_decoder(part(&document.decoder)?)
            .build()?;
        inner.add_tokens(tokens)?;
        Ok(inner)
    };
    guarded(build).ok()
}

impl Tokenizer {
    /// Reads a `tokenizer.json`.
    ///
    /// Truncation and padding that the file configures are switched off: whether a text fits is
    /// for the engine to decide, and nothing may be truncated in silence.
    ///
    /// # Errors
    /// When the file cannot be read, or as [`Tokenizer::from_bytes`].
    pub fn from_file(path: &Path) -> Result<Self> {
        let file = Mapped::open(path)?;
        Self::from_bytes(path, file.bytes())
    }

    /// Reads the contents of a `tokenizer.json`; `path` is for messages.
    ///
    /// This is all that decides whether a file is accepted: what it asks for is bounded before the
    /// library reads it (see `docs/security.md`), and nothing is checked later.
    ///
    /// # Errors
    /// When the file is no valid `tokenizer.json`, or asks for more than is allowed.
    pub fn from_bytes(path: &Path, bytes: &[u8]) -> Result<Self> {
        let fail =
            |why: String, hint: &str| error!(Artifact, "{}: {why}", path.display()).hint(hint);
        let foreign = |why: String| {
            fail(
                format!("not a tokenizer: {why}"),
                "expected a tokenizer.json of Hugging Face tokenizers; \
                 a git-lfs pointer or a partial download is not one",
            )
        };
        let mut vetted = vet::vet(bytes).map_err(|refusal| match refusal {
            Refusal::Marked(mark) => {
                fail(format!("begins with {mark}, expected JSON"), files::WITHOUT_MARK)
            }
            Refusal::Foreign(why) => foreign(why),
            Refusal::Excessive(why) => {
                fail(why, "no tokenizer in use asks for this; take the file its authors published")
            }
        })?;
        let mut inner = match compact(&mut vetted.document) {
            Some(found) => found,
            None => guarded(|| Ok(serde_json::from_slice::<Inner>(bytes)?))
                .map_err(|e| foreign(blame::blame(bytes, &e)))?,
        };
        inner.with_truncation(None).map_err(|e| foreign(e.to_string()))?;
        inner.with_padding(None);
        let cut = match vetted.document.truncation.get("direction").and_then(Value::as_str) {
            Some("Left") => TruncationDirection::Left,
            _ => TruncationDirection::Right,
        };
        let size = Size::of(&vetted, |token| inner.token_to_id(token).is_some());
        let (inner, path) = (Arc::new(inner), Arc::new(path.to_owned()));
        Ok(Self { inner, path, size, cut, cancel: CancelToken::new() })
    }

    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Token ids of a text. Special tokens written out in the text are recognised.
    ///
    /// `add_special` adds what the tokenizer's post-processor puts around a text, such as a BOS
    /// token: on for a text that is completed, off for a rendered conversation, whose template
    /// writes them.
    ///
    /// # Errors
    /// When the text is too long, or the tokenizer fails.
    pub fn encode(&self, text: &str, add_special: bool) -> Result<Vec<u32>> {
        let encoding = self.encoding(text, add_special, OffsetType::None);
        Ok(encoding?.get_ids().to_vec())
    }

    /// Same as [`Tokenizer::encode`], with the number of tokens that lie in the first `bytes` of the text. Any text
    /// with the same first bytes begins with these tokens, unless the place lies in a word.
    ///
    /// # Errors
    /// Errors of [`Tokenizer::encode`].
    pub fn encode_with_prefix(
        &self,
        text: &str,
        add_special: bool,
        bytes: usize,
    ) -> Result<(Vec<u32>, usize)> {
        let encoding = self.encoding(text, add_special, OffsetType::Byte)?;
        let within = encoding.get_offsets().iter().take_while(|(_, end)| *end <= bytes).count();
        Ok((encoding.get_ids().to_vec(), within))
    }

    /// Token ids of a pair of texts, in the one sequence that the tokenizer's post-processor makes of it. They are cut
    /// in two where it says that the second text begins: in `[CLS] a [SEP] b [SEP]` of BERT behind the first `[SEP]`.
    /// Where it does not tell the texts apart, as that of RoBERTa does not, there is one part.
    ///
    /// # Errors
    /// [`Tokenizer::within`] for each of the texts.
    pub fn encode_pair(
        &self,
        first: &str,
        second: &str,
        max_tokens: usize,
        cancel: &CancelToken,
    ) -> Result<Vec<Vec<u32>>> {
        self.check_size(first, max_tokens)?;
        self.check_size(second, max_tokens)?;
        self.pair(first, second, None, cancel)
    }

    /// Same as [`Tokenizer::encode_pair`], for as much of both texts as fits into `max_tokens` with all that the
    /// post-processor adds. The longer text is truncated, and both if one alone is too long, like in `transformers`
    /// with `truncation="longest_first"`, on the side that [`Tokenizer::encode_truncated`] truncates on. If texts are
    /// far too long, only parts of them are tokenized.
    ///
    /// # Errors
    /// The errors of [`Tokenizer::encode`], when what is added fits no `max_tokens`, or the work is cancelled.
    pub fn encode_pair_truncated(
        &self,
        first: &str,
        second: &str,
        max_tokens: usize,
        cancel: &CancelToken,
    ) -> Result<Vec<Vec<u32>>> {
        let room = self.room(max_tokens, true)?;
        let [first, second] = [first, second].map(|text| self.part(text, max_tokens));
        self.pair(first, second, Some(room), cancel)
    }

    /// The part of a text that is enough for `max_tokens` tokens, from the side that stays.
    fn part<'a>(&self, text: &'a str, max_tokens: usize) -> &'a str {
        match self.cut {
            TruncationDirection::Right => self.beginning(text, max_tokens),
            TruncationDirection::Left => {
                let before = text.len().saturating_sub(self.size.enough(max_tokens));
                &text[text.ceil_char_boundary(before)..]
            }
        }
    }

    /// The beginning of a text that is enough for its first `max_tokens` tokens.
    pub fn beginning<'a>(&self, text: &'a str, max_tokens: usize) -> &'a str {
        &text[..text.floor_char_boundary(self.size.enough(max_tokens))]
    }

    /// Number of tokens that `max_tokens` leave for a text, or a pair of texts, beside what the post-processor adds.
    fn room(&self, max_tokens: usize, pair: bool) -> Result<usize> {
        let added = self.inner.get_post_processor().map_or(0, |p| p.added_tokens(pair));
        max_tokens.checked_sub(added).ok_or_else(|| {
            let path = self.path.display();
            error!(
                Prompt,
                "{path}: {added} special tokens stand around each text, more than the {max_tokens} that fit"
            )
        })
    }

    /// A pair of texts of at most `room` tokens, where that is given.
    fn pair(
        &self,
        first: &str,
        second: &str,
        room: Option<usize>,
        cancel: &CancelToken,
    ) -> Result<Vec<Vec<u32>>> {
        let tokenizer = self.until(cancel);
        if first.len() + second.len() <= AT_ONCE {
            return tokenizer.pair_at_once(first, second, room);
        }
        let (first, second) = (first.to_owned(), second.to_owned());
        beside(cancel, move || tokenizer.pair_at_once(&first, &second, room))
    }

    fn pair_at_once(
        &self,
        first: &str,
        second: &str,
        room: Option<usize>,
    ) -> Result<Vec<Vec<u32>>> {
        let pair = || {
            let first = self.words(first, OffsetType::None)?;
            let second = Some(self.words(second, OffsetType::None)?);
            let Some(max_length) = room else {
                return self.inner.post_process(first, second, true);
            };
            let rules = TruncationParams {
                direction: self.cut,
                max_length,
                strategy: TruncationStrategy::LongestFirst,
                stride: 0,
            };
            let (mut first, mut second) = truncate_encodings(first, second, &rules)?;
            // What was cut off would be post-processed, too.
            first.take_overflowing();
            second.as_mut().map(Encoding::take_overflowing);
            self.inner.post_process(first, second, true)
        };
        let encoding = guarded(pair).map_err(|e| self.not_tokenized(&e))?;
        let runs = encoding.get_type_ids().chunk_by(|a, b| a == b).map(<[u32]>::len);
        let mut rest = encoding.get_ids();
        let cut = |length| {
            let (part, after) = rest.split_at(length);
            rest = after;
            part.to_vec()
        };
        Ok(runs.map(cut).collect())
    }

    /// Encodes like the library's `encode`, and checks the token for cancellation between its parts and between words.
    fn words(&self, text: &str, offsets: OffsetType) -> tokenizers::Result<Encoding> {
        let go_on = || match self.cancel.is_cancelled() {
            true => Err(tokenizers::Error::from("cancelled")),
            false => Ok(()),
        };
        let inner = &self.inner;
        go_on()?;
        let added = inner.get_added_vocabulary();
        let mut words = added.extract_and_normalize(inner.get_normalizer(), text);
        go_on()?;
        if let Some(pre_tokenizer) = inner.get_pre_tokenizer() {
            pre_tokenizer.pre_tokenize(&mut words)?;
        }
        words.tokenize(|word| {
            go_on()?;
            inner.get_model().tokenize(word.get())
        })?;
        words.into_encoding(None, 0, offsets)
    }

    fn encoding(&self, text: &str, add_special: bool, offsets: OffsetType) -> Result<Encoding> {
        let post = |words| self.inner.post_process(words, None, add_special);
        guarded(|| self.words(text, offsets).and_then(post)).map_err(|e| self.not_tokenized(&e))
    }

    /// The tokenizer, whose texts `cancel` ends.
    fn until(&self, cancel: &CancelToken) -> Self {
        Self { cancel: cancel.clone(), ..self.clone() }
    }

    /// Tokens that the post-processor puts before and after a text, such as a BOS and an EOS token.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn around(&self) -> Result<(Vec<u32>, Vec<u32>)> {
        const PROBE: &str = "a";
        let (inner, all) = (self.encode(PROBE, false)?, self.encode(PROBE, true)?);
        let at = all.windows(inner.len().max(1)).position(|window| window == inner);
        let at = at.unwrap_or(all.len());
        let after = all.get(at + inner.len()..).unwrap_or_default().to_vec();
        Ok((all[..at].to_vec(), after))
    }

    /// [`Tokenizer::encode`] for a text that is of use only within `max_tokens` tokens; see
    /// [`Tokenizer::within`].
    ///
    /// # Errors
    /// Errors of [`Tokenizer::within`].
    pub fn encode_within(
        &self,
        text: &str,
        add_special: bool,
        max_tokens: usize,
        cancel: &CancelToken,
    ) -> Result<Vec<u32>> {
        self.within(text, max_tokens, cancel, move |tokenizer, text| {
            tokenizer.encode(text, add_special)
        })
    }

    /// Tokenizes a text that is of use only within `max_tokens` tokens, by `job`.
    ///
    /// A text that is longer for certain is an error at once; one whose length does not decide it is tokenized, and may
    /// come out as more. Cancelling ends the wait for a long text.
    ///
    /// # Errors
    /// [`ErrorKind::Prompt`](qhx_base::ErrorKind::Prompt) for a text that is too long,
    /// [`ErrorKind::Cancelled`](qhx_base::ErrorKind::Cancelled), and any error of `job`.
    pub fn within<T: Send + 'static>(
        &self,
        text: &str,
        max_tokens: usize,
        cancel: &CancelToken,
        job: impl FnOnce(&Self, &str) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        self.check_size(text, max_tokens)?;
        let tokenizer = self.until(cancel);
        if text.len() <= AT_ONCE {
            return job(&tokenizer, text);
        }
        let text = text.to_owned();
        beside(cancel, move || job(&tokenizer, &text))
    }

    /// An error for a text that is more than `max_tokens` for certain.
    fn check_size(&self, text: &str, max_tokens: usize) -> Result<()> {
        let Some(why) = self.size.exceeds(text, max_tokens) else { return Ok(()) };
        Err(error!(Prompt, "the text is too long: {why}, the context holds {max_tokens}")
            .with_source(TooLong { max: max_tokens })
            .hint("shorten the text, or forge the model with a larger --max-ctx"))
    }

    /// Token ids of as much of a text as fits into `max_tokens` with all that the post-processor
    /// adds, such as a BOS and an EOS token: the text itself is truncated, before they are added.
    ///
    /// It is truncated on the right unless the file's `truncation` says left. Of a text that is far too
    /// long only a part is tokenized; where a single word without an end is longer than that part,
    /// the word's tokens may be others than those of the whole.
    ///
    /// # Errors
    /// When the tokenizer fails, or the work is cancelled.
    pub fn encode_truncated(
        &self,
        text: &str,
        max_tokens: usize,
        cancel: &CancelToken,
    ) -> Result<Vec<u32>> {
        let room = self.room(max_tokens, false)?;
        let part = self.part(text, max_tokens);
        let tokenizer = self.until(cancel);
        let encode = move |text: &str| {
            let encoding = guarded(|| {
                let mut encoding = tokenizer.words(text, OffsetType::None)?;
                encoding = tokenizer.inner.post_process(encoding, None, false)?;
                encoding.truncate(room, 0, tokenizer.cut);
                // What was cut off would be post-processed, too.
                encoding.take_overflowing();
                tokenizer.inner.post_process(encoding, None, true)
            });
            encoding.map(|e| e.get_ids().to_vec()).map_err(|e| tokenizer.not_tokenized(&e))
        };
        if part.len() <= AT_ONCE {
            return encode(part);
        }
        let part = part.to_owned();
        beside(cancel, move || encode(&part))
    }

    fn not_tokenized(&self, why: &str) -> Error {
        if self.cancel.is_cancelled() {
            return cancelled();
        }
        let path = self.path.display();
        error!(Prompt, "{path}: the text cannot be tokenized: {why}")
    }

    /// Text of token ids, without special tokens. Bytes that are not UTF-8 become U+FFFD.
    ///
    /// A piece of an answer cannot be decoded alone; see [`super::Detokenizer`].
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        // Some decoders of the library panic on no tokens at all.
        if !ids.iter().any(|&id| self.visible_token(id).is_some()) {
            return Ok(String::new());
        }
        self.guard_decoding(|| self.inner.decode(ids, true))
    }

    /// Text of token ids, special tokens spelled out: an answer as a program reads it that looks for calls of tools.
    ///
    /// # Errors
    /// When the tokenizer fails.
    pub fn decode_with_special(&self, ids: &[u32]) -> Result<String> {
        if ids.is_empty() {
            return Ok(String::new());
        }
        self.guard_decoding(|| self.inner.decode(ids, false))
    }

    /// Runs a part of the decoder.
    pub(super) fn guard_decoding<T>(
        &self,
        call: impl FnOnce() -> tokenizers::Result<T>,
    ) -> Result<T> {
        guarded(call).map_err(|e| self.not_decoded(&e))
    }

    fn not_decoded(&self, why: &str) -> Error {
        let path = self.path.display();
        error!(Artifact, "{path}: tokens cannot be decoded: {why}")
    }

    /// Decoder from tokens to text; without one they are joined by spaces.
    pub(super) fn decoder(&self) -> Option<&DecoderWrapper> {
        self.inner.get_decoder()
    }

    /// The token with an id, unless it has no text: a special one, or none at all.
    pub fn visible_token(&self, id: u32) -> Option<String> {
        let token = self.inner.id_to_token(id)?;
        (!self.inner.get_added_vocabulary().is_special_token(&token)).then_some(token)
    }

    /// Number of tokens, added ones included. A model's vocabulary may be padded beyond it.
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// The ids of all tokens, added ones included, in no order.
    pub fn ids(&self) -> impl Iterator<Item = u32> {
        self.inner.get_vocab(true).into_values()
    }

    /// The id of a token such as `<|im_end|>`.
    pub fn token_to_id(&self, token: &str) -> Option<u32> {
        self.inner.token_to_id(token)
    }

    /// The token with an id, as the vocabulary spells it.
    pub fn id_to_token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }
}

fn cancelled() -> Error {
    error!(Cancelled, "cancelled while tokenizing")
}

/// Runs a job on a thread of its own. Once cancelled, nobody waits for it: it ends by itself, at the next word or
/// after the part of the library that looks at the whole text.
fn beside<T: Send + 'static>(
    cancel: &CancelToken,
    job: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    let (send, receive) = mpsc::channel();
    let thread = std::thread::Builder::new().name("qhx-tokenizer".to_owned());
    let run = move || {
        // Nobody listens after a cancel.
        let _ = send.send(job());
    };
    let internal = |why: String| error!(Internal, "tokenizing: {why}");
    thread.spawn(run).map_err(|e| internal(e.to_string()))?;
    loop {
        match receive.recv_timeout(Duration::from_millis(20)) {
            Ok(result) => return result,
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(e) => return Err(internal(e.to_string())),
        }
        if cancel.is_cancelled() {
            return Err(cancelled());
        }
    }
}

/// Runs a call into the tokenizer library, some of whose components panic on configurations that
/// no training produces.
fn guarded<T>(call: impl FnOnce() -> tokenizers::Result<T>) -> Result<T, String> {
    match catch_unwind(AssertUnwindSafe(call)) {
        Ok(result) => result.map_err(|e| e.to_string()),
        Err(_) => Err("the tokenizer's configuration is inconsistent".to_owned()),
    }
}
