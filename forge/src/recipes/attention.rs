//! Softmax attention of decoders over a cache, and the inputs that its layers share.

use qhx_core::Result;

use crate::builder::GraphBuilder;
use crate::graph::{Elem, TensorId};

/// Inputs that all layers of a graph share, and the graph's sizes.
#[derive(Debug)]
pub(super) struct Attend {
    /// `[rows, 1, head_dim / 2]`
    pub cos: TensorId,
    /// `[rows, 1, head_dim / 2]`
    pub sin: TensorId,
    /// `[1, 1, rows or 1, width]`; `[1, 1, width]` for one row.
    pub mask: TensorId,
    /// Tokens that the graph takes at once.
    pub rows: usize,
    /// Positions of the KV cache; 0 without one.
    pub max_ctx: usize,
}

impl Attend {
    /// Adds the inputs `cos`, `sin` and `cmask` `[mask_rows, max_ctx + rows]`.
    pub fn inputs(
        b: &mut GraphBuilder,
        head_dim: usize,
        rows: usize,
        mask_rows: usize,
        max_ctx: usize,
    ) -> Result<Self> {
        let (half, width) = (head_dim / 2, max_ctx + rows);
        let cos = b.input("cos", Elem::Activation, &[rows, half])?;
        let sin = b.input("sin", Elem::Activation, &[rows, half])?;
        let mask = b.input("cmask", Elem::Activation, &[mask_rows, width])?;
        let cos = b.reshape(cos, &[rows, 1, half])?;
        let sin = b.reshape(sin, &[rows, 1, half])?;
        let mask = match rows {
            1 => b.reshape(mask, &[1, 1, width])?,
            _ => b.reshape(mask, &[1, 1, mask_rows, width])?,
        };
        Ok(Self { cos, sin, mask, rows, max_ctx })
    }
}

/// Heads of an attention layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Heads {
    pub query: usize,
    /// Heads of keys and values.
    pub groups: usize,
    pub dim: usize,
}

/// What attention gives.
#[derive(Debug, Clone, Copy)]
pub(super) struct Mixed {
    /// `[rows, query · dim]`
    pub out: TensorId,
    /// The graph's own keys `[groups, rows, dim]`.
    pub k: TensorId,
    /// The graph's own values `[groups, rows, dim]`.
    pub v: TensorId,
}

/// Grouped-query attention (Ainslie et al. 2023, arXiv 2305.13245): query head `a` uses key
/// head `a / (heads / kv_heads)`, so the query heads of a group are rows of one product.
///
/// Scores of the cache and of the graph's own tokens are separate products that are joined
/// before the softmax, so that the cache is read where it lies and not copied to append rows.
///
/// q `[rows, query, dim]` is rotated and scaled, k `[rows, groups, dim]` rotated; `past` are keys and
/// values of the cache, `[groups, max_ctx, dim]`.
pub(super) fn mix(
    b: &mut GraphBuilder,
    [q, k, v]: [TensorId; 3],
    past: Option<(TensorId, TensorId)>,
    heads: Heads,
    attend: &Attend,
) -> Result<Mixed> {
    let (groups, d) = (heads.groups, heads.dim);
    let (repeat, rows, ctx) = (heads.query / groups, attend.rows, attend.max_ctx);
    // Groups first: [groups, repeat · rows, d] against [groups, rows, d].
    let (q, k, v) = if rows == 1 {
        (
            b.reshape(q, &[groups, repeat, d])?,
            b.reshape(k, &[groups, 1, d])?,
            b.reshape(v, &[groups, 1, d])?,
        )
    } else {
        let q = b.reshape(q, &[rows, groups, repeat, d])?;
        let q = b.transpose(q, &[1, 2, 0, 3])?;
        (
            b.reshape(q, &[groups, repeat * rows, d])?,
            b.transpose(k, &[1, 0, 2])?,
            b.transpose(v, &[1, 0, 2])?,
        )
    };
    let own = b.matmul(q, k, true)?;
    let scores = match past {
        Some((past_k, _)) => {
            let old = b.matmul(q, past_k, true)?;
            b.concat(&[old, own], 2)?
        }
        None => own,
    };
    let weights = if rows == 1 {
        let scores = b.add(scores, attend.mask)?;
        b.softmax(scores)?
    } else {
        let scores = b.reshape(scores, &[groups, repeat, rows, ctx + rows])?;
        let scores = b.add(scores, attend.mask)?;
        let weights = b.softmax(scores)?;
        b.reshape(weights, &[groups, repeat * rows, ctx + rows])?
    };
    let own = b.slice(weights, 2, ctx, ctx + rows)?;
    // With one row the product is one of a column and a row.
    let own = if rows == 1 { b.mul(own, v)? } else { b.matmul(own, v, false)? };
    let mixed = match past {
        Some((_, past_v)) => {
            let old = b.slice(weights, 2, 0, ctx)?;
            let old = b.matmul(old, past_v, false)?;
            b.add(old, own)?
        }
        None => own,
    };
    let mixed = if rows == 1 {
        mixed
    } else {
        let mixed = b.reshape(mixed, &[groups, repeat, rows, d])?;
        b.transpose(mixed, &[2, 0, 1, 3])?
    };
    let mixed = b.reshape(mixed, &[rows, heads.query * d])?;
    Ok(Mixed { out: mixed, k, v })
}

/// Rotary embedding of whole heads `[rows, heads, d]` in the half-split form (RoFormer,
/// arXiv 2104.09864): each row has the tables of its own position.
pub(super) fn rope(b: &mut GraphBuilder, x: TensorId, attend: &Attend) -> Result<TensorId> {
    let (cos, sin) = (attend.cos, attend.sin);
    let half = b.shape(cos)?[2];
    let first = b.slice(x, 2, 0, half)?;
    let second = b.slice(x, 2, half, 2 * half)?;
    let first_cos = b.mul(first, cos)?;
    let second_sin = b.mul(second, sin)?;
    let second_cos = b.mul(second, cos)?;
    let first_sin = b.mul(first, sin)?;
    let low = b.sub(first_cos, second_sin)?;
    let high = b.add(second_cos, first_sin)?;
    b.concat(&[low, high], 2)
}
