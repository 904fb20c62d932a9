//! Prompts of text only, and the room they need.

use crate::{Error, Host, Modality, OpDescription, Result, Segment};

/// Number of tokens of a prompt.
///
/// # Errors
/// When it holds anything but text, or nothing; `op` is the op's name, for the message.
pub fn count_tokens(op: &str, segments: &[Segment<'_>]) -> Result<usize> {
    let mut total = 0;
    for segment in segments {
        let Segment::Tokens(tokens) = segment else {
            let found = kind(segment);
            return Err(Error::prompt(format!("{op} takes text only; the prompt has {found}")));
        };
        total += tokens.len();
    }
    if total == 0 {
        return Err(Error::prompt("the prompt has no tokens"));
    }
    Ok(total)
}

/// Kind of a segment, for messages.
pub fn kind(segment: &Segment<'_>) -> &'static str {
    match segment {
        Segment::Tokens(_) => "text",
        Segment::Image { .. } | Segment::Tile { .. } => "an image",
        Segment::Audio { .. } => "audio",
        Segment::Video { .. } => "a video",
        _ => "a segment of an unknown kind",
    }
}

/// True if an op declares that it takes this image, audio clip or video. `None` for tokens.
pub fn takes(op: &OpDescription, segment: &Segment<'_>) -> Option<bool> {
    let modality = match segment {
        Segment::Tokens(_) => return None,
        Segment::Image { .. } | Segment::Tile { .. } => Modality::Image,
        Segment::Audio { .. } => Modality::Audio,
        Segment::Video { .. } => Modality::Video,
        _ => return Some(false),
    };
    Some(op.modalities.contains(&modality))
}

/// The error of a segment that an op does not take: it names those that the op takes.
pub fn not_taken(op: &OpDescription, segment: &Segment<'_>) -> Error {
    let media = op.modalities.iter().filter_map(|modality| match modality {
        Modality::Image => Some("images"),
        Modality::Audio => Some("audio"),
        Modality::Video => Some("videos"),
        _ => None,
    });
    let taken = match media.collect::<Vec<_>>().as_slice() {
        [] => "text only".to_owned(),
        [first @ .., last] => format!("{} and {last}", [&["text"], first].concat().join(", ")),
    };
    Error::prompt(format!("{} takes {taken}; the prompt has {}", op.name, kind(segment)))
}

/// Tokens of text segments, in order. Other segments have none.
pub fn tokens<'a>(segments: &'a [Segment<'a>]) -> impl Iterator<Item = u32> + 'a {
    segments.iter().flat_map(|segment| {
        match segment {
            Segment::Tokens(tokens) => tokens,
            _ => &[][..],
        }
        .iter()
        .copied()
    })
}

/// Positions that an op can hold: `params.max_ctx`, or else the `capacity` of its caches. Without either there is no
/// limit.
///
/// # Errors
/// When the manifest declares more than the caches hold.
pub fn max_ctx(host: &Host, capacity: Option<usize>) -> Result<usize> {
    match (capacity, host.value::<usize>("/params/max_ctx")?) {
        (Some(capacity), Some(declared)) if declared > capacity => Err(Error::graph(format!(
            "the manifest's params.max_ctx is {declared}, but the KV cache of the decode graphs holds \
             {capacity} rows"
        ))),
        (capacity, declared) => Ok(declared.or(capacity).unwrap_or(usize::MAX)),
    }
}

/// Checks that there is room for `tokens` more.
///
/// # Errors
/// Unless `tokens` more fit at `position` into a context of `max_ctx`.
pub fn check_room(position: usize, tokens: usize, max_ctx: usize) -> Result<()> {
    if position.checked_add(tokens).is_some_and(|end| end <= max_ctx) {
        return Ok(());
    }
    Err(Error::prompt(format!(
        "{tokens} tokens at position {position} do not fit into the context of {max_ctx} tokens"
    )))
}
