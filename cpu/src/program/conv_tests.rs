//! Convolutions against rten, and against sums of f64.

use qhx_graph::builder::GraphBuilder;
use qhx_graph::graph::{Conv2d, Elem, Graph};
use qhx_graph::weight::Storage;

use super::tests::{Both, weight};
use super::{Input, Instruction, Scratch};
use crate::kernels::tests::numbers;
use crate::options::Caches;

/// A convolution; one along a line has one row.
#[derive(Debug, Clone, Copy)]
struct Case {
    /// Images, channels, rows, columns.
    x: [usize; 4],
    filters: usize,
    groups: usize,
    kernel: [usize; 2],
    stride: [usize; 2],
    dilation: [usize; 2],
    /// Top, left, bottom, right.
    pads: [usize; 4],
    bias: bool,
    /// True if channels are last before and behind it, as the forge's towers have them.
    last: bool,
}

const PLAIN: Case = Case {
    x: [1, 1, 8, 8],
    filters: 1,
    groups: 1,
    kernel: [1, 1],
    stride: [1, 1],
    dilation: [1, 1],
    pads: [0; 4],
    bias: false,
    last: false,
};

/// Filters, channels and positions are no multiples of what is computed at a time, or are.
fn cases() -> Vec<Case> {
    let square = Case { kernel: [3, 3], stride: [2, 2], pads: [1; 4], ..PLAIN };
    let causal = Case { kernel: [1, 5], pads: [0, 4, 0, 0], ..PLAIN };
    vec![
        PLAIN,
        // The tower for audio: two of stride 2, and depthwise ones that look back only.
        Case { x: [1, 1, 96, 48], filters: 32, last: true, ..square },
        Case { x: [1, 32, 48, 24], filters: 16, last: true, ..square },
        Case { x: [1, 96, 1, 60], filters: 96, groups: 96, last: true, ..causal },
        Case { x: [1, 96, 1, 60], filters: 96, groups: 96, bias: true, ..causal },
        // Patches of an image.
        Case {
            x: [2, 3, 28, 42],
            filters: 70,
            kernel: [14, 14],
            stride: [14, 14],
            bias: true,
            ..PLAIN
        },
        Case { x: [2, 5, 17, 13], filters: 37, bias: true, ..square },
        Case {
            x: [1, 6, 9, 11],
            filters: 3,
            kernel: [2, 3],
            dilation: [2, 3],
            pads: [2, 0, 1, 5],
            ..PLAIN
        },
        Case {
            x: [3, 12, 7, 9],
            filters: 20,
            groups: 4,
            kernel: [3, 2],
            pads: [1, 1, 0, 0],
            ..PLAIN
        },
        Case {
            x: [1, 8, 5, 6],
            filters: 24,
            groups: 8,
            kernel: [2, 2],
            dilation: [1, 2],
            bias: true,
            ..PLAIN
        },
        Case { x: [2, 7, 1, 31], filters: 130, kernel: [1, 4], stride: [1, 3], ..PLAIN },
        Case { x: [2, 48, 20, 20], filters: 64, kernel: [3, 3], pads: [1; 4], ..PLAIN },
    ]
}

impl Case {
    fn output(&self) -> [usize; 4] {
        let size = |at: usize| {
            let reach = self.dilation[at] * (self.kernel[at] - 1) + 1;
            (self.x[2 + at] + self.pads[at] + self.pads[2 + at] - reach) / self.stride[at] + 1
        };
        [self.x[0], self.filters, size(0), size(1)]
    }

    fn filter_shape(&self) -> [usize; 4] {
        [self.filters, self.x[1] / self.groups, self.kernel[0], self.kernel[1]]
    }

    fn graph(&self, filters: Vec<f32>, bias: Vec<f32>) -> Graph {
        let mut b = GraphBuilder::new("g");
        let [n, channels, rows, columns] = self.x;
        let x = match self.last {
            true => {
                let x = b.input("x", Elem::Activation, &[n, rows, columns, channels]).unwrap();
                b.transpose(x, &[0, 3, 1, 2]).unwrap()
            }
            false => b.input("x", Elem::Activation, &self.x).unwrap(),
        };
        let shape = [self.filters, filters.len() / self.filters];
        let weight = weight(shape, filters, Storage::Float);
        let [top, left, bottom, right] = self.pads;
        let conv = Conv2d {
            kernel: self.kernel,
            stride: self.stride,
            padding: [[top, bottom], [left, right]],
            dilation: self.dilation,
            groups: self.groups,
        };
        let y = b.conv2d("conv", x, weight, self.bias.then_some(bias), conv).unwrap();
        let y = if self.last { b.transpose(y, &[0, 2, 3, 1]).unwrap() } else { y };
        b.output("y", y).unwrap();
        b.finish().unwrap()
    }

