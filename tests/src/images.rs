//! Goldens of tiny models that see: images, what `transformers` makes of them, prompts with them and answers; and
//! whether a model gives the same.

use std::fs;
use std::ops::Range;
use std::path::{Path, PathBuf};

use qhx_base::compare::Distance;
use qhx_core::engine::{
    ContentPart, DraftCounts, Generation, Message, Model, Part, Prompt, Request, Speculate,
};
use qhx_core::op::{HostOp, Segment};
use qhx_media::{ImageRules, Limits, Source, decode_image};
use qhx_types::Media;
use safetensors::SafeTensors;
use serde::Deserialize;
use serde_json::Value;

use crate::{files, replay};

/// `goldens.json` of the schema `qhx-goldens-vision/1`, described in `tests/oracle/README.md`.
#[derive(Debug, Deserialize)]
pub struct Sights {
    /// Pixels of a side of the square that the mode `fixed` stretches images to, where that is an option of the forge.
    #[serde(default)]
    pub fixed: usize,
    /// The images, each in every mode.
    pub images: Vec<Sight>,
    /// The video, where the family takes any.
    #[serde(default)]
    pub video: Film,
    /// Prompts and what follows.
    pub cases: Vec<Case>,
    /// Conversations.
    #[serde(default)]
    pub chat: Vec<Chat>,
    /// The tokens that stand for images and for videos, where `config.json` does not say them.
    #[serde(default)]
    pads: Vec<u32>,
    /// Pixels of a patch in one frame, and frames of a patch.
    #[serde(skip)]
    patch: [usize; 2],
    /// Mean and standard deviation of pixels, by channel.
    #[serde(skip)]
    normalisation: [[f32; 3]; 2],
    /// Colours of a pixel stand together in a patch.
    #[serde(skip)]
    channels_last: bool,
    /// A video stands in a prompt as one run, and not each of its patches for itself.
    #[serde(skip)]
    whole_videos: bool,
    /// Folder of the images.
    #[serde(skip)]
    folder: PathBuf,
    #[serde(skip)]
    tensors: Vec<u8>,
}

/// An image as one mode makes it.
#[derive(Debug, Deserialize)]
pub struct Sight {
    /// Name.
    pub id: String,
    /// `native` keeps the shape, `fixed` stretches to a square.
    pub mode: String,
    /// Rows and columns of patches, of a tile where the image is cut.
    pub grid: [usize; 2],
    /// Tiles that it becomes; 0 where it is not cut.
    #[serde(default)]
    pub tiles: u16,
    /// Patches of each tile and of the whole image, where they are not all as many.
    #[serde(default)]
    pub patches: Vec<usize>,
}

/// A video.
#[derive(Debug, Default, Deserialize)]
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
    /// An image.
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
    /// Tiles of each image; 0 where it is not cut.
    #[serde(default)]
    pub tiles: Vec<u16>,
    #[serde(flatten)]
    /// Expected answer.
    pub golden: Golden,
}

/// Expected answer to a prompt.
#[derive(Debug, Deserialize)]
pub struct Golden {
    /// The prompt's tokens, placeholders included.
    pub prompt_ids: Vec<u32>,
    /// Tokens of the answer, the ending token included.
    pub output_ids: Vec<u32>,
    /// The same as text.
    pub text: String,
    /// Steps whose logits are recorded.
    pub logits_steps: Vec<usize>,
}

