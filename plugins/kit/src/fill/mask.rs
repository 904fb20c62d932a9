//! Causal masks: which positions a token sees, in caches that hold all positions or the last ones.

use std::ops::Range;

pub use qhx_op::MASK_VALUE;

use super::input::FloatInput;
use qhx_op::{GraphId, Host, Port, Result};

/// Value that an additive mask adds to visible scores.
pub(super) const VISIBLE: f32 = 0.0;

/// Which positions a token sees: itself and those before it, all or the last ones of a window.
///
/// ```
/// # use qhx_kit::fill::{CausalMask, StepMask};
/// # use qhx_op::{GraphId, Host, Result};
/// # fn open(host: &mut Host, graphs: &[GraphId]) -> Result<(StepMask, StepMask)> {
/// let full = CausalMask::new(4096).bind(host, graphs, 1)?;
/// let sliding = CausalMask::new(512).named("cmask_local").window(512).ring().bind(host, graphs, 1)?;
/// # Ok((full, sliding))
/// # }
/// ```
#[derive(Debug, Clone, Copy)]
pub struct CausalMask {
    role: &'static str,
    capacity: usize,
    window: usize,
    ring: bool,
}

impl CausalMask {
    /// The mask `cmask` over caches of `capacity` rows, where the row of position p is in slot p.
    /// Without a cache, for graphs that take a prompt from its first token on, `capacity` is 0.
    pub const fn new(capacity: usize) -> Self {
        Self { role: "cmask", capacity, window: usize::MAX, ring: false }
    }

    /// The same for another input, such as `cmask_local`.
    #[must_use]
    pub const fn named(mut self, role: &'static str) -> Self {
        self.role = role;
        self
    }

    /// The same for sliding attention: a token sees `positions` positions, itself included.
    #[must_use]
    pub const fn window(mut self, positions: usize) -> Self {
        self.window = positions;
        self
    }

    /// The same over ring caches, where the row of position p is in slot p mod `capacity`
    /// ([`crate::state::StateCarrier::with_rings`]). Needs a window.
    #[must_use]
    pub const fn ring(mut self) -> Self {
        self.ring = true;
        self
    }

    /// The same for graphs that read no cache.
    pub(crate) const fn without_cache(mut self) -> Self {
        self.capacity = 0;
        self
    }

    /// The same for graphs of a smaller context; a ring stays as it is.
    #[must_use]
    pub(crate) fn within(mut self, capacity: usize) -> Self {
        if !self.ring {
            self.capacity = self.capacity.min(capacity);
        }
        self
    }

    /// Binds the mask of graphs that take `rows` tokens in one step: `rows` rows of `capacity` +
    /// `rows` values, where the last columns are the tokens of the step themselves, or of `capacity`
    /// values, where the graph inserts them into the cache at their slots. Graphs whose masks are
    /// alike read the same buffer; one without this input needs none.
    ///
    /// # Errors
    /// When a mask has another shape, or a ring is too small for the window.
    pub fn bind(self, host: &mut Host, graphs: &[GraphId], rows: usize) -> Result<StepMask> {
        for &graph in graphs {
            self.check(host, graph, rows)?;
        }
        let inputs = FloatInput::bind_all(host, graphs, self.role)?;
        for input in &inputs {
            input.fill(host, MASK_VALUE);
            let width = input.len() / rows.max(1);
            for row in (0..rows).filter(|_| width != self.capacity) {
                let own = row * width + self.capacity;
                let first = (row + 1).saturating_sub(self.window);
                input.set(host, own + first..own + row + 1, VISIBLE);
            }
        }
        Ok(StepMask { mask: self, inputs, rows, filled: None })
    }

    fn check(self, host: &Host, graph: GraphId, rows: usize) -> Result<()> {
        let info = host.graph(graph);
        let Some(port) = info.input(self.role) else { return Ok(()) };
        host.require_float(graph, Port::Input(port))?;
        let tensor = &info.inputs[port];
        let Self { capacity, window, .. } = self;
        let fail = |expected: String| {
            Err(host.misfit(graph, Port::Input(port), format_args!("expected {expected}")))
        };
        let wide = capacity.saturating_add(rows);
        let fits = |width: usize| {
            rows.checked_mul(width) == Some(tensor.elements())
                && (rows == 1 || tensor.width() == width)
        };
        if rows == 0 || !(fits(wide) || fits(capacity)) {
            return fail(format!(
                "{rows} rows of {wide} values (the cache of {capacity} and the tokens of a step) or \
                 {capacity} (the cache)"
            ));
        }
        if window == 0 || self.ring && window == usize::MAX {
            return fail("a window of at least 1 position, from the op".to_owned());
        }
        let inserted = if fits(wide) { 0 } else { rows };
        let need = (window - 1).saturating_add(inserted);
        if self.ring && need > capacity {
            return fail(format!(
                "a ring cache of at least {need} slots for a window of {window} positions, found \
                 {capacity}"
            ));
        }
        Ok(())
    }

