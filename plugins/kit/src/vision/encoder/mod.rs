//! From the pixels of an image, or of the frames of a video, to rows for a decoder: the host resizes, cuts patches and
//! embeds them, a vision graph does the rest.

mod settings;
mod tables;
mod tower;

use std::time::Instant;

pub use tower::Features;

use super::{
    Grid, Image, Normalisation, PatchLayout, Patchify, Resizer, Size, aspect_ratio_preserving_size,
    grown_in_turn, resample_areas, resample_positions, smart_resize, smart_resize_video,
    within_longest,
};
use crate::kernels::Linear;
use qhx_op::{Error, Host, Result, Segment, SpanId};
use settings::Settings;
use tables::{Positions, Tables};
use tower::Tower;

/// A vision tower (`Qwen3VLVisionModel`, `Qwen2_5_VisionTransformerPretrainedModel`,
/// `Qwen2VisionTransformerPretrainedModel`, `PaddleOCRVisionModel` or `PixtralVisionModel` of `transformers`) with the
/// host's part of the work: patch embedding, learned positions, windows.
///
/// | in the manifest | |
/// |---|---|
/// | `plan.params.vision` | the graphs: one that takes one square image, or several with the input `cmask`, of which the smallest that an image fits into takes it |
/// | `params.vision` | `patch_size`, `temporal_patch_size`, `merge_size`, `rope_theta`, `pos_side`, `min_pixels`, `max_pixels`, `video_min_pixels`, `video_max_pixels`, `image_mean`, `image_std`; those of published checkpoints of Qwen3-VL where they are missing; `window` and `tokens_per_second` of Qwen2.5-VL, `time_step` of Qwen2-VL, `pos_aligned`, `grow` and `videos` of PaddleOCR-VL, `longest_edge` and `rope_between` of Mistral 3 |
/// | `artifacts.vision` | tables `patch_embed`, `patch_embed_bias`, `pos_embed`; also as `artifacts.vis_patch_embed_f32`, … |
///
/// A graph takes `x` `[patches, hidden]`, and `cos`, `sin` `[patches, head_dim / 2]` and `cmask` `[1, patches]` unless
/// it is made for one grid; one whose blocks attend within windows also `windows` `[patches, 1]`, the number of each
/// patch's window. It gives `embeds` `[tokens, width]` and, where the decoder's first layers take rows of
/// their own (DeepStack, arXiv 2406.04334), `deepstack_0`, `deepstack_1`, … of the same shape.
#[derive(Debug)]
pub struct VisionEncoder {
    tower: Tower,
    tables: Tables,
    settings: Settings,
    patchify: Patchify,
    normalisation: Normalisation,
    /// One for each frame of a patch.
    resizers: Vec<Resizer>,
    /// Patches of an image.
    pixels: Vec<f32>,
    span: SpanId,
}

impl VisionEncoder {
    /// The parameter `vision` of `plan.params`, for [`qhx_op::OpDescription::params_schema`].
    pub fn schema() -> serde_json::Value {
        crate::schema::graphs(
            "Graphs that make rows of an image's patches. One without the input cmask takes one square image; of \
             those with it, the smallest that an image fits into takes it. Without any the bundle takes text only.",
        )
    }

    /// Opens what a bundle has for images; none where it has no vision graph. `width` are the values of a row of the
    /// decoder.
    ///
    /// # Errors
    /// When graphs, tables and parameters do not fit each other.
    pub fn open(host: &mut Host, width: usize) -> Result<Option<Self>> {
        let settings = Settings::read(host)?;
        let Some(tower) = Tower::open(host, &settings, width)? else { return Ok(None) };
        let fixed = tower.fixed().map(|side| side * side);
        let tables = Tables::open(host, &settings, tower.hidden(), fixed)?;
        let Settings { patch_size, merge_size, temporal_patch_size, image_mean, image_std, .. } =
            settings;
        Ok(Some(Self {
            patchify: Patchify::new(patch_size, merge_size, PatchLayout::ChannelsFirst)?,
            normalisation: Normalisation::mean_std(image_mean, image_std, 1.0 / 255.0)?,
            resizers: (0..temporal_patch_size).map(|_| Resizer::default()).collect(),
            pixels: Vec::new(),
            span: host.span("vision"),
            tower,
            tables,
            settings,
        }))
    }

    /// Layers of the decoder that get rows of their own.
    pub fn layers(&self) -> usize {
        self.tower.layers()
    }

    /// Frames of a patch.
    pub fn frames(&self) -> usize {
        self.settings.temporal_patch_size
    }

