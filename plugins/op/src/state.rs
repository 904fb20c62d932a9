//! The state carrier: KV caches and recurrent states that graphs take in and give back.
//!
//! Tensors are paired by role within a graph:
//!
//! - `past_X` in, `new_X` out: the graph gives the new rows of a cache, which are written at the
//!   current position along the one axis in which both shapes differ (*append*).
//! - `past_X` in, `present_X` out: the graph gives the whole next state; the two buffers change
//!   places and nothing is copied (*swap*).
//!
//! A graph that gives `new_X` without taking `past_X`, such as one that consumes a prompt from its
//! first token on, writes into the cache that another graph has under the same role.
//!
//! A step is committed once all of its graphs have executed; until then the state is as before.
//!
//! Rows of a cache stay when positions are forgotten, and a mask hides them by adding to their scores.
//! That works for numbers only: NaN and infinity show through any mask. So a row that has one never
//! gets into a cache; the step that gave it fails.

use std::ops::Range;

use crate::kernels::all_finite;
use crate::{BufferId, DType, Error, ErrorCode, GraphId, Host, OpInfo, Port, Result, SnapshotId};

/// A cache that grows by rows.
#[derive(Debug)]
struct Append {
    group: usize,
    graph: GraphId,
    output: usize,
    past: BufferId,
    new: BufferId,
    /// Index into [`StateCarrier::caches`].
    cache: usize,
    /// Rows that the graph gives in one execution.
    rows: usize,
}

/// Layout of a cache: `outer` blocks of `capacity` rows of `row` bytes.
#[derive(Debug)]
struct Cache {
    role: String,
    buffer: BufferId,
    dtype: DType,
    /// Axis of the position.
    axis: usize,
    outer: usize,
    capacity: usize,
    row: usize,
}

/// A state that is replaced in each step.
#[derive(Debug)]
struct Swap {
    role: String,
    group: usize,
    graph: GraphId,
    input: usize,
    output: usize,
    state: usize,
}

/// The two buffers of a replaced state. `current` is what the next step reads.
#[derive(Debug)]
struct Replaced {
    role: String,
    current: BufferId,
    next: BufferId,
}

#[derive(Debug, Default)]
struct Saved {
    id: u64,
    position: usize,
    states: Vec<Vec<u8>>,
    caches: Vec<Vec<u8>>,
}

/// Carries the state of a set of graphs from step to step.
#[derive(Debug)]
pub struct StateCarrier {
    caches: Vec<Cache>,
    appends: Vec<Append>,
    states: Vec<Replaced>,
    swaps: Vec<Swap>,
    saved: Vec<Saved>,
    /// The last one dropped, whose memory the next one takes.
    spare: Option<Saved>,
    next_id: u64,
    position: usize,
}

fn partner<'a>(role: &'a str, prefix: &str) -> Option<&'a str> {
    role.strip_prefix(prefix)
}

impl StateCarrier {
    /// Pairs, allocates and binds every state tensor of `groups`.
    ///
    /// A group is the graphs of one step, such as the shards of a decoder; a second group, such as
    /// the graphs that prefill, shares the caches and states of the same roles.
    pub fn new(host: &mut Host, groups: &[&[GraphId]]) -> Result<Self> {
        let mut carrier = Self {
            caches: Vec::new(),
            appends: Vec::new(),
            states: Vec::new(),
            swaps: Vec::new(),
            saved: Vec::new(),
            spare: None,
            next_id: 1,
            position: 0,
        };
        for (group, graphs) in groups.iter().enumerate() {
            for &graph in *graphs {
                carrier.add_graph(host, group, graph)?;
            }
        }
        Ok(carrier)
    }

    fn add_graph(&mut self, host: &mut Host, group: usize, graph: GraphId) -> Result<()> {
        let info = host.graph(graph).clone();
        for (input, tensor) in info.inputs.iter().enumerate() {
            let Some(role) = partner(&tensor.role, "past_") else { continue };
            let new = info.output(&format!("new_{role}"));
            let present = info.output(&format!("present_{role}"));
            match (new, present) {
                (Some(output), None) => {
                    self.add_append(host, group, graph, role, input, output)?;
                }
                (None, Some(output)) => {
                    self.add_swap(host, group, graph, role, input, output)?;
                }
                (None, None) => {
                    return Err(Error::graph(format!(
                        "graph {:?}: input {tensor} has neither an output new_{role} nor \
                         present_{role}, so its next value is unknown",
                        info.name
                    )));
                }
                (Some(_), Some(_)) => {
                    return Err(Error::graph(format!(
                        "graph {:?}: input {tensor} has both an output new_{role} and present_{role}",
                        info.name
                    )));
                }
            }
        }
        for (output, tensor) in info.outputs.iter().enumerate() {
            let new = partner(&tensor.role, "new_");
            let role = new.or(partner(&tensor.role, "present_"));
            if let Some(role) = role
                && info.input(&format!("past_{role}")).is_none()
            {
                let cache = self.caches.iter().position(|c| c.role == role);
                if let (Some(cache), Some(_)) = (cache, new) {
                    self.add_rows(host, group, graph, output, cache)?;
                    continue;
                }
                return Err(Error::graph(format!(
                    "graph {:?}: output {tensor} has no input past_{role} to carry it back to",
                    info.name
                )));
            }
        }
        Ok(())
    }

