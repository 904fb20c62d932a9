//! Which golden steps fill the graphs of a decoder: prompts of more than one chunk, and steps at the far end of a
//! context.

use qhx_base::Result;
use qhx_core::engine::Model;
use qhx_core::op::Segment;
use serde_json::Value;

/// First bytes of the kit's states of a host-op: see `plugins/kit/src/state/bytes.rs`.
const MAGIC: &[u8; 8] = b"qhxkit\0\x01";
/// Offset of the description of a state.
const HEAD: usize = 16;

/// Sizes of a decoder's graphs.
#[derive(Debug, Default)]
pub(super) struct Sizes {
    /// Tokens that prefill graphs take at once, the most first.
    pub prefill: Vec<usize>,
    /// Tokens that graphs without caches take at once, as an encoder's, the fewest first.
    pub texts: Vec<usize>,
    /// Positions of the contexts that have graphs, ascending.
    pub contexts: Vec<usize>,
}

impl Sizes {
    pub fn of(model: &Model) -> Result<Self> {
        let mut sizes = Self::default();
        for graph in model.graphs()? {
            let Some(x) = graph.inputs.iter().find(|input| input.name == "x") else { continue };
            let cached = graph.inputs.iter().any(|input| input.name.starts_with("past_"));
            match x.shape[..] {
                [rows, _] if cached && rows > 1 => sizes.prefill.push(rows),
                [rows, _] if !cached => sizes.texts.push(rows),
                _ => {}
            }
        }
        let params = &model.manifest().params;
        let contexts = params.rest.get("contexts").and_then(Value::as_array);
        let contexts = contexts.into_iter().flatten().filter_map(Value::as_u64);
        sizes.contexts.extend(contexts.map(|positions| positions as usize));
        sizes.contexts.push(model.info().max_ctx);
        for list in [&mut sizes.prefill, &mut sizes.texts, &mut sizes.contexts] {
            list.sort_unstable();
            list.dedup();
        }
        sizes.prefill.reverse();
        Ok(sizes)
    }
}

/// Tokens that graphs with caches take at once which were not executed so far.
pub(super) fn idle_widths(model: &Model) -> Result<Vec<usize>> {
    let stats = model.graph_stats();
    let idle = |name: &str| stats.iter().any(|graph| graph.graph == name && graph.executions == 0);
    let graphs = model.graphs()?;
    let widths = graphs.iter().filter(|graph| idle(&graph.name)).filter_map(|graph| {
        let x = graph.inputs.iter().find(|input| input.name == "x")?;
        let cached = graph.inputs.iter().any(|input| input.name.starts_with("past_"));
        x.shape.first().copied().filter(|_| cached)
    });
    Ok(widths.collect())
}

/// True where a graph was not executed so far.
pub(super) fn is_idle(model: &Model) -> bool {
    model.graph_stats().iter().any(|graph| graph.executions == 0)
}

/// Graphs that were executed so far.
pub(super) fn filled(model: &Model) -> usize {
    model.graph_stats().iter().filter(|graph| graph.executions > 0).count()
}

/// True when states of the model can be [`stretched`]: those of a host-op of the kit, which keeps caches and states.
pub(super) fn stretches(model: &mut Model) -> bool {
    let tokens = super::tokens(model, super::SHORT.0);
    let op = model.op_mut();
    let state = op.prefill(&[Segment::Tokens(&tokens)]).and_then(|()| op.export_state());
    let stretches = state.is_ok_and(|state| stretched(&state, tokens.len() + 1).is_some());
    model.reset().is_ok() && stretches
}