    /// Rows and columns of tokens that a segment takes, by its size alone; of a video, each patch in time.
    ///
    /// # Errors
    /// When the segment is not visual, or its size is not accepted.
    pub fn tokens(&self, segment: &Segment<'_>) -> Result<Grid> {
        let size = self.target(segment)?;
        let grid = self.patchify.grid(size)?;
        let max_patches = self.tower.max_patches();
        if grid.patches() > max_patches {
            return Err(Error::prompt(format!(
                "an image that becomes {size} pixels has {} patches, expected at most {max_patches}, which the largest vision \
                 graph takes; cut the image into parts that are less long",
                grid.patches()
            )));
        }
        grid.blocks(self.settings.merge_size)
    }

    /// The size that an image or frame is resized to.
    fn target(&self, segment: &Segment<'_>) -> Result<Size> {
        let (size, frames) = match *segment {
            Segment::Image { width, height, .. } => (Size { width, height }, None),
            Segment::Video { width, height, frames, .. } => (Size { width, height }, Some(frames)),
            _ => {
                return Err(Error::prompt(format!(
                    "{}, expected an image or a video",
                    qhx_op::text::kind(segment)
                )));
            }
        };
        if frames.is_some() && !self.settings.videos {
            return Err(Error::prompt("this model takes images, and no videos"));
        }
        if size.area() == 0 {
            return Err(Error::prompt(format!(
                "an image of {size} pixels has none; expected at least 1×1"
            )));
        }
        let Settings { patch_size, merge_size, min_pixels, max_pixels, .. } = self.settings;
        let Settings { temporal_patch_size, video_min_pixels, video_max_pixels, .. } =
            self.settings;
        let whole = self.settings.whole_videos();
        if let Some(side) = self.tower.fixed() {
            let side = (side * patch_size) as u32;
            return Ok(Size { width: side, height: side });
        }
        let factor = (patch_size * merge_size) as u32;
        let Some(frames) = frames else {
            if let Some(longest) = self.settings.longest_edge {
                return self.within(size, longest);
            }
            let size = if self.settings.grow { grown_in_turn(size, factor) } else { size };
            return smart_resize(size, factor, min_pixels, max_pixels);
        };
        let size = match whole {
            true => smart_resize(size, factor, video_min_pixels, video_max_pixels)?,
            false => {
                let frames = [frames, temporal_patch_size];
                smart_resize_video(size, frames, factor, video_min_pixels, video_max_pixels)?
            }
        };
        // No frame has more pixels than the patches that the largest graph takes.
        let max_pixels = (self.tower.max_patches() * patch_size * patch_size) as u64;
        if size.area() <= max_pixels { Ok(size) } else { smart_resize(size, factor, 1, max_pixels) }
    }

    /// The size of an image whose longest side is limited: as the processor has it, or the largest that the largest
    /// graph takes.
    fn within(&self, size: Size, longest: u32) -> Result<Size> {
        let [patch, merge] = [self.settings.patch_size, self.settings.merge_size].map(|n| n as u32);
        let target = within_longest(size, longest, patch * merge)?;
        let most = self.tower.max_patches();
        match self.patchify.grid(target)?.patches() > most {
            true => aspect_ratio_preserving_size(target, patch, merge, most as u32),
            false => Ok(target),
        }
    }

    /// Patches in time of a video that is consumed as a whole, and how many positions they are apart; `None` of an
    /// image, and where a video is consumed patch by patch.
    ///
    /// Frames are taken at even distances, so the times of the first and the last one give the rate
    /// (`second_per_grid_ts` of `Qwen2_5_VLProcessor`).
    pub fn in_time(&self, segment: &Segment<'_>) -> Option<(usize, f32)> {
        let Segment::Video { times, .. } = *segment else { return None };
        let frames = self.frames();
        let patches = times.len().div_ceil(frames);
        if let Some(step) = self.settings.time_step {
            return Some((patches, step));
        }
        let per_second = self.settings.tokens_per_second?;
        let (first, last) = (f64::from(*times.first()?), f64::from(*times.last()?));
        let seconds = (last - first).max(0.0) / (times.len() - 1).max(1) as f64;
        Some((patches, per_second * (seconds * frames as f64) as f32))
    }