    fn add_append(
        &mut self,
        host: &mut Host,
        group: usize,
        graph: GraphId,
        role: &str,
        input: usize,
        output: usize,
    ) -> Result<()> {
        let past = host.tensor(graph, Port::Input(input)).clone();
        let new = host.tensor(graph, Port::Output(output)).clone();
        let mismatch = |why: &str| {
            Error::graph(format!(
                "graph {:?}: {past} and {new} do not fit as a cache and its new rows: {why}",
                host.graph(graph).name
            ))
        };
        if past.dtype != new.dtype {
            return Err(mismatch("the dtypes differ"));
        }
        if past.shape.len() != new.shape.len() {
            return Err(mismatch("the ranks differ"));
        }
        let known = self.caches.iter().position(|c| c.role == role);
        let mut differing = (0..past.shape.len()).filter(|&a| past.shape[a] != new.shape[a]);
        let axis = match (differing.next(), differing.next(), known) {
            (Some(axis), None, _) => axis,
            // As many new rows as the cache has: another graph has told which axis it is.
            (None, None, Some(index)) => self.caches[index].axis,
            _ => return Err(mismatch("exactly one dimension must differ, the position")),
        };
        if new.shape[axis] > past.shape[axis] {
            return Err(mismatch("there are more new rows than the cache holds"));
        }
        let inner: usize = past.shape[axis + 1..].iter().product();
        let outer: usize = past.shape[..axis].iter().product();
        let capacity = past.shape[axis];
        let row = inner * past.dtype.size();
        let rows = new.shape[axis];

        let cache = match known {
            Some(index) => {
                let have = &self.caches[index];
                if (have.axis, have.outer, have.capacity, have.row) != (axis, outer, capacity, row)
                {
                    return Err(mismatch("another graph has this cache in another layout"));
                }
                host.bind(graph, Port::Input(input), have.buffer, 0)?;
                index
            }
            None => {
                let buffer = host.allocate_for(graph, Port::Input(input))?;
                let role = role.to_owned();
                let dtype = past.dtype;
                self.caches.push(Cache { role, buffer, dtype, axis, outer, capacity, row });
                self.caches.len() - 1
            }
        };
        let past = self.caches[cache].buffer;
        let new = host.allocate_for(graph, Port::Output(output))?;
        self.appends.push(Append { group, graph, output, past, new, cache, rows });
        Ok(())
    }

    /// An output whose rows go into a cache that the graph itself does not read.
    fn add_rows(
        &mut self,
        host: &mut Host,
        group: usize,
        graph: GraphId,
        output: usize,
        index: usize,
    ) -> Result<()> {
        let cache = &self.caches[index];
        let (past, axis) = (cache.buffer, cache.axis);
        let new = host.tensor(graph, Port::Output(output));
        let rows = new.shape.get(axis).copied().unwrap_or(0);
        let outer: usize = new.shape.iter().take(axis).product();
        let inner: usize = new.shape.iter().skip(axis + 1).product();
        let row = inner * new.dtype.size();
        let fits = (new.dtype, outer, row) == (cache.dtype, cache.outer, cache.row)
            && (1..=cache.capacity).contains(&rows);
        if !fits {
            return Err(Error::graph(format!(
                "graph {:?}: {new} does not fit the cache past_{} of {} blocks of {} rows of {} \
                 bytes, {}",
                host.graph(graph).name,
                cache.role,
                cache.outer,
                cache.capacity,
                cache.row,
                cache.dtype
            )));
        }
        let new = host.allocate_for(graph, Port::Output(output))?;
        self.appends.push(Append { group, graph, output, past, new, cache: index, rows });
        Ok(())
    }

