//! From a prompt to positions: tokens, and among them images, audio and videos.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use serde_json::{Map, Value};

use super::sequence::{Key, Sequence, Span};
use super::types::Part;
use crate::op::{HostOp, Piece, Placement, Segment};
use qhx_base::trace::{self, Trace};
use qhx_base::{CancelToken, Error, ErrorKind, Result, TooLong, bail, error};
use qhx_text::{Beginning, Content, Message, ReasoningMarks, Tokenizer};
use qhx_types::Media;

/// Maximum positions that one image, audio clip or video may take where the op has no limit of its own.
const MAX_POSITIONS: usize = 1 << 24;

/// An image, audio clip or video that has a place.
#[derive(Debug, PartialEq, Eq)]
struct PlacedMedia {
    /// Such as `image 2`.
    name: String,
    media: Media,
    /// First frame and end of this piece, for a video that is consumed in pieces.
    frames: Option<(usize, usize)>,
    /// Index of this tile and number of tiles, for an image that is consumed in pieces.
    part: Option<(u16, u16)>,
}

impl PlacedMedia {
    fn segment(&self) -> Option<Segment<'_>> {
        piece(&self.media, self.frames, self.part)
    }
}

/// Segment of a part of a prompt, for an op; `None` if the part has no such piece.
fn piece(
    media: &Media,
    frames: Option<(usize, usize)>,
    part: Option<(u16, u16)>,
) -> Option<Segment<'_>> {
    match (frames, part) {
        (None, None) => Some(media.segment()),
        (Some((first, end)), None) => media.frames(first, end),
        (None, Some((index, of))) => media.tile(index, of),
        (Some(_), Some(_)) => None,
    }
}

/// A prompt as positions.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct Encoded {
    pub sequence: Sequence,
    /// Medium at each span of the sequence.
    media: Vec<PlacedMedia>,
    /// Number of positions after which the state is worth saving: the conversation without the
    /// beginning of the answer, which the next turn may render otherwise.
    pub checkpoint: Option<usize>,
    /// Beginning of the answer.
    pub beginning: Beginning,
}

impl Encoded {
    /// Tokens that are taken as they are.
    pub(super) fn plain(tokens: Vec<u32>) -> Self {
        Self { sequence: Sequence { tokens, ..Sequence::default() }, ..Self::default() }
    }

