//! The layout of a cache: where the row of a position lies, and which positions it holds.

use std::ops::Range;

use half::f16;

use crate::kernels::{all_finite, f32_to_f16};
use qhx_op::{BufferId, DType, GraphId, Host};

/// Form of the rows of a cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rows {
    /// Values as graphs give them.
    Plain,
    /// int8.
    Int8 {
        /// Index of the cache of their scales in [`super::wiring::Wiring::caches`].
        scales: usize,
        /// The byte of 0.
        zero: u8,
    },
    /// The scales of another cache, one a row.
    Scales,
}

/// A cache of `outer` blocks of `capacity` rows of `row` bytes.
#[derive(Debug)]
pub(super) struct Cache {
    pub role: String,
    pub buffer: BufferId,
    pub dtype: DType,
    /// Axis of the position.
    pub axis: usize,
    pub outer: usize,
    pub capacity: usize,
    /// Rows from one block to the next as the buffer is laid out now: `capacity`, or fewer for graphs of a smaller
    /// context.
    pub stride: usize,
    pub row: usize,
    /// For a ring, where the row of position p is in slot p mod `capacity`: the positions that a
    /// token sees, itself included.
    pub window: Option<usize>,
    pub rows: Rows,
}

impl Cache {
    /// The name of the input that reads it.
    pub fn name(&self) -> String {
        match self.rows {
            Rows::Scales => self.role.clone(),
            Rows::Plain | Rows::Int8 { .. } => format!("past_{}", self.role),
        }
    }

    /// True when `rows` rows at `position` have a place.
    pub fn has_room(&self, position: usize, rows: usize) -> bool {
        let end = position.checked_add(rows);
        end.is_some_and(|end| self.window.is_some() || end <= self.capacity)
    }

    /// Rows of a block that hold positions below `end`: all slots of a ring, once they are in use.
    pub fn used(&self, end: usize) -> usize {
        end.min(self.capacity)
    }

    /// The first position that a token at `position` needs, and the first that is held once those
    /// below `written` have been written.
    pub fn needs_and_holds(&self, position: usize, written: usize) -> (usize, usize) {
        let before = self.window.map_or(position, |window| window.saturating_sub(1));
        let holds = match self.window {
            Some(_) => written.saturating_sub(self.capacity),
            None => 0,
        };
        (position.saturating_sub(before), holds)
    }

    /// Lays the first `used` rows of each block out for graphs that read `stride` rows a block.
    pub fn arrange(&mut self, host: &mut Host, stride: usize, used: usize) {
        let (from, to, length) = (self.stride * self.row, stride * self.row, used * self.row);
        if from == to {
            return;
        }
        let bytes = host.bytes_mut(self.buffer);
        let mut shift = |block: usize| {
            bytes.copy_within(block * from..block * from + length, block * to);
        };
        // No block may be written over before it was moved; the first one stays where it is.
        match stride > self.stride {
            true => (1..self.outer).rev().for_each(&mut shift),
            false => (1..self.outer).for_each(&mut shift),
        }
        self.stride = stride;
    }

    /// Bytes of the first `count` rows of a block.
    pub fn range(&self, block: usize, count: usize) -> Range<usize> {
        let start = block * self.stride * self.row;
        start..start + count * self.row
    }

    /// Appends the first `rows` rows of each block of `bytes`, which are the cache's, to `copy`.
    pub fn gather(&self, bytes: &[u8], rows: usize, copy: &mut Vec<u8>) {
        for block in 0..self.outer {
            copy.extend_from_slice(&bytes[self.range(block, rows)]);
        }
    }

    /// Copies rows back that [`Cache::gather`] made one run of.
    pub fn scatter(&self, copy: &[u8], rows: usize, bytes: &mut [u8]) {
        let length = rows * self.row;
        for block in 0..self.outer {
            bytes[self.range(block, rows)]
                .copy_from_slice(&copy[block * length..(block + 1) * length]);
        }
    }