    fn add_swap(
        &mut self,
        host: &mut Host,
        group: usize,
        graph: GraphId,
        role: &str,
        input: usize,
        output: usize,
    ) -> Result<()> {
        let past = host.tensor(graph, Port::Input(input)).clone();
        let present = host.tensor(graph, Port::Output(output)).clone();
        if past.dtype != present.dtype || past.shape != present.shape {
            return Err(Error::graph(format!(
                "graph {:?}: {past} and {present} must have the same shape and dtype to replace \
                 each other",
                host.graph(graph).name
            )));
        }
        let known = self.states.iter().position(|s| s.role == role);
        let state = match known {
            Some(index) => index,
            None => {
                let current = host.allocate(past.byte_len())?;
                let next = host.allocate(past.byte_len())?;
                self.states.push(Replaced { role: role.to_owned(), current, next });
                self.states.len() - 1
            }
        };
        let swap = Swap { role: role.to_owned(), group, graph, input, output, state };
        bind_swap(host, &swap, &self.states[state])?;
        self.swaps.push(swap);
        Ok(())
    }

    /// Positions consumed so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// Positions that every cache can hold; `None` without a cache.
    pub fn capacity(&self) -> Option<usize> {
        self.caches.iter().map(|c| c.capacity).min()
    }

    /// True when positions can be forgotten without a snapshot: there are only caches.
    pub fn can_truncate(&self) -> bool {
        self.states.is_empty()
    }

    /// Roles without their prefixes: `k_0`, `conv_1`, ….
    pub fn roles(&self) -> impl Iterator<Item = &str> {
        self.caches
            .iter()
            .map(|c| c.role.as_str())
            .chain(self.states.iter().map(|s| s.role.as_str()))
    }

    /// Errors unless every cache and state stands in the graphs of `group`, so that a step of that
    /// group leaves none behind.
    pub fn check_complete(&self, host: &Host, group: usize) -> Result<()> {
        let appended = |index| self.appends.iter().any(|a| a.group == group && a.cache == index);
        let swapped = |index| self.swaps.iter().any(|s| s.group == group && s.state == index);
        let cache = (0..self.caches.len()).find(|&i| !appended(i)).map(|i| &self.caches[i].role);
        let state = (0..self.states.len()).find(|&i| !swapped(i)).map(|i| &self.states[i].role);
        let Some(role) = cache.or(state) else { return Ok(()) };
        let names: Vec<_> = host
            .graphs()
            .iter()
            .filter(|g| g.input(&format!("past_{role}")).is_some())
            .map(|g| format!("{:?}", g.name))
            .collect();
        Err(Error::graph(format!(
            "past_{role} is in {} but in no graph of another step that shares its state; each \
             step's graphs need every cache",
            names.join(", ")
        )))
    }

    /// True when a cache has this role.
    pub fn has_cache(&self, role: &str) -> bool {
        self.caches.iter().any(|c| c.role == role)
    }

    /// True when a replaced state has this role.
    pub fn has_state(&self, role: &str) -> bool {
        self.states.iter().any(|s| s.role == role)
    }

    /// Bytes of all states and caches.
    pub fn byte_len(&self, host: &Host) -> usize {
        self.caches.iter().map(|c| host.len(c.buffer)).sum::<usize>()
            + self.states.iter().map(|s| host.len(s.current)).sum::<usize>()
    }

    /// Fills in what the carrier knows of an op.
    pub fn describe(&self, info: &mut OpInfo) {
        info.can_truncate = self.can_truncate();
        info.can_snapshot = true;
    }

    /// Takes over what the graphs of `group` gave: writes `rows` new rows at the position, swaps
    /// the replaced states, and moves the position on. Copies no state.
    ///
    /// Errors when the rows do not fit, or when one has a value that is not finite. The state is then
    /// as it was before the step.
    pub fn commit(&mut self, host: &mut Host, group: usize, rows: usize) -> Result<()> {
        let position = self.position;
        for append in self.appends.iter().filter(|a| a.group == group) {
            let cache = &self.caches[append.cache];
            if rows > append.rows || position + rows > cache.capacity {
                return Err(Error::graph(format!(
                    "past_{}: {rows} rows at position {position} do not fit: the graph gives {} \
                     rows, the cache holds {}",
                    cache.role, append.rows, cache.capacity
                )));
            }
            let source = host.bytes(append.new);
            let finite = |block| all_finite(&source[append.block(cache, block, rows)], cache.dtype);
            if !(0..cache.outer).all(finite) {
                return Err(not_finite(host, append, position, rows));
            }
        }
        for append in self.appends.iter().filter(|a| a.group == group) {
            let cache = &self.caches[append.cache];
            let (source, target) = host.pair(append.new, append.past);
            for block in 0..cache.outer {
                let to = (block * cache.capacity + position) * cache.row;
                target[to..to + rows * cache.row]
                    .copy_from_slice(&source[append.block(cache, block, rows)]);
            }
        }
        self.exchange(host, group)?;
        self.position += rows;
        Ok(())
    }

