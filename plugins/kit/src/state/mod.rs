//! The state carrier: KV caches and recurrent states that graphs take in and give back.
//!
//! Tensors are paired by role within a graph:
//!
//! | a graph has | what it means |
//! |---|---|
//! | `past_X` in, `new_X` out | a cache: the new rows are written at the current position, along the one axis in which both shapes differ (*append*) |
//! | `past_X` in, `present_X` out | a state that is replaced: the two buffers change places, and nothing is copied (*swap*) |
//! | `new_X` out, no `past_X` | its rows go into the cache that another graph has, such as those of a prompt's first tokens |
//! | `past_X` in, neither output | it reads the cache that another graph writes, its *donor*: the same buffer, nothing is copied |
//! | `row_X` in beside such a `past_X` | the donor's `new_X` of this step, before it is in the cache: the same buffer |
//!
//! A **ring** ([`StateCarrier::with_rings`]) is a cache for sliding attention: the row of position p is
//! in slot p mod capacity, so it holds the last positions only. [`crate::fill::CausalMask::ring`] makes
//! the mask for it.
//!
//! A cache `past_X` of **int8** has an input `scale_X` beside it, and `new_X` of floats. Rows are quantized when they
//! are written, each with a scale of its own, and both tensors are saved, moved and cut together.
//!
//! A step is committed once all of its graphs have executed; until then the state is as before.
//!
//! Rows of a cache stay when positions are forgotten, and a mask hides them by adding to their scores.
//! A mask works for numbers only: NaN and infinity show through any mask. So a row that has one never gets into a
//! cache; the step that gave it fails.

mod bytes;
mod cache;
mod int8;
mod saved;
mod sliding;
mod track;
mod wiring;

use cache::{Append, Cache, Rows};
use qhx_op::{Error, ErrorCode, Generator, GraphId, Host, OpenInfo, Port, Result, SnapshotId};
use saved::Snapshots;
pub use sliding::SlidingLayers;
pub use track::PositionTrack;
use wiring::Wiring;

/// Carries the state of a set of graphs from step to step.
#[derive(Debug)]
pub struct StateCarrier {
    wiring: Wiring,
    snapshots: Snapshots,
    position: usize,
    /// Positions below this have been written to the caches, also those that were forgotten since.
    /// A ring holds the last of them.
    written: usize,
    /// Number of changes so far.
    changes: u64,
    track: PositionTrack,
}

impl StateCarrier {
    /// Pairs, allocates and binds every state tensor of `groups`.
    ///
    /// A group is the graphs of one step in their order, such as the shards of a decoder; a second
    /// group, such as the graphs that prefill, shares the caches and states of the same roles.
    ///
    /// # Errors
    /// When a state tensor has no partner, or the two differ in shape or element type.
    pub fn new(host: &mut Host, groups: &[&[GraphId]]) -> Result<Self> {
        Self::with_rings(host, groups, |_| None)
    }

    /// The same, where some caches are rings: `window` gives for a role without its prefix (`k_0`)
    /// the number of positions that a token of its layer sees, itself included, or `None` when all.
    /// The graph declares how many slots a ring has: at least window − 1, and as many as a step has rows.
    ///
    /// # Errors
    /// Errors of [`StateCarrier::new`], or if a ring has too few slots.
    pub fn with_rings(
        host: &mut Host,
        groups: &[&[GraphId]],
        window: impl Fn(&str) -> Option<usize>,
    ) -> Result<Self> {
        let wiring = Wiring::new(host, groups, &window)?;
        let (snapshots, track) = (Snapshots::default(), PositionTrack::default());
        Ok(Self { wiring, snapshots, position: 0, written: 0, changes: 0, track })
    }

    /// Positions consumed so far.
    pub fn position(&self) -> usize {
        self.position
    }

    /// A number that is another one after every change of the state.
    pub(crate) fn changes(&self) -> u64 {
        self.changes
    }

    /// Places of tokens and images for a rotary embedding of three axes. Text alone, unless an op places images in
    /// [`StateCarrier::track_mut`].
    pub fn track(&self) -> &PositionTrack {
        &self.track
    }

    /// The same, for an op to place the images of a prompt before it consumes them. Where a step of
    /// that prompt fails, [`StateCarrier::truncate`] to the position reached takes the others away.
    pub fn track_mut(&mut self) -> &mut PositionTrack {
        &mut self.track
    }

