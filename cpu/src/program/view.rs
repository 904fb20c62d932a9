//! Values of a program: where they lie, and in which order they are read.

/// The memory of a value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Place {
    /// An input of the graph.
    Input(usize),
    Constant(usize),
    Buffer(usize),
}

/// Elements of a place, from `start` on. A step of 0 reads the same element again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct View {
    pub(super) place: Place,
    pub(super) start: usize,
    /// Size and step of each dimension.
    pub(super) dims: Vec<Dim>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Dim {
    pub(super) size: usize,
    pub(super) step: usize,
}

impl View {
    /// All elements of a place, row by row. None where there are more than memory has addresses for.
    pub(super) fn whole(place: Place, shape: &[usize]) -> Option<Self> {
        let mut step = 1usize;
        let mut dims: Vec<Dim> = Vec::with_capacity(shape.len());
        for &size in shape.iter().rev() {
            dims.push(Dim { size, step });
            step = step.checked_mul(size)?;
        }
        dims.reverse();
        Some(Self { place, start: 0, dims })
    }

    pub(super) fn shape(&self) -> Vec<usize> {
        self.dims.iter().map(|dim| dim.size).collect()
    }

    /// Elements that it names, those of steps of 0 several times.
    pub(super) fn len(&self) -> usize {
        self.dims.iter().map(|dim| dim.size).product()
    }

    /// True if its elements lie one after the other.
    pub(super) fn is_dense(&self) -> bool {
        let mut step = 1;
        self.dims.iter().rev().all(|dim| {
            let follows = dim.size == 1 || dim.step == step;
            step *= dim.size;
            follows
        })
    }

    /// The same elements as `shape`, which has as many; none where no steps reach them.
    pub(super) fn reshaped(&self, shape: &[usize]) -> Option<Self> {
        let view = Self { start: self.start, ..Self::whole(self.place, shape)? };
        (self.is_dense() && view.len() == self.len()).then_some(view)
    }

    /// Its elements out of those of its place, row by row.
    pub(super) fn collect(&self, values: &[f32]) -> Option<Vec<f32>> {
        let walk = Walk::new([self])?;
        let mut cursor = walk.cursor(0);
        let mut all = Vec::with_capacity(walk.len);
        if walk.steps == [0] {
            return None;
        }
        for _ in 0..walk.len / walk.inner.max(1) {
            let [from] = cursor.next();
            let row = values.get(from..)?.iter().step_by(walk.steps[0]);
            all.extend(row.take(walk.inner));
        }
        (all.len() == walk.len).then_some(all)
    }

    /// Read as if it had this shape, as in NumPy.
    pub(super) fn broadcast(&self, shape: &[usize]) -> Option<Self> {
        let missing = shape.len().checked_sub(self.dims.len())?;
        let own = std::iter::repeat_n(&Dim { size: 1, step: 0 }, missing).chain(&self.dims);
        let dims = shape.iter().zip(own).map(|(&size, dim)| match dim.size {
            own if own == size => Some(*dim),
            1 => Some(Dim { size, step: 0 }),
            _ => None,
        });
        Some(Self { dims: dims.collect::<Option<_>>()?, ..*self })
    }
}

/// The shape of a result of two operands, as in NumPy.
pub(super) fn common(a: &[usize], b: &[usize]) -> Option<Vec<usize>> {
    let rank = a.len().max(b.len());
    let size =
        |shape: &[usize], at: usize| (at + shape.len()).checked_sub(rank).map_or(1, |at| shape[at]);
    let both = (0..rank).map(|at| match (size(a, at), size(b, at)) {
        (a, b) if a == b => Some(a),
        (1, size) | (size, 1) => Some(size),
        _ => None,
    });
    both.collect()
}

/// Dimensions around a row of a [`Walk`].
const RANK: usize = 8;

/// Order in which the elements of `K` views of one shape are read beside each other: rows of equally spaced elements.
#[derive(Debug)]
pub(super) struct Walk<const K: usize> {
    pub(super) places: [Place; K],
    starts: [usize; K],
    outer: Vec<(usize, [usize; K])>,
    /// Elements of a row.
    pub(super) inner: usize,
    /// From one element of a row to the next.
    pub(super) steps: [usize; K],
    pub(super) len: usize,
}

impl<const K: usize> Walk<K> {
    /// Over views of the same shape. None where it has too many dimensions.
    pub(super) fn new(views: [&View; K]) -> Option<Self> {
        let rank = views.first()?.dims.len();
        let mut dims: Vec<(usize, [usize; K])> = Vec::new();
        for at in 0..rank {
            let size = views[0].dims[at].size;
            let steps = views.map(|view| view.dims[at].step);
            if size == 1 {
                continue;
            }
            match dims.last_mut() {
                // The dimension before goes on where this one ends.
                Some((before, outer)) if *outer == steps.map(|step| step * size) => {
                    *before *= size;
                    *outer = steps;
                }
                _ => dims.push((size, steps)),
            }
        }
        let (inner, steps) = dims.pop().unwrap_or((1, [1; K]));
        let len = views[0].len();
        (dims.len() <= RANK).then(|| Self {
            places: views.map(|view| view.place),
            starts: views.map(|view| view.start),
            outer: dims,
            inner,
            steps,
            len,
        })
    }