    /// The sum of f64 at a place of the result, and the sum of its terms' sizes.
    fn reference(&self, x: &[f32], filters: &[f32], bias: &[f32], place: [usize; 4]) -> [f64; 2] {
        let [image, filter, row, column] = place;
        let [_, inner, down, across] = self.filter_shape();
        let [_, channels, rows, columns] = self.x;
        let first = filter / (self.filters / self.groups) * inner;
        let start = if self.bias { f64::from(bias[filter]) } else { 0.0 };
        let (mut sum, mut size) = (start, start.abs());
        for (channel, i, j) in (0..inner * down * across)
            .map(|at| (at / (down * across), at / across % down, at % across))
        {
            let at = [
                row * self.stride[0] + i * self.dilation[0],
                column * self.stride[1] + j * self.dilation[1],
            ];
            let Some(r) = at[0].checked_sub(self.pads[0]).filter(|r| *r < rows) else { continue };
            let Some(c) = at[1].checked_sub(self.pads[1]).filter(|c| *c < columns) else {
                continue;
            };
            let of_channel = first + channel;
            let x = match self.last {
                true => x[((image * rows + r) * columns + c) * channels + of_channel],
                false => x[((image * channels + of_channel) * rows + r) * columns + c],
            };
            let w = filters[((filter * inner + channel) * down + i) * across + j];
            let term = f64::from(x) * f64::from(w);
            (sum, size) = (sum + term, size + term.abs());
        }
        [sum, size]
    }

    fn check(&self) {
        let count = |shape: [usize; 4]| shape.iter().product::<usize>();
        let (x, filters) = (numbers(count(self.x), 3), numbers(count(self.filter_shape()), 5));
        let bias = numbers(self.filters, 7);
        let both = Both::new(&self.graph(filters.clone(), bias.clone()), Caches::F32);
        let program = &both.program;
        let is_conv = |one: &Instruction| matches!(one, Instruction::Conv { .. });
        assert!(program.instructions.iter().any(is_conv));
        let pool = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let mut scratch = Scratch::default();
        let inputs = [Input::F32(&x)];
        // What the first execution left behind does not reach the second, and no memory is taken for it.
        pool.install(|| program.run(&inputs, &mut scratch)).unwrap();
        let places = |scratch: &Scratch| -> Vec<_> {
            scratch.buffers.iter().map(|buffer| (buffer.as_ptr(), buffer.capacity())).collect()
        };
        let before = places(&scratch);
        pool.install(|| program.run(&inputs, &mut scratch)).unwrap();
        assert_eq!(places(&scratch), before);
        let mut found = vec![f32::NAN; count(self.output())];
        program.output(0, &scratch, &mut found).unwrap();

        let by_rten = both.reference(&inputs).swap_remove(0);
        let [_, filter_count, rows, columns] = self.output();
        for (at, (found, by_rten)) in found.iter().zip(&by_rten).enumerate() {
            let place = match self.last {
                true => {
                    let (place, filter) = (at / filter_count, at % filter_count);
                    [place / columns / rows, filter, place / columns % rows, place % columns]
                }
                false => {
                    let (place, column) = (at / columns, at % columns);
                    [place / rows / filter_count, place / rows % filter_count, place % rows, column]
                }
            };
            let [sum, size] = self.reference(&x, &filters, &bias, place);
            assert!(found.is_finite());
            assert!(
                (f64::from(*found) - sum).abs() <= 1e-6 * (1.0 + size),
                "{self:?} {place:?}: {found}, not {sum}"
            );
            let off = f64::from((found - by_rten).abs());
            assert!(off <= 1e-5 * size.max(1.0), "{self:?} {place:?}: {found}, by rten {by_rten}");
        }
    }
}

#[test]
fn convolutions_equal_those_of_rten() {
    cases().iter().for_each(Case::check);
}
