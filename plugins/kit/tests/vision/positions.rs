//! Learned positions, rotary tables of two axes, pooling.

use qhx_kit::vision::{
    AxialOrder, Grid, add_axial_positions, axial_rope, pool_mean, resample_positions,
};
use serde::Deserialize;

use super::{assert_close, goldens, values};

fn grid([rows, columns]: [usize; 2]) -> Grid {
    Grid { rows, columns }
}

#[derive(Deserialize)]
struct Learned {
    side: usize,
    grid: [usize; 2],
    block: usize,
    width: usize,
    values: Vec<f32>,
}

#[test]
fn learned_positions_are_resampled_as_by_the_vision_class() {
    for case in goldens::<Vec<Learned>>("/positions/learned") {
        let Learned { side, block, width, .. } = case;
        let table = values(side * side * width, side as u32);
        let mut found = vec![f32::NAN; case.values.len()];
        resample_positions(&table, side, width, grid(case.grid), block, &mut found).unwrap();
        assert_close(&found, &case.values, 1e-6, &format!("side {side} to {:?}", case.grid));
    }
}

#[derive(Deserialize)]
struct Rope {
    axes: String,
    head: usize,
    theta: f64,
    grid: [usize; 2],
    block: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

#[test]
fn rotary_tables_of_two_axes_are_those_of_the_vision_classes() {
    for case in goldens::<Vec<Rope>>("/positions/rope") {
        let order = match case.axes.as_str() {
            "rows_columns" => AxialOrder::RowsColumns,
            _ => AxialOrder::ColumnsRows,
        };
        let Rope { head, theta, block, .. } = case;
        let (mut cos, mut sin) = (vec![f32::NAN; case.cos.len()], vec![f32::NAN; case.sin.len()]);
        axial_rope(grid(case.grid), block, order, head, theta, &mut cos, &mut sin).unwrap();
        assert_close(&cos, &case.cos, 1e-6, &case.axes);
        assert_close(&sin, &case.sin, 1e-6, &case.axes);
    }
}

#[derive(Deserialize)]
struct Axial {
    entries: usize,
    width: usize,
    grid: [usize; 2],
    values: Vec<f32>,
}

#[test]
fn positions_of_two_tables_are_added() {
    for case in goldens::<Vec<Axial>>("/positions/axial") {
        let Axial { entries, width, .. } = case;
        let table = values(2 * entries * width, 3);
        let mut found = vec![0.25; case.values.len()];
        add_axial_positions(&table, entries, width, grid(case.grid), &mut found).unwrap();
        let expected: Vec<_> = case.values.iter().map(|value| value + 0.25).collect();
        assert_close(&found, &expected, 0.0, "multiples of 1/4096 are exact");
        let wide = Grid { rows: 1, columns: entries + 1 };
        let mut found = vec![0.0; (entries + 1) * width];
        let error = add_axial_positions(&table, entries, width, wide, &mut found).unwrap_err();
        assert!(error.message().contains(&format!("at most {entries}")), "{error}");
    }
}

#[derive(Deserialize)]
struct Pooled {
    grid: [usize; 2],
    pool: usize,
    width: usize,
    values: Vec<f32>,
}

#[test]
fn pooling_takes_the_mean_of_square_blocks() {
    for case in goldens::<Vec<Pooled>>("/positions/pooled") {
        let Pooled { pool, width, .. } = case;
        let source = values(case.grid[0] * case.grid[1] * width, 4);
        let mut found = vec![f32::NAN; case.values.len()];
        pool_mean(&source, width, grid(case.grid), pool, &mut found).unwrap();
        assert_close(&found, &case.values, 1e-6, "pooled");
    }
}

#[test]
fn sizes_that_do_not_fit_are_refused() {
    let two = Grid { rows: 2, columns: 2 };
    let huge = Grid { rows: usize::MAX, columns: 2 };
    let (table, mut target) = (vec![0.0; 12], vec![0.0; 12]);
    for (side, width, grid) in
        [(2, 4, two), (2, 3, huge), (0, 3, two), (usize::MAX, 3, two), (2, 0, two)]
    {
        assert!(resample_positions(&table, side, width, grid, 1, &mut target).is_err());
        assert!(add_axial_positions(&table, side, width, grid, &mut target).is_err());
    }
    assert!(resample_positions(&table, 2, 3, two, 1, &mut target).is_ok());
    assert!(resample_positions(&table, 2, 3, two, 3, &mut target).is_err());
    assert!(pool_mean(&table, 3, two, 3, &mut target).is_err());
    assert!(pool_mean(&table, 0, two, 2, &mut []).is_err());
    let rows = AxialOrder::RowsColumns;
    for (head, theta) in [(0, 1e4), (6, 1e4), (8, 0.0), (8, f64::NAN)] {
        let (mut cos, mut sin) = (vec![0.0; 16], vec![0.0; 16]);
        assert!(axial_rope(two, 1, rows, head, theta, &mut cos, &mut sin).is_err());
    }
}
