//! `siglip_embed`: images and texts as vectors of one space.
//!
//! Arithmetic: `SiglipModel` and `Siglip2Model` of `transformers` with their processors (Zhai et al. 2023, arXiv
//! 2303.15343; Tschannen et al. 2025, arXiv 2502.14786). A text is padded to the length of its graph, whose last row
//! becomes the vector. An image is resized, to one size or, keeping its shape, to at most a number of patches, and cut
//! into patches. Both towers pool within their graphs; vectors are divided by their norm here.

use std::time::Instant;

use qhx_kit::fill::{Embedding, FloatInput, MASK_VALUE};
use qhx_kit::vision::{
    Filter, Image, Normalisation, PatchLayout, Patchify, Resizer, Size, resample_antialiased,
};
use qhx_kit::{OneOrMany, schema};
use qhx_op::text::{count_tokens, tokens};
use qhx_op::{
    DType, Encoder, Error, ErrorCode, GraphId, Host, Modality, Op, OpDescription, OpenInfo, Result,
    Segment, SpanId, Task, View,
};
use serde::Deserialize;
use serde_json::json;

use crate::modules::normalize;

const NAME: &str = "siglip_embed";
const VISION: &str = "/plan/params/vision";

#[derive(Debug, Deserialize)]
struct Params {
    text: String,
    vision: OneOrMany,
}

/// `params.padding` of the manifest: what fills a text up.
#[derive(Debug, Clone, Copy, Deserialize)]
struct Padding {
    token: u32,
    /// In front of the text instead of behind it.
    #[serde(default)]
    left: bool,
}

/// `params.pooled` of the manifest: which row of a text becomes its vector, for graphs that have it as an input.
#[derive(Debug, Clone, Copy, Default, Deserialize)]
struct Pooled {
    /// The first token of this kind; the first of the highest kind without it.
    token: Option<u32>,
}

impl Pooled {
    /// Place of the token in a text.
    fn place(self, tokens: &[u32]) -> usize {
        let end = self.token.or_else(|| tokens.iter().copied().max());
        tokens.iter().position(|token| Some(*token) == end).unwrap_or(0)
    }
}

/// `params.image` of the manifest: how an image becomes patches.
#[derive(Debug, Clone, Deserialize)]
struct ImageParams {
    /// Pixels of a patch's side.
    patch: usize,
    /// Patches of a side of the square of learned positions.
    side: usize,
    /// Images keep their shape.
    #[serde(default)]
    naflex: bool,
    /// Pixels of an image's shorter side, of which the middle is cut out; an image is stretched without it.
    shortest: Option<u32>,
    mean: [f64; 3],
    std: [f64; 3],
    scale: f64,
}

/// One vector for a text or an image.
#[derive(Debug)]
pub struct Siglip {
    text: Text,
    vision: Vision,
    /// The vector, as f32.
    vector: View,
    values: Vec<f32>,
}

impl Op for Siglip {
    fn describe() -> OpDescription {
        OpDescription {
            name: NAME.to_owned(),
            summary: "One vector for a text or an image, in one space".to_owned(),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            tasks: vec![Task::Embed],
            modalities: vec![Modality::Text, Modality::Image],
            params_schema: json!({
                "$schema": "https://json-schema.org/draft/2020-12/schema",
                "type": "object",
                "required": ["text", "vision"],
                "properties": {
                    "text": {
                        "description": "Graph from the rows of a text with its padding to its vector.",
                        "type": "string"
                    },
                    "vision": schema::graphs(
                        "Graphs from the patches of an image to its vector, each for images of another number of patches."
                    ),
                    "tensors": schema::tensors(["x", "y", "pooled", "patches", "positions", "cmask"])
                }
            }),
        }
    }

    fn open(host: &mut Host) -> Result<Self> {
        let Params { text, vision } = host.params()?;
        let text = Text::open(host, &text)?;
        let vision = Vision::open(host, &vision)?;
        let width = text.y.len;
        if let Some(tower) = vision.towers.iter().find(|tower| tower.y.len != width) {
            return Err(Error::graph(format!(
                "graph {:?}: a vector of {} values, expected {width} as of texts",
                host.graph(tower.graph).name,
                tower.y.len
            )));
        }
        let vector = host.allocate_view(DType::F32, width)?;
        Ok(Self { text, vision, vector, values: vec![0.0; width] })
    }