    /// Positions that every cache can hold; `None` where all are rings, or there is none.
    pub fn capacity(&self) -> Option<usize> {
        self.full().map(|c| c.capacity).min()
    }

    /// Rows of the cache of a role.
    pub fn capacity_of(&self, role: &str) -> Option<usize> {
        self.wiring.cache(role).map(|index| self.wiring.caches[index].capacity)
    }

    fn full(&self) -> impl Iterator<Item = &Cache> {
        self.wiring.caches.iter().filter(|c| c.window.is_none())
    }

    fn rings(&self) -> impl Iterator<Item = &Cache> {
        self.wiring.caches.iter().filter(|c| c.window.is_some())
    }

    /// Positions that the caches hold as the graphs of `group` read them: fewer than [`StateCarrier::capacity`] for
    /// graphs of a smaller context. `None` where all are rings, or there is none.
    pub fn capacity_in(&self, group: usize) -> Option<usize> {
        let Wiring { caches, appends, .. } = &self.wiring;
        let of_group = appends.iter().filter(|a| a.group == group);
        let full = of_group.filter(|a| caches[a.cache].window.is_none());
        let read = self.read_in(group).map(|(_, rows)| rows);
        full.filter_map(|a| a.reads).chain(read).min().or(self.capacity())
    }

    /// The caches that the graphs of `group` read and do not write, but rings, with the rows that they read.
    fn read_in(&self, group: usize) -> impl Iterator<Item = (&Cache, usize)> {
        let Wiring { caches, reads, .. } = &self.wiring;
        let of_group = reads.iter().filter(move |read| read.group == group);
        let found = of_group.map(|read| (&caches[read.cache], read.rows));
        found.filter(|(cache, _)| cache.window.is_none())
    }

    /// True when the caches are laid out as the graphs of `group` read them, which write none of them.
    pub(crate) fn is_arranged(&self, group: usize) -> bool {
        self.read_in(group).all(|(cache, rows)| cache.stride == rows)
    }

    /// Lays the caches out as the graphs of `group` read them, before they are executed. Nothing is moved unless the
    /// graphs before were of another context size: then all used rows are, in place.
    pub(crate) fn arrange(&mut self, host: &mut Host, group: usize) {
        let Wiring { caches, appends, .. } = &mut self.wiring;
        for append in appends.iter().filter(|a| a.group == group) {
            let cache = &mut caches[append.cache];
            let Some(rows) = append.reads.filter(|_| cache.window.is_none()) else { continue };
            cache.arrange(host, rows, self.position);
            if let Rows::Int8 { scales, .. } = cache.rows {
                caches[scales].arrange(host, rows, self.position);
            }
        }
    }

    /// True when any position can be returned to without a snapshot: there are only caches, and
    /// each holds all positions. [`StateCarrier::truncate`] may work for some where this is false.
    pub fn can_truncate(&self) -> bool {
        self.keeps(self.capacity().unwrap_or(usize::MAX))
    }

    /// True when nothing is lost in a context of `positions`.
    fn keeps(&self, positions: usize) -> bool {
        self.wiring.states.is_empty() && self.rings().all(|c| c.capacity >= positions)
    }

    /// Roles without their prefixes: `k_0`, `conv_1`, ….
    pub fn roles(&self) -> impl Iterator<Item = &str> {
        let caches = self.wiring.caches.iter().filter(|c| c.rows != Rows::Scales);
        let caches = caches.map(|c| c.role.as_str());
        caches.chain(self.wiring.states.iter().map(|s| s.role.as_str()))
    }

