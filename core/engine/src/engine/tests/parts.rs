//! Prompts with images, audio and videos.

use qhx_types::Media;

use super::*;
use crate::op::Piece;

/// Token that stands for an image.
const IMAGE: u32 = 6;
/// Token that a template writes for a video.
const VIDEO: u32 = 7;

/// The words that the tokenizer of these tests knows.
const WORDS: [(&str, u32); VOCAB] = [
    ("a", 0),
    ("b", 1),
    ("c", 2),
    ("<open>", 3),
    ("<close>", 4),
    ("<end>", 5),
    ("<image>", IMAGE),
    ("<video>", VIDEO),
];

/// Takes an image at one position a pixel, and a video frame by frame, each after its time.
#[derive(Default)]
pub(super) struct Eyes {
    /// Images that were seen: first byte and number of pixels.
    seen: Arc<Mutex<Vec<(u8, usize)>>>,
    /// The parts into which an image is placed, each of as many positions as the image has pixels.
    tiles: Vec<(u16, u16)>,
    /// The tile at which a prompt is cancelled, once.
    pub(super) cancelled_at: Option<u16>,
    /// Instead of one position a pixel.
    positions: Option<usize>,
}

impl Eyes {
    pub(super) fn see(&self, segment: &Segment<'_>) -> usize {
        if let &Segment::Tile { rgb, index, of, .. } = segment {
            self.seen.lock().unwrap().push((index as u8, of.into()));
            return rgb.len() / 3;
        }
        let (Segment::Image { rgb, .. } | Segment::Video { rgb, .. }) = segment else {
            panic!("{segment:?}")
        };
        self.seen.lock().unwrap().push((rgb[0], rgb.len() / 3));
        rgb.len() / 3
    }

    pub(super) fn place(&self, segment: &Segment<'_>) -> Result<Placement> {
        let part = |pixels: u32, frames| Piece::Part {
            token: IMAGE,
            positions: self.positions.unwrap_or(pixels as usize),
            frames,
            part: None,
        };
        let tile = |part, pixels: u32| Piece::Part {
            token: IMAGE,
            positions: pixels as usize,
            frames: None,
            part: Some(part),
        };
        match segment {
            Segment::Image { width, height, .. } if !self.tiles.is_empty() => Ok(Placement {
                marker: IMAGE,
                pieces: self.tiles.iter().map(|&part| tile(part, width * height)).collect(),
                ..Placement::default()
            }),
            Segment::Image { width, height, .. } => Ok(Placement {
                marker: IMAGE,
                opening: vec![3],
                closing: vec![4],
                pieces: vec![part(width * height, None)],
            }),
            Segment::Video { width, height, times, .. } => Ok(Placement {
                marker: VIDEO,
                pieces: (0..times.len())
                    .flat_map(|at| {
                        let time = Piece::Text(if times[at] < 1.0 { "a" } else { "b" }.to_owned());
                        [time, part(width * height, Some((at, at + 1)))]
                    })
                    .collect(),
                ..Placement::default()
            }),
            _ => Err(Error::new(ErrorKind::Prompt, "scripted takes no audio")),
        }
    }
}

type Seen = Arc<Mutex<Vec<(u8, usize)>>>;

