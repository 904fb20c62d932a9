//! Prompts with images, audio and videos, from the engine through the plugin interface into a graph, which sums
//! what it is fed.

use std::path::PathBuf;
use std::sync::OnceLock;

use qhx_base::ErrorKind;
use qhx_core::engine::{
    ContentPart, FinishReason, Generation, Message, Model, Part, Prompt, Request,
};
use qhx_tests::replay::try_generate;
use qhx_tests::{backends, multimodal, outside, plugin_files};
use qhx_types::Media;

fn model() -> (tempfile::TempDir, Model) {
    static FILE: OnceLock<PathBuf> = OnceLock::new();
    let plugin = FILE.get_or_init(|| plugin_files::build("qhx-test-multimodal-plugin"));
    let folder = tempfile::tempdir().unwrap();
    let manifest = multimodal::write(folder.path()).unwrap();
    let model = outside::open(&manifest, plugin, backends::cpu());
    (folder, model)
}

/// An image of one colour, `height` positions high.
fn image(colour: [u8; 3], height: u32) -> Media {
    let rgb = colour.repeat(2 * height as usize);
    Media::image(rgb, 2, height).unwrap()
}

const RED: [u8; 3] = [255, 0, 0];
const BLUE: [u8; 3] = [0, 0, 255];

fn run(model: &mut Model, prompt: Prompt, max_new: usize) -> qhx_base::Result<Generation> {
    try_generate(model, &Request::greedy(prompt, max_new))
}

fn complete(model: &mut Model, parts: &[Part]) -> Generation {
    run(model, Prompt::Parts(parts.to_vec()), 2).unwrap()
}

fn text(text: &str) -> Part {
    Part::Text(text.to_owned())
}

#[test]
fn what_is_shown_and_heard_reaches_the_graph() {
    let (_folder, mut model) = model();
    let answer =
        |model: &mut Model, part: Media| complete(model, &[Part::Media(part), text("ab")]).text;
    assert_eq!(answer(&mut model, image(RED, 4)), "rr");
    assert_eq!(answer(&mut model, image(BLUE, 4)), "uu");
    assert_eq!(answer(&mut model, Media::audio(vec![-0.5; 150], 8000).unwrap()), "ll");
    let video = Media::video(vec![255; 18], 2, 1, vec![0.0, 0.5, 1.0]).unwrap();
    assert_eq!(answer(&mut model, video), "ww");
    assert_eq!(model.media_rules().audio.rate, 8000);
    let spans = model.span_stats();
    let counts: Vec<_> = spans.iter().map(|span| (span.name.as_str(), span.count)).collect();
    assert_eq!(counts, [("vision", 5), ("audio", 1)], "two images and three frames, an audio clip");
}

#[test]
fn different_images_with_equal_placeholders_share_no_state() {
    let (_folder, mut model) = model();
    let ask = |model: &mut Model, colour| {
        let parts = [text("a"), Part::Media(image(colour, 3)), text("b")];
        let generation = complete(model, &parts);
        assert_eq!(generation.prompt_tokens, 7);
        (generation.text, generation.reused_tokens)
    };
    assert_eq!(
        model.encode_prompt(&Prompt::Parts(vec![Part::Media(image(RED, 3))])).unwrap(),
        [7, 4, 4, 4, 7]
    );
    assert_eq!(ask(&mut model, RED), ("rr".to_owned(), 0));
    assert_eq!(ask(&mut model, BLUE), ("uu".to_owned(), 0), "the state cannot be cut back");
    let longer = [text("a"), Part::Media(image(BLUE, 3)), text("buuc")];
    assert_eq!(complete(&mut model, &longer).reused_tokens, 8, "the same image");
}

#[test]
fn a_chat_keeps_its_image_also_from_a_snapshot() {
    let (_folder, mut model) = model();
    let (mut messages, mut reused) = (Vec::new(), Vec::new());
    let question = |colour| {
        let parts = vec![ContentPart::Media(image(colour, 5)), ContentPart::Text("a".into())];
        Message::new("user", parts)
    };
    let mut turn = |model: &mut Model, messages: &[Message]| {
        let prompt = Prompt::Chat { messages: messages.to_vec(), thinking: None };
        let generation = run(model, prompt, 2).unwrap();
        reused.push(generation.reused_tokens);
        generation.text
    };
    messages.push(question(RED));
    assert_eq!(turn(&mut model, &messages), "rr");
    // The template writes the answer otherwise than it was made: the snapshot before it serves.
    messages.extend([Message::new("assistant", "r"), Message::new("user", "c")]);
    assert_eq!(turn(&mut model, &messages), "rr");
    messages[0] = question(BLUE);
    assert_eq!(turn(&mut model, &messages), "uu");
    assert_eq!(reused, [0, 7, 0]);
    assert_eq!(model.span_stats()[0].count, 2, "each image was seen once");
}

#[test]
fn the_context_and_its_end_count_positions() {
    let (_folder, mut model) = model();
    let parts = vec![text("a"), Part::Media(image(RED, 60))];
    let generation = run(&mut model, Prompt::Parts(parts), 9).unwrap();
    assert_eq!((generation.prompt_tokens, generation.tokens.len()), (63, 2));
    assert_eq!(generation.finish_reason, FinishReason::Length);
    let parts = vec![Part::Media(image(RED, 40)), text("a"), Part::Media(image(BLUE, 40))];
    let error = run(&mut model, Prompt::Parts(parts), 9).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Prompt);
    let words = "it ends inside image 2 of the prompt, which takes positions 44 to 83";
    assert!(error.message().contains(words), "{error}");
    // The conversation goes on.
    assert_eq!(complete(&mut model, &[text("cc")]).text, "cc");
}

#[test]
fn parts_become_one_embedding() {
    let (_folder, mut model) = model();
    let prompt = Prompt::Parts(vec![Part::Media(image(RED, 3)), text("a")]);
    let vector = model.embed_prompt(&prompt).unwrap().to_vec();
    assert_eq!((vector[0], vector[7], vector[8], vector[10]), (1.0, 2.0, 3.0, 0.0));
    assert_eq!(model.op_mut().position(), 6);
}
