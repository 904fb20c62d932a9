//! Goldens of toys that see: pictures, what `transformers` makes of them, prompts with them and answers.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};

use qhx_core::Media;
use qhx_core::engine::{ContentPart, Generation, Message, Model, Part, Prompt, Request};
use qhx_core::op::Segment;
use qhx_media::{ImageRules, Limits, Source, picture};
use safetensors::SafeTensors;
use serde::Deserialize;

/// `goldens.json` of the schema `qhx-goldens-vision/1`, described in `tests/oracle/README.md`.
#[derive(Debug, Deserialize)]
pub struct Sights {
    /// The pictures, each in every mode.
    pub pictures: Vec<Sight>,
    /// The video.
    pub video: Film,
    /// Prompts and what follows.
    pub cases: Vec<Case>,
    /// Conversations.
    pub chat: Vec<Chat>,
    /// Where the pictures are.
    #[serde(skip)]
    folder: PathBuf,
    #[serde(skip)]
    tensors: Vec<u8>,
}

/// A picture as one mode makes it.
#[derive(Debug, Deserialize)]
pub struct Sight {
    /// Name.
    pub id: String,
    /// `native` keeps the shape, `fixed` stretches to a square.
    pub mode: String,
    /// Rows and columns of patches.
    pub grid: [usize; 2],
}

/// A video.
#[derive(Debug, Deserialize)]
pub struct Film {
    files: Vec<String>,
    times: Vec<f32>,
}

/// A part of a message or of a prompt.
#[derive(Debug, Clone, Deserialize)]
#[serde(tag = "type", rename_all = "lowercase")]
pub enum Said {
    /// A text.
    Text {
        /// It.
        text: String,
    },
    /// A picture.
    Image {
        /// Its name.
        id: String,
    },
    /// The video.
    Video {},
}

/// A message of a conversation.
#[derive(Debug, Clone, Deserialize)]
pub struct Line {
    role: String,
    content: Saying,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged)]
enum Saying {
    Text(String),
    Parts(Vec<Said>),
}

/// A prompt and what follows, greedily.
#[derive(Debug, Deserialize)]
pub struct Case {
    /// Name.
    pub id: String,
    /// See [`Sight::mode`].
    pub mode: String,
    /// A conversation.
    #[serde(default)]
    pub messages: Vec<Line>,
    /// Parts without a template.
    #[serde(default)]
    pub prompt: Vec<Said>,
    #[serde(flatten)]
    /// What follows.
    pub golden: Golden,
}

/// What follows a prompt.
#[derive(Debug, Deserialize)]
pub struct Golden {
    /// The prompt's tokens, placeholders included.
    pub prompt_ids: Vec<u32>,
    /// What follows, the ending token included.
    pub output_ids: Vec<u32>,
    /// The same as text.
    pub text: String,
    /// Steps whose logits are recorded.
    pub logits_steps: Vec<usize>,
}

/// A conversation about a picture.
#[derive(Debug, Deserialize)]
pub struct Chat {
    /// Name.
    pub id: String,
    /// See [`Sight::mode`].
    pub mode: String,
    /// Turns.
    pub turns: Vec<Turn>,
}

/// A question and its answer.
#[derive(Debug, Deserialize)]
pub struct Turn {
    /// The conversation up to the answer.
    pub messages: Vec<Line>,
    #[serde(flatten)]
    /// The answer.
    pub golden: Golden,
}

impl Sights {
    /// Goldens of a checkpoint folder.
    pub fn of(folder: &Path) -> Self {
        let text = std::fs::read_to_string(folder.join("goldens.json")).expect("goldens.json");
        let mut sights: Self = serde_json::from_str(&text).expect("goldens.json is valid");
        folder.clone_into(&mut sights.folder);
        sights.tensors =
            std::fs::read(folder.join("goldens.safetensors")).expect("goldens.safetensors");
        sights
    }

    /// A recorded tensor of f32, i32 or u8: shape and values.
    pub fn tensor(&self, name: &str) -> (Vec<usize>, Vec<f32>) {
        let file = SafeTensors::deserialize(&self.tensors).expect("goldens.safetensors is valid");
        let tensor = file.tensor(name).unwrap_or_else(|e| panic!("{name}: {e}"));
        let quads = tensor.data().as_chunks::<4>().0;
        let values = match tensor.dtype() {
            safetensors::Dtype::U8 => tensor.data().iter().map(|&v| f32::from(v)).collect(),
            safetensors::Dtype::I32 => {
                quads.iter().map(|b| i32::from_le_bytes(*b) as f32).collect()
            }
            _ => quads.iter().map(|b| f32::from_le_bytes(*b)).collect(),
        };
        (tensor.shape().to_vec(), values)
    }