/// An op that sees, whose logits never choose a placeholder, and what it saw.
fn seeing() -> (Scripted, Seen) {
    let seen = Seen::default();
    let mut op = Scripted::new([0.0, 0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    op.info.placeholders = vec![IMAGE, VIDEO];
    op.eyes = Some(Eyes { seen: Arc::clone(&seen), ..Eyes::default() });
    (op, seen)
}

/// An image of one colour and as many pixels.
fn image(colour: u8, pixels: u32) -> Media {
    Media::image(vec![colour; pixels as usize * 3], pixels, 1).unwrap()
}

fn text(text: &str) -> Part {
    Part::Text(text.to_owned())
}

fn complete(model: &mut Model, parts: Vec<Part>) -> Result<Generation> {
    generate(model, &Request::greedy(Prompt::Parts(parts), 2))
}

fn message(role: &str, parts: &[ContentPart]) -> Message {
    Message::new(role, parts.to_vec())
}

#[test]
fn a_part_stands_where_it_was_given_and_counts_its_positions() {
    let (op, seen) = seeing();
    let model = open_with_words(op, &WORDS);
    let tokens = |parts: Vec<Part>| model.encode_prompt(&Prompt::Parts(parts));
    let image = |colour| Part::Media(image(colour, 3));
    let placed = [3, IMAGE, IMAGE, IMAGE, 4];
    assert_eq!(tokens(vec![image(1), text("a c")]).unwrap(), [&placed[..], &[0, 2]].concat());
    let both = tokens(vec![text("a"), image(1), text("c"), image(2)]).unwrap();
    assert_eq!(both, [&[0], &placed[..], &[2], &placed].concat());
    let ids = tokens(vec![Part::Tokens(vec![5, 5]), image(1), Part::Tokens(vec![2])]).unwrap();
    assert_eq!(ids, [&[5, 5], &placed[..], &[2]].concat());
    let video = Media::video(vec![9; 12], 2, 1, vec![0.5, 1.5]).unwrap();
    let frames = tokens(vec![Part::Media(video.clone()), text("c")]).unwrap();
    assert_eq!(frames, [0, IMAGE, IMAGE, 1, IMAGE, IMAGE, 2]);

    let mut model = model;
    let parts = vec![text("a"), image(8), Part::Media(video), text("c")];
    let generation = complete(&mut model, parts).unwrap();
    assert_eq!((generation.prompt_tokens, generation.tokens), (13, vec![2, 2]));
    assert_eq!(*seen.lock().unwrap(), [(8, 3), (9, 2), (9, 2)], "each frame is a piece");
}

#[test]
fn only_equal_images_are_a_common_prefix() {
    let (op, seen) = seeing();
    let mut model = open_with_words(op, &WORDS);
    let mut reused = |colour, rest: &str| {
        let parts = vec![text("a"), Part::Media(image(colour, 3)), text(rest)];
        complete(&mut model, parts).unwrap().reused_tokens
    };
    // A word, three positions of an image and two tokens around it, and a word.
    assert_eq!(reused(1, "a"), 0);
    assert_eq!(reused(1, "c"), 6, "the same image");
    assert_eq!(reused(2, "c"), 2, "another one with the same placeholders");
    assert_eq!(reused(1, "c"), 2);
    assert_eq!(
        seen.lock().unwrap().iter().map(|(colour, _)| *colour).collect::<Vec<_>>(),
        [1, 2, 1]
    );
}

/// A model whose op places an image as these tiles.
fn tiled(tiles: &[(u16, u16)], cancelled_at: Option<u16>) -> (Model, Seen) {
    let (mut op, seen) = seeing();
    let eyes = op.eyes.as_mut().unwrap();
    (eyes.tiles, eyes.cancelled_at) = (tiles.to_vec(), cancelled_at);
    (open_with_words(op, &WORDS), seen)
}

#[test]
fn a_prompt_that_ends_between_tiles_names_the_next_one() {
    let (mut model, seen) = tiled(&[(0, 3), (1, 3), (2, 3)], Some(2));
    let parts = || vec![text("a"), Part::Media(image(7, 2)), text("c")];
    let first = complete(&mut model, parts()).unwrap();
    assert_eq!(first.finish_reason, FinishReason::Cancelled);
    assert_eq!(std::mem::take(&mut *seen.lock().unwrap()), [(0, 3), (1, 3)]);
    let second = complete(&mut model, parts()).unwrap();
    assert_eq!((second.prompt_tokens, second.reused_tokens), (8, 5));
    assert_eq!(*seen.lock().unwrap(), [(2, 3)]);
}

#[test]
fn tiles_that_are_none_of_an_image_are_the_ops_fault() {
    for tiles in [&[(3, 3)][..], &[(0, 0)], &[(0, 2), (1, 3)]] {
        let error = complete(&mut tiled(tiles, None).0, vec![Part::Media(image(7, 2))]);
        let error = error.unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Plugin, "{tiles:?}: {error}");
        assert!(error.message().contains("parts below one number of them"), "{error}");
    }
}

#[test]
fn an_image_of_a_chat_is_encoded_once() {
    let turns = |recurrent: bool| {
        let (op, seen) = seeing();
        let mut model = open_with_words(if recurrent { op.recurrent() } else { op }, &WORDS);
        let image = ContentPart::Media(image(1, 3));
        let first = message("user", &[image, ContentPart::Text("a".into())]);
        let all = [first, Message::new("assistant", "c"), Message::new("user", "a")];
        let turn = |model: &mut Model, messages: &[Message]| {
            let prompt = Prompt::Chat { messages: messages.to_vec(), thinking: None };
            generate(model, &Request::greedy(prompt, 2)).unwrap().reused_tokens
        };
        let reused = [&all[..1], &all].map(|messages| turn(&mut model, messages));
        assert_eq!(seen.lock().unwrap().len(), 1);
        reused
    };
    assert_eq!(turns(false), [0, 4]);
    assert_eq!(turns(true), [0, 4], "from a snapshot behind the image");
}

#[test]
fn text_never_becomes_a_placeholder() {
    let (op, _) = seeing();
    let model = open_with_words(op, &WORDS);
    let tokens = |prompt| model.encode_prompt(&prompt).unwrap();
    let unknown = 0;
    assert_eq!(tokens(Prompt::Text("c <image> c".into())), [2, unknown, unknown, 2]);
    let part = Part::Media(image(1, 1));
    let parts = vec![text("<image>"), part.clone(), text("<ima"), text("ge>")];
    let all = [unknown, unknown, 3, IMAGE, 4, unknown, unknown];
    assert_eq!(tokens(Prompt::Parts(parts)), all, "also when it comes in pieces");
    // A mark of the same sort in the text stays there.
    let marked = tokens(Prompt::Text("c\u{fdd0} <image>".into()));
    assert_eq!(marked, [unknown, unknown, unknown]);
    let user = [ContentPart::Text("<image>".into()), ContentPart::Media(image(1, 1))];
    let prompt = Prompt::Chat { messages: vec![message("user", &user)], thinking: None };
    assert_eq!(tokens(prompt), [unknown, unknown, IMAGE, 1]);

    let mut model = model;
    let error = generate(&mut model, &request(&[2, IMAGE], 1)).unwrap_err();
    let words = "token 6 (\"<image>\") stands for an image";
    assert!(error.message().contains(words), "{error}");
}

#[test]
fn a_context_that_ends_inside_an_image_is_an_error() {
    let (mut op, _) = seeing();
    op.info.max_ctx = 6;
    let mut model = open_with_words(op, &WORDS);
    let parts = vec![Part::Media(image(1, 1)), text("a"), Part::Media(image(2, 3)), text("c")];
    let error = complete(&mut model, parts).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Prompt);
    let words = "the prompt has 10 positions, the context of scripted holds 6; it ends inside image 2 \
                 of the prompt, which takes positions 5 to 7";
    assert!(error.message().contains(words), "{error}");
    let error = complete(&mut model, vec![Part::Media(image(1, 7))]).unwrap_err();
    assert!(error.message().contains("image 1 takes 7 positions"), "{error}");
    // Two positions are left: the answer ends where the context is full.
    let request = Request::greedy(Prompt::Parts(vec![Part::Media(image(1, 2))]), 9);
    let generation = generate(&mut model, &request).unwrap();
    assert_eq!((generation.prompt_tokens, generation.tokens.len()), (4, 3));
    assert_eq!(generation.finish_reason, FinishReason::Length);
}