    fn info(&self) -> OpenInfo {
        OpenInfo {
            max_ctx: self.text.length,
            embedding_dim: self.vector.len,
            input_vocab: self.text.embedding.vocab(),
            ..OpenInfo::default()
        }
    }

    fn encoder(&mut self) -> Option<&mut dyn Encoder> {
        Some(self)
    }
}

impl Encoder for Siglip {
    fn embed(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        let y = match segments {
            [image @ Segment::Image { .. }] => self.vision.run(host, image)?,
            _ if segments.iter().any(|one| matches!(one, Segment::Image { .. })) => {
                let what =
                    "an image beside other segments: a vector is of one image or of one text";
                return Err(Error::prompt(what));
            }
            _ => self.text.run(host, segments)?,
        };
        y.to_f32(host, 0, &mut self.values)?;
        if !self.values.iter().all(|value| value.is_finite()) {
            return Err(Error::new(
                ErrorCode::EXECUTE,
                "the vector is not finite: a value overflowed in a graph, or the weights of a context are damaged",
            ));
        }
        normalize(&mut self.values);
        host.f32s_mut(self.vector.buffer).copy_from_slice(&self.values);
        Ok(self.vector)
    }
}

/// The tower of texts.
#[derive(Debug)]
struct Text {
    graph: GraphId,
    embedding: Embedding,
    x: FloatInput,
    /// Input that is 1 at the pooled token, where the graph does not pool one by its place.
    pooled: Option<(FloatInput, Pooled)>,
    y: View,
    padding: Padding,
    /// Tokens of a text with its padding.
    length: usize,
    tokens: Vec<u32>,
    span: SpanId,
}

impl Text {
    fn open(host: &mut Host, name: &str) -> Result<Self> {
        let graph = host.require_graph("/plan/params/text", name)?;
        let padding: Padding = host.require("/params/padding")?;
        let embedding = Embedding::open_for(host, graph)?;
        let (length, _) = host.rows_of(graph, host.input(graph, "x")?)?;
        if padding.token as usize >= embedding.vocab() {
            return Err(Error::manifest(format!(
                "manifest /params/padding/token: found {}, expected a token below {}, the rows of the embedding table",
                padding.token,
                embedding.vocab()
            )));
        }
        let x = embedding.bind(host, graph, "x", length)?;
        let pooled = match host.graph(graph).input("pooled") {
            Some(_) => {
                let input = FloatInput::require(host, graph, "pooled")?;
                if input.len() != length {
                    return Err(Error::graph(format!(
                        "graph {:?}: {} values of pooled for {length} tokens, expected one each",
                        host.graph(graph).name,
                        input.len()
                    )));
                }
                Some((input, host.value("/params/pooled")?.unwrap_or_default()))
            }
            None => None,
        };
        let output = host.output(graph, "y")?;
        let y = host.view_for(graph, output)?;
        let span = host.span("text");
        Ok(Self { graph, embedding, x, pooled, y, padding, length, tokens: Vec::new(), span })
    }