    fn exchange(&mut self, host: &mut Host, group: usize) -> Result<()> {
        // A state may stand in graphs of several groups: exchange it once, bind it everywhere.
        for index in 0..self.states.len() {
            if self.swaps.iter().any(|s| s.state == index && s.group == group) {
                let state = &mut self.states[index];
                std::mem::swap(&mut state.current, &mut state.next);
            }
        }
        for swap in &self.swaps {
            bind_swap(host, swap, &self.states[swap.state])?;
        }
        Ok(())
    }

    /// Forgets everything: states zero, position 0. Cache rows stay, finite as they are; a mask hides
    /// them.
    pub fn reset(&mut self, host: &mut Host) {
        for state in &self.states {
            host.bytes_mut(state.current).fill(0);
        }
        self.position = 0;
    }

    /// Forgets all positions from `position` on, where there are only caches.
    pub fn truncate(&mut self, position: usize) -> Result<()> {
        if position > self.position {
            return Err(Error::prompt(format!(
                "cannot truncate to position {position}: only {} are consumed",
                self.position
            )));
        }
        if position < self.position && !self.can_truncate() {
            return Err(Error::unsupported(
                "truncation: its recurrent state has no rows to drop; restore a snapshot",
            ));
        }
        self.position = position;
        Ok(())
    }

    /// Saves the replaced states and the rows written so far. The copy is independent of what
    /// happens to the state afterwards.
    pub fn snapshot(&mut self, host: &Host) -> SnapshotId {
        let id = self.next_id;
        self.next_id += 1;
        let mut saved = self.spare.take().unwrap_or_default();
        (saved.id, saved.position) = (id, self.position);
        saved.states.resize_with(self.states.len(), Vec::new);
        for (copy, state) in saved.states.iter_mut().zip(&self.states) {
            copy.clear();
            copy.extend_from_slice(host.bytes(state.current));
        }
        saved.caches.resize_with(self.caches.len(), Vec::new);
        for (copy, cache) in saved.caches.iter_mut().zip(&self.caches) {
            copy.clear();
            copy.reserve_exact(cache.outer * self.position * cache.row);
            let bytes = host.bytes(cache.buffer);
            for block in 0..cache.outer {
                copy.extend_from_slice(&bytes[cache.rows(block, self.position)]);
            }
        }
        self.saved.push(saved);
        SnapshotId(id)
    }

    /// Returns to a saved state, which stays saved.
    pub fn restore(&mut self, host: &mut Host, id: SnapshotId) -> Result<()> {
        let saved = self.saved.iter().find(|s| s.id == id.0).ok_or_else(|| {
            Error::prompt(format!("snapshot {} does not exist or was dropped", id.0))
        })?;
        for (state, bytes) in self.states.iter().zip(&saved.states) {
            host.bytes_mut(state.current).copy_from_slice(bytes);
        }
        for (cache, bytes) in self.caches.iter().zip(&saved.caches) {
            let length = saved.position * cache.row;
            let target = host.bytes_mut(cache.buffer);
            for block in 0..cache.outer {
                target[cache.rows(block, saved.position)]
                    .copy_from_slice(&bytes[block * length..(block + 1) * length]);
            }
        }
        self.position = saved.position;
        Ok(())
    }

    /// Frees a saved state, but for its memory, which the next one takes. An unknown id is ignored.
    pub fn drop_snapshot(&mut self, id: SnapshotId) {
        if let Some(index) = self.saved.iter().position(|s| s.id == id.0) {
            self.spare = Some(self.saved.remove(index));
        }
    }
}

/// A step gave a row that must not get into a cache.
fn not_finite(host: &Host, append: &Append, position: usize, rows: usize) -> Error {
    let place = match rows {
        1 => format!("position {position}"),
        _ => format!("positions {position} to {}", position + rows - 1),
    };
    let message = format!(
        "graph {:?}: output {} has NaN or infinite values at {place}, expected numbers; the hidden \
         state has overflowed, or the weights or the embedding table are damaged",
        host.graph(append.graph).name,
        host.tensor(append.graph, Port::Output(append.output))
    );
    Error::new(ErrorCode::EXECUTE, message)
}

impl Append {
    /// Bytes of the first `count` new rows of a block.
    fn block(&self, cache: &Cache, block: usize, count: usize) -> Range<usize> {
        let start = block * self.rows * cache.row;
        start..start + count * cache.row
    }
}

impl Cache {
    /// Bytes of the first `count` rows of a block.
    fn rows(&self, block: usize, count: usize) -> Range<usize> {
        let start = block * self.capacity * self.row;
        start..start + count * self.row
    }
}

fn bind_swap(host: &mut Host, swap: &Swap, state: &Replaced) -> Result<()> {
    debug_assert_eq!(swap.role, state.role);
    host.bind(swap.graph, Port::Input(swap.input), state.current, 0)?;
    host.bind(swap.graph, Port::Output(swap.output), state.next, 0)
}