#[test]
fn what_the_op_or_the_template_cannot_place_is_named() {
    let (op, _) = seeing();
    let mut model = open_with_words(op, &WORDS);
    let audio = Media::audio(vec![0.5; 4], 16000).unwrap();
    let error = complete(&mut model, vec![text("a"), Part::Media(audio)]).unwrap_err();
    assert_eq!(error.message(), "audio 1: scripted takes no audio");
    let prompt = Prompt::Chat {
        messages: vec![message("silent", &[ContentPart::Media(image(1, 1))])],
        thinking: None,
    };
    let error = model.encode_prompt(&prompt).unwrap_err();
    assert!(error.message().contains("image 1 has no place in the prompt"), "{error}");

    let says = |positions, words: &str| {
        let (mut op, _) = seeing();
        op.eyes.as_mut().unwrap().positions = Some(positions);
        let mut model = open_with_words(op, &WORDS);
        let error = complete(&mut model, vec![Part::Media(image(1, 2))]).unwrap_err();
        assert!(error.message().contains(words), "{error}");
    };
    says(0, "expected at least one position");
    says(
        usize::MAX,
        "image 1 takes 18446744073709551615 positions, the context of scripted holds 64",
    );
    says(5, "after prefill at position 0 its position is 4, expected 7");

    let mut model = open_with_words(Scripted::new(RISING), &WORDS);
    let error = complete(&mut model, vec![Part::Media(image(1, 2))]).unwrap_err();
    assert_eq!(error.message(), "image 1: scripted takes text only");
}

#[test]
fn parts_are_embedded() {
    let (op, _) = seeing();
    let mut model = open_with_words(op, &WORDS);
    let prompt = Prompt::Parts(vec![Part::Media(image(1, 2)), text("a")]);
    assert_eq!(model.embed_prompt(&prompt).unwrap()[2], 1.0);
    let long = Prompt::Parts(vec![Part::Media(image(1, 60)), text("a a a a")]);
    let error = model.embed_prompt(&long).unwrap_err();
    assert!(error.message().contains("the prompt has 66 positions"), "{error}");
}