    fn run(&mut self, host: &mut Host, segments: &[Segment<'_>]) -> Result<View> {
        let start = Instant::now();
        let (count, length) = (count_tokens(NAME, segments)?, self.length);
        let Some(missing) = length.checked_sub(count) else {
            return Err(Error::prompt(format!(
                "the text has {count} tokens, the encoder takes at most {length}; shorten it, or have it truncated"
            )));
        };
        self.tokens.clear();
        self.tokens.extend(tokens(segments));
        self.tokens.resize(length, self.padding.token);
        if self.padding.left {
            self.tokens.rotate_right(missing);
        }
        self.embedding.fill(host, &self.tokens, &self.x)?;
        if let Some((input, pooled)) = &self.pooled {
            input.fill(host, 0.0);
            input.write_at(host, pooled.place(&self.tokens), &[1.0])?;
        }
        host.execute(self.graph)?;
        host.end(self.span, start);
        Ok(self.y)
    }
}

/// The tower of images.
#[derive(Debug)]
struct Vision {
    params: ImageParams,
    resizer: Resizer,
    cut: Patchify,
    normalisation: Normalisation,
    /// For images of the fewest patches first.
    towers: Vec<Tower>,
    /// Learned positions `[side², hidden]` of images that keep their shape.
    positions: Vec<f32>,
    patches: Vec<f32>,
    /// The middle of an image.
    middle: Vec<u8>,
    span: SpanId,
}

/// A graph for images of up to `count` patches.
#[derive(Debug)]
struct Tower {
    graph: GraphId,
    count: usize,
    patches: FloatInput,
    /// Inputs that depend on an image's shape, for images that keep it.
    shaped: Option<[FloatInput; 2]>,
    y: View,
}

impl Tower {
    fn open(host: &mut Host, graph: GraphId, len: usize, naflex: bool) -> Result<Self> {
        let (count, found) = host.rows_of(graph, host.input(graph, "patches")?)?;
        if found != len {
            return Err(Error::graph(format!(
                "graph {:?}: patches of {found} values, expected {len}, three for each pixel of params.image.patch",
                host.graph(graph).name
            )));
        }
        let patches = FloatInput::require(host, graph, "patches")?;
        let shaped = if naflex {
            let positions = FloatInput::require(host, graph, "positions")?;
            let mask = FloatInput::require(host, graph, "cmask")?;
            if mask.len() != count || !positions.len().is_multiple_of(count) {
                return Err(Error::graph(format!(
                    "graph {:?}: {} values of cmask and {} of positions for {count} patches, expected one, and whole rows",
                    host.graph(graph).name,
                    mask.len(),
                    positions.len()
                )));
            }
            Some([positions, mask])
        } else {
            None
        };
        let output = host.output(graph, "y")?;
        let y = host.view_for(graph, output)?;
        Ok(Self { graph, count, patches, shaped, y })
    }
}

impl Vision {
    fn open(host: &mut Host, names: &OneOrMany) -> Result<Self> {
        let params: ImageParams = host.require("/params/image")?;
        let filter: Filter = host.require("/params/image/filter")?;
        let layout =
            if params.naflex { PatchLayout::ChannelsLast } else { PatchLayout::ChannelsFirst };
        let cut = Patchify::new(params.patch, 1, layout)?;
        let normalisation = Normalisation::mean_std(params.mean, params.std, params.scale)?;
        let square =
            params.side.checked_mul(params.side).filter(|count| (1..1 << 20).contains(count));
        let square = square.ok_or_else(|| {
            Error::manifest(format!(
                "manifest /params/image/side: {}, expected a grid",
                params.side
            ))
        })?;
        let mut towers = Vec::new();
        for graph in names.graphs(host, VISION)? {
            let tower = Tower::open(host, graph, cut.patch_len(1), params.naflex)?;
            if !params.naflex && tower.count != square {
                return Err(Error::graph(format!(
                    "graph {:?}: {} patches, expected {square}, those of the square of params.image",
                    host.graph(graph).name,
                    tower.count
                )));
            }
            towers.push(tower);
        }
        towers.sort_by_key(|tower| tower.count);
        let mut positions = Vec::new();
        if let Some([rows, _]) = towers.first().and_then(|tower| tower.shaped) {
            let tower = &towers[0];
            let hidden = rows.len() / tower.count;
            let table =
                Embedding::open_at(host, "/artifacts/positions/vision", hidden, Some(square))?;
            positions.resize(square * hidden, 0.0);
            for (row, to) in (0..).zip(positions.chunks_exact_mut(hidden)) {
                table.read(host, row, 0, to)?;
            }
        }
        Ok(Self {
            params,
            resizer: Resizer::new(filter),
            cut,
            normalisation,
            towers,
            positions,
            patches: Vec::new(),
            middle: Vec::new(),
            span: host.span("image"),
        })
    }

