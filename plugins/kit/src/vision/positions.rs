//! Positions of patches: learned positions, rotary tables of two axes, and pooling.

use super::Grid;
use qhx_op::{Error, Result};

/// Writes learned positions for the patches of `grid` into `target`, in the order of
/// [`Grid::order`] with `block`.
///
/// `table` has `side · side` rows of `width` numbers; it is resampled bilinearly with aligned corners:
/// the first and last patch of a row take the first and last column
/// (`get_vision_interpolation_indices_and_weights` of `transformers` with `align_corners=True`).
///
/// # Errors
/// Unless `table` has `side · side · width` numbers and `target` `width` for each patch.
pub fn resample_positions(
    table: &[f32],
    side: usize,
    width: usize,
    grid: Grid,
    block: usize,
    target: &mut [f32],
) -> Result<()> {
    resample(table, [side, width], grid, block, Axis::aligned, target)
}

/// The same where an entry of the table is an area, as a patch is: the middle of the first and last patch of a row lie
/// within the first and last column, and what lies further out has their values (`align_corners=False`).
///
/// # Errors
/// Errors of [`resample_positions`].
pub fn resample_areas(
    table: &[f32],
    side: usize,
    width: usize,
    grid: Grid,
    block: usize,
    target: &mut [f32],
) -> Result<()> {
    resample(table, [side, width], grid, block, Axis::of_areas, target)
}

fn resample(
    table: &[f32],
    [side, width]: [usize; 2],
    grid: Grid,
    block: usize,
    axis: fn(usize, usize) -> Axis,
    target: &mut [f32],
) -> Result<()> {
    let rows = side.checked_mul(side).filter(|&rows| rows > 0);
    table_of("learned positions", table, rows, width)?;
    places(target, grid, width)?;
    let down = axis(side, grid.rows);
    let across = axis(side, grid.columns);
    for ((row, column), target) in grid.order(block)?.zip(target.chunks_exact_mut(width)) {
        let ([top, bottom], [above, below]) = down.taps(row);
        let ([left, right], [before, after]) = across.taps(column);
        let row_of = |y: usize, x: usize| &table[(y * side + x) * width..][..width];
        let corners =
            [row_of(top, left), row_of(top, right), row_of(bottom, left), row_of(bottom, right)];
        let weights = [above * before, above * after, below * before, below * after];
        for (i, to) in target.iter_mut().enumerate() {
            *to = corners.iter().zip(weights).map(|(corner, weight)| corner[i] * weight).sum();
        }
    }
    Ok(())
}

/// Writes learned positions for the patches of `grid` into `target`, in the order of [`Grid::order`] with `block`.
///
/// `table` has `side · side` rows of `width` numbers; it is resampled as by `F.interpolate` with `mode="bilinear"`,
/// `align_corners=False` and `antialias=True` (`Siglip2VisionEmbeddings.resize_positional_embeddings`).
///
/// # Errors
/// Unless `table` has `side · side · width` numbers and `target` `width` for each patch.
pub fn resample_antialiased(
    table: &[f32],
    side: usize,
    width: usize,
    grid: Grid,
    block: usize,
    target: &mut [f32],
) -> Result<()> {
    let rows = side.checked_mul(side).filter(|&rows| rows > 0);
    table_of("learned positions", table, rows, width)?;
    places(target, grid, width)?;
    let (down, across) = (taps(side, grid.rows), taps(side, grid.columns));
    for ((row, column), target) in grid.order(block)?.zip(target.chunks_exact_mut(width)) {
        target.fill(0.0);
        for &(y, above) in &down[row] {
            for &(x, before) in &across[column] {
                let learned = table[(y * side + x) * width..].iter();
                target.iter_mut().zip(learned).for_each(|(to, from)| *to += above * before * from);
            }
        }
    }
    Ok(())
}

/// For each of `count` places along an axis, the entries of the table that it is made of, and their weights.
fn taps(entries: usize, count: usize) -> Vec<Vec<(usize, f32)>> {
    let scale = entries as f32 / count as f32;
    let support = scale.max(1.0);
    let of = |place: usize| {
        let centre = (place as f32 + 0.5) * scale - 0.5;
        let weight = |entry: usize| 1.0 - (entry as f32 - centre).abs() / support;
        let taps = (0..entries).map(|entry| (entry, weight(entry))).filter(|(_, w)| *w > 0.0);
        let taps: Vec<_> = taps.collect();
        let sum: f32 = taps.iter().map(|(_, w)| w).sum();
        taps.into_iter().map(|(entry, w)| (entry, w / sum)).collect()
    };
    (0..count).map(of).collect()
}