    /// The segments of some positions. A span lies within them whole or not at all.
    pub(super) fn segments(&self, range: Range<usize>) -> Vec<Segment<'_>> {
        let (mut segments, mut done) = (Vec::new(), range.start);
        let tokens = |range: Range<usize>| {
            let tokens = &self.sequence.tokens[range];
            (!tokens.is_empty()).then_some(Segment::Tokens(tokens))
        };
        for (span, placed) in self.sequence.spans.iter().zip(&self.media) {
            if !range.contains(&span.start) {
                continue;
            }
            segments.extend(tokens(done..span.start));
            segments.extend(placed.segment());
            done = span.end();
        }
        segments.extend(tokens(done..range.end));
        segments
    }

    /// Adds what a prompt holds for an image, audio clip or video.
    fn place(&mut self, reader: &Reader<'_>, part: &PendingMedia<'_>) -> Result<()> {
        let PendingMedia { name, media, placement, .. } = part;
        let mut tiles = None;
        for each in &placement.pieces {
            match each {
                Piece::Tokens(tokens) => self.sequence.tokens.extend(tokens),
                // It stands around the marker.
                Piece::Text(text) if text.is_empty() => {}
                Piece::Text(text) => {
                    self.sequence.tokens.extend(reader.tokenizer()?.encode(text, false)?);
                }
                &Piece::Part { token, positions, frames, part } => {
                    let start = self.sequence.len();
                    let max_positions = reader.max_ctx.min(MAX_POSITIONS);
                    if positions > max_positions {
                        let message = format!(
                            "{name} takes {positions} positions, the context of {} holds {max_positions}",
                            reader.model
                        );
                        let cause = TooLong { max: max_positions };
                        return Err(Error::new(ErrorKind::Prompt, message)
                            .with_source(cause)
                            .hint(
                                "take a smaller one, or forge the model with a larger --max-ctx",
                            ));
                    }
                    let of = part.map(|(_, of)| of);
                    let alike = of.is_none() || *tiles.get_or_insert(of) == of;
                    let there = alike && piece(media, frames, part).is_some();
                    if positions == 0 || !there {
                        return Err(error!(
                            Plugin,
                            "the host-op places {name} at {positions} positions with frames {frames:?} as part \
                             {part:?}, expected at least one position, frames that are there, and of an image \
                             parts below one number of them: {media:?}"
                        )
                        .hint("this is a fault of the op, report it to its author"));
                    }
                    let key = Key::new(media, frames, part);
                    self.sequence.spans.push(Span { start, positions, key });
                    self.sequence.tokens.resize(start + positions, token);
                    let (name, media) = (name.clone(), (*media).clone());
                    self.media.push(PlacedMedia { name, media, frames, part });
                }
                other => bail!(Plugin, "the host-op places a piece of an unknown kind: {other:?}"),
            }
        }
        Ok(())
    }

    /// The image, audio clip or video that lies at a position, as words.
    pub(super) fn at(&self, position: usize) -> Option<String> {
        let mut spans = self.sequence.spans.iter().zip(&self.media);
        let (span, placed) =
            spans.find(|(span, _)| (span.start..span.end()).contains(&position))?;
        let (first, last) = (span.start, span.end() - 1);
        Some(format!("{} of the prompt, which takes positions {first} to {last}", placed.name))
    }
}

/// An op's declarations about the images, audio and videos in a prompt; see [`HostOp`].
pub(super) trait MediaPlacement {
    fn placeholders(&self) -> &[u32];
    fn place(&self, segment: &Segment<'_>) -> Result<Placement>;

    /// True where the tokenizer's post-processor adds its tokens.
    fn special_tokens(&self) -> bool {
        true
    }
}

impl<O: HostOp> MediaPlacement for O {
    fn placeholders(&self) -> &[u32] {
        &self.info().placeholders
    }

    fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
        HostOp::place(self, *segment)
    }

    fn special_tokens(&self) -> bool {
        self.info().prompt_rules.special_tokens
    }
}

/// Turns prompts into positions, unless their texts are too long by their length.
pub(super) struct Reader<'a> {
    /// Name of the model, for messages.
    pub model: &'a str,
    pub op: &'a dyn MediaPlacement,
    pub tokenizer: Result<&'a Tokenizer>,
    pub reasoning: ReasoningMarks,
    pub max_ctx: usize,
    pub cancel: CancelToken,
    pub trace: Option<&'a Arc<Trace>>,
}

/// Marks places in a text of tokens that are spelt there and not meant. Unicode has these characters for
/// use within a program.
const BREAKS: std::ops::RangeInclusive<char> = '\u{fdd0}'..='\u{fdef}';

/// Keeps texts from becoming tokens that stand for images, audio and videos.
#[derive(Debug, Default)]
struct PlaceholderEscaper {
    words: Vec<String>,
    /// Character that stands within such a word in a text; `None` if no text has one.
    mark: Option<char>,
}

impl PlaceholderEscaper {
    /// A guard of `texts` against `words`.
    fn new(words: Vec<String>, texts: &[&str]) -> Result<Self> {
        let spelt = |text: &&str| words.iter().any(|word| text.contains(word.as_str()));
        if !texts.iter().any(spelt) {
            return Ok(Self { words, mark: None });
        }
        let unused = |mark: &char| !texts.iter().any(|text| text.contains(*mark));
        let mark = BREAKS.into_iter().find(unused).ok_or_else(|| {
            error!(Prompt, "the text spells tokens that stand for images or audio")
                .hint("leave them out, or leave out the noncharacters U+FDD0 to U+FDEF")
        })?;
        Ok(Self { words, mark: Some(mark) })
    }

