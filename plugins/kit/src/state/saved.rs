//! Snapshots: copies of states and of the rows of caches.

use super::PositionTrack;
use super::wiring::Wiring;
use qhx_op::{Error, Host, Result, SnapshotId};

/// A copy of what a carrier holds.
#[derive(Debug, Default)]
pub(super) struct Saved {
    id: u64,
    pub position: usize,
    pub written: usize,
    pub track: PositionTrack,
    states: Vec<Vec<u8>>,
    caches: Vec<Vec<u8>>,
}

/// The snapshots of a carrier.
#[derive(Debug, Default)]
pub(super) struct Snapshots {
    saved: Vec<Saved>,
    /// The last one dropped, whose memory the next one takes.
    spare: Option<Saved>,
    last_id: u64,
}

impl Snapshots {
    /// Copies what `wiring` holds.
    pub fn save(
        &mut self,
        host: &Host,
        wiring: &Wiring,
        position: usize,
        written: usize,
        track: &PositionTrack,
    ) -> SnapshotId {
        self.last_id += 1;
        let mut saved = self.spare.take().unwrap_or_default();
        (saved.id, saved.position, saved.written) = (self.last_id, position, written);
        saved.track.copy_from(track);
        saved.states.resize_with(wiring.states.len(), Vec::new);
        for (copy, state) in saved.states.iter_mut().zip(&wiring.states) {
            copy.clear();
            copy.extend_from_slice(host.bytes(state.current));
        }
        saved.caches.resize_with(wiring.caches.len(), Vec::new);
        for (copy, cache) in saved.caches.iter_mut().zip(&wiring.caches) {
            let rows = cache.used(position);
            copy.clear();
            copy.reserve_exact(cache.outer * rows * cache.row);
            cache.gather(host.bytes(cache.buffer), rows, copy);
        }
        self.saved.push(saved);
        SnapshotId(self.last_id)
    }

    /// Copies the tensors of a snapshot back, and returns it.
    ///
    /// # Errors
    /// When there is no such snapshot.
    pub fn restore(&self, host: &mut Host, wiring: &mut Wiring, id: SnapshotId) -> Result<&Saved> {
        let saved = self.saved.iter().find(|s| s.id == id.0).ok_or_else(|| {
            Error::prompt(format!("snapshot {} does not exist or was dropped", id.0))
        })?;
        wiring.widen();
        for (state, bytes) in wiring.states.iter().zip(&saved.states) {
            host.bytes_mut(state.current).copy_from_slice(bytes);
        }
        for (cache, bytes) in wiring.caches.iter().zip(&saved.caches) {
            let rows = cache.used(saved.position);
            cache.scatter(bytes, rows, host.bytes_mut(cache.buffer));
        }
        Ok(saved)
    }

    /// Frees a snapshot, but for its memory. An unknown id is ignored.
    pub fn drop(&mut self, id: SnapshotId) {
        if let Some(index) = self.saved.iter().position(|s| s.id == id.0) {
            self.spare = Some(self.saved.remove(index));
        }
    }
}