/// One axis of a table that is resampled.
struct Axis {
    last: usize,
    step: f32,
    /// Place of the first patch.
    first: f32,
}

impl Axis {
    fn aligned(entries: usize, patches: usize) -> Self {
        let last = entries - 1;
        let step = if patches > 1 { last as f32 / (patches - 1) as f32 } else { 0.0 };
        Self { last, step, first: 0.0 }
    }

    fn of_areas(entries: usize, patches: usize) -> Self {
        let step = entries as f32 / patches.max(1) as f32;
        Self { last: entries - 1, step, first: 0.5 * step - 0.5 }
    }

    /// The two entries for a patch, and their weights.
    fn taps(&self, patch: usize) -> ([usize; 2], [f32; 2]) {
        let place = (self.first + patch as f32 * self.step).clamp(0.0, self.last as f32);
        let lower = (place as usize).min(self.last);
        let share = place - lower as f32;
        ([lower, (lower + 1).min(self.last)], [1.0 - share, share])
    }
}

/// Adds `table[0][column] + table[1][row]` to the row of each patch, row by row over the image:
/// learned positions with a table for each axis (`Gemma4VisionPatchEmbedder`).
///
/// `table` has twice `entries` rows of `width` numbers, columns first.
///
/// # Errors
/// Unless `table` has these rows, `target` has `width` numbers for each patch, and no side of the grid is longer than
/// `entries`.
pub fn add_axial_positions(
    table: &[f32],
    entries: usize,
    width: usize,
    grid: Grid,
    target: &mut [f32],
) -> Result<()> {
    table_of("learned positions", table, entries.checked_mul(2), width)?;
    places(target, grid, width)?;
    if grid.rows.max(grid.columns) > entries {
        return Err(Error::prompt(format!(
            "an image of {} rows of {} patches: expected at most {entries} a side, as the table of \
             positions has",
            grid.rows, grid.columns
        )));
    }
    let row_of = |index: usize| &table[index * width..][..width];
    for ((row, column), target) in grid.order(1)?.zip(target.chunks_exact_mut(width)) {
        for ((to, across), down) in target.iter_mut().zip(row_of(column)).zip(row_of(entries + row))
        {
            *to += across + down;
        }
    }
    Ok(())
}

/// Which axis the first half of a patch's rotary angles belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AxialOrder {
    /// Rows, then columns (`Qwen3VLVisionRotaryEmbedding`).
    RowsColumns,
    /// Rows, then columns, whose frequencies lie between those of the rows (`PixtralVisionRotaryEmbedding`).
    RowsColumnsBetween,
    /// Columns, then rows (`Gemma4VisionRotaryEmbedding`).
    ColumnsRows,
}

/// Rotary tables of patches on two axes, `head_dim / 2` numbers a patch, in the order of
/// [`Grid::order`] with `block`.
///
/// The angles of a patch are `position · θ^(−2j / (head_dim / 2))` for j below `head_dim / 4`, of one
/// axis and then of the other. Which elements of a head an angle turns is the graph's affair: i and
/// i + `head_dim / 2` in Qwen3-VL, a pair within each half of the head in Gemma 4.
///
/// # Errors
/// Unless `head_dim` is a multiple of 4, θ a positive number, and both targets have `head_dim / 2` places for each
/// patch.
pub fn axial_rope(
    grid: Grid,
    block: usize,
    order: AxialOrder,
    head_dim: usize,
    theta: f64,
    cos: &mut [f32],
    sin: &mut [f32],
) -> Result<()> {
    if head_dim == 0 || !head_dim.is_multiple_of(4) || !(theta.is_finite() && theta > 0.0) {
        return Err(Error::manifest(format!(
            "rotary tables of two axes for heads of {head_dim} with theta {theta}: expected a \
             multiple of 4 and a positive number"
        )));
    }
    let (spatial, angles) = (head_dim / 2, head_dim / 4);
    places(cos, grid, spatial)?;
    places(sin, grid, spatial)?;
    let rows = cos.chunks_exact_mut(spatial).zip(sin.chunks_exact_mut(spatial));
    for ((row, column), (cos, sin)) in grid.order(block)?.zip(rows) {
        let axes = match order {
            AxialOrder::RowsColumns | AxialOrder::RowsColumnsBetween => [row, column],
            AxialOrder::ColumnsRows => [column, row],
        };
        for (i, (cos, sin)) in cos.iter_mut().zip(sin).enumerate() {
            let between = if order == AxialOrder::RowsColumnsBetween { i / angles } else { 0 };
            let exponent = (2 * (i % angles) + between) as f32 / spatial as f32;
            let frequency = 1.0 / (theta as f32).powf(exponent);
            (*sin, *cos) = (axes[i / angles] as f32 * frequency).sin_cos();
        }
    }
    Ok(())
}

