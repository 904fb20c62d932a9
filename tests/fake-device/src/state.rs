//! The plan, the counts, and what is alive.

use std::collections::{HashMap, HashSet};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread::ThreadId;
use std::time::Duration;

use qhx_qnn_sys::{Handle, STATUS_MEM_ALLOC, Status};

use crate::groups::Group;
use crate::memory::Memories;
use crate::{Chip, Plan, Report, Then};

/// Names of calls that a report lists.
const LISTED: usize = 100_000;

/// Kind of object behind a handle.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    Log,
    Backend,
    Device,
    Context,
    Graph,
    Profile,
    Platform,
    Power,
}

/// A thing with its address or number.
pub(crate) type Key = (Kind, usize);

pub(crate) fn key(kind: Kind, handle: Handle) -> Key {
    (kind, handle.addr())
}

#[derive(Debug, Default)]
struct Object {
    parent: Option<Key>,
    /// Bytes of a context's binary.
    bytes: u64,
    /// Status of every use after the DSP restarted under it.
    lost: Option<u16>,
    /// The thread in a call on it.
    user: Option<ThreadId>,
    /// The context whose spill-fill buffer this one uses, and bytes.
    group: Option<Group>,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    plan: Plan,
    pub report: Report,
    objects: HashMap<Key, Object>,
    freed: HashSet<Key>,
    pub memories: Memories,
}

static STATE: Mutex<Option<State>> = Mutex::new(None);

/// Works with the state. Nothing else does meanwhile: no call to the real library is made here.
pub(crate) fn with<T>(work: impl FnOnce(&mut State) -> T) -> T {
    let mut state: MutexGuard<'_, Option<State>> =
        STATE.lock().unwrap_or_else(PoisonError::into_inner);
    work(state.get_or_insert_with(State::default))
}

/// Effect of a successful call on handles.
pub(crate) enum Effect {
    None,
    /// It makes one of this kind out of the parent.
    Makes(Kind, Option<Key>, u64),
    /// It frees one.
    Frees(Key),
}

/// Hands a call on, or answers in its place. `real` returns the status and the handle made.
pub(crate) fn call(
    name: &str,
    uses: &[Key],
    effect: Effect,
    real: impl FnOnce() -> (Status, usize),
) -> Status {
    let frees = matches!(effect, Effect::Frees(_));
    let verdict = enter(name, uses, &effect);
    if let Err(code) = verdict
        && !frees
    {
        return code.into();
    }
    let (status, made) = real();
    with(|state| {
        if verdict.is_ok() {
            state.leave(uses);
        }
        match effect {
            Effect::Makes(kind, parent, bytes) if status == 0 => {
                state.make((kind, made), parent, bytes)
            }
            Effect::Frees(key) => state.free(key),
            _ => {}
        }
    });
    verdict.map_or_else(Status::from, |()| status)
}

/// Counts and checks a call. The error is the code that it returns instead.
fn enter(name: &str, uses: &[Key], effect: &Effect) -> Result<(), u16> {
    let frees = matches!(effect, Effect::Frees(_));
    let fate = with(|state| {
        let then = state.count(name);
        state.check_uses(name, uses);
        match then {
            Some(Then::Fail(code)) => state.refuse(name, code),
            Some(Then::Restart(code)) => {
                state.restart(code);
                state.refuse(name, code)
            }
            Some(Then::Hang) => {
                state.report.hanging += 1;
                Ok(then)
            }
            _ => {
                if let Effect::Makes(Kind::Context, _, bytes) = effect
                    && !state.fits(*bytes)
                {
                    return state.refuse(name, STATUS_MEM_ALLOC);
                }
                if let Some(code) = state.lost(uses)
                    && !frees
                {
                    return state.refuse(name, code);
                }
                Ok(then)
            }
        }
    });
    match fate? {
        Some(Then::DelayMs(time)) => std::thread::sleep(Duration::from_millis(time)),
        Some(Then::Hang) => {
            write_report();
            loop {
                std::thread::sleep(Duration::from_secs(1));
            }
        }
        _ => {}
    }
    with(|state| state.take(name, uses));
    Ok(())
}