    /// A value with a mark within every word of its texts.
    fn guard_all(&self, value: &Value) -> Value {
        match value {
            Value::String(text) => Value::String(self.guard(text)),
            Value::Array(items) => items.iter().map(|item| self.guard_all(item)).collect(),
            Value::Object(members) => members
                .iter()
                .map(|(name, member)| (self.guard(name), self.guard_all(member)))
                .collect(),
            other => other.clone(),
        }
    }

    /// The text with a mark within every word.
    fn guard(&self, text: &str) -> String {
        let Some(mark) = self.mark else { return text.to_owned() };
        self.words.iter().fold(text.to_owned(), |text, word| {
            let mut chars = word.chars();
            let first = chars.next().map_or(String::new(), String::from);
            text.replace(word.as_str(), &format!("{first}{mark}{}", chars.as_str()))
        })
    }
}

/// The texts of a value: strings and the names of members.
fn collect_texts<'v>(value: &'v Value, texts: &mut Vec<&'v str>) {
    match value {
        Value::String(text) => texts.push(text),
        Value::Array(items) => items.iter().for_each(|item| collect_texts(item, texts)),
        Value::Object(members) => {
            for (name, member) in members {
                texts.push(name);
                collect_texts(member, texts);
            }
        }
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

/// An image, audio clip or video that has no place yet.
struct PendingMedia<'a> {
    /// Such as `image 2`.
    name: String,
    media: &'a Media,
    placement: Placement,
    /// Texts that the first and the last of the pieces were: they are tokenized together with what stands around the
    /// marker, since tokens may span both.
    around: [String; 2],
}

impl<'a> PendingMedia<'a> {
    /// `wrapped` where the host puts tokens around the pieces, which keep texts apart.
    fn new(name: String, media: &'a Media, mut placement: Placement, wrapped: bool) -> Self {
        let mut around = [String::new(), String::new()];
        if let Some(Piece::Text(text)) = placement.pieces.first_mut()
            && (!wrapped || placement.opening.is_empty())
        {
            around[0] = std::mem::take(text);
        }
        if let Some(Piece::Text(text)) = placement.pieces.last_mut()
            && (!wrapped || placement.closing.is_empty())
        {
            around[1] = std::mem::take(text);
        }
        Self { name, media, placement, around }
    }

    /// The marker, spelt `marker`, with the texts around it.
    fn marked(&self, marker: &str) -> String {
        let [before, after] = &self.around;
        [before, marker, after].concat()
    }
}

/// A rendered text with the texts that stand around the markers of what waits; `spelt` are the markers.
fn surround(text: String, waiting: &VecDeque<PendingMedia<'_>>, spelt: &[String]) -> String {
    if waiting.iter().all(|w| w.around.iter().all(String::is_empty)) {
        return text;
    }
    let (mut out, mut rest) = (String::with_capacity(text.len()), text.as_str());
    let mut left: Vec<_> = waiting.iter().zip(spelt).collect();
    loop {
        let places = left.iter().enumerate();
        let found =
            places.filter_map(|(index, (_, marker))| Some((rest.find(marker.as_str())?, index)));
        let Some((at, index)) = found.min() else { break };
        let (part, marker) = left.remove(index);
        out.push_str(&rest[..at]);
        out.push_str(&part.marked(marker));
        rest = &rest[at + marker.len()..];
    }
    out + rest
}