    /// Logits after each recorded step of a case.
    pub fn logits(&self, id: &str) -> Vec<Vec<f32>> {
        let (shape, values) = self.tensor(&format!("{id}.logits"));
        values.chunks_exact(shape[1]).map(<[f32]>::to_vec).collect()
    }

    /// The case of this name.
    pub fn case(&self, id: &str) -> &Case {
        self.cases.iter().find(|case| case.id == id).unwrap_or_else(|| panic!("no case {id}"))
    }

    /// Cases that a bundle of a mode can answer: those of the mode, and texts.
    pub fn of_mode(&self, mode: &str) -> Vec<&Case> {
        self.cases.iter().filter(|case| case.mode == mode || self.media(case).is_empty()).collect()
    }

    fn file(&self, name: &str) -> (Vec<u8>, u32, u32) {
        let source = Source::File(self.folder.join(name));
        let picture = picture(&source, &ImageRules::default(), &Limits::default());
        let picture = picture.unwrap_or_else(|e| panic!("{name}: {e}"));
        (picture.rgb, picture.width, picture.height)
    }

    /// A picture.
    pub fn picture(&self, id: &str) -> Media {
        let (rgb, width, height) = self.file(&format!("pictures/{id}.png"));
        Media::image(rgb, width, height).unwrap_or_else(|e| panic!("{id}: {e}"))
    }

    /// The video.
    pub fn film(&self) -> Media {
        let frames: Vec<_> = self.video.files.iter().map(|name| self.file(name)).collect();
        let (_, width, height) = frames[0];
        let rgb = frames.into_iter().flat_map(|(rgb, ..)| rgb).collect();
        Media::video(rgb, width, height, self.video.times.clone()).unwrap_or_else(|e| panic!("{e}"))
    }

    fn seen(&self, said: &Said) -> Option<Media> {
        match said {
            Said::Text { .. } => None,
            Said::Image { id } => Some(self.picture(id)),
            Said::Video {} => Some(self.film()),
        }
    }

    /// Pictures and videos of a case, in order.
    pub fn media(&self, case: &Case) -> Vec<Media> {
        let lines = case.messages.iter().filter_map(|line| match &line.content {
            Saying::Text(_) => None,
            Saying::Parts(parts) => Some(parts),
        });
        lines.flatten().chain(&case.prompt).filter_map(|said| self.seen(said)).collect()
    }

    /// What the engine is asked.
    pub fn prompt(&self, case: &Case) -> Prompt {
        if case.messages.is_empty() {
            let part = |said: &Said| match said {
                Said::Text { text } => Part::Text(text.clone()),
                other => Part::Media(self.seen(other).expect("a picture")),
            };
            return Prompt::Parts(case.prompt.iter().map(part).collect());
        }
        self.conversation(&case.messages)
    }

    /// The same for a conversation.
    pub fn conversation(&self, lines: &[Line]) -> Prompt {
        let message = |line: &Line| {
            let part = |said: &Said| match said {
                Said::Text { text } => ContentPart::Text(text.clone()),
                other => ContentPart::Media(self.seen(other).expect("a picture")),
            };
            match &line.content {
                Saying::Text(text) => Message::new(&line.role, text.clone()),
                Saying::Parts(parts) => {
                    Message::new(&line.role, parts.iter().map(part).collect::<Vec<_>>())
                }
            }
        };
        Prompt::Chat { messages: lines.iter().map(message).collect(), thinking: None }
    }
}

/// The prompt of a case as an op gets it: a run of a placeholder is a picture, or the next two frames of the video.
pub fn segments<'a>(ids: &'a [u32], placeholders: &[u32], media: &'a [Media]) -> Vec<Segment<'a>> {
    let (mut next, mut frame) = (0, 0);
    let runs =
        ids.chunk_by(|a, b| a == b || !placeholders.contains(a) && !placeholders.contains(b));
    runs.map(|run| {
        if !placeholders.contains(&run[0]) {
            return Segment::Tokens(run);
        }
        let segment = media[next].segment();
        let Segment::Video { times, .. } = segment else {
            next += 1;
            return segment;
        };
        let end = (frame + 2).min(times.len());
        let part = media[next].frames(frame, end).expect("frames");
        frame = if end == times.len() { 0 } else { end };
        next += usize::from(frame == 0);
        part
    })
    .collect()
}

/// Generates as many tokens as the golden answer has.
pub fn answer(model: &mut Model, prompt: Prompt, golden: &Golden) -> Generation {
    let request = Request::greedy(prompt, golden.output_ids.len());
    model.generate(&request, &mut |_| ControlFlow::Continue(())).unwrap_or_else(|e| panic!("{e}"))
}