/// Writes the report where the environment says.
pub(crate) fn write_report() {
    let Some(path) = std::env::var_os("QHX_FAKE_REPORT") else { return };
    let report = with(|state| state.report());
    if let Ok(text) = serde_json::to_vec(&report) {
        // Renamed, so that a reader finds all of it or nothing. Where it cannot be written, the
        // test that waits for it says so.
        let part = std::path::Path::new(&path).with_extension("part");
        let _ = std::fs::write(&part, text).and_then(|()| std::fs::rename(&part, &path));
    }
}

impl State {
    pub(crate) fn set(&mut self, plan: Plan) {
        self.plan = plan;
        self.report = Report::default();
    }

    pub(crate) fn report(&self) -> Report {
        let mut report = self.report.clone();
        for (kind, _) in self.objects.keys() {
            let name = format!("{kind:?}").to_lowercase();
            *report.alive.entry(name).or_default() += 1;
        }
        self.memories.describe(&mut report.alive);
        report
    }

    pub(crate) fn violation(&mut self, what: String) {
        self.report.violations.push(what);
    }

    pub(crate) fn registers(&self) -> bool {
        !self.plan.no_registered_memory
    }

    /// True if contexts may share a spill-fill buffer.
    pub(crate) fn groups(&self) -> bool {
        self.plan.spill_fill
    }

    /// The chip that the device is to be.
    pub(crate) fn chip(&self) -> Option<Chip> {
        self.plan.chip
    }

    /// Notes that a context, just made, has a spill-fill buffer or uses another one's.
    pub(crate) fn group(&mut self, context: usize, (first, bytes): Group) {
        let leads = first == 0;
        let first = if leads { context } else { first };
        self.report.spill_fill[usize::from(!leads)] += 1;
        let of_first = self.objects.get(&(Kind::Context, first)).and_then(|object| object.group);
        let fits = of_first.is_some_and(|(own, most)| own == first && most >= bytes);
        if !leads && !fits {
            self.violation(format!(
                "a context shares the spill-fill buffer of {first:#x}: {of_first:?}, not {bytes}"
            ));
        }
        if let Some(object) = self.objects.get_mut(&(Kind::Context, context)) {
            object.group = Some((first, bytes));
        }
    }

    fn count(&mut self, name: &str) -> Option<Then> {
        self.report.total += 1;
        let total = self.report.total;
        if self.report.order.len() < LISTED {
            self.report.order.push(name.to_owned());
        }
        let count = self.report.calls.entry(name.to_owned()).or_default();
        *count += 1;
        let fits = |rule: &&crate::Rule| {
            let number = match &rule.call {
                None => total,
                Some(call) if call == name => *count,
                Some(_) => return false,
            };
            (rule.nth..rule.nth.saturating_add(rule.times)).contains(&number)
        };
        self.plan.rules.iter().find(fits).map(|rule| rule.then)
    }

    fn refuse(&mut self, name: &str, code: u16) -> Result<Option<Then>, u16> {
        let number = self.report.calls.get(name).copied().unwrap_or_default();
        self.report.failed.push(format!("{name} {number}: {code}"));
        Err(code)
    }

    fn check_uses(&mut self, name: &str, uses: &[Key]) {
        for used in uses.iter().filter(|(_, handle)| *handle != 0) {
            if self.objects.contains_key(used) {
                continue;
            }
            let (kind, handle) = used;
            let why = if self.freed.contains(used) { "was freed" } else { "was never made" };
            self.violation(format!("{name}: {kind:?} {handle:#x} {why}"));
        }
    }

