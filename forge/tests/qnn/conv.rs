//! Convolutions and gathers of odd and even sizes, against their ONNX reference graphs.

use qhx_checkpoint::Checkpoint;
use qhx_exec::GraphId;
use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Conv1d, Conv2d, Elem, Graph, TensorId};
use qhx_graph::weight::{Storage, Weight};
use qhx_paths::fixture;
use qhx_qnn::Target;
use qhx_tiers::tier;

use crate::support::{Compiled, error, numbers, reference, weight};
use crate::tier::opened;

/// Convolutions of images: channels in, channels out, how the filters move.
const CONVOLUTIONS: [(usize, usize, Conv2d); 11] = [
    (6, 7, Conv2d { stride: [2, 2], padding: [[1, 1], [1, 1]], ..Conv2d::new([3, 3]) }),
    (6, 10, Conv2d::new([1, 1])),
    // Patches.
    (6, 17, Conv2d { stride: [4, 3], ..Conv2d::new([4, 3]) }),
    (6, 5, Conv2d { stride: [3, 3], ..Conv2d::new([2, 2]) }),
    // Zeros on some sides only, and as many as there can be.
    (6, 6, Conv2d { padding: [[4, 0], [0, 2]], ..Conv2d::new([5, 3]) }),
    (6, 3, Conv2d { padding: [[1, 1], [1, 1]], ..Conv2d::new([2, 2]) }),
    (6, 6, Conv2d { padding: [[2, 2], [3, 3]], dilation: [2, 3], ..Conv2d::new([3, 3]) }),
    (6, 8, Conv2d { padding: [[1, 1], [1, 1]], groups: 2, ..Conv2d::new([3, 3]) }),
    (6, 9, Conv2d { stride: [2, 1], groups: 3, ..Conv2d::new([3, 2]) }),
    // Depthwise, the second with two outputs a channel.
    (6, 6, Conv2d { stride: [2, 2], padding: [[1, 1], [1, 1]], groups: 6, ..Conv2d::new([3, 3]) }),
    (
        6,
        12,
        Conv2d { padding: [[2, 2], [2, 2]], dilation: [2, 2], groups: 6, ..Conv2d::new([3, 3]) },
    ),
];

/// Convolutions along time, of 5 channels: channels out, how the filters move.
const SEQUENCES: [(usize, Conv1d); 5] = [
    (8, Conv1d { stride: 2, padding: [1, 1], ..Conv1d::new(3) }),
    (4, Conv1d::causal(4)),
    (5, Conv1d { groups: 5, ..Conv1d::causal(5) }),
    (5, Conv1d { groups: 5, dilation: 2, padding: [6, 0], ..Conv1d::new(4) }),
    (10, Conv1d { groups: 5, ..Conv1d::causal(3) }),
];

/// The definition: every output is a sum of products over the inputs that its filter sees.
fn convolved(
    x: &[f32],
    [n, channels, rows, columns]: [usize; 4],
    filter: &[f32],
    out: usize,
    conv: &Conv2d,
) -> Vec<f32> {
    let inner = channels / conv.groups;
    let [kernel_rows, kernel_columns] = conv.kernel;
    let steps = |axis: usize, size: usize| {
        let [before, after] = conv.padding[axis];
        (size + before + after - conv.dilation[axis] * (conv.kernel[axis] - 1) - 1)
            / conv.stride[axis]
            + 1
    };
    // The place in the input that tap `tap` of output `step` sees.
    let place = |axis: usize, step: usize, tap: usize, size: usize| {
        let padded = step * conv.stride[axis] + tap * conv.dilation[axis];
        padded.checked_sub(conv.padding[axis][0]).filter(|place| *place < size)
    };
    let mut found = Vec::new();
    for (image, o) in (0..n).flat_map(|image| (0..out).map(move |o| (image, o))) {
        let first = o / (out / conv.groups) * inner;
        for (r, c) in (0..steps(0, rows)).flat_map(|r| (0..steps(1, columns)).map(move |c| (r, c)))
        {
            let mut sum = 0.0;
            for (tap, weight) in filter[o * inner * kernel_rows * kernel_columns..]
                .iter()
                .enumerate()
                .take(inner * kernel_rows * kernel_columns)
            {
                let row = place(0, r, tap / kernel_columns % kernel_rows, rows);
                let column = place(1, c, tap % kernel_columns, columns);
                let channel = first + tap / (kernel_rows * kernel_columns);
                if let (Some(row), Some(column)) = (row, column) {
                    sum +=
                        weight * x[((image * channels + channel) * rows + row) * columns + column];
                }
            }
            found.push(sum);
        }
    }
    found
}