/// A conversation about an image.
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
        let mut sights: Self = files::json(&folder.join("goldens.json"));
        let config: Value = files::json(&folder.join("config.json"));
        let keys = ["image_token_id", "image_token_index", "video_token_id"];
        sights.pads.extend(keys.iter().filter_map(|key| Some(config[key].as_u64()? as u32)));
        assert!(!sights.pads.is_empty(), "config.json names a token for images");
        let vision = &config["vision_config"];
        let number = |key: &str| vision[key].as_u64().or_else(|| vision[key][0].as_u64());
        let size = |key: &str| number(key).map(|size| size as usize);
        let patch = size("patch_size").expect("patch_size");
        let kind = config["model_type"].as_str();
        sights.whole_videos = kind.is_some_and(|kind| ["qwen2_vl", "qwen2_5_vl"].contains(&kind));
        sights.channels_last = kind == Some("lfm2_vl");
        let processor: Value = files::json(&folder.join("preprocessor_config.json"));
        let frames = processor["temporal_patch_size"].as_u64().map(|frames| frames as usize);
        let frames = frames.or(size("temporal_patch_size")).unwrap_or(1);
        sights.patch = [patch.pow(2), frames];
        sights.normalisation = ["image_mean", "image_std"]
            .map(|key| serde_json::from_value(processor[key].clone()).expect(key));
        folder.clone_into(&mut sights.folder);
        sights.tensors = fs::read(folder.join("goldens.safetensors")).expect("goldens.safetensors");
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
            _ => files::floats(tensor.data()),
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
        let image = decode_image(&source, &ImageRules::default(), &Limits::default());
        let image = image.unwrap_or_else(|e| panic!("{name}: {e}"));
        (image.rgb, image.width, image.height)
    }

    /// An image.
    pub fn image(&self, id: &str) -> Media {
        let (rgb, width, height) = self.file(&format!("images/{id}.png"));
        Media::image(rgb, width, height).unwrap_or_else(|e| panic!("{id}: {e}"))
    }

    /// True where there is a video.
    pub fn has_film(&self) -> bool {
        !self.video.files.is_empty()
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
            Said::Image { id } => Some(self.image(id)),
            Said::Video {} => Some(self.film()),
        }
    }

    /// Images and videos of a case, in order.
    pub fn media(&self, case: &Case) -> Vec<Media> {
        let lines = case.messages.iter().filter_map(|line| match &line.content {
            Saying::Text(_) => None,
            Saying::Parts(parts) => Some(parts),
        });
        lines.flatten().chain(&case.prompt).filter_map(|said| self.seen(said)).collect()
    }

    /// Prompt for the engine.
    pub fn prompt(&self, case: &Case) -> Prompt {
        if case.messages.is_empty() {
            let part = |said: &Said| match said {
                Said::Text { text } => Part::Text(text.clone()),
                other => Part::Media(self.seen(other).expect("an image")),
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
                other => ContentPart::Media(self.seen(other).expect("an image")),
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

    /// True for a token that stands for an image or a video.
    pub fn is_pad(&self, id: u32) -> bool {
        self.pads.contains(&id)
    }

    /// A prompt as an op gets it: a run of a placeholder is an image, or the next two frames of the video.
    pub fn segments<'a>(&self, ids: &'a [u32], media: &'a [Media]) -> Vec<Segment<'a>> {
        segments(ids, &self.pads, media, &[], self.whole_videos)
    }

    /// The prompt of a case as an op gets it, with its images in tiles where they are cut.
    fn segments_of<'a>(&self, case: &'a Case, media: &'a [Media]) -> Vec<Segment<'a>> {
        segments(&case.golden.prompt_ids, &self.pads, media, &case.tiles, self.whole_videos)
    }

    /// The pixel values that levels of patches became, of the first frame of each channel or of all `frames`.
    fn pixels(&self, levels: &[f32], frames: usize) -> Vec<f32> {
        let [plane, each] = self.patch;
        let [mean, std] = self.normalisation;
        let channels = levels.chunks_exact(each * plane).enumerate();
        let value =
            |channel: usize, level: &f32| (level / 255.0 - mean[channel % 3]) / std[channel % 3];
        let values: Vec<f32> = channels
            .flat_map(|(channel, levels)| {
                levels[..frames * plane].iter().map(move |level| value(channel, level))
            })
            .collect();
        if !self.channels_last {
            return values;
        }
        let patches = values.chunks_exact(3 * plane);
        patches.flat_map(|patch| (0..3 * plane).map(|at| patch[at % 3 * plane + at / 3])).collect()
    }

    /// Every case through the engine: tokens of the prompt, of the answer, text.
    pub fn greedy_exact(&self, model: &mut Model, cases: &[&Case], label: &str) {
        self.speculative_exact(model, cases, Speculate::Off, label);
    }

    /// The same with draft tokens. Returns the counts of draft tokens in all cases together.
    pub fn speculative_exact(
        &self,
        model: &mut Model,
        cases: &[&Case],
        speculate: Speculate,
        label: &str,
    ) -> DraftCounts {
        let mut all = DraftCounts::default();
        for case in cases {
            let label = format!("{label}, {}", case.id);
            model.reset().expect("a reset");
            let prompt = self.prompt(case);
            let ids = model.encode_prompt(&prompt).unwrap_or_else(|e| panic!("{label}: {e}"));
            assert_eq!(ids, case.golden.prompt_ids, "{label}");
            let generation = answer_speculative(model, prompt, &case.golden, speculate);
            assert_eq!(generation.tokens, case.golden.output_ids, "{label}");
            assert_eq!(generation.prompt_tokens, case.golden.prompt_ids.len(), "{label}");
            replay::same_text(&generation.text, &case.golden.text, &label);
            replay::add(&mut all, generation.timings.drafts);
        }
        all
    }

    /// Steps through cases: the most likely token is the golden one, and logits agree. Returns the worst distance
    /// of recorded logits.
    pub fn step_exact(&self, model: &mut Model, cases: &[&Case], label: &str) -> Distance {
        let mut worst: Option<Distance> = None;
        for case in cases {
            let label = format!("{label}, {}", case.id);
            let (media, recorded) = (self.media(case), self.logits(&case.id));
            let op = model.op_mut();
            op.reset().expect("a reset");
            op.prefill(&self.segments_of(case, &media)).unwrap_or_else(|e| panic!("{label}: {e}"));
            assert_eq!(op.position(), case.golden.prompt_ids.len(), "{label}");
            let Golden { output_ids, logits_steps, .. } = &case.golden;
            replay::steps(op, output_ids, (logits_steps, &recorded), &mut worst, &label);
        }
        model.reset().expect("a reset");
        worst.expect("recorded logits")
    }

    /// Shows `op`, which dumps to `folder`, every image of a mode, or those of `ids`, and with `film` the video. Pixel
    /// values are the reference's; returns the least cosine of a row of features (`embeds` and those of `layers`
    /// layers), and the largest difference.
    pub fn features(
        &self,
        op: &mut dyn HostOp,
        folder: &Path,
        mode: &str,
        ids: Option<&[&str]>,
        film: bool,
        layers: usize,
    ) -> (f64, f64) {
        let (mut shown, mut least, mut largest) = (0, 1f64, 0f64);
        let [plane, each] = self.patch;
        let deepstack = (0..layers).map(|layer| format!("deepstack_{layer}"));
        let parts: Vec<_> = std::iter::once("embeds".to_owned()).chain(deepstack).collect();
        // `piece` are the patches of the rows, among `of`.
        let mut compare = |shown: usize, golden: &str, (piece, of): (Range<usize>, usize)| {
            for part in &parts {
                let label = format!("{golden}.{part}");
                let (shape, expected) = self.tensor(&label);
                let place = |patches: usize| expected.len() * patches / of;
                let rows = place(piece.start)..place(piece.end);
                let found = dumped(folder, part, shown);
                let (cosine, off) = agreement(&found, &expected[rows], shape[1], &label);
                (least, largest) = (least.min(cosine), largest.max(off));
            }
        };
        for sight in self.images.iter().filter(|sight| sight.mode == mode) {
            if ids.is_some_and(|ids| !ids.contains(&sight.id.as_str())) {
                continue;
            }
            let media = self.image(&sight.id);
            let golden = format!("{}.{}", sight.id, sight.mode);
            let (_, levels) = self.tensor(&format!("{golden}.pixels"));
            let parts = usize::from(sight.tiles.max(1));
            let patches = match sight.patches.as_slice() {
                [] => vec![sight.grid[0] * sight.grid[1]; parts],
                patches => patches.to_vec(),
            };
            let (all, len) = (patches.iter().sum::<usize>(), 3 * plane * each);
            assert_eq!((all * len, patches.len()), (levels.len(), parts));
            let mut first = 0;
            for (part, count) in patches.into_iter().enumerate() {
                let piece = first..first + count;
                let levels = &levels[piece.start * len..piece.end * len];
                first = piece.end;
                let tile = media.tile(part as u16, sight.tiles);
                op.reset().expect("a reset");
                op.prefill(&[tile.unwrap_or(media.segment()), Segment::Tokens(&[5])])
                    .expect("a prompt");
                // An image stands once in each of the frames of a patch.
                let expected = self.pixels(levels, 1);
                let (_, off) =
                    agreement(&dumped(folder, "pixel_values", shown), &expected, plane, &golden);
                assert!(off < 1e-6, "{golden}: pixel values differ by {off}");
                compare(shown, &golden, (piece, all));
                shown += 1;
            }
        }
        if film {
            let film = self.film();
            op.reset().expect("a reset");
            let frames = [(0, 2), (2, 4), (4, 5)]
                .map(|(first, end)| film.frames(first, end).expect("frames"));
            let whole = [film.segment()];
            let shown_as = if self.whole_videos { &whole[..] } else { &frames[..] };
            op.prefill(&[shown_as, &[Segment::Tokens(&[5])]].concat()).expect("a prompt");
            let (_, levels) = self.tensor("video.pixels");
            for (pair, levels) in levels.chunks_exact(levels.len() / 3).enumerate() {
                let expected = self.pixels(levels, each);
                let found = dumped(folder, "pixel_values", shown + pair);
                let (_, off) = agreement(&found, &expected, plane, "video");
                assert!(off < 1e-6, "frames {pair}: pixel values differ by {off}");
                compare(shown + pair, "video", (pair..pair + 1, 3));
            }
        }
        assert!(shown > 0);
        (least, largest)
    }

    /// Positions of the tokens of every case of a mode, in time, row and column, are those of the reference. The op
    /// dumps to `folder`.
    pub fn same_positions(&self, op: &mut dyn HostOp, folder: &Path, mode: &str) {
        for (index, case) in self.of_mode(mode).into_iter().enumerate() {
            let media = self.media(case);
            op.reset().expect("a reset");
            op.prefill(&self.segments_of(case, &media)).expect("a prompt");
            let (_, expected) = self.tensor(&format!("{}.positions", case.id));
            let found = dumped(folder, "positions", index);
            let count = case.golden.prompt_ids.len();
            assert_eq!(found.len(), 3 * count);
            for axis in 0..3 {
                let found: Vec<_> = found.iter().skip(axis).step_by(3).copied().collect();
                let expected = &expected[axis * count..(axis + 1) * count];
                assert_eq!(found, expected, "{}, axis {axis}", case.id);
            }
        }
    }
}

fn segments<'a>(
    ids: &'a [u32],
    placeholders: &[u32],
    media: &'a [Media],
    tiles: &[u16],
    whole_videos: bool,
) -> Vec<Segment<'a>> {
    let (mut next, mut frame, mut tile) = (0, 0, 0);
    let runs =
        ids.chunk_by(|a, b| a == b || !placeholders.contains(a) && !placeholders.contains(b));
    let shown = runs.clone().filter(|run| placeholders.contains(&run[0])).count();
    // The tiles of an image are one run, or one each.
    let joined = shown == media.len();
    runs.flat_map(|run| {
        if !placeholders.contains(&run[0]) {
            return vec![Segment::Tokens(run)];
        }
        if shown == 1 && tiles.is_empty() && media.len() > 1 {
            // Images that nothing stands between.
            return media.iter().map(Media::segment).collect();
        }
        let of = tiles.get(next).copied().unwrap_or(0);
        if joined && of > 0 {
            next += 1;
            return (0..of).filter_map(|tile| media[next - 1].tile(tile, of)).collect();
        }
        if let Some(part) = media[next].tile(tile, of) {
            tile = (tile + 1) % of;
            next += usize::from(tile == 0);
            return vec![part];
        }
        let segment = media[next].segment();
        let times = match segment {
            Segment::Video { times, .. } if !whole_videos => times,
            _ => {
                next += 1;
                return vec![segment];
            }
        };
        let end = (frame + 2).min(times.len());
        let part = media[next].frames(frame, end).expect("frames");
        frame = if end == times.len() { 0 } else { end };
        next += usize::from(frame == 0);
        vec![part]
    })
    .collect()
}

