//! Images: from pixels to soft tokens.
//!
//! Arithmetic: `Gemma4ImageProcessor`, `Gemma4VisionModel` and `Gemma4MultimodalEmbedder` of `transformers`. The graph
//! holds the tower's layers; the embedding of the patches before them, pooling and projection behind them are here.

use qhx_kit::fill::{FloatInput, MASK_VALUE};
use qhx_kit::vision::{
    AxialOrder, Filter, Grid, Image, Normalisation, PatchLayout, Patchify, Resizer,
    add_axial_positions, aspect_ratio_preserving_size, axial_rope, pool_mean,
};
use qhx_op::{Error, GraphId, Host, Result, View};
use serde::Deserialize;

use crate::tower::{self, Matrix, MediaTokens};

/// `params.vision` of the manifest.
#[derive(Debug, Clone, Copy, Deserialize)]
struct Params {
    /// Width of the tower's rows.
    hidden: usize,
    patch_size: u32,
    pooling_kernel_size: u32,
    head_dim: usize,
    rope_theta: f64,
    position_embedding_size: usize,
    max_soft_tokens: u32,
    eps: f32,
    #[serde(flatten)]
    tokens: MediaTokens,
}

/// The vision tower.
#[derive(Debug)]
pub(crate) struct Vision {
    params: Params,
    graphs: Vec<Bound>,
    patch_embed: Matrix,
    positions: Matrix,
    projector: Matrix,
    patchify: Patchify,
    normalisation: Normalisation,
    resizer: Resizer,
}

/// A graph for images of up to `patches` patches.
#[derive(Debug)]
struct Bound {
    graph: GraphId,
    patches: usize,
    x: FloatInput,
    /// Cosines and sines.
    rope: [FloatInput; 2],
    mask: FloatInput,
    y: View,
}

impl Vision {
    /// Binds the graphs that `plan.params.vision` names; none where the bundle has no such tower. `hidden` is the width
    /// of the decoder's rows.
    pub fn open(host: &mut Host, hidden: usize) -> Result<Option<Self>> {
        let Some(found) = tower::graphs(host, "vision", "x")? else { return Ok(None) };
        let params: Params = host.require("/params/vision")?;
        let pixels = (params.patch_size as usize).checked_pow(2).and_then(|n| n.checked_mul(3));
        let pixels = pixels.filter(|_| params.patch_size <= 1 << 12).unwrap_or(0);
        let entries = params.position_embedding_size.saturating_mul(2);
        let patch_embed =
            Matrix::open(host, "/artifacts/vision/patch_embed", params.hidden, pixels)?;
        let positions = Matrix::open(host, "/artifacts/vision/pos_table", entries, params.hidden)?;
        let projector = Matrix::open(host, "/artifacts/vision/proj", hidden, params.hidden)?;
        let mut graphs = Vec::with_capacity(found.len());
        for (graph, patches) in found {
            graphs.push(Bound::open(host, &params, graph, patches)?);
        }
        // The class computes 2 · (x − 0.5) of levels between 0 and 1.
        let normalisation = Normalisation::rescale(1.0 / 255.0)?.map(|x| 2.0 * (x - 0.5))?;
        let patch = params.patch_size as usize;
        Ok(Some(Self {
            params,
            graphs,
            patch_embed,
            positions,
            projector,
            patchify: Patchify::new(patch, 1, PatchLayout::ChannelsLast)?,
            normalisation,
            resizer: Resizer::new(Filter::Bicubic),
        }))
    }

    /// The tokens around an image.
    pub fn tokens(&self) -> MediaTokens {
        self.params.tokens
    }

    /// Patches that an image becomes.
    fn grid(&self, image: Image<'_>) -> Result<Grid> {
        let Params { patch_size: patch, pooling_kernel_size: pool, max_soft_tokens, .. } =
            self.params;
        let patches = pool.checked_mul(pool).and_then(|area| area.checked_mul(max_soft_tokens));
        let size = aspect_ratio_preserving_size(image.size(), patch, pool, patches.unwrap_or(0))?;
        self.patchify.grid(size)
    }