/// The reference graph is one of the two that are compared below, so it has to be right by itself.
#[test]
fn reference_graphs_of_convolutions_are_as_defined() {
    let shape = [2, 6, 13, 9];
    let image = numbers(50, shape.iter().product());
    for (index, (channels, out, conv)) in (0..).zip(CONVOLUTIONS) {
        let cols = channels / conv.groups * conv.kernel[0] * conv.kernel[1];
        let weight = weight(index, [out, cols], Storage::Float);
        let filter = weight.to_f32().unwrap();
        let mut b = GraphBuilder::new("one");
        let x = b.input("x", Elem::Activation, &shape).unwrap();
        let y = b.conv2d("conv", x, weight, None, conv).unwrap();
        let found = &reference(&outputs(b, vec![y]), std::slice::from_ref(&image))[0];
        let error = error(found, &convolved(&image, shape, &filter, out, &conv));
        assert!(error < 1e-5, "{conv:?}: {error}");
    }
}

/// Filters of a checkpoint have three or four dimensions.
#[test]
fn filters_of_a_checkpoint_convolve() {
    let checkpoint = Checkpoint::open(&fixture("qwen35-tied")).unwrap();
    let size = |key: &str| checkpoint.text_config()[key].as_u64().unwrap() as usize;
    let keys = size("linear_num_key_heads") * size("linear_key_head_dim");
    let values = size("linear_num_value_heads") * size("linear_value_head_dim");
    let (channels, kernel, length) = (2 * keys + values, size("linear_conv_kernel_dim"), 9);
    let name = "layers.0.linear_attn.conv1d.weight";
    let source = checkpoint.rows(name, &[channels, 1, kernel]).unwrap();
    assert_eq!(source.shape(), [channels, kernel]);
    let mut b = GraphBuilder::new("checkpoint");
    let x = b.input("x", Elem::Activation, &[1, channels, length]).unwrap();
    let conv = Conv1d { groups: channels, ..Conv1d::causal(kernel) };
    let y = b.conv1d("conv", x, Weight::new(source, Storage::Float), None, conv).unwrap();
    let sequence = numbers(60, channels * length);
    let found = &reference(&outputs(b, vec![y]), std::slice::from_ref(&sequence))[0];
    let filter = checkpoint.values(name, &[channels, 1, kernel]).unwrap();
    let flat =
        Conv2d { padding: [[0, 0], [kernel - 1, 0]], groups: channels, ..Conv2d::new([1, kernel]) };
    let expected = convolved(&sequence, [1, channels, 1, length], &filter, channels, &flat);
    assert!(error(found, &expected) < 1e-5);
    let error = checkpoint.rows(name, &[channels, kernel]).unwrap_err();
    assert!(error.message().contains("conv1d.weight has shape"), "{error}");
}

pub(crate) fn convolutions() -> Graph {
    let mut b = GraphBuilder::new("convolutions");
    let image = b.input("image", Elem::Activation, &[2, 6, 13, 9]).unwrap();
    let sequence = b.input("sequence", Elem::Activation, &[2, 5, 31]).unwrap();
    let mut results = Vec::new();
    for (index, (channels, out, conv)) in (0..).zip(CONVOLUTIONS) {
        let cols = channels / conv.groups * conv.kernel[0] * conv.kernel[1];
        let weight = weight(index, [out, cols], Storage::Float);
        let bias = index.is_multiple_of(2).then(|| numbers(100 + index, out));
        results.push(b.conv2d(&format!("p{index}"), image, weight, bias, conv).unwrap());
    }
    for (index, (out, conv)) in (20..).zip(SEQUENCES) {
        let weight = weight(index, [out, 5 / conv.groups * conv.kernel], Storage::Float);
        let bias = index.is_multiple_of(2).then(|| numbers(100 + index, out));
        results.push(b.conv1d(&format!("s{index}"), sequence, weight, bias, conv).unwrap());
    }
    // Two in a row, with what usually stands between them.
    let weight = weight(30, [4, 7 * 9], Storage::Float);
    let active = b.relu(results[0]).unwrap();
    let conv = Conv2d { stride: [2, 2], padding: [[1, 1], [1, 1]], ..Conv2d::new([3, 3]) };
    results.push(b.conv2d("second", active, weight, None, conv).unwrap());
    outputs(b, results)
}

