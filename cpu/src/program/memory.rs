//! The memory of a program: which instruction reads and writes what, and which values share a place.

use std::collections::HashMap;

use super::attend::Attend;
use super::compile::Compiler;
use super::view::{Place, View, Walk};
use super::{By, Instruction, Matmul, Program, Table};
use crate::options::Activations;
use crate::weights::Floats;

impl Compiler<'_> {
    /// Puts values into the memory of others that nobody reads any more.
    pub(super) fn finish(mut self, outputs: &[View]) -> Option<Program> {
        self.release_constants(outputs);
        let mut last = vec![0; self.buffers.len()];
        for (at, instruction) in self.instructions.iter_mut().enumerate() {
            instruction.reads(|place| {
                if let Place::Buffer(buffer) = place {
                    last[*buffer] = at;
                }
            });
        }
        for output in outputs {
            if let Place::Buffer(buffer) = output.place {
                last[buffer] = usize::MAX;
            }
        }
        let mut memory: Vec<usize> = Vec::new();
        let mut free: Vec<usize> = Vec::new();
        let mut places: Vec<Option<usize>> = vec![None; self.buffers.len()];
        let mut ends: HashMap<usize, Vec<usize>> = HashMap::new();
        for (at, instruction) in self.instructions.iter_mut().enumerate() {
            instruction.reads(|place| {
                if let Place::Buffer(buffer) = place
                    && let Some(moved) = places.get(*buffer).copied().flatten()
                {
                    *buffer = moved;
                }
            });
            instruction.writes(|out| {
                let place = *places[*out].get_or_insert_with(|| {
                    let size = self.buffers[*out];
                    // What stays to the end takes memory of its own size. Others take the nearest that is neither
                    // much too large nor much too small.
                    let most = if last[*out] == usize::MAX { size } else { 2 * size };
                    let near = |&index: &usize| {
                        let found: usize = memory[free[index]];
                        found <= most && 2 * found > size && (most > size || found == size)
                    };
                    let fits = |&index: &usize| {
                        let found = memory[free[index]];
                        (found < size, found.abs_diff(size))
                    };
                    let best = (0..free.len()).filter(near).min_by_key(fits);
                    let place = best.map_or_else(
                        || {
                            memory.push(0);
                            memory.len() - 1
                        },
                        |index| free.swap_remove(index),
                    );
                    memory[place] = memory[place].max(size);
                    ends.entry(last[*out].max(at)).or_default().push(place);
                    place
                });
                *out = place;
            });
            free.extend(ends.remove(&at).unwrap_or_default());
        }
        let mut walks = Vec::with_capacity(outputs.len());
        for output in outputs {
            let mut view = output.clone();
            if let Place::Buffer(buffer) = &mut view.place {
                *buffer = (*places.get(*buffer)?)?;
            }
            walks.push(Walk::new([&view])?);
        }
        let Self { instructions, constants, buffers, .. } = self;
        let elements = buffers.iter().fold(0, |all: u64, size| all.saturating_add(*size as u64));
        let matmuls = instructions.iter().flat_map(|one| match one {
            Instruction::Matmuls(all) => all.as_slice(),
            _ => &[],
        });
        let work = matmuls.fold(elements, |all, one| all.saturating_add(one.work()));
        let work = instructions.iter().fold(work, |all, one| match one {
            Instruction::Attend { attend, .. } => all.saturating_add(attend.shape.work()),
            Instruction::Conv { shape, .. } => all.saturating_add(shape.work()),
            _ => all,
        });
        Some(Program {
            instructions,
            constants,
            buffers: memory,
            results: walks,
            work,
            // The smallest error, until [`LoadedModel`](crate::model::LoadedModel) says another one.
            activations: Activations::Int16,
            inputs: Vec::new(),
            outputs: Vec::new(),
        })
    }

    /// Frees constants that only the compiler has read.
    fn release_constants(&mut self, outputs: &[View]) {
        let mut read = vec![false; self.constants.len()];
        let mut reads = |place: Place| {
            if let Place::Constant(constant) = place {
                read[constant] = true;
            }
        };
        self.instructions.iter_mut().for_each(|one| one.reads(|place| reads(*place)));
        outputs.iter().for_each(|output| reads(output.place));
        let constants = self.constants.iter_mut().zip(&read).filter(|(_, read)| !**read);
        constants.for_each(|(constant, _)| *constant = Floats::Own(Vec::new()));
    }
}