    /// Checks that the graphs of `group` write the whole state.
    ///
    /// # Errors
    /// Unless every cache and state is written by the graphs of `group`, so that a step of that group leaves none
    /// behind.
    pub fn check_complete(&self, host: &Host, group: usize) -> Result<()> {
        let Wiring { caches, appends, states, swaps, .. } = &self.wiring;
        let appended = |index: usize| {
            caches[index].rows == Rows::Scales
                || appends.iter().any(|a| a.group == group && a.cache == index)
        };
        let swapped = |index| swaps.iter().any(|s| s.group == group && s.state == index);
        let cache = (0..caches.len()).find(|&i| !appended(i)).map(|i| &caches[i].role);
        let state = (0..states.len()).find(|&i| !swapped(i)).map(|i| &states[i].role);
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

    /// True when a step of `group` takes a cache's new rows or a replaced state from `graph`.
    pub fn writes(&self, group: usize, graph: GraphId) -> bool {
        let Wiring { appends, swaps, .. } = &self.wiring;
        appends.iter().any(|a| (a.group, a.graph) == (group, graph))
            || swaps.iter().any(|s| (s.group, s.graph) == (group, graph))
    }

    /// True when a step of `group` takes a replaced state from `graph`.
    pub fn replaces(&self, group: usize, graph: GraphId) -> bool {
        self.wiring.swaps.iter().any(|s| (s.group, s.graph) == (group, graph))
    }

    /// True when a cache has this role.
    pub fn has_cache(&self, role: &str) -> bool {
        self.wiring.cache(role).is_some()
    }

    /// True when a replaced state has this role.
    pub fn has_state(&self, role: &str) -> bool {
        self.wiring.states.iter().any(|s| s.role == role)
    }

    /// Bytes of all states and caches.
    pub fn byte_len(&self, host: &Host) -> usize {
        self.wiring.caches.iter().map(|c| host.len(c.buffer)).sum::<usize>()
            + self.wiring.states.iter().map(|s| host.len(s.current)).sum::<usize>()
    }

    /// Fills in what the carrier knows of an op whose `max_ctx` is known.
    pub fn describe(&self, info: &mut OpenInfo) {
        let max_positions = self.capacity().unwrap_or(usize::MAX);
        info.can_truncate = self.keeps(if info.max_ctx == 0 {
            max_positions
        } else {
            max_positions.min(info.max_ctx)
        });
        info.can_snapshot = true;
    }

    /// Takes over what the graphs of `group` gave: writes `rows` new rows at the position, swaps
    /// the replaced states, and moves the position on. Copies no state.
    ///
    /// The state is then as it was before the step.
    ///
    /// # Errors
    /// When the rows do not fit, or when one has a value that is not finite.
    pub fn commit(&mut self, host: &mut Host, group: usize, rows: usize) -> Result<()> {
        let position = self.position;
        let Wiring { caches, appends, .. } = &self.wiring;
        for append in appends.iter().filter(|a| a.group == group) {
            let cache = &caches[append.cache];
            let laid_out = cache.window.is_some() || position + rows <= cache.stride;
            if rows > append.rows || !cache.has_room(position, rows) || !laid_out {
                return Err(Error::graph(format!(
                    "past_{}: {rows} rows at position {position} do not fit: the graph gives {} \
                     rows, the cache holds {}",
                    cache.role, append.rows, cache.stride
                )));
            }
            if !append.is_finite(host, cache, rows) {
                return Err(not_finite(host, append, position, rows));
            }
        }
        for append in appends.iter().filter(|a| a.group == group) {
            let cache = &caches[append.cache];
            match cache.rows {
                Rows::Int8 { scales, zero } => {
                    int8::write(host, append, [cache, &caches[scales]], zero, position, rows);
                }
                _ if append.dtype != cache.dtype => {
                    cache.write_f16(host, append.new, append.rows, position, rows);
                }
                _ => cache.write(host, append.new, append.rows, position, rows),
            }
        }
        self.exchange(host, group)?;
        self.changes += 1;
        self.position += rows;
        self.written = self.written.max(self.position);
        Ok(())
    }

    fn exchange(&mut self, host: &mut Host, group: usize) -> Result<()> {
        let Wiring { states, swaps, .. } = &mut self.wiring;
        for swap in swaps.iter().filter(|swap| swap.group == group && swap.exchanges) {
            let state = &mut states[swap.state];
            std::mem::swap(&mut state.current, &mut state.next);
        }
        // A state may stand in graphs of several groups: bind it everywhere.
        let bound = swaps.iter().try_for_each(|swap| swap.bind(host, &states[swap.state]));
        if bound.is_err() {
            for swap in swaps.iter().filter(|swap| swap.group == group && swap.exchanges) {
                let state = &mut states[swap.state];
                std::mem::swap(&mut state.current, &mut state.next);
            }
            // What fails again fails the next step, which binds all of it.
            swaps.iter().for_each(|swap| drop(swap.bind(host, &states[swap.state])));
        }
        bound
    }

    /// Forgets everything: states zero, position 0. Cache rows stay, finite as they are; a mask hides
    /// them.
    pub fn reset(&mut self, host: &mut Host) {
        for state in &self.wiring.states {
            host.bytes_mut(state.current).fill(0);
        }
        (self.position, self.written) = (0, 0);
        self.changes += 1;
        self.track.truncate(0);
    }

    /// Forgets all positions from `position` on.
    ///
    /// # Errors
    /// A state is replaced as a whole, or a ring no longer holds the rows that a token at `position` sees. Nothing is
    /// changed then.
    pub fn truncate(&mut self, position: usize) -> Result<()> {
        if position > self.position {
            return Err(Error::prompt(format!(
                "cannot truncate to position {position}: only {} are consumed",
                self.position
            )));
        }
        if position == self.position {
            self.track.truncate(position);
            return Ok(());
        }
        if !self.wiring.states.is_empty() {
            return Err(Error::unsupported(
                "truncation: its recurrent state has no rows to drop; restore a snapshot",
            ));
        }
        for cache in self.rings() {
            let (needs, holds) = cache.needs_and_holds(position, self.written);
            if needs < position && needs < holds {
                return Err(Error::new(
                    ErrorCode::UNSUPPORTED,
                    format!(
                        "cannot truncate to position {position}: a token there sees the rows of \
                         past_{} from position {needs} on, but its ring of {} slots holds those \
                         from {holds} on; restore a snapshot",
                        cache.role, cache.capacity
                    ),
                ));
            }
        }
        self.position = position;
        self.changes += 1;
        self.track.truncate(position);
        if position == 0 {
            self.written = 0;
        }
        Ok(())
    }

    /// Saves the replaced states, the rows written so far, rings as a whole, and the track. The copy is
    /// independent of what happens to the state afterwards.
    pub fn snapshot(&mut self, host: &Host) -> SnapshotId {
        self.snapshots.save(host, &self.wiring, self.position, self.written, &self.track)
    }

    /// Returns to a saved state, which stays saved.
    ///
    /// # Errors
    /// When there is no such snapshot.
    pub fn restore(&mut self, host: &mut Host, id: SnapshotId) -> Result<()> {
        let saved = self.snapshots.restore(host, &mut self.wiring, id)?;
        (self.position, self.written) = (saved.position, saved.written);
        self.changes += 1;
        self.track.copy_from(&saved.track);
        Ok(())
    }

    /// The state as bytes: the replaced states, the rows written so far, rings as a whole, and the track.
    ///
    /// # Errors
    /// When they do not fit the memory.
    pub fn export(&self, host: &Host) -> Result<Vec<u8>> {
        bytes::export(host, &self.wiring, self.position, self.written, &self.track)
    }

    /// Makes the state the one that was exported at `position`, by a carrier of the same caches and states. A cache
    /// that is no ring may have another capacity, and floats may be of another precision: f16 on the NPU, f32 on the
    /// CPU.
    ///
    /// # Errors
    /// When the bytes are not such a state: also when they hold NaN or infinity. The state is then as it was.
    pub fn import(&mut self, host: &mut Host, position: usize, state: &[u8]) -> Result<()> {
        let (written, track) = bytes::import(host, &mut self.wiring, position, state)?;
        (self.position, self.written, self.track) = (position, written, track);
        self.changes += 1;
        Ok(())
    }

    /// Frees a saved state, but for its memory, which the next one takes. An unknown id is ignored.
    pub fn drop_snapshot(&mut self, id: SnapshotId) {
        self.snapshots.drop(id);
    }
}

/// The calls that concern the state alone, for an op with steps of its own.
impl Generator for StateCarrier {
    fn reset(&mut self, host: &mut Host) -> Result<()> {
        self.reset(host);
        Ok(())
    }

    fn position(&self) -> usize {
        self.position
    }

    fn truncate(&mut self, _: &mut Host, position: usize) -> Result<()> {
        self.truncate(position)
    }

    fn snapshot(&mut self, host: &mut Host) -> Result<SnapshotId> {
        Ok(Self::snapshot(self, host))
    }

    fn restore(&mut self, host: &mut Host, snapshot: SnapshotId) -> Result<()> {
        self.restore(host, snapshot)
    }

    fn drop_snapshot(&mut self, _: &mut Host, snapshot: SnapshotId) {
        self.drop_snapshot(snapshot);
    }

    fn export_state(&mut self, host: &mut Host) -> Result<Vec<u8>> {
        self.export(host)
    }

    fn import_state(&mut self, host: &mut Host, position: usize, state: &[u8]) -> Result<()> {
        self.import(host, position, state)
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