pub(crate) fn gathers() -> Graph {
    let mut b = GraphBuilder::new("gathers");
    let cube = b.input("cube", Elem::Activation, &[4, 11, 6]).unwrap();
    let state = b.input("state", Elem::F32, &[2, 11, 3, 5]).unwrap();
    let numbers_in = b.input("numbers", Elem::I32, &[11]).unwrap();
    let list = b.input("list", Elem::I32, &[5]).unwrap();
    let grid = b.input("grid", Elem::I32, &[3, 2]).unwrap();
    let table = b.table("positions", weight(40, [11, 21], Storage::Float)).unwrap();
    let constant = b.constant("constant", Elem::Activation, &[3, 11], numbers(41, 33)).unwrap();
    let mut results = Vec::new();
    for (x, indices, axis) in [
        (table, list, 0),
        (table, grid, 0),
        (constant, list, 1),
        (cube, list, 1),
        (cube, grid, 1),
        (state, list, 1),
        (numbers_in, list, 0),
        (numbers_in, grid, 0),
    ] {
        results.push(b.gather(x, indices, axis).unwrap());
    }
    // Along the first axis and the last one there are fewer elements than the indices reach.
    let few = b.input("few", Elem::I32, &[1, 7]).unwrap();
    results.push(b.gather(cube, few, 0).unwrap());
    results.push(b.gather(cube, few, 2).unwrap());
    outputs(b, results)
}

fn outputs(mut b: GraphBuilder, results: Vec<TensorId>) -> Graph {
    for (index, id) in results.into_iter().enumerate() {
        b.output(&format!("out_{index}"), id).unwrap();
    }
    b.finish().unwrap()
}

#[tier(qnn)]
fn convolutions_and_gathers_agree_on_every_target() {
    let library = opened();
    let graphs = [convolutions(), gathers()];
    let inputs = [
        vec![numbers(50, 2 * 6 * 13 * 9), numbers(51, 2 * 5 * 31)],
        vec![
            numbers(52, 4 * 11 * 6),
            numbers(53, 2 * 11 * 3 * 5),
            (0..11).map(|i| (i * i - 40) as f32).collect(),
            vec![3.0, 0.0, 10.0, 7.0, 7.0],
            vec![1.0, 10.0, 0.0, 5.0, 5.0, 2.0],
            vec![3.0, 0.0, 1.0, 2.0, 2.0, 1.0, 3.0],
        ],
    ];
    let expected: Vec<_> =
        graphs.iter().zip(&inputs).map(|(graph, inputs)| reference(graph, inputs)).collect();
    for target in Target::ALL {
        let mut compiled = Compiled::new(&library, target, &[&graphs]);
        let mut wrong = Vec::new();
        for (id, graph) in (0..).zip(&graphs) {
            let found = compiled.run(id, &inputs[id as usize]);
            // What is chosen is not computed; a table's values are rounded to f16.
            let allowed = if id == 0 { 1e-3 } else { 5e-4 };
            let pairs = found.iter().zip(&expected[id as usize]);
            for (output, (found, expected)) in graph.outputs().iter().zip(pairs) {
                let error = error(found, expected);
                if error > allowed {
                    wrong.push(format!("{}: {error}", graph.producer(*output).unwrap().name));
                }
            }
        }
        assert!(wrong.is_empty(), "{target}: {wrong:#?}");
    }
}

#[tier(qnn)]
fn an_index_outside_of_a_table_fails_on_the_npu() {
    let library = opened();
    let mut b = GraphBuilder::new("rows");
    let list = b.input("list", Elem::I32, &[3]).unwrap();
    let table = b.table("table", weight(1, [11, 8], Storage::Float)).unwrap();
    let rows = b.gather(table, list, 0).unwrap();
    let graph = outputs(b, vec![rows]);
    let mut compiled = Compiled::new(&library, Target::V81, &[std::slice::from_ref(&graph)]);
    compiled.write(0, 0, &[0.0, -1.0, 2.0]);
    let error = compiled.workspace.execute(GraphId(0)).unwrap_err();
    assert!(error.to_string().contains("1100"), "{error}");
}