    /// Features of an image, of the frames of one patch in time, the last one again where there are too few, or, as
    /// [`Self::in_time`] has it, of all patches of a video, one behind the other. `tokens` is their grid, of
    /// [`Self::tokens`].
    ///
    /// # Errors
    /// When the image is malformed.
    pub fn encode(
        &mut self,
        host: &mut Host,
        segment: &Segment<'_>,
        tokens: Grid,
    ) -> Result<Features> {
        let &Segment::Video { rgb, width, height, times, frames } = segment else {
            return self.encode_patch(host, segment, tokens);
        };
        let each = self.frames();
        if self.in_time(segment).is_none() || times.len() <= each {
            return self.encode_patch(host, segment, tokens);
        }
        let bytes = Size { width, height }.rgb_len().unwrap_or(usize::MAX).saturating_mul(each);
        let mut all = Features { embeds: Vec::new(), deepstack: Vec::new() };
        for (index, times) in times.chunks(each).enumerate() {
            let start = index.saturating_mul(bytes).min(rgb.len());
            let rgb = &rgb[start..start.saturating_add(bytes).min(rgb.len())];
            let patch = Segment::Video { rgb, width, height, times, frames };
            let Features { embeds, deepstack } = self.encode_patch(host, &patch, tokens)?;
            all.embeds.extend(embeds);
            all.deepstack.resize_with(deepstack.len(), Vec::new);
            all.deepstack.iter_mut().zip(deepstack).for_each(|(all, one)| all.extend(one));
        }
        Ok(all)
    }

    /// Features of an image, or of the frames of one patch in time.
    fn encode_patch(
        &mut self,
        host: &mut Host,
        segment: &Segment<'_>,
        tokens: Grid,
    ) -> Result<Features> {
        let start = Instant::now();
        let Settings { patch_size, merge_size, .. } = self.settings;
        let [rows, columns] = [tokens.rows, tokens.columns].map(|side| side * merge_size);
        let [height, width] = [rows, columns].map(|side| (side * patch_size) as u32);
        let (grid, size) = (Grid { rows, columns }, Size { width, height });
        let frames = frames(segment)?;
        let Self { tower, tables, settings, patchify, normalisation, resizers, pixels, span } =
            self;
        let (Some(first), wanted) = (frames.first(), resizers.len()) else {
            return Err(Error::prompt("a video without frames"));
        };
        if frames.len() > wanted {
            return Err(Error::prompt(format!(
                "{} frames in one patch, expected at most {wanted}",
                frames.len()
            )));
        }
        let moving = frames.len() > 1 || matches!(segment, Segment::Video { .. });
        let (weight, shown) = match (moving, &tables.moving) {
            (false, _) => {
                let shown = vec![resizers[0].resize(*first, size)?];
                (&tables.still, shown)
            }
            (true, Some(weight)) => {
                let all = resizers.iter_mut().enumerate();
                let shown = all.map(|(index, resizer)| {
                    let frame = frames.get(index).or(frames.last()).unwrap_or(first);
                    resizer.resize(*frame, size)
                });
                (weight, shown.collect::<Result<_>>()?)
            }
            (true, None) => {
                return Err(Error::prompt(
                    "this bundle takes no videos: its patch embedding is summed over the frames of a patch",
                ));
            }
        };
        let length = patchify.patch_len(shown.len());
        pixels.clear();
        pixels.resize(grid.patches() * length, 0.0);
        patchify.write(&shown, normalisation, pixels)?;
        let plane = settings.patch_size * settings.patch_size;
        host.dump_values("pixel_values", pixels, &[grid.patches(), 3, shown.len(), plane])?;
        let hidden = tower.hidden();
        let features = tower.run(host, grid, |host, rows| {
            match &tables.positions {
                Positions::Square(table, side) => {
                    let table = table.values(host);
                    let resample = match settings.pos_aligned {
                        true => resample_positions,
                        false => resample_areas,
                    };
                    resample(table, *side, hidden, grid, settings.merge_size, rows)?;
                }
                Positions::Grid(table) => rows.copy_from_slice(table.values(host)),
            }
            let (weight, bias) = (weight.values(host), tables.bias.values(host));
            Linear::new(weight, Some(bias), length, hidden)?.add(host, pixels, rows)
        })?;
        host.end(*span, start);
        if host.dumping() {
            let tokens = tokens.patches();
            let shape = [tokens, features.embeds.len() / tokens.max(1)];
            host.dump_values("embeds", &features.embeds, &shape)?;
            for (layer, values) in features.deepstack.iter().enumerate() {
                host.dump_values(&format!("deepstack_{layer}"), values, &shape)?;
            }
        }
        Ok(features)
    }
}

/// The frames of a segment: of an image, itself.
fn frames<'a>(segment: &Segment<'a>) -> Result<Vec<Image<'a>>> {
    match *segment {
        Segment::Video { rgb, width, height, times, .. } => {
            let bytes = rgb.len().checked_div(times.len()).unwrap_or(0);
            if bytes == 0 || bytes * times.len() != rgb.len() {
                return Err(Error::prompt(format!(
                    "{} bytes for {} frames of a video",
                    rgb.len(),
                    times.len()
                )));
            }
            rgb.chunks_exact(bytes).map(|frame| Image::new(frame, width, height)).collect()
        }
        _ => Image::of_segment(segment).map(|image| vec![image]),
    }
}