    /// Cursor at element `at` of the result: the first of a row, or any element where there is one row.
    pub(super) fn cursor(&self, at: usize) -> Cursor<'_, K> {
        let mut cursor = Cursor { outer: &self.outer, index: [0; RANK], offsets: self.starts };
        if self.outer.is_empty() {
            add(&mut cursor.offsets, &self.steps, at);
            return cursor;
        }
        let mut row = at / self.inner.max(1);
        for (dim, (size, steps)) in self.outer.iter().enumerate().rev() {
            let index = row % size;
            row /= size;
            cursor.index[dim] = index;
            add(&mut cursor.offsets, steps, index);
        }
        cursor
    }

    /// True if a row of the walk begins every `width` elements.
    pub(super) fn begins_rows(&self, width: usize) -> bool {
        self.outer.is_empty() || width.is_multiple_of(self.inner)
    }

    /// Elements of a part of the result that one thread computes: whole rows, about `wanted` elements.
    pub(super) fn part(&self, wanted: usize) -> usize {
        match self.outer.is_empty() {
            true => wanted,
            false => wanted.next_multiple_of(self.inner.max(1)),
        }
    }
}

/// A place in a [`Walk`].
pub(super) struct Cursor<'a, const K: usize> {
    outer: &'a [(usize, [usize; K])],
    index: [usize; RANK],
    offsets: [usize; K],
}

impl<const K: usize> Cursor<'_, K> {
    /// Start of the next row in each place.
    #[inline(always)]
    pub(super) fn next(&mut self) -> [usize; K] {
        let found = self.offsets;
        for (dim, (size, steps)) in self.outer.iter().enumerate().rev() {
            self.index[dim] += 1;
            add(&mut self.offsets, steps, 1);
            if self.index[dim] < *size {
                break;
            }
            self.index[dim] = 0;
            let back = self.offsets.iter_mut().zip(steps);
            back.for_each(|(offset, step)| *offset -= step * size);
        }
        found
    }
}

#[inline(always)]
fn add<const K: usize>(offsets: &mut [usize; K], steps: &[usize; K], times: usize) {
    offsets.iter_mut().zip(steps).for_each(|(offset, step)| *offset += step * times);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn view(start: usize, dims: &[(usize, usize)]) -> View {
        let dims = dims.iter().map(|&(size, step)| Dim { size, step }).collect();
        View { place: Place::Input(0), start, dims }
    }

    /// All elements that a walk reads, from element `from` on.
    fn read(views: [&View; 2], from: usize) -> Vec<[usize; 2]> {
        let walk = Walk::new(views).unwrap();
        let mut cursor = walk.cursor(from);
        let rows = (walk.len - from).div_ceil(walk.inner);
        let rows: Vec<_> = (0..rows).map(|_| cursor.next()).collect();
        let steps = walk.steps;
        let row =
            |[a, b]: [usize; 2]| (0..walk.inner).map(move |n| [a + n * steps[0], b + n * steps[1]]);
        rows.into_iter().flat_map(row).take(walk.len - from).collect()
    }

    #[test]
    fn walks_read_what_the_steps_say() {
        let swapped = view(1, &[(3, 1), (2, 10), (4, 100)]);
        let spread = view(0, &[(3, 0), (2, 1), (4, 0)]);
        let mut expected = Vec::new();
        for (a, b, c) in (0..3).flat_map(|a| (0..8).map(move |bc| (a, bc / 4, bc % 4))) {
            expected.push([1 + a + 10 * b + 100 * c, b]);
        }
        assert_eq!(read([&swapped, &spread], 0), expected);
        // In parts that begin with a row.
        assert_eq!(read([&swapped, &spread], 12), expected[12..]);
        let row = view(5, &[(2, 3), (3, 1)]);
        let walk = Walk::new([&row]).unwrap();
        assert_eq!((walk.inner, walk.outer.len()), (6, 0));
        assert_eq!(walk.cursor(4).next(), [9]);
    }

    #[test]
    fn shapes_that_do_not_fit_are_none() {
        assert_eq!(common(&[2, 1, 3], &[4, 1]), Some(vec![2, 4, 3]));
        assert_eq!(common(&[2], &[3]), None);
        let view = View::whole(Place::Input(0), &[2, 3]).unwrap();
        assert!(view.broadcast(&[3, 2]).is_none());
        assert!(view.reshaped(&[7]).is_none());
        assert_eq!(View::whole(Place::Input(0), &[usize::MAX, 3]), None);
    }
}