impl Reader<'_> {
    fn tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer.as_ref().copied().map_err(Clone::clone)
    }

    /// `wrapped` is for a text that no template wrote.
    fn place<'m>(
        &self,
        media: impl Iterator<Item = &'m Media>,
        wrapped: bool,
    ) -> Result<VecDeque<PendingMedia<'m>>> {
        let mut waiting: VecDeque<PendingMedia<'m>> = VecDeque::new();
        for media in media {
            let noun = media.noun();
            let before = waiting.iter().filter(|w| w.media.noun() == noun).count();
            let name = format!("{noun} {}", before + 1);
            let _span = trace::span_with(self.trace, "place media", |s| s.argument("name", &*name));
            let placement = self.op.place(&media.segment()).map_err(|e| e.context(&name))?;
            waiting.push_back(PendingMedia::new(name, media, placement, wrapped));
        }
        Ok(waiting)
    }

    /// The tokenizer's spellings of the tokens that no text may become.
    fn words(&self, waiting: &VecDeque<PendingMedia<'_>>) -> Vec<String> {
        let Ok(tokenizer) = self.tokenizer() else { return Vec::new() };
        let markers = waiting.iter().map(|w| w.placement.marker);
        let ids = self.op.placeholders().iter().copied().chain(markers);
        let mut words: Vec<_> = ids.filter_map(|id| tokenizer.id_to_token(id)).collect();
        words.retain(|word| !word.is_empty());
        words.sort_unstable();
        words.dedup();
        words
    }

    fn spell(&self, token: u32) -> Result<String> {
        self.tokenizer()?.id_to_token(token).ok_or_else(|| {
            error!(
                Artifact,
                "token {token}, which stands for an image, audio or video, is not in the tokenizer"
            )
            .hint("artifacts.tokenizer is another model's, or plan.params names a wrong token")
        })
    }

    /// Positions of parts to continue.
    pub(super) fn parts(&self, parts: &[Part]) -> Result<Encoded> {
        let media = parts.iter().filter_map(|part| match part {
            Part::Media(media) => Some(media),
            Part::Text(_) | Part::Tokens(_) => None,
        });
        let mut waiting = self.place(media, true)?;
        // Texts that follow each other are one: what they spell together counts, too.
        let mut runs: Vec<Part> = Vec::new();
        for part in parts {
            match (runs.last_mut(), part) {
                (Some(Part::Text(before)), Part::Text(text)) => before.push_str(text),
                (_, part) => runs.push(part.clone()),
            }
        }
        let texts = runs.iter().filter_map(|part| match part {
            Part::Text(text) => Some(text.as_str()),
            Part::Tokens(_) | Part::Media(_) => None,
        });
        let texts: Vec<_> = texts.collect();
        let guard = PlaceholderEscaper::new(self.words(&waiting), &texts)?;
        // What stands around a text, such as a BOS token, is for one that has no tokens given.
        let no_tokens = !runs.iter().any(|part| matches!(part, Part::Tokens(_)));
        let add_special = no_tokens && self.op.special_tokens();
        let mut encoded = Encoded::default();
        for run in runs.chunk_by(|a, b| is_tokens(a) == is_tokens(b)) {
            let (mut ids, mut text, mut next) = (Vec::new(), String::new(), waiting.iter());
            for part in run {
                match part {
                    Part::Text(part) => text.push_str(&guard.guard(part)),
                    Part::Tokens(tokens) => ids.extend_from_slice(tokens),
                    Part::Media(_) => {
                        let Some(part) = next.next() else { continue };
                        let marker = part.placement.marker;
                        // Without a tokenizer there may be media, and tokens.
                        if self.tokenizer.is_err() && part.around.iter().all(String::is_empty) {
                            ids.push(marker);
                        } else {
                            text.push_str(&part.marked(&self.spell(marker)?));
                        }
                    }
                }
            }
            if !text.is_empty() {
                ids = self.encode(self.tokenizer()?, &text, add_special, guard.mark)?;
            }
            let here = run.iter().filter(|part| matches!(part, Part::Media(_))).count();
            let rest = waiting.split_off(here);
            self.assemble(&mut encoded, &ids, None, &mut waiting, true)?;
            waiting = rest;
        }
        Ok(encoded)
    }

    /// Positions of a conversation, which `render` renders with or without the beginning of an answer;
    /// it is given the messages, the template's arguments and what stands for each image, audio clip and video.
    /// `checkpoint` asks for the place to save the state at, which takes a second rendering.
    pub(super) fn chat(
        &self,
        messages: &[Message],
        arguments: &Map<String, Value>,
        render: impl Fn(&[Message], &Map<String, Value>, &[String], bool) -> Result<String>,
        checkpoint: bool,
    ) -> Result<Encoded> {
        let tokenizer = self.tokenizer()?;
        let mut waiting =
            self.place(messages.iter().flat_map(|message| message.content.media()), false)?;
        let contents = messages.iter().flat_map(|message| message.content.texts());
        let roles = messages.iter().map(|message| message.role.as_str());
        let mut texts: Vec<_> = contents.chain(roles).collect();
        arguments.values().for_each(|value| collect_texts(value, &mut texts));
        let guard = PlaceholderEscaper::new(self.words(&waiting), &texts)?;
        let guarded: (Vec<Message>, Map<String, Value>);
        let (messages, arguments) = if guard.mark.is_some() {
            let content = |content: &Content| content.map_texts(&|text| guard.guard(text));
            let message = |m: &Message| Message::new(guard.guard(&m.role), content(&m.content));
            let argument =
                |(name, value): (&String, &Value)| (name.clone(), guard.guard_all(value));
            guarded =
                (messages.iter().map(message).collect(), arguments.iter().map(argument).collect());
            (guarded.0.as_slice(), &guarded.1)
        } else {
            (messages, arguments)
        };
        let spelt = |w: &PendingMedia<'_>| {
            let Placement { opening, marker, closing, .. } = &w.placement;
            let tokens = opening.iter().chain([marker]).chain(closing);
            tokens.map(|&token| self.spell(token)).collect::<Result<String>>()
        };
        let spelt = waiting.iter().map(spelt).collect::<Result<Vec<_>>>()?;

        let markers = waiting.iter().map(|w| self.spell(w.placement.marker));
        let markers = markers.collect::<Result<Vec<_>>>()?;
        let surrounded = |text| surround(text, &waiting, &markers);
        let text = surrounded(render(messages, arguments, &spelt, true)?);
        let beginning = Beginning::of(messages, &text, self.reasoning);
        let mut encoded = Encoded { beginning, ..Encoded::default() };
        // What an answer goes on with, the next turn may render otherwise, too.
        let closed = || match messages.split_last() {
            Some((_, before)) if Message::goes_on(messages) => {
                let mut arguments = arguments.clone();
                if let Some(Value::Array(all)) = arguments.get_mut("messages") {
                    all.pop();
                }
                render(before, &arguments, &spelt, false).map(surrounded)
            }
            _ => render(messages, arguments, &spelt, false).map(surrounded),
        };
        let closed = match checkpoint.then(closed) {
            // Some templates refuse a conversation that does not ask for an answer.
            Some(Err(e)) if e.kind() == ErrorKind::Cancelled => return Err(e),
            closed => closed.map(Result::unwrap_or_default),
        };
        let Some(closed) = closed else {
            let ids = self.encode(tokenizer, &text, false, guard.mark)?;
            self.assemble(&mut encoded, &ids, None, &mut waiting, false)?;
            return Ok(encoded);
        };
        let common = text.bytes().zip(closed.bytes()).take_while(|(a, b)| a == b).count();
        let mark = guard.mark;
        let (ids, within) =
            tokenizer.within(&text, self.max_ctx, &self.cancel, move |tokenizer, text| {
                encode_with_prefix(tokenizer, text, mark, common)
            })?;
        self.assemble(&mut encoded, &ids, Some(within), &mut waiting, false)?;
        Ok(encoded)
    }

    /// Tokens of a text, which is tokenized apart before and after each `mark`.
    fn encode(
        &self,
        tokenizer: &Tokenizer,
        text: &str,
        add_special: bool,
        mark: Option<char>,
    ) -> Result<Vec<u32>> {
        let Some(mark) = mark else {
            return tokenizer.encode_within(text, add_special, self.max_ctx, &self.cancel);
        };
        tokenizer.within(text, self.max_ctx, &self.cancel, move |tokenizer, text| {
            let (ids, _) = encode_with_prefix(tokenizer, text, Some(mark), 0)?;
            if !add_special {
                return Ok(ids);
            }
            let (mut around, after) = tokenizer.around()?;
            around.extend(ids);
            around.extend(after);
            Ok(around)
        })
    }

    /// Adds tokens, and in the place of each marker what waits for it. `within` is a number of the
    /// tokens; the positions that these take become the checkpoint. `wrap` is for a text that no
    /// template wrote.
    fn assemble(
        &self,
        encoded: &mut Encoded,
        ids: &[u32],
        within: Option<usize>,
        waiting: &mut VecDeque<PendingMedia<'_>>,
        wrap: bool,
    ) -> Result<()> {
        let placeholders = self.op.placeholders();
        let mut positions_within = 0;
        for (index, &id) in ids.iter().enumerate() {
            if within == Some(index) {
                positions_within = encoded.sequence.len();
            }
            if let Some(next) = waiting.iter().position(|w| w.placement.marker == id) {
                let Some(part) = waiting.remove(next) else { continue };
                let Placement { opening, closing, .. } = &part.placement;
                if wrap {
                    encoded.sequence.tokens.extend(opening);
                }
                encoded.place(self, &part)?;
                if wrap {
                    encoded.sequence.tokens.extend(closing);
                }
            } else if placeholders.contains(&id) {
                return Err(self.unexpected(id));
            } else {
                encoded.sequence.tokens.push(id);
            }
        }
        if let Some(missing) = waiting.front() {
            let (name, marker) = (&missing.name, self.spell(missing.placement.marker)?);
            return Err(error!(
                Prompt,
                "{name} has no place in the prompt: expected the token {marker:?} for it"
            )
            .hint(
                "the chat template or the tokenizer is that of a model without images and audio, or the \
                 template takes them from the user's messages only",
            ));
        }
        // Nothing is saved before the first position, nor after the last.
        if within.is_some_and(|within| within < ids.len()) {
            let place = encoded.sequence.floor(positions_within);
            encoded.checkpoint = Some(place).filter(|&n| n > 0);
        }
        Ok(())
    }

    /// The error of a token that stands for media where there is none.
    pub(super) fn unexpected(&self, token: u32) -> Error {
        let spelt = self.spell(token).map_or(String::new(), |text| format!(" ({text:?})"));
        let around = self.tokenizer().and_then(Tokenizer::around);
        if around.is_ok_and(|(before, after)| before.contains(&token) || after.contains(&token)) {
            return error!(
                Artifact,
                "the tokenizer's post-processor puts token {token}{spelt} around every text, and it stands for an \
                 image, audio or a video"
            )
            .hint("artifacts.tokenizer is another model's, or plan.params names a wrong token");
        }
        error!(
            Prompt,
            "token {token}{spelt} stands for an image, audio or video, and the prompt has none there"
        )
        .hint("give images, audio and videos as parts of the prompt, not as tokens")
    }
}