/// Generates as many tokens as the golden answer has.
pub fn answer(model: &mut Model, prompt: Prompt, golden: &Golden) -> Generation {
    answer_speculative(model, prompt, golden, Speculate::Off)
}

/// The same with draft tokens.
fn answer_speculative(
    model: &mut Model,
    prompt: Prompt,
    golden: &Golden,
    speculate: Speculate,
) -> Generation {
    let request = Request::greedy(prompt, golden.output_ids.len());
    replay::generate(model, &request.speculate(speculate))
}

/// Values of the array of a dump that was written as number `index` of its name.
fn dumped(folder: &Path, name: &str, index: usize) -> Vec<f32> {
    files::dumped(folder, name, index).unwrap_or_else(|| panic!("array {index} of {name}"))
}

/// Least cosine of the rows of two arrays, and largest difference.
fn agreement(found: &[f32], expected: &[f32], width: usize, label: &str) -> (f64, f64) {
    assert_eq!(found.len(), expected.len(), "{label}");
    let rows = found.chunks_exact(width).zip(expected.chunks_exact(width));
    rows.map(|(a, b)| Distance::of(a, b).unwrap_or_else(|e| panic!("{label}: {e}")))
        .fold((1.0, 0.0), |(cosine, largest): (f64, f64), d| {
            (cosine.min(d.cosine), largest.max(d.largest))
        })
}