/// Writes for each patch of `grid`, in the order of [`Grid::order`] with `block`, the number of the window of `side` by
/// `side` patches that it lies in (`get_vision_window_index` of `transformers`); those at the right and lower edge are
/// smaller.
///
/// # Errors
/// Unless `side` is a multiple of `block`, and `target` has a place for each patch.
pub fn window_numbers(grid: Grid, block: usize, side: usize, target: &mut [f32]) -> Result<()> {
    if side == 0 || side.checked_rem(block) != Some(0) {
        return Err(Error::manifest(format!(
            "windows of {side} by {side} patches: expected a multiple of {block}, the side of what is merged"
        )));
    }
    places(target, grid, 1)?;
    let across = grid.columns.div_ceil(side);
    for ((row, column), target) in grid.order(block)?.zip(target) {
        *target = (row / side * across + column / side) as f32;
    }
    Ok(())
}

/// Writes the mean of each block of `pool` by `pool` rows of `source` into `target`. Both are rows of
/// `width` numbers, patches and blocks row by row over the image (`Gemma4VisionPooler`, without its
/// factor).
///
/// # Errors
/// Unless the blocks cover the grid and the sizes fit it.
pub fn pool_mean(
    source: &[f32],
    width: usize,
    grid: Grid,
    pool: usize,
    target: &mut [f32],
) -> Result<()> {
    let blocks = grid.blocks(pool)?;
    places(source, grid, width)?;
    places(target, blocks, width)?;
    let share = 1.0 / (pool * pool) as f32;
    for (index, target) in target.chunks_exact_mut(width).enumerate() {
        target.fill(0.0);
        let (top, left) = (index / blocks.columns * pool, index % blocks.columns * pool);
        for row in top..top + pool {
            let first = (row * grid.columns + left) * width;
            for patch in source[first..first + pool * width].chunks_exact(width) {
                target.iter_mut().zip(patch).for_each(|(to, from)| *to += from * share);
            }
        }
    }
    Ok(())
}

fn table_of(what: &str, table: &[f32], rows: Option<usize>, width: usize) -> Result<()> {
    let expected = rows.and_then(|rows| rows.checked_mul(width)).filter(|&len| len > 0);
    if expected == Some(table.len()) {
        return Ok(());
    }
    let rows = rows.map_or("more".to_owned(), |rows| rows.to_string());
    Err(Error::artifact(format!(
        "a table of {what} of {} numbers: expected {rows} rows of {width}",
        table.len()
    )))
}

fn places(slice: &[f32], grid: Grid, width: usize) -> Result<()> {
    let expected = grid.rows.checked_mul(grid.columns).and_then(|rows| rows.checked_mul(width));
    if expected == Some(slice.len()) && width > 0 {
        return Ok(());
    }
    Err(Error::prompt(format!(
        "{} numbers for {} rows of {} patches: expected {width} each",
        slice.len(),
        grid.rows,
        grid.columns
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn positions_of_the_same_grid_stay_and_others_are_weighted() {
        let table: Vec<f32> = (0..9u8).map(f32::from).collect();
        let resampled = |rows, columns| {
            let mut target = vec![0.0; rows * columns];
            resample_antialiased(&table, 3, 1, Grid { rows, columns }, 1, &mut target).unwrap();
            target
        };
        assert_eq!(resampled(3, 3), table);
        let one = resampled(1, 1);
        assert!((one[0] - 4.0).abs() < 1e-5, "{one:?}");
        let wide = resampled(1, 6);
        let expected = [3.0, 3.25, 3.75, 4.25, 4.75, 5.0];
        assert!(wide.iter().zip(expected).all(|(a, b)| (a - b).abs() < 1e-5), "{wide:?}");
    }
}
