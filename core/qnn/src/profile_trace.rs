//! The library's measurements of a call, as spans of a trace.
//!
//! The library reports how long parts of a call took and not when they began. A time is drawn from the beginning of
//! what it is a part of, the longest first. Cycles of nodes share the innermost time by their number, one node after
//! the other. Arguments hold the values as the library gives them.

use std::time::{Duration, Instant};

use qhx_base::trace::{Category, Event, Trace};

use super::profile::{ProfileEvent, ProfileRecord};

impl ProfileRecord {
    /// Writes the record of a call that began at `start` and took `time`.
    pub(super) fn write_to(&self, trace: &Trace, start: Instant, time: Duration) {
        let name = if self.graph.is_some() { "graphExecute" } else { "contextCreateFromBinary" };
        let mut call = Event::new(name, Category::Library, start, time);
        call = call.with("context", &*self.context);
        let (times, others): (Vec<_>, Vec<_>) = self.events.iter().partition(|e| e.unit == "us");
        for event in &others {
            call = call.with(&label(event), event.value);
        }
        trace.add(&call);
        let innermost = draw_times(trace, &times, start, time);
        for event in others {
            draw_cycles(trace, &event.events, start, innermost);
        }
    }
}

/// The value's name with its unit.
fn label(event: &ProfileEvent) -> String {
    match event.unit {
        "" | "count" => event.name.clone(),
        unit => format!("{} [{unit}]", event.name),
    }
}

/// Draws times within `within`, from its beginning on and into each other; returns the shortest that took any.
fn draw_times(
    trace: &Trace,
    events: &[&ProfileEvent],
    start: Instant,
    within: Duration,
) -> Duration {
    let mut events = events.to_vec();
    events.sort_by_key(|event| std::cmp::Reverse(event.value));
    let mut innermost = within;
    for event in events {
        // A clock of its own may report more than the host's.
        let time = Duration::from_micros(event.value).min(innermost);
        let drawn = Event::new(&event.name, Category::Library, start, time);
        trace.add(&drawn.with(&label(event), event.value));
        if !time.is_zero() {
            innermost = time;
        }
        let (times, others): (Vec<_>, Vec<_>) = event.events.iter().partition(|e| e.unit == "us");
        draw_times(trace, &times, start, time);
        draw_cycles(trace, &others.into_iter().cloned().collect::<Vec<_>>(), start, time);
    }
    innermost
}

/// Draws what is counted in cycles, one after the other, so that all together take `within`.
fn draw_cycles(trace: &Trace, events: &[ProfileEvent], start: Instant, within: Duration) {
    let counted = || events.iter().filter(|event| event.unit == "cycles");
    let total: u128 = counted().map(|event| u128::from(event.value)).sum();
    let share = |cycles: u128| {
        let nanos = (within.as_nanos() * cycles).checked_div(total).unwrap_or(0);
        Duration::from_nanos(u64::try_from(nanos).unwrap_or(u64::MAX))
    };
    let mut before = 0_u128;
    for event in counted() {
        let (from, until) = (share(before), share(before + u128::from(event.value)));
        before += u128::from(event.value);
        let (Some(start), time) = (start.checked_add(from), until.saturating_sub(from)) else {
            continue;
        };
        let mut drawn = Event::new(&event.name, Category::Library, start, time);
        drawn = drawn.with("cycles", event.value);
        let parts = event.events.iter().filter(|part| part.unit != "cycles");
        for part in parts {
            drawn = drawn.with(&label(part), part.value);
        }
        trace.add(&drawn);
        draw_cycles(trace, &event.events, start, time);
    }
}

#[cfg(test)]
mod tests {
    use serde_json::Value;

    use super::*;

    fn event(
        name: &str,
        unit: &'static str,
        value: u64,
        events: Vec<ProfileEvent>,
    ) -> ProfileEvent {
        ProfileEvent { kind: 0, name: name.to_owned(), unit, value, events }
    }

    #[test]
    fn times_lie_in_each_other_and_nodes_share_the_innermost() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("t.json");
        let trace = Trace::create(&path, "p").unwrap();
        let nodes = vec![
            event("conv", "cycles", 300, vec![event("DMA", "bytes", 64, Vec::new())]),
            event("add", "cycles", 100, Vec::new()),
        ];
        let record = ProfileRecord {
            context: "decode".to_owned(),
            graph: Some("g".to_owned()),
            events: vec![
                event("NPU", "us", 400, Vec::new()),
                event("host RPC", "us", 900, Vec::new()),
                event("impossible", "us", 5_000, Vec::new()),
                event("NPU cycles", "cycles", 400, nodes),
                event("HVX threads", "count", 4, Vec::new()),
            ],
        };
        record.write_to(&trace, Instant::now(), Duration::from_millis(1));
        trace.finish().unwrap();
        let events: Vec<Value> = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
        let find = |name: &str| events.iter().find(|e| e["name"] == name).unwrap();
        let at = |name: &str| {
            let number = |key: &str| find(name)[key].as_f64().unwrap();
            ((number("ts") - find("graphExecute")["ts"].as_f64().unwrap()).round(), number("dur"))
        };
        assert_eq!(at("graphExecute"), (0.0, 1000.0));
        assert_eq!(at("impossible"), (0.0, 1000.0));
        assert_eq!(at("host RPC"), (0.0, 900.0));
        assert_eq!(at("NPU"), (0.0, 400.0));
        assert_eq!(at("conv"), (0.0, 300.0));
        assert_eq!(at("add"), (300.0, 100.0));
        assert_eq!(find("graphExecute")["args"]["NPU cycles [cycles]"], 400);
        assert_eq!(find("graphExecute")["args"]["HVX threads"], 4);
        assert_eq!(find("impossible")["args"]["impossible [us]"], 5_000);
        assert_eq!(find("conv")["args"]["DMA [bytes]"], 64);
    }
}