/// A state that the op exported, with its caches' rows repeated until they hold `position` positions. None where it is
/// not of the kit's form, or holds more already.
pub(super) fn stretched(state: &[u8], position: usize) -> Option<Vec<u8>> {
    let rest = state.strip_prefix(MAGIC)?;
    let (length, rest) = rest.split_first_chunk::<8>()?;
    let (description, mut rest) =
        rest.split_at_checked(usize::try_from(u64::from_le_bytes(*length)).ok()?)?;
    let mut description: Value = serde_json::from_slice(description).ok()?;
    let size = |value: &Value| value.as_u64().and_then(|n| usize::try_from(n).ok());
    let before = size(&description["position"]).filter(|before| (2..=position).contains(before))?;
    let layouts = description["tensors"].as_array()?.iter().map(|tensor| {
        let layout = tensor["layout"].as_array()?;
        let slots = if tensor["ring"].is_null() { usize::MAX } else { size(&tensor["ring"])? };
        Some(Layout { blocks: size(layout.first()?)?, row: size(layout.get(1)?)?, slots })
    });
    let layouts: Vec<Layout> = layouts.collect::<Option<_>>()?;
    // Caches come first. Only their length says where the states that are replaced as a whole begin.
    let length = |caches: usize| {
        let parts = layouts.iter().enumerate();
        let mut parts = parts.map(|(at, layout)| layout.bytes(at < caches, before));
        parts.try_fold(0usize, |sum, bytes| sum.checked_add(bytes?))
    };
    let caches = (0..=layouts.len()).find(|caches| length(*caches) == Some(rest.len()))?;
    let mut tensors = Vec::new();
    for (at, layout) in layouts.iter().enumerate() {
        let (part, behind) = rest.split_at_checked(layout.bytes(at < caches, before)?)?;
        rest = behind;
        if at >= caches {
            tensors.extend_from_slice(part);
            continue;
        }
        let wanted = position.min(layout.slots).checked_mul(layout.row)?;
        for block in part.chunks_exact(before.min(layout.slots).checked_mul(layout.row)?.max(1)) {
            tensors.extend(block.iter().copied().cycle().take(wanted));
        }
    }
    (description["position"], description["written"]) = (position.into(), position.into());
    let description = description.to_string();
    let mut out = Vec::with_capacity(HEAD + description.len() + tensors.len());
    out.extend_from_slice(MAGIC);
    out.extend_from_slice(&(description.len() as u64).to_le_bytes());
    out.extend_from_slice(description.as_bytes());
    out.extend_from_slice(&tensors);
    rest.is_empty().then_some(out)
}

/// Layout of a tensor of a state.
struct Layout {
    blocks: usize,
    /// Bytes of a row of a cache, or of a whole state.
    row: usize,
    /// Slots of a ring.
    slots: usize,
}

impl Layout {
    /// Bytes at a position.
    fn bytes(&self, cache: bool, position: usize) -> Option<usize> {
        let rows = if cache { position.min(self.slots) } else { 1 };
        self.blocks.checked_mul(rows)?.checked_mul(self.row)
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn state(position: usize, tensors: &[u8]) -> Vec<u8> {
        let tensor = |blocks: usize, row: usize, ring: Value| json!({"role": "x", "dtype": "f16", "layout": [blocks, row], "ring": ring});
        let all = [tensor(2, 1, Value::Null), tensor(1, 2, 3.into()), tensor(1, 4, Value::Null)];
        let description =
            json!({"position": position, "written": position, "tensors": all}).to_string();
        [&MAGIC[..], &(description.len() as u64).to_le_bytes()[..], description.as_bytes(), tensors]
            .concat()
    }

    #[test]
    fn rows_of_caches_are_repeated_and_states_stay() {
        // Two blocks of two rows, a ring of three slots with two rows, and a state of four bytes.
        let before = state(2, &[1, 2, 11, 12, 3, 3, 4, 4, 9, 8, 7, 6]);
        let expected = [1, 2, 1, 2, 1, 11, 12, 11, 12, 11, 3, 3, 4, 4, 3, 3, 9, 8, 7, 6];
        assert_eq!(stretched(&before, 5).as_deref(), Some(&state(5, &expected)[..]));
        assert_eq!(stretched(&before, 1), None, "it holds more");
        assert_eq!(stretched(&before[..before.len() - 1], 5), None);
        assert_eq!(stretched(b"another form", 5), None);
    }
}