    fn run(&mut self, host: &mut Host, segment: &Segment<'_>) -> Result<View> {
        let start = Instant::now();
        let image = Image::of_segment(segment)?;
        let ImageParams { patch, side, naflex, shortest, .. } = self.params;
        let (tower, size) = if naflex {
            let Size { width, height } = image.size();
            let own = [width, height].map(|pixels| (pixels as usize).div_ceil(patch));
            let own = own[0].saturating_mul(own[1]);
            let place = self.towers.iter().position(|tower| tower.count >= own);
            let tower = &self.towers[place.unwrap_or(self.towers.len() - 1)];
            (tower, size_within(image.size(), patch, tower.count))
        } else {
            let pixels = (side * patch) as u32;
            (&self.towers[0], Size { width: pixels, height: pixels })
        };
        let resized = match shortest {
            Some(shortest) => {
                let whole = self.resizer.resize(image, around(image.size(), shortest))?;
                let Size { width, height } = whole.size();
                let left = width.saturating_sub(size.width) / 2;
                let top = height.saturating_sub(size.height) / 2;
                whole.crop([left, top], size, &mut self.middle)?
            }
            None => self.resizer.resize(image, size)?,
        };
        let grid = self.cut.grid(size)?;
        let (len, count) = (self.cut.patch_len(1), grid.patches());
        self.patches.clear();
        self.patches.resize(tower.count * len, 0.0);
        let own = self.patches.get_mut(..count * len).unwrap_or_default();
        self.cut.write(&[resized], &self.normalisation, own)?;
        host.dump_values("patches", own, &[count, len])?;
        tower.patches.write(host, &self.patches)?;
        if let Some([positions, mask]) = &tower.shaped {
            let width = positions.len() / tower.count;
            let mut rows = vec![0.0; count * width];
            resample_antialiased(&self.positions, side, width, grid, 1, &mut rows)?;
            positions.fill(host, 0.0);
            positions.write_at(host, 0, &rows)?;
            let hidden = |at: usize| if at < count { 0.0 } else { MASK_VALUE };
            let values: Vec<f32> = (0..tower.count).map(hidden).collect();
            mask.write(host, &values)?;
        }
        host.execute(tower.graph)?;
        host.end(self.span, start);
        Ok(tower.y)
    }
}

/// The size whose shorter side is `shortest`, of the shape of an image (`get_resize_output_image_size`).
fn around(size: Size, shortest: u32) -> Size {
    let Size { width, height } = size;
    let long = |long: u32, short: u32| {
        let long = u64::from(shortest) * u64::from(long) / u64::from(short.max(1));
        u32::try_from(long).unwrap_or(u32::MAX)
    };
    match width <= height {
        true => Size { width: shortest, height: long(height, width) },
        false => Size { width: long(width, height), height: shortest },
    }
}

/// The largest size of at most `most` patches with about the shape of an image (`get_image_size_for_max_num_patches` of
/// the processor, its search included).
fn size_within(size: Size, patch: usize, most: usize) -> Size {
    const EPSILON: f64 = 1e-5;
    let side = |pixels: u32, scale: f64| {
        ((f64::from(pixels) * scale / patch as f64).ceil() as usize).max(1)
    };
    let (mut low, mut high) = (EPSILON / 10.0, 100.0);
    while high - low >= EPSILON {
        let scale = f64::midpoint(low, high);
        match side(size.height, scale).saturating_mul(side(size.width, scale)) <= most {
            true => low = scale,
            false => high = scale,
        }
    }
    let pixels = |pixels: u32| u32::try_from(side(pixels, low) * patch).unwrap_or(u32::MAX);
    Size { width: pixels(size.width), height: pixels(size.height) }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sizes of the processor's function.
    #[test]
    fn images_are_as_large_as_the_patches_allow() {
        for (from, patch, most, to) in [
            ((640, 480), 16, 256, (288, 224)),
            ((480, 640), 16, 256, (224, 288)),
            ((1000, 10), 16, 256, (2048, 32)),
            ((7, 5), 16, 256, (304, 208)),
            ((100, 100), 8, 12, (24, 24)),
            ((333, 1777), 14, 100, (56, 308)),
        ] {
            let [from, to] = [from, to].map(|(width, height)| Size { width, height });
            assert_eq!(size_within(from, patch, most), to, "{from}");
        }
    }
}