impl Matmul {
    /// Multiplications.
    pub(super) fn work(&self) -> u64 {
        let count = match &self.by {
            By::Stored(weights, _) => self.x.len.saturating_mul(weights.rows),
            By::Input { scales, .. } => self.x.len.saturating_mul(scales.len()),
            By::Heads { shape, k, .. } => shape.iter().fold(*k, |all, n| all.saturating_mul(*n)),
        };
        count as u64
    }

    /// True if a single row is multiplied with stored weights; `None` where nothing stored is.
    pub(super) fn stored_row(&self) -> Option<bool> {
        match &self.by {
            By::Stored(weights, _) => Some(self.x.len == weights.columns),
            By::Input { .. } | By::Heads { .. } => None,
        }
    }

    pub(super) fn reads(&self, place: Place) -> bool {
        let by = match &self.by {
            By::Heads { b, .. } | By::Input { b, .. } => b.place == place,
            By::Stored(..) => false,
        };
        by || self.x.place == place
    }
}

impl Instruction {
    fn reads(&mut self, mut f: impl FnMut(&mut Place)) {
        match self {
            Self::Binary { walk, .. } | Self::IntBinary { walk, .. } => {
                walk.places.iter_mut().for_each(f)
            }
            Self::Unary { walk, .. }
            | Self::Convert { walk, .. }
            | Self::Part { walk, .. }
            | Self::Pad { walk, .. } => {
                walk.places.iter_mut().for_each(f);
            }
            Self::Reduce { x, .. } | Self::Softmax { x, .. } => f(&mut x.place),
            Self::RmsNorm { x, weight, .. } => {
                [x, weight].into_iter().for_each(|one| f(&mut one.place));
            }
            Self::LayerNorm { x, weight, bias, .. } => {
                [x, weight, bias].into_iter().for_each(|one| f(&mut one.place));
            }
            Self::Gather { table, indices, .. } => {
                if let Table::Values(values) = table {
                    f(&mut values.place);
                }
                f(&mut indices.place);
            }
            Self::Conv { x, filters, bias, .. } => {
                f(&mut x.place);
                f(&mut filters.place);
                if let Some(bias) = bias {
                    f(&mut bias.place);
                }
            }
            Self::See { mask, .. } => f(&mut mask.place),
            Self::Attend { attend, .. } => {
                let Attend { q, keys, values, scales, mask, .. } = &mut **attend;
                f(&mut q.place);
                f(&mut mask.place);
                let scales = scales.iter_mut().flat_map(|scales| &mut scales.rows);
                keys.iter_mut().chain(values).chain(scales).for_each(|one| f(&mut one.place));
            }
            Self::Matmuls(matmuls) => {
                for matmul in matmuls {
                    f(&mut matmul.x.place);
                    if let By::Heads { b, .. } | By::Input { b, .. } = &mut matmul.by {
                        f(&mut b.place);
                    }
                }
            }
        }
    }

    fn writes(&mut self, mut f: impl FnMut(&mut usize)) {
        match self {
            Self::Binary { out, .. }
            | Self::IntBinary { out, .. }
            | Self::Unary { out, .. }
            | Self::Convert { out, .. }
            | Self::Part { out, .. }
            | Self::Pad { out, .. }
            | Self::Reduce { out, .. }
            | Self::Softmax { out, .. }
            | Self::RmsNorm { out, .. }
            | Self::LayerNorm { out, .. }
            | Self::Gather { out, .. }
            | Self::Conv { out, .. }
            | Self::Attend { out, .. } => f(out),
            Self::See { .. } => {}
            Self::Matmuls(matmuls) => matmuls.iter_mut().for_each(|matmul| f(&mut matmul.out)),
        }
    }
}