    /// Soft tokens that an image becomes.
    ///
    /// # Errors
    /// When no graph takes as many patches.
    pub fn count(&self, image: Image<'_>) -> Result<usize> {
        let grid = self.grid(image)?;
        self.graph(image, grid.patches())?;
        Ok(grid.blocks(self.params.pooling_kernel_size as usize)?.patches())
    }

    /// The smallest graph that takes `patches` patches of an image.
    fn graph(&self, image: Image<'_>, patches: usize) -> Result<&Bound> {
        self.graphs.iter().find(|bound| bound.patches >= patches).ok_or_else(|| {
            let max = self.graphs.last().map_or(0, |bound| bound.patches);
            Error::prompt(format!(
                "an image of {} becomes {patches} patches, but the bundle's graphs take {max} at most; forge it with \
                 image-patches={patches} or more",
                image.size()
            ))
        })
    }

    /// The soft tokens of an image, rows as wide as the decoder's, and their number.
    pub fn soft_tokens(&mut self, host: &mut Host, image: Image<'_>) -> Result<(usize, Vec<f32>)> {
        let Params { hidden, patch_size: patch, head_dim, rope_theta, eps, .. } = self.params;
        let grid = self.grid(image)?;
        let count = grid.patches();
        let size = qhx_kit::vision::Size {
            width: u32::try_from(grid.columns).unwrap_or(0).saturating_mul(patch),
            height: u32::try_from(grid.rows).unwrap_or(0).saturating_mul(patch),
        };
        let resized = self.resizer.resize(image, size)?;
        let mut patches = vec![0.0; count * self.patchify.patch_len(1)];
        self.patchify.write(&[resized], &self.normalisation, &mut patches)?;
        let mut rows = self.patch_embed.project(host, &patches)?;
        let entries = self.params.position_embedding_size;
        add_axial_positions(self.positions.values(host), entries, hidden, grid, &mut rows)?;
        let bound = self.graph(image, count)?;
        let angles = count * head_dim / 2;
        let (mut cos, mut sin) = (vec![0.0; angles], vec![0.0; angles]);
        axial_rope(grid, 1, AxialOrder::ColumnsRows, head_dim, rope_theta, &mut cos, &mut sin)?;
        // Rows behind the image hold what another image left there; the mask hides them.
        bound.x.write_at(host, 0, &rows)?;
        bound.rope[0].write_at(host, 0, &cos)?;
        bound.rope[1].write_at(host, 0, &sin)?;
        bound.mask.fill(host, MASK_VALUE);
        bound.mask.write_at(host, 0, &vec![0.0; count])?;
        host.execute(bound.graph)?;
        let pool = self.params.pooling_kernel_size as usize;
        let tokens = grid.blocks(pool)?.patches();
        let mut pooled = vec![0.0; tokens * hidden];
        pool_mean(&tower::read(host, bound.y, count * hidden)?, hidden, grid, pool, &mut pooled)?;
        // The class multiplies with √hidden first, of which only the norm's epsilon sees anything.
        tower::normalise(&mut pooled, hidden, eps / hidden as f32);
        Ok((tokens, self.projector.project(host, &pooled)?))
    }
}

impl Bound {
    fn open(host: &mut Host, params: &Params, graph: GraphId, patches: usize) -> Result<Self> {
        let angles = params.head_dim / 2;
        for (role, rows, width) in [
            ("x", patches, params.hidden),
            ("cos", patches, angles),
            ("sin", patches, angles),
            ("cmask", 1, patches),
        ] {
            tower::check(host, graph, host.input(graph, role)?, rows, width)?;
        }
        Ok(Self {
            graph,
            patches,
            x: FloatInput::require(host, graph, "x")?,
            rope: [
                FloatInput::require(host, graph, "cos")?,
                FloatInput::require(host, graph, "sin")?,
            ],
            mask: FloatInput::require(host, graph, "cmask")?,
            y: tower::rows_out(host, graph, patches, params.hidden)?,
        })
    }
}
