//! Layers of integers: `weight = (integer − zero point) · scale`.

use std::sync::Arc;

use qhx_base::Result;
use qhx_graph::weight::{Reordered, RowSource, dequantize_blocks};
use qhx_types::quantized::{BLOCK, Bits, QuantizedForm, QuantizedMut};

use super::fields::Fields;
use super::marlin::Tiles;
use super::part::{Numbers, Part};
use super::{Layer, Matrix};

/// Layout of the integers of `[outputs, inputs]`.
#[derive(Debug, Clone)]
pub(super) enum Values {
    /// A line for each output.
    ByOutput(Fields),
    /// A line for each input.
    ByInput(Fields),
    Tiles(Tiles),
    /// Bytes with a sign, output by output.
    Bytes(Part),
    /// Numbers of values in a table.
    Table(Fields, [i8; 16]),
}

/// Layout of the zero points of `[outputs, groups]`.
#[derive(Debug, Clone)]
pub(super) enum Points {
    /// The middle of the range.
    Middle,
    /// A line for each output.
    ByOutput(Fields),
    /// A line for each group.
    ByGroup(Fields),
    /// Integers with a sign, to be added to the middle of the range.
    Signed(Numbers),
}

/// Assignment of inputs to groups.
#[derive(Debug, Clone)]
pub(super) enum Groups {
    /// Neighbours.
    Plain,
    /// By importance (`desc_act`): the group of each input, and the inputs in the order in which groups are neighbours.
    Ordered { of: Arc<[u32]>, order: Arc<[u32]> },
}

/// A quantized layer's weight `[outputs, inputs]`.
#[derive(Debug)]
pub(super) struct Integers {
    pub name: &'static str,
    /// Outputs, inputs.
    pub shape: [usize; 2],
    pub values: Values,
    /// Bits of an integer in the file.
    pub bits: usize,
    pub points: Points,
    pub scales: Numbers,
    /// Inputs of a group.
    pub group: usize,
    pub groups: Groups,
    /// One of the zero points is not in the middle of the range.
    pub offsets: bool,
}

impl Integers {
    /// The same with [`Integers::offsets`] as the zero points are.
    pub fn looked_at(self) -> Self {
        let [outputs, inputs] = self.shape;
        let groups = inputs / self.group.max(1);
        let middle = |output: usize| (0..groups).all(|group| self.offset(output, group) == 0.0);
        let offsets = !matches!(self.points, Points::Middle) && !(0..outputs).all(middle);
        Self { offsets, ..self }
    }

    /// Offset that turns an integer of the file into a signed one.
    fn middle(&self) -> u8 {
        match self.values {
            Values::Bytes(_) | Values::Table(..) => 0,
            _ => 1 << (self.bits - 1),
        }
    }

    fn form(&self) -> QuantizedForm {
        let bits = if self.bits > 4 { Bits::Eight } else { Bits::Four };
        QuantizedForm { bits, block: self.group, offsets: self.offsets }
    }

    /// True where the CPU multiplies blocks of this length, too.
    fn is_kept(&self) -> bool {
        self.group.is_multiple_of(BLOCK) || self.group == self.shape[1]
    }

    /// Less the zero point.
    fn offset(&self, output: usize, group: usize) -> f32 {
        let middle = f32::from(self.middle());
        match &self.points {
            Points::Middle => 0.0,
            Points::ByOutput(fields) => middle - f32::from(fields.get(output, group)),
            Points::ByGroup(fields) => middle - f32::from(fields.get(group, output)),
            Points::Signed(numbers) => 0.0 - numbers.get(output, group),
        }
    }

    /// The integers of whole rows, with a sign.
    fn integers(&self, first: usize, out: &mut [i8]) {
        let [_, inputs] = self.shape;
        let middle = self.middle();
        let mut stored = vec![0u8; out.len()];
        let each = |stored: &mut [u8], get: &dyn Fn(usize, usize) -> u8| {
            for (row, stored) in stored.chunks_exact_mut(inputs.max(1)).enumerate() {
                stored.iter_mut().enumerate().for_each(|(input, to)| *to = get(first + row, input));
            }
        };
        match &self.values {
            Values::ByOutput(fields) | Values::Table(fields, _) => {
                fields.lines(first, inputs, &mut stored);
            }
            Values::ByInput(fields) => each(&mut stored, &|row, input| fields.get(input, row)),
            Values::Tiles(tiles) => each(&mut stored, &|row, input| tiles.get(row, input)),
            Values::Bytes(part) => each(&mut stored, &|row, input| part.byte(row * inputs + input)),
        }
        let table = match &self.values {
            Values::Table(_, table) => Some(table),
            _ => None,
        };
        for (to, stored) in out.iter_mut().zip(stored) {
            *to = match table {
                Some(table) => table.get(usize::from(stored & 15)).copied().unwrap_or(0),
                None => stored.wrapping_sub(middle).cast_signed(),
            };
        }
    }
}