    /// Positions before the step, or before the token where the graph inserts the step's rows, that
    /// the token in `row` sees in the cache.
    fn visible(self, step: Filled, row: usize, inserted: bool) -> Range<usize> {
        let end = if inserted { step.position + step.end(row) } else { step.position };
        let end = if self.ring { end } else { end.min(self.capacity) };
        let first = (step.position + row + 1).saturating_sub(self.window);
        let first = if inserted && row < step.prefix() { first.min(step.position) } else { first };
        first.min(end)..end
    }
}

/// A step that a mask is filled for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Filled {
    position: usize,
    /// The first tokens of the step, which see each other.
    together: usize,
    /// They do so however far the window reaches.
    beyond: bool,
}

impl Filled {
    /// The tokens of the step that the token in `row` sees are those before this one, as far as the window reaches.
    fn end(self, row: usize) -> usize {
        if row < self.together { self.together } else { row + 1 }
    }

    /// The first tokens of the step, which see each other beyond the window.
    fn prefix(self) -> usize {
        if self.beyond { self.together } else { 0 }
    }
}

/// The causal mask of all graphs of a step, which [`CausalMask::bind`] makes: 0 where a token may
/// look, [`MASK_VALUE`] elsewhere.
#[derive(Debug)]
pub struct StepMask {
    mask: CausalMask,
    /// One for each size and element type among the graphs.
    inputs: Vec<FloatInput>,
    rows: usize,
    filled: Option<Filled>,
}

impl StepMask {
    /// Fills the mask for a step whose first token is at `position`. Only slots that change are
    /// written.
    pub fn fill(&mut self, host: &mut Host, position: usize) {
        self.fill_together(host, position, 0);
    }

    /// Same as [`StepMask::fill`], but the first `together` tokens of the step also see those behind them, up to the
    /// last of them.
    pub fn fill_together(&mut self, host: &mut Host, position: usize, together: usize) {
        self.refill(host, Filled { position, together: together.min(self.rows), beyond: false });
    }

    /// Same as [`StepMask::fill_together`], but these tokens see each other however far the window reaches.
    pub fn fill_prefix(&mut self, host: &mut Host, position: usize, together: usize) {
        self.refill(host, Filled { position, together: together.min(self.rows), beyond: true });
    }

    fn refill(&mut self, host: &mut Host, step: Filled) {
        let last = self.filled.replace(step);
        if last == Some(step) {
            return;
        }
        let seen = last.map_or(0, |last| last.together);
        let prefix = last.map_or(0, Filled::prefix);
        for input in &self.inputs {
            let width = input.len() / self.rows;
            let inserted = width == self.mask.capacity;
            for row in 0..self.rows {
                let old = last.map_or(0..0, |last| self.mask.visible(last, row, inserted));
                let new = self.mask.visible(step, row, inserted);
                // On a ring, a position that appears may be in the slot of one that disappears.
                for gone in without(&old, &new) {
                    self.set(host, input, row * width, gone, MASK_VALUE);
                }
                for come in without(&new, &old) {
                    self.set(host, input, row * width, come, VISIBLE);
                }
                // What binding opened up to the token itself stays.
                let own = row * width + self.mask.capacity;
                let (old, new) = (seen.max(row + 1), step.end(row).max(row + 1));
                if !inserted && row < seen.max(step.together) && old != new {
                    input.set(host, own + row + 1..own + old, MASK_VALUE);
                    input.set(host, own + row + 1..own + new, VISIBLE);
                }
                let (was, is) = (row < prefix, row < step.prefix());
                if !inserted && was != is {
                    let beyond = own..own + (row + 1).saturating_sub(self.mask.window);
                    input.set(host, beyond, if is { VISIBLE } else { MASK_VALUE });
                }
            }
        }
    }

    /// True when no graph has such a mask.
    pub fn is_empty(&self) -> bool {
        self.inputs.is_empty()
    }

    /// Writes one value at the slots of positions, at most as many as there are slots.
    fn set(
        &self,
        host: &mut Host,
        input: &FloatInput,
        first: usize,
        positions: Range<usize>,
        value: f32,
    ) {
        let count = positions.len();
        if count == 0 {
            return;
        }
        let slot =
            if self.mask.ring { positions.start % self.mask.capacity } else { positions.start };
        let head = count.min(self.mask.capacity - slot);
        input.set(host, first + slot..first + slot + head, value);
        input.set(host, first..first + count - head, value);
    }
}

/// Parts of `a` that are not in `b`, before and after it.
fn without(a: &Range<usize>, b: &Range<usize>) -> [Range<usize>; 2] {
    [a.start..a.end.min(b.start), a.start.max(b.end)..a.end]
}