fn is_tokens(part: &Part) -> bool {
    matches!(part, Part::Tokens(_))
}

/// Tokens of a text that is tokenized apart before and after each `mark`, and how many lie in its first
/// `bytes`.
fn encode_with_prefix(
    tokenizer: &Tokenizer,
    text: &str,
    mark: Option<char>,
    bytes: usize,
) -> Result<(Vec<u32>, usize)> {
    let Some(mark) = mark else { return tokenizer.encode_with_prefix(text, false, bytes) };
    let (mut ids, mut within, mut start) = (Vec::new(), 0, 0);
    for piece in text.split(mark) {
        let (piece_ids, n) =
            tokenizer.encode_with_prefix(piece, false, bytes.saturating_sub(start))?;
        ids.extend(piece_ids);
        within += n;
        start += piece.len() + mark.len_utf8();
    }
    Ok((ids, within))
}

/// The error of a prompt without text or tokens.
pub(super) fn empty() -> Error {
    error!(Prompt, "the prompt is empty").hint("give a text, or - to read it from standard input")
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;
    use std::path::Path;

    use serde_json::json;

    use super::*;

    /// An op with these placeholders.
    struct Placeholders(&'static [u32]);

    impl MediaPlacement for Placeholders {
        fn placeholders(&self) -> &[u32] {
            self.0
        }

        fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
            panic!("{segment:?}")
        }
    }

    fn reader<'a>(op: &'a dyn MediaPlacement, tokenizer: &'a Tokenizer) -> Reader<'a> {
        Reader {
            model: "m",
            op,
            tokenizer: Ok(tokenizer),
            reasoning: ReasoningMarks::default(),
            max_ctx: 64,
            cancel: CancelToken::new(),
            trace: None,
        }
    }

    fn tokenizer() -> Tokenizer {
        tokenizer_with(json!(null))
    }

    fn tokenizer_with(post_processor: serde_json::Value) -> Tokenizer {
        tokenizer_of(json!([]), post_processor)
    }

    fn tokenizer_of(added: serde_json::Value, post_processor: serde_json::Value) -> Tokenizer {
        let words = json!({"?": 0, "hi": 1, "you": 2, "<end>": 3, "<answer>": 4, "hiyou": 5});
        let json = json!({
            "version": "1.0", "truncation": null, "padding": null, "normalizer": null,
            "added_tokens": added, "post_processor": post_processor, "decoder": null,
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": words, "unk_token": "?"}
        });
        Tokenizer::from_bytes(Path::new("tokenizer.json"), json.to_string().as_bytes()).unwrap()
    }

    /// The encoded conversation, and how often it was rendered.
    fn encode(open: &str, closed: Option<&str>, checkpoint: bool) -> (Encoded, usize) {
        let rendered = Cell::new(0);
        let render = |_: &[Message], _: &Map<String, Value>, _: &[String], answer: bool| {
            rendered.set(rendered.get() + 1);
            let text = if answer { Some(open) } else { closed };
            text.map(str::to_owned).ok_or_else(|| error!(Prompt, "refused"))
        };
        let tokenizer = tokenizer();
        let reader = reader(&Placeholders(&[]), &tokenizer);
        (reader.chat(&[], &Map::new(), render, checkpoint).unwrap(), rendered.get())
    }

    #[test]
    fn placeholders_in_roles_and_tools_are_text() {
        let tokenizer = tokenizer();
        let reader = reader(&Placeholders(&[4]), &tokenizer);
        let arguments = json!({"tools": [{"name": "<answer>", "<answer>": 1}], "n": 2});
        let arguments = arguments.as_object().unwrap();
        let render = |messages: &[Message], given: &Map<String, Value>, _: &[String], _| {
            let tool = &given["tools"][0];
            let member = tool.as_object().unwrap().keys().find(|key| *key != "name").unwrap();
            let name = tool["name"].as_str().unwrap();
            Ok(format!("hi {} {name} {member} {}", messages[0].role, given["n"]))
        };
        let messages = [Message::new("<answer>", "you")];
        let encoded = reader.chat(&messages, arguments, render, false).unwrap();
        assert_eq!(encoded.sequence.tokens[0], 1);
        assert!(!encoded.sequence.tokens.contains(&4), "{:?}", encoded.sequence.tokens);
    }

    /// An image has texts around it, and `opening` where no template wrote the prompt.
    struct Framed {
        opening: Vec<u32>,
    }

    impl MediaPlacement for Framed {
        fn placeholders(&self) -> &[u32] {
            &[4]
        }

        fn place(&self, _: &Segment<'_>) -> Result<Placement> {
            let part = Piece::Part { token: 4, positions: 2, frames: None, part: None };
            let pieces = vec![Piece::Text("you".to_owned()), part, Piece::Text("you".to_owned())];
            let opening = self.opening.clone();
            Ok(Placement { marker: 4, opening, pieces, ..Placement::default() })
        }
    }

    #[test]
    fn texts_around_an_image_are_one_with_what_stands_there() {
        let word = json!({"id": 4, "content": "<answer>", "special": true, "single_word": false,
                          "lstrip": false, "rstrip": false, "normalized": false});
        let tokenizer = tokenizer_of(json!([word]), json!(null));
        let encode = |opening: Vec<u32>, chat: bool| {
            let op = Framed { opening };
            let reader = reader(&op, &tokenizer);
            let image = || Media::image(vec![0; 3], 1, 1).unwrap();
            let encoded = if chat {
                let part = qhx_text::ContentPart::Media(image());
                let render = |_: &[Message], _: &Map<String, Value>, _: &[String], answer: bool| {
                    Ok(if answer { "hi<answer>hi you" } else { "hi<answer>hi" }.to_owned())
                };
                reader.chat(&[Message::new("user", vec![part])], &Map::new(), render, true)
            } else {
                let text = |text: &str| Part::Text(text.to_owned());
                reader.parts(&[text("hi"), Part::Media(image()), text("hi")])
            };
            encoded.unwrap()
        };
        let chat = encode(vec![], true);
        // "hiyou" is a token, "youhi" is none that is known.
        assert_eq!(chat.sequence.tokens, [5, 4, 4, 0, 2]);
        assert_eq!(chat.checkpoint, Some(4));
        assert_eq!(encode(vec![], false).sequence.tokens, [5, 4, 4, 0]);
        // The opening stands before the text.
        assert_eq!(encode(vec![3], false).sequence.tokens, [1, 3, 2, 4, 4, 0]);
    }

    #[test]
    fn a_placeholder_around_every_text_is_the_tokenizers_fault() {
        let around = |token: &str, id: u32| {
            tokenizer_with(json!({
                "type": "TemplateProcessing",
                "single": [{"SpecialToken": {"id": token, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
                "pair": [],
                "special_tokens": {token: {"id": token, "ids": [id], "tokens": [token]}}
            }))
        };
        let unexpected =
            |tokenizer: &Tokenizer| reader(&Placeholders(&[4]), tokenizer).unexpected(4);
        let error = unexpected(&around("<answer>", 4));
        assert_eq!(error.kind(), ErrorKind::Artifact, "{error}");
        assert!(error.message().contains("post-processor puts token 4 (\"<answer>\")"), "{error}");
        assert_eq!(unexpected(&around("<end>", 3)).kind(), ErrorKind::Prompt);
    }

    #[test]
    fn a_conversation_is_rendered_once_where_nothing_is_saved() {
        let (open, closed) = ("hi <end> <answer>", Some("hi <end>"));
        let encoded = |checkpoint| {
            let beginning = Beginning::Either;
            Encoded { checkpoint, beginning, ..Encoded::plain(vec![1, 3, 4]) }
        };
        assert_eq!(encode(open, closed, false), (encoded(None), 1));
        assert_eq!(encode(open, closed, true), (encoded(Some(2)), 2));
    }

    #[test]
    fn the_state_is_saved_where_the_answer_begins() {
        let checkpoint = |open, closed| encode(open, closed, true).0.checkpoint;
        assert_eq!(checkpoint("hi <answer>", Some("hi <end>")), Some(1), "the ends differ");
        assert_eq!(checkpoint("hi you <end>", Some("hi yo")), Some(1), "the place lies in a word");
        assert_eq!(checkpoint("hi you", None), None, "a template that wants to be asked");
        assert_eq!(checkpoint("hi you", Some("you")), None, "nothing in common");
        assert_eq!(checkpoint("hi you", Some("hi you")), None, "no beginning of an answer");
    }
}
