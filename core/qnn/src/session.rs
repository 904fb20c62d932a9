//! The open device of a backend with its power vote, opened again after the DSP restarted.
//!
//! Everything that was open when the DSP restarted belongs to a process on it that is gone: backend and device as much
//! as contexts. So the next contexts are opened on a device of their own. Models that have contexts on the old one keep
//! it until they notice.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use qhx_base::{ErrorKind, Result};

use super::device::Device;
use super::library::Library;
use super::log::LogLevel;
use super::power::{IdleWatch, PerfMode, Power};

/// Options for opening a device.
#[derive(Debug, Clone, Copy)]
pub(crate) struct SessionOptions {
    pub(crate) log: LogLevel,
    pub(crate) perf: PerfMode,
    /// The power vote is taken back when nothing ran for this long.
    pub(crate) idle_release: Option<Duration>,
}

/// Open device that contexts are opened on.
pub(crate) struct Session {
    /// Ends before the vote does.
    _idle: Option<IdleWatch>,
    /// The power vote.
    pub(crate) power: Arc<Power>,
    pub(crate) device: Device,
}

impl Session {
    fn open(library: &Library, options: SessionOptions) -> Result<Arc<Self>> {
        let device = Device::open(library, options.log, None)?;
        let power = Arc::new(Power::new(&device));
        if let Err(error) = power.set_mode(options.perf) {
            tracing::warn!(target: "qnn", error = %error.report(), "the power mode is left alone");
        }
        let idle = options.idle_release;
        let idle = idle.map(|after| IdleWatch::begin(&power, after)).transpose()?;
        Ok(Arc::new(Self { _idle: idle, power, device }))
    }
}

/// The session that contexts are opened on now.
pub(crate) struct Sessions {
    library: Library,
    state: Mutex<State>,
}

struct State {
    /// `None` after a device was lost and could not be opened again.
    current: Option<Arc<Session>>,
    options: SessionOptions,
    /// Number of times the device was opened again after a restart.
    restarts: u32,
}

impl Sessions {
    /// Opens the device.
    pub(crate) fn open(library: &Library, options: SessionOptions) -> Result<Self> {
        let current = Some(Session::open(library, options)?);
        let state = Mutex::new(State { current, options, restarts: 0 });
        Ok(Self { library: library.clone(), state })
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn library(&self) -> &Library {
        &self.library
    }

    /// The session, on a device opened again where the DSP restarted under the last one.
    pub(crate) fn current(&self) -> Result<Arc<Session>> {
        let mut state = self.lock();
        if let Some(session) = state.current.as_ref().filter(|session| !session.device.is_lost()) {
            return Ok(Arc::clone(session));
        }
        // First out, then in: the library may keep one of each.
        if let Some(lost) = state.current.take() {
            lost.device.close_contexts();
        }
        let session = Session::open(&self.library, state.options)
            .map_err(|error| error.with_kind(ErrorKind::DeviceLost))?;
        state.restarts = state.restarts.saturating_add(1);
        state.current = Some(Arc::clone(&session));
        Ok(session)
    }

    /// True if there is a power vote.
    pub(crate) fn votes(&self) -> bool {
        self.lock().current.as_ref().is_some_and(|session| session.power.votes())
    }

    /// The power vote and the restarts so far, for messages.
    pub(crate) fn conditions(&self) -> Vec<String> {
        let state = self.lock();
        let mode = state.options.perf.name();
        let vote = match state.current.as_ref().map(|session| &session.power) {
            None => "the device is lost".to_owned(),
            Some(power) if !power.votes() => "no vote for a power mode".to_owned(),
            Some(power) if power.released() => {
                format!("the vote for power mode {mode} is given back while idle")
            }
            Some(_) => format!("power mode {mode}"),
        };
        let lost = state.current.as_ref().is_some_and(|session| session.device.is_lost());
        let restarts = state.restarts.saturating_add(lost.into());
        let restarts = (restarts > 0).then(|| format!("restarts of the DSP: {restarts}"));
        std::iter::once(vote).chain(restarts).collect()
    }

    /// Votes for another power mode, now and on devices that are opened later.
    pub(crate) fn set_mode(&self, mode: PerfMode) -> Result<()> {
        let mut state = self.lock();
        state.options.perf = mode;
        state.current.as_ref().map_or(Ok(()), |session| session.power.set_mode(mode))
    }
}