    /// Notes that this thread is in a call on the graphs and contexts among `uses`.
    fn take(&mut self, name: &str, uses: &[Key]) {
        let this = std::thread::current().id();
        for used in uses {
            let Some(object) = self.objects.get_mut(used) else { continue };
            let parent = object.parent;
            if matches!(used.0, Kind::Graph | Kind::Context)
                && let Some(other) = object.user.replace(this)
            {
                let (kind, handle) = used;
                self.violation(format!(
                    "{name}: {kind:?} {handle:#x} is used by {this:?} and by {other:?} at a time"
                ));
            }
            if let (Kind::Graph, Some(context)) = (used.0, parent) {
                self.alone_in_group(name, *used, context);
            }
        }
    }

    /// Checks that no graph of another context with the same spill-fill buffer executes.
    fn alone_in_group(&mut self, name: &str, graph: Key, context: Key) {
        let group = |key: &Key| self.objects.get(key)?.group.map(|(first, _)| first);
        let Some(first) = group(&context) else { return };
        let busy = |(key, object): (&Key, &Object)| {
            key.0 == Kind::Graph
                && *key != graph
                && object.user.is_some()
                && object.parent.is_some_and(|parent| group(&parent) == Some(first))
        };
        if self.objects.iter().any(busy) {
            self.violation(format!(
                "{name}: two graphs use the spill-fill buffer of {first:#x} at a time"
            ));
        }
    }

    fn leave(&mut self, uses: &[Key]) {
        for used in uses {
            if let Some(object) = self.objects.get_mut(used) {
                object.user = None;
            }
        }
    }

    /// True if a context of this number of bytes fits beside those that are open.
    fn fits(&self, bytes: u64) -> bool {
        let open = || self.objects.iter().filter(|((kind, _), _)| *kind == Kind::Context);
        let taken: u64 = open().map(|(_, object)| object.bytes).sum();
        self.plan.max_contexts.is_none_or(|most| open().count() < most)
            && self.plan.max_context_bytes.is_none_or(|most| taken.saturating_add(bytes) <= most)
    }

    /// The answer of a DSP that restarted, where one of `uses` is from before.
    fn lost(&self, uses: &[Key]) -> Option<u16> {
        uses.iter().find_map(|used| {
            let object = self.objects.get(used)?;
            let parent = object.parent.and_then(|parent| self.objects.get(&parent));
            object.lost.or(parent.and_then(|parent| parent.lost))
        })
    }

    fn restart(&mut self, code: u16) {
        for ((kind, _), object) in &mut self.objects {
            if matches!(kind, Kind::Backend | Kind::Device | Kind::Context) {
                object.lost = Some(code);
            }
        }
    }

    fn make(&mut self, key: Key, parent: Option<Key>, bytes: u64) {
        self.freed.remove(&key);
        // A graph that is retrieved twice is the same one.
        self.objects.entry(key).or_insert(Object { parent, bytes, ..Object::default() });
    }

    fn free(&mut self, key: Key) {
        self.objects.remove(&key);
        self.freed.insert(key);
        if key.0 == Kind::Context {
            let graphs: Vec<Key> = self
                .objects
                .iter()
                .filter(|(_, o)| o.parent == Some(key))
                .map(|(k, _)| *k)
                .collect();
            for graph in graphs.into_iter().filter(|(kind, _)| *kind == Kind::Graph) {
                self.objects.remove(&graph);
                self.freed.insert(graph);
            }
            self.memories.forget_context(key.1);
            let uses = |object: &Object| object.group.is_some_and(|(first, _)| first == key.1);
            if self.objects.values().any(uses) {
                self.violation(format!(
                    "the spill-fill buffer of {:#x} is freed while others use it",
                    key.1
                ));
            }
        }
        let inside = self.objects.iter().filter(|(_, o)| o.parent == Some(key)).count();
        if inside > 0 {
            self.violation(format!(
                "{:?} {:#x} is freed before {inside} made from it",
                key.0, key.1
            ));
        }
    }

    /// The context that a graph is of.
    pub(crate) fn context_of(&self, graph: Handle) -> usize {
        let parent = self.objects.get(&key(Kind::Graph, graph)).and_then(|graph| graph.parent);
        parent.map_or(0, |(_, context)| context)
    }
}