    /// Copies the first `rows` rows of each block of `source`, which has `stride` rows a block, to the
    /// slots of the positions from `position` on. There is room for them, and not more than
    /// `capacity`.
    ///
    /// Inlined, with the ring's case apart: the rows lie far from each other, so the processor's queue
    /// of stores is full of them, and what a call puts on the stack makes it wait.
    #[inline]
    pub fn write(
        &self,
        host: &mut Host,
        source: BufferId,
        stride: usize,
        position: usize,
        rows: usize,
    ) {
        let (source, target) = host.pair(source, self.buffer);
        if self.window.is_some() {
            self.write_ring(source, stride, position, target, rows);
        } else {
            self.copy(source, stride, 0, target, position, rows);
        }
    }

    /// Same as [`Cache::write`], for rows of f32 and a cache of f16.
    pub fn write_f16(
        &self,
        host: &mut Host,
        source: BufferId,
        stride: usize,
        position: usize,
        rows: usize,
    ) {
        let (source, target) = host.pair(source, self.buffer);
        let source: &[f32] = bytemuck::cast_slice(source);
        let target: &mut [f16] = bytemuck::cast_slice_mut(target);
        let width = self.row / size_of::<f16>();
        for (from, slot, count) in self.runs(position, rows) {
            for block in 0..self.outer {
                let (from, to) = (block * stride + from, block * self.stride + slot);
                let target = &mut target[to * width..][..count * width];
                f32_to_f16(&source[from * width..][..count * width], target);
            }
        }
    }

    #[inline(never)]
    fn write_ring(
        &self,
        source: &[u8],
        stride: usize,
        position: usize,
        target: &mut [u8],
        rows: usize,
    ) {
        for (from, slot, count) in self.runs(position, rows) {
            self.copy(source, stride, from, target, slot, count);
        }
    }

    /// Runs of `rows` rows for the positions from `position` on: for each its first row, its first slot and its length.
    /// Rows that do not fit a ring up to its end continue at the first slot.
    pub fn runs(&self, position: usize, rows: usize) -> [(usize, usize, usize); 2] {
        let (slot, head) = match self.window {
            Some(_) => {
                let slot = position % self.capacity;
                (slot, rows.min(self.capacity - slot))
            }
            None => (position, rows),
        };
        [(0, slot, head), (head, 0, rows - head)]
    }

    /// Copies `count` rows of each block from row `from` to slot `to`.
    #[inline]
    fn copy(
        &self,
        source: &[u8],
        stride: usize,
        from: usize,
        target: &mut [u8],
        to: usize,
        count: usize,
    ) {
        let bytes = count * self.row;
        // By index: cutting both into chunks divides their lengths, which took longer than the copies.
        for block in 0..self.outer {
            let (from, to) = (block * stride + from, block * self.stride + to);
            let (from, to) = (from * self.row, to * self.row);
            target[to..to + bytes].copy_from_slice(&source[from..from + bytes]);
        }
    }
}

/// A graph's new rows of a cache.
#[derive(Debug)]
pub(super) struct Append {
    pub group: usize,
    pub graph: GraphId,
    pub output: usize,
    pub new: BufferId,
    /// Index into [`super::wiring::Wiring::caches`].
    pub cache: usize,
    /// Rows that the graph gives in one execution.
    pub rows: usize,
    /// Rows of the cache that the graph reads, in each block; none where it reads no cache.
    pub reads: Option<usize>,
    /// Type of the new rows' values, and bytes of a row: the cache's, unless it has its rows as int8.
    pub dtype: DType,
    pub row: usize,
}

impl Append {
    /// True when no value of the first `count` new rows is NaN or infinite.
    #[inline]
    pub fn is_finite(&self, host: &Host, cache: &Cache, count: usize) -> bool {
        let source = host.bytes(self.new);
        let block = self.rows * self.row;
        if count == self.rows {
            return all_finite(&source[..cache.outer * block], self.dtype);
        }
        (0..cache.outer)
            .all(|i| all_finite(&source[i * block..i * block + count * self.row], self.dtype))
    }
}
