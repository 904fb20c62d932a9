//! Times and counts that the library measures.

#![expect(unsafe_code, reason = "walks the library's event tree")]

use std::collections::VecDeque;

use qhx_base::{ErrorKind, Result};
use qhx_qnn_sys::{self as sys, EventData, Handle};
use serde::{Deserialize, Serialize};

use super::codes;
use super::device::{Device, Raw, freed};
use super::library::text;

/// Level of profiling.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default, Serialize, Deserialize,
)]
#[serde(rename_all = "lowercase")]
pub enum ProfileLevel {
    /// Nothing; costs nothing.
    #[default]
    Off,
    /// Times of whole calls.
    Basic,
    /// Also the cycles of every node.
    Detailed,
}

/// One measurement, with what it is made of.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProfileEvent {
    /// The library's number of the kind of event.
    pub kind: u32,
    /// The event in words, or the node's name.
    pub name: String,
    /// `us`, `bytes`, `cycles` or `count`.
    pub unit: &'static str,
    /// The measured value.
    pub value: u64,
    /// The parts of the event.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub events: Vec<ProfileEvent>,
}

/// The events of one call.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProfileRecord {
    /// Manifest key of the context.
    pub context: String,
    /// The graph, or nothing for the loading of the context.
    pub graph: Option<String>,
    /// Measured events.
    pub events: Vec<ProfileEvent>,
}

/// Maximum events that wait to be taken: about ten megabytes of them.
const MAX_EVENTS: usize = 1 << 17;

/// Records that wait to be taken, the newest ones.
#[derive(Debug, Default)]
pub(crate) struct Records {
    records: VecDeque<ProfileRecord>,
    events: usize,
}

impl Records {
    /// Adds a record, and drops the oldest ones where there are too many events.
    pub(crate) fn push(&mut self, record: ProfileRecord) {
        self.events += record.size();
        self.records.push_back(record);
        while self.events > MAX_EVENTS && self.records.len() > 1 {
            let oldest = self.records.pop_front();
            self.events -= oldest.map_or(0, |record| record.size());
        }
    }

    /// All records, the oldest first.
    pub(crate) fn take(&mut self) -> Vec<ProfileRecord> {
        std::mem::take(self).records.into()
    }
}

impl ProfileRecord {
    /// Number of its events, and one.
    fn size(&self) -> usize {
        fn count(events: &[ProfileEvent]) -> usize {
            events.iter().map(|event| 1 + count(&event.events)).sum()
        }
        1 + count(&self.events)
    }
}

/// A profile handle. It belongs to one graph or one load: the library refuses to share it.
pub(crate) struct Profile {
    raw: Raw,
    device: Device,
}

impl Profile {
    /// A profile of `level`; `None` when nothing is to be measured.
    pub(crate) fn create(device: &Device, level: ProfileLevel) -> Result<Option<Self>> {
        let code = match level {
            ProfileLevel::Off => return Ok(None),
            ProfileLevel::Basic => sys::PROFILE_BASIC,
            ProfileLevel::Detailed => sys::PROFILE_DETAILED,
        };
        let library = device.library();
        let create = library.need(library.table().profile_create, "profileCreate")?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: contract: handles, answers.
        let status = unsafe { create(device.backend(), code, &raw mut raw) };
        codes::check(ErrorKind::Runtime, "opening a profile", status)?;
        Ok(Some(Self { raw: Raw(raw), device: device.clone() }))
    }

    pub(crate) fn raw(&self) -> Handle {
        self.raw.0
    }

    /// The events of the last call.
    pub(crate) fn events(&self) -> Result<Vec<ProfileEvent>> {
        let library = self.device.library();
        let get = library.need(library.table().profile_get_events, "profileGetEvents")?;
        let mut ids = std::ptr::null();
        let mut count = 0;
        // SAFETY: contract: handles, answers.
        let status = unsafe { get(self.raw.0, &raw mut ids, &raw mut count) };
        codes::check(ErrorKind::Runtime, "reading a profile", status)?;
        // SAFETY: contract: lists.
        Ok(unsafe { list(ids, count) }.into_iter().filter_map(|id| self.event(id, 0)).collect())
    }