impl Layer for Integers {
    fn name(&self) -> &'static str {
        self.name
    }

    fn shape(&self) -> [usize; 2] {
        self.shape
    }

    fn has_integers(&self) -> bool {
        self.is_kept()
    }

    fn block_form(&self) -> Option<QuantizedForm> {
        Some(self.form()).filter(|_| self.is_kept() && matches!(self.groups, Groups::Plain))
    }

    fn nearest_form(&self) -> Option<QuantizedForm> {
        let rounded = QuantizedForm::symmetric(Bits::Eight, BLOCK);
        self.block_form().or(Some(rounded))
    }

    fn read_f32(&self, matrix: &Matrix, first: usize, out: &mut [f32]) -> Result<()> {
        if self.block_form().is_some() {
            return dequantize_blocks(matrix, first, out);
        }
        let [_, inputs] = self.shape;
        let mut integers = vec![0i8; out.len()];
        self.integers(first, &mut integers);
        let count = inputs / self.group.max(1);
        let rows = out.chunks_exact_mut(inputs.max(1)).zip(integers.chunks_exact(inputs.max(1)));
        for (row, (out, integers)) in rows.enumerate() {
            let of_group =
                |group| (self.scales.get(first + row, group), self.offset(first + row, group));
            let numbers: Vec<_> = (0..count).map(of_group).collect();
            for (input, (to, integer)) in out.iter_mut().zip(integers).enumerate() {
                let group = match &self.groups {
                    Groups::Plain => input / self.group.max(1),
                    Groups::Ordered { of, .. } => of.get(input).map_or(0, |group| *group as usize),
                };
                let (scale, offset) = numbers.get(group).copied().unwrap_or((f32::NAN, 0.0));
                *to = (f32::from(*integer) + offset) * scale;
            }
        }
        Ok(())
    }

    fn read_blocks(&self, first: usize, out: QuantizedMut<'_>) -> Result<()> {
        let [_, inputs] = self.shape;
        self.integers(first, out.values);
        let groups = inputs / self.group.max(1);
        let rows = out.values.len() / inputs.max(1);
        let all = || (first..first + rows).flat_map(|row| (0..groups).map(move |g| (row, g)));
        for (to, (row, group)) in out.scales.iter_mut().zip(all()) {
            *to = self.scales.get(row, group);
        }
        for (to, (row, group)) in out.offsets.iter_mut().zip(all()) {
            *to = self.offset(row, group);
        }
        Ok(())
    }

    fn reordered(&self, matrix: &Matrix) -> Option<Reordered> {
        let Groups::Ordered { order, .. } = &self.groups else { return None };
        let form = self.form();
        let source = InOrder { matrix: matrix.clone(), order: Arc::clone(order), form };
        self.is_kept().then(|| Reordered { source: Arc::new(source), order: Arc::clone(order) })
    }
}

/// A matrix whose columns are in the order in which groups are neighbours.
#[derive(Debug)]
struct InOrder {
    matrix: Matrix,
    order: Arc<[u32]>,
    form: QuantizedForm,
}

impl InOrder {
    /// Brings columns into this order.
    fn reorder<T: Copy>(&self, values: &mut [T]) {
        let mut stored = Vec::new();
        for row in values.chunks_exact_mut(self.order.len().max(1)) {
            stored.clear();
            stored.extend_from_slice(row);
            for (to, from) in row.iter_mut().zip(&*self.order) {
                *to = stored.get(*from as usize).copied().unwrap_or(*to);
            }
        }
    }
}

impl RowSource for InOrder {
    fn name(&self) -> &str {
        self.matrix.name()
    }

    fn shape(&self) -> [usize; 2] {
        self.matrix.shape()
    }

    fn stored_dtype(&self) -> qhx_types::DType {
        self.matrix.stored_dtype()
    }

    fn read_f32(&self, first: usize, out: &mut [f32]) -> Result<()> {
        self.matrix.read_f32(first, out)?;
        self.reorder(out);
        Ok(())
    }

    fn block_form(&self) -> Option<QuantizedForm> {
        Some(self.form)
    }

    fn read_blocks(&self, first: usize, out: QuantizedMut<'_>) -> Result<()> {
        let mut out = out;
        self.matrix.read_stored(first, out.reborrow())?;
        self.reorder(out.values);
        Ok(())
    }
}

/// The groups of `inputs` inputs that `g_idx` declares. Errors when it is no permutation of groups of `group`.
pub(super) fn groups(
    name: &str,
    part: &Part,
    inputs: usize,
    group: usize,
) -> std::result::Result<Groups, String> {
    if part.dtype != safetensors::Dtype::I32 || part.shape != [inputs] {
        return Err(format!(
            "tensor {name} is {:?} of the shape {:?}, expected I32 of [{inputs}]",
            part.dtype, part.shape
        ));
    }
    let of: Arc<[u32]> = part.words(0).collect();
    // AutoGPTQ writes -1 where it has no order.
    if of.iter().all(|group| *group == u32::MAX) {
        return Ok(Groups::Plain);
    }
    let count = inputs / group.max(1);
    let mut members = vec![0usize; count];
    for (input, of) in of.iter().enumerate() {
        let Some(members) = members.get_mut(*of as usize) else {
            let of = of.cast_signed();
            return Err(format!(
                "{name}: input {input} is of group {of}, expected 0 to {}",
                count.saturating_sub(1)
            ));
        };
        *members += 1;
    }
    if let Some(odd) = members.iter().position(|members| *members != group) {
        let found = members.get(odd).copied().unwrap_or(0);
        return Err(format!(
            "{name}: group {odd} has {found} inputs, expected {group}: this is no permutation"
        ));
    }
    if of.is_sorted() {
        return Ok(Groups::Plain);
    }
    let mut order: Vec<u32> = (0..inputs as u32).collect();
    order.sort_by_key(|input| of.get(*input as usize).copied());
    Ok(Groups::Ordered { of, order: Arc::from(order) })
}
