//! Causal masks that all layers of a step share, within a sliding window where the model has one.

use std::ops::Range;

use half::f16;
use qhx_op::fill::HIDDEN;
use qhx_op::{BufferId, DType, Error, GraphId, Host, Port, Result};

/// The input `cmask` of graphs that take one token, over caches of `capacity` rows.
///
/// A mask one wider than the cache has the current token in its last slot; one as wide as the cache has
/// it at its position. Open slots are 0.
#[derive(Debug)]
pub(crate) struct StepMask {
    buffer: BufferId,
    dtype: DType,
    width: usize,
    current_is_last: bool,
    /// Slots that are open.
    open: Range<usize>,
    window: usize,
}

/// Binds one buffer to the input `cmask` of all graphs, which must be alike.
fn shared(
    host: &mut Host,
    graphs: &[GraphId],
    elements: &[usize],
) -> Result<(BufferId, DType, usize)> {
    let mut found: Option<(BufferId, DType, usize)> = None;
    for &graph in graphs {
        let port = Port::Input(host.graph(graph).require_input("cmask")?);
        let dtype = host.require_float(graph, port)?;
        let tensor = host.tensor(graph, port);
        let count = tensor.elements();
        if !elements.contains(&count) || found.is_some_and(|(_, d, c)| (d, c) != (dtype, count)) {
            return Err(Error::graph(format!(
                "graph {:?}: tensor {tensor}: expected {elements:?} values, the same in every layer",
                host.graph(graph).name
            )));
        }
        match found {
            Some((buffer, ..)) => host.bind(graph, port, buffer, 0)?,
            None => found = Some((host.allocate_for(graph, port)?, dtype, count)),
        }
    }
    found.ok_or_else(|| Error::manifest("manifest /plan/params: a step without graphs"))
}

fn set(host: &mut Host, buffer: BufferId, dtype: DType, range: Range<usize>, open: bool) {
    match dtype {
        DType::F16 => {
            host.f16s_mut(buffer)[range].fill(f16::from_f32(if open { 0.0 } else { HIDDEN }));
        }
        _ => host.f32s_mut(buffer)[range].fill(if open { 0.0 } else { HIDDEN }),
    }
}

impl StepMask {
    /// Binds the mask of all graphs. `window`: how many positions a token sees, itself included.
    pub fn bind(
        host: &mut Host,
        graphs: &[GraphId],
        capacity: usize,
        window: Option<usize>,
    ) -> Result<Self> {
        let (buffer, dtype, width) = shared(host, graphs, &[capacity, capacity + 1])?;
        set(host, buffer, dtype, 0..width, false);
        let current_is_last = width == capacity + 1;
        if current_is_last {
            set(host, buffer, dtype, capacity..width, true);
        }
        let window = window.unwrap_or(usize::MAX);
        Ok(Self { buffer, dtype, width, current_is_last, open: 0..0, window })
    }

    /// Fills the mask for the token at `position`. Only slots that change are written.
    pub fn fill(&mut self, host: &mut Host, position: usize) {
        let end = if self.current_is_last { position } else { position + 1 };
        let wanted = (position + 1).saturating_sub(self.window).min(end)..end;
        debug_assert!(end <= self.width, "the caller has checked the room");
        let old = std::mem::replace(&mut self.open, wanted.clone());
        let mut write = |range: Range<usize>, open| {
            if range.start < range.end {
                set(host, self.buffer, self.dtype, range, open);
            }
        };
        write(old.start..old.end.min(wanted.start), false);
        write(old.start.max(wanted.end)..old.end, false);
        write(wanted.start..wanted.end.min(old.start), true);
        write(wanted.start.max(old.end)..wanted.end, true);
        if old.end <= wanted.start || wanted.end <= old.start {
            write(wanted, true);
        }
    }
}

/// Binds the input `cmask` `[rows, rows]` of graphs that take a prompt from its first token on, and
/// fills it once: every token sees those before it, within the window, and itself.
pub(crate) fn bind_prompt_mask(
    host: &mut Host,
    graphs: &[GraphId],
    rows: usize,
    window: Option<usize>,
) -> Result<()> {
    let (buffer, dtype, _) = shared(host, graphs, &[rows * rows])?;
    let window = window.unwrap_or(usize::MAX);
    set(host, buffer, dtype, 0..rows * rows, false);
    for row in 0..rows {
        let first = (row + 1).saturating_sub(window);
        set(host, buffer, dtype, row * rows + first..row * rows + row + 1, true);
    }
    Ok(())
}