    fn event(&self, id: u64, depth: u32) -> Option<ProfileEvent> {
        let table = self.device.library().table();
        let mut data = EventData { kind: 0, unit: 0, value: 0, identifier: std::ptr::null() };
        // SAFETY: contract: answers; the id came from this profile.
        if unsafe { table.profile_get_event_data?(id, &raw mut data) } != 0 {
            return None;
        }
        let mut events = Vec::new();
        if depth < 8
            && let Some(get) = table.profile_get_sub_events
        {
            let mut ids = std::ptr::null();
            let mut count = 0;
            // SAFETY: contract: answers; the id came from this profile.
            if unsafe { get(id, &raw mut ids, &raw mut count) } == 0 {
                // SAFETY: contract: lists.
                let ids = unsafe { list(ids, count) };
                events = ids.into_iter().filter_map(|id| self.event(id, depth + 1)).collect();
            }
        }
        // SAFETY: contract: texts.
        let identifier = unsafe { text(data.identifier) };
        let name = match kind_name(data.kind) {
            Some(name) => name.to_owned(),
            None if identifier.is_empty() => format!("event {}", data.kind),
            None => identifier,
        };
        Some(ProfileEvent {
            kind: data.kind,
            name,
            unit: unit_name(data.unit),
            value: data.value,
            events,
        })
    }
}

impl Drop for Profile {
    fn drop(&mut self) {
        if let Some(free) = self.device.library().table().profile_free {
            // SAFETY: contract: handles; no call uses it.
            freed("profile", unsafe { free(self.raw.0) });
        }
    }
}

/// # Safety
/// `ids` leads to `count` readable numbers, or `count` is 0.
unsafe fn list(ids: *const u64, count: u32) -> Vec<u64> {
    if ids.is_null() || count == 0 {
        return Vec::new();
    }
    // SAFETY: the caller vouches for the list.
    unsafe { std::slice::from_raw_parts(ids, count as usize) }.to_vec()
}

const fn unit_name(unit: u32) -> &'static str {
    match unit {
        sys::UNIT_MICROSECONDS => "us",
        sys::UNIT_BYTES => "bytes",
        sys::UNIT_CYCLES => "cycles",
        sys::UNIT_COUNT => "count",
        _ => "",
    }
}

const fn kind_name(kind: u32) -> Option<&'static str> {
    match kind {
        100 => Some("load"),
        400 => Some("execute"),
        500 => Some("free"),
        1002 => Some("load: host RPC"),
        1003 => Some("load: NPU RPC"),
        1004 => Some("load: NPU"),
        3001 => Some("execute: host RPC"),
        3002 => Some("execute: NPU RPC"),
        3003 => Some("execute: NPU cycles"),
        3004 => Some("execute: NPU"),
        3009 => Some("yields"),
        3010 => Some("waiting for VTCM"),
        3011 => Some("powering on"),
        4003 => Some("free: NPU"),
        8001 => Some("HVX threads"),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn records_that_nobody_takes_are_bounded() {
        let mut records = Records::default();
        let event = |events| ProfileEvent {
            kind: 400,
            name: "execute".to_owned(),
            unit: "us",
            value: 1,
            events,
        };
        for number in 0..1000 {
            let events = vec![event((0..999).map(|_| event(Vec::new())).collect())];
            let context = number.to_string();
            records.push(ProfileRecord { context, graph: None, events });
        }
        let taken = records.take();
        assert_eq!(taken.len(), MAX_EVENTS / 1001);
        assert_eq!(taken.last().unwrap().context, "999", "the newest stay");
        assert!(records.take().is_empty());
    }
}
